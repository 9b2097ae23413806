"""What is planned, and for whom: ENGINE-05, 07, 09, 10, 11, 14, 16, 18, RELAY-05, 07, 08 and STEPS-07 of an engine."""

from __future__ import annotations

from ..engine.model import Life
from ..engine.moment import Moment
from ..engine.operations import Commit, CommitAgain, CommitEarly, Plan, SetSteps
from ..engine.rules import room_for_all
from .registry import Finding, Outcome, checks

CONTRACT = "engine"


@checks("ENGINE-05", CONTRACT, on=(Plan,))
def a_step_keeps_its_budgets(m: Moment) -> Outcome:
    config, flight = m.config, m.flight
    if len(m.after.running) > config.max_running:
        return Finding(
            f"{len(m.after.running)} requests run", f"{config.max_running} at most", "the batch has that many rows"
        )
    if flight is None:
        return None
    prefill = sum([len(chunk.tokens) for chunk in flight.chunks])
    verify = len(flight.rows) * config.nodes(flight.steps)
    if prefill > config.chunk_size:
        return Finding(f"{prefill} prefill tokens", f"{config.chunk_size}", "the budget of a step is its longest wait")
    if flight.chunks and config.step_tokens and prefill + verify > config.step_tokens:
        return Finding(
            f"{prefill} + {verify} tokens", f"{config.step_tokens} in all", "the budget counts verify tokens too"
        )
    names = [life.name for life in flight.lives()]
    if len(set(names)) != len(names):
        return Finding(f"the step has {names}", "each request once", "two results of one row cannot both be true")
    if flight.chunks and flight.rows and not config.mixed:
        return Finding("prefill and decode in one step", "one of them", "the configuration says so")
    most = 1 if flight.chunks else config.block_rounds
    if flight.rounds > most:
        return Finding(f"{flight.rounds} rounds", f"{most} at most", "a longer step hides decisions")
    return True


@checks("ENGINE-07", CONTRACT, "slots", on=(Plan,))
def what_fits_is_launched(m: Moment) -> Outcome:
    """`is_disturbed`: whoever cannot allocate, or must retract, may wait."""
    config, model = m.config, m.model
    others = model.flights if m.flight is None else model.flights[:-1]
    if m.is_disturbed or m.retracted or model.holding or m.refusal is not None or len(others) >= config.depth:
        return None
    if any(part.stay != part.life.stay for flight in others for part in (*flight.chunks, *flight.rows)):
        return None  # what somebody left behind comes back with a step in flight
    free = len(m.before.free) * config.page_size
    running = [model.lives[name] for name in m.before.running if name in model.lives]
    if m.flight is None:
        room = room_for_all(config, len(running))
        for life in running:
            if not life.leaving and free >= room and (not life.decoding or not _may_have_ended(m, life)):
                return Finding(
                    f"nothing is launched, with {life.name} running and {free} slots free",
                    f"a step; {room} slots are enough for all that run",
                    "an idle device is lost time",
                )
    if not m.was_waiting or m.admitted or len(running) >= config.max_running:
        return True
    if any(not life.decoding or life.leaving for life in running):
        return True  # a prompt in progress goes first
    if m.flight is not None and m.flight.chunks:
        return True
    needed = max(len(life.wish.prompt) + len(life.delivered) for life in m.was_waiting)
    # All that run reserve for the next step, and who enters may be asked to leave them as much again.
    needed += room_for_all(config, 2 * len(running) + 1) + config.num_slots // 64
    if free >= needed:
        return Finding(
            f"nobody enters, with {len(running)} of {config.max_running} running and {free} slots free",
            f"the head of the queue; {needed} slots are enough for whoever it is",
            "a free row is lost time",
        )
    return True


def _may_have_ended(m: Moment, life: Life) -> bool:
    """Whether the steps in flight may be its last."""
    length = life.kv if life.kv >= 0 else len(life.context)
    length += sum(
        flight.rounds * (flight.steps + 1)
        for flight in m.model.flights
        for row in flight.rows
        if row.life is life and row.stay == life.stay
    )
    return bool(life.wish.stop_tokens) or length >= life.end_kv


