"""Matrix products with weights, and how they are made fast for a few rows on a CPU.

Plain decoding multiplies one row with every matrix, a verify pass a handful: both take as long as the weights take to
be read. On one core NumPy's product with columns, [in, out], reads them fastest. With one row it reaches three quarters
of the rate of a plain sum over the same memory. OneDNN's blocks and torch's products with rows as stored reach a third
to a half. With four rows it is as fast as the blocks. A large array of NumPy's lies in huge pages, too. Its product
with five to seven rows takes longer than with eight, and with three than with four, so rows are filled up to a multiple
of four. Two rows are multiplied one by one, and up to seven with a small matrix, which stays in the cache.

NumPy computes on one core (`session.devices.set_threads`). With more rows, and for number formats that NumPy lacks, a
large weight is given to oneDNN in its own layout. A call of that costs some 13 µs before it begins, which is too much
for small matrices. Whatever the layout, a weight is in memory once, unless it is an embedding too, whose rows cannot be
read from oneDNN's blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

MIN_PACKED_ELEMENTS = 1 << 17
MIN_ROWS_OF_SMALL, MIN_ROWS_OF_LARGE = 8, 3  # from which on one product of all rows is faster than one of each
FULL_ROWS = 4  # of the tiles that a product of several rows is made of
ROWS, COLUMNS, BLOCKS = "rows", "columns", "blocks"  # [out, in] as stored; [in, out]; oneDNN's own


class Projection:
    """x [n, in] → x · weightᵀ + bias, [n, out]. A plain object:
    calling an `nn.Module` costs as much as a small product."""

    __slots__ = ("_bias", "_columns", "_multiply", "_weight", "layout")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias
        self._multiply: Callable[[Tensor], Tensor] | None = None  # with blocks
        self._columns: tuple[np.ndarray, np.ndarray | None] | None = None
        self.layout = ""  # once it is laid out for inference on a CPU; the weight stays as it is from then on

    def __call__(self, x: Tensor) -> Tensor:
        if self._columns is not None:
            return torch.from_numpy(self.on_host(x.numpy()))
        return F.linear(x, self._weight, self._bias) if self._multiply is None else self._multiply(x)

    @property
    def is_packed(self) -> bool:
        return bool(self.layout)

    def on_host(self, x: np.ndarray) -> np.ndarray:
        """Return the same for an array, a new one that is the caller's."""
        if self._columns is None:
            return self(torch.from_numpy(x)).detach().numpy()
        weight, bias = self._columns
        n, is_large = x.shape[0], weight.size >= MIN_PACKED_ELEMENTS
        if 1 < n < (MIN_ROWS_OF_LARGE if is_large else MIN_ROWS_OF_SMALL):
            out = np.matmul(x[:, None], weight)[:, 0]  # row by row
        elif is_large and n > 1 and n % FULL_ROWS:
            filled = np.zeros((n + -n % FULL_ROWS, x.shape[1]), x.dtype)
            filled[:n] = x
            out = np.matmul(filled, weight)[:n]
        else:
            out = np.matmul(x, weight)
        if bias is not None:
            out += bias
        return out

    def pack(self, keep: bool = False) -> None:
        """Lay the weight out as suits its size and dtype and the number of threads. In columns the parameter is a view
        of them; of blocks nothing but its shape is left, unless `keep`."""
        weight = self._weight.detach()
        if self.layout or weight.device.type != "cpu":
            return
        self.layout = layout_for(weight)
        bias = None if self._bias is None else self._bias.detach()
        if self.layout == COLUMNS:
            columns = np.empty(weight.t().shape, weight.numpy().dtype)
            self._columns = columns, None if bias is None else bias.numpy()
            self._weight.data = torch.from_numpy(columns).copy_(weight.t()).t()
        elif self.layout == BLOCKS:
            packed, multiply = (
                torch.ops.mkldnn._reorder_linear_weight(weight),
                torch.ops.mkldnn._linear_pointwise.default,
            )
            self._multiply = lambda x: multiply(x, packed, bias, "none", [], "")
            if not keep:
                self._weight.data = torch.full((), torch.nan, dtype=weight.dtype).expand(weight.shape)


def layout_for(weight: Tensor) -> str:
    """Return the layout for a weight [out, in] on this machine."""
    is_small = weight.numel() < MIN_PACKED_ELEMENTS
    if weight.dtype in (torch.float32, torch.float64) and (is_small or torch.get_num_threads() == 1):
        return COLUMNS
    return ROWS if is_small or not has_blocks(weight.dtype) else BLOCKS


def has_blocks(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies weights of this dtype in blocks here:
    a build may lack the operators, a CPU those for bfloat16."""
    operators = torch.ops.mkldnn
    names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    if not torch.backends.mkldnn.is_available() or not all(hasattr(operators, name) for name in names):
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and operators._is_mkldnn_bf16_supported())


def is_native(dtype: torch.dtype) -> bool:
    """Return whether this CPU multiplies numbers of a 16-bit dtype itself;
    others emulate it, several times slower than 32 bits."""
    if dtype is not torch.bfloat16 or not has_blocks(dtype):
        return False
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def pack_projections(model: nn.Module) -> None:
    """Make the model's products fast on a CPU, for inference only:
    its weights can neither be changed nor saved afterwards."""
    embeddings = {id(module.embed_weight) for module in model.modules() if hasattr(module, "embed_weight")}
    for module in model.modules():
        for projection in getattr(module, "projections", ()):
            projection.pack(keep=id(projection._weight) in embeddings)
