"""ALLOC-01 … ALLOC-19: what is true of every KV allocator and request table, after every operation.

A checker gets a `AllocatorMoment` (`allocator/model.py`) and looks at it alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..harness.invariants import Checker, Finding, Outcome, checks, first_difference, unchanged
from .model import AllocatorMoment

if TYPE_CHECKING:
    from ..harness.trial import Trial


CONTRACT = "allocator"


def recount(m: AllocatorMoment) -> dict[str, Finding]:
    """Recount the pool and its rows once. Returns what is wrong by invariant: ALLOC-01, 02, 03 and 05."""
    size, after, found = m.config.page_size, m.after, {}
    free, cached, owned = after.free_pages, m.model.cached, m.held.keys() | m.waiting.keys()
    num_free = m.config.num_pages - len(owned) - len(cached)
    if after.num_free != num_free * size:
        was = f"{after.num_free} slots free, {len(owned)} pages held or deferred, {len(cached)} cached"
        should = f"{num_free * size} of {m.config.num_pages} pages of {size} slots free"
        why = "a page that is neither held nor free is lost, one that is counted twice will have two owners"
        found["ALLOC-01"] = Finding(was, should, why)
    elif after.num_deferred not in (None, sum(m.waiting.values())):
        should = f"{sum(m.waiting.values())}: pages {sorted(m.waiting)}"
        why = "what waits for a step is neither free nor held, and must be counted once"
        found["ALLOC-01"] = Finding(f"num_deferred() is {after.num_deferred}", should, why)
    elif m.row_granted is False and m.row_was_free:
        found["ALLOC-01"] = Finding("no row for a request", "one of the free rows", "a row that nothing holds is lost")
    if m.row_granted and not m.row_was_free:
        was = "a row is handed out while all are taken or in use by a step in flight, or without room for its states"
        found["ALLOC-03"] = Finding(was, "a refusal", "two requests would share the row")
    if m.not_cacheable:
        why = "an evictable page may be taken at any moment"
        found["ALLOC-05"] = Finding(
            f"page {m.not_cacheable[0]} is cached", "only retired pages without a holder are", why
        )
    if free is None:
        for page in m.pages_of_answer() if m.answer else ():
            if page in m.waiting_before:
                was = f"page {page} is handed out while a step in flight may still touch it"
                found["ALLOC-03"] = Finding(was, "another page", "the step would write into the new owner's KV")
        return found
    if len(free) * size != after.num_free:
        was = f"num_free() is {after.num_free}, the free list has {len(free)} pages of {size}"
        found["ALLOC-02"] = Finding(was, f"num_free() is {len(free) * size}", "the counter and the list differ")
    if len(free) == num_free and m.all_pages == {*free, *owned, *cached}:
        return found  # each page once: what follows finds nothing
    places = ("free", free), ("cached", cached), ("held", m.held), ("deferred to a step that still runs", m.waiting)
    for page in sorted({*m.all_pages, *free, *cached}):
        states = [name for name, pages in places if page in pages]
        was = f"page {page} is {' and '.join(states) or 'neither free, cached, held nor deferred'}"
        if free.count(page) > 1:
            was_twice = f"page {page} stands {free.count(page)} times in the free list {list(free)}"
            found.setdefault("ALLOC-02", Finding(was_twice, "once", "it will be handed out to two holders"))
        if page in free and page in owned:
            why = "the next allocation gives it to another holder"
            found.setdefault("ALLOC-03", Finding(was, "a free page has no owner", why))
        if page not in m.all_pages:
            should = f"pages {sorted(m.all_pages)}"
            found.setdefault("ALLOC-05", Finding(was, should, "it lies outside the pool"))
        elif (page in free) + (page in cached) + (page in owned) != 1:
            found.setdefault("ALLOC-05", Finding(was, "one of them", "every page is in exactly one state"))
    return found


def _of_recount(id: str) -> Checker:
    def check(m: AllocatorMoment) -> Outcome:
        if m.recounted is None:
            m.recounted = recount(m)
        return m.recounted.get(id, True)

    return check


for _id, _needs in {"ALLOC-01": (), "ALLOC-02": ("inspection",), "ALLOC-03": (), "ALLOC-05": ("inspection",)}.items():
    checks(_id, CONTRACT, *_needs, general=_id == "ALLOC-01")(_of_recount(_id))


@checks("ALLOC-04", CONTRACT, "sharing")
def references_are_the_holders(m: AllocatorMoment) -> Outcome:
    first, held, waiting = m.first_page, m.held, m.waiting
    for page, count in enumerate(m.after.references, first):
        should = held.get(page, 0) + (waiting.get(page, 0) if waiting else 0)
        if count != should:
            return Finding(
                f"references({page}) is {count}",
                f"{should}, by recounting the holders",
                "a page with too few references is freed under a holder, one with too many never comes back",
            )
    return True


@checks("ALLOC-06", CONTRACT)
def writable_pages_have_one_owner(m: AllocatorMoment) -> Outcome:
    if m.answer is not None:
        for page in m.pages_of_answer():
            if page in m.held_before:
                was = f"page {page} is handed out, and another holds it"
                return Finding(was, f"none of {sorted(m.held_before)}", "two owners write to the same slots")
    if m.stale is not None:
        whose, slot, found, expected = m.stale
        was = f"slot {slot} of {whose} holds {found}"
        return Finding(was, f"{expected}", "another holder has written there, or the slot is another one than before")
    if m.after.rows is not None and not m.capabilities.sharing and sum(m.held.values()) != len(m.held):
        page = next(page for page, count in m.held.items() if count > 1)
        return Finding(f"page {page} is in {m.held[page]} tables", "one", "two owners write to the same slots")
    return True


@checks("ALLOC-07", CONTRACT, "table")
def rows_are_in_bounds(m: AllocatorMoment) -> Outcome:
    if not m.after.rows:
        return None
    size, width = m.config.page_size, m.config.row_width
    for request, slots in m.after.rows:
        committed = m.model.rows[request].committed
        if not committed <= len(slots) <= width or len(slots) % size:
            return Finding(
                f"{request} has {committed} tokens committed and {len(slots)} slots allocated",
                f"committed <= allocated <= {width}, in pages of {size}",
                "a row that is too short writes past its slots, one that is too wide into the next row",
            )
    return True


@checks("ALLOC-08", CONTRACT)
def as_many_pages_as_needed(m: AllocatorMoment) -> Outcome:
    size = m.config.page_size
    if m.answer is not None and len(m.answer) != m.asked:
        was = f"asked for {m.asked} slots, got {len(m.answer)}: {list(m.answer)}"
        return Finding(was, f"{max(m.asked, 0)} slots", "the caller counts on what it asked for")
    if m.after.rows:
        for request, slots in m.after.rows:
            wanted = m.model.rows[request].wanted
            if len(slots) != -(-wanted // size) * size:
                return Finding(
                    f"{request} needs room for {wanted} tokens and has {len(slots)} slots",
                    f"{-(-wanted // size)} pages of {size}",
                    "one page too few at a page's edge is a write out of bounds, one too many is lost room",
                )
        return True
    return None if m.answer is None else True


@checks("ALLOC-09", CONTRACT, on=("alloc", "grow", "open", "extend", "decode"))
def a_refusal_changes_nothing(m: AllocatorMoment) -> Outcome:
    if m.refusal is None:
        return None
    # A free list may be sorted before the call is refused.
    return unchanged(m, "the caller goes on as if it had never asked", unordered=("free_pages",))


@checks("ALLOC-10", CONTRACT, "misuse", on=("free-stray", "free-twice"))
def only_what_is_held_can_be_freed(m: AllocatorMoment) -> Outcome:
    if m.operation.tag == "free-stray":
        if m.refusal is None:
            was = f"free of pages {list(m.operation.pages)} was accepted"
            return Finding(was, "a typed error: not all of them are held", "a page freed twice is handed out twice")
        return unchanged(m, "a refused free gives nothing back")
    if m.operation.tag == "free-twice":
        if m.refusal is not None:
            return unchanged(m, "a refused free gives nothing back")
        still = m.held.get(m.twice, 0) + m.waiting.get(m.twice, 0)
        dropped = m.after.references is not None and m.after.references[m.twice - m.first_page] != still
        if dropped or m.after.num_free - m.before.num_free > m.config.page_size:
            was = f"a list that names page {m.twice} twice dropped two references"
            return Finding(was, "one, or a refusal", "the page is freed under its other holder, or freed twice")
        return True
    return None


@checks("ALLOC-11", CONTRACT, on=("alloc", "grow", "trim", "extend", "decode"))
def ids_are_good(m: AllocatorMoment) -> Outcome:
    if m.parts:
        return _parts_go_on(m)
    if m.operation.tag != "alloc":
        return _rows_are_pages(m)
    if m.answer is None:
        return None
    size, first = m.config.page_size, m.first_page
    low, high = first * size, (first + m.config.num_pages) * size
    for slot in m.answer:
        if not low <= slot < high:
            return Finding(f"slot {slot} was handed out", f"ids in {low} … {high - 1}", "it lies outside the pool")
    if len(set(m.answer)) != len(m.answer):
        twice = next(slot for slot in m.answer if m.answer.count(slot) > 1)
        return Finding(f"slot {twice} stands twice in {list(m.answer)}", "distinct ids", "two tokens in one slot")
    if size > 1:
        for at in range(0, len(m.answer) - size + 1, size):
            page = m.answer[at : at + size]
            if page[0] % size or page != tuple(range(page[0], page[0] + size)):
                was = f"slots {list(page)} are no page"
                return Finding(was, f"{size} neighbours from a multiple of {size}", "kernels address whole pages")
    return True


def _parts_go_on(m: AllocatorMoment) -> Outcome:
    """Return whether each request of a batch goes on behind its last slot, and where its page is full in a new
    one of the pool."""
    size, first = m.config.page_size, m.first_page
    for name, before in m.parts:
        slots = m.model.parts[name].slots
        for position in range(before, len(slots)):
            slot, is_new = slots[position], position % size == 0
            was = f"position {position} of {name} is in slot {slot}"
            if is_new and (slot % size or not first <= slot // size < first + m.config.num_pages):
                return Finding(was, "the first slot of a page of the pool", "kernels address whole pages")
            if is_new and slot // size in m.held_before:
                return Finding(was, "a page that nothing holds", "two owners write to the same slots")
            if not is_new and slot != slots[position - 1] + 1:
                should = f"{slots[position - 1] + 1}, behind the position before"
                return Finding(was, should, "kernels find a token by its page and its place there")
    return True


def _rows_are_pages(m: AllocatorMoment) -> Outcome:
    """Return whether the slots of every row that has changed are whole pages, ascending inside each."""
    if not m.after.rows:
        return None
    size, before = m.config.page_size, dict(m.before.rows or ())
    for request, slots in m.after.rows:
        if slots == before.get(request):
            continue
        if slots != tuple([first + at for first in slots[::size] for at in range(size)]):
            was = f"{request} has the slots {list(slots)}"
            return Finding(was, f"whole pages of {size}, ascending inside each", "kernels address a page by its number")
    return True


@checks("ALLOC-12", CONTRACT, "padding_page")
def padding_stays_out(m: AllocatorMoment) -> Outcome:
    size, free, cached = m.config.page_size, m.after.free_pages, m.after.cached_pages
    seen = bool(m.answer) and min(m.answer) < size and any(0 <= slot < size for slot in m.answer)
    if seen or 0 in m.held or (free and 0 in free) or (cached and 0 in cached):
        was = "page 0 is in circulation"
        return Finding(was, "the padding page has no holder", "the lanes of a padded batch write there")
    return True


@checks("ALLOC-13", CONTRACT, twin="again")
def same_history_same_ids(runs: tuple[Trial, Trial]) -> Outcome:
    found = first_difference(runs)
    if found is not None:
        was = "operation {} gave {} in one run and {} in the next".format(*found)
        return Finding(was, "the same", "a run that cannot be repeated cannot be examined, and two ranks come apart")
    return True


@checks("ALLOC-14", CONTRACT, on=("alloc", "grow", "extend", "decode"))
def what_is_promised_is_kept(m: AllocatorMoment) -> Outcome:
    if m.allowed is None:
        return None
    if m.allowed and m.refusal is not None:
        was = f"can_allocate({m.asked}) was true, then it was refused: {m.refusal}"
        return Finding(was, "it succeeds", "the scheduler has planned with it")
    if m.must_succeed and m.refusal is not None:
        was = f"{m.asked} slots were refused ({m.refusal}) with {m.before.num_free} free"
        return Finding(was, "they are handed out", "an allocator that refuses what it has wastes memory")
    if m.must_succeed and not m.allowed:
        was = f"can_allocate({m.asked}) was false with {m.before.num_free} slots free"
        return Finding(was, "true", "a request waits for ever for room that is there")
    return True


@checks("ALLOC-15", CONTRACT)
def all_comes_back(m: AllocatorMoment) -> Outcome:
    if not m.drained:
        return None
    left = {
        "deferred": m.after.num_deferred,
        "cached": len(m.after.cached_pages or ()),
        "rows": len(m.after.rows or ()),
    }
    left = {name: count for name, count in left.items() if count}
    total = m.config.num_pages * m.config.page_size
    if m.after.num_free != total or left:
        was = f"drained and flushed: {m.after.num_free} of {total} slots free, left over: {left or 'nothing'}"
        return Finding(was, "all free, nothing left", "what does not come back is lost until the next restart")
    return True


@checks("ALLOC-16", CONTRACT, on=("alloc", "grow", "extend", "decode"))
def edges_of_the_pool(m: AllocatorMoment) -> Outcome:
    if m.asked == 0 and m.operation.tag == "alloc":
        if m.answer != ():
            was = f"got {list(m.answer)}" if m.answer is not None else f"was refused: {m.refusal}"
            return Finding(f"alloc(0) {was}", "[]", "a step that needs nothing is not an error")
        return True
    if m.must_refuse and m.refusal is None:
        return Finding(
            f"{m.asked} slots were granted",
            f"a refusal: the pool has {m.config.num_pages * m.config.page_size}, "
            f"{m.before.num_free} of them free, in pages of {m.config.page_size}",
            "there is no such room",
        )
    return True if m.must_refuse else None


@checks("ALLOC-17", CONTRACT, "groups")
def units_are_conserved(m: AllocatorMoment) -> Outcome:
    if not m.config.groups:
        return None
    for i, group in enumerate(m.model.groups):
        units, used, pages = m.model.units_in_use(i), m.after.used_units[i], len(m.after.unit_pages[i])
        if used != len(units):
            was = f"{used} units of group {i} are in use, and rows hold {len(units)}"
            return Finding(was, f"{len(units)} units", "a unit that no row holds is lost, one too few has two owners")
        if pages != group.pages_of(used):
            was = f"{used} units of group {i}, {group.quarters}/4 of a page each, take {pages} pages"
            return Finding(was, f"{group.pages_of(used)} pages", "one too many is lost room, one too few is not there")
    return True


@checks("ALLOC-18", CONTRACT, "groups")
def a_row_has_the_units_of_its_window(m: AllocatorMoment) -> Outcome:
    if not m.config.groups or not m.model.rows:
        return None
    size = m.config.page_size
    for name, row in m.model.rows.items():
        for i, (group, (first, units)) in enumerate(zip(m.model.groups, row.units, strict=True)):
            if not group.window:
                if len(units) != group.states:
                    was = f"{name} has {len(units)} states of group {i}"
                    return Finding(was, f"{group.states}", "a request overwrites a state that it goes back to")
                continue
            begin, end = group.first_page(row.committed, size), len(row.slots) // size
            if (first, first + len(units)) != (begin, end):
                was = f"group {i}: {name} has units of the pages {first} … {first + len(units) - 1}"
                should = f"{begin} … {end - 1}, with {row.committed} tokens final and a window of {group.window}"
                return Finding(was, should, "a step reads or writes what it has not, or room is held that is not read")
    return True


@checks("ALLOC-19", CONTRACT, "groups")
def a_unit_has_one_row_and_what_this_wrote(m: AllocatorMoment) -> Outcome:
    if not m.config.groups:
        return None
    for i in range(len(m.model.groups)):
        units = m.model.units_in_use(i)
        if len(set(units)) != len(units):
            twice = next(unit for unit in units if units.count(unit) > 1)
            was = f"unit {twice} of group {i} is held twice, by rows or by a row that a step in flight may touch"
            return Finding(was, "once", "two requests write to it")
    if m.stale_unit is not None:
        name, i, unit, found, expected = m.stale_unit
        was = f"unit {unit} of group {i}, which {name} holds, has {found}"
        return Finding(was, f"{expected}", "another has written there, or it is another unit than before")
    return True
