"""The prefix's tail page for each draft branch that fills pages of its own (`core.kv.moves.draft_branch_layout`).

page size 4, seq_len 6, 2 branches of 3 steps
position   4 5 6 7 8 9 10 11 │ 12 13 14 15 16 …
           T T 0 0 0         │ T' T' 1  1  1          T' is what is written here
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...types.ops import KVTensors
from ..constants import numbers, words
from ..jit import cdiv, jit, next_power_of_2, tl
from ..layers.e4m3 import as_bytes


def duplicate_tails_torch_(
    kv: KVTensors, table: Tensor, rows: Tensor, seq_lens: Tensor, page_size: int, topk: int, steps: int
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
    for pools in as_bytes(*kv):
        layers, _, heads, channels = pools.shape
        tail = pools.index_select(1, sources.view(-1)).view(layers, len(rows), 1, page_size - 1, heads, channels)
        copies = tail.expand(-1, -1, topk - 1, -1, -1, -1).reshape(layers, targets.numel(), heads, channels)
        pools.index_copy_(1, targets, copies)


BLOCK = 64
"""Words of one slot and layer that one program copies."""


@jit
def _duplicate_kernel(
    k_pools,
    v_pools,
    table,
    rows,
    seq_lens,
    num_slots,
    row_words,
    table_width,
    page_size,
    steps,
    TOPK: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the tail of one row, read once, into every further branch; the pages that are read are not written here."""
    entry, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    length, row = tl.load(seq_lens + entry), tl.load(rows + entry)
    tail = length % page_size
    pages = (tail + steps + page_size - 1) // page_size
    offset = tl.arange(0, TAIL)
    in_tail = offset < tail
    columns = table + row * table_width + (length - tail) + offset
    copied = in_tail[:, None] & (word < row_words)[None, :]
    first = layer * num_slots
    source = tl.load(columns, mask=in_tail, other=0).to(tl.int64)
    read = ((first + source) * row_words)[:, None] + word[None, :]
    k = tl.load(k_pools + read, mask=copied)
    v = tl.load(v_pools + read, mask=copied)
    for branch in range(1, TOPK):
        target = tl.load(columns + branch * pages * page_size, mask=in_tail, other=0).to(tl.int64)
        write = ((first + target) * row_words)[:, None] + word[None, :]
        tl.store(k_pools + write, k, mask=copied)
        tl.store(v_pools + write, v, mask=copied)


def duplicate_tails_triton_(
    kv: KVTensors, table: Tensor, rows: Tensor, seq_lens: Tensor, page_size: int, topk: int, steps: int
) -> None:
    if page_size == 1 or topk == 1 or steps == 0 or not rows.numel():
        return
    layers, num_slots = kv.keys.shape[:2]
    k, v = words(*(pools.view(layers * num_slots, -1) for pools in kv.with_values()))
    row_words = k.shape[1]
    _duplicate_kernel[(len(rows), layers, cdiv(row_words, BLOCK))](
        k,
        v,
        table,
        rows,
        seq_lens,
        num_slots,
        row_words,
        table.shape[1],
        page_size,
        steps,
        TOPK=topk,
        TAIL=next_power_of_2(page_size - 1),
        BLOCK=BLOCK,
    )
