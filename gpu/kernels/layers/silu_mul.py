"""The gate of a SwiGLU feed-forward layer (Shazeer, 2020): silu(gate) · up."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..aot import AotCase
from ..jit import cdiv, jit, tl

BLOCK = 1024


def silu_mul_torch(gate_up: Tensor) -> Tensor:
    """[…, 2 · I] → […, I]; the gate is the first half; differentiable."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@jit
def silu_mul_kernel(gate_up, out, width, row_stride, BLOCK: tl.constexpr):
    """One program per row and block of its columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


def silu_mul_triton(gate_up: Tensor) -> Tensor:
    """`silu_mul_torch` of [n, 2 · I], float32 inside, rounded once; the last axis must be contiguous. Not differentiable."""
    n, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((n, width), dtype=gate_up.dtype, device=gate_up.device)
    if n and width:
        silu_mul_kernel[(n, cdiv(width, BLOCK))](gate_up, out, width, gate_up.stride(0), BLOCK=BLOCK, num_warps=4)
    return out


AOT_CASES = [
    AotCase(
        "silu_mul 14336",
        silu_mul_kernel,
        {"*bf16": "gate_up out", "i32": "width row_stride"},
        {"BLOCK": BLOCK},
        divisible_by_16="width row_stride",
    )
]