@checks("ENGINE-09", CONTRACT, on=(Plan,))
def nobody_is_overtaken_for_ever(m: Moment) -> Outcome:
    if m.was_lost:
        return None  # whoever is suspected of a failure goes first
    for life in m.overtaken:
        if life.overtaken > m.config.ageing:
            return Finding(
                f"{life.name} (priority {life.wish.priority}) was overtaken {life.overtaken} times by later requests",
                f"{m.config.ageing} times at most",
                "a stream of greater priorities must not starve it",
            )
    return True if m.admitted and m.was_waiting else None


@checks("ENGINE-10", CONTRACT, on=(Plan,))
def only_the_lower_gives_way(m: Moment) -> Outcome:
    found = None
    entered = {life.name for life, _ in m.admitted}
    for victim in () if m.was_lost else m.retracted:
        if victim.name in m.asked_back:
            continue
        found = True
        priority = victim.wish.priority
        for name in m.after.running:
            life = m.model.lives.get(name)
            if life is None or life is victim:
                continue
            if name in entered:
                if life.wish.priority <= priority and not m.is_disturbed:
                    return Finding(
                        f"{victim.name} (priority {priority}) is retracted, {name} ({life.wish.priority}) enters",
                        "a strictly greater priority",
                        "equals would push each other out for ever",
                    )
            elif life.wish.priority < priority and life.overtaken < m.config.ageing:
                return Finding(
                    f"{victim.name} (priority {priority}) is retracted, {name} ({life.wish.priority}) stays",
                    "the lowest priority gives way",
                    "a request is never pushed out for a smaller one",
                )
    return found


@checks("ENGINE-11", CONTRACT)
def every_cycle_brings_somebody_forward(m: Moment) -> Outcome:
    model = m.model
    if m.drained and model.lives:
        return Finding(
            f"{sorted(model.lives)} have not come to an end", "all have", "it goes round without getting forward"
        )
    if m.asked:
        if m.flight is not None and model.lost:
            return Finding(
                f"step {m.flight.number} is launched after a loss",
                "nothing before the device is quiet",
                "a lost step may still write",
            )
        if m.flight is None and not model.flights and model.lives and not m.is_disturbed:
            return Finding(
                f"nothing is launched or in flight, {sorted(model.lives)} live", "a step", "nothing would ever end that"
            )
        bound = 2 * len(model.lives) + 2
        if model.retractions_since_progress > bound and not m.is_disturbed:
            return Finding(
                f"{model.retractions_since_progress} retractions since the last token",
                f"{bound} at most",
                "admit, compute, retract, admit again: for ever",
            )
        return True
    if m.committed is None or m.refusal is not None:
        return None
    for name, (got, reason) in m.expected.items():
        if got and not m.delivered.get(name) and not reason:
            return Finding(
                f"{name} gets nothing from step {m.committed.number}", f"{got}", "a round emits at least one token"
            )
    return True


