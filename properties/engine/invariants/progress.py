"""ENGINE-07: requests that fit are launched, and no request gives way in vain. Free pages and needs are counted here,
not asked of the engine.

Every bound is generous: what an engine keeps in reserve is its own choice as long as it is no more than twice what a
round needs.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...harness.invariants import Finding, Outcome, checks
from ..language import NOTHING, stream_of
from ..model import RequestLife
from ..observation import EngineMoment
from ..rules import room_for_all

CONTRACT = "engine"


@checks("ENGINE-07", CONTRACT, "slots", on=("plan", "submit", "abort", "retract"))
def what_fits_is_launched(m: EngineMoment) -> Outcome:
    if not m.asked:
        return _blocks_that_go_on(m)
    return _needless_retraction(m) or (_against_reserves(m) if m.keeps_reserves else None) or _idle(m)


def _idle(m: EngineMoment) -> Outcome:
    """Return a finding if the plan leaves out what would fit without doubt."""
    config, model = m.config, m.model
    others = model.flights if m.flight is None else model.flights[:-1]
    if m.is_disturbed or m.retracted or model.holding or m.refusal is not None or len(others) >= config.depth:
        return None
    if any(not part.is_present for flight in others for part in flight.parts):
        return None  # slots of a request that has left come back with a step in flight
    free = len(m.before.free) * config.page_size
    running = [model.lives[name] for name in m.before.running if name in model.lives]
    if m.flight is None:
        room = room_for_all(config, len(running))
        for life in running:
            if not life.leaving and free >= room and (not life.decoding or not _may_have_ended(m, life)):
                was = f"nothing is launched, with {life.name} running and {free} slots free"
                return Finding(was, f"a step; {room} slots are enough for all that run", "the device idles")
    if not m.was_waiting or m.admitted or (m.estimates and running):
        return True
    if any(not life.decoding or life.leaving for life in running):
        return True  # a prompt in progress goes first
    if m.flight is not None and m.flight.chunks:
        return True
    if len(running) >= m.max_running:
        return _preemption_that_is_due(m, running) or True
    needed = max(len(life.wish.prompt) + len(life.delivered) for life in m.was_waiting)
    if m.keeps_reserves:
        free = len(m.after.free) * config.page_size  # what runs has taken its own
        exact = config.whole_pages(needed + config.reserve) + config.whole_pages(config.reserve) * len(running)
        if free >= exact + config.num_slots // 64:
            was = f"no request enters, with {len(running)} of {m.max_running} running, which leave {free} slots"
            should = f"the head of the queue, if it has {needed} tokens at most and each that runs keeps its reserve"
            return Finding(was, should, "a row stays empty")
    # All that run reserve for the next step, and a request that enters may be asked to leave them as much again.
    needed += room_for_all(config, 2 * len(running) + 1) + config.num_slots // 64
    if free >= needed:
        was = f"no request enters, with {len(running)} of {m.max_running} running and {free} slots free"
        return Finding(was, f"the head of the queue; {needed} slots are enough for any", "a row stays empty")
    return _preemption_that_is_due(m, running) or True


def _against_reserves(m: EngineMoment) -> Finding | None:
    """Return a finding if what enters leaves less than a reserve to each that runs, or a step has fewer or more rounds
    than its own plan may decide on."""
    config, flight, slots = m.config, m.flight, m.after.slots
    if flight is None or m.refusal is not None:
        return None
    size, cached = config.page_size, set(m.after.cached or ())
    free = len(m.after.free) * size
    decoding = [life for life in m.model.running() if life.decoding and not life.leaving]
    if m.admitted and m.was_holding and not m.estimates:
        was = f"{m.admitted[0][0].name} enters before a round is committed since a retraction"
        return Finding(was, "nothing enters until then", "two requests could retract each other in turns")
    if m.admitted and not m.estimates:
        life, used = m.admitted[-1][0], {slot // size for own in slots.values() for slot in own[::size]}
        needed = max(config.whole_pages(len(life.context) + config.reserve) - len(slots[life.name]), 0)
        others = {*flight.lives(), *decoding} - {life, *(chunk.life for chunk in flight.chunks if not chunk.is_last)}
        needed += config.whole_pages(config.reserve) * len(others)
        room = free + len(cached - used) * size
        if room < needed:
            was = f"{life.name} enters, which leaves {room} slots"
            should = f"{needed}: the rest of its own and a reserve for {len(others)} others"
            return Finding(was, should, "it is retracted again, and all that it has computed is lost")
    waiting, others = m.model.waiting(), m.before_plan
    is_choice = m.estimates or m.is_disturbed
    if flight.rounds > 1 and waiting and len(m.after.running) < m.max_running and not is_choice:
        needed = max(len(life.context_of_now) for life in waiting) + room_for_all(config, len(decoding) + 1)
        if free >= needed + config.num_slots // 64:
            was = (
                f"step {flight.number} has {flight.rounds} rounds, with {waiting[0].name} waiting and {free} slots free"
            )
            return Finding(was, f"one: {needed} slots are enough for it", "a request that fits waits for a whole block")
    may_differ = waiting or m.is_disturbed or m.model.holding or (m.recovery is not None and m.recovery.is_reduced)
    if may_differ or flight.chunks or flight.rounds > 1 or config.block_rounds == 1 or not flight.rows:
        return None
    if any(other.rounds > 1 or other.chunks for other in others) or len(decoding) < len(m.after.running):
        return None
    if any(life.wish.stop_strings for life in decoding):
        return None
    newest = max(row.latest for row in flight.rows) + (4 + 2 * len(others)) * config.round_slots
    slack = (
        config.chunk_size + config.context_len + 3 * room_for_all(config, config.max_running) + config.num_slots // 64
    )
    if newest <= config.context_len and free >= slack + 4 * len(decoding) * (config.round_slots + size):
        was = f"step {flight.number} has one round, with {free} slots free, and nothing waits"
        return Finding(was, "several: no plan could differ", "the host decides as often as the device steps")
    return None


def _may_have_ended(m: EngineMoment, life: RequestLife) -> bool:
    """Return whether the steps in flight may be its last."""
    length = life.kv if life.kv >= 0 else len(life.context)
    for flight in m.model.flights:
        rows = [row for row in flight.rows if row.life is life and row.is_present]
        length += len(rows) * flight.rounds * (flight.steps + 1)
    return life.has_stops or length >= life.end_kv


def _preemption_that_is_due(m: EngineMoment, running: Sequence[RequestLife]) -> Finding | None:
    """Return a finding if a request of greater priority waits, nothing comes back by itself, and what runs below it
    would make room."""
    config = m.config
    if m.recovery is not None and m.recovery.is_reduced:
        return None  # what is lost already need not be given up as well
    if not config.preempt or m.model.lingering or any(life.aborted for life in m.was_waiting):
        return None
    head = max(m.was_waiting, key=lambda life: (life.wish.priority, -life.place))
    if m.model.order_is_unknown or any(life.overtaken >= m.ageing for life in m.was_waiting):
        return None  # an aged request of smaller priority may go first
    lower = [life for life in running if life.wish.priority < head.wish.priority and life.overtaken < m.ageing]
    size, cached = config.page_size, set(m.before.cached or ())
    own = [slot // size for life in lower for slot in m.before.slots[life.name][::size]]
    room = (len(m.before.free) + len([page for page in own if page not in cached])) * size
    least = config.whole_pages(len(head.context_of_now) + config.reserve)
    has_no_row = len(running) >= config.max_running
    has_no_room = not config.prefix_cache and len(m.before.free) * size < least
    if lower and (has_no_row or has_no_room) and room >= least + size:
        was = f"{head.name} (priority {head.wish.priority}) waits, while {[life.name for life in lower]} run"
        should = f"a smaller priority gives way; it has {room} slots with those that are free, and {least} are needed"
        return Finding(was, should, "a greater priority does not wait for a smaller one")
    return None


def _needless_retraction(m: EngineMoment) -> Finding | None:
    """Return a finding if a request was retracted, though the others would have sufficed for whatever it was for."""
    config = m.config
    victims = [life for life in m.retracted if life.name not in m.asked_back]
    if not victims or m.is_disturbed or m.refusal is not None:
        return None
    if len(victims) > 1 and m.own_victims:
        return None  # it is not known which of them was the last
    last = max(victims, key=lambda life: (life.wish.priority, -life.place))
    others = [life for life in victims if life is not last]
    size, slots = config.page_size, m.before.slots
    all_present = all(part.is_present or part.life in victims for flight in m.before_plan for part in flight.parts)
    pages = {name: {slot // size for slot in slots[name][::size]} for name in m.before.running}
    kept = set().union(*[pages[name] for name in pages if name not in {life.name for life in others}])
    given_up = set().union(*[pages[life.name] for life in others]) - kept
    # A cached page that no row uses can be evicted, unless a row that has left holds it until its step is committed.
    spare = set(m.before.cached or ()) - kept - given_up if all_present else ()
    room = (len(m.before.free) + len(spare) + len(given_up)) * size
    rounds = [flight.rounds for flight in m.before_plan if flight.rows]
    reserve = max(config.reserve, (1 + sum(rounds)) * config.round_slots)
    lives = [m.model.lives[name] for name in m.before.running if name in m.model.lives]
    leaving = [life for life in lives if life.leaving]
    staying = [life for life in lives if life not in others and life not in leaving]
    needed = 0
    for life in staying:
        end = max(len(life.context_of_now), len(life.context)) + reserve
        if m.keeps_reserves:
            ends = [row.reach for flight in m.before_plan for row in flight.rows if row.life is life]
            end = max(end - reserve + config.reserve, max(ends, default=0) + config.round_slots)
        needed += max(config.whole_pages(end) - len(slots[life.name]), 0)
    if needed > room:
        return None
    room += len(m.lingering_before) * size + sum(len(slots[life.name]) for life in leaving)
    has_row = len(m.before.running) - len(others) - len(leaving) < config.max_running
    gainers: list[RequestLife] = []
    for head in m.was_waiting if config.preempt else ():
        most = config.whole_pages(len(head.context_of_now) + config.reserve) + size
        # What is aged gives way to no priority.
        is_aged = last.overtaken - m.overtaken.count(last) >= m.ageing and not m.model.order_is_unknown
        lacks_room = m.estimates or most > room or not has_row
        if head.wish.priority > last.wish.priority and not is_aged and lacks_room:
            gainers.append(head)
    if gainers:
        staying_pages = set().union(*[pages[name] for name in pages if name not in {life.name for life in victims}])
        return _retraction_in_vain(m, last, gainers, room + len(pages[last.name] - staying_pages) * size)
    was = f"{last.name} is retracted, with {room} slots free or on their way back"
    should = f"it stays: a round of all rows needs {needed} more, and no waiting request more than there are"
    return Finding(was, should, "what it has computed is computed again for nothing")


def _retraction_in_vain(
    m: EngineMoment, victim: RequestLife, gainers: Sequence[RequestLife], room: int
) -> Finding | None:
    """Return a finding if a request was retracted for one of `gainers`, and none of them has room enough now."""
    least = min(_slots_to_enter(m, life) for life in gainers)
    if not m.keeps_reserves or m.estimates or room >= least:
        return None
    was = f"{victim.name} is retracted for {' or '.join(life.name for life in gainers)}, with {room} slots then"
    return Finding(was, f"it stays: {least} are needed", "it has lost its place, and nothing enters for it")


def _slots_to_enter(m: EngineMoment, life: RequestLife) -> int:
    """Return the fewest slots with which a waiting request can enter, beside the pages that the cache has for it."""
    size, cached = m.config.page_size, m.before.cached or ()
    ends = [m.cells[page * size + size - 1] for page in cached]
    hashes = stream_of(life.context_of_now, life.wish.seed, m.config.model).hashes[size - 1 :: size]
    there = next((at for at, value in enumerate(hashes) if value not in ends), len(hashes))
    evicted = ends.count(NOTHING)  # by this plan: it is not known what they had
    return m.config.whole_pages(len(life.context_of_now) + m.config.reserve) - (there + evicted) * size


def _blocks_that_go_on(m: EngineMoment) -> Outcome:
    """Return a finding if a step of several rounds goes on, though a plan would now let a request in,
    or take one out."""
    config, before = m.config, m.before
    blocks = [flight for flight in m.model.flights if flight.rounds > 1]
    if m.interrupted is None or not blocks or m.is_disturbed:
        return None
    newest = blocks[-1].number
    if m.interrupted >= newest:
        return True
    tag = m.operation.tag
    if tag == "retract":
        if m.operation.request in [row.life.name for row in blocks[-1].rows if row.is_present]:
            was = f"step {newest} goes on for several rounds with {m.operation.request}"
            return Finding(was, "it ends at its next round", "a request that must give its memory back holds it")
        return None
    if tag == "abort" and m.operation.request not in before.running:
        return None
    if (
        tag == "abort"
        and m.operation.request in [row.life.name for row in blocks[0].rows]
        and blocks[0] is m.model.flights[0]
    ):
        was = f"step {newest} goes on for several rounds with {m.operation.request}, which is aborted"
        return Finding(was, "it ends at its next round", "its client waits for the end of the block")
    if tag == "submit" and (m.promise is None or before.waiting):
        return None
    waiting = [life for life in m.model.waiting() if life.name != m.operation.request or tag == "submit"]
    num_running = len(before.running) - (tag == "abort")
    if m.model.holding or not waiting or num_running >= config.max_running or (m.estimates and num_running):
        return None
    needed = max(len(life.context_of_now) for life in waiting) + room_for_all(config, 2 * num_running + 1)
    needed += config.num_slots // 64
    if len(before.free) * config.page_size >= needed:
        was = f"step {newest} goes on for several rounds, with {waiting[0].name} waiting and a row for it"
        return Finding(was, "it ends at its next round", "a request that fits waits for a whole block")
    return True
