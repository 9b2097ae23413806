"""Matrices that stay in the numbers of their checkpoint: a byte or half a byte each, with scales for groups of inputs.

All methods of `quantized` come down to one form. The weight at [o, i] is value(code) · scale[o, i // group], and with
zero points (value(code) − zero) · scale. It is computed in float32 and rounded once to the dtype of the activations, so
products are those of the weights that `quantized` reads; only the order of sums may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import reduce

import torch
from torch import Tensor

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the 4-bit floats 0 … 7 (E2M1; OCP Microscaling Formats 1.0, table 5); 8 … 15 are their negatives."""


class Code(Enum):
    """What the numbers of a matrix mean."""

    E4M3 = "e4m3"  # 8-bit floats, `torch.float8_e4m3fn`
    INT8 = "int8"
    UINT4 = "uint4"  # with zero points
    E2M1 = "e2m1"  # 4-bit floats

    @property
    def bits(self) -> int:
        return 8 if self in (Code.E4M3, Code.INT8) else 4


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A matrix [out, in], or one for each of E experts [E, out, in], in stored numbers."""

    code: Code
    codes: Tensor  # uint8 […, out, in · bits / 8]; of 4 bits the even input is in the low half of a byte
    scales: Tensor  # float […, out, groups]
    group: int  # inputs that share a scale
    zeros: Tensor | None = None  # uint8 […, out, groups]: UINT4 alone
    factors: Tensor | None = None  # float32 […, out]: what scales are multiplied by

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 8 // self.code.bits)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.codes, self.scales, self.zeros, self.factors) if part is not None)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weights […, out, in] in `dtype`."""
        values = self._values()
        if self.zeros is not None:
            values = values - self._spread(self.zeros)
        scales = self.scales.float()
        if self.factors is not None:
            scales = scales * self.factors.unsqueeze(-1)
        return (values * self._spread(scales)).to(dtype)

    def to(self, device: torch.device | str) -> CodedWeight:
        return self._of(lambda part: part.to(device))

    def rows(self, order: Tensor) -> CodedWeight:
        """Return the rows of a matrix in the order of `order` int64 [out]."""
        return self._of(lambda part: part[order])

    def viewed(self, shape: tuple[int, ...]) -> CodedWeight:
        """Return the same rows as matrices of `shape` […, out, in]."""
        rows = self.codes.dim() - 1
        return self._of(lambda part: part.reshape(*shape[:-1], *part.shape[rows:]))

    def _of(self, change: Callable[[Tensor], Tensor]) -> CodedWeight:
        zeros, factors = (None if part is None else change(part) for part in (self.zeros, self.factors))
        return CodedWeight(self.code, change(self.codes), change(self.scales), self.group, zeros, factors)

    def _values(self) -> Tensor:
        if self.code is Code.E4M3:
            return self.codes.view(torch.float8_e4m3fn).float()
        if self.code is Code.INT8:
            return self.codes.view(torch.int8).float()
        numbers = torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(-2)
        if self.code is Code.UINT4:
            return numbers.float()
        return torch.tensor([*FP4, *(-value for value in FP4)], device=numbers.device)[numbers.int()]

    def _spread(self, numbers: Tensor) -> Tensor:
        return numbers.float().repeat_interleave(self.group, -1)[..., : self.shape[-1]]


def in_halves(numbers: Tensor) -> Tensor:
    """Pack numbers 0 … 15 […, in] → uint8 […, in / 2]."""
    numbers = numbers.to(torch.uint8)
    return numbers[..., ::2] | numbers[..., 1::2] << 4


def stacked(parts: Sequence[CodedWeight]) -> CodedWeight | None:
    """Return one matrix of all rows, in order; None if the parts are not coded in one way."""
    first = parts[0]
    if any((part.code, part.group, part.scales.shape[-1]) != (first.code, first.group, first.scales.shape[-1])
           or (part.factors is None) != (first.factors is None) for part in parts):  # fmt: skip
        return None
    dtype = reduce(torch.promote_types, (part.scales.dtype for part in parts))

    def together(tensors: list[Tensor | None]) -> Tensor | None:
        found = [x for x in tensors if x is not None]
        return torch.cat(found) if found else None

    return CodedWeight(
        first.code,
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales.to(dtype) for part in parts]),
        first.group,
        together([part.zeros for part in parts]),
        together([part.factors for part in parts]),
    )
