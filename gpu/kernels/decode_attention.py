"""Attention of single queries over paged keys and values, split over the KV length (flash-decoding, Dao et al., 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from .padded import PaddedKeys, attend_packed, bias_of, gather, prefix_slots


def decode_keys(
    table: Tensor,
    rows: Tensor,
    bases: Tensor,
    tails: Tensor,
    lens: Tensor,
    max_len: int,
    dtype: torch.dtype,
) -> PaddedKeys:
    """Slots and bias of what a `KVView` shows; bases and lens being the same tensor says that there are no tails."""
    position = torch.arange(max_len, device=lens.device)
    visible = position < lens.unsqueeze(1)
    if bases is lens:
        slots = prefix_slots(table, rows, visible)
    else:
        past_base = position >= bases.unsqueeze(1)
        columns = (position + past_base * (tails - bases).unsqueeze(1)).mul_(visible)
        columns += (rows * table.shape[1]).unsqueeze(1)
        slots = table.view(-1).index_select(0, columns.view(-1)).mul_(visible.view(-1))
    return PaddedKeys(slots, bias_of(visible, dtype)[:, None, None])


def decode_attention_torch(q: Tensor, k_pool: Tensor, v_pool: Tensor, keys: PaddedKeys, scale: float) -> Tensor:
    """Each query [m, Hq, d] over its keys → [m, Hq, d]; a query without keys gives 0."""
    m = q.shape[0]
    if not m or not keys.slots.numel():
        return torch.zeros_like(q)
    return attend_packed(q, gather(k_pool, keys.slots, m), gather(v_pool, keys.slots, m), keys.bias, scale)


def decode_attention_bytes(lens: list[int], num_heads: int, num_kv_heads: int, d: int, itemsize: int) -> int:
    """Bytes that must move: each query's keys and values once (4 bytes of table per key), q in, the result out."""
    return sum(lens) * (2 * num_kv_heads * d * itemsize + 4) + len(lens) * 2 * num_heads * d * itemsize
