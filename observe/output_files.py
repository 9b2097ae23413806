"""The files that are written, whole where a half-written one would do harm.
One that cannot be written is one message."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..core.errors import ForedraftError

ROW_GROUP = 1 << 16
"""Rows of a Parquet file that are written together."""


class UnwritableFile(ForedraftError):
    """A file or directory cannot be made or written."""

    def __init__(self, path: Path | str | None, error: OSError, what: str = "written") -> None:
        super().__init__(f"{path}: cannot be {what}: {error.strerror or error}")


@dataclass(frozen=True)
class Document:
    """A result that a command prints with `--json`. Its fields are the document, whose keys keep their meaning while
    `VERSION` stays (docs/stability.md)."""

    FORMAT: ClassVar[str]
    VERSION: ClassVar[int] = 1

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data: its format, the format's version, the version of Foredraft that made it, and
        every field."""
        made_by = {"format": self.FORMAT, "version": self.VERSION, "foredraft": version("foredraft")}
        return {**made_by, **asdict(self)}

    def to_text(self) -> str:
        """Return the same as JSON text, with a newline at its end."""
        return json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"


def empty_run_directory(directory: Path, names: Iterable[str]) -> None:
    """Make the directory of a run, and remove the files of an earlier run: two runs must not mix."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in names:
            (directory / name).unlink(missing_ok=True)
    except OSError as error:
        raise UnwritableFile(directory, error, "used for a run") from None


def write_text(path: Path, text: str, *, replace: bool = False) -> None:
    """Write a file; `replace` an existing one as a whole, so that it is never half written."""
    place = path.with_name(f".{path.name}.partial") if replace else path
    try:
        place.write_text(text, encoding="utf-8")
        if replace:
            place.replace(path)
    except OSError as error:
        raise UnwritableFile(path, error) from None


def write_json(path: Path, value: Any) -> None:
    """Write a report as a whole, and make the directories above it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnwritableFile(path, error) from None
    write_text(path, json.dumps(value, indent=2) + "\n", replace=True)


def cache_directory() -> Path:
    """Return the directory of the user for what can be made again. It need not exist."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache and Path(cache).is_absolute() else Path.home() / ".cache") / "foredraft"


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write a flat object with one key on each line."""
    lines = [f"  {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in summary.items()]
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


class JsonRecord:
    """A JSON file that is rewritten while a command runs. A path that cannot be written is refused at once."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        if path is None:
            return
        if path.is_dir():
            raise ForedraftError(f"{path}: is a directory; expected a file")
        try:
            probe = path.with_name(f".{path.name}.partial")
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise UnwritableFile(path, error) from None

    def write(self, document: dict[str, Any]) -> None:
        if self._path is not None:
            write_text(self._path, json.dumps(document, indent=1, allow_nan=False) + "\n", replace=True)


class ParquetColumns:
    """A Parquet file written in row groups, so that a million rows need the memory of one group.

    `fields` are (name, Arrow type name); a trailing "?" marks integers whose negative values are written as null.
    The library is imported when the first group is written.
    """

    def __init__(self, path: str | os.PathLike[str], fields: Sequence[tuple[str, str]]) -> None:
        self.path: Path = Path(path)
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
        assert self._writer is not None
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
