"""Quantized weights of a checkpoint, as the matrices that they stand for.

A matrix is stored as several tensors: packed numbers, scales, zero points. `unpacked` names one tensor for them, under
the name that the matrix has in an unquantized checkpoint. Reading it gives a `CodedWeight`, which a product on a GPU
takes as it is, or the weights in float32, which are then rounded to the model's dtype. Activations are not quantized,
whatever the checkpoint was calibrated for.

    fp8, compressed-tensors, modelopt   weight · scale, the scale per tensor, per row, or per block of (most often) 128
                                        × 128
    awq                                 (q − zero) · scale, q [in, out / 8] int32, columns in the order 0 2 4 6 1 3 5 7
    gptq                                the same, q [in · bits / 32, out], groups of inputs in `g_idx`; zeros less 1 in
                                        its first form
    compressed-tensors, packed          (q − 2^(bits−1)) · scale, or with zero points, q [out, in · bits / 32]
    mxfp4                               pairs of 4-bit floats with one exponent for 32 (OCP Microscaling Formats 1.0)
    nvfp4 (modelopt, compressed-tensors)  pairs of 4-bit floats with an 8-bit float for 16, which modelopt multiplies
                                        with one scale of the tensor, and compressed-tensors divides by it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from ....core.errors import Problem
from ....core.model_shape.matrices import Matrix, matrix_named
from ....core.model_shape.quantization import CONFIG_KEYS, WEIGHT_BITS
from ....core.model_shape.schemes.read import read_scheme
from ....core.model_shape.schemes.scheme import Scheme
from ....core.parsing import ConfigReader
from ...types.coded import Code, CodedWeight, in_halves
from ...types.shards import ShardCut
from .tensor_files import CheckpointError, StoredTensor, read_tensors

_DECODED = {  # by the method: the formats whose tensors are read, those of integers by their bits
    **dict.fromkeys(("fp8", "fbgemm_fp8"), ("fp8",)), "mxfp4": ("mxfp4",), "awq": ("int4",),
    "gptq": ("int2", "int4", "int8"), "auto-round": ("int2", "int4", "int8"), "quark": ("fp8", "mxfp4"),
    "modelopt": ("fp8", "nvfp4", "nvfp4-w16"), "compressed-tensors": ("fp8", "nvfp4", "mxfp4", "int4", "int8"),
}  # fmt: skip
METHODS = tuple(_DECODED)
_FORMAT_KEYS = {
    "awq": "bits", "gptq": "bits", "auto-round": "bits", "modelopt": "quant_algo", "quark": "global_quant_config",
}  # fmt: skip
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_SCALES = ("weight_scale_inv", "weight_scale")
# Scales of activations and of a KV cache, and what other tensors say already.
_UNUSED = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "k_scale",
    "v_scale",
    "kv_scale",
    "output_scale",
    "input_scale_ub",
)
_NVFP4_GROUP, _MXFP4_GROUP = 16, 32


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint's matrices are stored."""

    scheme: Scheme  # the format of each
    layout: str  # of integers in groups: awq, gptq or compressed-tensors
    block: tuple[int, int] | None = None  # rows and columns of a scale
    zero_offset: int = 0  # what must be added to stored zero points
    shuffled: bool = False  # the inputs of a group do not stand together (GPTQ with `desc_act`)

    @property
    def kv_format(self) -> str | None:
        """The format of the KV cache for which scales are stored, as `core.model_shape` reads it."""
        return self.scheme.kv

    def bits_of(self, module: str) -> int:
        """Return the bits of a matrix that is stored as integers."""
        found = self.scheme.format_of(matrix_named(module)) or self.scheme.base or "int4"
        return int(found[3]) if found.startswith("int") else 4


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A matrix in several tensors, unread; looks like a `StoredTensor`."""

    path: Path
    shape: tuple[int, ...]
    parts: Mapping[str, StoredTensor]  # by their names in the file
    # Of the parts, in their order: in stored numbers, or in float32 where no `CodedWeight` says what they mean.
    unpack: Callable[[list[Tensor]], CodedWeight | Tensor]
    dtype: str = "F32"
    is_transposed: bool = False  # a matrix is published as [in, out]


AnyTensor = StoredTensor | PackedTensor


def read_quantization(reader: ConfigReader, matrices: Callable[[], Sequence[Matrix]]) -> Quantization | None:
    """Read how the weights are quantized, the model's `matrices`; None if they are not. What cannot be read is noted in
    `reader`."""
    key = next((key for key in CONFIG_KEYS if reader.get(key) is not None), None)
    scheme = read_scheme(reader, matrices)
    if scheme is None or key is None:
        return None
    config, layout = reader.under(key), scheme.method
    if layout not in METHODS:
        config.problem(
            "quant_method", f"{layout!r} is none of {', '.join(METHODS)}; another checkpoint of the model may be"
        )
        return None
    for format_key, name in scheme.formats():
        own = name if name in WEIGHT_BITS and name != "int8" else name[:4]
        if own not in _DECODED[layout]:
            known = ", ".join(_DECODED[layout])
            config.problem(
                format_key or _FORMAT_KEYS.get(layout, "quant_method"),
                f"{name} of {layout} is not implemented; {known} are",
            )
    transforms = config.get("transform_config")
    if isinstance(transforms, Mapping) and transforms.get("config_groups"):
        config.problem("transform_config", "matrices that are rotated beside their quantization are not implemented")
    version = str(config.get("version") or "gemm").lower()
    if layout == "awq" and version != "gemm":
        config.problem("version", f"only the layout 'gemm' is implemented, got {version!r}")
    if layout == "auto-round":
        layout = _auto_round_layout(config)
    block, sizes = config.integers("weight_block_size"), None
    if block:
        if len(block) != 2 or not all(block):
            config.problem("weight_block_size", f"must be two sizes, got {list(block)}")
        else:
            sizes = (block[0], block[1])
    first_form = layout == "gptq" and config.get("checkpoint_format", "gptq") == "gptq"
    shuffled = layout == "gptq" and bool(config.get("desc_act"))
    return Quantization(scheme, layout, sizes, int(first_form), shuffled)


def _auto_round_layout(config: ConfigReader) -> str:
    """Return the layout in which AutoRound has packed the numbers, which is one of AWQ or GPTQ."""
    packing = config.get("packing_format", config.get("backend"))
    for name in ("gptq", "awq"):
        if packing == f"auto_round:auto_{name}":
            return name
    config.problem("packing_format", f"expected auto_round:auto_gptq or auto_round:auto_awq, found {packing!r}")
    return "gptq"


def unpacked(stored: Mapping[str, StoredTensor], quantization: Quantization) -> dict[str, AnyTensor]:
    """Return the tensors under the names of an unquantized checkpoint.
    What lacks a part keeps its own name, which no model knows."""
    left: dict[str, StoredTensor] = {n: t for n, t in stored.items() if n.rpartition(".")[2] not in _UNUSED}
    found: dict[str, AnyTensor] = {}
    for name, tensor in list(left.items()):
        module, _, last = name.rpartition(".")
        if last == "qweight":
            packed = _grouped(left, module, tensor, quantization)
        elif last == "weight_packed" and tensor.dtype == "U8":
            packed = _small_floats(left, name, tensor, ("weight_scale", "weight_global_scale"), divides=True)
        elif last == "weight_packed":
            packed = _compressed(left, module, tensor, quantization)
        elif last == "weight" and tensor.dtype == "U8":
            packed = _small_floats(left, name, tensor, ("weight_scale", "weight_scale_2"), divides=False)
        elif last == "weight" and tensor.dtype in ("F8_E4M3", "I8"):
            scale = next((f"{module}.{s}" for s in _SCALES if f"{module}.{s}" in left), None)
            unpack = partial(_scaled, quantization.block)
            packed = _take(left, (name, scale, f"{module}.weight_zero_point"), tensor.shape, unpack, 2)
        elif last.endswith("_blocks"):
            shape = (tensor.shape[0], tensor.shape[2] * 32, tensor.shape[1]) if len(tensor.shape) == 4 else ()
            packed = _take(left, (name, f"{name.removesuffix('_blocks')}_scales"), shape, _from_blocks)
            packed = packed and replace(packed, is_transposed=True)
            name = name.removesuffix("_blocks")
        else:
            continue
        if packed is not None:
            found[f"{module}.weight" if last in ("qweight", "weight_packed") else name] = packed
    return {**left, **found}


def bytes_saved(stored: Mapping[str, StoredTensor], quantization: Quantization, dtype: torch.dtype) -> int:
    """Return by how many bytes the matrices are smaller as they are stored than in `dtype`.

    Zero points and scales count as 32 bits.
    """
    saved = 0
    for name, tensor in unpacked(stored, quantization).items():
        if not isinstance(tensor, PackedTensor):
            continue
        codes, *others = tensor.parts.values()
        is_byte = codes.dtype in ("F8_E4M3", "I8")
        bits = quantization.bits_of(name.removesuffix(".weight"))
        if not is_byte and codes.dtype != "U8" and (bits != 4 or quantization.shuffled):
            continue  # it is unpacked in any case
        numbers = sum(math.prod(other.shape) for other in others)
        if is_byte:  # each row has the scales of its block
            numbers = tensor.shape[0] * (others[0].shape[1] if len(others[0].shape) == 2 else 1)
        weights = math.prod(tensor.shape)
        saved += weights * dtype.itemsize - weights // (1 if is_byte else 2) - 4 * numbers
    return saved


def read_tensor(tensor: AnyTensor, name: str) -> CodedWeight | Tensor:
    """Read one tensor; of a quantized matrix its stored numbers, or float32 where they have no `CodedWeight`.

    Raises CheckpointError, also for scales that are not finite or do not fit the matrix.
    """
    if isinstance(tensor, StoredTensor):
        return dict(read_tensors({name: tensor}))[name]
    parts = dict(read_tensors(dict(tensor.parts)))
    for part, values in list(parts.items())[1:]:
        if values.is_floating_point() and not bool(values.float().isfinite().all()):
            raise CheckpointError(str(tensor.path), [Problem(part, "has scales that are not finite")])
    try:
        value = tensor.unpack([parts[part] for part in tensor.parts])
    except (RuntimeError, IndexError, ValueError, ZeroDivisionError) as error:
        sizes = ", ".join(f"{part} {list(values.shape)}" for part, values in parts.items())
        why = f"{error}: " if isinstance(error, ValueError) else ""
        raise CheckpointError(str(tensor.path), [Problem(name, f"its parts do not fit: {why}{sizes}")]) from error
    return value


def read_unpacked(
    stored: Mapping[str, AnyTensor], cuts: Mapping[str, ShardCut] = MappingProxyType({})
) -> Iterator[tuple[str, Tensor]]:
    """Do what `tensor_files.read_tensors` does; of quantized matrices yield the weights in float32, one at a time. A
    part of one is cut out of the whole: the scales of its blocks may be those of other rows, too."""
    yield from read_tensors({name: t for name, t in stored.items() if isinstance(t, StoredTensor)}, cuts)
    for name, tensor in stored.items():
        if isinstance(tensor, PackedTensor):
            value = read_tensor(tensor, name)
            if isinstance(value, CodedWeight):
                value = value.dense(torch.float32)
                value = value.transpose(-1, -2) if tensor.is_transposed else value
            yield name, cuts[name].of(value) if name in cuts else value


def _take(
    left: dict[str, StoredTensor],
    names: tuple[str | None, ...],
    shape: tuple[int, ...],
    unpack: Callable[[list[Tensor]], CodedWeight | Tensor],
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
    bits, (rows, columns) = quantization.bits_of(module), tensor.shape
    per_word = 32 // bits
    names = [f"{module}.{part}" for part in ("qweight", "qzeros", "scales")]
    if quantization.layout == "awq":
        return _take(left, tuple(names), (columns * per_word, rows), _from_awq)
    unpack = partial(_from_gptq, bits, quantization.zero_offset)
    return _take(left, (*names, f"{module}.g_idx"), (columns, rows * per_word), unpack, 3)


def _compressed(
    left: dict[str, StoredTensor], module: str, tensor: StoredTensor, quantization: Quantization
) -> PackedTensor | None:
    shape = left.pop(f"{module}.weight_shape", None)
    bits = quantization.bits_of(module)
    width = tensor.shape[1] * (32 // bits)
    names = tuple(f"{module}.{part}" for part in ("weight_packed", "weight_scale"))
    optional = [f"{module}.{part}" for part in ("weight_zero_point", "weight_g_idx")]
    # Which of the optional ones there are decides how the parts are read.
    has_zeros = optional[0] in left
    packed = _take(left, (*names, *optional), (tensor.shape[0], width), partial(_from_words, bits, has_zeros), 2)
    if packed is None and shape is not None:
        left[f"{module}.weight_shape"] = shape
    return packed


def _small_floats(
    left: dict[str, StoredTensor], name: str, tensor: StoredTensor, scales: tuple[str, str], divides: bool
) -> PackedTensor | None:
    """Take the parts of a matrix of 4-bit floats, with or without a scale of the whole."""
    module = name.rpartition(".")[0]
    shape = (*tensor.shape[:-1], tensor.shape[-1] * 2)
    return _take(left, (name, *(f"{module}.{s}" for s in scales)), shape, partial(_from_halves, divides), 2)


def _numbers(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 [a, b] → int32 [a, b, 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)


def _scaled(block: tuple[int, int] | None, parts: list[Tensor]) -> CodedWeight | Tensor:
    weight, scale, *zero = parts
    rows, columns = weight.shape

    def of_rows(numbers: Tensor) -> tuple[Tensor, int]:
        """Return the numbers with all rows, [rows, groups], and the size of a group."""
        if numbers.numel() == 1 or numbers.numel() == rows == numbers.shape[0]:
            return numbers.reshape(-1, 1).expand(rows, 1), columns
        # The size of a block follows from the number of scales where the file does not say it.
        height, width = block or (-(-rows // numbers.shape[0]), -(-columns // numbers.shape[1]))
        if (-(-rows // height), -(-columns // width)) != tuple(numbers.shape):
            raise ValueError(f"{tuple(numbers.shape)} scales")
        return numbers.repeat_interleave(height, 0)[:rows], width

    scales, group = of_rows(scale)
    if zero and zero[0].dtype is torch.int8:
        zeros, width = of_rows(zero[0])
        shift, spread = (
            x.float().repeat_interleave(size, 1)[:, :columns] for x, size in ((zeros, width), (scales, group))
        )
        return (weight.float() - shift) * spread
    codes = weight.view(torch.uint8)
    if weight.dtype is not torch.int8 and bool((codes & 0x7F == 0x7F).any()):
        raise ValueError("NaN")
    return CodedWeight(Code.INT8 if weight.dtype is torch.int8 else Code.E4M3, codes, scales.contiguous(), group)


def _from_awq(parts: list[Tensor]) -> CodedWeight:
    words, zero_words, scales = parts
    # Number i of a word belongs to column order[i].
    place = torch.tensor(_AWQ_ORDER).argsort()
    values, zeros = (_numbers(x, 4)[..., place].flatten(1).t() for x in (words, zero_words))
    return _in_groups(values, zeros, scales.t())


def _in_groups(values: Tensor, zeros: Tensor, scales: Tensor) -> CodedWeight:
    """Return numbers 0 … 15 [out, in] with zero points and scales [out, groups] as a weight."""
    group = values.shape[1] // scales.shape[1]
    if scales.shape != zeros.shape or scales.shape[1] * group != values.shape[1] or len(scales) != len(values):
        raise ValueError(f"{tuple(scales.shape)} scales")
    return CodedWeight(Code.UINT4, in_halves(values), scales.contiguous(), group, zeros.to(torch.uint8).contiguous())


def _from_gptq(bits: int, zero_offset: int, parts: list[Tensor]) -> CodedWeight | Tensor:
    words, zero_words, scales, *group_of = parts
    values = _numbers(words.t(), bits).flatten(1)  # [out, in]
    # The sum is a number of so many bits: a zero point of 0 is stored as the greatest.
    zeros = ((_numbers(zero_words, bits).flatten(1) + zero_offset) & ((1 << bits) - 1)).t()
    return _by_groups(values, zeros, scales.t(), bits, group_of)


def _from_words(bits: int, has_zeros: bool, parts: list[Tensor]) -> CodedWeight | Tensor:
    words, scale, *others = parts
    values = _numbers(words, bits).flatten(1)
    zeros = torch.full(scale.shape, 1 << (bits - 1), dtype=torch.int32)
    if has_zeros:  # packed along the rows
        zeros = _numbers(others[0].t(), bits).flatten(1).t()[: len(values)]
    return _by_groups(values, zeros, scale, bits, others[int(has_zeros) :])


def _by_groups(
    values: Tensor, zeros: Tensor, scales: Tensor, bits: int, group_of: list[Tensor]
) -> CodedWeight | Tensor:
    """Return a weight of numbers [out, in] with zero points and scales [out, groups]; `group_of`: of each input, if
    groups are not one behind the other."""
    in_order = torch.arange(values.shape[1]) // (values.shape[1] // scales.shape[1])
    groups = group_of[0].long() if group_of else in_order
    if bits == 4 and torch.equal(groups, in_order):
        return _in_groups(values, zeros, scales)
    return (values - zeros[:, groups]) * scales.float()[:, groups]


def _from_blocks(parts: list[Tensor]) -> CodedWeight:
    """Take blocks uint8 [E, out, in / 32, 16] and exponents uint8 [E, out, in / 32]."""
    blocks, exponents = parts
    return CodedWeight(Code.E2M1, blocks.flatten(-2), _powers_of_2(exponents), _MXFP4_GROUP)


def _from_halves(divides: bool, parts: list[Tensor]) -> CodedWeight:
    """Take pairs uint8 [out, in / 2] with scales [out, groups], 8-bit floats or exponents, and one scale of all."""
    codes, scales, *whole = parts
    group = codes.shape[1] * 2 // scales.shape[1]
    expected = _MXFP4_GROUP if scales.dtype is torch.uint8 else _NVFP4_GROUP
    if group != expected or len(scales) != len(codes):
        raise ValueError(f"{tuple(scales.shape)} scales")
    if scales.dtype is torch.uint8:
        return CodedWeight(Code.E2M1, codes, _powers_of_2(scales), group)
    # 16 bits hold each 8-bit float.
    factor = whole[0].float().reshape(1)
    factor = (1 / factor if divides else factor).expand(len(codes)).contiguous()
    return CodedWeight(Code.E2M1, codes, scales.to(torch.bfloat16), group, factors=factor)


def _powers_of_2(exponents: Tensor) -> Tensor:
    """Return 2^(e − 127) of uint8 exponents, in bfloat16, which holds all of them; 255 would be no number."""
    if bool((exponents == 255).any()):
        raise ValueError("exponents of 255")
    return torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127).to(torch.bfloat16)
