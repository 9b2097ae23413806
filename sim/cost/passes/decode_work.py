"""The decode half of a step, and which rounds can exist."""

from __future__ import annotations

from typing import NamedTuple

from ....core.contract.step import PARKED_ROUND, DecodeStep, RoundShape
from ....core.errors import ForedraftError
from ..draft import MULTI_LAYER_EAGLE, Drafting, DraftShape


class InvalidRound(ForedraftError):
    """A decode round that cannot exist; the message says which of its sizes contradict each other."""


class DecodeWork(NamedTuple):
    """The decode half of a step: requests, the shape of their round, KV tokens over the batch, verified tokens."""

    batch_size: int
    shape: RoundShape
    kv_tokens: int
    num_verified: int | None = None  # tokens that the target verifies, over the batch; None: the nodes of every row


def verified_of(decode: DecodeStep) -> int | None:
    """Return `DecodeWork.num_verified` of a decode step."""
    return None if decode.row_nodes is None and decode.budget is None else decode.num_verify_tokens


PARKED_PROMPTS = DecodeWork(0, PARKED_ROUND, 0)
"""Beside prompt chunks that a parked draft does not compute: no row decodes."""


def check_round(draft: DraftShape | None, batch_size: int, shape: RoundShape) -> None:
    """Raise `InvalidRound` unless `draft` can produce a tree of this shape."""
    steps, topk, nodes = shape
    if batch_size < 0 or steps < 0 or topk < (steps > 0) or nodes < 1:
        raise InvalidRound(f"batch_size={batch_size}, {shape}: sizes are out of range")
    if steps == 0:
        if nodes != 1:
            raise InvalidRound(f"{shape}: a round with 0 steps verifies 1 token per row")
        return
    if draft is None:
        raise InvalidRound(f"{shape}: drafting needs a draft; this engine has none")
    if draft.on_host:
        return
    if topk > 1 and draft.drafting is not Drafting.STEPS:
        raise InvalidRound(f"{shape}: {draft.name} drafts chains")
    if topk == 1 and nodes != steps + 1:
        raise InvalidRound(f"{shape}: a chain of {steps} steps verifies {steps + 1} tokens")
    offered = topk + (steps - 1) * topk * topk
    if nodes - 1 > offered:
        raise InvalidRound(f"{shape}: a tree offers at most {offered} drafts")
    if draft.algorithm == MULTI_LAYER_EAGLE and steps > draft.heads:
        raise InvalidRound(f"{shape}: {draft.name} has {draft.heads} heads, one per step")
