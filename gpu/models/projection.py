"""Matrix products with weights, and how they are made fast for a few rows on a CPU.

Plain decoding multiplies one row with every matrix, a verify pass a handful: both take as long as the weights take to
be read. With one thread, and for small weights with any number, kernels that Numba has compiled read the weights as
they are stored, and 8-bit integers in blocks (`kernels.host`). Prompts and large batches are multiplied by torch with
the same memory. With several threads, without Numba, and for bfloat16 where the CPU has it, a large weight is given to
oneDNN in its own blocked layout. A call of oneDNN costs some 13 µs before it begins, which is too much for small
matrices. A weight is in memory once, unless it is an embedding too, whose rows cannot be read from oneDNN's blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels import host
from ..kernels.tiles import OUTPUTS_OF_BLOCK, packed, unpacked
from ..types.coded import CodedWeight
from ..types.shards import WHOLE, Shard

MIN_PACKED_ELEMENTS = 1 << 17
ROUNDED_ELEMENTS = 1 << 20  # of a weight, at a time
# As stored, for torch, and for compiled kernels too; oneDNN's own; the numbers of the checkpoint; 8-bit integers.
ROWS, COMPILED, BLOCKS, CODED, INT8 = "rows", "compiled", "blocks", "coded", "int8"


class HostProduct(NamedTuple):
    """What the kernels of a CPU multiply with: a weight [out, in] as it is stored, or integers that are `packed` with
    their scales [out], and a bias [out]; scales and bias are empty if there are none."""

    weight: np.ndarray
    scales: np.ndarray
    bias: np.ndarray

    @classmethod
    def of(cls, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> HostProduct:
        nothing = np.zeros(0, (weight if scales is None else scales).numpy().dtype)
        numbers = weight.numpy() if scales is None else packed(weight.numpy())
        return cls(numbers, *(nothing if one is None else one.numpy() for one in (scales, bias)))

    @property
    def num_outputs(self) -> int:
        return self.scales.size or len(self.weight)

    def outputs(self, x: Tensor, first: int = 0) -> Tensor:
        """Return the outputs from number `first` on for x [n, in]."""
        lead = first % (OUTPUTS_OF_BLOCK if self.scales.size else 1)  # of the block with the first one
        row = first // OUTPUTS_OF_BLOCK if self.scales.size else first
        out = x.new_empty(len(x), self.num_outputs - first + lead)
        part = self.weight[row:], self.scales[first - lead :], self.bias[first - lead :]
        host.multiply(x.detach().contiguous().numpy(), *part, False, out.numpy())
        return out[:, lead:]

    def takes(self, num_rows: int) -> bool:
        """Return whether compiled kernels multiply so many rows. torch is slower with integers on one thread alone."""
        if num_rows <= host.MAX_TOKENS:
            return True
        return self.weight.dtype == np.int8 and torch.get_num_threads() == 1


class WeightProduct(Protocol):
    """What multiplies with one matrix, or with those of experts, and may keep them in the numbers of a checkpoint."""

    @property
    def parameter(self) -> Tensor:
        """The parameter, of which a shape alone is left if `coded` is not None."""

    @property
    def coded(self) -> CodedWeight | None: ...

    @property
    def nbytes(self) -> int:
        """The bytes that a whole product reads of the weight, in the numbers in which it is kept."""

    def keep(self, coded: CodedWeight) -> None:
        """Multiply with `coded` from now on, which has the parameter's shape and device."""


