"""What is planned, and for which requests: ENGINE-05, 09, 10, 11, 14, 16, 18, RELAY-05, 07, 08 and
STEPS-07 of an engine."""

from __future__ import annotations

from ...harness.invariants import Finding, Outcome, checks
from ..model import RUNNING
from ..observation import EngineMoment

CONTRACT = "engine"


@checks("ENGINE-05", CONTRACT, on=("plan",))
def a_step_keeps_its_budgets(m: EngineMoment) -> Outcome:
    config, flight, num_running = m.config, m.flight, len(m.after.running)
    if num_running > m.max_running:
        return Finding(f"{num_running} requests run", f"{m.max_running} at most", "the batch may have that many rows")
    if flight is None:
        return None
    prefill = sum([len(chunk.tokens) for chunk in flight.chunks])
    verify = flight.num_verified(config)
    most = config.chunk_size if m.recovery is None else m.recovery.prefill
    if prefill > most:
        return Finding(f"{prefill} prefill tokens", f"{most}", "all rows wait as long as a step takes")
    if flight.chunks and config.step_tokens and prefill + verify > config.step_tokens:
        was, should = f"{prefill} + {verify} tokens", f"{config.step_tokens} in all"
        return Finding(was, should, "the budget counts verify tokens too")
    names = [life.name for life in flight.lives()]
    if len(set(names)) != len(names):
        return Finding(f"the step has {names}", "each request once", "two results of one row contradict each other")
    if not config.mixed and flight.chunks and flight.rows:
        return Finding("prefill and decode in one step", "one of them", "the configuration says so")
    is_reduced = m.recovery is not None and m.recovery.is_reduced
    most = 1 if flight.chunks or is_reduced else config.multi_step_rounds
    if flight.rounds > most:
        return Finding(f"{flight.rounds} rounds", f"{most} at most", "the engine decides nothing until a step ends")
    return True


@checks("ENGINE-09", CONTRACT, on=("plan",))
def no_request_is_overtaken_for_ever(m: EngineMoment) -> Outcome:
    if m.was_lost or m.model.order_is_unknown:
        return None  # suspects of a failure go first
    for life in m.overtaken:
        if life.overtaken > m.ageing:
            was = f"{life.name} (priority {life.wish.priority}) was overtaken {life.overtaken} times by later requests"
            return Finding(was, f"{m.ageing} times at most", "a stream of greater priorities must not starve it")
    return True if m.admitted and m.was_waiting else None


@checks("ENGINE-10", CONTRACT, on=("plan",))
def only_the_lower_gives_way(m: EngineMoment) -> Outcome:
    found = None
    entered = {life.name for life, _ in m.admitted}
    for victim in () if m.was_lost and m.recovery is None else m.retracted:
        if victim.name in m.asked_back:
            continue
        found = True
        priority = victim.wish.priority
        was = f"{victim.name} (priority {priority}) is retracted,"
        for name in m.after.running:
            life = m.model.lives.get(name)
            if life is None or life is victim:
                continue
            its = life.wish.priority
            is_equal = its == priority and name in m.before.running and not life.leaving and not m.is_disturbed
            if is_equal and not m.own_victims and life.place > victim.place and life.overtaken < m.ageing:
                should, why = f"{name} gives way, which came later", "the oldest would never come to its end"
                return Finding(f"{was} {name} stays", should, why)
            if name in entered and m.first:
                continue  # it may be what a step has failed with
            if name in entered:
                # A victim at the tail is one of those that wait, and what enters may be an equal before it.
                if not m.is_disturbed and (its < priority if m.to_tail else its <= priority):
                    should, why = "a strictly greater priority", "equals would push each other out for ever"
                    return Finding(f"{was} {name} ({its}) enters", should, why)
            elif not m.own_victims and life.overtaken < m.ageing and its < priority:
                should, why = "the lowest priority gives way", "a request is never pushed out for a smaller one"
                return Finding(f"{was} {name} ({its}) stays", should, why)
    return found


@checks("ENGINE-11", CONTRACT)
def every_cycle_makes_progress(m: EngineMoment) -> Outcome:
    model = m.model
    if m.drained and model.lives:
        return Finding(f"{sorted(model.lives)} have not come to an end", "all have", "the engine makes no progress")
    if m.asked:
        if m.flight is not None and model.lost:
            was = f"step {m.flight.number} is launched after a loss"
            return Finding(was, "nothing before the device is quiet", "a lost step may still write")
        if model.lives and not m.is_disturbed and not model.flights:
            was = f"nothing is launched or in flight, {sorted(model.lives)} live"
            return Finding(was, "a step", "nothing would ever end that")
        bound, number = 2 * len(model.lives) + 2, model.retractions_since_progress
        if not m.is_disturbed and number > bound:
            was = f"{number} retractions since the last token"
            return Finding(was, f"{bound} at most", "it may admit, compute and retract for ever")
        return _row_that_is_passed_over(m) or True
    if m.committed is None or m.refusal is not None:
        return None
    for name, (got, reason) in m.expected.items():
        if got and not reason and not m.delivered.get(name):
            was = f"{name} gets nothing from step {m.committed.number}"
            return Finding(was, f"{got}", "a round emits at least one token")
    return True


