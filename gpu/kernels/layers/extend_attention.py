"""Attention of a prefill: each row's new tokens over its paged prefix, and over the new tokens up to themselves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...types.attention import PLAIN, Softmax
from ...types.ops import ExtendBatch, KVTensors
from ..jit import cdiv, jit, tl
from ..padded import bias_of, counting, gather, prefix_slots, window_slots
from .e4m3 import as_bytes
from .flash import (
    LOG2_E,
    Channels,
    attend_keys,
    begin_softmax,
    computing_tiles,
    device_of,
    load_queries,
    softmax_constants,
)
from .parts import store_tile


@dataclass(frozen=True, slots=True)
class ExtendKeys:
    """A ragged batch of new tokens, padded: which prefix slots, which tokens, and who sees what."""

    slots: Tensor  # int32 [bs · max_prefix_len]
    bias: Tensor | None  # [bs, 1, m, max_prefix_len + m]; None: nothing but causality among the new tokens
    tokens: Tensor | None  # int64 [bs, m], the token in each place, any past the row's end; None for a single row
    places: Tensor | None  # int64 [n], each token's place


def extend_keys(
    table: Tensor,
    rows: Tensor,
    prefix_lens: Tensor,
    starts: Tensor,
    max_prefix_len: int,
    max_new_len: int,
    num_tokens: int,
    window: int,
    dtype: torch.dtype,
) -> ExtendKeys:
    """Return how the rows of `extend_attention_torch` are padded: to m = max_new_len; a single row, which starts at
    token 0, not at all.

    With a `window` the prefixes are their ends, of which the first new token sees all.
    """
    bs, device = rows.shape[0], rows.device
    m = num_tokens if bs == 1 else max_new_len
    position = counting(min(max_prefix_len, window - 1) if window else max_prefix_len, device)
    if window:
        position = position + (prefix_lens - (window - 1)).clamp_(min=0).unsqueeze(1)
    in_prefix = position < prefix_lens.unsqueeze(1)
    slots = window_slots(table, rows, position, in_prefix) if window else prefix_slots(table, rows, in_prefix)
    bias = None
    if max_prefix_len or window:
        causal = torch.ones(m, m, dtype=torch.bool, device=device).tril_()
        sees_prefix = in_prefix.unsqueeze(1).expand(-1, m, -1)
        if window:
            causal = causal.triu_(1 - window)
            # the last position that a token does not see
            oldest = prefix_lens.unsqueeze(1) + counting(m, device) - window
            sees_prefix = sees_prefix & (position.unsqueeze(1) > oldest.unsqueeze(2))
        bias = bias_of(torch.cat((sees_prefix, causal.expand(bs, -1, -1)), 2), dtype).unsqueeze(1)
    if bs == 1:
        return ExtendKeys(slots, bias, None, None)
    # Places past a row's end hold its last token again; causality keeps them out of the row's own sums. Another row's
    # token would not do: its weight is 0, but 0 · NaN is NaN, and a row without numbers must not take others with it.
    tokens = torch.minimum(starts[:-1].unsqueeze(1) + counting(m, device), (starts[1:] - 1).unsqueeze(1)).clamp_(min=0)
    token = counting(num_tokens, device)
    row = torch.searchsorted(starts[1:].contiguous(), token, right=True).clamp_(max=bs - 1)
    return ExtendKeys(slots, bias, tokens, row * m + (token - starts[row]).clamp_(max=m - 1))


def extend_attention_torch(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, bs: int, keys: ExtendKeys, softmax: Softmax = PLAIN
) -> Tensor:
    """Attend with q [n, Hq, d] over the rows' prefixes in the pool and their new tokens k, v [n, Hk, d] → [n, Hq, d].

    Tokens past the last row's end (padding) give finite values that mean nothing.
    """
    if not q.shape[0] or not bs:
        return torch.zeros_like(q)
    if keys.tokens is None:
        queries, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    else:
        queries, k, v = q[keys.tokens], k[keys.tokens], v[keys.tokens]
    if keys.slots.numel():
        k = torch.cat((gather(k_pool, keys.slots, bs), k), 1)
        v = torch.cat((gather(v_pool, keys.slots, bs), v), 1)
    k, v = k.to(q.dtype), v.to(q.dtype)
    if softmax.is_plain:
        out = F.scaled_dot_product_attention(
            queries.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=keys.bias,
            is_causal=keys.bias is None,
            scale=softmax.scale_of(q),
            enable_gqa=True,
        ).transpose(1, 2)
    else:
        out = _written_out(queries, k, v, keys.bias, softmax)
    out = softmax.result(out)
    if keys.places is None:
        return out.squeeze(0)
    return out.reshape(-1, *q.shape[1:]).index_select(0, keys.places)


def _written_out(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, softmax: Softmax) -> Tensor:
    """Compute causal attention of q [bs, m, Hq, d] over k, v [bs, keys, Hk, d] with a softmax that torch's own
    does not compute."""
    bs, m, heads, d = q.shape
    group = heads // k.shape[2]
    if bias is None:
        bias = bias_of(torch.ones(m, m, dtype=torch.bool, device=q.device).tril_(), q.dtype)
    else:
        bias = bias.unsqueeze(2)
    queries = q.view(bs, m, -1, group, d).permute(0, 2, 3, 1, 4)
    products = queries @ k.permute(0, 2, 3, 1).unsqueeze(2) * softmax.scale_of(q)
    sinks = None if softmax.sinks is None else softmax.sinks.view(-1, group, 1, 1)
    out = softmax.weights(products, bias, sinks) @ v.transpose(1, 2).unsqueeze(2)
    return out.permute(0, 3, 1, 2, 4).reshape(q.shape)


@jit
def extend_attention_kernel(
    q,
    k,
    v,
    k_pool,
    v_pool,
    table,
    rows,
    prefix_lens,
    starts,
    sinks,
    out,
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
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
    HALVES: tl.constexpr,
    SKIPPED: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CONVERTS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Attend with one program per (block of a row's new tokens, key head and half of the channels, row); the tile's
    rows are tokens times the group's query heads.

    Blocks past a row's end have nothing to do: the grid is the host's bound.
    """
    # Late blocks see the most keys; they begin first, so that the short ones fill the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, half, row = tl.program_id(1) // HALVES, tl.program_id(1) % HALVES, tl.program_id(2)
    origin = tl.load(starts + row)
    new_len = (tl.load(starts + row + 1) - origin).to(tl.int32)
    if block * BLOCK_M < new_len * GROUP:
        packed, lane = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
        packed += block * BLOCK_M
        token = packed // GROUP
        head = kv_head * GROUP + packed % GROUP
        live = token < new_len
        rows_of_q = q + (origin + token) * q_token_stride + head * q_head_stride
        tile, rest = load_queries(rows_of_q, live, HEAD_DIM, BLOCK_D, REST)

        acc, peak, total = begin_softmax(sinks, head, live, 0, BLOCK_M, BLOCK_V, SINKS)
        columns = table + tl.load(rows + row) * table_stride
        end = tl.load(prefix_lens + row).to(tl.int32)
        # What the tile's first token sees, counted from the first new token; the prefix counts down from −1.
        oldest = block * BLOCK_M // GROUP - (WINDOW - 1)
        begin = tl.maximum(end + oldest, 0) if WINDOW else 0
        for start in range(begin, end, BLOCK_N):
            loaded = start + lane < end
            visible = loaded[None, :] & live[:, None]
            if WINDOW:
                visible = visible & ((start + lane - end)[None, :] > (token - WINDOW)[:, None])
            slot = tl.load(columns + start + lane, mask=loaded, other=0).to(tl.int64)
            keys = k_pool + kv_head * pool_head_stride + slot * pool_slot_stride
            values = v_pool + kv_head * pool_head_stride + slot * pool_slot_stride
            acc, peak, total = attend_keys(
                tile, rest, keys, values, half, loaded, visible, acc, peak, total, scale_log2, HEAD_DIM,
                BLOCK_D, REST, HALVES, SKIPPED, BLOCK_V, CONVERTS, SOFTCAP,
            )  # fmt: skip
        last = tl.minimum((block * BLOCK_M + BLOCK_M - 1) // GROUP, new_len - 1)
        begin = tl.maximum(oldest, 0) if WINDOW else 0
        for start in range(begin, last + 1, BLOCK_N):
            new = start + lane
            loaded = new <= last
            visible = new[None, :] <= token[:, None]
            if WINDOW:
                visible = visible & (new[None, :] > (token - WINDOW)[:, None])
            keys = k + kv_head * k_head_stride + (origin + new) * k_token_stride
            values = v + kv_head * v_head_stride + (origin + new) * v_token_stride
            acc, peak, total = attend_keys(
                tile, rest, keys, values, half, loaded, visible, acc, peak, total, scale_log2, HEAD_DIM,
                BLOCK_D, REST, HALVES, SKIPPED, BLOCK_V, CONVERTS, SOFTCAP,
            )  # fmt: skip
        index = (origin + token) * (tl.num_programs(1) // HALVES * GROUP) + head
        store_tile(
            out,
            out,
            out,
            out,
            acc,
            peak,
            total,
            value_factor,
            index,
            live,
            half,
            0,
            1,
            1,
            HEAD_DIM,
            HALVES,
            SKIPPED,
            BLOCK_M,
            BLOCK_V,
            False,
            False,
        )


def extend_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: KVTensors,
    batch: ExtendBatch,
    softmax: Softmax = PLAIN,
) -> Tensor:
    """Compute `extend_attention_torch` as one launch; tokens past the last row's end give 0.
    Last axes contiguous, pools laid out alike."""
    k, v, k_pool, v_pool = as_bytes(*KVTensors(k, v).with_values(), *kv.with_values())
    n, heads, d = q.shape
    bs, kv_heads, max_new_len = batch.rows.shape[0], k.shape[1], batch.max_new_len
    group = heads // kv_heads
    # The kernel writes no token that belongs to no row.
    out = torch.zeros((n, heads, d), dtype=q.dtype, device=q.device)
    if not n or not bs or not max_new_len:
        return out
    assert k_pool.stride() == v_pool.stride(), "the pools of keys and values are laid out alike"
    channels, has_bytes = Channels.of(d, softmax.key_only), k_pool.dtype is torch.uint8
    size = computing_tiles(max_new_len * group, channels, q.dtype, device_of(q.device), has_bytes)
    extend_attention_kernel[(cdiv(max_new_len * group, size.block_m), kv_heads * channels.halves, bs)](
        q,
        k,
        v,
        k_pool,
        v_pool,
        batch.table,
        batch.rows,
        batch.prefix_lens,
        batch.starts,
        q if softmax.sinks is None else softmax.sinks,
        out,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *k_pool.stride()[:2],
        batch.table.stride(0),
        softmax.scale_of(q) * LOG2_E,
        softmax.value_factor,
        GROUP=group,
        **size.constants(),
        **softmax_constants(softmax),
        **size.options(),
    )
    return out
