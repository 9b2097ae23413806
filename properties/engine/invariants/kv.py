"""Who owns which slots while steps are in flight:
RELAY-01, 04, 06, ENGINE-06, ACCEPT-08, RADIX-09, 12, 13 of an engine."""

from __future__ import annotations

from ...harness.invariants import Finding, Outcome, checks
from ..language import NOTHING
from ..model import RUNNING
from ..observation import EngineMoment

CONTRACT = "engine"
COMES_BACK = "it comes back when the steps that were in flight are committed"


@checks("RELAY-01", CONTRACT, "slots")
def no_other_owns_what_a_step_writes(m: EngineMoment) -> Outcome:
    if m.model.lingering and m.leak_from not in (None, "abort", "retracted"):
        page, whose, why = m.leaked
        was = (
            f"page {page} (last of {whose}{f', which ended: {why}' if why else ''}) is neither free nor cached nor held"
        )
        return Finding(was, COMES_BACK, "a page that is never given back is lost")
    flights = m.model.lost + m.model.flights if m.model.lost else m.model.flights
    if not flights or m.is_still:
        return None
    if m.reuse_is_ordered:
        return True  # the device runs the later step after it; what is read of the wrong one shows in the tokens
    owners = m.owners
    for flight in flights:
        for page, (life, stay) in flight.writes.items():
            owner = owners.get(page)
            if owner == "*" and m.caches_at_allocation:
                continue  # what is read before it is written shows in the tokens
            if owner is None or (owner == life.name and (stay == life.stay or life.leaving)):
                continue
            whose = {"": "free", "*": "cached"}.get(owner, f"{owner}'s")
            was = f"step {flight.number} in flight writes page {page} of {life.name}, which is now {whose}"
            return Finding(was, "no other's until that step is committed", "the step writes into another's KV")
    return True


@checks("RELAY-04", CONTRACT, on=("commit",))
def a_request_that_has_left_gets_nothing(m: EngineMoment) -> Outcome:
    if m.counters is not None and min(m.counters) < 0:
        return Finding(f"the counters are {list(m.counters)}", "0 or more", "something was taken back twice")
    if not m.gone:
        return None
    for name in m.gone:
        if m.delivered.get(name) and name not in m.expected:
            was = f"{name} is given {m.delivered[name]} from step {m.committed.number}"
            should = "nothing: it has left since that was launched"
            return Finding(was, should, "another stay of it computes the same positions again")
    return True


@checks("RELAY-06", CONTRACT, "slots")
def launched_steps_have_their_slots(m: EngineMoment) -> Outcome:
    torn = _torn_page(m) if m.config.page_size > 1 and m.after.slots != m.before.slots else None
    if torn is not None:
        return torn
    if m.has_table and m.flight is not None and (wrong := _wrong_in_the_table(m)) is not None:
        return wrong
    if not m.model.flights or m.is_still:
        return None
    for flight in m.model.flights:
        for row in flight.rows:
            if not row.is_present:
                continue
            name = row.life.name
            launched, now = flight.slots.get(name, ()), m.after.slots.get(name, ())
            fewest = min(len(launched), len(now))
            if fewest < row.reach:
                was = f"{name} has {fewest} slots; step {flight.number} begins at {row.latest} at most, "
                was += f"with {flight.rounds} rounds of S = {flight.steps}"
                should = f"{row.reach} slots or more while the step is in flight"
                return Finding(was, should, "a round writes past the slots of its row")
            if now[row.length : row.reach] != launched[row.length : row.reach]:
                was = f"the slots of {name} from position {row.length} have changed under step {flight.number}"
                return Finding(was, "they stay as they were launched", "the device goes on writing where they were")
    return True


