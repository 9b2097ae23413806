"""ACCEPT-17, STATE-01 to 04 and SIM-04 of executors; the form of their answers is checked in `model.py`.
A checker reads the `ExecutorMoment` alone."""

from __future__ import annotations

from ..engine.budget import passed_over, survival_of
from ..harness.invariants import Finding, Outcome, checks
from .contract import HIDDEN_STATES
from .model import ExecutorMoment, Ran
from .oracle import is_close

CONTRACT = "executor"


@checks("ACCEPT-17", CONTRACT, "inspection")
def no_hidden_states_where_none_are_needed(m: ExecutorMoment) -> Outcome:
    if m.merge is not None:
        return _merged_like_with_like(m)
    if m.sent is not None:
        return _received_as_needed(m)
    if m.needs_hidden_states:
        return _relayed_where_needed(m)
    why = f"{m.config.algorithm} needs none: whatever is there takes memory, and will meet a batch that has None"
    for name, shape in m.relay or ():
        if HIDDEN_STATES in name or (shape and shape[-1] in m.hidden_sizes):
            return Finding(f"the relay has a field {name} of {list(shape)} per row", "no such field", why)
    for found, verb in ((m.kept, "keeps"), (m.in_step, "is given"), (m.in_result, "answers with")):
        if found:
            array = found[0]
            was = f"the executor {verb} {array.path}: {array.dtype} {list(array.shape)}"
            return Finding(was, "None", why)
    if m.hidden_bytes:
        return Finding(f"hidden_bytes() is {m.hidden_bytes}", "0", why)
    looked_at = (m.relay, m.kept, m.in_step, m.in_result, m.hidden_bytes)
    return None if all(item is None for item in looked_at) else True


def _relayed_where_needed(m: ExecutorMoment) -> Outcome:
    """Check the positive control: where hidden states are needed they are there, one for every row."""
    if m.hidden_bytes == 0:
        return Finding("hidden_bytes() is 0", f"more: {m.config.algorithm} drafts from hidden states", "they need room")
    if m.relay is None:
        return True if m.hidden_bytes else None
    fields = [(name, shape) for name, shape in m.relay if HIDDEN_STATES in name]
    if len(fields) != 1 or not fields[0][1]:
        return Finding(
            f"the relay has {', '.join(name for name, _ in m.relay)}",
            f"one field {HIDDEN_STATES} with a vector per row",
            f"{m.config.algorithm} drafts from hidden states, and a row without one cannot be in its batch",
        )
    if m.kept is not None and not m.kept and fields[0][1][-1] in m.hidden_sizes:
        was = "nothing as wide as a hidden state can be reached from roots()"
        should = f"what its relay keeps in {fields[0][0]}"
        return Finding(was, should, "where it cannot be seen when it is there, not to see it says nothing")
    return True


def _received_as_needed(m: ExecutorMoment) -> Outcome:
    """Check requests that were handed over: a hidden state for each row that is served, or for none."""
    sent = ", ".join("a hidden state" if has else "None" for has in m.sent) or "none"
    received = "None" if m.received is None else f"an array {list(m.received)}"
    was = f"{m.config.algorithm} was handed {sent}; the draft input has {received} for {m.served} rows"
    if not m.needs_hidden_states:
        if m.received is not None or m.served != len(m.sent):
            should = f"None for {len(m.sent)} rows, whatever was sent"
            return Finding(was, should, "a draft that reads no hidden states does not use those of another step")
        return True
    count = sum(map(bool, m.sent))
    if m.received is None or m.received[0] != count or m.served != count:
        return Finding(was, f"{count} rows: those that came with one", "a row without one cannot be in this batch")
    return True


def _merged_like_with_like(m: ExecutorMoment) -> Outcome:
    first, second = m.merged
    words = [f"{rows} rows" if rows >= 0 else "None" for rows in m.merged]
    if (first < 0) != (second < 0):
        if not isinstance(m.merge, str):
            was = f"{words[0]} and {words[1]} were merged to {m.merge if m.merge >= 0 else None}"
            return Finding(was, "a refusal", "a batch in which some rows have hidden states belongs to no algorithm")
        return True
    wanted = -1 if first < 0 else first + second
    if m.merge != wanted:
        said = m.merge if isinstance(m.merge, str) else f"{m.merge} rows" if m.merge >= 0 else "None"
        should = f"{wanted} rows" if wanted >= 0 else "None"
        was = f"{words[0]} and {words[1]} were merged to {said}"
        return Finding(was, should, "batches of one algorithm go together")
    return True


@checks("STATE-01", CONTRACT, "states")
def a_round_keeps_the_accepted_path(m: ExecutorMoment) -> Outcome:
    return _states_after(m, Ran.ROUNDS, "a rejected token, or one taken in twice or never, changes all that follows")


@checks("STATE-02", CONTRACT, "states")
def a_chunk_goes_on_from_the_prompt(m: ExecutorMoment) -> Outcome:
    return _states_after(m, Ran.CHUNK, "a prompt begins from the empty state and goes on from its own chunks")


