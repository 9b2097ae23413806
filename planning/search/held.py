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

BROKEN = 1
"""Runs of another candidate than the best one that may break the limits at its stated load."""
WORTH = 1 / 3
"""Of the tolerance: a stated load that more seeds would raise by less is not worth their runs."""
LEAST_MOVE = 0.01
"""By which a stated load is lowered at least, as a logarithm."""
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
    num_compared: int = 0,
) -> Search:
    """Search the load that SHARE of runs hold, with a tolerance bound over the greatest loads of the seeds.

    `found`: the load that half of the runs hold, with the slope there. The best candidate takes `fewest` of the seeds,
    and more of them, up to all, while all of them would raise the bound by more than WORTH tolerances. At the bound the
    half of them with the least greatest loads run. Another candidate is compared with the best one, its `reference`, by
    `num_compared` of the seeds; then `fewest` run at the load that this gives.
    """
    judge = LoadJudge(settings, key, objectives, seeds, sized)
    fewest = min(fewest, len(seeds))
    count, level_of = (fewest, Level.of) if reference is None else (num_compared, reference.level_of)
    slope = bounded((reference.half if reference else found).slope)  # one for all, so that what it errs by cancels
    starts = dict.fromkeys(seeds, math.log(found.value) - tolerance)
    if reference is not None:
        starts = reference.starts(found, seeds)
    crossings, compared = dict[int, float](), seeds[:num_compared]
    while True:
        new = {seed: starts[seed] for seed in seeds[:count] if seed not in crossings}
        crossings |= yield from own_loads(judge, new, slope, compared)
        level = level_of(crossings)
        if reference is not None or level.gain_with(len(seeds)) <= WORTH * tolerance:
            break
        count = min(2 * count, len(seeds))
    allowed = int(count * (1 - SHARE)) if reference is None else min(BROKEN, fewest - 1)
    riskiest = sorted(seeds[: max(count, fewest)], key=lambda seed: crossings.get(seed, 0.0))[: max(fewest, count // 2)]
    value = yield from _confirmed(judge, level.bound, riskiest, allowed, slope)
    level = replace(level, below=max(level.below, level.mean - math.log(value)))
    half = math.exp(level.mean)
    interval = Estimate(half, half * level.spread.half_width(level.count))
    return judge.finding(value, value, found.curve, slope=slope, crossings=crossings, interval=interval, level=level)


def _confirmed(
    judge: LoadJudge, bound: float, seeds: Sequence[int], allowed: int, slope: float
) -> Generator[Wanted, list[RunOutcome], float]:
    """Lower the logarithm of a load until at most `allowed` of the runs there break the limits. Return the load, at
    which all seeds have run.

    Where runs of one seed at neighbouring loads differ by chance, its greatest load is the luckiest of several runs.
    """
    at = tidy(math.exp(bound))
    for move in range(MOVES):
        over = math.inf
        for some in (seeds[: max(len(seeds) // 2, allowed + 1)], seeds):  # half of them may say that it is too much
            yield from judge.run([at], some)
            over = sorted(judge.log_excess(at, seed) for seed in some)[-1 - allowed]
            if over > 0:
                break
        if over <= 0 or move == MOVES - 1:
            break
        is_exact = over < math.log(MOST_EXCESS)
        at = tidy(math.exp(math.log(at) - max(over / slope if is_exact else REACH, LEAST_MOVE)))
    return at
