"""The work of a decode round in five numbers, the check that they do not contradict each other, and the experts that its tokens reach."""

from __future__ import annotations

from typing import NamedTuple

from ...core.errors import ForetokenError
from .draft import MULTI_LAYER_EAGLE, DraftShape

EXPERT_INDEPENDENCE = 0.58
"""Fitted by benchmarks/fit_expert_independence.py to published counts of distinct experts; see `Routing`."""


class InvalidRound(ForetokenError):
    """A decode round that cannot exist; the message says which of steps, topk and num_draft_tokens contradict each other."""


class DecodeWork(NamedTuple):
    """The decode half of a step: requests, draft depth, branching, tree nodes (root included), KV tokens over the
    batch."""

    batch_size: int
    steps: int
    topk: int
    num_draft_tokens: int
    kv_tokens: int


class Routing(NamedTuple):
    """How the tokens of a pass choose experts: so many do, and reach the experts of so many independently routed ones.

    Requests choose experts independently. Each further token of a request counts as `independence` (0 … 1) of a token, since successive
    tokens of one text share experts: w tokens reach those of 1 + independence · (w − 1) independent ones. The padding of a captured graph
    is copies of one token that an earlier step left there. So it reaches experts as one further token of a request would: 3 tokens in a
    graph of 4 reach no more experts than 4 tokens do. What the copies compute, in their few experts, is not counted.
    """

    tokens: int
    independent: float


class PassTokens(NamedTuple):
    """The tokens of a pass, those of padding included, their routing, and whether the pass is captured."""

    count: int
    routing: Routing
    is_captured: bool

    @classmethod
    def of_requests(cls, requests: int, tokens: int, independence: float, padded: int | None = None) -> PassTokens:
        """Return those of so many requests that have `tokens` together. `padded`: those of their graph; None: there is none."""
        independent = requests + independence * (tokens - requests)
        if padded is None:
            return cls(tokens, Routing(tokens, independent), False)
        return cls(padded, Routing(tokens, independent + independence * (padded > tokens)), True)


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
