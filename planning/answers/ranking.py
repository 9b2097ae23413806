"""The order of a plan's candidates by their results, and which of them differ clearly from the best one."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from ..confidence.comparison import curve_of, curve_of_counts
from ..confidence.model_error import LimitCurve
from ..confidence.ranked import Ranked
from ..plan import CLOSER, Plan
from ..search.bounds import Spread, differences
from ..search.judge import SearchFinding


def rank_candidates(whole: Plan) -> list[Ranked]:
    """Return the candidates that could be searched, the best first."""
    found = [_result(whole, index, finding) for index, finding in {**whole.rough, **whole.fine}.items()]
    found = [item for item in found if not item.finding.reason]
    found.sort(key=partial(_order, whole))
    if found and found[0].holds:
        found = [_with_errors(whole, found[0], item) for item in found]
    return found


def _with_errors(whole: Plan, best: Ranked, item: Ranked) -> Ranked:
    """Return a candidate with its intervals, and whether it differs clearly from the best one."""
    if not item.holds:
        return item
    curve = _curve(whole, item)
    error = whole.errors.compare(best, item, (_curve(whole, best), curve))
    found = replace(item, equal=_is_equal(whole, best, item, error))
    if item.dropped:
        return found
    if whole.question.load is not None:
        found = replace(found, gpu_range=whole.errors.gpu_range(item, curve))
    else:
        found = replace(found, load_range=whole.errors.load_range(item, curve))
        if item is not best:
            share = item.load / best.load
            found = replace(found, of_best_range=(share * math.exp(-error), share * math.exp(error)))
    return replace(found, taken_range=whole.errors.taken_range(item), rests_on=whole.errors.rests_on(item))


def _curve(whole: Plan, item: Ranked) -> LimitCurve:
    """Return what the runs of a candidate say of its limits by the load of an engine."""
    rough, load = whole.rough[whole.candidates.index(item.candidate)], whole.question.load
    if load is None:
        return curve_of(item.finding, rough, 1.0, 1.0)
    if item.dropped:
        return curve_of(rough, None, item.candidate.unit, item.candidate.unit)
    return curve_of_counts(item.finding, rough, load, item.candidate.unit)


def _order(whole: Plan, item: Ranked) -> tuple[float, ...]:
    if whole.question.load is None:
        return (item.dropped, -item.load)
    return (item.dropped, not item.holds, item.gpus * whole.gpu_cost(item.candidate), item.finding.excess)


def _is_equal(whole: Plan, best: Ranked, item: Ranked, error: float) -> bool:
    """Return whether a candidate does not differ clearly from the best one. `error`: of log(load of the best / its),
    half of its 80 % interval."""
    if item is best or best.dropped:
        return item is best
    if item.dropped:
        places = [whole.candidates.index(one.candidate) for one in (best, item)]
        if not set(places) <= set(whole.on_a_quarter):
            return False
        loads = [whole.rough[place].value for place in places]
        return math.log(loads[0] / loads[1]) <= math.hypot(CLOSER, error)
    if whole.question.load is not None:
        costs = [one.gpus * whole.gpu_cost(one.candidate) for one in (item, best)]
        return costs[0] <= costs[1]
    behind, half_width = _paired(whole, best, item)
    return behind <= math.hypot(half_width, error)


def _paired(whole: Plan, best: Ranked, item: Ranked) -> tuple[float, float]:
    """Return how far a candidate is behind the best one, as a logarithm of loads, and half of the 95 % interval of
    this: by the differences seed by seed, whose spread is pooled over all candidates."""
    own = differences(best.finding.crossings, item.finding.crossings)
    if len(own) < 2:  # of a load that is only a bound
        return math.log(best.load / item.load), 0.0
    others = [one.crossings for one in whole.fine.values() if one is not best.finding]
    pooled = Spread.of(differences(best.finding.crossings, one) for one in others)
    return sum(own) / len(own), pooled.half_width(len(own))


def _of_rough(whole: Plan) -> float:
    """Return the stated load of the best candidate over what its rough search found. By it the rough load of a dropped
    candidate, which half of the runs hold, becomes one that compares with those stated of the others."""
    best = max(whole.fine, key=lambda index: whole.fine[index].value, default=None)
    if best is None or not whole.rough[best].value:
        return 1.0
    return whole.fine[best].value / whole.rough[best].value


def _result(whole: Plan, index: int, finding: SearchFinding) -> Ranked:
    candidate, asked = whole.candidates[index], whole.question
    dropped, first_share = index not in whole.fine, whole.first_share.get(index, 0.0)
    if asked.load is None:
        gpus, load = candidate.gpus_of(whole.engines(candidate)), finding.value
        return Ranked(candidate, finding, gpus, load * _of_rough(whole) if dropped else load, dropped, first_share)
    engines = finding.value
    if dropped:  # by its load per smallest deployment
        engines = candidate.unit * math.ceil(asked.load / finding.value) if finding.value else 0
    gpus = candidate.gpus_of(int(engines))
    return Ranked(candidate, finding, gpus, asked.load, dropped, first_share)
