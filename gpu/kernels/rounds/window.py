"""Where the next tokens of each row stand: columns behind its length, their slots in the pool, and their places in a
pass that has not all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ....core.adaptive.lengths.survival import MOST_LOG_ODDS
from ...types.attention import Packing
from ..constants import numbers
from ..jit import cdiv, jit, tl

BLOCK = 128


def pack_rows(row_nodes: Tensor, nodes: int, num_tokens: int) -> Packing:
    """Return the places of the first `row_nodes` int64 [bs] of each row's `nodes` nodes in a pass over `num_tokens`
    tokens, which are at least as many as these."""
    is_verified = (numbers(nodes, row_nodes.device) < row_nodes.unsqueeze(1)).view(-1)
    verified = is_verified.cumsum(0)
    order = numbers(len(is_verified), row_nodes.device)
    # Node i has verified[i] verified nodes up to itself, and so i + 1 − verified[i] others.
    places = torch.where(is_verified, verified - 1, order - verified + verified[-1])
    packed = torch.empty_like(places).scatter_(0, places, order)[:num_tokens]
    return Packing(packed, torch.where(places < num_tokens, places, -1))


def window_torch(
    table: Tensor, rows: Tensor, lengths: Tensor, columns: int, kept: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `Ops.window`."""
    column, width = numbers(columns, rows.device), table.shape[1]
    places = lengths[:, None] + column
    slots = table.view(-1)[rows[:, None] * width + places.clamp(max=width - 1)].long()
    return places, slots if kept is None else slots * (column < kept[:, None])


def choose_rows(confidence: Tensor, most_nodes: Tensor, drafts: Tensor, weights: Tensor) -> Tensor:
    """Return how many nodes each row verifies, int64 [bs]: `core.adaptive.lengths.survival.choose_nodes` by the
    `confidence` float32 [bs, steps] of drafts. `most_nodes` int64 [bs], 0 in padding rows; `drafts` int64 [1];
    `weights` float64 [2, steps]."""
    bs, steps = confidence.shape
    c = confidence.double()
    is_valid = ((c >= 0) & (c <= 1)).all(1, keepdim=True)
    odds = (c.log() - (-c).log1p()).clamp(-MOST_LOG_ODDS, MOST_LOG_ODDS)
    p = torch.where(is_valid, (weights[0] * odds + weights[1]).sigmoid(), 1.0)
    allowed = numbers(steps + 1, c.device)[1:] < most_nodes.unsqueeze(1)
    # Position by position: among equals the earlier one comes first, then the earlier row.
    survival = torch.where(allowed, p.cumprod(1), -1.0).t().reshape(-1)
    order = survival.sort(descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(0, order, numbers(len(order), c.device)).view(steps, bs)
    return ((rank.t() < drafts) & allowed).sum(1) + most_nodes.clamp(max=1)


@jit
def window_kernel(table, rows, lengths, kept, places, slots, n, columns, table_width, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    row, column = i // columns, i % columns
    place = tl.load(lengths + row, mask=inside, other=0) + column
    live = inside
    if kept is not None:
        live = live & (column < tl.load(kept + row, mask=inside, other=0))
    begin = tl.load(rows + row, mask=inside, other=0) * table_width
    slot = tl.load(table + begin + tl.minimum(place, table_width - 1), mask=live, other=0)
    tl.store(places + i, place, mask=inside)
    tl.store(slots + i, slot.to(tl.int64), mask=inside)


def window_triton(
    table: Tensor, rows: Tensor, lengths: Tensor, columns: int, kept: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `Ops.window` as one launch."""
    places, slots = (torch.empty(len(rows), columns, dtype=torch.int64, device=rows.device) for _ in range(2))
    if n := places.numel():
        width = table.shape[1]
        window_kernel[(cdiv(n, BLOCK),)](table, rows, lengths, kept, places, slots, n, columns, width, BLOCK=BLOCK)
    return places, slots
