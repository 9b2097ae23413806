"""The search of the greatest load that half of the runs hold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..slo import Objective
from ..trial import RunOutcome
from .judge import MOST_EXCESS, LoadJudge, Search, Wanted

MOST_STEPS = 8  # from the first load to one on the other side of the limit
MOST_FACTOR = 4.0
SURE = 3.0  # standard errors from the limit at which an excess is taken for its side

JUST_BELOW = 0.25  # of the tolerance: a run there holds, and tells what the greatest load is like


def greatest_load(
    settings: Mapping[str, Any],
    key: str,
    start: float,
    objectives: tuple[Objective, ...],
    seeds: Sequence[int],
    tolerance: float,
    first_factor: float = 2.0,
    sized: Callable[[float], Mapping[str, Any]] = lambda load: {},
    within: tuple[float, float] = (0.0, math.inf),
    bracket_seeds: int = 2,
    at_once: int = 1,
) -> Search:
    """Search the greatest value of `key` (a rate, or the scale of a trace's) at which the objectives hold.

    Steps up or down from `start`, by `first_factor` and then by more, until one load holds and the next does not, by
    the mean excess of the first `bracket_seeds`. Then runs where a line through these two meets the limit, until it is
    known within `tolerance`. Each seed has its own greatest load, by its excess at the greatest load that has held and
    the slope there. The finding is their geometric mean: the load that half of the runs hold. The slope is taken
    between loads whose excesses differ from the limit by more than the spread of the seeds. If the curve is flat near
    its limit, these loads are far apart, and the greatest loads of the seeds differ much.

    `sized`: settings that follow from the load, such as how many requests a run has. `within`: the least and the
    greatest load that are tried; a result at either bound is precise enough for the caller. `at_once`: the loads that
    are run together.
    """
    judge, curve = LoadJudge(settings, key, objectives, seeds, sized), _Curve({})
    least, most = map(tidy, within)
    start, first = min(tidy(start), most), seeds[:bracket_seeds]

    def run(loads: Sequence[float]) -> Generator[Wanted, list[RunOutcome], tuple[float | None, float | None]]:
        yield from judge.run(loads, first)
        curve.excesses.update({load: judge.mean_log_excess(load, first) for load in loads})
        return curve.bracket()

    up, down = _ladder(start, first_factor, most), _ladder(start, 1 / first_factor, least)

    def widen(margin: float) -> Generator[Wanted, list[RunOutcome], None]:
        """Run lesser and greater loads until one on each side differs from the limit by more than `margin`."""
        for side, furthest, factor, bound in ((0, min, 1 / first_factor, least), (1, max, first_factor, most)):
            for load in itertools.islice(_ladder(furthest(curve.excesses), factor, bound), MOST_STEPS):
                if curve.bracket(margin)[side] is not None:
                    break
                yield from run([load])

    low, high = yield from run([start, *itertools.islice(up, at_once - 1)])
    for _ in range(MOST_STEPS):
        rungs = list(itertools.islice(up if high is None else down, at_once))
        if (low is not None and high is not None) or not rungs:
            break
        low, high = yield from run(curve.nearer(rungs, tolerance))
    if low is None:
        return judge.finding(0.0, min(curve.excesses))
    if high is None:
        return judge.finding(low, low, is_bound=True, needs_seeds=judge.needs_seeds(low))
    width = math.inf
    while high > least and not curve.is_known(low, high, tolerance):
        misleads = high / low > math.sqrt(width)  # the last step has taken less than half of the bracket
        width = high / low
        narrower = yield from run(curve.between(low, high, tolerance, at_once, even=misleads))
        assert narrower[0] is not None and narrower[1] is not None, "loads within a bracket leave one"
        low, high = narrower[0], narrower[1]
    yield from judge.run([low], seeds)
    margin = SURE * judge.spread().deviation / math.sqrt(len(first))
    yield from widen(margin)
    slope = curve.slope_around(low, high, margin)
    crossings = {seed: crossing(low, judge.log_excess(low, seed), slope) for seed in seeds}
    mean = math.exp(np.mean(list(crossings.values())))
    return judge.finding(mean, low, crossings=crossings, slope=slope)


def tidy(load: float) -> float:
    """Return a load with five digits."""
    return float(f"{load:.5g}")


def _ladder(start: float, factor: float, bound: float) -> Iterator[float]:
    """Yield loads from `start` to `bound`, each a greater step from the one before, by `factor` first."""
    load, log_factor = start, math.log(factor)
    while load < bound if factor > 1 else load > bound:
        load = tidy(load * math.exp(log_factor))
        load = min(load, bound) if factor > 1 else max(load, bound)
        yield load
        log_factor = math.copysign(min(2 * abs(log_factor), math.log(MOST_FACTOR)), log_factor)


@dataclass
class _Curve:
    """Logarithms of excesses by load, of the loads that were run; infinite where a run was out of balance."""

    excesses: dict[float, float]

    def bracket(self, margin: float = 0.0) -> tuple[float | None, float | None]:
        """Return the greatest load that holds, and the least one above it that does not, both by more than `margin`.

        None where no run has shown one.
        """
        low = max((load for load, excess in self.excesses.items() if excess <= -margin), default=None)
        above = (load for load, excess in self.excesses.items() if excess > margin and load > (low or 0.0))
        return low, min(above, default=None)

    def is_exact(self, *loads: float) -> bool:
        """Return whether none of the excesses at these loads is clipped, at MOST_EXCESS or at its inverse."""
        return all(abs(self.excesses[load]) < math.log(MOST_EXCESS) for load in loads)

    def slope(self, low: float, high: float) -> float:
        """Return by how much the excess rises from one load to another, per logarithm of the load."""
        rise = min(self.excesses[high], math.log(MOST_EXCESS)) - self.excesses[low]
        return rise / math.log(high / low)

    def slope_at(self, load: float) -> float | None:
        """Return the slope from a load to the nearest other one; None if one of the two excesses is unknown."""
        others = [other for other in self.excesses if other != load and self.is_exact(load, other)]
        if not others:
            return None
        return self.slope(*sorted([load, min(others, key=lambda other: abs(math.log(other / load)))]))

    def slope_around(self, low: float, high: float, margin: float) -> float:
        """Return the slope at the limit, which lies from `low` to `high`:
        by loads that differ from it by more than `margin`."""
        holds, breaks = self.bracket(margin)
        near = self.slope_at(low)
        if (holds, breaks) == (low, high) and near is not None and near > 0:
            return near
        return self.slope(min(low, holds or low), max(high, breaks or high))

    def nearer(self, rungs: Sequence[float], tolerance: float) -> list[float]:
        """Return the next loads of a ladder, or nearer ones if a line through two loads meets the limit before them.

        No load lies between those that have run.
        """
        last = min(self.excesses, key=lambda load: abs(self.excesses[load]))
        slope = self.slope_at(last)
        if slope is None or slope <= 0:
            return list(rungs)
        limit, away = last * math.exp(-self.excesses[last] / slope), math.copysign(tolerance, -self.excesses[last])
        ends = [tidy(limit * (1 + away) ** (place - len(rungs) / 2 + 1)) for place in range(len(rungs))]
        if away > 0:
            return [min(rung, end) if end > max(self.excesses) else rung for rung, end in zip(rungs, ends, strict=True)]
        return [max(rung, end) if end < min(self.excesses) else rung for rung, end in zip(rungs, ends, strict=True)]

    def is_known(self, low: float, high: float, tolerance: float) -> bool:
        """Return whether the limit, between `low` and `high`, is known within `tolerance`.

        It is if the two are so near each other, or if `low` is so near the limit by the slopes on both of its sides.
        (An excess that bends one way meets the limit between where these two slopes meet it.)
        """
        return high / low <= 1 + tolerance or -self.excesses[low] <= math.log(1 + tolerance) * self._least_slope(low)

    def _least_slope(self, load: float) -> float:
        """Return the smaller of the slopes on both sides of a load; 0 if one of them is unknown."""
        order = sorted(self.excesses)
        at = order.index(load)
        if not 0 < at < len(order) - 1 or not self.is_exact(*order[at - 1 : at + 2]):
            return 0.0
        return max(0.0, min(self.slope(*order[at - 1 : at + 1]), self.slope(*order[at : at + 2])))

    def between(self, low: float, high: float, tolerance: float, count: int, *, even: bool) -> list[float]:
        """Return `count` loads, `tolerance` apart, one of them just below where the line through two meets the limit.

        With `even` they part the bracket evenly.
        """
        width = math.log(high / low)
        if even or not self.is_exact(low, high):
            shares = [(place + 1) / (count + 1) for place in range(count)]
        else:
            at = -self.excesses[low] / (self.excesses[high] - self.excesses[low])
            step = math.log(1 + tolerance) / width
            shares = [at + (place - count / 2 + JUST_BELOW) * step for place in range(count)]
        # Not next to an end: that would tell nothing.
        return sorted({tidy(low * math.exp(width * min(max(share, 0.1), 0.9))) for share in shares})


def crossing(load: float, log_excess: float, slope: float) -> float:
    """Return the logarithm of the load at which a line of this slope through the excess at `load` meets the limit, at
    most a factor of MOST_FACTOR from there."""
    most = math.log(MOST_FACTOR)
    return math.log(load) + min(max(-log_excess / slope, -most), most)
