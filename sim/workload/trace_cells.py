"""Columns of a trace as numbers: times and counts of tokens, parsed many cells at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...core.prompt import MAX_PROMPT_LENGTH

_OFFSET = re.compile(r"(Z|[+-]\d\d:?\d\d)$")
_MAX_SECONDS = 9_000_000_000
_A_TIME = "expected a date and time such as 2023-11-16 18:15:46.680590"
_A_COUNT = f"expected a whole number of tokens from 0 to {MAX_PROMPT_LENGTH}"
_MILLISECONDS = "expected milliseconds, not negative"


def parse_date_times_ns(cells: Sequence[str]) -> np.ndarray:
    """Parse dates and times ("2023-11-16 18:15:46.6805900", a UTC offset optional) to ns since 1970 UTC: int64 [n].

    Up to nine fractional digits count. ValueError for anything but a full date and time between 1970 and 2262.
    """
    plain, offsets_ns = _without_offsets(cells)
    if min(map(len, plain)) < 19 or min(plain) < "1970" or max(plain) >= "2262" or max(map(len, plain)) > 29:
        raise ValueError(_A_TIME)
    try:
        return np.array(plain, dtype="datetime64[ns]").view(np.int64) - offsets_ns
    except ValueError:
        raise ValueError(_A_TIME) from None


def parse_seconds_ns(cells: Sequence[str]) -> np.ndarray:
    """Parse decimal seconds ("5", "45.25") to ns: int64 [n]; digits beyond the ninth are cut. Else ValueError."""
    return np.array([_seconds_ns(cell) for cell in cells], np.int64)


def parse_milliseconds_ns(cells: Sequence[int | float]) -> np.ndarray:
    """Convert JSON numbers of milliseconds to ns: int64 [n]; whole ones exactly.
    ValueError if negative or not finite."""
    if all(type(cell) is int for cell in cells):
        if min(cells) < 0 or max(cells) > _MAX_SECONDS * 1000:
            raise ValueError(_MILLISECONDS)
        return np.array(cells, np.int64) * 1_000_000
    for cell in cells:
        if isinstance(cell, bool) or not isinstance(cell, int | float) or not 0 <= cell <= _MAX_SECONDS * 1000:
            raise ValueError(_MILLISECONDS)
    return np.array([round(cell * 1_000_000) for cell in cells], np.int64)


def _seconds_ns(cell: str) -> int:
    whole, _, fraction = cell.strip().partition(".")
    if not (whole.isdecimal() and whole.isascii() and (not fraction or (fraction.isdecimal() and fraction.isascii()))):
        raise ValueError("expected seconds as a decimal number, not negative")
    if len(whole) > 10 or int(whole) > _MAX_SECONDS:
        raise ValueError(f"expected at most {_MAX_SECONDS} seconds")
    return int(whole) * 1_000_000_000 + int(fraction[:9].ljust(9, "0"))


def _without_offsets(cells: Sequence[str]) -> tuple[Sequence[str], int | np.ndarray]:
    """Return the times without their UTC offsets, and the offsets in ns:
    one number where all are equal, the usual case."""
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
    matches = [found for cell in cells if (found := _OFFSET.search(cell)) is not None]
    if len(matches) < len(cells):
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


def parse_counts(cells: Sequence[Any]) -> np.ndarray:
    """Parse token counts, int64 [n]. ValueError unless each is a whole number, 0 … 2**31 − 1."""
    try:
        values = list(map(int, cells))
    except ValueError:
        raise ValueError(_A_COUNT) from None
    if min(values) < 0 or max(values) > MAX_PROMPT_LENGTH:
        raise ValueError(_A_COUNT)
    return np.array(values, np.int64)


def parse_json_counts(cells: Sequence[Any]) -> np.ndarray:
    """Check JSON numbers as `parse_counts` does; text, true and fractions are refused."""
    if any(type(cell) is not int for cell in cells):
        raise ValueError(_A_COUNT)
    return parse_counts(cells)
