"""The search of the load that nearly all runs hold, around the load that half of them hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..confidence.bounds import Level, Spread
from ..confidence.intervals import Estimate
from ..slo import Objective
from .judge import Finding, Judge, Search
from .loads import crossing, tidy

FEWEST = 16
"""Seeds of the best candidate, at least."""
MOVES = 8
"""Loads that are tried at most."""
APART = 0.03
"""The least difference of the logarithms of two loads that tell a slope."""
STEEPER = 8.0
"""The slope between the loads of the search is at most so many times that at the limit, and at least its inverse."""
NEAR = 0.5
"""Of the tolerance: a bound so near the load whose runs say it needs no runs at another load. So does one that is
nearer than half of its own error."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The best candidate, with which the others are compared seed by seed: its finding, its level, and the spread of
    the differences."""

    finding: Finding
    level: Level
    differences: Spread

    def level_of(self, crossings: Mapping[int, float]) -> Level:
        """Return the level of another candidate by its greatest loads of a few seeds."""
        return self.level.behind(crossings, self.finding.crossings, self.differences)


def held_load(
    settings: Mapping[str, Any],
    key: str,
    found: Finding,
    objectives: tuple[Objective, ...],
    seeds: Sequence[int],
    tolerance: float,
    sized: Callable[[float], Mapping[str, Any]],
    level_of: Callable[[Mapping[int, float]], Level],
    fewest: int = FEWEST,
) -> Search:
    """Search the load that SHARE of runs hold, with a tolerance bound over seeds.

    `found`: the load that half of the runs hold, with the slope there. `level_of`: returns what single runs hold, by
    the greatest loads of some seeds. Runs `fewest` seeds at the load where the bound is by the runs so far. If the
    bound by these runs is near this load, but gives more than `tolerance` away, runs more seeds, up to all. If it is
    not near, moves there.
    """
    judge = Judge(settings, key, objectives, seeds, sized)
    slope, level, count = found.slope, level_of(found.crossings), min(fewest, len(seeds))
    next_log, before = level.bound, math.nan
    is_near = False
    for _ in range(MOVES):
        load = tidy(math.exp(next_log))
        while True:
            yield from judge.run([load], seeds[:count])
            slope = _slope(judge, before, load, slope, found.slope)
            crossings = {seed: crossing(load, judge.log_excess(load, seed), slope) for seed in seeds[:count]}
            level = level_of(crossings)
            is_near = abs(level.bound - math.log(load)) <= max(NEAR * tolerance, level.error_of_bound / 2)
            if not is_near or level.given_away <= tolerance or count == len(seeds):
                break
            count = min(2 * count, len(seeds))
        if is_near:
            break
        next_log, before = level.bound, load
    # A bound far from the loads that have run rests on a slope alone: it does not raise the stated load.
    value = math.exp(level.bound if is_near else min(level.bound, math.log(load)))
    taken = math.exp(slope * (math.log(value) - level.mean))
    interval = Estimate(found.value, found.value * level.spread.half_width(len(found.crossings)))
    more = {"curve": found.curve, "slope": slope, "crossings": crossings, "interval": interval, "level": level}
    return judge.finding(value, load, **more, excess=taken)


def _slope(judge: Judge, before: float, load: float, now: float, at_limit: float) -> float:
    """Return the slope between two loads that have run, by the seeds of both; `now` where they do not tell it.

    Far below the limit of a mean run the excess often rises less than there.
    """
    common = [seed for seed in judge.seeds if (before, seed) in judge.summaries and (load, seed) in judge.summaries]
    if not common or abs(math.log(load / before)) < APART:
        return now
    rises = [judge.log_excess(load, seed) - judge.log_excess(before, seed) for seed in common]
    slope = sum(rises) / len(rises) / math.log(load / before)
    return min(max(slope, at_limit / STEEPER), at_limit * STEEPER)
