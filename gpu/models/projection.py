"""Matrix products with weights, and how they are made fast for a few rows on a CPU.

Plain decoding multiplies one row with every matrix, a verify pass a handful: both take as long as the weights take to
be read. Which layout is read fastest differs by processor. On some, NumPy's product with columns, [in, out], reads one
row's weights two to three times as fast as oneDNN's blocks. On others (AVX-512 of 2024), blocks are as fast for one
row, and four rows take 1.2 times as long as one, where columns take 2.3 times as long. So the layouts of large weights
in float32 are timed once per process, with one row and with four (`layout_seconds`), and each model gets the one that
suits its passes; a model that runs both kinds of pass has both layouts where they pay and memory allows (`Passes`).

A large array of NumPy's lies in huge pages. Its product with five to seven rows takes longer than with eight, and with
three than with four, so rows are filled up to a multiple of four. Two rows are multiplied one by one, and up to seven
with a small matrix, which stays in the cache. NumPy computes on one core (`session.devices.set_threads`), so with more
threads, and for number formats that NumPy lacks, a large weight is given to oneDNN in any case. A call of oneDNN costs
some 13 µs before it begins, which is too much for small matrices. A weight in one layout is in memory once, unless it
is an embedding too, whose rows cannot be read from oneDNN's blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..types.coded import CodedWeight
from ..types.shards import WHOLE, Shard

MIN_PACKED_ELEMENTS = 1 << 17
MIN_ROWS_OF_SMALL, MIN_ROWS_OF_LARGE = 8, 3  # from which on one product of all rows is faster than one of each
FULL_ROWS = 4  # of the tiles that a product of several rows is made of
# [out, in] as stored; [in, out]; oneDNN's own; columns and blocks; the numbers of the checkpoint; 8-bit integers in
# oneDNN's own
ROWS, COLUMNS, BLOCKS, BOTH, CODED, INT8 = "rows", "columns", "blocks", "columns and blocks", "coded", "int8"
LEAST_GAIN = 0.1
"""The share of the time of a pass of one row and one of four that a second layout must save."""


class Passes(NamedTuple):
    """Which passes a model runs while requests decode, and whether its large weights may be in memory twice for them.

    A verify pass has several rows, a draft step of one request a single one; plain decoding has a row per request.
    """

    single: bool = True
    several: bool = True
    may_double: bool = False


ANY_PASSES = Passes()


class WeightProduct(Protocol):
    """What multiplies with one matrix, or with those of experts, and may keep them in the numbers of a checkpoint."""

    @property
    def parameter(self) -> Tensor:
        """The parameter, of which a shape alone is left if `coded` is not None."""

    @property
    def coded(self) -> CodedWeight | None: ...

    def keep(self, coded: CodedWeight) -> None:
        """Multiply with `coded` from now on, which has the parameter's shape and device."""


