"""Two runs of one engine: RELAY-09, ENGINE-15, 17, RADIX-16, ACCEPT-15, SIM-12. What is compared is what each request was delivered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .registry import Finding, Outcome, checks

if TYPE_CHECKING:
    from ..engine.trial import EngineTrial

CONTRACT = "engine"
Twins = tuple["EngineTrial", "EngineTrial"]


def _same_outputs(first: EngineTrial, second: EngineTrial, why: str) -> Outcome:
    """Equal prompts with equal seeds have equal outputs; who ended earlier has a beginning of them."""
    found = None
    for key, outputs in first.model.outputs.items():
        others = second.model.outputs.get(key)
        if others is None:
            continue
        found = True
        longest = max((*outputs, *others), key=len)
        for output in (*outputs, *others):
            if output != longest[: len(output)]:
                where = "in the first" if output in outputs else "in the other"
                prompt, seed = key
                return Finding(
                    f"a prompt of {len(prompt)} tokens with seed {seed} got {list(output)} {where} run",
                    f"a beginning of {list(longest)}",
                    why,
                )
    return found


@checks("RELAY-09", CONTRACT, "overlap", twin="with the other pipeline depth")
def depth_changes_no_token(trials: Twins) -> Outcome:
    return _same_outputs(*trials, "what overlaps is a matter of time alone")


@checks("RADIX-16", CONTRACT, "prefix_cache", twin="without the prefix cache")
def the_cache_changes_no_token(trials: Twins) -> Outcome:
    return _same_outputs(*trials, "cached KV is the KV that would be computed")


@checks("SIM-12", CONTRACT, "blocks", twin="round by round")
def blocks_change_no_token(trials: Twins) -> Outcome:
    return _same_outputs(*trials, "a block is its rounds")


@checks("ENGINE-17", CONTRACT, twin="one at a time, in a large pool")
def neighbours_change_no_token(trials: Twins) -> Outcome:
    return _same_outputs(*trials, "a request's output depends on that request alone")


@checks("ENGINE-15", CONTRACT, twin="with another model")
def decisions_know_no_future(trials: Twins) -> Outcome:
    first, second = (trial.model.decisions for trial in trials)
    for before, after in zip(first, second, strict=False):
        if before == after:
            continue
        if before[0] == after[0] == "answer":
            break  # the models have said different things; from here on the engine may do so too
        return Finding(
            f"{before}, and with another model {after}, after the same answers",
            "the same decision",
            "the engine knows how long an output is before the model does",
        )
    return True if first else None


@checks("ACCEPT-15", CONTRACT, twin="without speculation")
def no_draft_is_plain_decoding(trials: Twins) -> Outcome:
    first, second = (trial.model.decisions for trial in trials)
    for before, after in zip(first, second, strict=False):
        if before != after:
            return Finding(f"with S = 0: {before}", f"as without speculation: {after}", "nothing is drafted")
    outcome = _same_outputs(*trials, "nothing is drafted")
    if outcome is True and len(first) != len(second):
        return Finding(
            f"{len(first)} decisions with S = 0", f"{len(second)}, as without speculation", "nothing is drafted"
        )
    return outcome
