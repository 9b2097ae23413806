"""Root-mean-square normalisation (Zhang and Sennrich, 2019), with the residual's addition fused in."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x · weight / sqrt(mean(x²) + eps) over the last axis; differentiable."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm_torch(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual); differentiable."""
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, eps), total


def rms_norm_bytes(num_rows: int, width: int, itemsize: int, residual: bool) -> int:
    """Bytes that must move: x in, the result out; with a residual that too, in and out; the weight once."""
    return (num_rows * (4 if residual else 2) + 1) * width * itemsize
