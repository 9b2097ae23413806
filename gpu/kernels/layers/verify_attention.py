"""Attention of a verify batch: the nodes of each row's tree over the row's paged prefix, and over
their own ancestors."""

from __future__ import annotations

import torch
from torch import Tensor

from ...types.attention import PLAIN, Softmax
from ...types.ops import KVTensors, VerifyBatch
from ..jit import cdiv, jit, next_power_of_2, tl
from ..padded import PaddedKeys, attend_packed, begin_of, bias_of, counting, keys_of, prefix_slots, window_slots
from .e4m3 import as_bytes
from .flash import (
    LOG2_E,
    Channels,
    KeyCut,
    attend_keys,
    begin_softmax,
    device_of,
    ends_of,
    load_queries,
    part_of,
    parts_of,
    reading_tiles,
    row_and_part,
    softmax_constants,
)
from .parts import CutOutput, store_tile


def verify_keys(
    table: Tensor,
    rows: Tensor,
    prefix_lens: Tensor,
    ancestor_bits: Tensor,
    max_prefix_len: int,
    group: int,
    window: int,
    dtype: torch.dtype,
) -> PaddedKeys:
    """Return the slots of the prefixes, and the bias [bs, 1, nd · group, prefix + nd] of prefix and new tokens.

    With a `window` only the last window − 1 prefix positions are read. A node at depth d sees the last window − 1 − d;
    the root has d = 0.
    """
    num_nodes = ancestor_bits.shape[1]
    is_ancestor = (ancestor_bits.unsqueeze(2) >> counting(num_nodes, rows.device)).bitwise_and_(1).bool()
    position = counting(min(max_prefix_len, window - 1) if window else max_prefix_len, rows.device)
    if window:
        position = position + (prefix_lens - (window - 1)).clamp_(min=0).unsqueeze(1)
    in_prefix = position < prefix_lens.unsqueeze(1)
    # A node without ancestors, not even itself, is padding: it sees nothing of the prefix either.
    sees_prefix = in_prefix.unsqueeze(1) & (ancestor_bits != 0).unsqueeze(2)
    if window:
        depth = is_ancestor.sum(2) - 1
        oldest = (prefix_lens - window).unsqueeze(1) + depth  # the last position that a node does not see
        sees_prefix &= position.unsqueeze(1) > oldest.unsqueeze(2)
        is_ancestor &= depth.unsqueeze(2) - depth.unsqueeze(1) < window
    visible = torch.cat((sees_prefix, is_ancestor), 2)
    if group > 1:
        visible = visible.repeat_interleave(group, 1)
    slots = window_slots(table, rows, position, in_prefix) if window else prefix_slots(table, rows, in_prefix)
    return PaddedKeys(slots, bias_of(visible, dtype).unsqueeze(1), begin_of(slots, rows.shape[0]))


def verify_attention_torch(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, keys: PaddedKeys, softmax: Softmax = PLAIN
) -> Tensor:
    """Attend with q [bs · nd, Hq, d] over the row's prefix in the pool and its new tokens k, v [bs · nd, Hk, d] →
    [bs · nd, Hq, d]."""
    bs = keys.bias.shape[0]
    if not bs:
        return torch.zeros_like(q)
    k, v = k.view(bs, -1, *k.shape[1:]), v.view(bs, -1, *v.shape[1:])
    if keys.slots.numel():
        k = torch.cat((keys_of(k_pool, keys, bs), k), 1)
        v = torch.cat((keys_of(v_pool, keys, bs), v), 1)
    return attend_packed(q, k, v, keys.bias, softmax)


@jit
def count_bits(words):
    """Count the set bits of each of `words`, int64 → int32:
    pairs, fours and bytes are summed in place, the bytes by shifting."""
    pairs = words - ((words >> 1) & 0x5555555555555555)
    fours = (pairs & 0x3333333333333333) + ((pairs >> 2) & 0x3333333333333333)
    found = (fours + (fours >> 4)) & 0x0F0F0F0F0F0F0F0F
    found += found >> 8
    found += found >> 16
    found += found >> 32
    return (found & 0x7F).to(tl.int32)


