"""The entries of the request table that have changed since the last step, for executors.

The engine notes a few ranges per step; the list of cells, one per slot, is written out when an executor or a log reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


class WrittenRanges(NamedTuple):
    """Slots written at `[rows[i], starts[i] : starts[i] + counts[i]]` for all i, range after range. The arrays are never written."""

    rows: np.ndarray | int  # int [n], or a single range
    starts: np.ndarray | int
    counts: np.ndarray | int
    slots: np.ndarray  # int32 [sum of counts]


class TableWrites:
    """Entries of the request table, in order: `table[rows[i], columns[i]] = slots[i]`, int32 [n] each."""

    __slots__ = ("_ranges",)

    def __init__(self, ranges: Sequence[WrittenRanges] = ()) -> None:
        self._ranges = ranges

    @property
    def rows(self) -> np.ndarray:
        return self._joined(lambda written: np.repeat(written.rows, written.counts))

    @property
    def columns(self) -> np.ndarray:
        return self._joined(_columns)

    @property
    def slots(self) -> np.ndarray:
        return self._joined(lambda written: written.slots)

    def __repr__(self) -> str:
        return f"TableWrites(rows={self.rows!r}, columns={self.columns!r}, slots={self.slots!r})"

    def _joined(self, part: Callable[[WrittenRanges], np.ndarray]) -> np.ndarray:
        if not self._ranges:
            return np.empty(0, dtype=np.int32)
        return np.concatenate([part(written) for written in self._ranges], dtype=np.int32, casting="same_kind")


def _columns(written: WrittenRanges) -> np.ndarray:
    """Return starts[i] … starts[i] + counts[i] − 1 for all i, joined."""
    # Number c of the whole is starts[i] + (c − numbers before range i).
    before = np.cumsum(written.counts) - written.counts
    return np.repeat(written.starts - before, written.counts) + np.arange(written.slots.size)


NO_WRITES = TableWrites()
