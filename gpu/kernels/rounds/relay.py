"""Relay cells: values that one step leaves on the device for the next step (`core.contract.future_map`). Row 0 is
padding and stays zero."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..constants import words
from ..jit import cdiv, jit, tl

BLOCK = 512
"""Words that one program copies of each buffer."""
COPIED = 3  # buffers of one launch


def relay_gather_torch(buffers: Sequence[Tensor], rows: Tensor) -> list[Tensor]:
    return [buffer.index_select(0, rows) for buffer in buffers]


def relay_scatter_torch_(buffers: Sequence[Tensor], rows: Tensor, values: Sequence[Tensor]) -> None:
    for buffer, stored in zip(buffers, values, strict=True):
        buffer.index_copy_(0, rows, stored.to(buffer.dtype))
        buffer[0].zero_()


@jit
def _copy_entry(source, target, row, entry, row_words, column, GATHER: tl.constexpr):
    """Copy some words of a row to or from the place of its entry; row 0 is not written."""
    if GATHER:
        live = column < row_words
        tl.store(target + entry * row_words + column, tl.load(source + row * row_words + column, mask=live), mask=live)
    else:
        live = column < tl.where(row == 0, 0, row_words)
        tl.store(target + row * row_words + column, tl.load(source + entry * row_words + column, mask=live), mask=live)


@jit
def _copy_kernel(
    rows,
    source_0,
    source_1,
    source_2,
    target_0,
    target_1,
    target_2,
    row_words_0,
    row_words_1,
    row_words_2,
    GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the rows of up to three buffers, each in words of its own."""
    entry = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + entry)
    _copy_entry(source_0, target_0, row, entry, row_words_0, column, GATHER)
    if source_1 is not None:
        _copy_entry(source_1, target_1, row, entry, row_words_1, column, GATHER)
    if source_2 is not None:
        _copy_entry(source_2, target_2, row, entry, row_words_2, column, GATHER)


def _copy(rows: Tensor, pairs: Sequence[tuple[Tensor, Tensor]], gather: bool) -> None:
    """Copy between pairs of (source, target), as many in one launch as the kernel takes."""
    pairs = [(source, target) for source, target in pairs if source.numel() and target.numel()]
    for some in (pairs[i : i + COPIED] for i in range(0, len(pairs), COPIED)):
        missing = [None] * (COPIED - len(some))
        sources, targets = zip(*(words(*pair) for pair in some), strict=True)
        widths = [source.shape[1] for source in sources]
        grid = len(rows), cdiv(max(widths), BLOCK)
        arguments = (*sources, *missing, *targets, *missing, *widths, *missing)
        _copy_kernel[grid](rows, *arguments, GATHER=gather, BLOCK=BLOCK)


def relay_gather_triton(buffers: Sequence[Tensor], rows: Tensor) -> list[Tensor]:
    out = [buffer.new_empty(len(rows), *buffer.shape[1:]) for buffer in buffers]
    _copy(rows, list(zip(buffers, out, strict=True)), gather=True)
    return out


def relay_scatter_triton_(buffers: Sequence[Tensor], rows: Tensor, values: Sequence[Tensor]) -> None:
    stored = [x.to(buffer.dtype).contiguous() for buffer, x in zip(buffers, values, strict=True)]
    _copy(rows, list(zip(stored, buffers, strict=True)), gather=False)
