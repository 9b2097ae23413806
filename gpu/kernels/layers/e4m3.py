"""Numbers of 8 bits with 4 bits of exponent and 3 of mantissa (E4M3 of the OCP 8-bit Floating Point Specification 1.0),
in which a KV pool may keep keys and values.

Kernels take them as bytes. GPUs from Hopper on have an instruction that reads them; for others they are read by their
bits, in twice as many instructions for each key. All write them by their bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...types.attention import E4M3
from ..jit import jit, tl

E4M3_MAX = 448.0


def to_e4m3(x: Tensor, scale: float) -> Tensor:
    """Return the numbers nearest to x / scale, ties to even; ±448 for what lies beyond, and NaN for NaN."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (1.0 / scale)).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def as_bytes(*tensors: Tensor) -> list[Tensor]:
    """Return E4M3 numbers as bytes, in the same memory, and other tensors as they are. Kernels take them so, and torch
    copies bytes where it has no copy of E4M3."""
    return [x.view(torch.uint8) if x.dtype is E4M3 else x for x in tensors]


@jit
def from_e4m3_bytes(code):
    """Return the values of bytes, float16; of NaN ±480."""
    # The bits of an 8-bit float are those of a 16-bit one whose exponent is less by 8, but for the sign, which a shift
    # to the right doubles.
    half = ((code.to(tl.int16) << 8) >> 1) & -0x4080
    return half.to(tl.float16, bitcast=True) * 256.0


@jit
def to_e4m3_bytes(x):
    """Do what `to_e4m3` does with float32 x, already divided by the scale, in bytes."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    # 20 bits of the mantissa are dropped, and the exponent is less by 120.
    rounded = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2⁻⁶ numbers are multiples of 2⁻⁹, the distance of float32 numbers behind 2¹⁴.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, rounded)
    code = tl.where(x == x, code, 0x7F)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (sign | code).to(tl.uint8)
