"""KV moves: the accepted path to the front of its window, and a beam's KV behind its new parents (`core.kv.moves`).

Sources and targets overlap (path 0 → 2 → 3 reads slot 2 and writes it), so every source is read before the first write.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...types.ops import KVTensors
from ..constants import numbers, words
from ..jit import cdiv, jit, next_power_of_2, tl
from ..layers.e4m3 import as_bytes


def move_accepted_torch_(kv: KVTensors, node_slots: Tensor, accept_index: Tensor, accept_lens: Tensor) -> None:
    columns = min(accept_index.shape[1], node_slots.shape[1])
    targets = node_slots[:, :columns]
    live = numbers(columns, node_slots.device) < accept_lens.unsqueeze(1)
    # A lane past the end copies its slot, which no other lane writes, onto itself.
    sources = node_slots.take(accept_index[:, :columns].clamp(min=0).long()) if node_slots.numel() else targets
    sources = torch.where(live, sources, targets)
    move_slots_torch_(kv, sources.view(-1), targets.reshape(-1))


def move_slots_torch_(kv: KVTensors, sources: Tensor, targets: Tensor) -> None:
    for pools in as_bytes(*kv):
        pools.index_copy_(1, targets, pools.index_select(1, sources))


BLOCK = 128
"""Words of one slot and layer that one program moves."""


@jit
def _move_accepted_kernel(
    k_pools,
    v_pools,
    node_slots,
    accept_index,
    accept_lens,
    num_slots,
    row_words,
    nodes,
    width,
    columns,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Move all lanes of one row, a layer and a piece of the channels:
    rows share no slot but the sink, so no other row writes them."""
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, LANES)
    live = (lane < columns) & (lane < tl.load(accept_lens + row))
    node = tl.load(accept_index + row * width + lane, mask=live, other=0)
    source = tl.load(node_slots + node, mask=live, other=0)
    target = tl.load(node_slots + row * nodes + lane, mask=live, other=0)
    # What stands where it belongs is not moved: a chain costs nothing.
    moves = (live & (source != target))[:, None] & (word < row_words)[None, :]
    first = layer * num_slots
    read = ((first + source) * row_words)[:, None] + word[None, :]
    k = tl.load(k_pools + read, mask=moves)
    v = tl.load(v_pools + read, mask=moves)
    tl.debug_barrier()  # a slot that one thread writes may be another one's source
    write = ((first + target) * row_words)[:, None] + word[None, :]
    tl.store(k_pools + write, k, mask=moves)
    tl.store(v_pools + write, v, mask=moves)


@jit
def _copy_slots_kernel(
    k_from,
    v_from,
    k_to,
    v_to,
    sources,
    targets,
    slots_from,
    slots_to,
    row_words,
    GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy entry by entry from the pools to a buffer (GATHER), or from it to the pools;
    entry i of the buffer belongs to the i-th move."""
    entry, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    source, target = tl.load(sources + entry), tl.load(targets + entry)
    moves = word < tl.where(source == target, 0, row_words)
    if GATHER:
        target = entry
    else:
        source = entry
    read = (layer * slots_from + source) * row_words + word
    write = (layer * slots_to + target) * row_words + word
    tl.store(k_to + write, tl.load(k_from + read, mask=moves), mask=moves)
    tl.store(v_to + write, tl.load(v_from + read, mask=moves), mask=moves)


def move_accepted_triton_(kv: KVTensors, node_slots: Tensor, accept_index: Tensor, accept_lens: Tensor) -> None:
    batch_size, nodes = node_slots.shape
    if not batch_size:
        return
    layers, num_slots = kv.keys.shape[:2]
    k, v = words(*(pools.view(layers * num_slots, -1) for pools in kv.with_values()))
    row_words, width = k.shape[1], accept_index.shape[1]
    columns = min(nodes, width)
    _move_accepted_kernel[(batch_size, layers, cdiv(row_words, BLOCK))](
        k,
        v,
        node_slots,
        accept_index,
        accept_lens,
        num_slots,
        row_words,
        nodes,
        width,
        columns,
        LANES=next_power_of_2(columns),
        BLOCK=BLOCK,
    )


def move_slots_triton_(kv: KVTensors, sources: Tensor, targets: Tensor) -> None:
    """Move in two launches with a buffer of the moved slots between them:
    moves of different programs may share slots."""
    n = len(sources)
    if not n:
        return
    layers, num_slots = kv.keys.shape[:2]
    k, v = words(*(pools.view(layers * num_slots, -1) for pools in kv.with_values()))
    row_words = k.shape[1]
    k_moved, v_moved = k.new_empty(layers * n, row_words), v.new_empty(layers * n, row_words)
    grid = (n, layers, cdiv(row_words, BLOCK))
    shared = (sources, targets)
    _copy_slots_kernel[grid](k, v, k_moved, v_moved, *shared, num_slots, n, row_words, GATHER=True, BLOCK=BLOCK)
    _copy_slots_kernel[grid](k_moved, v_moved, k, v, *shared, n, num_slots, row_words, GATHER=False, BLOCK=BLOCK)
