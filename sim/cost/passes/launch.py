"""The passes of target and draft as an engine launches them: as captured graphs or kernel by kernel, with the waits of
the device that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..host import GraphUnit, LaunchCost
from .curve import Line, Pass
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

    def forward_pass(
        self,
        forward: ForwardCost,
        names: tuple[str, str, str],
        tokens: PassTokens,
        attention: Line,
        logit_rows: int,
        rows: int,
        gap_ns: float,
        *,
        chunks: Sequence[tuple[int, int]] = (),
        beside_ns: Sequence[float] = (),
        least_ns: float = 0.0,
        repeat: int = 1,
        is_round: bool = False,
    ) -> Pass:
        """Return a pass of the target or of a draft, over decode rows, prompt chunks or both.

        Args:
            names: Those of the layers, of attention and of the LM head in the parts of a round.
            attention: That of the decode rows.
            logit_rows: Tokens with logits.
            rows: Decode rows; padding rows compute but have no KV to read.
            gap_ns: What the device waits before the pass.
            chunks: New tokens of prompts, and the tokens before them.
            beside_ns: Times beside the layers.
            least_ns: That of launching the pass as a whole.
            is_round: It decodes alone, without prompts, and is the target's.
        """
        layers_ns = forward.layers_ns(tokens.num_tokens, tokens.routing)
        for further_ns in beside_ns:
            layers_ns += further_ns
        if chunks:
            base_ns = attention.base_ns + forward.prefill_attention_ns(chunks)
            attention = Line(base_ns, attention.slope_ns, attention.window_slope_ns)
        waits_ns = self.cost.collectives_gap_ns(forward.collectives, forward.parallel.devices)  # for slower devices
        if tokens.is_captured:
            waits_ns += self.cost.pieces_gap_ns(forward.shape.layers)
        else:
            index_ns = self.cost.eager_index_ns if is_round and forward.has_index else 0.0
            least_ns = max(forward.kernels * max(self.cost.eager_kernel_ns, index_ns), least_ns)
        parts = {
            names[0]: Line(layers_ns),
            names[1]: attention,
            names[2]: Line(forward.lm_head_ns(logit_rows) if logit_rows else 0.0),
            LAUNCH: Line(gap_ns + waits_ns),
        }
        if forward.parallel.devices > 1:
            parts["comm"] = Line(forward.comm_ns(tokens.num_tokens))
        return Pass(parts, least_ns, repeat, rows * forward.knee)
