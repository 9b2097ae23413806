"""A plan for a page's scenario: its progress, and its answer as plain data."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from ..core.errors import ConfigError
from ..planning.answer import answer_of, limit_of
from ..planning.candidates import base_tables, make_candidates
from ..planning.confidence.ranking import rank_candidates
from ..planning.grid import parse_grid
from ..planning.plan import Plan, Question
from ..planning.slo import parse_slo
from ..planning.trial import Trial
from ..planning.workers import Job, LocalWorkers
from ..sim.scenario import Scenario

Tell = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Asked:
    """What the page asks of a plan, as `foredraft plan` has it; None: the default."""

    slo: str
    rate: float | None
    gpus: int | None
    tried: Sequence[str]
    requests: int
    seeds: int

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Asked:
        """Return what the page has sent. Raises ConfigError for values of another kind or out of their range."""

        def number(name: str, kind: type, least: float, most: float, default: float | None = None) -> Any:
            value = given.get(name, default)
            if value is None and default is None:
                return None
            if isinstance(value, bool) or not isinstance(value, int | kind) or not least <= value <= most:
                raise ConfigError.of("<page>", name, f"expected a number from {least:g} to {most:g}, got {value!r}")
            return value

        slo, tried = given.get("slo"), given.get("tried", [])
        if not isinstance(slo, str) or not isinstance(tried, list) or not all(isinstance(one, str) for one in tried):
            raise ConfigError.of("<page>", "slo", "expected limits such as ttft_p99<1s,tpot_p99<50ms")
        return cls(
            slo,
            number("rate", float, 1e-6, 1e6),
            number("gpus", int, 1, 4096),
            tried,
            number("requests", int, 100, 100_000, 600),
            number("seeds", int, 2, 100, 4),
        )

    def words(self) -> list[str]:
        """Return the options of `foredraft plan` that say the same."""
        options = {"--slo": self.slo, "--rate": self.rate, "--gpus": self.gpus}
        options |= {"--requests": self.requests, "--seeds": self.seeds}
        words = [word for name, value in options.items() if value is not None for word in (name, str(value))]
        return words + [word for one in self.tried for word in ("--try", one)]


class _Counted:
    """Workers that tell how many runs have ended of those that are asked for so far."""

    def __init__(self, workers: LocalWorkers, tell: Callable[[int, int], None]) -> None:
        self.count: int = workers.count
        self._workers = workers
        self._tell = tell
        self._ended = self._asked = 0

    def submit(self, job: Job) -> None:
        """See `Workers.submit`."""
        self._asked += 1
        self._workers.submit(job)

    def next_ended(self) -> tuple[Job, Trial]:
        """See `Workers.next_ended`."""
        found = self._workers.next_ended()
        self._ended += 1
        self._tell(self._ended, self._asked)
        return found

    def close(self) -> None:
        self._workers.close()


def plan(scenario: Scenario, asked: Asked, tell: Tell) -> dict[str, Any]:
    """Search the candidates, and return the answer as `foredraft plan --json` prints it. Raises a ForedraftError."""
    objectives = parse_slo(asked.slo)
    if scenario.workload.concurrency is not None:
        message = "a closed loop has no request rate to plan for; give workload.rate or a trace"
        raise ConfigError.of("<page>", "workload.concurrency", message)
    seeds = range(scenario.seed, scenario.seed + asked.seeds)
    question = Question(objectives, asked.rate, asked.gpus, seeds, asked.requests, None)
    candidates = make_candidates(scenario, parse_grid(asked.tried, "--try"), asked.gpus)
    whole = Plan(scenario, candidates, question)
    state: dict[str, Any] = {"candidates": [one.name for one in candidates], "found": {}, "ended": 0, "asked": 0}

    def count(ended: int, asked_for: int) -> None:
        state.update(ended=ended, asked=asked_for)
        tell({"plan": state})

    with closing(_Counted(LocalWorkers(base_tables(scenario), os.cpu_count() or 1), count)) as workers:
        for which, index, found in whole.run(workers):
            state["found"][str(index)] = {"round": which, "value": found.value, "reason": found.reason}
            tell({"plan": state})
    ranked = rank_candidates(whole)
    sentences = list(limit_of(whole, ranked[0])) if ranked and ranked[0].holds else []
    return answer_of(whole, ranked, {}, sentences)
