"""Recorded workloads, read as a stream: Azure (2023, 2024), Mooncake and BurstGPT traces.

    azure     CSV    TIMESTAMP (date and time, up to 9 fractional digits, UTC offset optional), ContextTokens,
                     GeneratedTokens                                          (Patel et al., Splitwise, ISCA 2024)
    mooncake  JSONL  timestamp (ms), input_length, output_length, hash_ids    (Qin et al., Mooncake, FAST 2025)
    burstgpt  CSV    Timestamp (s), [Session ID], [Elapsed time], Model, Request tokens, Response tokens, Total tokens,
                     Log Type                                                 (Wang et al., BurstGPT, KDD 2025)

A file passes in chunks of some thousand rows: parsed column by column, never held as a whole. Times are exact integer
nanoseconds relative to the first row. A request that failed (no output token) or asked nothing (no prompt token) cannot
be replayed; it is skipped and counted. Every other irregularity is a `TraceError` with file and line, because a
workload that is read in part would give a wrong answer that looks right. `TraceSource.scan` reads all of it without
making requests, so that a broken file is refused before a run starts.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ...core.errors import ForedraftError, nearest
from ...core.parsing import ParseError, parse_json
from ...core.prompt import MAX_HASH_ID, MAX_PROMPT_LENGTH, Prompt
from ...observe.input_files import read_lines
from .workload import Arrival

Cell = TypeVar("Cell", str, Any)
"""What a column of a trace holds: text in CSV, any JSON value elsewhere."""

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
    """Convert JSON numbers of milliseconds to ns: int64 [n]; whole ones exactly.
    ValueError if negative or not finite."""
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


CHUNK_ROWS = 8192
MOONCAKE_BLOCK_SIZE = 512
FORMATS = ("azure", "mooncake", "burstgpt")

_CSV_COLUMNS = {
    "azure": (("TIMESTAMP", "ContextTokens", "GeneratedTokens"), ()),
    "burstgpt": (
        ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type"),
        ("Session ID", "Elapsed time"),
    ),
}
_JSON_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


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


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """The size of a whole trace."""

    format: str
    num_rows: int
    num_requests: int  # rows that become requests: with a prompt and an output


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some successive rows as columns; `lines[i]` is the file's line of row i."""

    times_ns: np.ndarray
    prompt_lens: np.ndarray
    output_lens: np.ndarray
    lines: list[int]
    hash_ids: list[list[int]] | None = None
    sessions: list[str] | None = None


@dataclass(frozen=True, slots=True)
class TraceSource:
    """A trace file as a workload; iterating it yields `Arrival`s in order of time.

    path:       the file
    format:     one of `FORMATS`, or "auto": recognised by the first line
    rate_scale: 2 replays twice as fast
    start_s:    rows before this time (seconds after the first row, before scaling) are passed over; times then count
                from here
    stop_s:     rows at or after this time are left out
    limit:      at most so many requests

    Errors while reading: TraceError, and ConfigError for a file that cannot be read.
    """

    path: str | Path
    format: str = "auto"
    rate_scale: float = 1.0
    start_s: float = 0.0
    stop_s: float | None = None
    limit: int | None = None

    def __iter__(self) -> Iterator[Arrival]:
        start_ns = round(self.start_s * 1e9)
        stop_ns = None if self.stop_s is None else round(self.stop_s * 1e9)
        left = self.limit
        row = 0
        for chunk in _chunks(str(self.path), self.format):
            for arrival in self._arrivals(chunk, row, start_ns, stop_ns):
                yield arrival
                if left is not None:
                    left -= 1
                    if left == 0:
                        return
            row += len(chunk.lines)
            if stop_ns is not None and int(chunk.times_ns[-1]) >= stop_ns:
                return

    @property
    def has_block_hashes(self) -> bool:
        """Whether the rows say what their prompts contain; reads the first line."""
        return _resolve_format(str(self.path), self.format) == "mooncake"

    def scan(self) -> TraceSummary:
        """Read and check the whole file; windows, limit and scale do not apply."""
        name = _resolve_format(str(self.path), self.format)
        num_rows = num_requests = 0
        for chunk in _chunks(str(self.path), name):
            num_rows += len(chunk.prompt_lens)
            num_requests += int(((chunk.prompt_lens > 0) & (chunk.output_lens > 0)).sum())
        return TraceSummary(name, num_rows, num_requests)

    def _arrivals(self, chunk: _Chunk, first_row: int, start_ns: int, stop_ns: int | None) -> Iterator[Arrival]:
        kept = (chunk.prompt_lens > 0) & (chunk.output_lens > 0) & (chunk.times_ns >= start_ns)
        if stop_ns is not None:
            kept &= chunk.times_ns < stop_ns
        which = np.flatnonzero(kept)
        times = chunk.times_ns[which] - start_ns
        if self.rate_scale != 1.0:
            times = np.rint(times / self.rate_scale).astype(np.int64)
        columns = zip(
            which.tolist(),
            times.tolist(),
            chunk.prompt_lens[which].tolist(),
            chunk.output_lens[which].tolist(),
            strict=True,
        )
        hash_ids, sessions = chunk.hash_ids, chunk.sessions
        for i, time_ns, prompt_len, output_len in columns:
            if hash_ids is None:
                prompt = Prompt(prompt_len)
            else:
                prompt = Prompt.of_blocks(hash_ids[i], MOONCAKE_BLOCK_SIZE, prompt_len)
            session = sessions[i] or None if sessions is not None else None
            yield Arrival(time_ns, prompt, output_len, session, 0, first_row + i)


