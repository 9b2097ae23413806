"""The search of the greatest load that a run of each seed holds, for many seeds at once."""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Mapping

from ..trial import RunOutcome
from .judge import MOST_EXCESS, LoadJudge, Wanted
from .loads import tidy

REACH = 0.06
"""A seed's greatest load is known if a run at a load so little below it holds, as a logarithm."""
TOLD = 1.0
"""The logarithm of a share of the limit: a first run that holds, and takes more of it than 1 / e, tells by the slope
where the limit is met. So only the seeds whose first run breaks the limit are searched."""
MOST_RUNS = 10
"""Runs of a seed, at most."""
MOST_STEP = math.log(1.5)
"""From the loads that have run to the next one, as a logarithm."""
FLATTEST, STEEPEST = 0.25, 4.0
"""Bounds of a slope by which a greatest load is estimated. A cliff is steeper, and a slope does not tell its place."""


def bounded(slope: float) -> float:
    """Return a slope within these bounds."""
    return min(max(slope, FLATTEST), STEEPEST)


def own_loads(
    judge: LoadJudge, starts: Mapping[int, float], slope: float, compared: Collection[int]
) -> Generator[Wanted, list[RunOutcome], dict[int, float]]:
    """Search the logarithm of the greatest load that a run of each seed holds.

    `starts`: the logarithm of the first load of each seed. `slope`: how much the logarithm of the excess rises about
    per logarithm of the load (`bounded`). A seed with one run has its limit where a line of this slope meets it, and
    one with runs on both sides where the line through them does. It runs just below this place, until a run so near
    has held. A seed whose first run holds is not searched (`TOLD`), but for those `compared` with other candidates.
    """
    next_logs, found = dict(starts), dict[int, float]()
    for _ in range(MOST_RUNS):
        yield from judge.run_each([(tidy(math.exp(log)), seed) for seed, log in next_logs.items()])
        for seed in tuple(next_logs):
            tried = {math.log(load): judge.log_excess(load, seed) for load in judge.values_of(seed)}
            low, found[seed] = _limit(tried, slope)
            is_first_told = seed not in compared and len(tried) == 1 and -TOLD < tried.get(low, math.inf) <= 0
            if found[seed] - low <= REACH or is_first_told:
                del next_logs[seed]
            else:
                next_logs[seed] = max(found[seed] - REACH / 2, (low + found[seed]) / 2)
        if not next_logs:
            break
    return found


def _limit(tried: Mapping[float, float], slope: float) -> tuple[float, float]:
    """Return the greatest load that has held, minus infinity if none has, and about where the limit is met.

    `tried`: logarithms of excesses by logarithms of loads.
    """
    low = max((log for log, excess in tried.items() if excess <= 0), default=-math.inf)
    high = min((log for log, excess in tried.items() if excess > 0 and log > low), default=math.inf)
    if math.isinf(low) or math.isinf(high):
        last = high if math.isinf(low) else low
        return low, last + min(max(-tried[last] / slope, -MOST_STEP), MOST_STEP)
    excesses = tried[low], tried[high]
    if max(map(abs, excesses)) >= math.log(MOST_EXCESS):  # clipped: no line goes through them
        return low, (low + high) / 2
    return low, low + (high - low) * excesses[0] / (excesses[0] - excesses[1])
