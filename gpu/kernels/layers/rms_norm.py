"""Root-mean-square normalisation (Zhang and Sennrich, 2019), with the residual's addition fused in."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..jit import cdiv, jit, next_power_of_2, tl

ELEMENTS_PER_PROGRAM = 1024


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x · weight / sqrt(mean(x²) + eps) over the last axis; differentiable.

    The result has x's dtype, whatever the weight's.

    PyTorch makes its own norm of eight operations on a CPU. Four do: with n channels the root is hypot(|x|, √(n · eps))
    / √n.
    """
    if weight.dtype is not x.dtype:
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)
    if torch.is_grad_enabled() or x.dtype.itemsize < 4 or x.device.type != "cpu":
        return F.rms_norm(x, weight.shape, weight, eps)
    floor, zero, root = _norm_constants(x.shape[-1], eps, x.dtype)
    length = torch.linalg.vector_norm(x, 2, -1, True).hypot_(floor)
    return torch.addcdiv(zero, x * weight, length, value=root)


@lru_cache(maxsize=64)
def _norm_constants(width: int, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
    return torch.tensor((width * eps) ** 0.5, dtype=dtype), torch.zeros((), dtype=dtype), width**0.5


def add_rms_norm_torch(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual); differentiable."""
    total = x + residual
    return rms_norm_torch(total, weight, eps), total


@jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    total_out,
    num_rows,
    heads,
    channels,
    token_stride,
    head_stride,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    """Norm ROWS rows per program. Row i is head i % heads of token i // heads of x;
    residual, out and total_out are contiguous."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    inside = channel < channels
    mask = (row < num_rows)[:, None] & inside[None, :]
    source = (row // heads) * token_stride + (row % heads) * head_stride
    place = row[:, None] * channels + channel[None, :]
    value = tl.load(x + source[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
        # The next layer adds to the sum as it is stored, so the norm is that of the rounded sum.
        rounded = value.to(total_out.dtype.element_ty)
        tl.store(total_out + place, rounded, mask=mask)
        value = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 1) / channels + eps)
    factor = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, (value * scale[:, None] * factor[None, :]).to(out.dtype.element_ty), mask=mask)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    num_rows = x.numel() // width
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    if not num_rows:
        return out, total
    block = next_power_of_2(width)
    rows = max(1, ELEMENTS_PER_PROGRAM // block)
    rms_norm_kernel[(cdiv(num_rows, rows),)](
        x,
        x if residual is None else residual.contiguous(),
        weight,
        out,
        total,
        num_rows,
        heads,
        width,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        eps,
        ROWS=rows,
        BLOCK=block,
        ADD=residual is not None,
        num_warps=min(16, max(1, block * rows // 512)),
    )
    return out, total


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `rms_norm_torch` of x [n, H] or [n, heads, d], float32 inside; the last axis must be contiguous.
    Not differentiable."""
    return _launch(x, None, weight, eps)[0]


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `add_rms_norm_torch` of x [n, H], one launch. Not differentiable."""
    return _launch(x, residual, weight, eps)


def rms_norm_bytes(num_rows: int, width: int, itemsize: int, residual: bool) -> int:
    """Return bytes that must move: x in, the result out; with a residual that too, in and out; the weight once."""
    return (num_rows * (4 if residual else 2) + 1) * width * itemsize
