"""Written times to integer nanoseconds, a column at a time and exactly: no float ever holds a nanosecond."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

_OFFSET = re.compile(r"(Z|[+-]\d\d:?\d\d)$")
_MAX_SECONDS = 9_000_000_000


def parse_date_times_ns(cells: Sequence[str]) -> np.ndarray:
    """Parse dates and times ("2023-11-16 18:15:46.6805900", a UTC offset optional) to ns since 1970 UTC: int64 [n].

    Up to nine fractional digits count. ValueError for anything but a full date and time between 1970 and 2262.
    """
    plain, offsets_ns = _without_offsets(cells)
    if min(map(len, plain)) < 19 or min(plain) < "1970" or max(plain) >= "2262" or max(map(len, plain)) > 29:
        raise ValueError("expected a date and time such as 2023-11-16 18:15:46.680590")
    return np.array(plain, dtype="datetime64[ns]").view(np.int64) - offsets_ns


def parse_seconds_ns(cells: Sequence[str]) -> np.ndarray:
    """Parse decimal seconds ("5", "45.25") to ns: int64 [n]; digits beyond the ninth are cut. Else ValueError."""
    return np.array([_seconds_ns(cell) for cell in cells], np.int64)


def parse_milliseconds_ns(cells: Sequence[int | float]) -> np.ndarray:
    """Convert JSON numbers of milliseconds to ns: int64 [n]; whole ones exactly. ValueError if negative or not finite."""
    if all(type(cell) is int for cell in cells):
        values = np.array(cells, np.int64)
        if values.min() < 0 or values.max() > _MAX_SECONDS * 1000:
            raise ValueError("expected milliseconds, not negative")
        return values * 1_000_000
    for cell in cells:
        if isinstance(cell, bool) or not isinstance(cell, int | float) or not 0 <= cell <= _MAX_SECONDS * 1000:
            raise ValueError("expected milliseconds, not negative")
    return np.array([round(cell * 1_000_000) for cell in cells], np.int64)


def _seconds_ns(cell: str) -> int:
    whole, _, fraction = cell.strip().partition(".")
    if not (whole.isdecimal() and whole.isascii() and (not fraction or (fraction.isdecimal() and fraction.isascii()))):
        raise ValueError("expected seconds as a decimal number, not negative")
    if len(whole) > 10 or int(whole) > _MAX_SECONDS:
        raise ValueError(f"expected at most {_MAX_SECONDS} seconds")
    return int(whole) * 1_000_000_000 + int(fraction[:9].ljust(9, "0"))


def _without_offsets(cells: Sequence[str]) -> tuple[Sequence[str], int | np.ndarray]:
    """Return the times without their UTC offsets, and the offsets in ns: one number where all are equal, the usual case."""
    match = _OFFSET.search(cells[0])
    if match is None:
        if any(
            _OFFSET.search(cell[19:]) for cell in cells if len(cell) > 29 or cell[-1:] == "Z" or cell[-6:-5] in "+-"
        ):
            raise ValueError("expected the same form of time on every line (with or without a UTC offset)")
        return cells, 0
    suffix = match.group()
    if all(cell.endswith(suffix) for cell in cells):
        return [cell[: -len(suffix)] for cell in cells], _offset_ns(suffix)
    matches = [_OFFSET.search(cell) for cell in cells]
    if any(match is None for match in matches):
        raise ValueError("expected the same form of time on every line (with or without a UTC offset)")
    suffixes = [match.group() for match in matches]
    plain = [cell[: -len(suffix)] for cell, suffix in zip(cells, suffixes, strict=True)]
    return plain, np.array([_offset_ns(suffix) for suffix in suffixes], np.int64)


def _offset_ns(suffix: str) -> int:
    if suffix == "Z":
        return 0
    digits = suffix[1:].replace(":", "")
    minutes = int(digits[:2]) * 60 + int(digits[2:])
    return (-minutes if suffix[0] == "-" else minutes) * 60_000_000_000
