"""The cost of one forward pass of a transformer shape on one device of a tensor-parallel group.

Everything here is time on the device in float nanoseconds; `round.py` composes passes into rounds and rounds once, at
the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...core.errors import ForetokenError
from ...core.model_shape import DTYPE_BYTES, ModelShape
from .efficiency import Efficiency
from .hardware import GPU

# Above this many tokens (prompts, whose lengths vary freely) times are computed for whole quanta, so that they can be
# looked up. A matrix kernel pads to 16 rows at least, so only the small kernels' traffic is overstated, by at most 3 %.
_EXACT_TOKENS = 512
_TOKEN_QUANTUM = 16


class UnsupportedParallelism(ForetokenError):
    """A tensor-parallel size that does not divide the model."""


@dataclass(frozen=True, slots=True)
class Line:
    """Time that is linear in KV tokens: `base_ns + slope_ns · kv + window_slope_ns · min(kv, rows · window)`."""

    base_ns: float
    slope_ns: float = 0.0
    window_slope_ns: float = 0.0


class ForwardCost:
    """Costs of passes of one shape. `qkv_inputs`: the attention input's width in hidden sizes (2 for an EAGLE-3
    layer)."""

    def __init__(self, shape: ModelShape, gpu: GPU, efficiency: Efficiency, tp: int, qkv_inputs: int = 1) -> None:
        if tp < 1 or shape.heads % tp:
            raise UnsupportedParallelism(
                f"tensor parallelism {tp} does not divide the {shape.heads} attention heads of {shape.name}"
            )
        if tp > 1 and shape.kv_heads % tp and tp % shape.kv_heads:
            raise UnsupportedParallelism(
                f"tensor parallelism {tp} does not fit the {shape.kv_heads} KV heads of {shape.name}"
            )
        self.shape = shape
        self.gpu = gpu
        self.efficiency = efficiency
        self.tp = tp
        self.qkv_inputs = qkv_inputs
        self.local_heads = shape.heads // tp
        # With fewer KV heads than devices each device keeps a copy of one head.
        self.local_kv_heads = max(shape.kv_heads // tp, 1)
        # A device without a rate for the weights' format computes in 16 bits and only saves the traffic.
        self.dtype = shape.weight_dtype if shape.weight_dtype in gpu.peak_flops else "bf16"
        self.kv_token_bytes = 2 * self.local_kv_heads * shape.head_dim * DTYPE_BYTES[shape.kv_dtype]
        self._layers_cache: dict[int | tuple[int, float], float] = {}

    def explain(self) -> list[tuple[str, float | str, str, str]]:
        """Return rows (name, value, unit, source) of what this adds to model, GPU and efficiencies."""
        return [("kernels of the target", "roofline", "", "times from the GPU's peaks and the efficiencies below")]

    @property
    def kernels(self) -> int:
        """Count the kernels that one pass launches, LM head included."""
        per_layer = 4 + self._small_kernels() + 2 + (2 if self.tp > 1 else 0)
        moe_extra = 4 * self.shape.moe_layers
        return self.shape.layers * per_layer + moe_extra + 3

    def _small_kernels(self) -> int:
        """Per layer: two norms, rotary embedding with the KV write, activation, and the norms of q and k."""
        return 4 + (1 if self.shape.qk_norm else 0)

    def layers_ns(self, tokens: int, independent: float | None = None) -> float:
        """Return the time of all layers' matrix products and small kernels for `tokens` tokens, without attention and communication.

        `independent`: as many independently routed tokens reach the same experts (`work.PassTokens`); default: all.
        """
        if tokens > _EXACT_TOKENS:
            tokens = -(-tokens // _TOKEN_QUANTUM) * _TOKEN_QUANTUM
            if independent is not None:
                independent = math.ceil(independent / _TOKEN_QUANTUM) * _TOKEN_QUANTUM
        key = tokens if independent is None or not self.shape.moe_layers else (tokens, independent)
        if key not in self._layers_cache:
            shape = self.shape
            dense = shape.layers - shape.moe_layers
            total = shape.layers * (self._projections_ns(tokens) + self._small_ns(tokens))
            if dense:
                total += dense * self._mlp_ns(tokens, shape.intermediate)
            if shape.moe_layers:
                total += shape.moe_layers * self._moe_ns(tokens, tokens if independent is None else independent)
            self._layers_cache[key] = total + self._embedding_ns(tokens)
        return self._layers_cache[key]

    def gemm_ns(self, tokens: int, inner: int, columns: int, groups: float = 1.0) -> float:
        """Return the time of matrix products in the shape's weight format; sizes in elements, already divided among the devices."""
        weight_bytes = self.shape.bytes_per_weight
        return self.efficiency.gemm_ns(
            self.gpu, tokens, inner, columns, dtype=self.dtype, weight_bytes=weight_bytes, groups=groups
        )

    def _attention_gemm_ns(self, tokens: int, inner: int, columns: int) -> float:
        if not self.shape.wide_attention:
            return self.gemm_ns(tokens, inner, columns)
        return self.efficiency.gemm_ns(self.gpu, tokens, inner, columns, dtype="bf16", weight_bytes=2)

    def _projections_ns(self, tokens: int) -> float:
        shape = self.shape
        qkv_columns = (self.local_heads + 2 * self.local_kv_heads) * shape.head_dim
        qkv = self._attention_gemm_ns(tokens, shape.hidden * self.qkv_inputs, qkv_columns)
        return qkv + self._attention_gemm_ns(tokens, self.local_heads * shape.head_dim, shape.hidden)

    def _mlp_ns(self, tokens: int, intermediate: int) -> float:
        local = math.ceil(intermediate / self.tp)
        hidden = self.shape.hidden
        return self.gemm_ns(tokens, hidden, 2 * local) + self.gemm_ns(tokens, local, hidden)

    def active_experts(self, independent: float) -> float:
        """Return how many experts so many tokens reach in a layer, E·(1 − (1 − k/E)ⁿ), if the router spreads them evenly and
        independently (assumption). This is why verifying many tokens of a sparse model reads more weights than one.
        """
        experts = self.shape.experts
        return experts * (1.0 - (1.0 - self.shape.experts_per_token / experts) ** independent)

    def _moe_ns(self, tokens: int, independent: float) -> float:
        shape = self.shape
        active = self.active_experts(independent)
        # All but a trace of the experts are reached by many tokens: that trace is no further row.
        rows = math.ceil(tokens * shape.experts_per_token / active - 1e-6)
        local = math.ceil(shape.moe_intermediate / self.tp)
        grouped = self.gemm_ns(rows, shape.hidden, 2 * local, active) + self.gemm_ns(rows, local, shape.hidden, active)
        router = self.gemm_ns(tokens, shape.hidden, shape.experts)
        # Choose the top k, sort by expert, and sum the experts' outputs.
        routing = 3 * self.efficiency.small_kernel_ns
        shared = self._mlp_ns(tokens, shape.shared_intermediate) if shape.shared_intermediate else 0.0
        return grouped + router + routing + shared

    def _small_ns(self, tokens: int) -> float:
        """Return the time of norms, rotary embedding, activation of one layer: a fixed time each plus their traffic."""
        shape = self.shape
        wide = shape.intermediate if not shape.moe_layers else shape.experts_per_token * shape.moe_intermediate
        norms = 2 * 4 * shape.hidden
        rotary = 2 * (self.local_heads + 2 * self.local_kv_heads) * shape.head_dim
        activation = 3 * math.ceil(wide / self.tp)
        moved = 2.0 * tokens * (norms + rotary + activation)
        efficiency = self.efficiency
        streaming = moved * 1e9 / (self.gpu.memory_bandwidth_bytes_per_s * efficiency.bandwidth)
        return self._small_kernels() * efficiency.small_kernel_ns + streaming

    def _embedding_ns(self, tokens: int) -> float:
        return self.efficiency.stream_ns(self.gpu, 4.0 * tokens * self.shape.hidden)

    def lm_head_ns(self, rows: int, vocab: int | None = None) -> float:
        """Return the time of logits of `rows` tokens, gathered over the group; the LM head stays 16-bit in 8-bit models."""
        vocab = vocab or self.shape.vocab
        local = math.ceil(vocab / self.tp)
        product = self.efficiency.gemm_ns(self.gpu, rows, self.shape.hidden, local, dtype="bf16", weight_bytes=2)
        return product + self.efficiency.small_kernel_ns + self._gather_ns(rows * vocab * 2)

    def _gather_ns(self, size_bytes: float) -> float:
        if self.tp == 1:
            return 0.0
        link = self.gpu.interconnect
        share = (self.tp - 1) / self.tp
        return link.latency_ns + share * size_bytes * 1e9 / link.bandwidth_bytes_per_s

    def comm_ns(self, tokens: int) -> float:
        """Return the time of two all-reduces per layer: each sends and receives 2·(tp − 1)/tp of the activations, after a fixed latency."""
        if self.tp == 1:
            return 0.0
        link = self.gpu.interconnect
        size_bytes = 2.0 * tokens * self.shape.hidden
        one = link.latency_ns + 2 * (self.tp - 1) / self.tp * size_bytes * 1e9 / link.bandwidth_bytes_per_s
        return 2 * self.shape.layers * one

    @property
    def knee(self) -> int:
        """The context per row at which the lines of `decode_attention` bend: where windows are full."""
        return self.shape.attention_window or 0

    def decode_attention(self, rows: int, queries_per_row: int, own_tokens: int, reads: int = 1) -> Line:
        """Attention of a decode, verify or catch-up pass over `rows` rows, linear in the batch's KV tokens.

        `queries_per_row`: tokens of one sequence that attend together; `own_tokens`: KV written by this round that is
        read too, over the batch; `reads`: how often a prefix is read (once per branch when branches do not share it).
        """
        shape, efficiency = self.shape, self.efficiency
        per_token = reads * efficiency.attention_ns_per_token(
            self.gpu,
            queries=queries_per_row * (self.local_heads // self.local_kv_heads),
            head_dim=shape.head_dim,
            kv_heads=self.local_kv_heads,
            kv_bytes=DTYPE_BYTES[shape.kv_dtype],
            dtype="bf16",
        )
        # The split over the sequence and its combination are two kernels.
        fixed = shape.layers * 2 * efficiency.small_kernel_ns
        full = shape.layers - shape.windowed_layers
        return Line(
            base_ns=fixed + shape.layers * per_token * own_tokens,
            slope_ns=full * per_token,
            window_slope_ns=shape.windowed_layers * per_token,
        )

    def prefill_attention_ns(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Return the time of attention of prompt chunks (new tokens, tokens before them): quadratic in new, linear in past."""
        shape, efficiency, gpu = self.shape, self.efficiency, self.gpu
        full = shape.layers - shape.windowed_layers
        pairs, tiles, read_tokens = 0.0, 0, 0
        for new, past in chunks:
            pairs += full * (new * past + new * (new + 1) / 2)
            if shape.windowed_layers:
                pairs += shape.windowed_layers * _windowed_pairs(new, past, shape.attention_window or 0)
            tiles += math.ceil(new / 128) * self.local_heads
            read_tokens += new + past
        if not tiles:
            return 0.0
        flops = 4.0 * self.local_heads * shape.head_dim * pairs
        # The last wave of query tiles leaves multiprocessors idle; short prompts fill a part of the device only.
        filled = tiles / (math.ceil(tiles / gpu.sm_count) * gpu.sm_count)
        compute_ns = flops * 1e9 / (gpu.flops("bf16") * efficiency.attention_compute * filled)
        memory_s = shape.layers * read_tokens * self.kv_token_bytes / gpu.memory_bandwidth_bytes_per_s
        memory_ns = memory_s * 1e9 / efficiency.attention_bandwidth
        return shape.layers * efficiency.small_kernel_ns + efficiency.soft_max(memory_ns, compute_ns)


def _windowed_pairs(new: int, past: int, window: int) -> float:
    """Return the query-key pairs of `new` tokens after `past` when each sees at most `window` tokens, itself included."""
    growing = min(max(window - past, 0), new)
    return growing * past + growing * (growing + 1) / 2 + (new - growing) * window
