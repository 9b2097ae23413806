"""Matrix products with weights, and how they are made fast for a few rows on a CPU.

A verify pass multiplies a handful of rows with every matrix, plain decoding one row. How fast the weights are read depends on how they
lie in memory (`layouts.py`). A large weight gets the layout that was measured to be the fastest. A call of oneDNN's kernels costs some
13 µs before it begins, so small matrices are transposed instead: a few rows times [in, out] take two thirds to nine tenths of the time that
they take times the transpose of [out, in]. What was stored is given up: a packed model needs no more memory than before.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layouts import COLUMNS, ROWS, Product, choose_layout, product_of

MIN_PACKED_ELEMENTS = 1 << 17


class Projection:
    """x [n, in] → x · weightᵀ + bias, [n, out]. A plain object: calling an `nn.Module` costs as much as a small product."""

    __slots__ = ("_bias", "_multiply", "_on_host", "_weight", "layout")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias
        self._multiply: Product | None = None
        self._on_host: tuple[np.ndarray, np.ndarray | None] | None = None
        self.layout = ""  # once it is laid out for inference on a CPU; the weight stays as it is from then on

    def __call__(self, x: Tensor) -> Tensor:
        if self._multiply is None:
            return F.linear(x, self._weight, self._bias)
        return self._multiply(x)

    @property
    def is_packed(self) -> bool:
        return bool(self.layout)

    def on_host(self, x: np.ndarray) -> np.ndarray:
        """Return the same for an array, a new one that is the caller's."""
        if self._on_host is None:
            return self(torch.from_numpy(x)).detach().numpy()
        weight, bias = self._on_host
        out = np.matmul(x, weight)
        if bias is not None:
            out += bias
        return out

    def pack(self, keep: bool = False) -> None:
        """Lay the weight out as suits its size, dtype and this machine. Unless `keep`, its parameter then holds no numbers any more."""
        weight = self._weight.detach()
        if self.layout or weight.device.type != "cpu":
            return
        bias = None if self._bias is None else self._bias.detach()
        self.layout = ROWS
        if weight.numel() < MIN_PACKED_ELEMENTS:
            if weight.dtype in (torch.float32, torch.float64):
                columns = weight.t().contiguous()
                self._on_host = columns.numpy(), None if bias is None else bias.numpy()
                if weight.dtype is torch.float32:
                    self.layout = COLUMNS
                    self._multiply = lambda x: torch.mm(x, columns) if bias is None else torch.addmm(bias, x, columns)
        else:
            self.layout = choose_layout(weight)
            if self.layout != ROWS:
                self._multiply = product_of(self.layout, weight, bias)
        if self._multiply is not None and not keep:
            # It keeps its shape and size in name; code that reads its values finds that it has none.
            self._weight.data = torch.full((), torch.nan, dtype=weight.dtype).expand(weight.shape)


def pack_projections(model: nn.Module) -> None:
    """Make the model's products fast on a CPU, for inference only: its weights can neither be changed nor saved afterwards."""
    embeddings = {id(module.embed_weight) for module in model.modules() if hasattr(module, "embed_weight")}
    for module in model.modules():
        for projection in getattr(module, "projections", ()):
            projection.pack(keep=id(projection._weight) in embeddings)
