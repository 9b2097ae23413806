"""What errors of the cost model do to the result of a search: the loads at which the limits hold if times are longer or
shorter than simulated, without another run.

If every time of a service is f times as long, a load makes it as busy as a load f times as high did, and every latency
is f times as long. So the greatest load is 1/f of the load at which the simulated latency is 1/f of its limit. The runs
of the search say which load that is: they have the share of each limit by load.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...sim.assembly.confidence import TIMES
from ...sim.cost.deployments.evidence import TPOT, Interval
from ..slo import Objective

FURTHEST = math.log(2.0)
"""How far beyond the loads that have run a line is drawn, as a logarithm of the load. Further away nothing is known."""
APART = 0.05
"""The least difference of the logarithms of two loads that tell a slope."""
STEP = 0.05
"""The logarithm of a factor on all times that is tried to see how much the load follows."""


@dataclass(frozen=True)
class SimulationErrors:
    """Factors on simulated times, as 80 % intervals: on the times of passes, and on the latency of each objective."""

    passes: Interval
    latencies: tuple[Interval, ...]

    @classmethod
    def of(cls, factors: Mapping[str, Interval], objectives: Sequence[Objective]) -> SimulationErrors:
        """Return the errors of a deployment; a latency without an interval of its own has that of the passes."""
        passes = factors[TPOT]
        return cls(
            passes, tuple(_widest([factors.get(TIMES[name], passes) for name in one.latencies]) for one in objectives)
        )


def _widest(intervals: Sequence[Interval]) -> Interval:
    return Interval(min(one.low for one in intervals), max(one.high for one in intervals))


@dataclass(frozen=True)
class LimitCurve:
    """How much of each limit a deployment takes, by the load of an engine.

    Attributes:
        loads: Logarithms of loads at which the service was in balance, ascending.
        shares: Logarithms of the shares of the limits, [load][objective].
        wall: The logarithm of the least load beyond these at which it was not in balance; infinite if none was tried.
    """

    loads: tuple[float, ...]
    shares: tuple[tuple[float, ...], ...]
    wall: float = math.inf

    @classmethod
    def of(cls, tried: Mapping[float, Sequence[float]]) -> LimitCurve:
        """Return the curve of a search: logarithms of shares by load (`Finding.curve`)."""
        inside = {math.log(load): tuple(one) for load, one in tried.items() if not any(map(math.isinf, one))}
        outside = (math.log(load) for load, one in tried.items() if any(map(math.isinf, one)))
        loads = tuple(sorted(inside))
        least = min((load for load in outside if not loads or load > loads[-1]), default=math.inf)
        return cls(loads, tuple(inside[load] for load in loads), least)

    def extended(self, other: LimitCurve, at: float) -> LimitCurve:
        """Return this curve, and beyond its loads the other one, moved so that both agree at the load `at` (a
        logarithm), which is one of this curve's. Of the other curve only the shape counts: its runs were shorter."""
        if not self.loads or not other.loads:
            return self
        here = self.shares[self.loads.index(at)]
        moves = [mine - other._line(place)(at) for place, mine in enumerate(here)]
        points = dict(zip(self.loads, self.shares, strict=True))
        for load, shares in zip(other.loads, other.shares, strict=True):
            if not self.loads[0] - APART <= load <= self.loads[-1] + APART and load < self.wall:
                points[load] = tuple(share + move for share, move in zip(shares, moves, strict=True))
        wall = min(self.wall, other.wall if other.wall > max(points) else math.inf)
        return LimitCurve(tuple(sorted(points)), tuple(points[load] for load in sorted(points)), wall)

    def greatest(self, passes: float, latencies: Sequence[float]) -> float:
        """Return the logarithm of the greatest load that holds if passes are exp(passes) times as long, and the latency
        of each objective exp(latencies) times as long; minus infinity if none is known to hold."""
        crossings = (self._lines[place].crossing(-longer, self.wall) for place, longer in enumerate(latencies))
        return min(crossings, default=-math.inf) - passes

    @cached_property
    def _lines(self) -> list[_Line]:
        return [self._line(place) for place in range(len(self.shares[0]))] if self.shares else []

    def _line(self, place: int) -> _Line:
        return _Line(self.loads, [shares[place] for shares in self.shares])

    def sensitivity(self, count: int) -> float:
        """Return by how much the logarithm of the greatest load falls per logarithm of a factor on all times; `count`
        is the number of objectives. At least 1; 1 where the curve does not tell it."""
        high, low = (self.greatest(step, [step] * count) for step in (-STEP, STEP))
        return max(1.0, (high - low) / (2 * STEP)) if math.isfinite(high - low) else 1.0


