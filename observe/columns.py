"""Columns that grow: of the requests that are open, of values kept to the end, and of tables written to disk as Parquet."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROW_GROUP = 1 << 16


class GrowingColumn:
    """An array with room to spare at its end."""

    def __init__(self, dtype: type) -> None:
        self._values = np.empty(1024, dtype=dtype)
        self._size = 0

    def extend(self, values: np.ndarray) -> None:
        end = self._size + len(values)
        if end > len(self._values):
            self._values = np.concatenate(
                [self._values[: self._size], np.empty(max(end, self._size), self._values.dtype)]
            )
        self._values[self._size : end] = values
        self._size = end

    @property
    def values(self) -> np.ndarray:
        """What was added so far; valid until the next `extend`."""
        return self._values[: self._size]


class OpenRequests:
    """One column entry (a *slot*) per request that is not over; −1 is "not yet". Memory follows the most ever open at once."""

    FIELDS = (
        "replica",
        "arrival_ns",
        "first_scheduled_ns",
        "first_token_ns",
        "last_token_ns",
        "prompt_len",
        "max_tokens",
        "num_cached",
        "num_output",
        "correct_drafts",
        "verify_rounds",
        "retractions",
    )

    def __init__(self) -> None:
        self.capacity = 0
        self.ids: list[str] = []
        self._free: list[int] = []
        self._grow(256)

    def open(self, request_id: str, replica: int, arrival_ns: int, prompt_len: int, max_tokens: int) -> int:
        if not self._free:
            self._grow(2 * self.capacity)
        slot = self._free.pop()
        self.ids[slot] = request_id
        self.table[:, slot] = (replica, arrival_ns, -1, -1, -1, prompt_len, max_tokens, 0, 0, 0, 0, 0)
        return slot

    def close(self, slots: np.ndarray) -> tuple[list[str], dict[str, np.ndarray]]:
        """Take the requests in `slots` int64 [n] out: their ids, and their columns by name."""
        taken = self.table[:, slots]
        numbers = slots.tolist()
        ids = [self.ids[slot] for slot in numbers]
        self._free.extend(reversed(numbers))
        return ids, dict(zip(self.FIELDS, taken, strict=True))

    def _grow(self, capacity: int) -> None:
        table = np.full((len(self.FIELDS), capacity), -1, dtype=np.int64)
        if self.capacity:
            table[:, : self.capacity] = self.table
        self.table = table
        self.ids.extend([""] * (capacity - self.capacity))
        self._free.extend(range(capacity - 1, self.capacity - 1, -1))
        self.capacity = capacity
        for name, column in zip(self.FIELDS, table, strict=True):
            setattr(self, name, column)


class ParquetColumns:
    """A Parquet file written in row groups, so that a million rows need the memory of one group.

    `fields` are (name, Arrow type name); a trailing "?" marks integers whose negative values are written as null.
    The library is imported when the first group is written.
    """

    def __init__(self, path: str | os.PathLike[str], fields: Sequence[tuple[str, str]]) -> None:
        self.path = Path(path)
        self._fields = fields
        self._pending: list[Mapping[str, Any]] = []
        self._rows = 0
        self._writer: Any = None

    def add(self, columns: Mapping[str, Any], rows: int) -> None:
        """Append `rows` rows: per field an array or a list of that length."""
        if not rows:
            return
        self._pending.append(columns)
        self._rows += rows
        if self._rows >= ROW_GROUP:
            self._write()

    def close(self) -> None:
        """Write what is left; without a single row an empty table is written."""
        if self._writer is None or self._rows:
            self._write()
        self._writer.close()

    def _write(self) -> None:
        import pyarrow
        from pyarrow import parquet

        if self._writer is None:
            schema = [(name, getattr(pyarrow, kind.rstrip("?"))()) for name, kind in self._fields]
            self._writer = parquet.ParquetWriter(self.path, pyarrow.schema(schema), compression="zstd")
        arrays = []
        for (name, kind), target in zip(self._fields, self._writer.schema, strict=True):
            parts = [columns[name] for columns in self._pending]
            if kind == "string":
                arrays.append(pyarrow.array([value for part in parts for value in part], type=target.type))
                continue
            values = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
            mask = values < 0 if kind.endswith("?") else None
            arrays.append(pyarrow.array(values, type=target.type, mask=mask))
        self._writer.write_table(
            pyarrow.Table.from_arrays(arrays, schema=self._writer.schema), row_group_size=ROW_GROUP
        )
        self._pending.clear()
        self._rows = 0