@jit
def verify_attention_kernel(
    q,
    k,
    v,
    k_pool,
    v_pool,
    table,
    rows,
    prefix_lens,
    ancestor_bits,
    places,
    sinks,
    out,
    partial,
    lse,
    arrived,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    pool_slot_stride,
    pool_head_stride,
    table_stride,
    scale_log2,
    value_factor,
    num_rows,
    num_nodes,
    least,
    most,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
    HALVES: tl.constexpr,
    SKIPPED: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NEW_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CONVERTS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    JOIN: tl.constexpr,
):
    """Attend for each row: axes 1 and 2 choose a key head, and a block of nodes and half of the channels; along axis 0
    programs share the parts of all rows. A tile has a row per node and query head of the group.

    The first part also sees the new tokens. A node sees node j of its row if bit j of its mask is set; without a set
    bit it sees nothing. `places` None: node j of row r is token r · num_nodes + j of the pass (`Packing.places`).
    """
    kv_head = tl.program_id(1)
    half, lane = tl.program_id(2) % HALVES, tl.arange(0, BLOCK_N)
    packed = tl.program_id(2) // HALVES * BLOCK_M + tl.arange(0, BLOCK_M)
    node = packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    inside = node < num_nodes
    live = inside
    items = num_rows
    if ROWS > 1:
        ends = ends_of(prefix_lens, num_rows, least, most, BLOCK_N, WINDOW, ROWS)
        items = tl.max(ends, 0)
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), disable_licm=True):
        row, part = item, 0
        if ROWS > 1:
            row, part = row_and_part(ends, item)
        root = tl.cast(row, tl.int64) * num_nodes
        bits = tl.load(ancestor_bits + root + node, mask=inside, other=0)
        token = root + node
        if places is not None:
            token = tl.load(places + token, mask=inside, other=-1)
            live = token >= 0
        rows_of_q = q + token * q_token_stride + head * q_head_stride
        tile, rest = load_queries(rows_of_q, live, HEAD_DIM, BLOCK_D, REST)

        acc, peak, total = begin_softmax(sinks, head, live, part, BLOCK_M, BLOCK_V, SINKS)
        columns = table + tl.load(rows + row) * table_stride
        length = tl.load(prefix_lens + row).to(tl.int32)
        first, end = 0, length
        num_parts = 1
        if WINDOW:
            # A node stands as many positions behind the prefix as it has ancestors.
            depth = count_bits(bits) - 1
            first = tl.maximum(length - (WINDOW - 1), 0)
        if ROWS > 1:
            keys_in_all = tl.minimum(length, WINDOW) if WINDOW else length
            num_parts = parts_of(keys_in_all, least, most, BLOCK_N)
            size = part_of(keys_in_all, least, most, BLOCK_N)
            first += part * size
            end = tl.minimum(first + size, end)
        for start in range(first, end, BLOCK_N):
            loaded = start + lane < end
            slot = tl.load(columns + start + lane, mask=loaded, other=0).to(tl.int64)
            visible = loaded[None, :] & (bits != 0)[:, None]
            if WINDOW:
                visible = visible & ((start + lane)[None, :] > (length + depth - WINDOW)[:, None])
            keys = k_pool + kv_head * pool_head_stride + slot * pool_slot_stride
            values = v_pool + kv_head * pool_head_stride + slot * pool_slot_stride
            acc, peak, total = attend_keys(
                tile, rest, keys, values, half, loaded, visible, acc, peak, total, scale_log2, HEAD_DIM,
                BLOCK_D, REST, HALVES, SKIPPED, BLOCK_V, CONVERTS, SOFTCAP,
            )  # fmt: skip
        if part == 0:
            new = tl.arange(0, NEW_BLOCK)
            # Half a mask at a time: a tile of 64-bit words would not fit the registers.
            low, high = bits.to(tl.int32), (bits >> 32).to(tl.int32)
            word = tl.where(new[None, :] < 32, low[:, None], high[:, None])
            is_ancestor = ((word >> (new[None, :] & 31)) & 1) != 0
            loaded = new < num_nodes
            new_token = root + new
            if places is not None:
                new_token = tl.load(places + new_token, mask=loaded, other=-1)
            if WINDOW:
                new_depth = count_bits(tl.load(ancestor_bits + root + new, mask=loaded, other=0)) - 1
                is_ancestor = is_ancestor & (depth[:, None] - new_depth[None, :] < WINDOW)
            if places is not None:
                loaded = new_token >= 0
            keys = k + kv_head * k_head_stride + new_token * k_token_stride
            values = v + kv_head * v_head_stride + new_token * v_token_stride
            acc, peak, total = attend_keys(
                tile, rest, keys, values, half, loaded, is_ancestor, acc, peak, total, scale_log2, HEAD_DIM,
                BLOCK_D, REST, HALVES, SKIPPED, BLOCK_V, CONVERTS, SOFTCAP,
            )  # fmt: skip
        index = token * (tl.num_programs(1) * GROUP) + head
        tile_number = (row * tl.num_programs(2) + tl.program_id(2)) * tl.num_programs(1) + kv_head
        store_tile(
            out,
            partial,
            lse,
            arrived + tile_number,
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
            HEAD_DIM,
            HALVES,
            SKIPPED,
            BLOCK_M,
            BLOCK_V,
            ROWS > 1,
            JOIN,
        )


