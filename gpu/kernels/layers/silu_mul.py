"""The gate of a SwiGLU or GEGLU feed-forward layer (Shazeer, 2020): silu(gate) · up, or gelu(gate) · up."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..jit import cdiv, jit, tl

BLOCK = 1024


def silu_mul_torch(gate_up: Tensor) -> Tensor:
    """Compute […, 2 · I] → […, I]; the gate is the first half; differentiable."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def gelu_mul_torch(gate_up: Tensor) -> Tensor:
    """Compute the same with GELU in its form with tanh (Hendrycks and Gimpel, 2016)."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


@jit
def silu_mul_kernel(gate_up, out, channels, row_stride, BLOCK: tl.constexpr, GELU: tl.constexpr):
    """Compute with one program per row and block of its columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < channels
    gate = tl.load(gate_up + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + channels + column, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        # (1 + tanh(x)) / 2 = sigmoid(2x), with x = √(2 / π) (gate + 0.044715 gate³)
        share = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        share = tl.sigmoid(gate)
    tl.store(out + row * channels + column, (gate * share * up).to(out.dtype.element_ty), mask=inside)


def silu_mul_triton(gate_up: Tensor, gelu: bool = False) -> Tensor:
    """Compute `silu_mul_torch`, or with `gelu` `gelu_mul_torch`, of [n, 2 · I], float32 inside, rounded once. The last
    axis is contiguous.

    Not differentiable.
    """
    n, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((n, width), dtype=gate_up.dtype, device=gate_up.device)
    if n and width:
        silu_mul_kernel[(n, cdiv(width, BLOCK))](
            gate_up, out, width, gate_up.stride(0), BLOCK=BLOCK, GELU=gelu, num_warps=4
        )
    return out
