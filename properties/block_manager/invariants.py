"""BLOCKS-01 … 09: what is true of every block manager, after every operation."""

from __future__ import annotations

from ..harness.invariants import Finding, Outcome, checks
from .contract import STATE
from .model import BlockManagerMoment

CONTRACT = "block-manager"


@checks("BLOCKS-01", CONTRACT, on=("admit",))
def a_match_is_the_requests_own_prefix(m: BlockManagerMoment) -> Outcome:
    if m.match is None:
        return None
    length, tables = m.match
    running = m.running[m.request]
    was = f"{m.request} starts with {length} of {len(running.tokens)} positions"
    if length % m.config.page_size:
        return Finding(was, "whole pages", "the rest of the page would be written under others")
    if not 0 <= length < len(running.tokens):
        return Finding(was, "less than all", "the first token comes from computing the last position")
    for group, slots in enumerate(tables):
        every = (
            m.config.page_size if m.config.windows[group] == STATE else 1
        )  # positions between a page's ends: no state
        for position in range(every - 1, len(slots), every):
            slot = slots[position]
            if slot >= 0 and m.memory.get(slot) != running.cell(group, position):
                was = f"{m.request} finds position {position} in slot {slot}, which holds {m.memory.get(slot)}"
                return Finding(was, f"{running.cell(group, position)}", "it goes on from another's text")
    return True


@checks("BLOCKS-02", CONTRACT)
def every_page_is_free_or_held(m: BlockManagerMoment) -> Outcome:
    num_free, by_request = m.after
    held = set().union(*map(m.pages_of, by_request.values()))
    if num_free + len(held) != m.config.num_pages:
        was = f"{num_free} pages are free, {len(held)} are held"
        return Finding(was, f"{m.config.num_pages} in all", "a page is lost, or handed out under its holder")
    if m.drained and num_free != m.config.num_pages:
        return Finding(f"{num_free} pages are free at the end", f"{m.config.num_pages}", "a page is lost")
    return True


@checks("BLOCKS-03", CONTRACT)
def what_is_computed_stays(m: BlockManagerMoment) -> Outcome:
    mine = {slot // m.config.page_size for slot in m.written}
    for name, running in m.running.items():
        shared = mine & m.pages_of(running.tables) if name != m.request else ()
        if shared:
            was = f"{m.request} writes page {min(shared)}, which {name} has, too"
            return Finding(was, "pages of its own", "only full pages are shared")
        for group, slots in enumerate(running.tables):
            for position in m.read_at(running, group):
                slot = slots[position]
                if m.memory.get(slot) != running.cell(group, position):
                    was = f"slot {slot} of {name}, position {position}, holds {m.memory.get(slot)}"
                    return Finding(was, f"{running.cell(group, position)}", "its attention reads another text there")
    return True if m.running else None


@checks("BLOCKS-04", CONTRACT, on=("admit", "grow"))
def what_fits_is_granted_and_a_refusal_changes_nothing(m: BlockManagerMoment) -> Outcome:
    if m.refusal is None:
        return True
    if not _is_as_before(m):
        return Finding(f"a refused {m.operation} changed {m.before} into {m.after}", "nothing", "it was refused")
    if m.fits:
        was = f"refused ({m.refusal}), with {m.before[0]} pages free"
        return Finding(was, "granted: that is enough", "the request waits for ever")
    return True


def _is_as_before(m: BlockManagerMoment) -> bool:
    """Return whether all requests have what they had, but for pages that no later position sees."""
    if m.after == m.before:
        return True
    (_, before), (_, after) = m.before, m.after
    if before.keys() != after.keys() or not any(m.config.windows):
        return False
    return all(
        len(was) == len(now)
        and all(
            new == old or (new == -1 and not m.must_have(m.running[name], group, position))
            for position, (old, new) in enumerate(zip(was, now, strict=True))
        )
        for name in before
        for group, (was, now) in enumerate(zip(before[name], after[name], strict=True))
    )


@checks("BLOCKS-05", CONTRACT, "caching", on=("admit",))
def what_was_released_is_found_again(m: BlockManagerMoment) -> Outcome:
    if m.match is None:
        return None
    if m.match[0] < m.expected:
        was = f"{m.request} starts with {m.match[0]} cached positions"
        return Finding(
            was, f"{m.expected}: they were released, and no page was handed out since", "they are computed again"
        )
    return True


@checks("BLOCKS-06", CONTRACT, on=("admit", "grow"))
def slots_stand_in_whole_pages(m: BlockManagerMoment) -> Outcome:
    if m.refusal is not None:
        return None
    size, running = m.config.page_size, m.running[m.request]
    for group, slots in enumerate(running.tables):
        needed = m.config.pages_to(group, running.computed) * size
        if len(slots) < needed:
            was = f"{m.request} has {len(slots)} slots"
            return Finding(was, f"{needed}, one for each position", "the last ones are written nowhere")
        for position, slot in enumerate(slots):
            if slot == -1 and not m.must_have(running, group, position):
                continue  # its page was given back
            in_order = position % size == 0 or slot == slots[position - 1] + 1
            if slot < 0 or slot % size != position % size or not in_order:
                was = f"position {position} of {m.request} is in slot {slot}, behind slot {slots[position - 1]}"
                return Finding(was, "pages of neighbouring slots", "kernels address pages, not slots")
    return True


@checks("BLOCKS-07", CONTRACT, "misuse", on=("release-stray", "admit-again"))
def misuse_changes_nothing(m: BlockManagerMoment) -> Outcome:
    if m.operation.tag == "admit-again" and m.refusal is None:
        return Finding(f"{m.operation} was accepted", "a refusal", "two requests share one table")
    if m.after != m.before:
        return Finding(f"{m.operation} changed {m.before} into {m.after}", "nothing", "other requests pay for it")
    return True


@checks("BLOCKS-08", CONTRACT, "events")
def events_say_what_is_cached(m: BlockManagerMoment) -> Outcome:
    if m.wrong_event:
        return Finding(
            m.wrong_event, "events that follow from those before", "who reads them has another cache in mind"
        )
    for cell, count in m.account.copies.items():
        if count > (there := m.num_pages_with(cell)):
            was = f"by the events {count} cached pages end with {cell}, and {there} hold it"
            return Finding(was, f"{there} at most", "a page that was handed out must leave the cache")
    if m.unannounced is not None:
        was = f"{m.request} found the page that ends with {m.unannounced}"
        return Finding(
            was, "a cached one: it has not entered the cache by the events, or has left it", "routers miss it"
        )
    if m.match is not None and m.match[0] < m.announced:
        was = f"{m.request} starts with {m.match[0]} cached positions"
        return Finding(was, f"{m.announced}: they are cached by the events", "routers send requests here for nothing")
    return True if m.account.texts else None


@checks("BLOCKS-09", CONTRACT, "lru", on=("admit",))
def the_page_unused_for_longest_goes_first(m: BlockManagerMoment) -> Outcome:
    if m.outlived is not None:
        page, gone = m.outlived
        was = (
            f"page {gone.page}, found in operation {gone.found_at}, was handed out in operation {gone.went_at}, and page "
            f"{page}, which no request has had since operation {gone.other_used_at}, is still cached"
        )
        return Finding(was, f"page {page} goes first", "what is in use is computed again, and what is not stays")
    return True if m.match is not None and m.match[0] else None
