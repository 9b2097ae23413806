"""The cost of one forward pass of a model's shape on one device of those that share it.

Everything here is time on the device in float nanoseconds; `round.py` composes passes into rounds and rounds once, at
the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from statistics import NormalDist
from typing import NamedTuple

from ....core.model_shape import Attention, Cache, Experts, Mlp, ModelShape, Product, Recurrence
from ....core.model_shape.layers import Mixer
from ....core.model_shape.quantization import main_format
from ..efficiency import Efficiency
from ..hardware import GPU, Parallelism, UnsupportedParallelism
from .curve import Line
from .tokens import ExpertRouting

# Above this many tokens (prompts, whose lengths vary freely) times are computed for whole quanta, so that they can be
# looked up. A matrix kernel pads to 16 rows at least, so only the small kernels' traffic is overstated, by at most 3 %.
_EXACT_TOKENS = 512
_TOKEN_QUANTUM = 16
# Tokens that the chunkwise form of linear attention computes at once (Gated Delta Networks, arXiv 2412.06464, section
# 3.3).
_SCAN_CHUNK = 64

_RATE_OF = {"mxfp8": "fp8"}  # formats that are multiplied at another's rate


class _PromptCache(NamedTuple):
    """What the attention of a prompt asks of the caches of some layers, over these layers."""

    layers: int
    reach: int | None
    tokens_per_entry: int
    pair_flops: float  # of a query and a key, over all heads
    token_bytes: float
    query_heads: int

    @classmethod
    def of(cls, cache: Cache, layers: int, token_bytes: float) -> _PromptCache:
        """Return it for `layers` layers with such a cache, of `token_bytes` a token in one layer."""
        dims, query_heads = cache.prompt_dims or cache.key_dim + cache.value_dim, cache.heads * cache.queries
        flops = 2.0 * query_heads * dims * layers
        return cls(layers, cache.reach, cache.tokens_per_entry, flops, layers * token_bytes, query_heads)


class EqualLayers(NamedTuple):
    """The equal mixers or MLPs of a model, and what a pass computes of each of them.

    `products`: matrix products over all tokens of an attention-data parallel group, in the format `dtype`: of experts
    those of the shared MLP. `small_kernels`: norms, rotary embedding with the KV write (or convolution), activation;
    `moved`: elements of 16 bits of a token that they read and write. `other_kernels`: attention's two, or those of
    routed experts.
    """

    number: int
    part: Mixer | Mlp | Experts
    products: tuple[Product, ...]
    dtype: str
    small_kernels: int
    moved: int
    other_kernels: int


def equal_layers(shape: ModelShape, tp: int, inputs: int = 1) -> list[EqualLayers]:
    """Return what a pass over a model computes on each of `tp` devices, attention and LM head apart.

    `inputs`: the width of the first mixer's input, in hidden sizes.
    """
    groups: list[EqualLayers] = []
    hidden = shape.hidden
    mixing, dense = (dtype or shape.weight_dtype for dtype in (shape.attention_dtype, shape.mlp_dtype))
    for mixer, count in shape.mixers:
        small = 3 if isinstance(mixer, Attention) and mixer.qk_norm else 2
        moved = 4 * hidden + 2 * math.ceil(mixer.rotated / tp)
        plain = EqualLayers(count, mixer, mixer.products(hidden, tp), mixing, small, moved, 2)
        if inputs > 1 and not groups:
            groups.append(plain._replace(number=1, products=mixer.products(hidden, tp, inputs)))
            plain = plain._replace(number=count - 1)
        groups.append(plain)
    for part, count in shape.mlps:
        routed = isinstance(part, Experts)
        products = part.shared(hidden, tp) if isinstance(part, Experts) else part.products(hidden, tp)
        moved = 4 * hidden + 3 * math.ceil(part.activated / tp)
        groups.append(EqualLayers(count, part, products, dense, 2, moved, 6 if routed else 0))
    return groups


class ForwardCost:
    """Costs of passes of one shape. `qkv_inputs`: the width of the first attention's input in hidden sizes (2 for an
    EAGLE-3 head). Tokens and rows are those of the whole engine: each attention-data parallel group takes its share of
    them."""

    priced_by: str = "the roofline"  # the source of the times, for a report
    source: str = "the roofline"  # exactly: a database with its version and the request to it
    about_prices: str = ""  # further words about the times for a report

    def __init__(
        self, shape: ModelShape, gpu: GPU, efficiency: Efficiency, parallel: int | Parallelism, qkv_inputs: int = 1
    ) -> None:
        parallel = Parallelism.of(parallel)
        problem = shape.tensor_problem(parallel.tensor)
        experts = shape.experts
        if problem is None and experts is not None and experts.count % parallel.expert:
            problem = (
                f"expert parallelism {parallel.expert} does not divide the {experts.count} experts of {shape.name}"
            )
        if problem is not None:
            raise UnsupportedParallelism(problem)
        self.shape = shape
        self.gpu = gpu
        self.efficiency = efficiency
        self.parallel = parallel
        self.tp: int = parallel.tensor
        self.qkv_inputs = qkv_inputs
        self.layers: list[EqualLayers] = equal_layers(shape, self.tp, qkv_inputs)
        self.caches: tuple[tuple[Cache, int], ...] = shape.caches(self.tp)
        # Collectives of a pass: one for each mixer and each MLP.
        self.collectives: int = sum(one.number for one in self.layers)
        # The context per row at which the lines of `decode_attention` bend: where windows are full.
        self.knee: int = shape.reach or 0
        self._has_experts = bool(shape.moe_layers)
        self._recurrences = tuple((mixer, count) for mixer, count in shape.mixers if isinstance(mixer, Recurrence))
        self._prompt_caches = tuple(
            _PromptCache.of(cache, count, shape.cache_bytes(cache)) for cache, count in self.caches
        )
        self._layers_cache: dict[int | tuple[int, ExpertRouting], float] = {}
        self._lm_heads: dict[int, float] = {}
        self._gemms: dict[tuple[int, int, int, float, str], float] = {}

    def explain(self) -> list[tuple[str, float | str, str, str]]:
        """Return rows (name, value, unit, source) of the numbers that this class adds to model, GPU and
        efficiencies."""
        rows: list[tuple[str, float | str, str, str]] = [
            ("kernels of the target", "roofline", "", "times from the GPU's peaks and the efficiencies below")
        ]
        if self.parallel.expert > 1:
            source = "assumption: the router spreads tokens evenly; the busiest of the ranks is waited for"
            rows.append(("experts: ranks", self.parallel.expert, "", source))
        return rows

    @property
    def has_index(self) -> bool:
        """Whether an indexer chooses what attention reads."""
        return any(getattr(mixer, "index", None) is not None for mixer, _ in self.shape.mixers)

    @cached_property
    def kernels(self) -> int:
        """Count the kernels that one pass launches, LM head included."""
        own = sum(one.number * (len(one.products) + one.small_kernels + one.other_kernels) for one in self.layers)
        return own + (self.collectives if self.parallel.devices > 1 else 0) + 3

    def layers_ns(self, tokens: int, routing: ExpertRouting | None = None) -> float:
        """Return the time of all layers' matrix products and small kernels for `tokens` tokens, without attention and
        communication.

        `routing`: how they choose experts; default: all independently.
        """
        if tokens > _EXACT_TOKENS:
            tokens = -(-tokens // _TOKEN_QUANTUM) * _TOKEN_QUANTUM
            if routing is not None:
                routing = ExpertRouting(
                    *(math.ceil(amount / _TOKEN_QUANTUM) * _TOKEN_QUANTUM for amount in routing[:2])
                )
        key = tokens if routing is None or not self._has_experts else (tokens, routing)
        if key not in self._layers_cache:
            own, total = self._own_share(tokens), 0.0
            for one in self.layers:
                moved_bytes = 2.0 * own * one.moved
                small = one.small_kernels * self.efficiency.small_kernel_ns + self._streamed_ns(moved_bytes)
                products = self._products_ns(own, one.products, one.dtype)
                if isinstance(one.part, Experts):
                    products = self._routed_ns(own, one.part, routing or ExpertRouting(tokens, tokens)) + products
                total += one.number * (products + small)
            if self.shape.layer_inputs is not None:
                products = self._products_ns(
                    own, self.shape.layer_inputs.products(self.shape.hidden), self.layers[-1].dtype
                )
                total += self.shape.layers * (self.efficiency.small_kernel_ns + products)
            self._layers_cache[key] = total + self._embedding_ns(own)
        return self._layers_cache[key]

    def _own_share(self, amount: int) -> int:
        """Return the tokens or rows of one attention-data parallel group, out of those of the engine:
        the fullest group's."""
        return -(-amount // self.parallel.data)

    def gemm_ns(self, tokens: int, inner: int, columns: int, groups: float = 1.0, dtype: str | None = None) -> float:
        """Return the time of matrix products with weights of the format `dtype` (default: the shape's); sizes in
        elements, already divided among the devices. A device without a rate for the format computes in 16 bits and only
        saves the traffic."""
        key = tokens, inner, columns, groups, dtype or self.shape.weight_dtype
        if key not in self._gemms:
            main = main_format(key[-1])
            rate, weight_bytes = _RATE_OF.get(main, main), self.shape.format_bytes(key[-1])
            rate = rate if rate in self.gpu.peak_flops else "bf16"
            self._gemms[key] = self.efficiency.gemm_ns(
                self.gpu, tokens, inner, columns, dtype=rate, weight_bytes=weight_bytes, groups=groups
            )
        return self._gemms[key]

    def _products_ns(self, tokens: int, products: Sequence[Product], dtype: str) -> float:
        return sum(self.gemm_ns(tokens, p.inner, p.columns, p.groups, dtype) for p in products)

    def _routed_ns(self, own: int, experts: Experts, routing: ExpertRouting) -> float:
        """Return the time of routed experts: the busiest rank's for the tokens of the whole engine, and the router for
        the tokens of one group."""
        hidden, ranks = self.shape.hidden, self.parallel.expert
        active = reached_experts(experts, routing.independent)
        assigned: float = routing.tokens * experts.top_k
        if ranks > 1:
            active, assigned = self._busiest(active, experts.count), self._busiest(assigned, math.inf)
        # Many tokens reach nearly all experts: `active` is then just below their number, which must not round up to one
        # more row.
        rows = math.ceil(assigned / active - 1e-6)
        products = experts.expert(hidden, self.parallel.devices // ranks)
        grouped = sum(self.gemm_ns(rows, p.inner, p.columns, active) for p in products)
        router = self.gemm_ns(own, hidden, experts.count)
        # Choose the top k, sort by expert, and sum the experts' outputs.
        return grouped + router + 3 * self.efficiency.small_kernel_ns

    def _busiest(self, amount: float, most: float) -> float:
        """Return how much of `amount` the busiest expert rank gets if each unit goes to a rank at random, independently
        of the others.

        The greatest of r nearly normal shares is the mean plus Φ⁻¹((r − 3/8) / (r + 1/4)) standard deviations (Blom
        1958, Statistical Estimates and Transformed Beta-Variables). `most`: what there is over all ranks.
        """
        ranks = self.parallel.expert
        mean = amount / ranks
        # Experts are drawn without replacement: there is no spread once all are taken.
        left = 1.0 if math.isinf(most) else max(0.0, 1.0 - amount / most)
        deviation = math.sqrt(mean * (1 - 1 / ranks) * left)
        greatest = mean + deviation * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
        return min(greatest, most / ranks, amount)

    def _streamed_ns(self, moved_bytes: float) -> float:
        return moved_bytes * 1e9 / (self.gpu.memory_bandwidth_bytes_per_s * self.efficiency.bandwidth)

    def _embedding_ns(self, tokens: int) -> float:
        return self.efficiency.stream_ns(self.gpu, 4.0 * tokens * self.shape.hidden)

    def lm_head_ns(self, rows: int) -> float:
        """Return the time of logits of `rows` tokens, gathered over the group."""
        found = self._lm_heads.get(rows)
        if found is None:
            found = self._lm_heads[rows] = self._logits_ns(rows)
        return found

    def _logits_ns(self, rows: int) -> float:
        rows = self._own_share(rows)
        local = math.ceil(self.shape.vocab / self.tp)
        product = self.gemm_ns(rows, self.shape.hidden, local, dtype=self.shape.output_dtype)
        # Gathering moves half of what an all-reduce moves.
        gathered = self.gpu.all_reduce_ns(rows * self.shape.vocab, self.tp, self.parallel.nodes(self.tp))
        return product + self.efficiency.small_kernel_ns + gathered

    def comm_ns(self, tokens: int) -> float:
        """Return the time of collectives: an all-reduce of the activations among the devices that share a mixer or a
        dense MLP. Around routed experts all devices take part, with a gather and a scatter in place of the
        all-reduce."""
        parallel = self.parallel
        if parallel.devices == 1:
            return 0.0
        size_bytes = 2.0 * self._own_share(tokens) * self.shape.hidden
        one = self.gpu.all_reduce_ns(size_bytes, self.tp, parallel.nodes(self.tp))
        sparse = self.shape.moe_layers
        total = (self.collectives - sparse) * one
        if sparse:
            all_tokens = 2.0 * tokens * self.shape.hidden
            total += sparse * self.gpu.all_reduce_ns(all_tokens, parallel.devices, parallel.nodes(parallel.devices))
        return total

    @property
    def moved_token_bytes(self) -> int:
        """Bytes of one token's entries on one device: what a move of KV reads and writes."""
        return self.shape.token_bytes(self.tp)

    def decode_attention(self, rows: int, queries_per_row: int, own_tokens: int, reads: int = 1) -> Line:
        """Price the attention of a decode, verify or catch-up pass over `rows` rows, linear in the batch's KV tokens.

        `queries_per_row`: tokens of one sequence that attend together. `own_tokens`: KV written by this round that is
        read too, over the batch. `reads`: how often a prefix is read; once per branch when branches do not share it.
        """
        efficiency, groups = self.efficiency, self.parallel.data
        base = slope = window_slope = 0.0
        for cache, count in self.caches:
            per_token = reads * self._token_ns(cache, queries_per_row) / groups
            base += count * per_token * own_tokens
            if cache.reach is None:
                slope += count * per_token
            elif cache.reach == self.knee:
                window_slope += count * per_token
            else:  # a second, smaller window: taken as full
                base += count * per_token * rows * cache.reach
        # The split over the sequence and its combination are two kernels.
        base += sum(count for _, count in self.caches) * 2 * efficiency.small_kernel_ns
        return Line(base + self.recurrence_ns(rows, queries_per_row), slope, window_slope)

    def recurrence_ns(self, rows: int, queries_per_row: int) -> float:
        """Return the time of recurrent layers in a decode or verify pass:
        each reads the committed state and writes one per new token."""
        total = 0.0
        for mixer, count in self._recurrences:
            moved = self._own_share(rows) * (1 + queries_per_row) * mixer.state_bytes / self.tp
            total += count * (self.efficiency.stream_ns(self.gpu, moved) + self.efficiency.small_kernel_ns)
        return total

    def _token_ns(self, cache: Cache, queries_per_row: int) -> float:
        return (
            self.efficiency.attention_ns_per_token(
                self.gpu,
                heads=cache.heads,
                queries=queries_per_row * cache.queries,
                query_flops=2.0 * (cache.key_dim + cache.value_dim),
                token_bytes=self.shape.cache_bytes(cache) * cache.tokens_per_entry,
                dtype="bf16",
            )
            / cache.tokens_per_entry
        )

    def prefill_attention_ns(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Return the time of attention of prompt chunks (new tokens, tokens before them):
        quadratic in new, linear in past."""
        if not any(new for new, _ in chunks):
            return 0.0
        efficiency, gpu, groups = self.efficiency, self.gpu, self.parallel.data
        flops = memory_bytes = 0.0
        tiles, read_tokens = 0, sum(new + past for new, past in chunks)
        query_tiles = sum(-(-new // 128) for new, _ in chunks)
        for cache in self._prompt_caches:
            pairs = sum(query_key_pairs(new, past, cache.reach) for new, past in chunks)
            flops += cache.pair_flops * pairs / cache.tokens_per_entry
            memory_bytes += cache.token_bytes * read_tokens
            tiles = max(tiles, query_tiles * cache.query_heads)
        # The last wave of query tiles leaves multiprocessors idle; short prompts fill a part of the device only.
        filled = tiles / (math.ceil(tiles / gpu.sm_count) * gpu.sm_count) if tiles else 1.0
        compute_ns = flops * 1e9 / (gpu.flops("bf16") * efficiency.attention_compute * filled)
        memory_ns = memory_bytes / gpu.memory_bandwidth_bytes_per_s * 1e9 / efficiency.attention_bandwidth
        kernels_ns = sum(cache.layers for cache in self._prompt_caches) * efficiency.small_kernel_ns
        total = efficiency.soft_max(memory_ns, compute_ns) / groups + kernels_ns
        return total + self.scan_ns(sum(new for new, _ in chunks)) if self._recurrences else total

    def scan_ns(self, new_tokens: int) -> float:
        """Return the time of linear attention and Mamba over a prompt, in the chunkwise form.

        Each chunk is multiplied with the state and within itself, and the state is written once for each chunk.
        """
        total, tokens = 0.0, self._own_share(new_tokens)
        for mixer, count in self._recurrences:
            within = 2.0 * _SCAN_CHUNK * mixer.heads * (mixer.key_dim + mixer.value_dim)
            flops = tokens * (4.0 * mixer.state_elements + within) / self.tp
            moved = (4.0 * tokens * mixer.rotated + math.ceil(tokens / _SCAN_CHUNK) * mixer.state_bytes) / self.tp
            compute_ns = flops * 1e9 / (self.gpu.flops("bf16") * self.efficiency.attention_compute)
            total += count * self.efficiency.soft_max(self.efficiency.stream_ns(self.gpu, moved), compute_ns)
        return total


def reached_experts(experts: Experts, independent: float) -> float:
    """Return how many experts so many tokens reach in a layer, E·(1 − (1 − k/E)ⁿ), if the router spreads them evenly
    and independently (assumption). This is why verifying many tokens of a sparse model reads more weights than one."""
    missed: float = (1.0 - experts.top_k / experts.count) ** independent
    return experts.count * (1.0 - missed)


def query_key_pairs(new: int, past: int, reach: int | None) -> float:
    """Return the query-key pairs of `new` tokens after `past` when each sees at most `reach` tokens,
    itself included."""
    if reach is None:
        return new * past + new * (new + 1) / 2
    growing = min(max(reach - past, 0), new)
    return growing * past + growing * (growing + 1) / 2 + (new - growing) * reach
