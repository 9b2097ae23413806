"""Fractions of a device's peaks that kernels reach: a roofline with four corrections, each with its own parameter.

* **Roll-off.** A kernel that moves `x` bytes takes `ramp + x / (fraction · peak)`: small transfers reach a smaller
  fraction.
* **Tiles and waves.** A matrix product is computed in output tiles, a wave of one tile per multiprocessor; tokens are
  padded to whole tiles and the last wave counts in full. So the cost of verifying is a step function of the number of
  tokens.
* **Soft corner.** Near the ridge, memory and compute do not overlap perfectly: `t = (t_mem^p + t_flop^p)^(1/p)`.
* **Query tiles.** Decode attention packs the queries that share a KV head into matrix tiles. So wide verify trees pay
  compute in steps; narrow ones cost no more than the KV read.

Numbers are fractions of data-sheet peaks. Where no published measurement was at hand they are marked as assumptions.
Those of matrix products are fitted to the measured kernels of several models (docs/servers.md, "The roofline").

The errors of the default roofline against published measurements: `tests/sim/cost/test_cost_published.py` computes
these numbers and fails outside its stated tolerances. Nothing was fitted to them.

    H100, Llama-3.1-8B bf16                                                               error
    target pass, 1 … 1024 tokens, against the vLLM fit (arXiv 2601.11580)                 -25 … +4 %
    plain decoding, TensorRT-LLM, concurrency 8 … 128 (prefill included, no host time)    -8 … -1 %
    reading a KV token, against the same fit (39.3 ns)                                    +15 %
    plain decoding, batch 1, with 1.207 ms of host time, against 7.07 ms                  +5 %
    three EAGLE passes, driven by the host, against 2.135 ms                              0 % (the floor is this number)
    EAGLE-3, 2 … 7 steps, driven by the host (vLLM issue 20780)                           -13 … -20 %, same shape
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .hardware import GPU

WIDE = "bf16"
"""The format of products whose activations are not quantized."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A matrix kernel's output tile: rows (tokens) × columns, and its rate relative to the best tile."""

    rows: int
    columns: int
    relative_rate: float


