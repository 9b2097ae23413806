"""The least times of passes by physics alone: bytes that must be read over the memory's bandwidth, and operations over
the device's peak, both from its data sheet.

No kernel is faster, so a measured time below such a limit is an error of the measurement: weights that stayed in a
cache (an L40S has one of 96 MB), or a table that was continued too far.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ....core.model_shape import Cache, Experts, Mlp, ModelShape, Product
from ..hardware import GPU, Parallelism
from ..passes.forward import equal_layers, query_key_pairs, reached_experts

_SIXTEEN_BITS = ("bf16", "fp16")


class _Work(NamedTuple):
    """Times in ns: of reading weights once at the memory's bandwidth, and of one token's operations at the peak."""

    read_ns: float
    token_ns: float


class PhysicalLimits:
    """The limits of one shape on one device of those that share it. Tokens and rows are those of one attention-data
    parallel group."""

    def __init__(self, shape: ModelShape, gpu: GPU, parallel: Parallelism) -> None:
        self._shape, self._gpu, self._parallel = shape, gpu, parallel
        self._byte_ns = 1e9 / gpu.memory_bandwidth_bytes_per_s
        mixers: list[_Work] = []
        mlps: list[_Work] = []
        experts: list[_Work] = []
        for equal in equal_layers(shape, parallel.tensor):
            own = mlps if isinstance(equal.part, Mlp | Experts) else mixers
            own.append(self._work(equal.products, equal.dtype, equal.number))
            if isinstance(equal.part, Experts):
                own.append(self._work([Product(shape.hidden, equal.part.count)], "bf16", equal.number))  # the router
                products = equal.part.expert(shape.hidden, parallel.devices // parallel.expert)
                experts.append(self._work(products, shape.weight_dtype, equal.number))
        self._mixers, self._mlps, self._expert = map(_sum, (mixers, mlps, experts))
        self._caches = shape.caches(parallel.tensor)

    def _work(self, products: Iterable[Product], dtype: str, count: int) -> _Work:
        weights = count * sum(product.parameters for product in products)
        read_ns = weights * self._shape.format_bytes(dtype) * self._byte_ns
        return _Work(read_ns, 2e9 * weights / self._rate(dtype))

    def _rate(self, dtype: str) -> float:
        """Return the operations per second in a format: the fastest of the device if it has none for it."""
        rates = self._gpu.peak_flops
        return rates["bf16"] if dtype in _SIXTEEN_BITS else rates.get(dtype, max(rates.values()))

    def layers_ns(self, tokens: float, independent: float, *, has_mixers: bool) -> float:
        """Return the least time of the matrix products of all layers, of those around attention if `has_mixers`.

        `independent`: how many tokens choose experts independently, see `ExpertRouting`. The first of them share few
        experts. How many experts more tokens share depends on the model, so these count as if they reached no others.
        """
        parts = [self._mixers, self._mlps] if has_mixers else [self._mlps]
        read_ns, compute_ns = sum(part.read_ns for part in parts), tokens * sum(part.token_ns for part in parts)
        experts, groups, ranks = self._shape.experts, self._parallel.data, self._parallel.expert
        if experts is not None:  # of the mean rank: the busiest takes longer
            apart = min(independent * groups, max(1.0, experts.count / (8 * experts.top_k)))
            read_ns += reached_experts(experts, apart) / ranks * self._expert.read_ns
            compute_ns += tokens * groups * experts.top_k / ranks * self._expert.token_ns
        return max(read_ns, compute_ns)

    def lm_head_ns(self, rows: float) -> float:
        """Return the least time of the logits of so many rows, with an LM head of 16 bits."""
        weights = self._shape.vocab / self._parallel.tensor * self._shape.hidden
        return 2 * weights * max(self._byte_ns, rows * 1e9 / self._rate("bf16"))

    def attention_ns(self, queries: int, context: float) -> float:
        """Return the least time of the attention of one row's `queries` new tokens over its KV."""
        total = 0.0
        for cache, count in self._caches:
            read = context if cache.reach is None else min(context, cache.reach)
            total += count * self._cache_ns(cache, read, queries * read, cache.key_dim + cache.value_dim)
        return total

    def prompt_ns(self, new: int, past: int) -> float:
        """Return the least time of the attention of a prompt chunk behind `past` tokens."""
        total = 0.0
        for cache, count in self._caches:
            read = new + (past if cache.reach is None else min(past, cache.reach))
            dims = cache.prompt_dims or cache.key_dim + cache.value_dim
            total += count * self._cache_ns(cache, read, query_key_pairs(new, past, cache.reach), dims)
        return total

    def _cache_ns(self, cache: Cache, read: float, pairs: float, dims: int) -> float:
        """Return the least time of one layer that reads `read` tokens and computes so many pairs of query and key."""
        read_bytes = read * self._shape.cache_bytes(cache)
        flops = 2.0 * cache.heads * cache.queries * dims * pairs / cache.tokens_per_entry
        is_short = cache.element_bytes == 1 or self._shape.kv_dtype not in _SIXTEEN_BITS
        rate = max(self._gpu.peak_flops.values()) if is_short else self._rate("bf16")
        return max(read_bytes * self._byte_ns, flops * 1e9 / rate)


def _sum(parts: list[_Work]) -> _Work:
    return _Work(sum(part.read_ns for part in parts), sum(part.token_ns for part in parts))
