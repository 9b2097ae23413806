"""HANDOFF-01 to HANDOFF-10: what holds between two workers and the link. A checker reads a `TransportMoment` alone."""

from __future__ import annotations

from itertools import pairwise

from ..harness.invariants import Finding, Outcome, checks
from .model import TransportMoment

CONTRACT = "transport"


@checks("HANDOFF-01", CONTRACT)
def only_what_has_arrived_is_decoded(m: TransportMoment) -> Outcome:
    why = "a request would be decoded from KV that is not its own"
    if m.acknowledged:
        was = m.acknowledged
        return Finding(was, "an ack when every page and the manifest of one attempt have arrived intact", why)
    for joined in m.joined:
        if joined.missing:
            was = f"request {joined.request} is decoded, and {joined.missing}"
            return Finding(was, "every page and the manifest of one attempt have arrived intact", why)
    return True if m.joined else None


@checks("HANDOFF-02", CONTRACT)
def pages_stay_while_they_may_be_read_or_written(m: TransportMoment) -> Outcome:
    if m.freed:
        return Finding(
            m.freed,
            "it stays as it is until an ack, the answer to a cancel, or a lease's end and a fence, and under steps in flight",
            "the transfer would read, or write over, the pages of the next request",
        )
    return True if m.num_holds else None


@checks("HANDOFF-03", CONTRACT)
def patience_ends(m: TransportMoment) -> Outcome:
    if m.leaked:
        should = "nothing: every lease and every fence is over" if m.was_quiet else "pages go back with the last answer"
        return Finding(m.leaked, should, "a lost message would leak memory for ever")
    if m.late:
        was = m.late
        should = "it acts when a lease or a hold has passed since the last news, and neither earlier nor later"
        return Finding(was, should, "too early fails requests that are well, too late keeps memory")
    return True if m.was_quiet or m.num_timed else None


@checks("HANDOFF-04", CONTRACT)
def late_news_is_no_news(m: TransportMoment) -> Outcome:
    if m.repeated:
        was = m.repeated
        should = "nothing changes: completion is keyed by request, attempt and generation, in full width"
        return Finding(was, should, "an old or repeated message would end, begin or feed another transfer")
    return True if m.num_repeated else None


@checks("HANDOFF-05", CONTRACT)
def transfers_are_counted(m: TransportMoment) -> Outcome:
    for side, c in m.counters.items():
        if c.started != c.completed + c.failed + c.cancelled + c.in_flight or min(c) < 0:
            return Finding(f"{side}: {c}", "started == completed + failed + cancelled + in flight", "one is lost")
    if m.miscounted:
        was = m.miscounted
        return Finding(was, "what its messages and its requests' ends say", "operators look at these numbers first")
    return True if any(c.started for c in m.counters.values()) else None


@checks("HANDOFF-06", CONTRACT)
def a_life_goes_forward(m: TransportMoment) -> Outcome:
    for joined in m.joined:
        for order in joined.order:
            missing = [what for what, at in order if at is None]
            backward = [(a, b) for a, b in pairwise(order) if None not in (a[1], b[1]) and a[1] > b[1]]
            if missing or backward:
                was = (
                    f"{missing[0]} never happened"
                    if missing
                    else f"{backward[0][1][0]} came before {backward[0][0][0]}"
                )
                should = ", ".join(what for what, _ in order)
                was = f"request {joined.request}: {was}"
                return Finding(was, should, "times of a request are reported from these events")
    return True if m.joined else None


@checks("HANDOFF-07", CONTRACT)
def what_arrives_is_what_was_sent(m: TransportMoment) -> Outcome:
    for joined in m.joined:
        if joined.wrong:
            was = f"request {joined.request}: {joined.wrong}"
            should = "what its prefill computed, in both pools, and beside them"
            return Finding(was, should, "its answer would be that of another prompt")
    return True if m.joined else None


@checks("HANDOFF-08", CONTRACT)
def the_end_of_a_peer_is_heard(m: TransportMoment) -> Outcome:
    if m.unheard:
        return Finding(m.unheard, "an error for it in bounded time", "its user would wait for ever")
    if m.unserved:
        return Finding(m.unserved, "an end for both sides, with its reason", "its user got another answer")
    return True if m.a_peer_is_gone or m.num_ended else None


@checks("HANDOFF-09", CONTRACT)
def only_verified_pages_are_cached(m: TransportMoment) -> Outcome:
    if m.cached:
        return Finding(m.cached, "it is cached when all of its prompt is verified", "others would start from it")
    return True if m.num_unverified else None


@checks("HANDOFF-10", CONTRACT, "roles")
def roles_are_kept(m: TransportMoment) -> Outcome:
    if m.role:
        return Finding(
            m.role, "a worker keeps its role, and changes it only when it has nothing", "pools are sized for roles"
        )
    return True if m.num_roles else None