# Relative rates: assumption. A tile of r × c re-reads operands from shared memory (r + c) / (r · c) per output, so thin
# tiles starve the tensor cores; 128 × 128 and larger run at full rate.
DEFAULT_TILES = (
    Tile(16, 128, 0.35),
    Tile(32, 128, 0.55),
    Tile(64, 128, 0.80),
    Tile(128, 128, 1.00),
    Tile(128, 256, 1.00),
)


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Fractions of peak and fixed costs. Times in nanoseconds."""

    bandwidth: float = 0.88  # of a kernel that only moves data
    product_bandwidth: float = 0.84  # of a large matrix product
    compute: float = 0.79  # of a large matrix product
    narrow_compute: float = 0.80  # of that, for operands of 8 bits and fewer
    attention_bandwidth: float = 0.88
    attention_compute: float = 0.50
    ramp_ns: float = 2_000.0  # start and end of a kernel that only moves data
    product_ramp_ns: float = 3_000.0  # of a matrix product
    small_kernel_ns: float = 2_000.0  # a norm, rotary or activation kernel inside a graph
    quantize_ns: float = 3_000.0  # the kernel that makes the activations of a product narrow
    product_exponent: float = 2.5  # p of the soft corner of matrix products
    soft_exponent: float = 1.5  # p of the soft corner of attention
    split_k_max: int = 8  # how far a product with few tiles is split along its inner dimension
    tiles: tuple[Tile, ...] = DEFAULT_TILES
    query_tiles: tuple[int, ...] = (16, 64, 128)  # rows of decode attention's query tile
    unequal_rows: float = 1.0  # the time of a captured verify pass whose rows differ, over that of equal rows

    def __post_init__(self) -> None:
        fractions = (
            self.bandwidth,
            self.compute,
            self.narrow_compute,
            self.attention_bandwidth,
            self.attention_compute,
        )
        for fraction in fractions:
            assert 0.0 < fraction <= 1.0, f"a fraction of peak must be in (0, 1], not {fraction}"
        assert min(self.soft_exponent, self.product_exponent) >= 1.0, (
            "the soft corner's exponent is at least 1 (no overlap at all)"
        )
        assert self.split_k_max >= 1
        assert self.tiles, "no tiles"
        assert self.query_tiles == tuple(sorted(self.query_tiles)), "query tiles must be in increasing order"

    def stream_ns(self, gpu: GPU, size_bytes: float) -> float:
        """Return the time of a kernel that only moves `size_bytes`."""
        return self.ramp_ns + size_bytes * 1e9 / (gpu.memory_bandwidth_bytes_per_s * self.bandwidth)

    def soft_max(self, memory_ns: float, compute_ns: float, exponent: float | None = None) -> float:
        """Return the larger of both, rounded at the corner (p-norm; default: that of attention). It is scale-free, so a
        ratio stays a ratio."""
        power = self.soft_exponent if exponent is None else exponent
        larger, smaller = max(memory_ns, compute_ns), min(memory_ns, compute_ns)
        if larger <= 0.0:
            return 0.0
        rounded: float = (1.0 + (smaller / larger) ** power) ** (1.0 / power)
        return larger * rounded

    def tiles_ns(self, gpu: GPU, rows: int, inner: int, columns: int, groups: float, dtype: str) -> float:
        """Return the compute time of `groups` products [rows, inner] × [inner, columns] in whole tiles and whole waves.

        The best tile shape and the best split of the inner dimension are taken, as a tuned library would.
        """
        sm_count, split_k_max = gpu.sm_count, self.split_k_max
        compute = self.compute * (1.0 if dtype == WIDE else self.narrow_compute)
        per_sm_flops = gpu.flops(dtype) * compute / sm_count
        best = math.inf
        for tile in self.tiles:
            count = math.ceil(groups * math.ceil(rows / tile.rows) * math.ceil(columns / tile.columns))
            tile_s = 2.0 * tile.rows * tile.columns * inner / (per_sm_flops * tile.relative_rate)
            split = 1
            while split <= split_k_max:
                waves_s = -(-count * split // sm_count) * tile_s / split
                if waves_s < best:
                    best = waves_s
                split *= 2
        return best * 1e9

    def gemm_ns(
        self, gpu: GPU, rows: int, inner: int, columns: int, *, dtype: str, weight_bytes: float, groups: float = 1.0
    ) -> float:
        """Return the time of `groups` matrix products with their own weights, `rows` tokens each (activations are
        16-bit).

        `dtype` is the tensor-core format, `weight_bytes` the bytes of one weight.
        """
        found = self._product_ns(gpu, rows, inner, columns, groups, dtype, weight_bytes)
        if dtype == WIDE:
            return found
        # Where products are so small that quantizing takes longer than it saves, servers do it in another kernel.
        wide = self._product_ns(gpu, rows, inner, columns, groups, WIDE, 2.0)
        return max(found, min(found + self.quantize_ns, wide))

    def _product_ns(
        self, gpu: GPU, rows: int, inner: int, columns: int, groups: float, dtype: str, weight_bytes: float
    ) -> float:
        moved = groups * (inner * columns * weight_bytes + rows * (inner + columns) * 2)
        memory_ns = moved * 1e9 / (gpu.memory_bandwidth_bytes_per_s * self.product_bandwidth)
        compute_ns = self.tiles_ns(gpu, rows, inner, columns, groups, dtype)
        return self.product_ramp_ns + self.soft_max(memory_ns, compute_ns, self.product_exponent)

    def padded_queries(self, queries: int) -> int:
        """Return the rows that decode attention computes for `queries` rows:
        one of the query tiles, or whole largest tiles."""
        for tile in self.query_tiles:
            if queries <= tile:
                return tile
        return math.ceil(queries / self.query_tiles[-1]) * self.query_tiles[-1]

    def attention_ns_per_token(
        self, gpu: GPU, *, heads: int, queries: int, query_flops: float, token_bytes: float, dtype: str
    ) -> float:
        """Return the time per cached token of one layer's decode attention: `heads` caches, each with `queries` rows
        (query heads × tree nodes) that do `query_flops` each on a token; `token_bytes` over all heads.
        """
        memory_s = token_bytes / (gpu.memory_bandwidth_bytes_per_s * self.attention_bandwidth)
        flops = query_flops * self.padded_queries(queries) * heads
        compute_s = flops / (gpu.flops(dtype) * self.attention_compute)
        return self.soft_max(memory_s * 1e9, compute_s * 1e9)

    def explain(self) -> list[tuple[str, float, str, str]]:
        """Return rows (name, value, unit, source) for `--explain`."""
        explained = []
        for name, (label, unit, source) in EXPLAINED.items():
            value = getattr(self, name)
            # A source is that of its own value only.
            source = source if value == getattr(DEFAULT_EFFICIENCY, name) else OTHER_VALUE
            explained.append((label, value * (1e-3 if unit else 1.0), unit, source))
        return explained


OTHER_VALUE = "assumption for this device, or set by the user"

_FITTED = (
    "fitted to the database of measured kernels, 15 dense models on five GPUs, 1 to 8,192 tokens (docs/servers.md)"
)
_OF_ATTENTION = "assumption: a long KV streams as weights do, 0.88 (the 39.3 ns per token of arXiv 2601.11580 would be the full peak)"
_OF_PROMPTS = "assumption: FlashAttention prefill of a few thousand tokens reaches half of peak"
_OF_STREAMS = "assumption: streaming kernels reach 85-92 % of HBM bandwidth; 0.88"
_OF_RAMPS = "assumption: 2 us from launch to steady streaming and back, per kernel"
EXPLAINED: dict[str, tuple[str, str, str]] = {
    "bandwidth": ("streaming: fraction of bandwidth", "", _OF_STREAMS),
    "product_bandwidth": ("matrix products: fraction of bandwidth", "", _FITTED),
    "compute": ("matrix products: fraction of compute", "", _FITTED),
    "attention_bandwidth": ("attention: fraction of bandwidth", "", _OF_ATTENTION),
    "attention_compute": ("attention: fraction of compute", "", _OF_PROMPTS),
    "ramp_ns": ("streaming kernel ramp", "us", _OF_RAMPS),
    "product_ramp_ns": ("matrix product ramp", "us", _FITTED),
    "small_kernel_ns": ("small kernel in a graph", "us", "assumption: 2 us for a small kernel inside a CUDA graph"),
    "narrow_compute": ("matrix products of 8 bits and fewer: share of that", "", _FITTED),
    "quantize_ns": ("quantizing the activations of a product", "us", _FITTED),
    "product_exponent": ("soft corner exponent of matrix products", "", _FITTED),
    "soft_exponent": ("soft corner exponent of attention", "", "assumption: p = 1.5"),
    "unequal_rows": ("verify pass of unequal rows over one of equal rows", "", "assumption: as fast as equal rows"),
}
"""What a number is, its unit, and its source."""

DEFAULT_EFFICIENCY = Efficiency()

# Devices whose kernels are known to reach other fractions: A100 and L40S by the same fit, the others are assumptions
# from the shape of public GEMM and stream benchmarks. Unequal rows on Instinct: an ablation in vLLM pull 52362, where
# confidences that cut no draft made serving 5.5 % (4 clients) and 6.0 % (32) slower than equal rows.
_A100 = replace(DEFAULT_EFFICIENCY, compute=0.80, product_bandwidth=0.74)
_LOW_POWER = replace(DEFAULT_EFFICIENCY, compute=0.55)
_L40S = replace(DEFAULT_EFFICIENCY, compute=0.66)
_GEFORCE = replace(DEFAULT_EFFICIENCY, compute=0.85, bandwidth=0.90, product_bandwidth=0.86)
_INSTINCT = replace(
    DEFAULT_EFFICIENCY,
    compute=0.50,
    bandwidth=0.78,
    product_bandwidth=0.74,
    attention_bandwidth=0.70,
    small_kernel_ns=3_000.0,
    unequal_rows=1.06,
)
_BY_GPU: dict[str, Efficiency] = {
    **dict.fromkeys(("A100", "A100-40G"), _A100),
    **dict.fromkeys(("L4", "A10"), _LOW_POWER),
    "L40S": _L40S,
    **dict.fromkeys(("RTX 3090", "RTX 4090", "RTX 5090"), _GEFORCE),
    **dict.fromkeys(("MI300X", "MI325X", "MI355X"), _INSTINCT),
}


def default_efficiency(gpu: GPU) -> Efficiency:
    """Return the fractions used for `gpu` when no calibration replaces them."""
    return _BY_GPU.get(gpu.name, DEFAULT_EFFICIENCY)