def _resolve_format(path: str, name: str) -> str:
    """Return the format by the file's first line: an object is Mooncake's, a header is recognised by its columns."""
    first = _first_line(path)
    if name != "auto":
        return name
    if first.lstrip().startswith("{"):
        return "mooncake"
    header = {column.strip() for column in _header(path, csv.reader([first]))}
    for known, (required, _) in _CSV_COLUMNS.items():
        if set(required[:1]) <= header and len(header & set(required)) >= 2:
            return known
    message = f"neither a header of an Azure or BurstGPT trace nor a JSON object: {first.strip()[:80]!r}"
    raise TraceError(path, 1, message)


def _chunks(path: str, name: str) -> Iterator[_Chunk]:
    """Yield the rows of a file in chunks, checked, with times relative to its first row."""
    name = _resolve_format(path, name)
    parse = _mooncake_chunks if name == "mooncake" else _csv_chunks
    origin = last = None
    for chunk in parse(path, name, read_lines(path)):
        times = chunk.times_ns
        if origin is None:
            origin = last = int(times[0])
        before = np.concatenate([[last], times[:-1]])
        backwards = np.flatnonzero(times < before)
        if len(backwards):
            i = int(backwards[0])
            gap_s = (int(before[i]) - int(times[i])) / 1e9
            raise TraceError(path, chunk.lines[i], f"time goes back by {gap_s:g} s")
        last = int(times[-1])
        times -= origin
        yield chunk
    if origin is None:
        raise TraceError(path, None, "no rows: the file ends after its header")


def _csv_chunks(path: str, name: str, text_lines: Iterator[str]) -> Iterator[_Chunk]:
    reader = csv.reader(text_lines)
    header = [column.strip() for column in _header(path, reader)]
    columns = _csv_columns(path, name, header)
    width = len(header)
    while True:
        before = reader.line_num
        try:
            rows = list(islice(reader, CHUNK_ROWS))
        except csv.Error as error:
            raise TraceError(path, reader.line_num, f"not CSV: {error}") from error
        if not rows:
            return
        lines: Sequence[int] = range(before + 1, reader.line_num + 1)
        if len(lines) != len(rows):
            broken = next(i for i, row in enumerate(rows) if any("\n" in cell or "\r" in cell for cell in row))
            raise TraceError(path, lines[broken], "a quoted field with a line break (a quotation mark too many?)")
        if any(len(row) != width for row in rows):
            rows, lines = _whole_rows(path, rows, lines, width)
            if not rows:
                continue
        yield _csv_chunk(path, name, list(zip(*rows, strict=True)), columns, list(lines))


def _csv_columns(path: str, name: str, header: list[str]) -> dict[str, int]:
    required, optional = _CSV_COLUMNS[name]
    missing = [column for column in required if column not in header]
    if missing:
        found = ", ".join(header)
        raise TraceError(path, 1, f"the header of {name} traces has {', '.join(map(repr, missing))}; found: {found}")
    unknown = [column for column in header if column not in required and column not in optional]
    if unknown:
        hint = nearest(unknown[0], (*required, *optional))
        raise TraceError(path, 1, f"unknown column {unknown[0]!r}{hint}")
    if len(set(header)) != len(header):
        raise TraceError(path, 1, "a column occurs twice")
    return {column: i for i, column in enumerate(header)}


def _whole_rows(
    path: str, rows: list[list[str]], lines: Sequence[int], width: int
) -> tuple[list[list[str]], Sequence[int]]:
    """Drop blank lines; any other row of another width is an error."""
    kept = [(row, line) for row, line in zip(rows, lines, strict=True) if row]
    for row, line in kept:
        if len(row) != width:
            raise TraceError(path, line, f"{len(row)} fields, expected {width} (a truncated line?)")
    return [row for row, _ in kept], [line for _, line in kept]


