"""Rotary position embedding (Su et al., 2021) fused with the write of the new keys and values to their pool slots."""

from __future__ import annotations

import torch
from torch import Tensor

from ...types.attention import E4M3, UNSCALED, KVScales
from ...types.ops import KVTensors
from ..jit import cdiv, jit, next_power_of_2, tl
from .e4m3 import as_bytes, to_e4m3, to_e4m3_bytes

HEADS_PER_PROGRAM = 4


def rotation_of(cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return factors [n, 1, d] of the two halves as they are, (cos, cos), and exchanged, (−sin, sin)."""
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, -1)
    return torch.cat((cos, cos), 2), torch.cat((-sin, sin), 2)


def rope_write_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotation: tuple[Tensor, Tensor],
    slots: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    scales: KVScales = UNSCALED,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rotated q [n, Hq, d], and k and v [n, Hk, d] in the numbers of the pools; k_pool and v_pool [slots,
    Hk, d] are written in place.

    The rotation is computed in the wider of the table's and the inputs' dtypes and rounded to the inputs' dtype. Pools
    of 8-bit numbers keep that divided by `scales`.
    """
    joined = _joined(q, k)
    if joined is None:
        rotated_q, rotated_k = _rotated(q, rotation), _rotated(k, rotation)
    else:
        rotated_q, rotated_k = _rotated(joined, rotation).split_with_sizes((q.shape[1], k.shape[1]), 1)
    if k_pool.dtype is E4M3:
        rotated_k, v = to_e4m3(rotated_k, scales.key), to_e4m3(v, scales.value)
    for pool, kept in zip(as_bytes(k_pool, v_pool), as_bytes(rotated_k, v), strict=True):
        pool.index_copy_(0, slots, kept)
    return rotated_q, rotated_k, v


def _rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    straight, crossed = rotation
    return (x * straight).addcmul_(x.roll(x.shape[-1] // 2, -1), crossed).to(x.dtype)


def _joined(q: Tensor, k: Tensor) -> Tensor | None:
    """Return [n, Hq + Hk, d] without a copy, where q and k lie side by side in what one projection gave;
    rotated at once they cost half."""
    strides, heads = q.stride(), q.shape[1]
    same_tensor = q._base is not None and q._base is k._base
    if not same_tensor or strides != k.stride() or k.storage_offset() != q.storage_offset() + heads * strides[1]:
        return None
    return q.as_strided((q.shape[0], heads + k.shape[1], q.shape[2]), strides)


@jit
def rope_write_kernel(
    q,
    k,
    v,
    cos_sin,
    positions,
    slots,
    q_out,
    k_out,
    v_out,
    k_pool,
    v_pool,
    key_factor,
    value_factor,
    heads,
    kv_heads,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    table_stride,
    k_slot_stride,
    k_pool_head_stride,
    v_slot_stride,
    v_pool_head_stride,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HEADS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Rotate with one program per token and block of heads: query heads first, then key heads, each with its value head
    to copy (VALUES: there are some). To pools of bytes go E4M3 numbers, times a factor, and the same to k_out and
    v_out; otherwise v_out is left alone."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, BLOCK_HALF)
    inside = (channel < HALF)[None, :]
    position, slot = tl.load(positions + token), tl.load(slots + token).to(tl.int64)
    angles = cos_sin + position * table_stride + channel
    cos = tl.load(angles, mask=channel < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angles + HALF, mask=channel < HALF, other=0.0).to(tl.float32)[None, :]

    is_q = (head < heads)[:, None] & inside
    source = q + token * q_token_stride + head[:, None] * q_head_stride + channel[None, :]
    first = tl.load(source, mask=is_q, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=is_q, other=0.0).to(tl.float32)
    target = q_out + (token * heads + head)[:, None] * (2 * HALF) + channel[None, :]
    tl.store(target, (first * cos - second * sin).to(q_out.dtype.element_ty), mask=is_q)
    tl.store(target + HALF, (second * cos + first * sin).to(q_out.dtype.element_ty), mask=is_q)

    kv_head = (head - heads)[:, None]
    is_kv = (kv_head >= 0) & (kv_head < kv_heads) & inside
    source = k + token * k_token_stride + kv_head * k_head_stride + channel[None, :]
    first = tl.load(source, mask=is_kv, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=is_kv, other=0.0).to(tl.float32)
    turned_first = (first * cos - second * sin).to(k.dtype.element_ty)
    turned_second = (second * cos + first * sin).to(k.dtype.element_ty)
    if k_pool.dtype.element_ty == tl.uint8:
        turned_first = to_e4m3_bytes(turned_first.to(tl.float32) * key_factor)
        turned_second = to_e4m3_bytes(turned_second.to(tl.float32) * key_factor)
    target = k_out + (token * kv_heads + kv_head) * (2 * HALF) + channel[None, :]
    tl.store(target, turned_first, mask=is_kv)
    tl.store(target + HALF, turned_second, mask=is_kv)
    target = k_pool + slot * k_slot_stride + kv_head * k_pool_head_stride + channel[None, :]
    tl.store(target, turned_first, mask=is_kv)
    tl.store(target + HALF, turned_second, mask=is_kv)
    if VALUES:
        source = v + token * v_token_stride + kv_head * v_head_stride + channel[None, :]
        first, second = tl.load(source, mask=is_kv, other=0.0), tl.load(source + HALF, mask=is_kv, other=0.0)
        if v_pool.dtype.element_ty == tl.uint8:
            first = to_e4m3_bytes(first.to(tl.float32) * value_factor)
            second = to_e4m3_bytes(second.to(tl.float32) * value_factor)
            target = v_out + (token * kv_heads + kv_head) * (2 * HALF) + channel[None, :]
            tl.store(target, first, mask=is_kv)
            tl.store(target + HALF, second, mask=is_kv)
        target = v_pool + slot * v_slot_stride + kv_head * v_pool_head_stride + channel[None, :]
        tl.store(target, first, mask=is_kv)
        tl.store(target + HALF, second, mask=is_kv)


def rope_write_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    kv: KVTensors,
    scales: KVScales = UNSCALED,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `rope_write_torch` as one launch, rotated in float32; the last axes must be contiguous."""
    n, heads, d = q.shape
    kv_heads, dtype = k.shape[1], kv.keys.dtype
    q_out = torch.empty((n, heads, d), dtype=q.dtype, device=q.device)
    k_out = torch.empty((n, kv_heads, d), dtype=dtype, device=k.device)
    v_out = v if dtype is v.dtype else torch.empty(v.shape, dtype=dtype, device=v.device)
    k_bytes, v_bytes, k_pool, v_pool = as_bytes(k_out, v_out, *kv)
    if n:
        rope_write_kernel[(n, cdiv(heads + kv_heads, HEADS_PER_PROGRAM))](
            q,
            k,
            v,
            cos_sin,
            positions,
            slots,
            q_out,
            k_bytes,
            v_bytes,
            k_pool,
            v_pool,
            1.0 / scales.key,
            1.0 / scales.value,
            heads,
            kv_heads,
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            cos_sin.stride(0),
            *k_pool.stride()[:2],
            *v_pool.stride()[:2],
            HALF=d // 2,
            BLOCK_HALF=next_power_of_2(d // 2),
            HEADS=HEADS_PER_PROGRAM,
            VALUES=v.shape[2] > 0,
            num_warps=2 if d <= 256 else 4,
        )
    return q_out, k_out, v_out


def rope_write_bytes(n: int, num_heads: int, num_kv_heads: int, d: int, itemsize: int) -> int:
    """Return bytes that must move: q and k in and out, v in, k and v to the pools, the float32 table's rows."""
    return n * d * itemsize * (2 * num_heads + 5 * num_kv_heads) + n * d * 4
