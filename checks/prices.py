"""Judges prices of passes, of any deployment and whatever they come from: no work is cheaper than less work, a round
that verifies is no cheaper than a plain one, and no pass is faster than its bytes over the memory's bandwidth or its
operations over the device's peak.

The least bytes and operations are counted here from the model's parameters and caches, and not from the products that
the cost model prices.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..core.contract.step import PLAIN_ROUND, RoundShape
from ..core.model_shape import ModelShape
from ..sim.cost.hardware import GPU
from ..sim.cost.round import RoundCost

SLACK = 1e-3
"""By how much less work may be dearer: the roofline computes long prompts in whole quanta of tokens."""
ROWS = (1, 2, 3, 5, 8, 9, 16, 24, 31, 48, 64, 100, 128, 200, 256, 300, 512, 700)
CONTEXTS = (64, 300, 1024, 2000, 4096, 16_384, 40_000, 100_000)
STEPS = (0, 1, 2, 3, 4, 5, 7, 11)
PROMPTS = (16, 40, 128, 500, 1024, 3000, 8192, 16_384)
PASTS = (0, 100, 1024, 5000, 16_384, 65_536)
TARGET_PASS = ("verify", "attention", "lm_head", "comm")


class PriceFinding(NamedTuple):
    """A price that cannot be: the rule that it breaks, the work, what it costs, and what it should cost at least, in
    ns."""

    rule: str
    work: str
    ns: int
    least_ns: float

    def __str__(self) -> str:
        return f"{self.rule}: {self.work} takes {self.ns / 1e3:,.1f} us, and at least {self.least_ns / 1e3:,.1f}"


def impossible_prices(cost: RoundCost) -> Iterator[PriceFinding]:
    """Yield the impossible prices of an engine on grids of rows, draft steps, contexts and prompts."""
    depths = STEPS if cost.draft is not None else STEPS[:1]
    rounds: dict[tuple[int, ...], int] = {
        work: cost.decode_ns(rows, RoundShape.chain(steps), rows * context)
        for work in itertools.product(ROWS, depths, CONTEXTS)
        for rows, steps, context in (work,)
    }
    yield from _falls(("rows", "steps", "context"), (ROWS, depths, CONTEXTS), rounds)
    prompts: dict[tuple[int, ...], int] = {
        (new, past): cost.step_ns([(new, past)]) for new in PROMPTS for past in PASTS
    }
    yield from _falls(("new tokens", "tokens before"), (PROMPTS, PASTS), prompts)
    yield from _dearer_plain(cost, depths)
    least = _Least(cost.target, cost.gpu, cost.parallel.devices, cost.tp)
    for (rows, steps, context), ns in rounds.items():
        tokens = rows * (steps + 1)
        here = f"{rows} rows, {steps} steps, {context} context"
        yield from least.findings(here, ns, tokens / cost.parallel.data, rows / cost.parallel.data * context)
    for (new, past), ns in prompts.items():
        yield from least.findings(f"{new} new tokens behind {past}", ns, new / cost.parallel.data, past)


def _falls(
    names: Sequence[str], axes: Sequence[Sequence[int]], prices: Mapping[tuple[int, ...], int]
) -> Iterator[PriceFinding]:
    """Yield the prices below that of the next smaller work along an axis."""
    for place, (name, axis) in enumerate(zip(names, axes, strict=True)):
        before = dict(zip(axis[1:], axis, strict=False))
        for work, ns in prices.items():
            if work[place] in before:
                less = prices[(*work[:place], before[work[place]], *work[place + 1 :])]
                if ns < less * (1 - SLACK):
                    words = ", ".join(f"{value} {of}" for value, of in zip(work, names, strict=True))
                    yield PriceFinding(f"more {name} take no less", words, ns, less)


def _dearer_plain(cost: RoundCost, depths: Sequence[int]) -> Iterator[PriceFinding]:
    """Yield the rounds whose target pass is cheaper than that of plain decoding of the same rows, and the trees that
    are cheaper than chains of fewer nodes."""
    for rows, context in itertools.product(ROWS, CONTEXTS):
        plain = _target_pass(cost, rows, PLAIN_ROUND, context)
        for steps in depths[1:]:
            chain = _target_pass(cost, rows, RoundShape.chain(steps), context)
            tree = _target_pass(cost, rows, RoundShape(steps, 4, 2 * steps + 1), context)
            for nodes, ns, least in ((steps + 1, chain, plain), (2 * steps + 1, tree, chain)):
                if ns < least * (1 - SLACK):
                    words = f"a target pass of {rows} rows, {nodes} nodes, {context} context"
                    yield PriceFinding("verifying is no cheaper", words, ns, least)


def _target_pass(cost: RoundCost, rows: int, shape: RoundShape, context: int) -> int:
    parts = cost.decode_parts(rows, shape, rows * context)
    return sum(parts.get(name, 0) for name in TARGET_PASS)


class _Least:
    """The least times of passes of a shape on one of its devices."""

    def __init__(self, shape: ModelShape, gpu: GPU, devices: int, tp: int) -> None:
        formats = {shape.weight_dtype, shape.attention_dtype, shape.mlp_dtype} - {None}
        weight_bytes = min(shape.format_bytes(dtype) for dtype in formats)
        wide = shape.embedding_parameters * (1 if shape.tied_embeddings else 2)  # input embedding and LM head
        weights = (shape.active_parameters - wide) / devices
        self._byte_ns = 1e9 / gpu.memory_bandwidth_bytes_per_s
        self._weights_bytes = weights * weight_bytes
        is_plain = formats <= {"bf16", "fp16"} and shape.kv_dtype in ("bf16", "fp16")
        self._flop_ns = 1e9 / (gpu.flops("bf16") if is_plain else max(gpu.peak_flops.values()))
        self._token_flops = 2 * weights
        full = [(cache, count) for cache, count in shape.caches(tp) if cache.reach is None]
        self._kv_bytes = sum(count * shape.cache_bytes(cache) for cache, count in full)

    def findings(self, work: str, ns: int, tokens: float, kv_tokens: float) -> Iterator[PriceFinding]:
        """Yield what is impossible about a pass over `tokens` of a group that reads `kv_tokens`."""
        least = (self._weights_bytes + self._kv_bytes * kv_tokens) * self._byte_ns
        if ns < least * (1 - SLACK):
            yield PriceFinding("bytes over bandwidth", work, ns, least)
        least = self._token_flops * tokens * self._flop_ns
        if ns < least * (1 - SLACK):
            yield PriceFinding("operations over peak", work, ns, least)
