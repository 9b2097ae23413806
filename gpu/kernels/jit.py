"""Triton where it is installed. Without it the kernels stay plain functions without a caller: the torch twins need no Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:  # Triton has wheels for Linux only
    triton = None
    tl = None


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`, or the function itself where there is no Triton."""
    return function if triton is None else triton.jit(function)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is ≥ n, at least 1: the sizes that a block may have."""
    return 1 << max(n - 1, 0).bit_length()
