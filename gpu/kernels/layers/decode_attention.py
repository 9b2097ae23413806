"""Attention of single queries over paged keys and values, long ones in parts."""

from __future__ import annotations

import torch
from torch import Tensor

from ...types.attention import PLAIN, Softmax
from ...types.ops import DecodeBatch, KVTensors
from ..jit import jit, tl
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


def decode_keys(
    table: Tensor,
    rows: Tensor,
    bases: Tensor,
    tails: Tensor,
    lens: Tensor,
    max_len: int,
    window: int,
    dtype: torch.dtype,
) -> PaddedKeys:
    """Return slots and bias of what a `DecodeBatch` shows; bases and lens being the same tensor says that there are no
    tails.

    With a `window` they are those of each query's last positions alone.
    """
    position = counting(window or max_len, lens.device)
    if window:
        position = position + (lens - window).clamp_(min=0).unsqueeze(1)
    visible = position < lens.unsqueeze(1)
    if bases is lens and not window:
        slots = prefix_slots(table, rows, visible)
    else:
        past_base = position >= bases.unsqueeze(1)
        slots = window_slots(table, rows, position + past_base * (tails - bases).unsqueeze(1), visible)
    return PaddedKeys(slots, bias_of(visible, dtype)[:, None, None], begin_of(slots, rows.shape[0]))


def decode_attention_torch(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, keys: PaddedKeys, softmax: Softmax = PLAIN
) -> Tensor:
    """Attend with each query [m, Hq, d] over its keys → [m, Hq, d]; a query without keys gives 0."""
    m = q.shape[0]
    if not m or not keys.slots.numel():
        return torch.zeros_like(q)
    return attend_packed(q, keys_of(k_pool, keys, m), keys_of(v_pool, keys, m), keys.bias, softmax)


@jit
def decode_attention_kernel(
    q,
    k_pool,
    v_pool,
    table,
    rows,
    bases,
    tails,
    lens,
    sinks,
    out,
    partial,
    lse,
    arrived,
    q_token_stride,
    q_head_stride,
    k_slot_stride,
    k_head_stride,
    v_slot_stride,
    v_head_stride,
    table_stride,
    scale_log2,
    value_factor,
    num_rows,
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
    ROWS: tl.constexpr,
    CONVERTS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    JOIN: tl.constexpr,
):
    """Attend with programs that share, per key head and half of the channels, the parts of `num_rows` queries;
    a tile's rows are the group's query heads."""
    kv_head, half = tl.program_id(1), tl.program_id(2)
    items = num_rows
    if ROWS > 1:
        ends = ends_of(lens, num_rows, least, most, BLOCK_N, WINDOW, ROWS)
        items = tl.max(ends, 0)
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), disable_licm=True):
        row, part = item, 0
        if ROWS > 1:
            row, part = row_and_part(ends, item)
        member, lane = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
        live = member < GROUP
        head = kv_head * GROUP + member
        query = tl.cast(row, tl.int64)
        rows_of_q = q + query * q_token_stride + head * q_head_stride
        tile, rest = load_queries(rows_of_q, live, HEAD_DIM, BLOCK_D, REST)

        columns = table + tl.load(rows + query) * table_stride
        base, jump = tl.load(bases + query), tl.load(tails + query)
        length = tl.load(lens + query).to(tl.int32)
        first, end = 0, length
        num_parts = 1
        if WINDOW:
            first = tl.maximum(length - WINDOW, 0)
        if ROWS > 1:
            num_parts = parts_of(end - first, least, most, BLOCK_N)
            size = part_of(end - first, least, most, BLOCK_N)
            first += part * size
            end = tl.minimum(first + size, end)
        acc, peak, total = begin_softmax(sinks, head, live, part, BLOCK_M, BLOCK_V, SINKS)
        for start in range(first, end, BLOCK_N):
            position = start + lane
            loaded = position < end
            column = tl.where(position < base, position, position - base + jump)
            slot = tl.load(columns + column, mask=loaded, other=0).to(tl.int64)
            keys = k_pool + kv_head * k_head_stride + slot * k_slot_stride
            values = v_pool + kv_head * v_head_stride + slot * v_slot_stride
            visible = loaded[None, :]
            acc, peak, total = attend_keys(
                tile, rest, keys, values, half, loaded, visible, acc, peak, total, scale_log2, HEAD_DIM,
                BLOCK_D, REST, HALVES, SKIPPED, BLOCK_V, CONVERTS, SOFTCAP,
            )  # fmt: skip
        index = query * (tl.num_programs(1) * GROUP) + head
        store_tile(
            out,
            partial,
            lse,
            arrived + (row * tl.num_programs(1) + kv_head) * HALVES + half,
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


def decode_attention_triton(
    q: Tensor,
    kv: KVTensors,
    batch: DecodeBatch,
    softmax: Softmax = PLAIN,
    cut: KeyCut | None = None,
) -> Tensor:
    """Compute `decode_attention_torch` as one launch, two where tall tiles are cut.
    The last axes must be contiguous."""
    k_pool, v_pool = as_bytes(*kv.with_values())
    m, heads, d = q.shape
    kv_heads = k_pool.shape[1]
    group = heads // kv_heads
    device = device_of(q.device)
    channels = Channels.of(d, softmax.key_only)
    size = reading_tiles(group, channels, q.dtype, device, has_bytes=k_pool.dtype is torch.uint8)
    if cut is None:
        read = min(softmax.window or batch.max_len, batch.max_len)
        tiles = kv_heads * channels.halves
        cut = KeyCut.choose(batch.planned_queries or m, m, read, tiles, size, heads * d * 4, device.processors)
    result = CutOutput.of(q, cut, size, m * kv_heads)
    if not m:
        return result.out
    decode_attention_kernel[(cut.programs, kv_heads, channels.halves)](
        q,
        k_pool,
        v_pool,
        batch.table,
        batch.rows,
        batch.bases,
        batch.tails,
        batch.lens,
        q if softmax.sinks is None else softmax.sinks,
        result.out,
        result.partial,
        result.lse,
        result.arrived,
        *q.stride()[:2],
        *k_pool.stride()[:2],
        *v_pool.stride()[:2],
        batch.table.stride(0),
        softmax.scale_of(q) * LOG2_E,
        softmax.value_factor,
        m,
        cut.least,
        cut.most,
        GROUP=group,
        ROWS=cut.listed(m),
        **size.constants(),
        **softmax_constants(softmax),
        JOIN=result.joins,
        **size.options(),
    )
    return result.join(batch.lens, 1, softmax.window, softmax.value_factor)


def decode_attention_bytes(
    lens: list[int], num_heads: int, num_kv_heads: int, d: int, itemsize: int, kv_itemsize: int
) -> int:
    """Return bytes that must move: each query's keys and values once (4 bytes of table per key), q
    in, the result out."""
    return sum(lens) * (2 * num_kv_heads * d * kv_itemsize + 4) + len(lens) * 2 * num_heads * d * itemsize