class Projection:
    """x [n, in] → x · weightᵀ + bias, [n, out]. A plain object:
    calling an `nn.Module` costs as much as a small product.

    `exchange` makes the whole output of this rank's part, before the bias is added; None: the product is whole."""

    __slots__ = (
        "_bias", "_exchange", "_late_bias", "_multiply", "_product", "_weight", "coded", "compiled", "layout",
    )  # fmt: skip

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        product: Callable[[Tensor, CodedWeight], Tensor] | None = None,
        exchange: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._weight = weight
        self._exchange = exchange
        self._bias = bias if exchange is None else None
        self._late_bias = None if exchange is None else bias
        self._product = product  # with stored numbers; None: the weight is never kept in them
        self._multiply: Callable[[Tensor], Tensor] | None = None  # with blocks, and with stored numbers
        self.compiled: HostProduct | None = None
        self.coded: CodedWeight | None = None
        self.layout = ""  # once it is laid out for inference; the weight stays as it is from then on

    def __call__(self, x: Tensor) -> Tensor:
        if self.compiled is not None and self.compiled.takes(len(x)):
            out = self.compiled.outputs(x)
        else:
            out = F.linear(x, self._weight, self._bias) if self._multiply is None else self._multiply(x)
        return out if self._exchange is None else self._exchanged(out)

    def outputs_from(self, first: int, x: Tensor) -> Tensor:
        """Return the outputs from number `first` on, [n, out − first], of a product in one process. Where the layout
        lets it, the others are not computed."""
        assert self._exchange is None, "a rank's outputs are not in one place"
        if self.compiled is not None and self.compiled.takes(len(x)):
            return self.compiled.outputs(x, first)
        if self._multiply is not None:
            return self(x)[:, first:]
        return F.linear(x, self._weight[first:], None if self._bias is None else self._bias[first:])

    def _exchanged(self, out: Tensor) -> Tensor:
        assert self._exchange is not None
        out = self._exchange(out)
        return out if self._late_bias is None else out + self._late_bias

    @property
    def is_whole(self) -> bool:
        """Whether the product is that of the whole matrix, not a rank's part of it."""
        return self._exchange is None

    @property
    def parameter(self) -> Tensor:
        return self._weight

    @property
    def nbytes(self) -> int:
        if self.coded is not None:
            return self.coded.nbytes
        if self.layout == INT8:  # a scale of 4 bytes for each output
            return self._weight.numel() + 4 * len(self._weight)
        return self._weight.nbytes

    def keep(self, coded: CodedWeight) -> None:
        product, bias = self._product, self._bias
        assert product is not None, "this product takes no stored numbers"
        self.coded, self.layout = coded, CODED
        if bias is None:
            self._multiply = lambda x: product(x, coded)
        else:
            self._multiply = lambda x: product(x, coded) + bias

    def pack(self, keep: bool = False, in_int8: bool = False) -> None:
        """Lay the weight out as suits its size and dtype and the number of threads, or, if it is large, in 8-bit
        integers. Of blocks and integers nothing but the parameter's shape is left, unless `keep`."""
        if self.layout or self._weight.device.type != "cpu":
            return
        weight = self._weight.data = self._weight.detach().contiguous()  # kernels read rows without gaps
        self.layout = INT8 if in_int8 and weight.numel() >= MIN_PACKED_ELEMENTS else layout_for(weight)
        bias = None if self._bias is None else self._bias.detach()
        if self.layout == COMPILED:
            self.compiled = HostProduct.of(weight, None, bias)
        elif self.layout == INT8:
            integers, scales = rounded(weight)
            if has_fast_integers():
                self._multiply = in_integers(integers, scales, bias)
            else:
                self.compiled = HostProduct.of(integers, scales, bias)
                self._multiply = partial(_of_many_rows, self.compiled)
        elif self.layout == BLOCKS:
            self._multiply = in_blocks(weight, bias)
        if self.layout in (BLOCKS, INT8) and not keep:
            self._weight.data = torch.full((), torch.nan, dtype=weight.dtype).expand(weight.shape)


class Embedding:
    """The rows of a weight [V, H] that tokens int64 [n] name, [n, H].

    With a `shard`, this rank has the rows behind those of the ranks before it, and all ranks get the token's row.
    """

    __slots__ = ("_shard", "_weight")

    def __init__(self, weight: Tensor, shard: Shard = WHOLE) -> None:
        self._weight, self._shard = weight, shard

    def __call__(self, tokens: Tensor) -> Tensor:
        if self._shard.is_whole:
            return torch.embedding(self._weight, tokens)
        num_rows = self._weight.shape[0]
        places = tokens - self._shard.rank * num_rows
        elsewhere = (places < 0) | (places >= num_rows)
        own = torch.embedding(self._weight, places.clamp(0, num_rows - 1))
        return self._shard.total(own.masked_fill(elsewhere.unsqueeze(-1), 0.0))