def verify_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: KVTensors,
    batch: VerifyBatch,
    softmax: Softmax = PLAIN,
    cut: KeyCut | None = None,
) -> Tensor:
    """Compute `verify_attention_torch` as one launch, two where tall tiles are cut.
    Last axes contiguous, pools laid out alike."""
    k, v, k_pool, v_pool = as_bytes(*KVTensors(k, v).with_values(), *kv.with_values())
    _, heads, d = q.shape
    bs, num_nodes = batch.ancestor_bits.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    device = device_of(q.device)
    planned_nodes = batch.planned_nodes or num_nodes
    assert planned_nodes >= num_nodes, f"kernel blocks for {planned_nodes} nodes, but the batch has {num_nodes}"
    has_bytes = k_pool.dtype is torch.uint8
    channels = Channels.of(d, softmax.key_only)
    size = reading_tiles(planned_nodes * group, channels, q.dtype, device, group, has_bytes)
    if cut is None:
        read = min(softmax.window or batch.max_prefix_len, batch.max_prefix_len)
        tiles = kv_heads * cdiv(planned_nodes * group, size.block_m) * channels.halves
        row_bytes = planned_nodes * heads * d * 4
        cut = KeyCut.choose(batch.planned_rows or bs, bs, read, tiles, size, row_bytes, device.processors)
    blocks = cdiv(num_nodes * group, size.block_m)
    result = CutOutput.of(q, cut, size, bs * kv_heads * blocks)
    if not bs:
        return result.out
    assert k_pool.stride() == v_pool.stride(), "the pools of keys and values are laid out alike"
    verify_attention_kernel[(cut.programs, kv_heads, blocks * channels.halves)](
        q,
        k,
        v,
        k_pool,
        v_pool,
        batch.table,
        batch.rows,
        batch.prefix_lens,
        batch.ancestor_bits.contiguous(),
        None if batch.packing is None else batch.packing.places,
        q if softmax.sinks is None else softmax.sinks,
        result.out,
        result.partial,
        result.lse,
        result.arrived,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *k_pool.stride()[:2],
        batch.table.stride(0),
        softmax.scale_of(q) * LOG2_E,
        softmax.value_factor,
        bs,
        num_nodes,
        cut.least,
        cut.most,
        GROUP=group,
        ROWS=cut.listed(bs),
        **size.constants(),
        **softmax_constants(softmax),
        NEW_BLOCK=max(16, next_power_of_2(planned_nodes)),
        JOIN=result.joins,
        **size.options(),
    )
    nodes = None if batch.packing is None else batch.packing.nodes
    return result.join(batch.prefix_lens, num_nodes, softmax.window, softmax.value_factor, nodes)


def verify_attention_bytes(
    prefix_lens: list[int],
    num_nodes: int,
    num_heads: int,
    num_kv_heads: int,
    d: int,
    itemsize: int,
    kv_itemsize: int,
) -> int:
    """Return bytes that must move: each row's prefix once (4 bytes of table per key), the new k and v, q in, the
    result out, the bits."""
    of_new = d * (itemsize * 2 * num_heads + kv_itemsize * 2 * num_kv_heads) + 8
    new = len(prefix_lens) * num_nodes * of_new
    return sum(prefix_lens) * (2 * num_kv_heads * d * kv_itemsize + 4) + new
