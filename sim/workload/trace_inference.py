"""Infers from a trace's first rows what they do not say: the unit of times, the size of a block, and a delay in the
place of an arrival."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from ...core.errors import ForedraftError
from ...core.parsing import ParseError, parse_json
from ...observe.input_files import read_lines
from .trace_columns import ARRIVAL, PROMPT, SESSION, words_of

BLOCK_SIZES = (512, 16, 32, 64, 128, 256)  # Mooncake's first, then that of Qwen-Bailian traces
_OWN_BLOCKS = {"mooncake": 512, "bailian": 16}  # as published
DATE = "date"
UNITS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
BLOCKS = "hash_ids"

JSON_FORMATS = ("mooncake", "bailian", "jsonl")
_UNIT_NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
_SINCE_1970 = {1e9: "s", 1e11: "ms", 1e14: "us", 1e17: "ns"}  # from which number on a time of day is in this unit
_FASTEST_IN_MS = 20.0  # requests per second; more may as well be times in seconds
_SLOWEST_IN_S = 0.1  # requests per second; less may as well be times in milliseconds


class TraceError(ForedraftError):
    """A trace that cannot be used; the message names file, line, and what was found."""

    def __init__(self, path: str, line: int | None, message: str) -> None:
        # What it is made from: a process that fails passes on a copy of its error.
        super().__init__(path, line, message)
        self.path: str = path
        self.line: int | None = line
        self.message: str = message

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.message}" if self.line else f"{self.path}: {self.message}"


def seen_rows(path: str, name: str, columns: Mapping[str, str]) -> Iterator[tuple[Any, Any, Any, list[str]]]:
    """Yield arrival, prompt length, hash ids and the columns that have a value of rows, up to the first one that is
    broken. Without an arrival it is None or empty."""
    lines = read_lines(path)
    try:
        if name in JSON_FORMATS:
            for line in lines:
                value = parse_json(line, long_integers=True) if line.strip() else None
                if isinstance(value, dict):
                    blocks = value.get(columns.get(BLOCKS, ""))
                    yield value.get(columns[ARRIVAL]), value[columns[PROMPT]], blocks, [*value]
            return
        rows = csv.reader(lines)
        header = [column.strip() for column in next(rows)]
        place = header.index(columns[ARRIVAL])
        for row in rows:
            if len(row) == len(header):
                cells = [cell.strip() for cell in row]
                yield cells[place], None, None, [name for name, cell in zip(header, cells, strict=True) if cell]
    except (csv.Error, KeyError, ParseError, ForedraftError):
        return  # `read_chunks` refuses the line, after those above it


def unit_of(path: str, name: str, column: str, cells: Sequence[Any], given: str) -> tuple[str, str | None]:
    """Return the unit of a column of times, and a note if it is inferred. Raises TraceError if two are possible."""
    _, named = words_of(column)
    if name == "azure" or (cells and isinstance(cells[0], str) and re.match(r"\d{4}-\d\d-\d\d", cells[0])):
        if given != "auto":
            raise TraceError(path, None, f"the times in {column!r} are dates: leave workload.time_unit out")
        return DATE, None
    if given != "auto":
        if named not in (None, given):
            message = f"the name of {column!r} says {_UNIT_NAMES[named]}, but workload.time_unit is {given}"
            raise TraceError(path, 1, message)
        return given, None
    if named is not None:
        return named, f"times in {_UNIT_NAMES[named]}, by the name {column!r}"
    if name in ("burstgpt", "bailian"):
        return "s", None
    is_text = bool(cells) and isinstance(cells[0], str)
    numbers = [float(cell) for cell in takewhile(_is_digits if is_text else _is_time, cells)]
    if numbers and numbers[0] >= min(_SINCE_1970):
        unit = [unit for least, unit in _SINCE_1970.items() if numbers[0] >= least][-1]
        return unit, f"times in {_UNIT_NAMES[unit]} since 1970, by their size"
    unit = "ms" if name == "mooncake" else "s"
    span = (max(numbers) - min(numbers)) * UNITS[unit] / 1e9 if numbers else 0.0
    if span:
        rate, other = (len(numbers) - 1) / span, "s" if unit == "ms" else "ms"
        if rate > _FASTEST_IN_MS if unit == "ms" else rate < _SLOWEST_IN_S:
            message = (
                f"the unit of its times is not clear: in {_UNIT_NAMES[unit]} its first rows are {_rate(rate)} requests/s, in "
                f"{_UNIT_NAMES[other]} {_rate(rate * UNITS[unit] / UNITS[other])}. Set workload.time_unit={unit} or "
                f"workload.time_unit={other}"
            )
            raise TraceError(path, None, message)
    return unit, None if name == "mooncake" else f"times in {_UNIT_NAMES[unit]}"


def delay_of(
    path: str, columns: Mapping[str, str], rows: Sequence[tuple[Any, Any, Any, list[str]]], unit: str
) -> str | None:
    """Return the column of delays, if a row has a value there and none of its arrival. Raises TraceError if the rows
    have no session."""
    without = (names for time, _, _, names in rows if time in (None, ""))
    delay = next(
        (name for names in without for name in names if words_of(name)[0] in (["delay"], ["think", "time"])), None
    )
    if delay is not None and SESSION not in columns:
        message = f"rows have {delay!r} and no {columns[ARRIVAL]!r}, but no session; give --columns session=NAME (workload.columns)"
        raise TraceError(path, None, message)
    if delay is not None and unit == DATE:
        raise TraceError(
            path, None, f"rows have {delay!r}, and the times in {columns[ARRIVAL]!r} are dates: give numbers"
        )
    return delay


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _is_digits(cell: Any) -> bool:
    return isinstance(cell, str) and re.fullmatch(r"\d{1,30}(\.\d*)?", cell) is not None


def _is_time(cell: Any) -> bool:
    return type(cell) in (int, float) and 0 <= cell < 1e30


def block_size_of(name: str, rows: Sequence[tuple[Any, Any]]) -> tuple[int, str | None]:
    """Return the tokens of a block by which all prompts have as many blocks as hash ids, and a note if it is inferred.
    Of several that fit it is the published one of the format, else the largest; the usual one if none fits."""
    known = [(length, len(ids)) for length, ids in rows if type(length) is int and isinstance(ids, list)]
    fitting = [size for size in BLOCK_SIZES if all(number == -(-length // size) for length, number in known)]
    usual = _OWN_BLOCKS.get(name, BLOCK_SIZES[0])
    size = usual if usual in fitting or not fitting else max(fitting)
    if not known or not fitting or fitting == [BLOCK_SIZES[0]]:
        return size, None
    note = f"blocks of {size} tokens, by the number of hash_ids"
    if len(fitting) > 1:
        note += f"; of the first rows {', '.join(map(str, sorted(fitting)))} fit"
    return size, note
