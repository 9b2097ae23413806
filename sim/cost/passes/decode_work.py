"""The decode half of a step, and which rounds can exist."""

from __future__ import annotations

from typing import NamedTuple

from ....core.errors import ForedraftError
from ..draft import MULTI_LAYER_EAGLE, DraftShape


class InvalidRound(ForedraftError):
    """A decode round that cannot exist; the message says which of steps, topk and num_draft_tokens
    contradict each other."""


class DecodeWork(NamedTuple):
    """The decode half of a step: requests, draft depth, branching, tree nodes (root included), KV tokens over the
    batch."""

    batch_size: int
    steps: int
    topk: int
    num_draft_tokens: int
    kv_tokens: int


def check_round(draft: DraftShape | None, batch_size: int, steps: int, topk: int, num_draft_tokens: int) -> None:
    """Raise `InvalidRound` unless `draft` can produce a tree of this depth, branching and size."""
    shape = f"steps={steps}, topk={topk}, num_draft_tokens={num_draft_tokens}"
    if batch_size < 0 or steps < 0 or topk < 1 or num_draft_tokens < 1:
        raise InvalidRound(f"batch_size={batch_size}, {shape}: sizes are out of range")
    if steps == 0:
        if num_draft_tokens != 1:
            raise InvalidRound(f"{shape}: a round with 0 steps verifies 1 token per row")
        return
    if draft is None:
        raise InvalidRound(f"{shape}: drafting needs a draft; this engine has none")
    if draft.on_host:
        return
    if topk == 1 and num_draft_tokens != steps + 1:
        raise InvalidRound(f"{shape}: a chain of {steps} steps verifies {steps + 1} tokens")
    offered = topk + (steps - 1) * topk * topk
    if num_draft_tokens - 1 > offered:
        raise InvalidRound(f"{shape}: a tree offers at most {offered} drafts")
    if draft.algorithm == MULTI_LAYER_EAGLE and steps > draft.heads:
        raise InvalidRound(f"{shape}: {draft.name} has {draft.heads} heads, one per step")
