"""A service for searches and plans whose answers are known: workers that answer from a function."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from foredraft.planning.confidence.comparison import ModelErrors
from foredraft.planning.plan import Plan
from foredraft.planning.slo import parse_slo
from foredraft.planning.trial import RunOutcome
from foredraft.planning.workers import Job

LIMIT = parse_slo("ttft_p99<100ms")
BALANCED = dict.fromkeys(("refused", "aborted", "failed", "unfinished"), 0)
BALANCED |= {"overloaded": False, "saturation": 0.5, "mean_ttft_ms": None}  # no times whose error is known


def trial(ttft_ms: float, **more: Any) -> RunOutcome:
    return RunOutcome("done", "", {**BALANCED, "p99_ttft_ms": ttft_ms, **more})


class Service:
    """Workers that answer from a function of the settings, in an order of their own."""

    count = 4

    def __init__(self, answer: Callable[[Mapping[str, Any]], RunOutcome]) -> None:
        self.answer = answer
        self.waiting: list[Job] = []
        self.runs: list[Mapping[str, Any]] = []

    def submit(self, job: Job) -> None:
        self.waiting.append(job)

    def next_ended(self) -> tuple[Job, RunOutcome]:
        job = self.waiting.pop(len(self.runs) % len(self.waiting))
        self.runs.append(job.settings)
        return job, self.answer(job.settings)

    def close(self) -> None:
        pass


def noise(seed: int | str) -> float:
    return random.Random(seed).gauss(0, 1)


def compare_within(whole: Plan, half_width: float) -> None:
    """Give the plan's comparisons this error of the ratio of two candidates' times."""
    whole.errors = ModelErrors(whole.scenario, whole.question.objectives)
    whole.errors._of_times = lambda best, item: half_width
