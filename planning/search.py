"""Searches over one number: the greatest load that a deployment holds, the least engines that hold a load.

A search is a generator: it yields the settings of runs that it wants, is sent their outcomes, and returns what it found. So many searches
share the same processes, and none waits for another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .intervals import Estimate, estimate
from .slo import Objective, excess
from .trial import Trial
from .workers import Job, Workers

Wanted = list[dict[str, Any]]
Search = Generator[Wanted, list[Trial], "Finding"]

MOST_EXCESS = 4.0
"""Beyond this many times its limit a run tells nothing more."""
MOST_STEPS = 8  # from the first load to one on the other side of the limit
MOST_FACTOR = 4.0
MOST_STEPS_BEYOND = 4.0  # the greatest load of one seed may lie so many times the distance of the last two loads away


class CannotRun(Exception):
    """A deployment that no run can have, with the reason."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a search has found.

    Attributes:
        value: The load, or the number of engines; 0 if the objectives hold at none.
        interval: The load with the interval that the seeds leave; None for a number of engines, and where nothing holds.
        summary: That of a run at `value`, or at what came nearest.
        tightest: The objective that takes the most of its limit there.
        excess: How much of its limit it takes.
        reason: Why there is nothing, if the deployment cannot run.
        is_bound: The objectives held at every load that was tried: the greatest one is `value` or more.
    """

    value: float
    interval: Estimate | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)
    tightest: Objective | None = None
    excess: float = math.nan
    reason: str = ""
    is_bound: bool = False


@dataclass
class _Judge:
    """Runs at values of one key, with as many seeds as it takes to decide whether the objectives hold."""

    settings: Mapping[str, Any]
    key: str
    objectives: tuple[Objective, ...]
    seeds: Sequence[int]
    sized: Callable[[float], Mapping[str, Any]] = lambda value: {}  # settings that follow from the value
    summaries: dict[tuple[float, int], Mapping[str, Any]] = field(default_factory=dict)

    def holds(self, value: float) -> Generator[Wanted, list[Trial], bool]:
        """Decide whether the objectives hold at `value`: once the interval of the excess is on one side of 1, or by its mean in the end."""
        for count in range(min(2, len(self.seeds)), len(self.seeds) + 1):
            mean = yield from self.mean_log_excess(value, self.seeds[:count])
            if math.isinf(mean):
                break
            found = estimate([self.log_excess(value, seed) for seed in self.seeds[:count]])
            if found.low > 0 or found.high < 0:
                break
        return mean <= 0

    def mean_log_excess(self, value: float, seeds: Sequence[int]) -> Generator[Wanted, list[Trial], float]:
        """Run at `value` with these seeds, and return the mean of their excesses in logarithms; infinite if a run is out of balance."""
        yield from self.run(value, seeds)
        if any(math.isinf(self.share(value, seed)) for seed in seeds):
            return math.inf
        return float(np.mean([self.log_excess(value, seed) for seed in seeds]))

    def run(self, value: float, seeds: Sequence[int]) -> Generator[Wanted, list[Trial], None]:
        missing = [seed for seed in seeds if (value, seed) not in self.summaries]
        if missing:
            settings = {**self.settings, **self.sized(value), self.key: value}
            trials = yield [{**settings, "seed": seed} for seed in missing]
            for seed, trial in zip(missing, trials, strict=True):
                if trial.status != "done":
                    raise CannotRun(trial.message)
                self.summaries[value, seed] = trial.summary

    def share(self, value: float, seed: int) -> float:
        return excess(self.objectives, self.summaries[value, seed])[0]

    def log_excess(self, value: float, seed: int) -> float:
        share = self.share(value, seed)
        return math.log(min(max(share, 1 / MOST_EXCESS), MOST_EXCESS))

    def finding(self, value: float, at: float, interval: Estimate | None = None) -> Finding:
        """Return the finding `value`, with what the runs at `at` have shown."""
        summary = self.summaries[at, self.seeds[0]]
        shares = [self.share(at, seed) for seed in self.seeds if (at, seed) in self.summaries]
        tightest = excess(self.objectives, summary)[1]
        mean = math.inf if any(map(math.isinf, shares)) else float(np.exp(np.mean(np.log(shares))))
        return Finding(value, interval, summary, tightest, mean)


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
) -> Search:
    """Search the greatest value of `key` (a rate, or the scale of a trace's) at which the objectives hold.

    Steps up or down from `start`, by `first_factor` and then by more, until one value holds and the next does not, by the mean excess of
    the first `bracket_seeds`. Then takes geometric means until they are within `tolerance` of each other. Each seed has its own greatest
    load, between these two by its excess; the finding is their mean, of as many seeds as its interval needs to be as narrow as `tolerance`.
    `sized`:
    settings that follow from the load, such as how many requests a run has. `within`: whether a load is found below the first, or above
    the second, makes no difference to who asks, nor which.
    """
    judge = _Judge(settings, key, objectives, seeds, sized)
    factor, low, high = first_factor, None, None
    least, most = map(_tidy, within)
    value = min(_tidy(start), most)
    first = seeds[:bracket_seeds]
    for _ in range(MOST_STEPS):
        if (yield from judge.mean_log_excess(value, first)) <= 0:
            low, value = value, min(_tidy(value * factor), most)
        else:
            high, value = value, max(_tidy(value / factor), least)
        if (low is not None and high is not None) or value in (low, high) or (high or math.inf) <= least:
            break
        factor = min(factor**2, MOST_FACTOR)
    if low is None:
        return judge.finding(0.0, min(at for at, _ in judge.summaries))
    if high is None:
        return replace(judge.finding(low, low), is_bound=True)
    while high > least and high / low > 1 + tolerance:
        middle = _tidy(math.sqrt(low * high))
        low, high = (middle, high) if (yield from judge.mean_log_excess(middle, first)) <= 0 else (low, middle)
    for count in range(min(2, len(seeds)), len(seeds) + 1):
        for value in (low, high):
            yield from judge.run(value, seeds[:count])
        found = estimate(
            [_crossing(low, high, *(judge.log_excess(at, seed) for at in (low, high))) for seed in seeds[:count]]
        )
        if found.half_width <= tolerance / 2 * found.mean:
            break
    return judge.finding(found.mean, low, found if len(seeds) > 1 else None)


def _tidy(load: float) -> float:
    return float(f"{load:.5g}")


def _crossing(low: float, high: float, at_low: float, at_high: float) -> float:
    """Return where a line through the excesses of two loads (in logarithms) meets the limit; not far beyond them."""
    if at_high <= at_low:
        return low if at_low > 0 else high
    share = -at_low / (at_high - at_low)
    return low * (high / low) ** min(max(share, -MOST_STEPS_BEYOND), 1 + MOST_STEPS_BEYOND)


def least_count(
    settings: Mapping[str, Any],
    key: str,
    start: int,
    unit: int,
    objectives: tuple[Objective, ...],
    seeds: Sequence[int],
    most: int,
) -> Search:
    """Search the least number of engines, a multiple of `unit` up to `most`, with which the objectives hold. `start`: a first guess."""
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
    """Run searches at the same time, and yield each with what it has found. One that cannot run is a finding with the reason."""
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
        advance(name, lambda search=search: next(search))
    while True:
        while ended:
            yield ended.pop()
        if not waiting:
            return
        job, trial = workers.next_ended()
        name, index = waiting.pop(job.ticket)
        outcomes[name][index] = trial
        if all(outcome is not None for outcome in outcomes[name]):
            results = outcomes.pop(name)
            advance(name, lambda name=name, results=results: searches[name].send(results))
