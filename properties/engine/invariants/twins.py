"""Two runs of one engine: RELAY-09, ENGINE-15, 17, 19, RADIX-16, ACCEPT-15, SIM-12.
They compare outputs or decisions."""

from __future__ import annotations

from typing import Any

from ...harness.invariants import Finding, Outcome, checks

CONTRACT = "engine"
Twins = tuple[Any, Any]
"""The two trials (`EngineTrial`)."""


def _same_outputs(trials: Twins, why: str) -> Outcome:
    """Compare the outputs of equal prompts with equal seeds;
    one that ended earlier must be a beginning of the others."""
    first, second = (trial.model.outputs for trial in trials)
    found = None
    for key, outputs in first.items():
        others = second.get(key)
        if others is None:
            continue
        found = True
        longest = max((*outputs, *others), key=len)
        for output in (*outputs, *others):
            if output != longest[: len(output)]:
                where = "in the first" if output in outputs else "in the other"
                was = f"a prompt of {len(key[0])} tokens with seed {key[1]} got {list(output)} {where} run"
                return Finding(was, f"a beginning of {list(longest)}", why)
    return found


@checks("ENGINE-19", CONTRACT, twin="again")
def the_same_history_has_the_same_decisions(trials: Twins) -> Outcome:
    first, second = trials
    why = "ranks that each run a scheduler, and a log that is replayed, rely on it"
    for before, after in zip(first.model.decisions, second.model.decisions, strict=False):
        if before != after:
            return Finding(f"{before}, and another time {after}", "the same decision after the same operations", why)
    if len(first.model.decisions) != len(second.model.decisions):
        was = f"{len(first.model.decisions)} decisions, and another time {len(second.model.decisions)}"
        return Finding(was, "as many", why)
    if first.moment.after != second.moment.after:
        was = f"{first.moment.after} at the end, and another time {second.moment.after}"
        return Finding(was, "the same requests, slots and free pages, in the same order", why)
    return True if first.model.decisions else None


@checks("RELAY-09", CONTRACT, "overlap", twin="with the other pipeline depth")
def depth_changes_no_token(trials: Twins) -> Outcome:
    return _same_outputs(trials, "what overlaps is a matter of time alone")


@checks("RADIX-16", CONTRACT, "prefix_cache", twin="without the prefix cache")
def the_cache_changes_no_token(trials: Twins) -> Outcome:
    return _same_outputs(trials, "cached KV is the KV that would be computed")


@checks("SIM-12", CONTRACT, "multi_steps", twin="round by round")
def multi_steps_change_no_token(trials: Twins) -> Outcome:
    return _same_outputs(trials, "a multi-step is its rounds")


@checks("ENGINE-17", CONTRACT, twin="one at a time, in a large pool")
def neighbours_change_no_token(trials: Twins) -> Outcome:
    return _same_outputs(trials, "a request's output depends on that request alone")


@checks("ENGINE-15", CONTRACT, twin="with another model")
def decisions_know_no_future(trials: Twins) -> Outcome:
    first, second = (trial.model.decisions for trial in trials)
    for before, after in zip(first, second, strict=False):
        if before == after:
            continue
        if before[0] == after[0] == "answer":
            break  # the models have said different things; from here on the engine may do so too
        was = f"{before}, and with another model {after}, after the same answers"
        return Finding(was, "the same decision", "the engine knows how long an output is before the model does")
    return True if first else None


@checks("ACCEPT-15", CONTRACT, twin="without speculation")
def no_draft_is_plain_decoding(trials: Twins) -> Outcome:
    first, second = (trial.model.decisions for trial in trials)
    for before, after in zip(first, second, strict=False):
        if before != after:
            return Finding(f"with S = 0: {before}", f"as without speculation: {after}", "nothing is drafted")
    outcome = _same_outputs(trials, "nothing is drafted")
    if outcome is True and len(first) != len(second):
        was, should = f"{len(first)} decisions with S = 0", f"{len(second)}, as without speculation"
        return Finding(was, should, "nothing is drafted")
    return outcome