def _csv_chunk(path: str, name: str, cells: list[tuple[str, ...]], columns: dict[str, int], lines: list[int]) -> _Chunk:
    def column(label: str, parse: Callable[[Sequence[str]], np.ndarray]) -> np.ndarray:
        return _parse(path, label, cells[columns[label]], lines, parse)

    if name == "azure":
        return _Chunk(
            column("TIMESTAMP", parse_date_times_ns),
            column("ContextTokens", _counts),
            column("GeneratedTokens", _counts),
            lines,
        )
    session = columns.get("Session ID")
    return _Chunk(
        column("Timestamp", parse_seconds_ns),
        column("Request tokens", _counts),
        column("Response tokens", _counts),
        lines,
        sessions=None if session is None else list(cells[session]),
    )


def _mooncake_chunks(path: str, name: str, text_lines: Iterator[str]) -> Iterator[_Chunk]:
    line = 0
    while texts := list(islice(text_lines, CHUNK_ROWS)):
        rows, lines = [], []
        for text in texts:
            line += 1
            if text.isspace():
                continue
            try:
                value = parse_json(text)
            except ParseError as error:
                raise TraceError(path, line, f"is not JSON (a truncated line?): {error}") from None
            try:
                rows.append([value[key] for key in _JSON_KEYS])
            except (KeyError, TypeError) as error:
                raise TraceError(path, line, f"expected an object with the keys {', '.join(_JSON_KEYS)}") from error
            if not isinstance(rows[-1][3], list):
                raise TraceError(path, line, f"hash_ids {rows[-1][3]!r}: expected a list")
            lines.append(line)
        if rows:
            times, prompts, outputs, hash_ids = zip(*rows, strict=True)
            _check_hash_ids(path, prompts, hash_ids, lines)
            yield _Chunk(
                _parse(path, "timestamp", times, lines, parse_milliseconds_ns),
                _parse(path, "input_length", prompts, lines, _json_counts),
                _parse(path, "output_length", outputs, lines, _json_counts),
                lines,
                hash_ids=list(hash_ids),
            )


def _check_hash_ids(path: str, prompts: Sequence[Any], hash_ids: Sequence[list[Any]], lines: list[int]) -> None:
    for length, ids, line in zip(prompts, hash_ids, lines, strict=True):
        if isinstance(length, int) and len(ids) != -(-length // MOONCAKE_BLOCK_SIZE):
            expected = -(-length // MOONCAKE_BLOCK_SIZE)
            raise TraceError(path, line, f"{len(ids)} hash_ids for {length} tokens: expected {expected}")
        if ids and (set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > MAX_HASH_ID):
            raise TraceError(path, line, "hash_ids: expected whole numbers, 0 ... 2**63 - 1")


def _counts(cells: Sequence[Any]) -> np.ndarray:
    """Parse token counts, int64 [n]. ValueError unless each is a whole number, 0 … 2**31 − 1."""
    values = np.array(list(map(int, cells)), np.int64)
    if values.min() < 0 or values.max() > MAX_PROMPT_LENGTH:
        raise ValueError(f"expected a count of tokens, 0 ... {MAX_PROMPT_LENGTH}")
    return values


def _json_counts(cells: Sequence[Any]) -> np.ndarray:
    """Check JSON numbers as `_counts` does; text, true and fractions are refused."""
    if any(type(cell) is not int for cell in cells):
        raise ValueError("expected a whole number")
    return _counts(cells)


def _parse(
    path: str, label: str, cells: Sequence[Cell], lines: list[int], parse: Callable[[Sequence[Cell]], np.ndarray]
) -> np.ndarray:
    """Parse a column at once; if that fails, find the bad cell by parsing each beside the first, whose
    form it must share."""
    try:
        return parse(cells)
    except (ValueError, OverflowError, TypeError):
        for cell, line in zip(cells, lines, strict=True):
            try:
                parse((cells[0], cell))
            except (ValueError, OverflowError, TypeError) as error:
                raise TraceError(path, line, f"{label} {cell!r}: {error}") from error
        raise


def _header(path: str, reader: Iterator[list[str]]) -> list[str]:
    try:
        return next(reader)
    except csv.Error as error:
        raise TraceError(path, 1, f"not CSV: {error}") from error


def _first_line(path: str) -> str:
    first = next(read_lines(path), "")
    if not first.strip():
        raise TraceError(path, 1, "the file is empty" if not first else "the first line is blank, expected a header")
    return first
