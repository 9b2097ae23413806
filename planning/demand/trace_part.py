"""The part of a trace that the runs of a plan take, and sentences about it for the user."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.errors import ConfigError, count_of
from ...sim.scenario import Scenario
from ...sim.workload.trace_files import TraceRows
from ...sim.workload.traces import TraceSource

WINDOWS = 30
"""A run of a plan consists of so many windows of a trace, unless they would be shorter than LEAST_WINDOW_S."""
LEAST_REQUESTS = 20
"""A plan of a shorter trace is refused: its load and its percentiles are those of single requests."""
FEW = 100
"""With fewer requests a percentile of 99 is the maximum."""
LEAST_WINDOW_S = 60.0
"""A window is at least so long, because it keeps only bursts that are shorter than itself."""


@dataclass(frozen=True)
class TracePart:
    """The requests of a trace between `workload.start_s` and `workload.stop_s`. A run replays all of them. If it takes
    `count` of more, or the scenario has `workload.resample_s`, its seed draws windows with replacement."""

    scenario: Scenario
    rows: TraceRows
    count: int

    @classmethod
    def of(cls, scenario: Scenario, requests: int | None) -> TracePart | None:
        """Return the part that runs of `requests` requests take; None for a scenario without a trace.

        `requests` None: as many as the scenario says, or all. Raises TraceError, or ConfigError for a trace that cannot
        be read or has no request between the two times.
        """
        table = scenario.workload
        if table.trace is None:
            return None
        rows = TraceSource(table.trace, table.trace_options, start_s=table.start_s, stop_s=table.stop_s).read_window()
        if not rows.lines:
            message = f"{table.trace} has no request between workload.start_s and workload.stop_s"
            raise ConfigError.of("workload", "trace", message)
        return cls(scenario, rows, min(requests or table.num_requests or len(rows.lines), len(rows.lines)))

    def notices(self, contexts: Iterable[tuple[str, int]]) -> list[str]:
        """Return what a user should know before deployments are searched that have these models and context lengths.

        Raises ConfigError for a trace of less than `LEAST_REQUESTS` or without a rate, and if no request of the part
        has room in any of these contexts.
        """
        if len(self.rows.lines) < LEAST_REQUESTS:
            message = (
                f"{self.scenario.workload.trace} has {count_of(len(self.rows.lines), 'request')}, too few for a load and a "
                f"percentile; expected at least {LEAST_REQUESTS}"
            )
            raise ConfigError.of("workload", "trace", message)
        found = [self._too_long(name, context) for name, context in contexts]
        if found and all(is_all for is_all, _ in found):
            raise ConfigError.of("workload", "trace", found[0][1])
        trace, number = self.scenario.workload.trace, len(self.rows.lines)
        if not int(self.rows.times_ns[-1]):
            message = (
                f"{trace}: {number:,} requests at one moment have no rate to plan for; expected arrivals over time"
            )
            raise ConfigError.of("workload", "trace", message)
        few = f"{trace} has only {count_of(number, 'request')}: a load found with so few says little."
        return [*(sentence for _, sentence in found if sentence), *([few] if number < FEW else [])]

    def _too_long(self, model: str, context: int) -> tuple[bool, str]:
        """Return whether no request has room in a context, and a sentence about the requests that have none; an empty
        text if each request has room."""
        prompts, outputs, count = self.rows.prompt_lens, self.rows.output_lens, len(self.rows.lines)
        refused = prompts >= context
        if not refused.any():
            return False, ""
        longest = int(np.argmax(prompts))
        trace, number = self.scenario.workload.trace, int(refused.sum())
        where = f"in {number:,} of {count:,} requests" if number < count else "in every request"
        text = (
            f"{trace}: the prompt fills the context of {model} ({context:,} tokens) {where}; the longest has "
            f"{prompts[longest]:,} tokens (line {self.rows.lines[longest]})"
        )
        if number == count:
            return True, f"{text}; expected prompts below the context"
        cut = int((prompts + outputs > context).sum()) - number
        more = f" In {cut:,} more the context ends the output early." if cut else ""
        return False, (
            f"{text}. Such requests are refused, and no load holds at which requests are refused: take them out of the "
            f"trace.{more}"
        )

    def busiest(self, count: int) -> dict[str, Any]:
        """Return the settings of a run of so many requests: those that arrived in the least time, because the limits
        are exceeded there first."""
        usual_s = self.scenario.workload.start_s
        arrivals_s = usual_s + self.rows.times_ns / 1e9
        settings: dict[str, Any] = {"workload.num_requests": count}
        if len(arrivals_s) > count:
            start_s = arrivals_s[int(np.argmin(_spans(arrivals_s, count)))]
            start_s = math.floor(start_s * 1e6) / 1e6  # so that no rounding passes over the first
            settings["workload.start_s"] = max(start_s, usual_s)
        return settings

    @property
    def span_s(self) -> float:
        """Seconds that the part lasts."""
        table = self.scenario.workload
        last_s = (int(self.rows.times_ns[-1]) + 1) / 1e9
        return last_s if table.stop_s is None else table.stop_s - table.start_s

    @property
    def window_s(self) -> float | None:
        """Seconds of each window of a run; None if a run replays the trace as it is."""
        given = self.scenario.workload.resample_s
        if given is None and self.count == len(self.rows.lines):
            return None
        run_s = self.span_s * self.count / len(self.rows.lines)
        return given or min(max(round(run_s / WINDOWS, 3), LEAST_WINDOW_S), max(round(self.span_s, 3), 1e-3))

    def of_a_run(self) -> str:
        """Say what a run takes of the trace, and at which rate."""
        number, total = self.count, len(self.rows.lines)
        share = f"all {total:,}" if number == total else f"{number:,} of the {total:,}"
        rate = total / self.span_s
        if self.window_s is None:
            return (
                f"Every run replays the trace as it is, at 1 × the trace {rate:.3g} requests/s on average. Other days have "
                "other bursts: with workload.resample_s each run draws windows of so many seconds from the trace."
            )
        return (
            f"A run has as many requests as {share} of the trace, in windows of {self.window_s:g} s that its seed draws "
            f"from the trace with replacement (workload.resample_s); at 1 × the trace {rate:.3g} requests/s on average."
        )

    def warnings(self, scale: float | None) -> list[str]:
        """Return what a user should know of the speed of the replay. `scale`: the given one; None if the plan searches
        the greatest."""
        if scale is None or scale == 1:
            return []
        bursts = "shorter" if scale > 1 else "longer"
        return [
            f"{scale:g} × the trace replays it {scale:g} times as fast, so its bursts are {bursts}, too; `foredraft trace "
            "--out` makes a workload whose bursts keep their length."
        ]


def _spans(times_s: np.ndarray, count: int) -> np.ndarray:
    """Return how long each stretch of `count` requests lasts, float64 by its first request."""
    spans: np.ndarray = times_s[count - 1 :] - times_s[: len(times_s) - count + 1]
    return spans
