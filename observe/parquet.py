"""The tables that a run leaves on disk, one row per request and one per round, written as Parquet while it runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROW_GROUP = 1 << 16

REQUEST_FIELDS = (
    ("request_id", "string"),
    ("replica", "int32"),
    ("arrival_ns", "int64"),
    ("first_scheduled_ns", "int64?"),
    ("first_token_ns", "int64?"),
    ("finish_ns", "int64"),
    ("prompt_len", "int32"),
    ("num_cached", "int32"),
    ("num_output", "int32"),
    ("correct_drafts", "int32"),
    ("verify_rounds", "int32"),
    ("retractions", "int32"),
    ("reason", "string"),
)
ROUND_FIELDS = (
    ("time_ns", "int64"),
    ("replica", "int32"),
    ("step_id", "int64"),
    ("prefill_tokens", "int32"),
    ("decode_rows", "int32"),
    ("steps", "int32?"),
    ("num_draft_tokens", "int32?"),
    ("tokens", "int32"),
    ("correct_drafts", "int32"),
    ("held_slots", "int64"),
    ("waiting", "int32"),
)


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
        """Write the rest; without a single row an empty table is written."""
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


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the whole table as dictionaries, one per row, for runs whose rows fit in memory."""
    from pyarrow import parquet

    return parquet.read_table(path).to_pylist()
