"""Quantized weights of a checkpoint, as the tensors that they stand for.

A matrix is stored as several tensors: packed numbers, scales, zero points. `unpacked` names one tensor for them, under
the name that the matrix has in an unquantized checkpoint. Reading it computes the weights in float32, and they are then
rounded to the model's dtype. Activations are not quantized, whatever the checkpoint was calibrated for.

    fp8, compressed-tensors, modelopt   weight · scale, the scale per tensor, per row, or per block of (most often) 128
                                        × 128
    awq                                 (q − zero) · scale, q [in, out / 8] int32, columns in the order 0 2 4 6 1 3 5 7
    gptq                                the same, q [in · bits / 32, out], groups of inputs in `g_idx`; zeros less 1 in
                                        its first form
    compressed-tensors, packed          (q − 2^(bits−1)) · scale, or with zero points, q [out, in · bits / 32]
    mxfp4                               pairs of 4-bit floats with one exponent for 32 (OCP Microscaling Formats 1.0)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from ....core.model_shape.quantization import CONFIG_KEYS
from ....core.parsing import ConfigReader
from ...parallel.shards import Cut
from .tensor_files import StoredTensor, read_tensors

METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "modelopt", "awq", "gptq", "mxfp4")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_SCALES = ("weight_scale_inv", "weight_scale")
# Scales of activations and of a KV cache, and what other tensors say already.
_UNUSED = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "k_scale",
    "v_scale",
    "output_scale",
    "input_scale_ub",
)
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint's matrices are stored."""

    method: str  # of METHODS
    bits: int = 8
    block: tuple[int, int] | None = None  # rows and columns of a scale
    zero_offset: int = 0  # what must be added to stored zero points


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A matrix in several tensors, unread; looks like a `StoredTensor`."""

    path: Path
    shape: tuple[int, ...]
    parts: Mapping[str, StoredTensor]  # by their names in the file
    unpack: Callable[[list[Tensor]], Tensor]  # of the parts, in their order
    dtype: str = "F32"


AnyTensor = StoredTensor | PackedTensor


def read_quantization(reader: ConfigReader) -> Quantization | None:
    """Read how the weights are quantized; None if they are not. What cannot be read is noted in `reader`."""
    key = next((key for key in CONFIG_KEYS if reader.get(key) is not None), None)
    if key is None:
        return None
    config = reader.under(key)
    method, bits = config.get("quant_method"), 8
    if method not in METHODS:
        config.problem(
            "quant_method", f"{method!r} is none of {', '.join(METHODS)}; another checkpoint of the model may be"
        )
        return None
    if method in ("awq", "gptq"):
        bits = config.integer("bits" if config.get("bits") is not None else "w_bit")
        if bits not in ((4,) if method == "awq" else (2, 4, 8)):
            config.problem("bits", f"{bits}-bit weights of {method} are not implemented")
        version = str(config.get("version") or "gemm").lower()
        if method == "awq" and version != "gemm":
            config.problem("version", f"only the layout 'gemm' is implemented, got {version!r}")
    if method == "modelopt" and config.get("quant_algo") != "FP8":
        config.problem("quant_algo", f"only FP8 is implemented, got {config.get('quant_algo')!r}")
    if method == "compressed-tensors":
        bits = _read_groups(config)
    block, sizes = config.integers("weight_block_size"), None
    if block:
        if len(block) != 2 or not all(block):
            config.problem("weight_block_size", f"must be two sizes, got {list(block)}")
        else:
            sizes = (block[0], block[1])
    first_form = method == "gptq" and config.get("checkpoint_format", "gptq") == "gptq"
    return Quantization(method, bits, sizes, int(first_form))


def _read_groups(config: ConfigReader) -> int:
    """Return the bits of a compressed-tensors checkpoint, whose groups of layers must be stored in one form."""
    found = set()
    groups = config.under("config_groups")
    for name in groups.data:
        weights = groups.under(name).under("weights")
        kind, bits = weights.get("type", "int"), weights.integer("num_bits")
        if (kind, bits) not in (("float", 8), ("int", 8), ("int", 4)):
            weights.problem(
                "num_bits", f"{bits} bits of type {kind!r} are not implemented; 8-bit float and 4- and 8-bit int are"
            )
        found.add(bits)
    if len(found) > 1:
        config.problem(
            "config_groups",
            f"groups of {' and '.join(map(str, sorted(found)))} bits in one checkpoint are not implemented",
        )
    return max(found, default=8)


def unpacked(stored: Mapping[str, StoredTensor], quantization: Quantization) -> dict[str, AnyTensor]:
    """Return the tensors under the names of an unquantized checkpoint.
    What lacks a part keeps its own name, which no model knows."""
    left: dict[str, StoredTensor] = {n: t for n, t in stored.items() if n.rpartition(".")[2] not in _UNUSED}
    found: dict[str, AnyTensor] = {}
    for name, tensor in list(left.items()):
        module, _, last = name.rpartition(".")
        if last == "qweight":
            packed = _grouped(left, module, tensor, quantization)
        elif last == "weight_packed":
            packed = _compressed(left, module, tensor, quantization)
        elif last == "weight" and tensor.dtype in ("F8_E4M3", "I8"):
            scale = next((f"{module}.{s}" for s in _SCALES if f"{module}.{s}" in left), None)
            packed = _take(
                left,
                (name, scale, f"{module}.weight_zero_point"),
                tensor.shape,
                partial(_scaled, quantization.block),
                2,
            )
        elif last.endswith("_blocks"):
            shape = (tensor.shape[0], tensor.shape[2] * 32, tensor.shape[1]) if len(tensor.shape) == 4 else ()
            packed = _take(left, (name, f"{name.removesuffix('_blocks')}_scales"), shape, _from_fp4)
            name = name.removesuffix("_blocks")
        else:
            continue
        if packed is not None:
            found[f"{module}.weight" if last in ("qweight", "weight_packed") else name] = packed
    return {**left, **found}


def read_unpacked(
    stored: Mapping[str, AnyTensor], cuts: Mapping[str, Cut] = MappingProxyType({})
) -> Iterator[tuple[str, Tensor]]:
    """Do what `tensor_files.read_tensors` does; of quantized matrices yield the weights in float32, one at a time. A
    part of one is cut out of the whole: the scales of its blocks may be those of other rows, too."""
    yield from read_tensors({name: t for name, t in stored.items() if isinstance(t, StoredTensor)}, cuts)
    for name, tensor in stored.items():
        if isinstance(tensor, PackedTensor):
            parts = dict(read_tensors(dict(tensor.parts)))
            weight = tensor.unpack([parts[part] for part in tensor.parts])
            yield name, cuts[name].of(weight) if name in cuts else weight


def _take(
    left: dict[str, StoredTensor],
    names: tuple[str | None, ...],
    shape: tuple[int, ...],
    unpack: Callable[[list[Tensor]], Tensor],
    needed: int | None = None,
) -> PackedTensor | None:
    """Take the parts out of `left`; the first `needed` (default: all) must be there, else None and nothing is taken."""
    if any(name not in left for name in names[:needed]):
        return None
    parts = {name: left.pop(name) for name in names if name in left}
    return PackedTensor(next(iter(parts.values())).path, shape, parts, unpack)


def _grouped(
    left: dict[str, StoredTensor], module: str, tensor: StoredTensor, quantization: Quantization
) -> PackedTensor | None:
    per_word, (rows, columns) = 32 // quantization.bits, tensor.shape
    names = [f"{module}.{part}" for part in ("qweight", "qzeros", "scales")]
    if quantization.method == "awq":
        return _take(left, tuple(names), (columns * per_word, rows), _from_awq)
    unpack = partial(_from_gptq, quantization.bits, quantization.zero_offset)
    return _take(left, (*names, f"{module}.g_idx"), (columns, rows * per_word), unpack, 3)


def _compressed(
    left: dict[str, StoredTensor], module: str, tensor: StoredTensor, quantization: Quantization
) -> PackedTensor | None:
    shape = left.pop(f"{module}.weight_shape", None)
    width = tensor.shape[1] * (32 // quantization.bits)
    names = tuple(f"{module}.{part}" for part in ("weight_packed", "weight_scale"))
    optional = [f"{module}.{part}" for part in ("weight_zero_point", "weight_g_idx")]
    # Which of the optional ones there are decides how the parts are read.
    has_zeros = optional[0] in left
    packed = _take(
        left, (*names, *optional), (tensor.shape[0], width), partial(_from_words, quantization.bits, has_zeros), 2
    )
    if packed is None and shape is not None:
        left[f"{module}.weight_shape"] = shape
    return packed


def _numbers(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 [a, b] → int32 [a, b, 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)


def _scaled(block: tuple[int, int] | None, parts: list[Tensor]) -> Tensor:
    weight, scale, *zero = parts
    rows, columns = weight.shape

    def spread(numbers: Tensor) -> Tensor:
        if numbers.numel() == 1 or numbers.numel() == rows == numbers.shape[0]:
            return numbers.float().reshape(-1, 1)
        # The size of a block follows from the number of scales where the file does not say it.
        height, width = block or (-(-rows // numbers.shape[0]), -(-columns // numbers.shape[1]))
        return numbers.float().repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]

    values = weight.float()
    if zero and zero[0].dtype is torch.int8:
        values = values - spread(zero[0])
    return values * spread(scale)


def _from_awq(parts: list[Tensor]) -> Tensor:
    words, zero_words, scales = parts
    # Number i of a word belongs to column order[i].
    place = torch.tensor(_AWQ_ORDER).argsort()
    values, zeros = (_numbers(x, 4)[..., place].flatten(1) for x in (words, zero_words))
    group = values.shape[0] // scales.shape[0]
    zeros, scales = (x.repeat_interleave(group, 0) for x in (zeros, scales.float()))
    return ((values - zeros) * scales).t()


def _from_gptq(bits: int, zero_offset: int, parts: list[Tensor]) -> Tensor:
    words, zero_words, scales, *group_of = parts
    values = _numbers(words.t(), bits).flatten(1)  # [out, in]
    # The sum is a number of so many bits: a zero point of 0 is stored as the greatest.
    zeros = ((_numbers(zero_words, bits).flatten(1) + zero_offset) & ((1 << bits) - 1)).t()
    inputs = values.shape[1]
    groups = group_of[0].long() if group_of else torch.arange(inputs) // (inputs // scales.shape[0])
    return (values - zeros[:, groups]) * scales.float().t()[:, groups]


def _from_words(bits: int, has_zeros: bool, parts: list[Tensor]) -> Tensor:
    words, scale, *others = parts
    values = _numbers(words, bits).flatten(1)
    rows, columns = values.shape
    zeros = torch.full(scale.shape, 1 << (bits - 1), dtype=torch.int32)
    if has_zeros:  # packed along the rows
        zeros = _numbers(others[0].t(), bits).flatten(1).t()[:rows]
    groups = others[-1].long() if len(others) > has_zeros else torch.arange(columns) // (columns // scale.shape[1])
    return (values - zeros[:, groups]) * scale.float()[:, groups]


def _from_fp4(parts: list[Tensor]) -> Tensor:
    """Unpack blocks uint8 [E, out, in / 32, 16] and exponents uint8 [E, out, in / 32] → [E, in, out]."""
    blocks, exponents = parts
    table = torch.tensor([*_FP4, *(-value for value in _FP4)])
    values = torch.stack((table[(blocks & 15).int()], table[(blocks >> 4).int()]), -1).flatten(-2)
    return torch.ldexp(values, exponents.int().unsqueeze(-1) - 127).flatten(-2).transpose(1, 2)
