"""Searches over one number: the greatest load that a deployment holds, the least engines that hold a load.

A search is a generator: it yields the settings of runs that it wants, is sent their outcomes, and returns what it
found. So many searches share the same processes, and none waits for another.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from .confidence.intervals import Estimate, estimate
from .slo import Objective, excess, shares
from .trial import Trial
from .workers import Job, Workers

Wanted = list[dict[str, Any]]
Search = Generator[Wanted, list[Trial], "Finding"]

MOST_EXCESS = 4.0
"""The excess is clipped at this multiple of the limit, because a greater excess tells nothing more."""
MOST_STEPS = 8  # from the first load to one on the other side of the limit
MOST_FACTOR = 4.0
SURE = 3.0  # standard errors from the limit at which an excess is taken for its side

JUST_BELOW = 0.25  # of the tolerance: a run there holds, and tells what the greatest load is like


class CannotRun(Exception):
    """A deployment that no run can have, with the reason."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a search.

    Attributes:
        value: The load, or the number of engines; 0 if the objectives hold at none.
        interval: The load with the interval that the seeds leave; None for a number of engines, and where nothing
            holds.
        summary: That of a run at `value`, or at what came nearest.
        tightest: The objective that takes the most of its limit there.
        excess: How much of its limit it takes.
        reason: Why there is nothing, if the deployment cannot run.
        is_bound: The objectives held at every load that was tried: the greatest one is `value` or more.
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


