"""Relay cells: what one step leaves on the device for the next one (`core.future_map`). Row 0 is padding and stays zero."""

from __future__ import annotations

from torch import Tensor


def relay_gather_torch(buffer: Tensor, rows: Tensor) -> Tensor:
    return buffer.index_select(0, rows)


def relay_scatter_torch_(buffer: Tensor, rows: Tensor, values: Tensor) -> None:
    buffer.index_copy_(0, rows, values.to(buffer.dtype))
    buffer[0].zero_()


def relay_bytes(num_rows: int, bytes_per_row: int) -> int:
    """The row numbers, and every cell read and written once."""
    return num_rows * (8 + 2 * bytes_per_row)
