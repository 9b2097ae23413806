"""The request table: which slot holds the KV of position j of each running request.

    slots[row]   [0, committed) final · [committed, allocated) ours, unwritten or rejected · [allocated, width) nobody's

Row 0 is the padding row: all its entries are slot 0, and lanes of a padded batch point at it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import ForetokenError, InvariantViolation

Index = NDArray[np.integer]


class RequestTableFull(ForetokenError):
    """Every row belongs to a request. The table is unchanged."""


class InvalidRow(ForetokenError):
    """A row was released that nobody holds, or that does not exist. The table is unchanged."""


class RequestTable:
    """`num_rows` rows of `width` slot ids, and the epoch of each row's present owner.

    `slots`   int32 [num_rows + 1, width], row 0 all zero. The memory is committed by the system only where it is
    written. `epochs`  int64 [num_rows + 1], counted up when a row changes owner: (row, epoch) names a request's stay
    for ever.
    """

    __slots__ = ("_counting", "_free_rows", "_held", "epochs", "num_rows", "slots", "width")

    def __init__(self, num_rows: int, width: int) -> None:
        assert num_rows >= 0, f"num_rows is {num_rows}, expected at least 0"
        assert width >= 0, f"width is {width}, expected at least 0"
        self.num_rows = num_rows
        self.width = width
        self.slots = np.zeros((num_rows + 1, width), dtype=np.int32)
        self.epochs = np.zeros(num_rows + 1, dtype=np.int64)
        self._free_rows = list(range(num_rows, 0, -1))
        self._held = bytearray(num_rows + 1)
        self._counting = np.arange(max(width, 1), dtype=np.int32)

    @property
    def num_free_rows(self) -> int:
        """Rows that `acquire` could hand out now."""
        return len(self._free_rows)

    def acquire(self) -> int:
        """Take a row (1 … num_rows), count its epoch up, and return it; `RequestTableFull` if there is none.

        The row released last is taken first. Its old slot ids are still in it: only what is written is read.
        """
        if not self._free_rows:
            raise RequestTableFull(f"all {self.num_rows} rows of the request table are taken")
        row = self._free_rows.pop()
        self._held[row] = 1
        self.epochs[row] += 1
        return row

    def release(self, row: int) -> None:
        """Give a row back; `InvalidRow` if it is not held. Its slots are the caller's to free."""
        if not 0 < row <= self.num_rows:
            raise InvalidRow(f"row {row} is outside 1..{self.num_rows}")
        if not self._held[row]:
            raise InvalidRow(f"row {row} is not held: released twice, or never acquired")
        self._held[row] = 0
        self._free_rows.append(int(row))

    def is_held(self, row: int) -> bool:
        """Whether the row belongs to a request now."""
        return 0 < row <= self.num_rows and self._held[row] == 1

    def write(self, rows: Index, starts: Index, counts: Index | int, slots: NDArray[np.int32]) -> tuple[Index, Index]:
        """Write `slots` at `[rows[i], starts[i] : starts[i] + counts[i]]` for all i, one after the other.

        `rows`, `starts`, `counts`: integers [n] (`counts` may be one int for all), `slots`: int32 [sum of counts].
        Returns the cells written, in the order of `slots`: their rows and columns, int32 [sum of counts] each, so that
        a device copy of the table can follow. A row may occur several times as long as its ranges do not overlap.
        Raises `InvariantViolation` (ALLOC-07) and writes nothing where a range does not fit the row.
        """
        table_rows, table_cols = self._cells(rows, starts, counts, slots.size)
        try:
            self.slots[_as_index(table_rows), _as_index(table_cols)] = slots
        except IndexError as error:
            raise InvariantViolation("ALLOC-07", f"a write outside the request table: {error}") from None
        return table_rows, table_cols

    def write_row(self, row: int, start: int, slots: NDArray[np.int32]) -> tuple[Index, Index]:
        """Write `slots` int32 [n] at `[row, start : start + n]`; returns the cells and raises as `write` does."""
        count = slots.size
        if not (0 <= row <= self.num_rows and start >= 0 and start + count <= self.width):
            raise InvariantViolation(
                "ALLOC-07", f"[{row}, {start}:{start + count}] is outside {self.num_rows + 1} × {self.width}"
            )
        self.slots[row, start : start + count] = slots
        return np.full(count, row, dtype=np.int32), self._counting[start : start + count]

    def gather(self, row: int, start: int, stop: int) -> NDArray[np.int32]:
        """A copy of the slots of positions `start … stop − 1` of one row: int32 [stop − start]."""
        if not (0 <= row <= self.num_rows and 0 <= start <= stop <= self.width):
            raise InvariantViolation(
                "ALLOC-07", f"[{row}, {start}:{stop}] is outside {self.num_rows + 1} × {self.width}"
            )
        return self.slots[row, start:stop].copy()

    def gather_ragged(self, rows: Index, starts: Index, counts: Index | int) -> NDArray[np.int32]:
        """The slots at `[rows[i], starts[i] : starts[i] + counts[i]]` for all i, joined: int32 [sum of counts]."""
        total = counts * len(rows) if isinstance(counts, int) else int(np.add.reduce(counts))
        table_rows, table_cols = self._cells(rows, starts, counts, total)
        try:
            return self.slots[_as_index(table_rows), _as_index(table_cols)]
        except IndexError as error:
            raise InvariantViolation("ALLOC-07", f"a read outside the request table: {error}") from None

    def check(self) -> None:
        """Recount the rows from scratch; raise `InvariantViolation` with the id of what is broken."""
        if self._held[0] or 0 in self._free_rows or self.slots[0].any():
            raise InvariantViolation("ALLOC-12", "the padding row 0 is in circulation, or was written")
        free = np.bincount(np.array(self._free_rows, dtype=np.int64), minlength=self.num_rows + 1)
        if free.size != self.num_rows + 1 or free.max(initial=0) > 1:
            raise InvariantViolation("ALLOC-02", "a row stands twice in the free list, or does not exist")
        held = np.frombuffer(bytes(self._held), dtype=np.uint8)
        if (held[1:] + free[1:] != 1).any():
            raise InvariantViolation("ALLOC-01", "a row is both free and held, or neither")
        if (held[1:] > self.epochs[1:]).any():
            raise InvariantViolation("RELAY-03", "a row is held whose epoch was never counted up")

    def _cells(self, rows: Index, starts: Index, counts: Index | int, total: int) -> tuple[Index, Index]:
        """Row and column of each cell of a ragged range, int32 [total] each, never aliases of the arguments.

        A decode round gives every row the same number of slots more often than not, hence the two fast paths.
        """
        n = len(rows)
        if isinstance(counts, int):
            count, uniform = counts, True
        else:
            count = int(counts[0]) if n else 0
            uniform = count * n == total and np.count_nonzero(counts == count) == n
        if uniform:
            if count * n != total or count < 0:
                raise InvariantViolation("ALLOC-07", f"{n} ranges of {count} slots do not take {total} slots")
            if count == 1:
                return rows.astype(np.int32), starts.astype(np.int32)
            if count > self.width:
                raise InvariantViolation("ALLOC-07", f"{count} slots do not fit a row of {self.width}")
            cols = starts.astype(np.int32)[:, None] + self._counting[:count]
            return rows.astype(np.int32).repeat(count), cols.ravel()
        ends = np.add.accumulate(counts)
        if ends[-1] != total or np.minimum.reduce(counts) < 0:
            raise InvariantViolation("ALLOC-07", f"ranges of {counts.tolist()} slots do not take {total} slots")
        # Cell number c of the whole lies in column starts[i] + (c − cells before range i).
        shifts = (starts - ends + counts).astype(np.int32)
        counting = self._counting[:total] if total <= self.width else np.arange(total, dtype=np.int32)
        return rows.astype(np.int32).repeat(counts), shifts.repeat(counts) + counting


def _as_index(cells: NDArray[np.int32]) -> NDArray[np.intp]:
    """`cells` as an index. Read as unsigned, a negative one is out of bounds instead of counting from the end; NumPy indexes
    by intp several times faster than by any other integer."""
    return cells.view(np.uint32).astype(np.intp)
