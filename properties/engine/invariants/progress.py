"""ENGINE-07: requests that fit are launched, and no request gives way in vain. Free pages and needs are counted here,
not asked of the engine.

Every bound is generous: what an engine keeps in reserve is its own choice as long as it is no more than twice what a
round needs.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...harness.invariants import Finding, Outcome, checks
from ..model import RequestLife
from ..observation import EngineMoment
from ..rules import room_for_all, room_to_enter_beside

CONTRACT = "engine"
MOST_PLANS_TO_ENTER = 2  # once the victims' slots are free: a round may be committed first


@checks("ENGINE-07", CONTRACT, "slots", on=("plan", "submit", "abort", "retract"))
def what_fits_is_launched(m: EngineMoment) -> Outcome:
    if not m.asked:
        return _needless_cut(m) or _multi_steps_that_go_on(m)
    return (
        _needless_retraction(m)
        or _gave_way_in_vain(m)
        or (_against_reserves(m) if m.keeps_reserves else None)
        or _wrong_wait(m)
        or _idle(m)
    )


def _idle(m: EngineMoment) -> Outcome:
    """Return a finding if the plan leaves out what would fit without doubt."""
    config, model = m.config, m.model
    others = model.flights if m.flight is None else model.flights[:-1]
    if (
        m.is_disturbed
        or m.retracted
        or model.holding
        or model.may_hold
        or m.refusal is not None
        or len(others) >= config.depth
    ):
        return None
    if any(not part.is_present for flight in others for part in flight.parts):
        return None  # slots of a request that has left come back with a step in flight
    free = m.before.room(config)
    running = [model.lives[name] for name in m.before.running if name in model.lives]
    if m.flight is None:
        room = room_for_all(config, len(running))
        for life in running:
            if not life.leaving and free >= room and (not life.decoding or not _may_have_ended(m, life)):
                was = f"nothing is launched, with {life.name} running and {free} slots free"
                return Finding(was, f"a step; {room} slots are enough for all that run", "the device idles")
    if not m.was_waiting or m.admitted or ((m.estimates or config.waits[0]) and running):
        return True
    if any(not life.decoding or life.leaving for life in running):
        return True  # a prompt in progress goes first
    if m.flight is not None and m.flight.chunks:
        return True
    if len(running) >= m.max_running:
        return _preemption_that_is_due(m, running) or True
    needed = max(len(life.wish.prompt) + len(life.delivered) for life in m.was_waiting)
    if m.keeps_reserves:
        free = m.after.room(config)  # what runs has taken its own
        exact = config.whole_pages(needed + config.reserve) + config.whole_pages(config.reserve) * len(running)
        if free >= exact + config.num_slots // 64:
            was = f"no request enters, with {len(running)} of {m.max_running} running, which leave {free} slots"
            should = f"the head of the queue, if it has {needed} tokens at most and each that runs keeps its reserve"
            return Finding(was, should, "a row stays empty")
    # All that run reserve for the next step, and a request that enters may be asked to leave them as much again.
    needed += room_to_enter_beside(config, len(running))
    if free >= needed:
        was = f"no request enters, with {len(running)} of {m.max_running} running and {free} slots free"
        return Finding(was, f"the head of the queue; {needed} slots are enough for any", "a row stays empty")
    return _preemption_that_is_due(m, running) or True


def _wrong_wait(m: EngineMoment) -> Finding | None:
    """Return a finding if newcomers wait for more of them though they should not, or do not though they should."""
    if m.should_wait:
        was = f"{m.admitted[0][0].name} enters beside rows that decode: {m.should_wait}"
        should = f"it waits for {m.config.waits[0]} plans, or until a step has {m.config.enough_tokens:g} tokens"
        return Finding(was, should, "a small batch of prompts delays all rows that decode")
    if m.should_enter:
        return Finding(
            "no request enters, though there is room", m.should_enter, "a request waits longer than it should"
        )
    return None


def _against_reserves(m: EngineMoment) -> Finding | None:
    """Return a finding if what enters leaves less than a reserve to each that runs, or a step has fewer or more rounds
    than its own plan may decide on."""
    config, flight, slots = m.config, m.flight, m.after.slots
    if flight is None or m.refusal is not None:
        return None
    size, cached = config.page_size, set(m.after.cached or ())
    free = m.after.room(config)
    decoding = [life for life in m.model.running() if life.decoding and not life.leaving]
    if m.was_holding and not m.estimates:
        for life, _ in m.admitted:
            if life.wish.priority <= m.model.given_up:  # no request retracts one of greater priority
                was = f"{life.name} enters before a round is committed since a retraction"
                should = f"nothing enters until then, but for priorities greater than {m.model.given_up}"
                return Finding(was, should, "two requests could retract each other in turns")
    if m.admitted and not m.estimates:
        life, used = m.admitted[-1][0], {slot // size for own in slots.values() for slot in own[::size]}
        needed = max(config.whole_pages(len(life.context) + config.reserve) - len(slots[life.name]), 0)
        others = {*flight.lives(), *decoding} - {life, *(chunk.life for chunk in flight.chunks if not chunk.is_last)}
        needed += config.whole_pages(config.reserve) * len(others)
        may_leave = len(cached - used) + sum(map(len, m.after.unit_pages))
        room = (len(m.after.free) + may_leave) * size
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
            return Finding(
                was, f"one: {needed} slots are enough for it", "a request that fits waits for a whole multi-step"
            )
    may_differ = waiting or m.is_disturbed or m.model.holding or (m.recovery is not None and m.recovery.is_reduced)
    if may_differ or flight.chunks or flight.rounds > 1 or config.multi_step_rounds == 1 or not flight.rows:
        return None
    if any(other.rounds > 1 or other.chunks for other in others) or len(decoding) < len(m.after.running):
        return None
    if any(life.wish.stop_strings for life in decoding):
        return None
    newest = max(row.latest for row in flight.rows) + (4 + 2 * len(others)) * config.round_slots
    slack = (
        config.chunk_size + config.context_len + 3 * room_for_all(config, config.max_running) + config.num_slots // 64
    )
    of_rounds = 4 * len(decoding) * (config.round_slots + size)
    # Of units in a pool of their own the next plan may take those of all rows.
    of_rows = config.max_running * config.whole_pages(config.context_len + config.reserve)
    has_units = m.after.own_room(config) >= of_rows + of_rounds
    if newest <= config.context_len and free >= slack + of_rounds and has_units:
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
    size, slots = config.page_size, m.before.slots
    pages = {life.name: {slot // size for slot in slots[life.name][::size]} for life in running}
    staying = set().union(*[pages[life.name] for life in running if life not in lower])
    given_up = set().union(*[pages[life.name] for life in lower]) - staying
    # Cached pages that no row uses can be evicted; units of groups of layers may keep theirs.
    spare = set() if config.groups else set(m.before.cached or ()) - staying - given_up
    room_now = m.before.room(config) + len(spare) * size
    room = room_now + len(given_up - (set(m.before.cached or ()) if config.groups else set())) * size
    least = config.whole_pages(len(head.context_of_now) + config.reserve)
    if len(lower) < len(running):
        least += room_to_enter_beside(config, len(running) - len(lower))
    has_no_row = len(running) >= config.max_running
    has_no_room = not (config.groups and config.prefix_cache) and room_now < least
    if lower and (has_no_row or has_no_room) and room >= least + size:
        was = f"{head.name} (priority {head.wish.priority}) waits, while {[life.name for life in lower]} run"
        should = f"a smaller priority gives way; it has {room} slots with those that are free, and {least} are needed"
        return Finding(was, should, "a greater priority does not wait for a smaller one")
    return None


def _needless_retraction(m: EngineMoment) -> Finding | None:
    """Return a finding if a request was retracted, though the others would have sufficed for whatever it was for."""
    given = m.given_way
    if given is None or given.gainers:
        return None
    was = f"{given.victim.name} is retracted, with {given.room} slots free or on their way back"
    should = f"it stays: a round of all rows needs {given.needed} more, and no waiting request more than there are"
    return Finding(was, should, "what it has computed is computed again for nothing")


def _gave_way_in_vain(m: EngineMoment) -> Finding | None:
    """Return a finding if a request has given way to greater priorities, and none of them has entered since."""
    for given in m.model.given_way:
        if given.num_plans > MOST_PLANS_TO_ENTER:
            was = f"{given.victim.name} gave way, and in {given.num_plans} plans since nothing greater has entered"
            should = f"{' or '.join(life.name for life in given.gainers)} enters, or {given.victim.name} stays"
            return Finding(was, should, "it has lost its place, and nothing runs instead")
    return None


def _needless_cut(m: EngineMoment) -> Outcome:
    """Return a finding if a step is cut short since a request was aborted that waited behind another of its class."""
    life = m.ended_lives.get(getattr(m.operation, "request", ""))
    if m.operation.tag != "abort" or life is None or life.name not in m.before.waiting or m.model.order_is_unknown:
        return None
    equals = [other for other in m.model.waiting() if other.wish.priority == life.wish.priority]
    ahead = [other.name for other in equals if other.place < life.place]
    if ahead and m.cuts:
        was = f"steps to {m.interrupted} are cut short by the abort of {life.name}, which waits behind {ahead[0]}"
        return Finding(was, "they go on: no plan could differ", "the host decides more often than it must")
    return None


def _multi_steps_that_go_on(m: EngineMoment) -> Outcome:
    """Return a finding if a step of several rounds goes on, though a plan would now let a request in,
    or take one out."""
    config, before = m.config, m.before
    multi_steps = [flight for flight in m.model.flights if flight.rounds > 1]
    if m.interrupted is None or not multi_steps or m.is_disturbed:
        return None
    newest = multi_steps[-1].number
    if m.interrupted >= newest:
        return True
    tag = m.operation.tag
    if tag == "retract":
        if m.operation.request in [row.life.name for row in multi_steps[-1].rows if row.is_present]:
            was = f"step {newest} goes on for several rounds with {m.operation.request}"
            return Finding(was, "it ends at its next round", "a request that must give its memory back holds it")
        return None
    if tag == "abort" and m.operation.request not in before.running:
        return None
    if (
        tag == "abort"
        and m.operation.request in [row.life.name for row in multi_steps[0].rows]
        and multi_steps[0] is m.model.flights[0]
    ):
        was = f"step {newest} goes on for several rounds with {m.operation.request}, which is aborted"
        return Finding(was, "it ends at its next round", "its client waits for the end of the multi-step")
    if tag == "submit" and (m.promise is None or before.waiting):
        return None
    waiting = [life for life in m.model.waiting() if life.name != m.operation.request or tag == "submit"]
    num_running = len(before.running) - (tag == "abort")
    if (
        m.model.holding
        or m.model.may_hold
        or not waiting
        or num_running >= config.max_running
        or (m.estimates and num_running)
    ):
        return None
    needed = max(len(life.context_of_now) for life in waiting) + room_to_enter_beside(config, num_running)
    if before.room(config) >= needed:
        was = f"step {newest} goes on for several rounds, with {waiting[0].name} waiting and a row for it"
        return Finding(was, "it ends at its next round", "a request that fits waits for a whole multi-step")
    return True
