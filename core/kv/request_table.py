"""The request table: which slot holds the KV of position j of each running request.

    slots[row]   [0, committed) final · [committed, allocated) ours, unwritten or rejected · [allocated, width) unused

Row 0 is the padding row: all its entries are slot 0, and lanes of a padded batch point at it.

The width of a row follows from the slots that speculative decoding needs, always with the maximum over the adaptive
candidates. Letters: S draft steps, k top-k, nd nodes of a verify tree (root included), p page size, L slots per decode
round, R the reserve of one request.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from typing import overload

import numpy as np
from numpy.typing import NDArray

from ..contract.arrays import Int32Array, Int64Array
from ..contract.step import RoundShape
from ..errors import ForedraftError, InvariantViolation

Lengths = NDArray[np.int64]


@overload
def ceil_to_page(x: int, page_size: int) -> int: ...
@overload
def ceil_to_page(x: Lengths, page_size: int) -> Lengths: ...
def ceil_to_page(x, page_size):
    """Round `x` (≥ 0, an int or an integer array) up to a multiple of `page_size`; an array gives a new one."""
    if page_size & (page_size - 1) == 0:
        return (x + (page_size - 1)) & -page_size
    return (x + (page_size - 1)) // page_size * page_size


def get_alloc_len_per_decode(largest: RoundShape, page_size: int, has_draft_kv: bool = True) -> int:
    """Return L, the most slots past the committed length that one decode round of one request writes.

    `largest` has the maxima over all candidates; the one of plain decoding is `PLAIN_ROUND` (1 slot). Draft branches
    and the verify window both start at the committed length, so they overlap and the greater one counts. With pages and
    branches each branch fills whole pages of its own, its part of the tail page included.
    """
    steps, topk, nodes = largest
    assert steps >= 0, f"steps is {steps}, expected at least 0"
    assert topk >= 1, f"topk is {topk}, expected at least 1"
    if page_size == 1 or topk == 1 or not has_draft_kv:
        return max(steps * topk, nodes)
    return max(ceil_to_page(page_size - 1 + steps, page_size) * topk, nodes)


def reserve_per_decode(alloc_len: int, overlap: bool) -> int:
    """Return R: what a request reserves past its committed length for a single round.

    In overlap mode the round before has not been seen yet and may still write L slots of its own.
    """
    return reserve_per_multi_step(alloc_len, max_rounds=1, rounds_in_flight=1 if overlap else 0)


def reserve_per_multi_step(alloc_len: int, max_rounds: int, rounds_in_flight: int) -> int:
    """Return what a multi-step of `max_rounds` rounds reserves past the committed length while `rounds_in_flight` are
    in flight.

    The caller limits it to the width of the row.
    """
    assert max_rounds >= 1, f"max_rounds is {max_rounds}, expected at least 1"
    assert rounds_in_flight >= 0, f"rounds_in_flight is {rounds_in_flight}, expected at least 0"
    return (max_rounds + rounds_in_flight) * alloc_len


def request_table_width(context_len: int, reserve: int, page_size: int) -> int:
    """Return slots in a row of the request table: the context and the reserve R, page aligned."""
    return ceil_to_page(context_len + reserve, page_size)


def recurrent_state_slots(max_running_requests: int, max_draft_tokens: int | None) -> int:
    """Return the state slots of a hybrid model: per request its committed state, and one for each node that a round may
    verify.
    """
    return max_running_requests * (1 + (max_draft_tokens or 0))


Index = NDArray[np.integer]


class RequestTableFull(ForedraftError):
    """No row is free. The table is unchanged."""


class InvalidRow(ForedraftError):
    """The released row is not taken, or does not exist. The table is unchanged."""


class RequestTable:
    """`num_rows` rows of `width` slot ids, and the epoch of each row's present owner.

    `slots` is int32 [num_rows + 1, width], with row 0 all zero. The operating system commits only the memory pages that
    are written. `epochs` is int64 [num_rows + 1]. A row's epoch increases when the row changes owner, so (row, epoch)
    names one stay of one request.
    """

    def __init__(self, num_rows: int, width: int) -> None:
        assert num_rows >= 0, f"num_rows is {num_rows}, expected at least 0"
        assert width >= 0, f"width is {width}, expected at least 0"
        self.num_rows = num_rows
        self.width = width
        self.slots: Int32Array = _zeros_in_small_pages(num_rows + 1, width)
        self.epochs: Int64Array = np.zeros(num_rows + 1, dtype=np.int64)
        self._free_rows = list(range(num_rows, 0, -1))
        self._taken = bytearray(num_rows + 1)
        # The same memory as one line: a single index costs a fraction of a pair of them.
        self._flat = self.slots.reshape(-1)
        self._counting = np.arange(max(width, 1), dtype=np.intp)
        self._row_width = np.intp(width)

    @property
    def num_free_rows(self) -> int:
        """Rows that `acquire` could hand out now."""
        return len(self._free_rows)

    def acquire(self) -> int:
        """Take a row (1 … num_rows), increase its epoch, and return it. Raises `RequestTableFull` if no row is free.

        The row released last is taken first. It still contains old slot ids, which are never read before they are
        overwritten.
        """
        if not self._free_rows:
            raise RequestTableFull(f"all {self.num_rows} rows of the request table are taken")
        row = self._free_rows.pop()
        self._taken[row] = 1
        self.epochs[row] += 1
        return row

    def release(self, row: int) -> None:
        """Give a row back. Raises `InvalidRow` if it is not taken. The caller frees its slots."""
        if not 0 < row <= self.num_rows:
            raise InvalidRow(f"row {row} is outside 1..{self.num_rows}")
        if not self._taken[row]:
            raise InvalidRow(f"row {row} is not taken: released twice, or never acquired")
        self._taken[row] = 0
        self._free_rows.append(int(row))

    def is_taken(self, row: int) -> bool:
        return 0 < row <= self.num_rows and self._taken[row] == 1

    def write(self, rows: Index, starts: Index, counts: Index, slots: NDArray[np.int32]) -> None:
        """Write `slots` at `[rows[i], starts[i] : starts[i] + counts[i]]` for all i, one after the other.

        `rows`, `starts`, `counts`: integers [n], `slots`: int32 [sum of counts]. A row may occur several times as long
        as its ranges do not overlap. Raises `InvariantViolation` (ALLOC-07) and writes nothing where a range does not
        fit the row.
        """
        cells = self._cells(rows, starts, counts)
        if cells.size != slots.size:
            raise InvariantViolation("ALLOC-07", f"ranges of {counts.tolist()} slots do not take {slots.size} slots")
        self._flat[cells] = slots

    def write_row(self, row: int, start: int, slots: NDArray[np.int32]) -> None:
        """Write `slots` int32 [n] at `[row, start : start + n]`; raises as `write` does."""
        count = slots.size
        if not (0 <= row <= self.num_rows and start >= 0 and start + count <= self.width):
            message = f"[{row}, {start}:{start + count}] is outside {self.num_rows + 1} × {self.width}"
            raise InvariantViolation("ALLOC-07", message)
        self.slots[row, start : start + count] = slots

    def gather(self, row: int, start: int, stop: int) -> NDArray[np.int32]:
        """Return a copy of the slots of positions `start … stop − 1` of one row: int32 [stop − start]."""
        if not (0 <= row <= self.num_rows and 0 <= start <= stop <= self.width):
            message = f"[{row}, {start}:{stop}] is outside {self.num_rows + 1} × {self.width}"
            raise InvariantViolation("ALLOC-07", message)
        return self.slots[row, start:stop].copy()

    def gather_ragged(self, rows: Index, starts: Index, counts: Index) -> NDArray[np.int32]:
        """Return the slots at `[rows[i], starts[i] : starts[i] + counts[i]]` for all i, as int32 [sum of counts]."""
        return self._flat[self._cells(rows, starts, counts)]

    def check(self) -> None:
        """Recount the rows from scratch; raise `InvariantViolation` with the id of what is broken."""
        if self._taken[0] or 0 in self._free_rows or self.slots[0].any():
            raise InvariantViolation("ALLOC-12", "the padding row 0 is in circulation, or was written")
        free = np.bincount(np.array(self._free_rows, dtype=np.int64), minlength=self.num_rows + 1)
        if free.size != self.num_rows + 1 or free.max(initial=0) > 1:
            raise InvariantViolation("ALLOC-02", "a row stands twice in the free list, or does not exist")
        taken = np.frombuffer(bytes(self._taken), dtype=np.uint8)
        if (taken[1:] + free[1:] != 1).any():
            raise InvariantViolation("ALLOC-01", "a row is both free and taken, or neither")
        if (taken[1:] > self.epochs[1:]).any():
            raise InvariantViolation("RELAY-03", "a row is taken whose epoch was never counted up")

    def _cells(self, rows: Index, starts: Index, counts: Index) -> NDArray[np.intp]:
        """Return the cells of ragged ranges as indices into the flat table, intp [sum of counts].

        The ends of the ranges are checked instead of their cells: in the flat table a range too long runs into the next
        row.
        """
        if not len(rows):
            return self._counting[:0]
        stops = starts + counts
        # Argmax and a lookup take a third of the time of max() on arrays this small.
        last_row, last_column, fewest = rows[rows.argmax()], stops[stops.argmax()], counts[counts.argmin()]
        if (
            rows[rows.argmin()] < 0
            or last_row > self.num_rows
            or starts[starts.argmin()] < 0
            or last_column > self.width
            or fewest < 0
        ):
            raise InvariantViolation(
                "ALLOC-07",
                f"row {last_row}, column {last_column} or {fewest} slots are outside {self.num_rows + 1} × {self.width}",
            )
        first = rows * self._row_width + starts
        if fewest == counts[counts.argmax()]:
            # All ranges are equal, which is common in a decode round.
            return first if fewest == 1 else (first[:, None] + self._counting[:fewest]).ravel()
        # Element c of the result, which lies in range i, is first[i] + c − (number of elements before range i).
        first -= np.add.accumulate(counts)
        first += counts
        cells = first.repeat(counts)
        cells += self._counting[: cells.size] if cells.size <= self.width else np.arange(cells.size)
        return cells


def _zeros_in_small_pages(num_rows: int, width: int) -> Int32Array:
    """Return zeros, int32 [num_rows, width].

    NumPy asks Linux for huge pages where an array is large. The first slot of each row would then commit 2 MiB.
    """
    if sys.platform != "linux" or not num_rows * width:
        return np.zeros((num_rows, width), dtype=np.int32)
    memory = mmap.mmap(-1, num_rows * width * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # of a kernel without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=np.int32).reshape(num_rows, width)