def layout_for(weight: Tensor) -> str:
    """Return the layout for a weight [out, in] on this machine."""
    is_small = weight.numel() < MIN_PACKED_ELEMENTS
    is_compiled = host.HAS_NUMBA and weight.dtype in (torch.float32, torch.float64)
    if is_compiled and (is_small or torch.get_num_threads() == 1):
        return COMPILED
    return BLOCKS if not is_small and has_blocks(weight.dtype) else ROWS


def in_blocks(weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Return the product x [n, in] → x · weightᵀ + bias with a copy of the weight [out, in] in oneDNN's layout."""
    packed, multiply = torch.ops.mkldnn._reorder_linear_weight(weight), torch.ops.mkldnn._linear_pointwise.default
    return lambda x: multiply(x, packed, bias, "none", [], "")


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight [out, in] in float32 as int8 [out, in], and what they are multiplied by, float32 [out]. Beside
    them it needs memory for some rows."""
    integers, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
    rows = max(1, ROUNDED_ELEMENTS // weight.shape[1])
    for part, whole, scale in zip(weight.split(rows), integers.split(rows), scales.split(rows), strict=True):
        torch.div(part.abs().amax(1), 127, out=scale).clamp_min_(_LEAST_SCALE)
        whole.copy_((part / scale.unsqueeze(1)).round_())
    return integers, scales


def _of_many_rows(product: HostProduct, x: Tensor) -> Tensor:
    """Multiply the rows of a prompt, on several threads, with rounded weights, which are widened for it."""
    weight, scales, bias = product
    integers = torch.from_numpy(unpacked(weight, len(scales), x.shape[1]))
    out = F.linear(x, integers.to(x.dtype)).mul_(torch.from_numpy(scales))
    return out.add_(torch.from_numpy(bias)) if bias.size else out


def in_integers(integers: Tensor, scales: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Return the product x [n, in] → x · weightᵀ + bias with a `rounded` weight, whose rows x are rounded, too.

    Each row of x has a scale. Sums are exact integers, so a row's result does not depend on other rows. A row with a
    number that is not finite becomes NaN.
    """
    packed, multiply = torch.ops.onednn.qlinear_prepack(integers, None), torch.ops.onednn.qlinear_pointwise.default
    zeros = torch.zeros(len(scales), dtype=torch.int64)

    def product(x: Tensor) -> Tensor:
        rows = (x.abs().amax(1, True) / 127).clamp_min_(_LEAST_SCALE)
        # oneDNN is fast with bytes without a sign alone: 128 stands for 0.
        numbers = (x / rows).round_().add_(128.0).to(torch.uint8)
        out: Tensor = multiply(numbers, 1.0, 128, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")
        out.mul_(rows)
        return out if bias is None else out.add_(bias)

    return product


_LEAST_SCALE = torch.finfo(torch.float32).tiny


def has_fast_integers() -> bool:
    """Return whether a weight of 8-bit integers is given to oneDNN: where compiled kernels, which have one thread and
    round rows to 16 bits, cannot be or are slower, and this CPU and this build of torch can."""
    return not (host.HAS_NUMBA and torch.get_num_threads() == 1) and has_integers()


def has_integers() -> bool:
    """Return whether oneDNN multiplies 8-bit integers without overflow on this CPU, and this build of torch lets it."""
    operators = getattr(torch.ops, "onednn", None)
    is_there = all(hasattr(operators, name) for name in ("qlinear_prepack", "qlinear_pointwise"))
    return torch.backends.mkldnn.is_available() and is_there and torch.cpu._is_vnni_supported()


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


def pack_projections(model: nn.Module, in_int8: bool = False) -> None:
    """Make the model's products fast on a CPU, for inference only: its weights can neither be changed nor saved
    afterwards. What is laid out already stays. `in_int8`: large ones are rounded to 8-bit integers."""
    embeddings = {id(module.embed_weight) for module in model.modules() if hasattr(module, "embed_weight")}
    for module in model.modules():
        for projection in getattr(module, "projections", ()):
            projection.pack(id(projection._weight) in embeddings, in_int8)
