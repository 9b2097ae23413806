"""The prefix's tail page for each draft branch that fills pages of its own (`core.kv.moves.draft_branch_layout`).

page size 4, seq_len 6, 2 branches of 3 steps
position   4 5 6 7 8 9 10 11 │ 12 13 14 15 16 …
           T T 0 0 0         │ T' T' 1  1  1          T' is what is written here
"""

from __future__ import annotations

import torch
from torch import Tensor

from .constants import numbers


def duplicate_tails_torch_(
    k_pools: Tensor,
    v_pools: Tensor,
    table: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    page_size: int,
    topk: int,
    steps: int,
) -> None:
    if page_size == 1 or topk == 1 or steps == 0 or not rows.numel():
        return
    device = rows.device
    tails = seq_lens % page_size
    pages = (tails + (steps + page_size - 1)) // page_size
    offsets = numbers(page_size - 1, device)  # a tail is shorter than its page
    in_tail = offsets < tails.unsqueeze(1)
    # Lanes past the tail read and write the sink.
    columns = torch.where(in_tail, (seq_lens - tails).unsqueeze(1) + offsets, 0)
    branches = numbers(topk, device)[1:]
    further = columns.unsqueeze(1) + (pages.unsqueeze(1) * page_size * branches).unsqueeze(2)
    in_tail = in_tail.unsqueeze(1)
    row_starts = (rows * table.shape[1]).unsqueeze(1)
    flat = table.view(-1)
    sources = torch.where(in_tail.squeeze(1), flat.take(columns + row_starts), 0)
    targets = torch.where(in_tail, flat.take(torch.where(in_tail, further + row_starts.unsqueeze(2), 0)), 0)
    targets = targets.long().view(-1)
    for pools in (k_pools, v_pools):
        layers, _, heads, channels = pools.shape
        tail = pools.index_select(1, sources.view(-1)).view(layers, len(rows), 1, page_size - 1, heads, channels)
        copies = tail.expand(-1, -1, topk - 1, -1, -1, -1).reshape(layers, targets.numel(), heads, channels)
        pools.index_copy_(1, targets, copies)


def duplicate_tails_bytes(
    num_tail_slots: int, topk: int, num_layers: int, num_kv_heads: int, head_dim: int, element_size: int
) -> int:
    """K and V of every tail slot, read once and written for each branch but the first."""
    return 2 * num_tail_slots * topk * num_layers * num_kv_heads * head_dim * element_size
