"""How long a plan still takes, by the runs that it has made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ...core.errors import count_of
from ..trial import RunOutcome
from ..workers import Job, JobWorkers

ROUNDS = ("first", "second", "third")
RUNS_PER_SEARCH: Mapping[str, float] = {"first": 6.0, "second": 9.0, "third": 8.0}
"""Runs that a search of a round takes about, while none has ended."""
LONGER: Mapping[str, float] = {"first": 1.0, "second": 4.0, "third": 1.0}
"""How many times as long a run takes as one of the round before, while none has ended."""
KEPT = 0.6
"""The share of candidates that the first round keeps, about, while it runs."""


@dataclass
class SearchPace:
    """The searches and runs of each round of a plan so far.

    `searches`: those that a round has, `ended`: those that have ended, `runs` and `wall_s`: their runs and the seconds
    that these took.
    """

    searches: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    runs: Counter[str] = field(default_factory=Counter)
    wall_s: dict[str, float] = field(default_factory=dict)
    rounds: Sequence[str] = ROUNDS
    round: str = ROUNDS[0]

    def begin(self, name: str, searches: int) -> None:
        """Count searches that begin in a round."""
        self.round = name
        self.searches[name] += searches

    def note(self, trial: RunOutcome) -> None:
        """Count a run that has ended."""
        self.runs[self.round] += 1
        self.wall_s[self.round] = self.wall_s.get(self.round, 0.0) + trial.wall_s

    def left_s(self, at_once: int) -> float | None:
        """Return about how many seconds are left, with so many runs at a time; None before the first run has ended."""
        if not self.runs:
            return None
        total, searches, per_run_s = 0.0, 0.0, 0.0
        for name in self.rounds:
            searches = self.searches[name] or searches * KEPT
            runs = self.runs[name]
            per_run_s = self.wall_s[name] / runs if runs else per_run_s * LONGER[name]
            is_past = self.rounds.index(name) < self.rounds.index(self.round)
            if is_past or 0 < searches <= self.ended[name]:
                continue
            # Searches that run are taken to be half done; at the beginning that says little.
            each = max(runs / (self.ended[name] + 0.5 * (searches - self.ended[name])), 1.0)
            if not self.ended[name]:
                each = max(each, RUNS_PER_SEARCH[name])
            total += max(searches * each - runs, searches - self.ended[name]) * per_run_s
        return total / at_once

    def in_words(self, at_once: int) -> str | None:
        """Return how far the search is, and about how long it still takes; None before the first run has ended."""
        left_s = self.left_s(at_once)
        if left_s is None:
            return None
        left = f"about {left_s / 60:.0f} min" if left_s >= 90 else f"about {max(left_s, 1):.0f} s"
        done = f"{self.ended[self.round]} of {count_of(self.searches[self.round], 'candidate')}"
        return f"{self.round} round, {done}, {count_of(sum(self.runs.values()), 'run')}, {left} left"


class WatchedWorkers:
    """Workers that tell of each run that has ended."""

    def __init__(self, workers: JobWorkers, on_run: Callable[[RunOutcome], None]) -> None:
        self.count: int = workers.count
        self._workers = workers
        self._on_run = on_run

    def submit(self, job: Job) -> None:
        """See `Workers.submit`."""
        self._workers.submit(job)

    def next_ended(self) -> tuple[Job, RunOutcome]:
        """See `Workers.next_ended`."""
        job, trial = self._workers.next_ended()
        self._on_run(trial)
        return job, trial

    def close(self) -> None:
        """See `Workers.close`."""
        self._workers.close()