def _wrong_in_the_table(m: EngineMoment) -> Finding | None:
    """Return a request of the step that is launched whose slots the device would look for elsewhere."""
    for part in m.flight.parts:
        name, table = part.life.name, part.row.table
        slots = m.flight.slots[name][: part.written[1]]
        known = tuple(table[: len(slots)])
        if known != slots:
            at = next((at for at, slot in enumerate(known) if slot != slots[at]), len(known))
            there = f"slot {known[at]}" if at < len(known) and known[at] >= 0 else "no slot"
            was = f"in step {m.flight.number} the device has {there} for position {at} of {name}"
            return Finding(was, f"slot {slots[at]}, which is reserved for it", "it reads and writes where it is told")
    return None


def _torn_page(m: EngineMoment) -> Finding | None:
    """Return a row that has changed and whose slots are not whole pages, ascending."""
    size, before = m.config.page_size, m.before.slots
    for name, slots in m.after.slots.items():
        if slots == before.get(name):
            continue
        firsts = slots[::size]
        if len(slots) % size or slots != tuple([first + at for first in firsts for at in range(size)]):
            was = f"{name} has the slots {list(slots)}"
            return Finding(was, f"whole pages of {size}, ascending inside each", "kernels address a page by its number")
        if any(first % size for first in firsts) or len(set(firsts)) != len(firsts):
            was = f"{name} has pages at the slots {list(firsts)}"
            return Finding(was, f"different multiples of {size}", "two positions of a row would share a slot")
    return None


@checks("ENGINE-06", CONTRACT, "slots")
def a_retracted_request_holds_nothing(m: EngineMoment) -> Outcome:
    why = "memory that was taken from one must serve another"
    if m.model.lingering and m.leak_from == "retracted":
        was = f"page {m.leaked[0]} of {m.leaked[1]}, which was retracted, is neither free nor cached nor held"
        return Finding(was, COMES_BACK, why)
    if not m.retracted:
        return None
    for life in m.retracted:
        held = m.after.slots.get(life.name)
        if life.name in m.after.waiting and held:
            return Finding(f"{life.name} waits and has {len(held)} slots", "none", why)
    return True


@checks("ACCEPT-08", CONTRACT, "slots", on=("commit",))
def no_row_holds_more_than_its_reserve(m: EngineMoment) -> Outcome:
    if m.keeps_reserves and m.committed.rounds > 1 and (kept := _kept_of_a_multi_step(m)) is not None:
        return kept
    if any(flight.rounds > 1 for flight in m.model.flights):
        return None  # the reserve of a multi-step is its own
    found = None
    bound = m.config.reserve + m.config.page_size
    for name, slots in m.after.slots.items():
        life = m.model.lives.get(name)
        if life is None or life.kv < 0 or not life.decoding:
            continue
        found = True
        if len(slots) - life.kv >= bound:
            was = f"{name} has {len(slots)} slots for {life.kv} positions"
            return Finding(was, f"fewer than {bound} beyond them", "slots are reserved and never used")
    return found


def _kept_of_a_multi_step(m: EngineMoment) -> Finding | None:
    """Return a row that holds more after a multi-step than the same rounds, planned one by one, would have left it."""
    flight, config, later = m.committed, m.config, {row.life for other in m.model.flights for row in other.rows}
    for number, row in enumerate(flight.rows):
        life, lengths = row.life, [len(runs[number]) for runs in m.answer.runs]
        slots = m.after.slots.get(life.name)
        if (
            slots is None
            or life.state is not RUNNING
            or not row.is_present
            or any(f.rounds > 1 for f in m.model.flights)
        ):
            continue
        # A plan knows the length before the last round; one that overlaps it, that of a round earlier.
        unseen = lengths[-1:] if life in later or not config.overlap else lengths[-2:]
        most = max(flight.held[life.name], config.whole_pages(life.kv - sum(unseen) + config.reserve))
        if life not in later and len(slots) > most:
            was = f"{life.name} holds {len(slots)} slots after {len(lengths)} rounds of a multi-step"
            return Finding(was, f"{most}, as after single rounds", "what a multi-step has reserved must serve others")
    return None


