"""Matrix products with weights, and how they are made fast for a few rows on a CPU.

A verify pass multiplies a handful of rows with every matrix. BLAS libraries have one path for a vector and another for many rows, and
between them they read the weights at a fraction of the memory's speed. oneDNN's kernels over weights in its own blocked layout do not:
for two rows of a large matrix they take half of the time, for five about three quarters, for one somewhat more. A call of them costs
some 13 µs before it begins, so small matrices are transposed instead: a few rows times [in, out] take two thirds to nine tenths of the
time that they take times the transpose of [out, in]. A packed projection keeps both layouts (twice the memory); a large one chooses by
the number of rows.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

MIN_PACKED_ROWS = 2
MIN_PACKED_ELEMENTS = 1 << 17


class Projection:
    """x [n, in] → x · weightᵀ + bias, [n, out]. A plain object: calling an `nn.Module` costs as much as a small product."""

    __slots__ = ("_bias", "_on_host", "_packed", "_transposed", "_weight", "is_packed")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias
        self._packed: Tensor | None = None
        self._transposed: Tensor | None = None
        self._on_host: tuple[np.ndarray, np.ndarray | None] | None = None
        self.is_packed = False  # laid out for inference on a CPU; the weight stays as it is from then on

    def __call__(self, x: Tensor) -> Tensor:
        if self._transposed is not None:
            return torch.mm(x, self._transposed) if self._bias is None else torch.addmm(self._bias, x, self._transposed)
        if self._packed is None or x.shape[0] < MIN_PACKED_ROWS:
            return F.linear(x, self._weight, self._bias)
        return torch.ops.mkldnn._linear_pointwise.default(x, self._packed, self._bias, "none", [], "")

    def on_host(self, x: np.ndarray) -> np.ndarray:
        """Return the same for an array, a new one that is the caller's."""
        if self._on_host is None:
            return self(torch.from_numpy(x)).detach().numpy()
        weight, bias = self._on_host
        out = np.matmul(x, weight)
        if bias is not None:
            out += bias
        return out

    def pack(self) -> None:
        """Copy the weight into the layout that suits its size, where there is one for its dtype and device."""
        weight = self._weight.detach()
        if self.is_packed or weight.device.type != "cpu":
            return
        self.is_packed = True
        if weight.numel() < MIN_PACKED_ELEMENTS:
            if weight.dtype in (torch.float32, torch.float64):
                transposed = weight.t().contiguous()
                self._on_host = transposed.numpy(), None if self._bias is None else self._bias.detach().numpy()
                self._transposed = transposed if weight.dtype is torch.float32 else None
        elif has_packed_kernels(weight.dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)


def pack_projections(model: nn.Module) -> None:
    """Make the model's products fast on a CPU, for inference only: later changes of its weights have no effect on them."""
    for module in model.modules():
        for projection in getattr(module, "projections", ()):
            projection.pack()


def has_packed_kernels(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies packed weights of this dtype here: a build may lack the operators, a CPU those for bfloat16."""
    operators = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not all(
        hasattr(operators, name)
        for name in ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    ):
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and operators._is_mkldnn_bf16_supported())
