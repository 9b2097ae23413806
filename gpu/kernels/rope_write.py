"""Rotary position embedding (Su et al., 2021) fused with the write of the new keys and values to their pool slots."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_write_torch(
    q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, positions: Tensor, slots: Tensor, k_pool: Tensor, v_pool: Tensor
) -> tuple[Tensor, Tensor]:
    """The rotated q [n, Hq, d] and k [n, Hk, d]; k_pool and v_pool [slots, Hk, d] are written in place.

    The rotation is computed in the wider of the table's and the inputs' dtypes and rounded once.
    """
    n, num_heads, d = q.shape
    cos, sin = cos_sin.index_select(0, positions).view(n, 1, 2, d // 2).unbind(2)
    both = torch.cat((q, k), 1).view(n, -1, 2, d // 2)
    first, second = both.unbind(2)
    rotated = both * cos.unsqueeze(1)
    out_first, out_second = rotated.unbind(2)
    out_first.addcmul_(second, sin, value=-1)
    out_second.addcmul_(first, sin)
    rotated = rotated.view(n, -1, d).to(q.dtype)
    rotated_k = rotated[:, num_heads:]
    k_pool.index_copy_(0, slots, rotated_k)
    v_pool.index_copy_(0, slots, v)
    return rotated[:, :num_heads], rotated_k


def rope_write_bytes(n: int, num_heads: int, num_kv_heads: int, d: int, itemsize: int) -> int:
    """Bytes that must move: q and k in and out, v in, k and v to the pools, the float32 table's rows."""
    return n * d * itemsize * (2 * num_heads + 5 * num_kv_heads) + n * d * 4