def _row_that_is_passed_over(m: EngineMoment) -> Finding | None:
    """Return a finding if a step leaves out a request that decodes, though it has rounds, or may have them beside its
    chunks. Requests that a step in flight has, or may have ended, are left out of account."""
    flight, is_reduced = m.flight, m.recovery is not None and m.recovery.is_reduced
    if flight is None or m.is_disturbed or is_reduced or not (flight.rows or m.config.mixed):
        return None
    there = {life.name for each in m.model.flights for life in each.lives()}
    for life in m.model.running():
        rests = life.kv >= 0 and not life.leaving and life.name not in there
        if rests and life.kv < life.end_kv:
            was = f"step {flight.number} is without {life.name}, which decodes and is in no step in flight"
            return Finding(was, "a round of it, too", "prompts, or rows of others, let it starve")
    return None


@checks("ENGINE-14", CONTRACT, on=("plan",))
def chunks_follow_each_other(m: EngineMoment) -> Outcome:
    if m.flight is None or not m.flight.chunks:
        return None
    size = m.config.page_size
    for chunk in m.flight.chunks:
        life = chunk.life
        if not chunk.tokens or chunk.start != chunk.due or chunk.stop > len(life.context):
            was = f"{life.name} computes [{chunk.start}, {chunk.stop}) of {len(life.context)} positions"
            should = f"from {chunk.due} on, at least one"
            return Finding(was, should, "a position computed twice or never makes another text")
        if not m.config.prefix_cache and (life, chunk.start) in m.admitted and chunk.start:
            return Finding(f"{life.name} begins at {chunk.start}", "0", "the positions before have not been computed")
        slots = m.flight.slots.get(life.name)
        if slots is not None:
            pages, needed = -(-len(slots) // size), -(-chunk.stop // size)
            # An engine may take the pages of a prompt chunk by chunk or all at once.
            most = -(-(life.end_kv + m.config.reserve) // size) + 1
            if not needed <= pages <= most:
                was = f"{life.name} has {pages} pages for {chunk.stop} positions"
                should = f"{needed} at least, and no more than the {most} of all that it may write"
                return Finding(was, should, "what is computed needs a place, and no request more than it can use")
    return True


@checks("ENGINE-16", CONTRACT, on=("plan",))
def equals_enter_in_order(m: EngineMoment) -> Outcome:
    if not m.admitted or (m.was_lost and m.recovery is None):
        return None
    first = list(m.first)
    waiting = [life for life in m.was_waiting if life.name in m.after.waiting]
    for entered, _ in m.admitted:
        if first:
            if entered is not first[0]:
                was, should = f"{entered.name} enters after a failed step", f"{first[0].name}, which it may be due to"
                return Finding(was, should, "until suspects have run apart, the others may be lost with them again")
            first.pop(0)
            continue
        mine = entered.wish.priority
        for life in waiting:
            theirs = life.wish.priority
            if theirs == mine and life.place < entered.place:
                was = f"{entered.name} enters before {life.name}, which came earlier, both of priority {mine}"
                return Finding(was, "first come, first served", "equals are served in the order of their arrival")
            if entered.overtaken < m.ageing and theirs > mine and not m.model.order_is_unknown:
                was = f"{entered.name} (priority {mine}) enters before {life.name} ({theirs})"
                return Finding(was, "the greater priority", "that is what priorities are for")
    return True


@checks("ENGINE-18", CONTRACT, on=("plan", "commit"))
def limits_are_legal(m: EngineMoment) -> Outcome:
    if m.refusal is not None:
        was = f"{m.operation} failed at {', '.join(m.degenerate)}: {m.refusal}"
        return Finding(was, "an answer", "that is a legal size")
    if m.asked:
        return _empty_and_single_batches(m) if len(m.model.lives) < 2 else None
    flight = m.committed
    has_ended = all(part.life.state is not RUNNING or not part.is_present for part in flight.parts)
    if len(flight.parts) > 1 and flight.steps > 1 and not has_ended:
        return None
    for name, (got, reason) in m.expected.items():
        given, ends = m.delivered.get(name, []), any(end.request == name for end in m.ends)
        if given != got or ends != bool(reason):
            was = f"{name} is given {given} by a step of S = {flight.steps}{' and ends' if ends else ''}"
            should = f"{got}{', and its end' if reason else ''}"
            return Finding(was, should, "one row, or S = 0, or the end of all rows at once are steps like any other")
    free = m.after.free if not m.model.lives and not m.model.flights and not m.after.cached else None
    if free is not None and len(free) != m.config.num_pages:
        was = f"all requests of step {flight.number} end, and {len(free)} of {m.config.num_pages} pages are free"
        return Finding(was, "all", "nothing is left that could hold the others")
    return True


def _empty_and_single_batches(m: EngineMoment) -> Outcome:
    """Return whether nothing is planned without requests, and a request that is alone is what is planned."""
    lives = m.model.lives
    if not lives:
        if m.flight is not None or m.after != m.before:
            was = f"without a request a plan changes {m.before} into {m.after}"
            return Finding(was, "no step, and nothing changes", "an empty batch is legal")
        return True
    (life,) = lives.values()
    if m.flight is not None and m.flight.lives() != [life]:
        was = f"step {m.flight.number} has {len(m.flight.parts)} parts for one request"
        return Finding(was, "one", "a batch of one row is legal")
    return True


@checks("RELAY-05", CONTRACT, on=("plan",))
def no_placeholder_is_computed_on(m: EngineMoment) -> Outcome:
    if m.flight is None:
        return None
    why = "-1 is a placeholder, not a token"
    for chunk in m.flight.chunks:
        life = chunk.life
        if min(chunk.tokens, default=0) < 0:
            return Finding(f"{life.name} computes {list(chunk.tokens)}", "tokens", why)
        tail = -1 if chunk.is_last else life.context[chunk.stop]
        if chunk.tail != tail:
            was = f"the token after {life.name}'s chunk is {chunk.tail}"
            why = "after a middle chunk comes the prompt's next token, after the last one the sample"
            return Finding(was, f"{tail}", why)
    for row in m.flight.rows:
        if row.root is not None and row.root < 0:
            return Finding(f"{row.life.name} starts from {row.root}", "its last token", why)
    return True


@checks("RELAY-07", CONTRACT, on=("plan", "commit-again", "commit-early"))
def steps_are_committed_in_order(m: EngineMoment) -> Outcome:
    flights = m.model.flights
    if len(flights) > m.config.depth:
        return Finding(f"{len(flights)} steps in flight", f"{m.config.depth}", "no slots are reserved for more")
    if m.flight is not None and any(flight.number >= m.flight.number for flight in flights[:-1]):
        was = f"step {m.flight.number} after {flights[-2].number}"
        return Finding(was, "a greater number", "each step has its own")
    if m.operation.tag != "plan":
        if m.refusal is None:
            return Finding(f"{m.operation} was taken", "a refusal", "each result is applied once, the oldest first")
        if m.after != m.before:
            return Finding(f"a refused {m.operation} changed {m.before} into {m.after}", "nothing", "it was refused")
    return True


@checks("RELAY-08", CONTRACT, on=("plan",))
def a_request_is_in_two_steps_only_as_allowed(m: EngineMoment) -> Outcome:
    flight = m.flight
    if flight is None:
        return None
    for row in flight.rows:
        if not row.life.decoding or row.life.leaving:
            why = "its prompt is not computed" if not row.life.decoding else "it is leaving"
            was = f"{row.life.name} takes part in a round, but {why}"
            return Finding(was, "rows whose last chunk is launched", "there is nothing to verify")
    if flight.rounds > 1 and any(other.rounds > 1 for other in m.model.flights[:-1]):
        return Finding("two steps of several rounds in flight", "one", "the lengths of the rows are unknown")
    return True


@checks("STEPS-07", CONTRACT, "adaptive", on=("plan", "set-steps"))
def steps_change_at_a_launch(m: EngineMoment) -> Outcome:
    if m.operation.tag == "set-steps":
        if m.after != m.before:
            was = f"{m.operation} changed {m.before} into {m.after}"
            return Finding(was, "nothing", "steps in flight keep their own")
        return True
    if m.flight is None or not m.flight.rows:
        return None
    fewest, wanted = m.config.candidates[0], m.model.steps
    if m.recovery is not None and m.recovery.fewest:
        wanted = fewest
    is_free = m.was_lost and m.recovery is None and m.flight.steps == fewest
    if m.flight.steps != wanted and not is_free:
        was = f"step {m.flight.number} drafts {m.flight.steps}"
        return Finding(was, f"{wanted}", "so it was said before its launch, or a step has failed")
    return True