@dataclass
class _Judge:
    """Runs at values of one key, with enough seeds to decide whether the objectives hold."""

    settings: Mapping[str, Any]
    key: str
    objectives: tuple[Objective, ...]
    seeds: Sequence[int]
    sized: Callable[[float], Mapping[str, Any]] = lambda value: {}  # settings that follow from the value
    summaries: dict[tuple[float, int], Mapping[str, Any]] = field(default_factory=dict)

    def holds(self, value: float) -> Generator[Wanted, list[Trial], bool]:
        """Decide whether the objectives hold at `value`: as soon as the interval of the excess lies on one side of 1.
        When no seeds are left, its mean decides."""
        for count in range(min(2, len(self.seeds)), len(self.seeds) + 1):
            yield from self.run([value], self.seeds[:count])
            mean = self.mean_log_excess(value, self.seeds[:count])
            if math.isinf(mean):
                break
            found = estimate([self.log_excess(value, seed) for seed in self.seeds[:count]])
            if found.low > 0 or found.high < 0:
                break
        return mean <= 0

    def run(self, values: Sequence[float], seeds: Sequence[int]) -> Generator[Wanted, list[Trial], None]:
        """Make all missing runs at these values with these seeds, at the same time."""
        missing = [(value, seed) for value in values for seed in seeds if (value, seed) not in self.summaries]
        if missing:
            trials = yield [
                {**self.settings, **self.sized(value), self.key: value, "seed": seed} for value, seed in missing
            ]
            for place, trial in zip(missing, trials, strict=True):
                if trial.status != "done":
                    raise CannotRun(trial.message)
                self.summaries[place] = trial.summary

    def mean_log_excess(self, value: float, seeds: Sequence[int]) -> float:
        """Return the mean of the logarithms of the excesses at a value that has run;
        infinite if a run is out of balance."""
        if any(math.isinf(self.share(value, seed)) for seed in seeds):
            return math.inf
        return float(np.mean([self.log_excess(value, seed) for seed in seeds]))

    def share(self, value: float, seed: int) -> float:
        return excess(self.objectives, self.summaries[value, seed])[0]

    def log_excess(self, value: float, seed: int) -> float:
        share = self.share(value, seed)
        return math.log(min(max(share, 1 / MOST_EXCESS), MOST_EXCESS))

    def noise(self) -> float:
        """Return the standard deviation of log excesses between seeds at one load, over all loads with several;
        0 if there is none."""
        excesses: dict[float, list[float]] = {}
        for value, seed in self.summaries:
            excesses.setdefault(value, []).append(self.log_excess(value, seed))
        of_several = [np.array(of) - np.mean(of) for of in excesses.values() if len(of) > 1]
        freedom = sum(len(of) - 1 for of in of_several)
        return math.sqrt(sum(float(of @ of) for of in of_several) / freedom) if freedom else 0.0

    def finding(self, value: float, at: float, interval: Estimate | None = None) -> Finding:
        """Return the finding `value`, with the results of the runs at `at`."""
        summary = self.summaries[at, self.seeds[0]]
        taken = [self.share(at, seed) for seed in self.seeds if (at, seed) in self.summaries]
        tightest = excess(self.objectives, summary)[1]
        mean = math.inf if any(map(math.isinf, taken)) else float(np.exp(np.mean(np.log(taken))))
        return Finding(value, interval, summary, tightest, mean, curve=self.curve())

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
    the slope there. The finding is their mean, over as many seeds as its interval needs to be as narrow as `tolerance`.
    The slope is taken between loads whose excesses differ from the limit by more than the spread of the seeds. If the
    curve is flat near its limit, these loads are far apart, and the interval is wide.

    `sized`: settings that follow from the load, such as how many requests a run has. `within`: the least and the
    greatest load that are tried; a result at either bound is precise enough for the caller. `at_once`: the loads, and
    then the seeds, that are run together.
    """
    judge, curve = _Judge(settings, key, objectives, seeds, sized), _Curve({})
    least, most = map(_tidy, within)
    start, first = min(_tidy(start), most), seeds[:bracket_seeds]

    def run(loads: Sequence[float]) -> Generator[Wanted, list[Trial], tuple[float | None, float | None]]:
        yield from judge.run(loads, first)
        curve.excesses.update({load: judge.mean_log_excess(load, first) for load in loads})
        return curve.bracket()

    up, down = _ladder(start, first_factor, most), _ladder(start, 1 / first_factor, least)

    def widen(margin: float) -> Generator[Wanted, list[Trial], None]:
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
        return replace(judge.finding(low, low), is_bound=True)
    width = math.inf
    while high > least and not curve.is_known(low, high, tolerance):
        misleads = high / low > math.sqrt(width)  # the last step has taken less than half of the bracket
        width = high / low
        narrower = yield from run(curve.between(low, high, tolerance, at_once, even=misleads))
        assert narrower[0] is not None and narrower[1] is not None, "loads within a bracket leave one"
        low, high = narrower[0], narrower[1]
    for count in (*range(len(first), len(seeds), at_once), len(seeds)):
        yield from judge.run([low], seeds[:count])
        margin = SURE * judge.noise() / math.sqrt(len(first))
        yield from widen(margin)
        slope = curve.slope_around(low, high, margin)
        found = estimate([_crossing(low, judge.log_excess(low, seed), slope) for seed in seeds[:count]])
        if found.half_width <= tolerance / 2 * found.mean:
            break
    return judge.finding(found.mean, low, found if len(seeds) > 1 else None)


def _tidy(load: float) -> float:
    return float(f"{load:.5g}")


def _ladder(start: float, factor: float, bound: float) -> Iterator[float]:
    """Yield loads from `start` to `bound`, each a greater step from the one before, by `factor` first."""
    load, log_factor = start, math.log(factor)
    while load < bound if factor > 1 else load > bound:
        load = _tidy(load * math.exp(log_factor))
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

    def is_told(self, *loads: float) -> bool:
        """Return whether none of the excesses at these loads is clipped, at MOST_EXCESS or at its inverse."""
        return all(abs(self.excesses[load]) < math.log(MOST_EXCESS) for load in loads)

    def slope(self, low: float, high: float) -> float:
        """Return by how much the excess rises from one load to another, per logarithm of the load."""
        rise = min(self.excesses[high], math.log(MOST_EXCESS)) - self.excesses[low]
        return rise / math.log(high / low)

    def slope_at(self, load: float) -> float | None:
        """Return the slope from a load to the nearest other one; None if one of the two excesses is unknown."""
        others = [other for other in self.excesses if other != load and self.is_told(load, other)]
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
        ends = [_tidy(limit * (1 + away) ** (place - len(rungs) / 2 + 1)) for place in range(len(rungs))]
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
        if not 0 < at < len(order) - 1 or not self.is_told(*order[at - 1 : at + 2]):
            return 0.0
        return max(0.0, min(self.slope(*order[at - 1 : at + 1]), self.slope(*order[at : at + 2])))

    def between(self, low: float, high: float, tolerance: float, count: int, *, even: bool) -> list[float]:
        """Return `count` loads, `tolerance` apart, one of them just below where the line through two meets the limit.

        With `even` they part the bracket evenly.
        """
        width = math.log(high / low)
        if even or not self.is_told(low, high):
            shares = [(place + 1) / (count + 1) for place in range(count)]
        else:
            at = -self.excesses[low] / (self.excesses[high] - self.excesses[low])
            step = math.log(1 + tolerance) / width
            shares = [at + (place - count / 2 + JUST_BELOW) * step for place in range(count)]
        # Not next to an end: that would tell nothing.
        return sorted({_tidy(low * math.exp(width * min(max(share, 0.1), 0.9))) for share in shares})


def _crossing(load: float, log_excess: float, slope: float) -> float:
    """Return where a line of this slope through the excess at a load meets the limit, at most a factor of
    MOST_FACTOR from there."""
    most = math.log(MOST_FACTOR)
    return load * math.exp(min(max(-log_excess / slope, -most), most))


def least_count(
    settings: Mapping[str, Any],
    key: str,
    start: int,
    unit: int,
    objectives: tuple[Objective, ...],
    seeds: Sequence[int],
    most: int,
) -> Search:
    """Search the least number of engines, a multiple of `unit` up to `most`, with which the objectives hold.
    `start`: a first guess."""
    judge = _Judge(settings, key, objectives, seeds)
    fails, step = 0, unit
    most = most // unit * unit
    holds = min(max(unit, start // unit * unit), most)
    while not (yield from judge.holds(holds)):
        if holds + unit > most:
            return judge.finding(0, holds)
        fails, holds, step = holds, min(holds + step, most), 2 * step
    step = unit
    while holds - fails > unit:
        value = (fails + holds) // (2 * unit) * unit if fails else max(unit, holds - step)
        if (yield from judge.holds(value)):
            holds, step = value, 2 * step
        else:
            fails = value
    return judge.finding(holds, holds)


def run_searches(searches: Mapping[int, Search], workers: Workers) -> Iterator[tuple[int, Finding]]:
    """Run searches at the same time, and yield each with its result. If a search cannot run, its result has the
    reason."""
    waiting: dict[int, tuple[int, int]] = {}  # ticket -> search, index of the run among those it waits for
    outcomes: dict[int, list[Trial | None]] = {}
    ended: list[tuple[int, Finding]] = []
    tickets = iter(range(1 << 62))

    def advance(name: int, step: Callable[[], Wanted]) -> None:
        try:
            wanted = step()
        except StopIteration as stop:
            ended.append((name, stop.value))
            return
        except CannotRun as error:
            ended.append((name, Finding(0.0, reason=str(error))))
            return
        outcomes[name] = [None] * len(wanted)
        for index, settings in enumerate(wanted):
            ticket = next(tickets)
            waiting[ticket] = (name, index)
            workers.submit(Job(ticket, settings))

    for name, search in searches.items():
        advance(name, search.__next__)
    while True:
        while ended:
            yield ended.pop()
        if not waiting:
            return
        job, trial = workers.next_ended()
        name, index = waiting.pop(job.ticket)
        outcomes[name][index] = trial
        results = [outcome for outcome in outcomes[name] if outcome is not None]
        if len(results) == len(outcomes[name]):
            del outcomes[name]
            advance(name, partial(searches[name].send, results))
