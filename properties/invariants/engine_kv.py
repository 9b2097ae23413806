"""Whose slots are whose while steps are in flight: RELAY-01, 04, 06, ENGINE-06, ACCEPT-08, RADIX-09, 12, 13 of an engine."""

from __future__ import annotations

from ..engine.language import NOTHING
from ..engine.moment import Moment
from ..engine.operations import Commit, Plan
from .registry import Finding, Outcome, checks

CONTRACT = "engine"


@checks("RELAY-01", CONTRACT, "slots")
def what_a_step_writes_is_nobody_elses(m: Moment) -> Outcome:
    if m.lost is not None and m.lost[2] not in ("abort", "retracted"):
        page, whose, why = m.lost
        return Finding(
            f"page {page} (last of {whose}{f', which ended: {why}' if why else ''}) is neither free nor cached nor held",
            "it comes back when the steps that were in flight are committed",
            "a page that nobody gives back is lost",
        )
    flights = m.model.lost + m.model.flights if m.model.lost else m.model.flights
    if not flights or m.is_still:
        return None
    owners = m.owners
    for flight in flights:
        for page, (life, stay) in flight.writes.items():
            owner = owners.get(page)
            if owner is None or (owner == life.name and (stay == life.stay or life.leaving)):
                continue
            return Finding(
                f"step {flight.number} in flight writes page {page} of {life.name}, which is now {_whose(owner)}",
                "nobody else's until that step is committed",
                "the step writes into another's KV",
            )
    return True


def _whose(owner: str) -> str:
    return {"": "free", "*": "cached"}.get(owner, f"{owner}'s")


@checks("RELAY-04", CONTRACT, on=(Commit,))
def nothing_is_delivered_to_who_has_left(m: Moment) -> Outcome:
    if m.counters is not None and min(m.counters) < 0:
        return Finding(f"the counters are {list(m.counters)}", "0 or more", "something was taken back twice")
    if not m.gone:
        return None
    for name in m.gone:
        if m.delivered.get(name) and name not in m.expected:
            return Finding(
                f"{name} is given {m.delivered[name]} from step {m.committed.number}",
                "nothing: it has left since that was launched",
                "another stay of it computes the same positions again",
            )
    return True


@checks("RELAY-06", CONTRACT, "slots")
def launched_steps_have_their_slots(m: Moment) -> Outcome:
    if not m.model.flights or m.is_still:
        return None
    for flight in m.model.flights:
        for row in flight.rows:
            name = row.life.name
            if row.stay != row.life.stay:
                continue
            launched, now = flight.slots.get(name, ()), m.after.slots.get(name, ())
            if min(len(launched), len(now)) < row.reach:
                return Finding(
                    f"{name} has {min(len(launched), len(now))} slots; step {flight.number} begins at {row.latest} at most, "
                    f"with {flight.rounds} rounds of S = {flight.steps}",
                    f"{row.reach} slots or more while the step is in flight",
                    "a round writes past what its row has",
                )
            if now[row.length : row.reach] != launched[row.length : row.reach]:
                return Finding(
                    f"the slots of {name} from position {row.length} have changed under step {flight.number}",
                    "they stay as they were launched",
                    "the device goes on writing where they were",
                )
    return True


@checks("ENGINE-06", CONTRACT, "slots")
def who_was_retracted_holds_nothing(m: Moment) -> Outcome:
    if m.lost is not None and m.lost[2] == "retracted":
        page, whose, _ = m.lost
        return Finding(
            f"page {page} of {whose}, which was retracted, is neither free nor cached nor held",
            "it comes back when the steps that were in flight are committed",
            "memory that was taken from one must serve another",
        )
    if not m.retracted:
        return None
    for life in m.retracted:
        shared = m.after.slots.get(life.name)
        if life.name in m.after.waiting and shared:
            return Finding(f"{life.name} waits and has {len(shared)} slots", "none", "it was retracted for its memory")
    return True


@checks("ACCEPT-08", CONTRACT, "slots", on=(Commit,))
def nobody_holds_more_than_its_reserve(m: Moment) -> Outcome:
    config = m.config
    if any(flight.rounds > 1 for flight in m.model.flights):
        return None  # the reserve of a block is its own
    found = None
    for name, slots in m.after.slots.items():
        life = m.model.lives.get(name)
        if life is None or life.kv < 0 or not life.decoding:
            continue
        found = True
        if len(slots) - life.kv >= config.reserve + config.page_size:
            return Finding(
                f"{name} has {len(slots)} slots for {life.kv} positions",
                f"fewer than {config.reserve + config.page_size} beyond them",
                "what is reserved and never used serves nobody",
            )
    return found


@checks("RADIX-09", CONTRACT, "prefix_cache")
def only_what_is_computed_is_cached(m: Moment) -> Outcome:
    cached = m.after.cached
    if not cached or cached == m.before.cached:
        return None
    size, cells = m.config.page_size, m.cells
    for page in set(cached).difference(m.before.cached or ()):
        if NOTHING in cells[page * size : page * size + size]:
            return Finding(
                f"page {page} is cached, and position {cells[page * size : page * size + size].index(NOTHING)} of it holds no text",
                "pages whose tokens are all computed and verified",
                "the next request with this prefix reads garbage",
            )
    return True


@checks("RADIX-12", CONTRACT, "prefix_cache", on=(Plan,))
def the_shared_prefix_is_the_one_of_now(m: Moment) -> Outcome:
    found = None
    size, cached = m.config.page_size, m.after.cached
    for life, start in m.admitted:
        slots = m.after.slots.get(life.name)
        if slots is None or cached is None:
            continue
        found = True
        pages = [slot // size for slot in slots[::size]]
        shared, own = pages[: start // size], pages[-(-start // size) :]
        if len(slots) < start or not set(shared) <= set(cached):
            return Finding(
                f"{life.name} enters with {start} positions on the pages {shared}",
                f"cached ones: {sorted(cached)}",
                "what was found when it began to wait may be gone",
            )
        if [m.cells[slot] for slot in slots[:start]] != life.row.stream.hashes[:start]:
            return Finding(
                f"{life.name} enters with {start} positions on the pages {shared}, which hold another text",
                "its own prefix",
                "it goes on from somebody else's prompt",
            )
        if not set(own).isdisjoint(cached):
            return Finding(
                f"{life.name} begins to write at {start}, on the cached page {sorted(set(own) & set(cached))[0]}",
                "pages of its own",
                "cached pages are read-only",
            )
    return found


@checks("RADIX-13", CONTRACT, "prefix_cache", on=(Plan,))
def a_hit_leaves_a_token_to_compute(m: Moment) -> Outcome:
    if m.after.cached is None:
        return None
    found = None
    size = m.config.page_size
    for life, start in m.admitted:
        if start >= len(life.context):
            return Finding(
                f"{life.name} enters with all {start} positions cached",
                f"{len(life.context) - 1} at most",
                "the token after them comes from computing the last one",
            )
        if start:
            found = True
        # And what is there is used: the pages, one after the other, whose last position is the text's.
        if m.cached_before is None or not set(m.before.cached or ()) <= set(m.after.cached):
            continue
        looks_ahead = m.config.algorithm == "head"
        usable = (len(life.context) - 1) // size * size
        ends = life.row.stream.hashes[size - 1 : usable : size]
        there = next((at for at, value in enumerate(ends) if value not in m.cached_before), len(ends))
        if start < (there - looks_ahead) * size:
            return Finding(
                f"{life.name} enters with {start} positions from the cache",
                f"{(there - looks_ahead) * size}, which are there",
                "what is cached and not found is computed again",
            )
    return found
