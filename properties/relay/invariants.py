"""RELAY-02 and RELAY-03: what a relay alone can break. The others are about the engine that uses it."""

from __future__ import annotations

from ..harness.invariants import Finding, Outcome, checks
from .model import RelayMoment


@checks("RELAY-02", "relay")
def written_then_read_once(m: RelayMoment) -> Outcome:
    if m.refusal is not None and not m.forbidden:
        should = "it is carried out: the cells are as it needs them, and the request's own"
        return Finding(f"{m.operation} was refused: {m.refusal}", should, "the next step cannot go on")
    if m.unread is not None and m.unread[0] != m.unread[1]:
        was = f"num_unread() is {m.unread[0]}" + (" after a refusal" if m.refusal is not None else "")
        should = f"{m.unread[1]}, by recounting the cells"
        return Finding(was, should, "a cell is empty or not, and a call that fails changes none")
    return _refused_or_right(m, "RELAY-02")


@checks("RELAY-03", "relay", "generations")
def never_a_value_of_another_generation(m: RelayMoment) -> Outcome:
    return _refused_or_right(m, "RELAY-03") if m.forbidden or m.lengths is not None else None


def _refused_or_right(m: RelayMoment, id: str) -> Outcome:
    if id in m.forbidden and m.refusal is None:
        why = "what was consumed, never written, or another request's is read, or an unread value is lost"
        return Finding(f"{m.operation} was accepted: {m.forbidden[id]}", "a refusal", why)
    if id in m.wrong:
        return Finding(*m.wrong[id], "a step would go on from a value of another row, request or step")
    return True
