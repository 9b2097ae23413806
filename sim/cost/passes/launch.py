"""The launch of passes as captured graphs or kernel by kernel, and the waits of the device that follow from it."""

from __future__ import annotations

from dataclasses import dataclass

from ..host import GraphUnit, LaunchCost
from .forward import ForwardCost
from .tokens import PassTokens, padded_tokens

LAUNCH = "launch"
"""The part of a pass that its launch takes."""


@dataclass(frozen=True, slots=True)
class PassLaunch:
    """How an engine launches its passes. `graph_sizes`: captured sizes in increasing order, None for no graphs;
    `graph_unit`: what they count; `independence`: see `ExpertRouting`."""

    cost: LaunchCost
    graph_sizes: tuple[int, ...] | None
    graph_unit: GraphUnit
    independence: float

    def is_captured(self, batch_size: int, width: int) -> bool:
        """Return whether a pass without prefill over so many rows and tokens per row runs as a captured graph."""
        return padded_tokens(batch_size, width, self.graph_sizes, self.graph_unit) is not None

    def tokens(self, batch_size: int, width: int, has_graph: bool = True, num_tokens: int | None = None) -> PassTokens:
        """Return the tokens of a decode pass; `has_graph`: there may be a captured one, as it comes without prefill.
        `num_tokens`: of a packed pass, whose rows have up to `width` tokens; any captured pass that is wide enough
        computes it."""
        if num_tokens is None:
            padded = padded_tokens(batch_size, width, self.graph_sizes, self.graph_unit) if has_graph else None
            return self.of_requests(batch_size, batch_size * width, padded)
        rows, of_each = (-(-num_tokens // width), width) if self.graph_unit == "rows" else (num_tokens, 1)
        return self.of_requests(batch_size, num_tokens, padded_tokens(rows, of_each, self.graph_sizes, self.graph_unit))

    def of_requests(self, requests: int, tokens: int, padded: int | None = None) -> PassTokens:
        """Return the tokens of a number of requests that have `tokens` together. `padded`: the tokens of their graph;
        None: there is none."""
        return PassTokens.of_requests(requests, tokens, self.independence, padded)

    def skew_ns(self, forward: ForwardCost) -> float:
        """Return how long the device waits within a pass for slower devices."""
        return self.cost.collectives_gap_ns(forward.collectives, forward.parallel.devices)

    def waits_ns(self, forward: ForwardCost, tokens: PassTokens) -> float:
        """Return what the device waits within a pass: for slower devices, and between the pieces of a graph."""
        pieces_ns = self.cost.pieces_gap_ns(forward.shape.layers) if tokens.is_captured else 0.0
        return self.skew_ns(forward) + pieces_ns

    def floor_ns(self, forward: ForwardCost, tokens: PassTokens, is_round: bool = False) -> float:
        """Return the least time of a pass: that of launching its kernels, if it is not captured. `is_round`: it decodes
        alone, without prompts."""
        if tokens.is_captured:
            return 0.0
        index_ns = self.cost.eager_index_ns if is_round and forward.has_index else 0.0
        return forward.kernels * max(self.cost.eager_kernel_ns, index_ns)
