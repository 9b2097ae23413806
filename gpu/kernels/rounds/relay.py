"""Relay cells: values that one step leaves on the device for the next step (`core.contract.future_map`). Row 0 is
padding and stays zero."""

from __future__ import annotations

from torch import Tensor

from ..constants import words
from ..jit import cdiv, jit, tl

BLOCK = 512
"""Words that one program copies."""


def relay_gather_torch(buffer: Tensor, rows: Tensor) -> Tensor:
    return buffer.index_select(0, rows)


def relay_scatter_torch_(buffer: Tensor, rows: Tensor, values: Tensor) -> None:
    buffer.index_copy_(0, rows, values.to(buffer.dtype))
    buffer[0].zero_()


@jit
def _gather_kernel(buffer, rows, out, row_words, BLOCK: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + entry)
    value = tl.load(buffer + row * row_words + column, mask=column < row_words)
    tl.store(out + entry * row_words + column, value, mask=column < row_words)


@jit
def _scatter_kernel(buffer, rows, values, row_words, BLOCK: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + entry)
    live = column < tl.where(row == 0, 0, row_words)
    tl.store(buffer + row * row_words + column, tl.load(values + entry * row_words + column, mask=live), mask=live)


def relay_gather_triton(buffer: Tensor, rows: Tensor) -> Tensor:
    out = buffer.new_empty(len(rows), *buffer.shape[1:])
    if out.numel():
        source, target = words(buffer, out)
        width = source.shape[1]
        _gather_kernel[(len(rows), cdiv(width, BLOCK))](source, rows, target, width, BLOCK=BLOCK)
    return out


def relay_scatter_triton_(buffer: Tensor, rows: Tensor, values: Tensor) -> None:
    if values.numel():
        target, source = words(buffer, values.to(buffer.dtype).contiguous())
        width = target.shape[1]
        _scatter_kernel[(len(rows), cdiv(width, BLOCK))](target, rows, source, width, BLOCK=BLOCK)