@checks("ENGINE-14", CONTRACT, on=(Plan,))
def chunks_follow_each_other(m: Moment) -> Outcome:
    if m.flight is None or not m.flight.chunks:
        return None
    size = m.config.page_size
    for chunk in m.flight.chunks:
        life, stop = chunk.life, chunk.start + len(chunk.tokens)
        if not chunk.tokens or chunk.start != chunk.due or stop > len(life.context):
            return Finding(
                f"{life.name} computes [{chunk.start}, {stop}) of {len(life.context)} positions",
                f"from {chunk.due} on, at least one",
                "a position computed twice or never makes another text",
            )
        if (life, chunk.start) in m.admitted and chunk.start and not m.config.prefix_cache:
            return Finding(f"{life.name} begins at {chunk.start}", "0", "nobody has computed the positions before")
        slots = m.flight.slots.get(life.name)
        if slots is not None:
            pages, should = -(-len(slots) // size), -(-stop // size)
            if pages < should or (pages > should and not chunk.is_last):
                return Finding(
                    f"{life.name} has {pages} pages for {stop} positions",
                    f"{should}",
                    "what is owned is what was computed",
                )
    return True


@checks("ENGINE-16", CONTRACT, on=(Plan,))
def equals_enter_in_order(m: Moment) -> Outcome:
    if not m.admitted or m.was_lost:
        return None
    waiting = [life for life in m.was_waiting if life.name in m.after.waiting]
    for entered, _ in m.admitted:
        mine = entered.wish.priority
        for life in waiting:
            theirs = life.wish.priority
            if theirs == mine and life.number < entered.number:
                return Finding(
                    f"{entered.name} enters before {life.name}, which came earlier, both of priority {mine}",
                    "first come, first served",
                    "equals are served in the order of their arrival",
                )
            if theirs > mine and entered.overtaken < m.config.ageing:
                return Finding(
                    f"{entered.name} (priority {mine}) enters before {life.name} ({theirs})",
                    "the greater priority",
                    "that is what priorities are for",
                )
    return True


@checks("ENGINE-18", CONTRACT, on=(Plan, Commit))
def limits_are_legal(m: Moment) -> Outcome:
    if m.refusal is not None:
        return Finding(
            f"{m.operation} failed at {', '.join(m.degenerate)}: {m.refusal}", "an answer", "that is a legal size"
        )
    if m.asked:
        return True if len(m.model.lives) < 2 else None
    return True if len(m.committed.rows) + len(m.committed.chunks) == 1 or m.committed.steps < 2 else None


@checks("RELAY-05", CONTRACT, on=(Plan,))
def no_placeholder_is_computed_on(m: Moment) -> Outcome:
    if m.flight is None:
        return None
    for chunk in m.flight.chunks:
        life, stop = chunk.life, chunk.start + len(chunk.tokens)
        if min(chunk.tokens, default=0) < 0:
            return Finding(f"{life.name} computes {list(chunk.tokens)}", "tokens", "-1 is a placeholder, not a token")
        tail = -1 if chunk.is_last else life.context[stop]
        if chunk.tail != tail:
            return Finding(
                f"the token after {life.name}'s chunk is {chunk.tail}",
                f"{tail}",
                "after a middle chunk comes the prompt's next token, after the last one the sample",
            )
    for row in m.flight.rows:
        if row.root is not None and row.root < 0:
            return Finding(
                f"{row.life.name} starts from {row.root}", "its last token", "-1 is a placeholder, not a token"
            )
    return True


@checks("RELAY-07", CONTRACT, on=(Plan, CommitAgain, CommitEarly))
def steps_are_committed_in_order(m: Moment) -> Outcome:
    model = m.model
    if len(model.flights) > m.config.depth:
        return Finding(f"{len(model.flights)} steps in flight", f"{m.config.depth}", "nobody has reserved for more")
    if m.flight is not None and any(flight.number >= m.flight.number for flight in model.flights[:-1]):
        return Finding(
            f"step {m.flight.number} after {model.flights[-2].number}", "a greater number", "each step has its own"
        )
    if isinstance(m.operation, CommitAgain | CommitEarly):
        if m.refusal is None:
            return Finding(f"{m.operation} was taken", "a refusal", "each result is applied once, the oldest first")
        if m.after != m.before:
            return Finding(f"a refused {m.operation} changed {m.before} into {m.after}", "nothing", "it was refused")
    return True


@checks("RELAY-08", CONTRACT, on=(Plan,))
def a_request_is_in_two_steps_only_as_allowed(m: Moment) -> Outcome:
    flight = m.flight
    if flight is None:
        return None
    for row in flight.rows:
        if not row.life.decoding or row.life.leaving:
            why = "its prompt is not computed" if not row.life.decoding else "it is leaving"
            return Finding(
                f"{row.life.name} takes part in a round, but {why}",
                "rows whose last chunk is launched",
                "there is nothing to verify",
            )
    if flight.rounds > 1 and any(other.rounds > 1 for other in m.model.flights[:-1]):
        return Finding("two steps of several rounds in flight", "one", "how long the rows are is known to nobody")
    return True


@checks("STEPS-07", CONTRACT, "adaptive", on=(Plan, SetSteps))
def steps_change_at_a_launch(m: Moment) -> Outcome:
    if isinstance(m.operation, SetSteps):
        if m.after != m.before:
            return Finding(
                f"{m.operation} changed {m.before} into {m.after}", "nothing", "steps in flight keep their own"
            )
        return True
    if m.flight is None or not m.flight.rows:
        return None
    if m.flight.steps != m.model.steps and not (m.was_lost and m.flight.steps == m.config.candidates[0]):
        return Finding(
            f"step {m.flight.number} drafts {m.flight.steps}", f"{m.model.steps}", "so it was said before its launch"
        )
    return True
