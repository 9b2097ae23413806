"""RELAY-02 and RELAY-03: what a relay alone can break. The others are about the engine that uses it."""

from __future__ import annotations

from ..harness.invariants import Finding, Outcome, checks
from .model import RelayMoment

CONTRACT = "relay"


@checks("RELAY-02", CONTRACT)
def written_then_read_once(m: RelayMoment) -> Outcome:
    if m.trace and m.refusal is None:
        why = "what was consumed, or never written, is read, or an unread value is lost"
        return Finding(f"{m.call} was accepted: {m.trace}", "a refusal", why)
    if m.refusal is not None and not (m.trace or m.foreign or m.optional):
        was = f"{m.call} was refused: {m.refusal}"
        should = "it is carried out: the cells are as it needs them, and the request's own"
        return Finding(was, should, "the next step cannot go on")
    if m.undeclared:
        was = f"{m.call} brought a field {m.undeclared!r}"
        should = f"None or nothing: the algorithm relays {list(m.config.fields) or 'lengths alone'}"
        return Finding(was, should, "it is read without having been written")
    if m.padding:
        return Finding(f"a padding lane read {m.padding}", "zeros", "the padding row is of no request")
    if _is_wrong(m, of_another=False):
        was = f"{m.wrong.where} is {m.wrong.found}"
        should = f"{m.wrong.expected}, as last written"
        return Finding(was, should, "a step would go on from a value of another row, or of another step")
    if m.num_unread is not None and m.num_unread != m.should_be_unread:
        was = f"num_unread() is {m.num_unread}" + (" after a refusal" if m.refusal is not None else "")
        should = f"{m.should_be_unread}, by recounting the cells"
        return Finding(was, should, "a cell is empty or not, and a call that fails changes none")
    return True


@checks("RELAY-03", CONTRACT, "generations")
def never_a_value_of_another_generation(m: RelayMoment) -> Outcome:
    if m.foreign:
        if m.refusal is None:
            why = "a row goes from request to request, and its cell may be of another one"
            return Finding(f"{m.call} was accepted: {m.foreign}", "a refusal", why)
        return True
    if _is_wrong(m, of_another=True):
        was = f"{m.wrong.where} is {m.wrong.found}, written by generation {m.wrong.writer}"
        should = f"{m.wrong.expected}, written by generation {m.wrong.generation}"
        return Finding(was, should, "it is the value of another request")
    return None if m.answer is None else True


def _is_wrong(m: RelayMoment, of_another: bool) -> bool:
    """Return whether a value was read that is not the last written one, and if so whether it is known to be of
    another request."""
    if m.wrong is None:
        return False
    known = m.capabilities.generations and m.wrong.writer is not None
    return (known and m.wrong.writer != m.wrong.generation) == of_another
