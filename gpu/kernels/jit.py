"""Triton where it is installed. Without it the kernels stay plain functions without a caller:
the torch twins need no Triton."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ...core.errors import ForedraftError

try:
    import triton
    import triton.language as tl
except ImportError:  # Triton has wheels for Linux only
    triton = None
    tl = None

COUNTS = frozenset(
    {"columns", "least", "max_position", "most", "n", "nodes", "num_nodes", "num_rows", "steps", "width"}
)
"""Names of kernel parameters that count tokens, rows or nodes of a batch;
strides and sizes of a model are none of them."""


def jit(function: Callable[..., Any]) -> Any:
    """Apply `triton.jit`, or return the function itself where there is no Triton.

    Integers whose value changes from launch to launch are not specialised. Triton would compile the kernel anew for 1
    and for multiples of 16, in the middle of serving. Rounds of other step counts would then run other machine code.
    """
    if triton is None:
        return function
    names = inspect.signature(function).parameters
    return triton.jit(function, do_not_specialize=[name for name in names if name in COUNTS])


@contextmanager
def recorded(on_launch: Callable[[str, Mapping[str, Any]], None]) -> Iterator[None]:
    """Call `on_launch(kernel's name, arguments by name)` in place of every launch; nothing is compiled or computed.
    Raises ForedraftError without Triton."""
    if triton is None:
        raise ForedraftError("launches are counted with Triton, which has wheels for Linux only")
    kernels: Any = triton.JITFunction

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        on_launch(kernel.fn.__name__, dict(zip(kernel.arg_names, args, strict=False)) | options)

    run, kernels.run = kernels.run, record
    try:
        yield
    finally:
        kernels.run = run


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is ≥ n, at least 1: the sizes that a block may have."""
    return 1 << max(n - 1, 0).bit_length()


__all__ = ["cdiv", "jit", "next_power_of_2", "recorded", "tl", "triton"]
