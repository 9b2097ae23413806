"""The gate of a SwiGLU feed-forward layer (Shazeer, 2020): silu(gate) · up."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul_torch(gate_up: Tensor) -> Tensor:
    """[…, 2 · I] → […, I]; the gate is the first half; differentiable."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def silu_mul_bytes(num_rows: int, width: int, itemsize: int) -> int:
    """Bytes that must move for an output of num_rows · width: both halves in, one out."""
    return 3 * num_rows * width * itemsize
