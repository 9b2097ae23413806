"""The search of the load that nearly all runs hold, by the greatest load of each run."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..slo import Objective
from ..trial import RunOutcome
from .bounds import SHARE, Level, differences
from .intervals import Estimate
from .judge import MOST_EXCESS, LoadJudge, Search, SearchFinding, Wanted
from .loads import tidy
from .own_loads import REACH, bounded, own_loads

MOVES = 8
"""Loads at which the stated one is confirmed, at most: runs that hold at no load end there."""


@dataclass(frozen=True, slots=True)
class BestCandidate:
    """The best candidate, with which the others are compared seed by seed: its finding of the second round, and that of
    the third, which has a level."""

    half: SearchFinding
    held: SearchFinding
    level: Level

    def starts(self, found: SearchFinding, seeds: Sequence[int]) -> dict[int, float]:
        """Return the logarithm of the load at which each seed of another candidate runs first: about its own greatest
        load, by that of the best, or the load to be stated if the two are near each other.

        `found`: the other candidate's finding of the second round.
        """
        apart = float(np.mean(differences(found.crossings, self.half.crossings)))
        stated = self.level.bound + apart
        own = {seed: self.held.crossings[seed] + apart for seed in seeds}
        return {seed: log if abs(log - stated) > REACH else stated for seed, log in own.items()}

    def level_of(self, crossings: Mapping[int, float]) -> Level:
        """Return the level of another candidate by the greatest loads of a few seeds."""
        return self.level.behind(crossings, self.held.crossings)


def held_load(
    settings: Mapping[str, Any],
    key: str,
    found: SearchFinding,
    objectives: tuple[Objective, ...],
    seeds: Sequence[int],
    tolerance: float,
    sized: Callable[[float], Mapping[str, Any]],
    fewest: int,
    reference: BestCandidate | None = None,
) -> Search:
    """Search the load that SHARE of runs hold, with a tolerance bound over the greatest loads of the seeds.

    `found`: the load that half of the runs hold, with the slope there. The best candidate takes `fewest` of the seeds,
    and more of them, up to all, while the bound gives more than `tolerance` away. Another candidate is compared with
    the best one, its `reference`.
    """
    judge = LoadJudge(settings, key, objectives, seeds, sized)
    count, level_of = min(fewest, len(seeds)), Level.of if reference is None else reference.level_of
    slope = bounded((reference.half if reference else found).slope)  # one for all, so that what it errs by cancels
    starts = dict.fromkeys(seeds, math.log(found.value) - tolerance)
    if reference is not None:
        starts = reference.starts(found, seeds)
    crossings = dict[int, float]()
    while True:
        new = {seed: starts[seed] for seed in seeds[:count] if seed not in crossings}
        crossings |= yield from own_loads(judge, new, slope)
        level = level_of(crossings)
        if level.given_away <= tolerance or count == len(seeds):
            break
        count = min(2 * count, len(seeds))
    allowed = int(count * (1 - SHARE)) if reference is None else count  # few seeds tell no share
    bound, at = yield from _confirmed(judge, level.bound, seeds[:count], allowed, slope, tolerance)
    level, value = replace(level, below=max(level.below, level.mean - bound)), tidy(math.exp(bound))
    half = math.exp(level.mean)
    interval = Estimate(half, half * level.spread.half_width(level.count))
    result = judge.finding(value, at, found.curve, slope=slope, crossings=crossings, interval=interval, level=level)
    return replace(result, excess=result.excess * (value / at) ** slope)


def _confirmed(
    judge: LoadJudge, bound: float, seeds: Sequence[int], allowed: int, slope: float, tolerance: float
) -> Generator[Wanted, list[RunOutcome], tuple[float, float]]:
    """Lower the logarithm of a load until at most `allowed` of the runs there break the limits. Return it, and the load
    of the last runs, which is about within the tolerance.

    Where runs of one seed at neighbouring loads differ by chance, its greatest load is the luckiest of several runs.
    """
    for _ in range(MOVES):
        ran = [load for load in judge.values_of(seeds[0]) if all((load, seed) in judge.summaries for seed in seeds)]
        at = min(ran, key=lambda load: abs(math.log(load) - bound), default=math.inf)
        if abs(math.log(at) - bound) > tolerance:
            at = tidy(math.exp(bound))
            yield from judge.run([at], seeds)
        if allowed >= len(seeds):
            return bound, at
        over = sorted(judge.log_excess(at, seed) for seed in seeds)[-1 - allowed]
        is_told = over < math.log(MOST_EXCESS)
        limit = math.log(at) - (over / slope if is_told else REACH)
        if bound <= limit:
            return bound, at
        bound = limit
    return bound, at
