"""What must hold of a block manager: BLOCKS-01 … 07."""

from __future__ import annotations

from ...properties.invariants.registry import Finding, Outcome, checks
from .model import Moment

CONTRACT = "block-manager"


@checks("BLOCKS-01", CONTRACT, on=("admit",))
def a_match_is_the_requests_own_prefix(m: Moment) -> Outcome:
    if m.match is None:
        return None
    length, slots = m.match
    running = m.running[m.request]
    was = f"{m.request} starts with {length} of {len(running.tokens)} positions"
    if length % m.config.page_size:
        return Finding(was, "whole pages", "the rest of the page would be written under others")
    if not 0 <= length < len(running.tokens):
        return Finding(was, "less than all", "the first token comes from computing the last position")
    for position, slot in enumerate(slots):
        if m.memory.get(slot) != running.cell(position):
            was = f"{m.request} finds position {position} in slot {slot}, which holds {m.memory.get(slot)}"
            return Finding(was, f"{running.cell(position)}", "it goes on from another's text")
    return True


@checks("BLOCKS-02", CONTRACT)
def every_page_is_free_or_held(m: Moment) -> Outcome:
    size = m.config.page_size
    num_free, tables = m.after
    held = {slot // size for slots in tables.values() for slot in slots}
    if num_free + len(held) != m.config.num_pages:
        was = f"{num_free} pages are free, {len(held)} are held"
        return Finding(was, f"{m.config.num_pages} in all", "a page is lost, or handed out under its holder")
    if m.drained and num_free != m.config.num_pages:
        return Finding(f"{num_free} pages are free at the end", f"{m.config.num_pages}", "a page is lost")
    return True


@checks("BLOCKS-03", CONTRACT)
def what_is_computed_stays(m: Moment) -> Outcome:
    size = m.config.page_size
    mine = {slot // size for slot in m.written}
    for name, running in m.running.items():
        shared = mine.intersection(slot // size for slot in running.slots) if name != m.request else ()
        if shared:
            was = f"{m.request} writes page {min(shared)}, which {name} has, too"
            return Finding(was, "pages of its own", "only full pages are shared")
        for position, slot in enumerate(running.slots[: running.computed]):
            if m.memory.get(slot) != running.cell(position):
                was = f"slot {slot} of {name}, position {position}, holds {m.memory.get(slot)}"
                return Finding(was, f"{running.cell(position)}", "another request has written there")
    return True if m.running else None


@checks("BLOCKS-04", CONTRACT, on=("admit", "grow"))
def what_fits_is_granted_and_a_refusal_changes_nothing(m: Moment) -> Outcome:
    if m.refusal is None:
        return True
    if m.after != m.before:
        return Finding(f"a refused {m.operation} changed {m.before} into {m.after}", "nothing", "it was refused")
    if m.fits:
        was = f"refused ({m.refusal}), with {m.before[0]} pages free"
        return Finding(was, "granted: that is enough", "the request waits for ever")
    return True


@checks("BLOCKS-05", CONTRACT, "caching", on=("admit",))
def what_was_released_is_found_again(m: Moment) -> Outcome:
    if m.match is None:
        return None
    if m.match[0] < m.expected:
        was = f"{m.request} starts with {m.match[0]} cached positions"
        return Finding(
            was, f"{m.expected}: they were released, and no page was handed out since", "they are computed again"
        )
    return True


@checks("BLOCKS-06", CONTRACT, on=("admit", "grow"))
def slots_stand_in_whole_pages(m: Moment) -> Outcome:
    if m.refusal is not None:
        return None
    size, running = m.config.page_size, m.running[m.request]
    if len(running.slots) < running.computed:
        was = f"{m.request} has {len(running.slots)} slots"
        return Finding(was, f"{running.computed}, one for each position", "the last ones are written nowhere")
    for position, slot in enumerate(running.slots):
        in_order = position % size == 0 or slot == running.slots[position - 1] + 1
        if slot < 0 or slot % size != position % size or not in_order:
            was = f"position {position} of {m.request} is in slot {slot}, behind slot {running.slots[position - 1]}"
            return Finding(was, "pages of neighbouring slots", "kernels address pages, not slots")
    return True


@checks("BLOCKS-07", CONTRACT, "misuse", on=("release-stray", "admit-again"))
def misuse_changes_nothing(m: Moment) -> Outcome:
    if m.operation.tag == "admit-again" and m.refusal is None:
        return Finding(f"{m.operation} was accepted", "a refusal", "two requests share one table")
    if m.after != m.before:
        return Finding(f"{m.operation} changed {m.before} into {m.after}", "nothing", "other requests pay for it")
    return True
