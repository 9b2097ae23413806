"""Columns of a trace as numbers: times and counts of tokens, parsed many cells at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np

from ...core.prompt import MAX_PROMPT_LENGTH

_OFFSET = re.compile(r"(Z|[+-]\d\d:?\d\d)$")
_NUMBER = re.compile(r"[0-9]{1,30}(\.[0-9]{0,30})?([eE][+-]?[0-9]{1,2})?")
_UNITS = {1_000_000_000: "seconds", 1_000_000: "milliseconds", 1_000: "microseconds", 1: "nanoseconds"}
_MAX_NS = 9_000_000_000 * 10**9
_A_TIME = "expected a date and time such as 2023-11-16 18:15:46.680590"
_A_COUNT = f"expected a whole number of tokens from 0 to {MAX_PROMPT_LENGTH}"


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


def parse_numbers_ns(cells: Sequence[str], unit_ns: int) -> np.ndarray:
    """Parse decimal numbers ("5", "45.25", "1e-05") of a unit of so many ns to ns: int64 [n]; digits beyond a ns are
    cut. ValueError if negative or no number."""
    return np.array([_number_ns(cell.strip(), unit_ns) for cell in cells], np.int64)


def parse_json_numbers_ns(cells: Sequence[int | float], unit_ns: int) -> np.ndarray:
    """Convert JSON numbers of a unit of so many ns to ns: int64 [n]; whole ones exactly.
    ValueError if negative or not finite."""
    for cell in cells:
        if isinstance(cell, bool) or not isinstance(cell, int | float) or not 0 <= cell * unit_ns <= _MAX_NS:
            raise ValueError(_expected(unit_ns))
    return np.array([cell * unit_ns if type(cell) is int else round(cell * unit_ns) for cell in cells], np.int64)


def _expected(unit_ns: int) -> str:
    return f"expected {_UNITS[unit_ns]}, not negative"


def _number_ns(cell: str, unit_ns: int) -> int:
    if not _NUMBER.fullmatch(cell):
        raise ValueError(_expected(unit_ns))
    value = int(Decimal(cell) * unit_ns)
    if value > _MAX_NS:
        raise ValueError(f"expected at most {_MAX_NS // unit_ns} {_UNITS[unit_ns]}")
    return value


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
    except ValueError:  # a table that was written with fractions has 5.0
        try:
            values = [int(cell.removesuffix(".0") if isinstance(cell, str) else cell) for cell in cells]
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