@checks("STATE-03", CONTRACT, "states")
def other_rows_keep_their_states(m: ExecutorMoment) -> Outcome:
    return _states_after(m, Ran.NOTHING, "a row that a step does not run goes on later from where it was")


def _states_after(m: ExecutorMoment, ran: Ran, why: str) -> Outcome:
    """Compare the states of rows of which a step ran so much."""
    seen = [state for state in m.states if state.ran is ran]
    for row, _, found, wanted in seen:
        if found.length != wanted.length:
            return Finding(f"the state of row {row} has taken in {found.length} tokens", f"{wanted.length}", why)
        if wanted.values is not None and not is_close(found.values, wanted.values):
            was = f"the state of row {row}, after {wanted.length} tokens, is another one ({ran.value} ran)"
            return Finding(was, "that of these tokens, taken in one after the other", why)
    return True if seen else None


@checks("STATE-04", CONTRACT, "states")
def there_is_room_for_the_states(m: ExecutorMoment) -> Outcome:
    least = m.config.max_running if m.config.is_recurrent else 0
    if m.state_room < least or (m.state_room > 0) != (least > 0):
        should = f"{least} or more: each running request has one" if least else "0: the model has no recurrent layers"
        return Finding(f"there is room for {m.state_room} states", should, "a state cannot wait as a page of KV can")
    return True


@checks("DRAFT-01", CONTRACT, "lengths", "drafts")
def a_row_without_drafts_is_drafted_for_next(m: ExecutorMoment) -> Outcome:
    wrong = next((found for found in m.after_roots_alone if found is not None), None)
    if wrong is not None:
        why = "its draft had no part in the row's last round: its KV lacks those tokens, which shows in no text"
        return Finding(*wrong, why)
    return True if m.after_roots_alone else None


@checks("DRAFT-11", CONTRACT, "look_ups")
def few_tokens_wait_for_the_draft(m: ExecutorMoment) -> Outcome:
    if m.waiting is None:
        return None
    most, bound = m.waiting
    if most > bound:
        why = "one pass of the draft takes no more, and their hidden states are kept until then"
        return Finding(f"{most} tokens of a row wait for the draft", f"{bound} at most", why)
    return True


@checks("DRAFT-02", CONTRACT, "budgets")
def the_budget_is_spent_and_kept(m: ExecutorMoment) -> Outcome:
    for budget, most, nodes, _ in m.chosen:
        spent, room = sum(nodes) - len(nodes), sum(most) - len(most)
        if spent != min(budget.drafts, room):
            was = f"rows verify {nodes} nodes: {spent} drafts, with a budget of {budget.drafts}"
            return Finding(
                was, f"{min(budget.drafts, room)}", "the pass has been planned and priced for so many tokens"
            )
    return True if m.chosen else None


@checks("DRAFT-03", CONTRACT, "budgets")
def no_row_verifies_what_it_did_not_reserve(m: ExecutorMoment) -> Outcome:
    for _, most, nodes, _ in m.chosen:
        wrong = [(own, limit) for own, limit in zip(nodes, most, strict=True) if not 1 <= own <= limit]
        if wrong:
            return Finding(f"a row verifies {wrong[0][0]} nodes", f"1 … {wrong[0][1]}", "it has slots for no more")
    return True if m.chosen else None


@checks("DRAFT-04", CONTRACT, "budgets")
def the_surest_drafts_are_verified(m: ExecutorMoment) -> Outcome:
    several = [chosen for chosen in m.chosen if len(chosen.nodes) > 1]
    for chosen in several:
        budget = chosen.budget
        survivals = [
            survival_of(values, budget.slope, budget.biases, most - 1)
            for values, most in zip(chosen.confidence, chosen.most, strict=True)
        ]
        pair = passed_over([own - 1 for own in chosen.nodes], survivals)
        if pair is not None:
            (left, position, row), (last, *place) = pair
            was = f"draft {position} of row {row} with survival {-left:.6f} is not verified"
            should = f"before draft {place[0]} of row {place[1]} with {-last:.6f}"
            return Finding(was, should, "greatest survival first, then the earlier position, then the earlier row")
    return True if several else None


@checks("DRAFT-05", CONTRACT, "confidences")
def confidences_are_of_a_rows_own_drafts(m: ExecutorMoment) -> Outcome:
    wrong = next((found for found in m.foreign_confidences if found is not None), None)
    if wrong is not None:
        return Finding(*wrong, "what a row verifies would depend on another round, or on another request")
    return True if m.foreign_confidences else None


@checks("SIM-04", CONTRACT)
def the_record_decides_the_same(m: ExecutorMoment) -> Outcome:
    if m.difference is not None:
        served, fed = m.difference
        return Finding(
            f"the engine that was served: {served}",
            f"as the one that was fed the recorded results: {fed}",
            "what is in no record was changed past the port (an array of a step, for instance), so no replay repeats the run",
        )
    return True if m.num_events else None
