"""SIM-13 … SIM-16: a simulator's report is that of the log of its run, and the log keeps the laws of times and traffic.

A run is read once: `_read` keeps the ledger of the newest answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ...harness.invariants import Finding, checks
from ...harness.invariants import Outcome as Verdict
from ..acceptance import wrong_acceptance
from ..answer import SimulatorAnswer, SimulatorMoment
from ..books import Books, wrong_notices
from ..contract import HOST_DELAY_NS, SimulatorConfig
from ..ledger import SimulatorLedger
from ..times import Times, wrong_delay, wrong_mean, wrong_speed
from ..traffic import SEVERAL, RunTraffic

CONTRACT = "simulator"
STEP_FAULTS = ("device.raises", "device.restarts")


class Reading(NamedTuple):
    """An answer with what its log says."""

    answer: SimulatorAnswer
    ledger: SimulatorLedger
    times: Times
    traffic: RunTraffic
    config: SimulatorConfig
    kinds: frozenset[str]  # the kinds of faults that may happen


_newest: list[tuple[SimulatorAnswer, Reading]] = []
_KEPT = 4


def _read(answer: SimulatorAnswer, config: SimulatorConfig) -> Reading:
    for known, reading in _newest:
        if known is answer:
            return reading
    ledger = SimulatorLedger(answer.events)
    kinds = frozenset(kind for kind, permille in answer.service.faults or () if permille)
    reading = Reading(answer, ledger, Times(answer, ledger), RunTraffic(answer, ledger, config), config, kinds)
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
    answer, config = reading.answer, reading.config
    has_faults = bool(reading.kinds)
    is_plain = not config.has_pools and reading.kinds.isdisjoint(STEP_FAULTS)
    is_free = config.machine == "free host"
    spans_ns = {replica: (ns if is_free else 0, ns) for replica, ns in reading.times.spans_ns.items()}
    books = Books(reading.ledger, dict(answer.books["summary"]), spans_ns, is_plain=is_plain, has_faults=has_faults)
    wrong = next(books.wrong(), None)
    if wrong is None:
        return _first(wrong_notices(answer), "who compares runs believes in the load of each")
    return Finding(f"{wrong.name} is {wrong.value}", f"{wrong.should}, by the log", "the report is of another run")


@checks("SIM-14", CONTRACT, "books")
def times_keep_their_laws(m: SimulatorMoment) -> Verdict:
    return _in_new(m, _times) if not m.changed and m.fluctuating is None else _of_pair(m)


def _times(reading: Reading) -> Finding | None:
    times, service = reading.times, reading.answer.service
    found = None
    if not service.jitter:
        found = _first(times.too_fast(), "a pass reads its weights")
    if found is None and not service.jitter and not reading.kinds & {"device.slow", *STEP_FAULTS}:
        found = _first(times.wrong_order(), "more work is never cheaper")
    if found is None and service.jitter:
        found = _first(times.wrong_fluctuation(), "what varies together does not even out")
    return found or _first(reading.traffic.wrong_transfer(), "a transfer takes the time of its bytes")


def _of_pair(m: SimulatorMoment) -> Verdict:
    """Compare two runs that differ in one number of their machine."""
    if m.fluctuating is not None:
        plain, other = (_read(answer, m.config) for answer in m.fluctuating)
        if m.config.overlap:  # the longer one of host and device counts, and that is longer in the mean
            return _in_new(m, _times)
        share = other.answer.service.jitter / 1000
        return _first(wrong_mean(plain.times, other.times, share), "a mean is that of the draws") or _in_new(m, _times)
    for change, *answers in m.changed:
        first, second = (_read(answer, m.config).ledger for answer in answers)
        if change == "bandwidth":
            found = _first(wrong_speed(first, second), "more bandwidth is never slower")
        else:
            found = _first(wrong_delay(first, second, HOST_DELAY_NS), "a device waits for its host")
        if found is not None:
            return found
    return _in_new(m, _times)


@checks("SIM-15", CONTRACT, "books")
def the_load_is_the_one_that_was_asked_for(m: SimulatorMoment) -> Verdict:
    for answer in m.runs:
        if len(answer.arrivals) >= SEVERAL:
            found = _first(
                RunTraffic(answer, SimulatorLedger(()), m.config).wrong_load(), "another load has another result"
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