class _Line:
    """The logarithm of a share by the logarithm of the load, straight between the loads that have run."""

    def __init__(self, loads: Sequence[float], shares: Sequence[float]) -> None:
        self.loads = loads
        # A lower load never takes more: what does is noise, and a search takes the greatest load that holds.
        self.shares = list(itertools.accumulate(reversed(shares), min))[::-1]

    def __call__(self, load: float) -> float:
        if load <= self.loads[0]:
            return self.shares[0] + self._slope(0) * (load - self.loads[0])
        for (left, low), (right, high) in itertools.pairwise(zip(self.loads, self.shares, strict=True)):
            if load <= right:
                return low + (high - low) * (load - left) / (right - left)
        return self.shares[-1] + self._slope(-1) * (load - self.loads[-1])

    def crossing(self, level: float, wall: float) -> float:
        """Return the greatest load whose share is at most `level`, below `wall`."""
        if self.shares[0] > level:
            slope = self._slope(0)
            below = (self.shares[0] - level) / slope if slope > 0 else math.inf
            return self.loads[0] - below if below <= FURTHEST else -math.inf
        if self.shares[-1] <= level:
            slope = self._slope(-1)
            above = (level - self.shares[-1]) / slope if slope > 0 else math.inf
            return min(self.loads[-1] + min(above, FURTHEST), wall)
        points = list(zip(self.loads, self.shares, strict=True))
        (left, low), (right, high) = next(
            pair for pair in itertools.pairwise(points) if pair[0][1] <= level < pair[1][1]
        )
        return left + (right - left) * (level - low) / (high - low)

    def _slope(self, end: int) -> float:
        """Return the slope between an end and the nearest load that is APART from it, else the one furthest from it; 0
        if there is one load alone."""
        load, share = self.loads[end], self.shares[end]
        others = sorted(zip(self.loads, self.shares, strict=True), key=lambda point: abs(point[0] - load))[1:]
        if not others:
            return 0.0
        at, there = next((point for point in others if abs(point[0] - load) >= APART), others[-1])
        return (there - share) / (at - load)


def load_range(curve: LimitCurve, load: float, errors: SimulationErrors) -> tuple[float, float]:
    """Return the 80 % interval of the greatest load, which is `load` if the times are right; 0 where no load that is
    known holds. All times are at the same end of their intervals."""
    right = curve.greatest(0.0, [0.0] * len(errors.latencies))
    low, high = (load * math.exp(found - right) for found in _ends(curve, errors))
    return low, high


def count_range(curve: LimitCurve, load: float, unit: int, errors: SimulationErrors) -> tuple[int | None, int | None]:
    """Return the 80 % interval of the number of engines that hold `load`, a multiple of `unit`; None where no load of
    an engine is known to hold. The curve has the load of one engine."""
    most, least = (
        None if math.isinf(end) else unit * math.ceil(load / math.exp(end) / unit - 1e-9)
        for end in _ends(curve, errors)
    )
    return least, most


def _ends(curve: LimitCurve, errors: SimulationErrors) -> tuple[float, float]:
    """Return the logarithms of the greatest loads with the longest and with the shortest times."""
    longest = curve.greatest(math.log(errors.passes.high), [math.log(one.high) for one in errors.latencies])
    shortest = curve.greatest(math.log(errors.passes.low), [math.log(one.low) for one in errors.latencies])
    return longest, shortest
