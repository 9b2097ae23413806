"""Runs at values of one key, and whether the objectives hold there."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..slo import Objective, excess, shares
from ..trial import RunOutcome
from .bounds import Level, Spread, seeds_needed
from .intervals import Estimate

Wanted = list[dict[str, Any]]
Search = Generator[Wanted, list[RunOutcome], "SearchFinding"]

MOST_EXCESS = 4.0
"""The excess is clipped at this multiple of the limit, because a greater excess tells nothing more."""


def seed_counts(first: int, most: int) -> Iterator[int]:
    """Yield how many seeds to run next: `first`, then twice as many each time, up to `most`."""
    while first < most:
        yield first
        first *= 2
    yield most


class CannotRun(Exception):
    """A deployment that no run can have, with the reason."""


@dataclass(frozen=True, slots=True)
class SearchFinding:
    """The result of a search.

    Attributes:
        value: The load, or the number of engines; 0 if the objectives hold at none. After `greatest_load` half of the
            runs hold this load, after `held_load` and `least_count` nearly all (confidence/bounds.py).
        interval: The load that half of the runs hold, with the 95 % interval that the seeds leave; None for a number of
            engines, and where nothing holds.
        summary: That of a run at `value`, or at what came nearest.
        tightest: The objective that takes the most of its limit there.
        excess: How much of its limit it takes.
        reason: Why there is nothing, if the deployment cannot run.
        is_bound: The objectives held at every load that was tried: the greatest one is `value` or more.
        crossings: The logarithm of each seed's own greatest load.
        slope: How much the logarithm of the excess rises per logarithm of the load, at the limit.
        level: What single runs hold; None before `held_load`.
        at: The value whose runs the summary, the tightest objective and the excess are of.
        runs: The runs at it.
        held: Those of them that hold the objectives.
        needs_seeds: More seeds than these, whose runs would have to hold as well to show that SHARE of runs hold
            `value`; 0 where that is shown.
        curve: What is known of the shares of the limits: the mean logarithm of each objective's share, by the values
            that were tried. Infinite where a run was out of balance.
    """

    value: float
    interval: Estimate | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)
    tightest: Objective | None = None
    excess: float = math.nan
    reason: str = ""
    is_bound: bool = False
    curve: Mapping[float, Sequence[float]] = field(default_factory=dict)
    crossings: Mapping[int, float] = field(default_factory=dict)
    slope: float = math.nan
    at: float = math.nan
    runs: int = 0
    held: int = 0
    needs_seeds: int = 0
    level: Level | None = None

    @property
    def seeds(self) -> int:
        """The seeds that a result rests on; of a candidate that is compared with the best one, those of the best."""
        return self.level.spread.freedom + 1 if self.level is not None else len(self.crossings) or self.runs


@dataclass
class LoadJudge:
    """Runs at values of one key, with enough seeds to decide whether the objectives hold."""

    settings: Mapping[str, Any]
    key: str
    objectives: tuple[Objective, ...]
    seeds: Sequence[int]
    sized: Callable[[float], Mapping[str, Any]] = lambda value: {}  # settings that follow from the value
    summaries: dict[tuple[float, int], Mapping[str, Any]] = field(default_factory=dict)

    def is_held(self, value: float) -> Generator[Wanted, list[RunOutcome], bool]:
        """Decide whether SHARE of runs at `value` hold the objectives, by as few seeds as that takes.

        They do if a tolerance bound of the excess is below the limit (confidence/bounds.py); its spread is that of all
        values that have run. If the mean exceeds the limit, they do not. When no seeds are left and the bound is
        beyond the limit, a value at which a run breaks them is not held. One at which all runs hold them is:
        `needs_seeds` says how many would have to, if these are too few.
        """
        for count in seed_counts(2, len(self.seeds)):
            yield from self.run([value], self.seeds[:count])
            taken = [self.log_excess(value, seed) for seed in self.seeds[:count]]
            if np.mean(taken) > 0:
                return False
            level = Level(-float(np.mean(taken)), count, self.spread())
            if level.bound >= 0:
                return True
        return max(taken) <= 0

    def needs_seeds(self, value: float) -> int:
        """Return how many seeds would show that SHARE of runs hold at a value (`Finding.needs_seeds`)."""
        taken = [self.log_excess(value, seed) for seed in self._ran(value)]
        needed = seeds_needed(-float(np.mean(taken)), self.spread(), len(taken))
        return needed if needed > len(taken) else 0

    def _ran(self, value: float) -> list[int]:
        """Return the seeds that have run at a value."""
        return [seed for seed in self.seeds if (value, seed) in self.summaries]

    def run(self, values: Sequence[float], seeds: Sequence[int]) -> Generator[Wanted, list[RunOutcome], None]:
        """Make all missing runs at these values with these seeds, at the same time."""
        yield from self.run_each([(value, seed) for value in values for seed in seeds])

    def run_each(self, places: Sequence[tuple[float, int]]) -> Generator[Wanted, list[RunOutcome], None]:
        """Make all missing runs at these (value, seed), at the same time."""
        missing = [place for place in places if place not in self.summaries]
        if missing:
            trials = yield [
                {**self.settings, **self.sized(value), self.key: value, "seed": seed} for value, seed in missing
            ]
            for place, trial in zip(missing, trials, strict=True):
                if trial.status != "done":
                    raise CannotRun(trial.message)
                self.summaries[place] = trial.summary

    def values_of(self, seed: int) -> list[float]:
        """Return the values that a seed has run at."""
        return [value for value, one in self.summaries if one == seed]

    def mean_log_excess(self, value: float, seeds: Sequence[int]) -> float:
        """Return the mean of the logarithms of the excesses at a value that has run;
        infinite if a run is out of balance."""
        if any(math.isinf(self.share(value, seed)) for seed in seeds):
            return math.inf
        return float(np.mean([self.log_excess(value, seed) for seed in seeds]))

    def share(self, value: float, seed: int) -> float:
        """Return how much of its limit the tightest objective takes in a run."""
        return excess(self.objectives, self.summaries[value, seed])[0]

    def log_excess(self, value: float, seed: int) -> float:
        """Return the logarithm of that share, clipped."""
        share = self.share(value, seed)
        return math.log(min(max(share, 1 / MOST_EXCESS), MOST_EXCESS))

    def spread(self) -> Spread:
        """Return the spread of log excesses between seeds at one load, pooled over all loads with one that is not
        clipped."""
        excesses: dict[float, list[float]] = {}
        for value, seed in self.summaries:
            excesses.setdefault(value, []).append(self.log_excess(value, seed))
        return Spread.of(taken for taken in excesses.values() if min(map(abs, taken)) < math.log(MOST_EXCESS))

    def finding(
        self, value: float, at: float, curve: Mapping[float, Sequence[float]] | None = None, **more: Any
    ) -> SearchFinding:
        """Return the finding `value`, with the results of the runs at `at`.

        `curve`: that of another search, if the seeds of this one have no loads in common. `more`: other fields of the
        finding.
        """
        seeds = self._ran(at)
        logs = np.log(np.maximum([shares(self.objectives, self.summaries[at, seed]) for seed in seeds], 1e-9)).mean(0)
        summary = self.summaries[at, seeds[0]]
        is_finite = np.isfinite(logs).all()
        tightest = self.objectives[int(np.argmax(logs))] if is_finite else excess(self.objectives, summary)[1]
        taken = [self.share(at, seed) for seed in seeds]
        mean = math.inf if any(map(math.isinf, taken)) else float(np.exp(np.mean(np.log(taken))))
        curve = self.curve() if curve is None else curve
        held = sum(one <= 1 for one in taken)
        found = SearchFinding(value, None, summary, tightest, mean, curve=curve, at=at, runs=len(seeds), held=held)
        return replace(found, **more)

    def curve(self) -> dict[float, list[float]]:
        """Return the mean logarithm of the share that each objective takes, by value, over the seeds that every value
        has: so seeds do not make differences between values."""
        values = sorted({value for value, _ in self.summaries})
        common = [seed for seed in self.seeds if all((value, seed) in self.summaries for value in values)]
        found = {}
        for value in values:
            taken = [shares(self.objectives, self.summaries[value, seed]) for seed in common]
            logs = np.log(np.maximum(taken, 1e-9))
            found[value] = [float(mean) for mean in logs.mean(axis=0)]
        return found
