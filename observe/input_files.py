"""Reads the files that a user gives: text in UTF-8 of a bounded size, whole or line by line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from ..core.parsing import ParseError, parse_toml

MAX_FILE_BYTES = 64 << 20
"""The largest file that is read as a whole: configurations, tables, plans."""
MAX_LINE_BYTES = 16 << 20
"""The longest line of a file that is read line by line; a Mooncake request of a million tokens takes 30 KB."""


def read_text(path: str | os.PathLike[str], max_bytes: int = MAX_FILE_BYTES) -> str:
    """Return the text of a file. Raises ConfigError if it is missing, not UTF-8, or larger than `max_bytes`."""
    try:
        with Path(path).open("rb") as file:
            raw = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise _unreadable(path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(raw) > max_bytes:
        raise _unreadable(path, f"has more than {max_bytes:,} bytes, which no such file has")
    return _decode(raw, path, "").removeprefix("\ufeff").replace("\r\n", "\n")


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the tables of a TOML file. Raises ConfigError, as `read_text` does and for a text that is no TOML."""
    try:
        return parse_toml(read_text(path))
    except ParseError as error:
        raise _unreadable(path, f"is no TOML: {error}") from None


def read_lines(path: str | os.PathLike[str], max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[str]:
    """Yield the lines of a file with their ends. Raises ConfigError as `read_text` does, with the line that is too
    long or not UTF-8."""
    number = 0
    try:
        with Path(path).open("rb") as file:
            while raw := file.readline(max_line_bytes + 1):
                number += 1
                if len(raw) > max_line_bytes:
                    raise _unreadable(path, f"longer than {max_line_bytes:,} bytes", f"line {number}")
                text = _decode(raw, path, f"line {number}")
                yield text.removeprefix("\ufeff") if number == 1 else text
    except (OSError, ValueError) as error:
        raise _unreadable(path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _decode(raw: bytes, path: str | os.PathLike[str], place: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _unreadable(
            path, f"is not UTF-8: byte {raw[error.start]:#04x} at byte {error.start + 1}", place
        ) from None


def _unreadable(path: str | os.PathLike[str], message: str, place: str = "") -> ConfigError:
    return ConfigError.of(os.fspath(path) or "an empty path", place, message)
