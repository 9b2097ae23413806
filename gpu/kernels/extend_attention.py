"""Attention of a prefill: each row's new tokens over its paged prefix, and over the new tokens up to themselves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .padded import bias_of, gather, prefix_slots


@dataclass(frozen=True, slots=True)
class ExtendKeys:
    """A ragged batch of new tokens, padded: which prefix slots, which tokens, and who sees what.

    `slots` int32 [bs · max_prefix_len]; `bias` [bs, 1, m, max_prefix_len + m], None if causality among the new tokens is all there is;
    `tokens` int64 [bs, m], the token in each place (0 past the row's end), None for a single row; `places` int64 [n], each token's place.
    """

    slots: Tensor
    bias: Tensor | None
    tokens: Tensor | None
    places: Tensor | None


def extend_keys(
    table: Tensor,
    rows: Tensor,
    prefix_lens: Tensor,
    starts: Tensor,
    max_prefix_len: int,
    max_new_len: int,
    num_tokens: int,
    dtype: torch.dtype,
) -> ExtendKeys:
    """How the rows of `extend_attention_torch` are padded; m = max_new_len, for a single row num_tokens."""
    bs, device = rows.shape[0], rows.device
    in_prefix = torch.arange(max_prefix_len, device=device) < prefix_lens.unsqueeze(1)
    slots = prefix_slots(table, rows, in_prefix)
    m = num_tokens if bs == 1 else max_new_len
    bias = None
    if max_prefix_len:
        causal = torch.ones(m, m, dtype=torch.bool, device=device).tril_()
        visible = torch.cat((in_prefix.unsqueeze(1).expand(-1, m, -1), causal.expand(bs, -1, -1)), 2)
        bias = bias_of(visible, dtype).unsqueeze(1)
    if bs == 1:
        return ExtendKeys(slots, bias, None, None)
    # Places past a row's end hold its last token or the next row's; causality keeps them out of the row's own sums.
    tokens = (starts[:-1].unsqueeze(1) + torch.arange(m, device=device)).clamp_(max=num_tokens - 1)
    token = torch.arange(num_tokens, device=device)
    row = torch.searchsorted(starts[1:].contiguous(), token, right=True).clamp_(max=bs - 1)
    return ExtendKeys(slots, bias, tokens, row * m + (token - starts[row]).clamp_(max=m - 1))


def extend_attention_torch(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, bs: int, keys: ExtendKeys, scale: float
) -> Tensor:
    """q [n, Hq, d] over the rows' prefixes in the pool and their new tokens k, v [n, Hk, d] → [n, Hq, d].

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
    out = F.scaled_dot_product_attention(
        queries.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=keys.bias,
        is_causal=keys.bias is None,
        scale=scale,
        enable_gqa=True,
    ).transpose(1, 2)
    if keys.places is None:
        return out.squeeze(0)
    return out.reshape(-1, *q.shape[1:]).index_select(0, keys.places)


def extend_attention_bytes(
    prefix_lens: list[int], new_lens: list[int], num_heads: int, num_kv_heads: int, d: int, itemsize: int
) -> int:
    """Bytes that must move: each row's prefix once (4 bytes of table per key), the new k and v, q in, the result out."""
    new = sum(new_lens) * d * itemsize * (2 * num_heads + 2 * num_kv_heads)
    return sum(prefix_lens) * (2 * num_kv_heads * d * itemsize + 4) + new
