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


def sigmoid_mul_torch(x: Tensor, gate: Tensor) -> Tensor:
    """Compute x · sigmoid(gate)."""
    return x * gate.sigmoid()


SILU, GELU, SIGMOID = range(3)


@jit
def gate_mul_kernel(gate, up, out, channels, gate_stride, up_stride, BLOCK: tl.constexpr, KIND: tl.constexpr):
    """Compute with one program per row and block of its columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < channels
    x = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    if KIND == 1:
        # (1 + tanh(x)) / 2 = sigmoid(2x), with x = √(2 / π) (gate + 0.044715 gate³)
        share = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == 0:
        share = x * tl.sigmoid(x)
    else:
        share = tl.sigmoid(x)
    other = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * channels + column, (share * other).to(out.dtype.element_ty), mask=inside)


def silu_mul_triton(gate_up: Tensor, gelu: bool = False) -> Tensor:
    """Compute `silu_mul_torch`, or with `gelu` `gelu_mul_torch`, of [n, 2 · I], float32 inside, rounded once. The last
    axis is contiguous.

    Not differentiable.
    """
    gate, up = gate_up.chunk(2, -1)
    return _gate_mul(gate, up, GELU if gelu else SILU)


def sigmoid_mul_triton(x: Tensor, gate: Tensor) -> Tensor:
    """Compute `sigmoid_mul_torch` of [n, heads, d] in the same way; the last two axes of each are as one."""
    return _gate_mul(gate.flatten(1), x.flatten(1), SIGMOID).view(x.shape)


def _gate_mul(gate: Tensor, up: Tensor, kind: int) -> Tensor:
    n, width = up.shape
    out = torch.empty((n, width), dtype=up.dtype, device=up.device)
    if n and width:
        gate_mul_kernel[(n, cdiv(width, BLOCK))](
            gate, up, out, width, gate.stride(0), up.stride(0), BLOCK=BLOCK, KIND=kind, num_warps=4
        )
    return out
