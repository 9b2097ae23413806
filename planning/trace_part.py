"""The part of a trace that the runs of a plan take, and sentences about it for the user."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.errors import ConfigError, count_of
from ..sim.scenario import Scenario
from ..sim.workload.trace_files import TraceRows
from ..sim.workload.traces import TraceSource

LEAST_REQUESTS = 20
"""A plan of a shorter trace is refused: its load and its percentiles are those of single requests."""
SAME_RATE = 0.05
"""The rate of a part is told beside the whole trace's if they differ by more than this share."""
BUSIER = 1.1
"""Another stretch of a trace is named if it has so many times the requests per second of the part that is taken."""


@dataclass(frozen=True)
class TracePart:
    """The requests of a trace that runs may take, between `workload.start_s` and `workload.stop_s`, of which they take
    the first `count`."""

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
        rows = TraceSource(table.trace, table.format, start_s=table.start_s, stop_s=table.stop_s).read_window()
        if not rows.lines:
            message = f"{table.trace} has no request between workload.start_s and workload.stop_s"
            raise ConfigError.of("workload", "trace", message)
        return cls(scenario, rows, min(requests or table.num_requests or len(rows.lines), len(rows.lines)))

    @property
    def rate(self) -> float:
        """Requests per second of the part; infinite if all come at one time."""
        span_s = float(self.rows.times_ns[self.count - 1] - self.rows.times_ns[0]) / 1e9
        return (self.count - 1) / span_s if span_s else math.inf

    def notices(self, contexts: Iterable[tuple[str, int]]) -> list[str]:
        """Return what a user should know before deployments are searched that have these models and context lengths.

        Raises ConfigError for a trace of less than `LEAST_REQUESTS`, and if no request of the part has room in any of
        these contexts.
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
        return [*(sentence for _, sentence in found if sentence), *self.first_only()]

    def _too_long(self, model: str, context: int) -> tuple[bool, str]:
        """Return whether no request has room in a context, and a sentence about the requests that have none; an empty
        text if each request has room."""
        prompts, outputs = self.rows.prompt_lens[: self.count], self.rows.output_lens[: self.count]
        refused = prompts >= context
        if not refused.any():
            return False, ""
        longest = int(np.argmax(prompts))
        trace, number = self.scenario.workload.trace, int(refused.sum())
        where = f"in {number:,} of {self.count:,} requests" if number < self.count else "in every request"
        text = (
            f"{trace}: the prompt fills the context of {model} ({context:,} tokens) {where}; the longest has "
            f"{prompts[longest]:,} tokens (line {self.rows.lines[longest]})"
        )
        if number == self.count:
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
        arrivals_s = usual_s + self.rows.times_ns[: self.count] / 1e9
        settings: dict[str, Any] = {"workload.num_requests": count}
        if len(arrivals_s) > count:
            start_s = arrivals_s[int(np.argmin(_spans(arrivals_s, count)))]
            start_s = math.floor(start_s * 1e6) / 1e6  # so that no rounding passes over the first
            settings["workload.start_s"] = max(start_s, usual_s)
        return settings

    def first_only(self) -> list[str]:
        """Return a sentence if runs take only the first requests, with the rate of the whole trace if that is another,
        and with the busiest stretch of as many if that lies elsewhere."""
        times_s, count = self.rows.times_ns / 1e9, self.count
        if count == len(times_s):
            return []
        text = f"The runs take the first {count:,} of the {len(times_s):,} requests of the trace"
        spans = _spans(times_s, count)
        whole_s, busiest = float(times_s[-1] - times_s[0]), int(np.argmin(spans))
        is_busiest = spans[busiest] <= 0 or spans[0] <= BUSIER * spans[busiest]
        # The rate of the part to that of the whole trace, by the gaps between arrivals.
        relative = (count - 1) / spans[0] / (len(times_s) - 1) * whole_s if spans[0] > 0 else 1.0
        is_as_whole = count < 2 or abs(relative - 1) <= SAME_RATE
        if is_busiest and is_as_whole:
            return [f"{text}."]
        text += f", {count / spans[0]:.3g} per second"
        if not is_as_whole:
            whole = len(times_s) / whole_s
            text += f"; the whole trace has {whole:.3g}, so 1 × the trace is {relative:.2g} × its mean rate here"
        if is_busiest:
            return [f"{text}."]
        start_s = math.floor(self.scenario.workload.start_s + times_s[busiest])
        return [
            f"{text}. The busiest {count:,} begin at {start_s} s, {count / spans[busiest]:.3g} per second: "
            f"--set workload.start_s={start_s} takes them."
        ]

    def qualifications(self, scale: float | None) -> list[str]:
        """Return what an answer about this part says of it. `scale`: the given speed of its replay; None if the plan
        searches the greatest."""
        if scale is None or scale == 1:
            return self.first_only()
        bursts = "shorter" if scale > 1 else "longer"
        speed = (
            f"{scale:g} × the trace replays it {scale:g} times as fast, so its bursts are {bursts}, too; `foredraft trace "
            "--out` makes a workload whose bursts keep their length."
        )
        return [*self.first_only(), speed]


def _spans(times_s: np.ndarray, count: int) -> np.ndarray:
    """Return how long each stretch of `count` requests lasts, float64 by its first request."""
    spans: np.ndarray = times_s[count - 1 :] - times_s[: len(times_s) - count + 1]
    return spans