@checks("RADIX-09", CONTRACT, "prefix_cache")
def only_what_is_computed_is_cached(m: EngineMoment) -> Outcome:
    cached = m.after.cached
    if not cached or cached == m.before.cached:
        return None
    size = m.config.page_size
    due = {page for flight in m.model.flights for page in flight.writes} if m.caches_at_allocation else ()
    for page in set(cached).difference(m.before.cached or (), due):
        cells = m.cells[page * size : page * size + size]
        if NOTHING in cells:
            was = f"page {page} is cached, and position {cells.index(NOTHING)} of it holds no text"
            should = "pages whose tokens are all computed and verified"
            return Finding(was, should, "the next request with this prefix reads garbage")
    return True


@checks("RADIX-12", CONTRACT, "prefix_cache", on=("plan", "commit"))
def the_shared_prefix_is_the_one_of_now(m: EngineMoment) -> Outcome:
    found = None
    for part in m.committed.parts if m.committed is not None else ():
        if part.row.stale is not None:
            was = f"{part.life.name} reads the draft KV in slot {part.row.stale}, which was made before another token"
            return Finding(was, "draft KV of its own text", "its drafts follow another text, and fewer are accepted")
    size, cached = m.config.page_size, m.after.cached
    for life, start in m.admitted:
        slots = m.after.slots.get(life.name)
        if slots is None or cached is None:
            continue
        found = True
        pages = [slot // size for slot in slots[::size]]
        start -= m.loads.get(life.name, 0)  # what comes from host memory is copied into pages of its own
        shared, own = pages[: start // size], pages[-(-start // size) :]
        was = f"{life.name} enters with {start} positions on the pages {shared}"
        if len(slots) < start or not set(shared) <= set(cached):
            return Finding(was, f"cached ones: {sorted(cached)}", "the prefix found earlier may have been evicted")
        is_there = not m.caches_at_allocation  # it may be computed by this step
        if is_there and [m.cells[slot] for slot in slots[:start]] != life.row.stream.hashes[:start]:
            return Finding(f"{was}, which hold another text", "its own prefix", "it goes on from another's prompt")
        overlap = sorted(set(own) & set(cached))
        if overlap and is_there:
            was = f"{life.name} begins to write at {start}, on the cached page {overlap[0]}"
            return Finding(was, "pages of its own", "cached pages are read-only")
    return found


@checks("RADIX-13", CONTRACT, "prefix_cache", on=("plan",))
def a_hit_leaves_a_token_to_compute(m: EngineMoment) -> Outcome:
    if m.after.cached is None:
        return None
    found = None
    size = m.config.page_size
    for life, start in m.admitted:
        if start >= len(life.context):
            was = f"{life.name} enters with all {start} positions cached"
            return Finding(was, f"{len(life.context) - 1} at most", "the first token comes from computing the last one")
        if start:
            found = True
        # The engine must use the pages that are there: one after the other, as long as the last position is the text's.
        if m.cached_before is None or not set(m.before.cached or ()) <= set(m.after.cached) or _has_refilled(m):
            continue
        if m.config.groups:
            continue  # another group may lack what the next position reads
        usable = (len(life.context) - 1) // size * size
        ends = life.row.stream.hashes[size - 1 : usable : size]
        there = next((at for at, value in enumerate(ends) if value not in m.cached_before), len(ends))
        due = (there - (m.config.algorithm == "head")) * size
        if start < due:
            was = f"{life.name} enters with {start} positions from the cache"
            return Finding(was, f"{due}, which are there", "what is cached and not found is computed again")
    return found


def _has_refilled(m: EngineMoment) -> bool:
    """Return whether the plan may have given a cached page another content, which is cached at once."""
    before, after = m.before.slots, m.after.slots
    if not m.caches_at_allocation or before is None or after is None:
        return False
    size, entered = m.config.page_size, {life.name: start for life, start in m.admitted}
    taken: set[int] = set()
    for name, slots in after.items():
        own = slots[entered.get(name, len(before.get(name, ()))) :]
        taken.update(slot // size for slot in own)
    return not taken.isdisjoint(m.before.cached or ())
