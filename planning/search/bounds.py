"""The load that nearly all runs hold: a lower bound for single runs, from the runs of a few seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

SHARE = 0.95
"""The share of runs that hold the stated load."""
LEAST_SHARE = 0.9
"""A share of runs that hold the stated load in nearly all plans: the number of seeds is chosen by it."""
CONFIDENCE = 0.85
"""The share of plans in which SHARE of the runs hold the stated load, or more of them, if what single runs hold is
normally distributed."""
CONFIDENCE_BY_COUNT = 0.9
"""The share of plans in which LEAST_SHARE of the runs hold it, whatever the distribution is."""


@cache
def tolerance_factor(count: float, freedom: float) -> float:
    """Return by how many standard deviations a bound lies beyond a mean so that SHARE of a normal distribution is on
    its safe side, with CONFIDENCE (Hahn and Meeker, Statistical Intervals: one-sided tolerance bounds).

    `count`: how many independent values have as sure a mean. `freedom`: degrees of freedom of the deviation.
    """
    from scipy.special import nctdtrit, ndtri

    root = math.sqrt(count)
    return float(nctdtrit(freedom, float(ndtri(SHARE)) * root, CONFIDENCE)) / root


@cache
def failures_allowed(count: int) -> int:
    """Return how many of `count` runs may break the limits so that LEAST_SHARE of all runs hold them, with
    CONFIDENCE_BY_COUNT; 0 if `count` is too small for that."""
    from scipy.special import bdtr

    allowed = 0
    while bdtr(allowed + 1, count, 1 - LEAST_SHARE) <= 1 - CONFIDENCE_BY_COUNT:
        allowed += 1
    return allowed


def seeds_needed(margin: float, spread: Spread, count: int) -> int:
    """Return how many seeds show with CONFIDENCE that SHARE of runs hold a load, if the runs of all of them do; `count`
    if so many are enough.

    `margin`: how far the mean of the logarithms of `count` runs is from the limit. A tolerance bound of a normal
    distribution needs the fewer seeds the greater it is beside their spread; without any distribution the number of
    runs that hold is enough from log(1 - CONFIDENCE) / log(SHARE) on.
    """
    by_number = math.ceil(math.log(1 - CONFIDENCE) / math.log(SHARE))
    for seeds in range(count, by_number):
        if spread.freedom and tolerance_factor(seeds, max(seeds - 1, spread.freedom)) * spread.deviation <= margin:
            return seeds
    return max(count, by_number)


def student(freedom: float, confidence: float = 0.95) -> float:
    """Return by how many standard errors a two-sided interval of Student's t lies on each side of a mean."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.5 + confidence / 2))


@dataclass(frozen=True, slots=True)
class Spread:
    """The standard deviation between runs of different seeds, pooled over several loads or candidates.

    `freedom` counts seeds, not runs: with one seed all loads and candidates see the same draws, so that their
    deviations are not independent.
    """

    deviation: float
    freedom: int

    @classmethod
    def of(cls, groups: Iterable[Sequence[float]]) -> Spread:
        """Return the spread of the values within each group. Groups of one value have none."""
        several = [np.asarray(values) for values in groups if len(values) > 1]
        total = sum(len(values) - 1 for values in several)
        squares = sum(float(((values - values.mean()) ** 2).sum()) for values in several)
        freedom = max((len(values) - 1 for values in several), default=0)
        return cls(math.sqrt(squares / total) if total else 0.0, freedom)

    def half_width(self, count: float) -> float:
        """Return half of the 95 % interval of a mean that is as sure as that of `count` values."""
        return student(self.freedom) * self.deviation / math.sqrt(count) if self.freedom else math.inf


@dataclass(frozen=True, slots=True)
class Level:
    """What single runs hold, as logarithms of loads: their mean, as sure as that of `count` runs, their spread, and how
    far below the mean a load is that enough of the runs hold."""

    mean: float
    count: float
    spread: Spread
    below: float = 0.0

    @classmethod
    def of(cls, own: Mapping[int, float]) -> Level:
        """Return the level of a candidate by each seed's own greatest load."""
        values = sorted(own.values())
        mean = float(np.mean(values))
        return cls(mean, len(values), Spread.of([values]), mean - values[failures_allowed(len(values))])

    @property
    def bound(self) -> float:
        """The load that SHARE of runs hold: the tolerance bound of a normal distribution, or less if more of the runs
        than `failures_allowed` break the limits there."""
        if not self.spread.freedom:
            return self.mean
        factor = tolerance_factor(self.count, self.spread.freedom)
        return self.mean - max(factor * self.spread.deviation, self.below)

    def gain_with(self, count: int) -> float:
        """Return how much higher the bound would be with `count` seeds, if the mean and the spread are right."""
        if count <= self.count:
            return 0.0
        return self.mean - tolerance_factor(count, count - 1) * self.spread.deviation - self.bound

    def behind(self, own: Mapping[int, float], reference: Mapping[int, float]) -> Level:
        """Return the level of another candidate, whose runs are compared with those of this one seed by seed.

        `own`: its greatest loads, of a few seeds. `reference`: those of this candidate. The difference between two
        candidates varies little, because both see the same draws. So a few seeds say as much as all seeds of this
        candidate and their difference.
        """
        apart = differences(own, reference)
        mean = self.mean + float(np.mean(apart))
        ratio = Spread.of([apart]).deviation / self.spread.deviation if self.spread.deviation else 0.0
        return Level(mean, 1 / (1 / self.count + ratio**2 / len(apart)), self.spread, self.below)


def differences(one: Mapping[int, float], other: Mapping[int, float]) -> list[float]:
    """Return the differences of two candidates' greatest loads, of the seeds that both have."""
    return [one[seed] - other[seed] for seed in one if seed in other]
