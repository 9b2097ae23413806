"""SIM-13 … SIM-16: a simulator's report, times and traffic, computed once more from the log of its run.

A run is read once: `_read` keeps the ledger of the newest answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from ...harness.invariants import Finding, checks
from ...harness.invariants import Outcome as Verdict
from ..acceptance import wrong_acceptance
from ..answer import SimulatorAnswer, SimulatorMoment
from ..books import Books, wrong_notices
from ..contract import SimulatorConfig
from ..ledger import SimulatorLedger
from ..roofline import Clockwork, Roofline
from ..traffic import SEVERAL, Traffic

CONTRACT = "simulator"
SURELY = 6
"""Standard deviations that a sum of at least `MANY` device times, each with a long tail, may be off.
A sum of fewer is not judged."""
MANY = 100

STEP_FAULTS = ("device.raises", "device.restarts")


class Reading(NamedTuple):
    """An answer with what its log says."""

    answer: SimulatorAnswer
    ledger: SimulatorLedger
    clockwork: Clockwork
    traffic: Traffic
    has_pools: bool
    kinds: frozenset[str]  # the kinds of faults that may happen


_newest: list[tuple[SimulatorAnswer, Reading]] = []
_KEPT = 4


def _read(answer: SimulatorAnswer, config: SimulatorConfig) -> Reading:
    for known, reading in _newest:
        if known is answer:
            return reading
    ledger = SimulatorLedger(answer.events)
    clockwork = Clockwork(ledger, Roofline(answer.books["machine"]))
    kinds = frozenset(kind for kind, permille in answer.service.faults or () if permille)
    reading = Reading(answer, ledger, clockwork, Traffic(answer, ledger, config), config.has_pools, kinds)
    _newest.append((answer, reading))
    del _newest[:-_KEPT]
    return reading


def _first(found: Iterable[tuple[str, str]], why: str) -> Finding | None:
    return next((Finding(was, should, why) for was, should in found), None)


def _in_new(m: SimulatorMoment, look) -> Verdict:
    """Return the first finding in the runs of this moment, None if there are none.

    Of the long runs of a queue only the load is looked at: what they do in each step, short ones do too.
    """
    readings = [_read(answer, m.config) for answer in m.runs if len(answer.arrivals) < SEVERAL]
    return next((finding for finding in map(look, readings) if finding is not None), True) if readings else None


@checks("SIM-13", CONTRACT, "books")
def the_report_is_that_of_the_log(m: SimulatorMoment) -> Verdict:
    return _in_new(m, _report)


def _report(reading: Reading) -> Finding | None:
    answer = reading.answer
    has_faults = bool(reading.kinds)
    work, spread = reading.clockwork, SURELY * answer.service.jitter / 1000
    busy_ns = None
    if "device.slow" not in reading.kinds:
        busy_ns = {}
        for r, ns in work.busy_ns.items():
            off_ns = spread * work.spread_ns[r]
            if (
                off_ns and ns * ns < MANY * work.spread_ns[r] ** 2
            ):  # the squares of the sum and of its spread: so many equal times
                off_ns = inf
            busy_ns[r] = (ns - off_ns, ns + work.lost_ns[r] + off_ns)
    is_plain = not reading.has_pools and reading.kinds.isdisjoint(STEP_FAULTS)
    books = Books(reading.ledger, dict(answer.books["summary"]), busy_ns, is_plain=is_plain, has_faults=has_faults)
    wrong = next(books.wrong(), None)
    if wrong is None:
        return _first(wrong_notices(answer), "who compares runs believes in the load of each")
    return Finding(f"{wrong.name} is {wrong.value}", f"{wrong.should}, by the log", "the report is of another run")


@checks("SIM-14", CONTRACT, "books")
def every_round_takes_its_time(m: SimulatorMoment) -> Verdict:
    return _in_new(m, _times)


def _times(reading: Reading) -> Finding | None:
    clockwork = reading.clockwork
    late = clockwork.too_fast if not reading.answer.service.jitter else None
    if late is None and not reading.answer.service.jitter and not reading.kinds & {"device.slow", *STEP_FAULTS}:
        late = clockwork.late
    if late is not None:
        step = late.step
        parts = [f"{len(step.chunks)} chunks"] if step.chunks else []
        parts += [f"{len(step.decode)} rows, {step.steps} draft steps, {step.nodes} nodes"] if step.decode else []
        was = f"round {late.number} of step {step.number} ({', '.join(parts)}) ends at {step.ends_ns[late.number]} ns"
        least = "not before " if late is clockwork.too_fast else ""
        return Finding(was, f"{least}{late.should_ns:.0f} ns, by plan, host and roofline", "every time follows from it")
    if reading.answer.service.jitter:
        alike = _first(reading.traffic.wrong_fluctuation(clockwork.factors), "what varies together does not even out")
        if alike is not None:
            return alike
    return _first(reading.traffic.wrong_transfer(), "a transfer takes the time of its bytes")


@checks("SIM-15", CONTRACT, "books")
def the_load_is_the_one_that_was_asked_for(m: SimulatorMoment) -> Verdict:
    for answer in m.runs:
        if len(answer.arrivals) >= SEVERAL:
            found = _first(
                Traffic(answer, SimulatorLedger(()), m.config).wrong_load(), "another load has another result"
            )
            if found is not None:
                return found
    return _in_new(m, _load)


def _load(reading: Reading) -> Finding | None:
    traffic = reading.traffic
    return (
        _first(traffic.wrong_load(), "another load has another result")
        or _first(traffic.wrong_delivery(), "another order or time is another load of each engine")
        or _first(traffic.wrong_leaving(), "who has left takes the place of who is there")
        or _first(traffic.wrong_pools(), "where a pool has no engine, no request gets through")
        or _first(traffic.wrong_batch(), "a larger batch is another service")
        or _first(wrong_acceptance(reading.answer), "the drafts that a round accepts decide how fast a service is")
        or _first(traffic.wrong_runs(), "acceptance belongs to the request, not to its batch or its round")
    )


@checks("SIM-16", CONTRACT, "books")
def nothing_is_left_and_all_counts_once(m: SimulatorMoment) -> Verdict:
    return _in_new(m, lambda reading: _first(reading.traffic.wrong_rest(), "what is left is missing elsewhere"))