class Projection:
    """x [n, in] → x · weightᵀ + bias, [n, out]. A plain object:
    calling an `nn.Module` costs as much as a small product.

    `exchange` makes the whole output of this rank's part, before the bias is added; None: the product is whole."""

    __slots__ = (
        "_bias", "_columns", "_exchange", "_late_bias", "_multiply", "_product", "_weight", "coded", "layout",
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
        self._columns: tuple[np.ndarray, np.ndarray | None] | None = None
        self.coded: CodedWeight | None = None
        self.layout = ""  # once it is laid out for inference; the weight stays as it is from then on

    def __call__(self, x: Tensor) -> Tensor:
        if self._takes_columns(len(x)):
            return torch.from_numpy(self.on_host(x.numpy()))
        out = F.linear(x, self._weight, self._bias) if self._multiply is None else self._multiply(x)
        return out if self._exchange is None else self._exchanged(out)

    def _takes_columns(self, num_rows: int) -> bool:
        """Return whether a product of this many rows is made with columns: all are, unless there are blocks too."""
        return self._columns is not None and (self._multiply is None or num_rows < MIN_ROWS_OF_LARGE)

    def _exchanged(self, out: Tensor) -> Tensor:
        assert self._exchange is not None
        out = self._exchange(out)
        return out if self._late_bias is None else out + self._late_bias

    @property
    def is_packed(self) -> bool:
        return bool(self.layout)

    @property
    def parameter(self) -> Tensor:
        return self._weight

    def keep(self, coded: CodedWeight) -> None:
        product, bias = self._product, self._bias
        assert product is not None, "this product takes no stored numbers"
        self.coded, self.layout = coded, CODED
        if bias is None:
            self._multiply = lambda x: product(x, coded)
        else:
            self._multiply = lambda x: product(x, coded) + bias

    def on_host(self, x: np.ndarray) -> np.ndarray:
        """Return the same for an array, a new one that is the caller's."""
        if not self._takes_columns(len(x)):
            return self(torch.from_numpy(x)).detach().numpy()
        assert self._columns is not None
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
        return out if self._exchange is None else self._exchanged(torch.from_numpy(out)).numpy()

    def pack(self, passes: Passes, keep: bool = False, in_int8: bool = False) -> None:
        """Lay the weight out as suits its size and dtype, the number of threads and the passes, or, if it is large, in
        8-bit integers. In columns the parameter is a view of them; of the other layouts nothing but its shape is left,
        unless `keep`."""
        weight = self._weight.detach()
        if self.layout or weight.device.type != "cpu":
            return
        self.layout = INT8 if in_int8 and weight.numel() >= MIN_PACKED_ELEMENTS else layout_for(weight, passes)
        bias = None if self._bias is None else self._bias.detach()
        if self.layout in (BLOCKS, BOTH, INT8):
            self._multiply = (in_integers if self.layout == INT8 else in_blocks)(weight, bias)
        if self.layout in (COLUMNS, BOTH):
            columns = np.empty(weight.t().shape, weight.numpy().dtype)
            self._columns = columns, None if bias is None else bias.numpy()
            self._weight.data = torch.from_numpy(columns).copy_(weight.t()).t()
        elif self.layout in (BLOCKS, INT8) and not keep:
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


def layout_for(weight: Tensor, passes: Passes) -> str:
    """Return the layout for a weight [out, in] of a model that runs `passes`, on this machine."""
    is_small = weight.numel() < MIN_PACKED_ELEMENTS
    can_be_blocks = not is_small and has_blocks(weight.dtype)
    if weight.dtype in (torch.float32, torch.float64) and (is_small or torch.get_num_threads() == 1):
        if not can_be_blocks:
            return COLUMNS
        return fastest_layout(passes, layout_seconds() if _given is None else _given)
    return BLOCKS if can_be_blocks else ROWS


def in_blocks(weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Return the product x [n, in] → x · weightᵀ + bias with a copy of the weight [out, in] in oneDNN's layout."""
    packed, multiply = torch.ops.mkldnn._reorder_linear_weight(weight), torch.ops.mkldnn._linear_pointwise.default
    return lambda x: multiply(x, packed, bias, "none", [], "")


def in_integers(weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Return the product x [n, in] → x · weightᵀ + bias with the weight [out, in], float32, as 8-bit integers.

    Each output has a scale, and so has each row of x, which is rounded to 8 bits too. Sums are exact integers, so a
    row's result does not depend on other rows. A row with a number that is not finite becomes NaN.
    """
    scales = (weight.abs().amax(1) / 127).clamp_min_(_LEAST_SCALE)
    integers = (weight / scales.unsqueeze(1)).round_().to(torch.int8)
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


def has_integers() -> bool:
    """Return whether oneDNN multiplies 8-bit integers without overflow on this CPU, and this build of torch lets it."""
    operators = getattr(torch.ops, "onednn", None)
    is_there = all(hasattr(operators, name) for name in ("qlinear_prepack", "qlinear_pointwise"))
    return torch.backends.mkldnn.is_available() and is_there and torch.cpu._is_vnni_supported()


LayoutSeconds = Mapping[str, tuple[float, float]]
"""Layout -> processor seconds of a pass of one row, and of one of four."""


@cache
def layout_seconds() -> LayoutSeconds:
    """Return the processor seconds of one thread with columns and with blocks, in float32.

    Times products with 64 MiB of weights, so that they come from memory and not from a cache. The same answer holds
    for the whole process, so that all its models that run the same passes round alike.
    """
    with torch.inference_mode():
        columns = [np.ones(_TIMED_SHAPE, np.float32) for _ in range(_TIMED_WEIGHTS)]
        as_columns = _seconds([partial(_by_columns, w) for w in columns])
        del columns
        return {
            COLUMNS: as_columns,
            BLOCKS: _seconds([in_blocks(torch.ones(_TIMED_SHAPE)) for _ in range(_TIMED_WEIGHTS)]),
        }


def fastest_layout(passes: Passes, seconds: LayoutSeconds) -> str:
    """Return the layout in which a large weight takes the passes of a model least time. A model that runs both kinds
    of pass runs as many of one as of the other."""
    if passes.single != passes.several:
        return min(seconds, key=lambda layout: seconds[layout][0 if passes.single else 1])
    best = min(seconds, key=lambda layout: sum(seconds[layout]))
    of_both = seconds[COLUMNS][0] + seconds[BLOCKS][1]
    return BOTH if passes.may_double and of_both < (1 - LEAST_GAIN) * sum(seconds[best]) else best


_TIMED_SHAPE, _TIMED_WEIGHTS, _TIMED_TURNS = (2048, 2048), 4, 3


def _by_columns(weight: np.ndarray, x: Tensor) -> object:
    return np.matmul(x.numpy(), weight)


def _seconds(products: Sequence[Callable[[Tensor], object]]) -> tuple[float, float]:
    """Return the processor seconds of one row and of four rows with every weight, each the best of some turns."""

    def best(num_rows: int) -> float:
        x, least = torch.ones(num_rows, _TIMED_SHAPE[1]), float("inf")
        for _ in range(_TIMED_TURNS):
            begin = time.thread_time()
            for product in products:
                product(x)
            least = min(least, time.thread_time() - begin)
        return least

    return best(1), best(FULL_ROWS)


_given: LayoutSeconds | None = None  # by another process


def take_layout_seconds(seconds: LayoutSeconds) -> None:
    """Lay large weights out by what another process has measured (`layout_seconds`), so that both round alike."""
    global _given
    _given = seconds


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


def pack_projections(model: nn.Module, passes: Passes = ANY_PASSES, *, in_int8: bool = False) -> None:
    """Make the model's products fast on a CPU, for inference only: its weights can neither be changed nor saved
    afterwards. What is laid out already stays. `in_int8`: large ones are rounded to 8-bit integers."""
    embeddings = {id(module.embed_weight) for module in model.modules() if hasattr(module, "embed_weight")}
    for module in model.modules():
        for projection in getattr(module, "projections", ()):
            projection.pack(passes, id(projection._weight) in embeddings, in_int8)
