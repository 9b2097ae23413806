"""The tokens of a pass: how many it computes, with the padding of its graph, and how many experts they reach."""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import cache
from typing import NamedTuple

from ..host import GraphUnit

EXPERT_INDEPENDENCE = 0.58
"""Fitted by benchmarks/fit_expert_independence.py to published counts of distinct experts; see `ExpertRouting`."""
UNEVEN_INDEPENDENCE = 0.80
"""The same where some experts are more popular than others, as the database of measured kernels routes its tokens."""


class ExpertRouting(NamedTuple):
    """How the tokens of a pass choose experts: `tokens` of them, which reach as many experts as `independent`
    independently routed tokens.

    Requests choose experts independently. Each further token of a request counts as `independence` (0 … 1) of a token,
    since successive tokens of one text share experts. So w tokens reach the experts of 1 + independence · (w − 1)
    independent ones. The padding of a captured graph is copies of one token that an earlier step left there. So it
    reaches experts as one further token of a request would: 3 tokens in a graph of 4 reach no more experts than 4
    tokens do. The work on the copies is not counted.

    `uneven`: how many tokens reach as many where some experts are more popular than others, None if that is the same.
    Part of what tokens of a request share is what all tokens share then, so a further one counts as more of a token.
    """

    tokens: int
    independent: float
    uneven: float | None = None


class PassTokens(NamedTuple):
    """The tokens of a pass, those of padding included, their routing, and whether the pass is captured."""

    num_tokens: int
    routing: ExpertRouting
    is_captured: bool

    @classmethod
    def of_requests(cls, requests: int, tokens: int, independence: float, padded: int | None = None) -> PassTokens:
        """Return the tokens of a number of requests that have `tokens` together. `padded`: the tokens of their graph;
        None: there is none."""
        copies = int(padded is not None and padded > tokens)
        uneven, further = _uneven(independence), tokens - requests
        routing = ExpertRouting(
            tokens,
            requests + independence * further + independence * copies,
            requests + uneven * further + uneven * copies,
        )
        return cls(tokens if padded is None else padded, routing, padded is not None)


@cache
def _uneven(independence: float) -> float:
    """Return as how much of a token a further one counts where some experts are more popular than others."""
    uneven: float = independence ** (math.log(UNEVEN_INDEPENDENCE) / math.log(EXPERT_INDEPENDENCE))
    return uneven


def padded_tokens(
    batch_size: int, width: int, graph_sizes: tuple[int, ...] | None, unit: GraphUnit = "rows"
) -> int | None:
    """Return the tokens that the captured graph of a pass with `width` tokens per row computes.

    None where no graph does (the pass is too large, or graphs are off). `graph_sizes` must be in increasing order.
    """
    size = batch_size if unit == "rows" else batch_size * width
    if not graph_sizes or size > graph_sizes[-1]:
        return None
    captured = graph_sizes[bisect_left(graph_sizes, size)]
    return captured * width if unit == "rows" else captured
