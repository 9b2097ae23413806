"""Attention of a verify batch: the nodes of each row's tree over the row's paged prefix, and over their own ancestors."""

from __future__ import annotations

import torch
from torch import Tensor

from .padded import PaddedKeys, attend_packed, bias_of, gather, prefix_slots


def verify_keys(
    table: Tensor,
    rows: Tensor,
    prefix_lens: Tensor,
    ancestor_bits: Tensor,
    max_prefix_len: int,
    group: int,
    dtype: torch.dtype,
) -> PaddedKeys:
    """Slots of the prefixes, and the bias [bs, 1, nd · group, max_prefix_len + nd] of prefix and new tokens."""
    num_nodes = ancestor_bits.shape[1]
    in_prefix = torch.arange(max_prefix_len, device=rows.device) < prefix_lens.unsqueeze(1)
    node = torch.arange(num_nodes, device=rows.device)
    is_ancestor = (ancestor_bits.unsqueeze(2) >> node).bitwise_and_(1).bool()
    # A node without ancestors, not even itself, is padding: it sees nothing of the prefix either.
    sees_prefix = in_prefix.unsqueeze(1) & (ancestor_bits != 0).unsqueeze(2)
    visible = torch.cat((sees_prefix, is_ancestor), 2)
    if group > 1:
        visible = visible.repeat_interleave(group, 1)
    return PaddedKeys(prefix_slots(table, rows, in_prefix), bias_of(visible, dtype).unsqueeze(1))


def verify_attention_torch(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, keys: PaddedKeys, scale: float
) -> Tensor:
    """q [bs · nd, Hq, d] over the row's prefix in the pool and its new tokens k, v [bs · nd, Hk, d] → [bs · nd, Hq, d]."""
    bs = keys.bias.shape[0]
    if not bs:
        return torch.zeros_like(q)
    k, v = k.view(bs, -1, *k.shape[1:]), v.view(bs, -1, *v.shape[1:])
    if keys.slots.numel():
        k = torch.cat((gather(k_pool, keys.slots, bs), k), 1)
        v = torch.cat((gather(v_pool, keys.slots, bs), v), 1)
    return attend_packed(q, k, v, keys.bias, scale)


def verify_attention_bytes(
    prefix_lens: list[int], num_nodes: int, num_heads: int, num_kv_heads: int, d: int, itemsize: int
) -> int:
    """Bytes that must move: each row's prefix once (4 bytes of table per key), the new k and v, q in, the result out, the bits."""
    new = len(prefix_lens) * num_nodes * (d * itemsize * (2 * num_heads + 2 * num_kv_heads) + 8)
    return sum(prefix_lens) * (2 * num_kv_heads * d * itemsize + 4) + new
