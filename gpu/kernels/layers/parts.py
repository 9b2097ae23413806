"""The parts of long rows: where a tile's result goes, and how a row's parts are joined (`flash`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..jit import jit, next_power_of_2, tl
from .flash import MAX_PARTS, KeyCut, Tiles, parts_of

JOINED_PARTS = 16  # at once, by the second kernel
JOINED_ROWS = 16  # of a tile whose parts the last program joins


@jit
def store_tile(
    out,
    partial,
    lse,
    arrived,
    acc,
    peak,
    total,
    value_factor,
    index,
    live,
    half,
    part,
    num_parts,
    most,
    HEAD_DIM: tl.constexpr,
    HALVES: tl.constexpr,
    SKIPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLIT: tl.constexpr,
    JOIN: tl.constexpr,
):
    """Store a tile's softmax to out [·, d], 0 where nothing was seen; index [M] counts query heads. `value_factor`
    multiplies what goes to `out`.

    SPLIT: as one of the row's `num_parts`. JOIN: the last part to arrive joins them, and one alone goes to `out`;
    `arrived` points at the tile's counter, which is 0 before and after. The tile is a `half` of the channels.
    """
    VALUE_DIM: tl.constexpr = HEAD_DIM // HALVES - SKIPPED
    channel = tl.arange(0, BLOCK_V)
    mask = live[:, None] & (channel < VALUE_DIM)[None, :]
    target = out + index[:, None] * HEAD_DIM + half * (HEAD_DIM // HALVES) + SKIPPED + channel[None, :]
    index = index * HALVES + half
    if SPLIT and not JOIN:
        store_part(partial, lse, acc, peak, total, index * most + part, live, mask, VALUE_DIM, BLOCK_V)
    else:
        missing = num_parts - 1
        if JOIN:  # noqa: SIM102 - known when the kernel is compiled, the other when it runs
            if num_parts > 1:
                store_part(partial, lse, acc, peak, total, index * most + part, live, mask, VALUE_DIM, BLOCK_V)
                tl.debug_barrier()  # the atomic is one thread's, and comes behind the stores of all
                missing -= tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu")
                if missing == 0:
                    tl.store(arrived, 0)
                    acc, total = join_parts(partial, lse, index, live, num_parts, most, VALUE_DIM, BLOCK_M, BLOCK_V)
        if missing == 0:
            acc = acc / tl.where(total > 0, total, 1.0)[:, None] * value_factor
            tl.store(target, acc.to(out.dtype.element_ty), mask=mask)


@jit
def store_part(partial, lse, acc, peak, total, place, live, mask, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr):
    """Store the softmax of one part of a tile at place [M], nothing but its logarithm where nothing was seen."""
    seen = total > 0
    divisor = tl.where(seen, total, 1.0)
    target = partial + place[:, None] * VALUE_DIM + tl.arange(0, BLOCK_V)[None, :]
    tl.store(target, acc / divisor[:, None], mask=mask & seen[:, None])
    tl.store(lse + place, tl.where(seen, peak + tl.log2(divisor), float("-inf")), mask=live)


@jit
def join_parts(
    partial,
    lse,
    index,
    live,
    num_parts,
    most,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Return acc [M, D] and total [M] of a tile's parts, in their order.
    As many are loaded at once as fill 64 registers of a thread, half of them beside wide heads' sums."""
    KEPT: tl.constexpr = 8192 if BLOCK_V <= 128 else 4096
    PARTS: tl.constexpr = KEPT // (BLOCK_M * BLOCK_V) if KEPT > BLOCK_M * BLOCK_V else 1
    channel = tl.arange(0, BLOCK_V)
    acc = tl.zeros((BLOCK_M, BLOCK_V), dtype=tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for start in range(0, num_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        place = index[None, :] * most + part[:, None]
        mask = live[None, :] & (part < num_parts)[:, None]
        # Past the processor's own cache, which may hold what was there before.
        shares = tl.load(lse + place, mask=mask, other=float("-inf"), cache_modifier=".cg")
        new_peak = tl.maximum(peak, tl.max(shares, 0))
        reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights, shrink = tl.exp2(shares - reference[None, :]), tl.exp2(peak - reference)
        # What saw nothing left its part unwritten.
        seen = (shares > float("-inf"))[:, :, None] & (channel < VALUE_DIM)[None, None, :]
        source = partial + place[:, :, None] * VALUE_DIM + channel[None, None, :]
        values = tl.load(source, mask=seen, other=0.0, cache_modifier=".cg")
        acc = acc * shrink[:, None] + tl.sum(values * weights[:, :, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        peak = new_peak
    return acc, total


@jit
def join_parts_kernel(
    partial,
    lse,
    out,
    lens,
    value_factor,
    heads,
    num_nodes,
    least,
    most,
    HEAD_DIM: tl.constexpr,
    HALVES: tl.constexpr,
    SKIPPED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WINDOW: tl.constexpr,
    MOST: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Join with one program per query head and half of the channels, of `heads` for each of a row's `num_nodes`
    queries: the results of its parts, PARTS at a time, weighted with their shares of the sum."""
    VALUE_DIM: tl.constexpr = HEAD_DIM // HALVES - SKIPPED
    index, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    target = out + index * HEAD_DIM + half * (HEAD_DIM // HALVES) + SKIPPED
    keys = tl.load(lens + index // (heads * num_nodes)).to(tl.int32)
    if WINDOW:
        keys = tl.minimum(keys, WINDOW)
    num_parts = parts_of(keys, least, most, BLOCK_N)
    index = index * HALVES + half
    part, channel = tl.arange(0, MOST), tl.arange(0, BLOCK_V)
    sums = tl.load(lse + index * most + part, mask=part < num_parts, other=float("-inf"))
    peak = tl.max(sums, 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp2(sums - peak), 0)
    inside = channel < VALUE_DIM
    joined = tl.zeros((BLOCK_V,), dtype=tl.float32)
    for start in range(0, num_parts, PARTS):
        some = start + tl.arange(0, PARTS)
        weights = tl.exp2(tl.load(lse + index * most + some, mask=some < num_parts, other=float("-inf")) - peak)
        # What saw nothing left its part unwritten.
        mask = (weights > 0.0)[:, None] & inside[None, :]
        place = (index * most + some)[:, None] * VALUE_DIM + channel[None, :]
        joined += tl.sum(tl.load(partial + place, mask=mask, other=0.0) * weights[:, None], 0)
    joined = joined / tl.where(total > 0, total, 1.0) * value_factor
    tl.store(target + channel, joined.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class CutOutput:
    """Where the parts of an attention go; with one part straight to `out` (the others are then `out`
    too, and unused)."""

    out: Tensor  # [n, Hq, d], q's dtype
    partial: Tensor  # float32 [n, Hq, halves, most, values' channels of a half]
    lse: Tensor  # float32 [n, Hq, halves, most], base 2
    arrived: Tensor  # int32, one for each tile: the parts of it that have been stored
    cut: KeyCut
    size: Tiles

    @property
    def joins(self) -> bool:
        """Whether the last program does."""
        return self.cut.most > 1 and self.size.block_m <= JOINED_ROWS

    @classmethod
    def of(cls, q: Tensor, cut: KeyCut, size: Tiles, num_tiles: int) -> CutOutput:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if cut.most == 1:
            return cls(out, out, out, out, cut, size)
        shape = (*q.shape[:2], size.channels.halves, cut.most, size.channels.value_dim)
        partial = torch.empty(shape, dtype=torch.float32, device=q.device)
        lse = torch.empty(shape[:-1], dtype=torch.float32, device=q.device)
        arrived = counters(next_power_of_2(num_tiles * size.channels.halves), q.device)
        return cls(out, partial, lse, arrived, cut, size)

    def join(
        self, lens: Tensor, num_nodes: int, window: int, value_factor: float, nodes: Tensor | None = None
    ) -> Tensor:
        """Return the joined result, `num_nodes` queries for each of `lens`, or of these those of `nodes` int64 [n];
        a second launch if there may be more than one part of tall tiles."""
        if self.cut.most > 1 and not self.joins:
            n, heads, _ = self.out.shape
            if nodes is not None:
                lens, num_nodes = lens[nodes // num_nodes], 1
            join_parts_kernel[(n * heads, self.size.channels.halves)](
                self.partial,
                self.lse,
                self.out,
                lens,
                value_factor,
                heads,
                num_nodes,
                self.cut.least,
                self.cut.most,
                **join_constants(self.size, window),
                num_warps=4,
            )
        return self.out


@cache
def counters(n: int, device: torch.device) -> Tensor:
    """Return zeros int32 [n] that a launch counts in and sets back to 0. Launches share them, as they run one after
    another; graphs hold their address."""
    return torch.zeros(n, dtype=torch.int32, device=device)


def join_constants(size: Tiles, window: int) -> dict[str, int]:
    """Return the constants of `join_parts_kernel`."""
    names = ("HEAD_DIM", "HALVES", "SKIPPED", "BLOCK_N", "BLOCK_V")
    of_tiles = {name: value for name, value in size.constants().items() if name in names}
    return of_tiles | {"WINDOW": window, "MOST": MAX_PARTS, "PARTS": JOINED_PARTS}
