"""What has been measured so far, line by line in a file, so that a run that was stopped goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from ..core.parsing import ParseError, parse_json
from ..observe.input_files import read_lines


class TwinRecord:
    """Values by key. Without a path they are kept in memory alone.

    The file begins with `about`; one that is about something else, or ends in the middle of a line, is begun anew or
    cut there.
    """

    def __init__(self, path: Path | None, about: Mapping[str, Any]) -> None:
        self.values: dict[str, list[float]] = {}
        self._path = path
        self._file: TextIO | None = None
        if path is None:
            return
        if path.is_file():
            self._read(path, about)
        lines = [{"about": about}, *({"key": key, "values": values} for key, values in self.values.items())]
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_name(path.name + ".new")
        written.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        written.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def _read(self, path: Path, about: Mapping[str, Any]) -> None:
        lines = iter(read_lines(path))
        try:
            if parse_json(next(lines, "null")) != {"about": json.loads(json.dumps(about))}:
                return
            for line in lines:
                value = parse_json(line)
                self.values[value["key"]] = [float(number) for number in value["values"]]
        except (ParseError, LookupError, TypeError, ValueError):
            return  # the rest is measured again

    def add(self, key: str, values: list[float]) -> None:
        self.values[key] = values
        if self._file is not None:
            self._file.write(json.dumps({"key": key, "values": values}) + "\n")
            self._file.flush()

    def close(self, finished: bool) -> None:
        """Close the file, and delete it if the measurement is `finished`."""
        if self._file is not None and self._path is not None:
            self._file.close()
            if finished:
                self._path.unlink(missing_ok=True)
