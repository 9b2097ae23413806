"""Recorded workloads, read as a stream: Azure (2023, 2024), Mooncake and BurstGPT traces. (`request_logs.py` reads the
logs of servers.)

    azure     CSV    TIMESTAMP (date and time, up to 9 fractional digits, UTC offset optional), ContextTokens,
                     GeneratedTokens                                          (Patel et al., Splitwise, ISCA 2024)
    mooncake  JSONL  timestamp (ms), input_length, output_length, hash_ids    (Qin et al., Mooncake, FAST 2025)
    burstgpt  CSV    Timestamp (s), [Session ID], [Elapsed time], Model, Request tokens, Response tokens, Total tokens,
                     Log Type                                                 (Wang et al., BurstGPT, KDD 2025)

A file passes in chunks of some thousand rows: parsed column by column, never held as a whole. Times are exact integer
nanoseconds relative to the first row. A request that failed (no output token) or asked nothing (no prompt token) cannot
be replayed; it is skipped and counted. Every other irregularity is a `TraceError` with file and line, because a
workload that is read in part would give a wrong answer that looks right. The first one in the file is raised.
`TraceSource.scan` reads all of it without making requests, so that a broken file is refused before a run starts.
"""

from __future__ import annotations

import csv
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from ...core.errors import ForedraftError, nearest, shown
from ...core.parsing import ParseError, parse_json
from ...core.prompt import MAX_HASH_ID
from ...observe.input_files import read_lines
from .prometheus import PAGE_BEGINS
from .request_logs import READERS, LogProblem, log_format, read_log
from .trace_cells import parse_counts, parse_date_times_ns, parse_json_counts, parse_milliseconds_ns, parse_seconds_ns

Cell = TypeVar("Cell", str, Any)
"""What a column of a trace holds: text in CSV, any JSON value elsewhere."""

CHUNK_ROWS = 8192
MOONCAKE_BLOCK_SIZE = 512
FORMATS = ("azure", "mooncake", "burstgpt", *READERS)

_CSV_COLUMNS = {
    "azure": (("TIMESTAMP", "ContextTokens", "GeneratedTokens"), ()),
    "burstgpt": (
        ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type"),
        ("Session ID", "Elapsed time"),
    ),
}
_JSON_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
_KNOWN = (
    f"known are CSV with the columns {', '.join(_CSV_COLUMNS['azure'][0])} (azure) or those of BurstGPT; JSON lines of "
    "Mooncake; logs of vLLM and SGLang with their requests (vllm-log, sglang-log); OpenTelemetry spans (otlp); and, for "
    "`foredraft trace` alone, Prometheus pages of these servers. docs/traces.md describes them; docs/tutorial.md, "
    '"A log of your requests", makes CSV from another log'
)
_LONGEST_HEADER = 4096
MOST_SEARCHED = 20_000  # lines of a log, for one that tells its format
_SEPARATORS = {";": "semicolons", "\t": "tabs"}  # other than the comma that is expected
_MOST_KEYS = 8  # of an object that are shown


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
class TraceRows:
    """Some successive rows as columns; `lines[i]` is the file's line of row i."""

    times_ns: np.ndarray
    prompt_lens: np.ndarray
    output_lens: np.ndarray
    lines: list[int]
    hash_ids: list[list[int]] | None = None
    sessions: list[str] | None = None


def resolve_format(path: str, name: str) -> str:
    """Return the format by the file's first lines: of a header the columns tell it, of JSON the keys, and of a log
    the first line about a request."""
    first = _first_line(path)
    if name != "auto":
        return name
    if _has_keys(first):
        return "mooncake"
    is_json = first.lstrip().startswith(("{", "["))
    header = (
        set()
        if is_json or len(first) > _LONGEST_HEADER
        else {column.strip() for column in _header(path, csv.reader([first]))}
    )
    for known, (required, _) in _CSV_COLUMNS.items():
        if set(required[:1]) <= header and len(header & set(required)) >= 2:
            return known
    if (found := log_format(islice(read_lines(path), MOST_SEARCHED))) is not None:
        return found
    if first.startswith(PAGE_BEGINS):
        message = (
            "a Prometheus page has no single requests: `foredraft trace FILE --out workload.toml` makes a workload"
        )
        raise TraceError(path, 1, message)
    what = _keys_of(first) if is_json else f"no header, object or log line of a known format: {first.strip()[:80]!r}"
    raise TraceError(path, 1, f"{what}; {_separator_hint(first) or _KNOWN}")


def _has_keys(first: str) -> bool:
    """Return whether a line is, or begins as, an object with at least two keys of a Mooncake trace."""
    try:
        return len({*parse_json(first, long_integers=True)} & {*_JSON_KEYS}) >= 2
    except ParseError:
        return sum(f'"{key}"' in first for key in _JSON_KEYS) >= 2
    except TypeError:  # a number
        return False


def _keys_of(first: str) -> str:
    """Return what an object of an unknown format is."""
    try:
        found = parse_json(first, long_integers=True)
    except ParseError as error:
        return f"is not JSON: {error}"
    if not isinstance(found, dict):
        return f"found {shown(found)}, expected an object"
    keys = list(found)
    return f"a JSON object with unknown keys: {', '.join(keys[:_MOST_KEYS])}{', …' if len(keys) > _MOST_KEYS else ''}"


def _separator_hint(first: str) -> str:
    """Return what is expected if a header would be one with commas in the place of another separator."""
    for mark, name in _SEPARATORS.items():
        columns = {cell.strip().strip('"') for cell in first.split(mark)}
        if any(required[0] in columns for required, _ in _CSV_COLUMNS.values()):
            return f"its columns are separated by {name}, expected commas"
    return ""


def read_chunks(path: str, name: str) -> Iterator[TraceRows]:
    """Yield the rows of a file in chunks, checked, with times relative to its first row."""
    name = resolve_format(path, name)
    origin = last = None
    parse = _log_chunks if name in READERS else _mooncake_chunks if name == "mooncake" else _csv_chunks
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


def _log_chunks(path: str, name: str, text_lines: Iterator[str]) -> Iterator[TraceRows]:
    """Yield the requests of a server's log, which is read as a whole, in chunks by arrival."""
    try:
        rows = read_log(path, name)
    except LogProblem as problem:
        raise TraceError(path, problem.line or None, problem.message) from None
    has_sessions = any(row.session is not None for row in rows)
    for first in range(0, len(rows), CHUNK_ROWS):
        part = rows[first : first + CHUNK_ROWS]
        times, prompts, outputs = (np.array([row[i] for row in part], np.int64) for i in range(3))
        sessions = [row.session or "" for row in part] if has_sessions else None
        yield TraceRows(times, prompts, outputs, [row.line for row in part], sessions=sessions)


def _csv_chunks(path: str, name: str, text_lines: Iterator[str]) -> Iterator[TraceRows]:
    reader = csv.reader(text_lines)
    header = [column.strip() for column in _header(path, reader)]
    columns = _csv_columns(path, name, header)
    width = len(header)
    problem: ForedraftError | None = None
    while problem is None:
        before = reader.line_num
        rows: list[list[str]] = []
        try:
            for row in islice(reader, CHUNK_ROWS):
                rows.append(row)  # one by one: the rows before an error are checked first
        except csv.Error as error:
            problem = TraceError(path, reader.line_num, f"not CSV: {error}")
        except ForedraftError as error:
            problem = error
        if not rows and problem is None:
            return
        lines, may_break = range(before + 1, before + 1 + len(rows)), reader.line_num != before + len(rows)
        rows, whole_lines, broken = _whole_rows(path, rows, lines, width, may_break)
        problem = broken or problem
        if rows:
            yield from _csv_chunk(path, name, list(zip(*rows, strict=True)), columns, whole_lines)
    raise problem


def _csv_columns(path: str, name: str, header: list[str]) -> dict[str, int]:
    required, optional = _CSV_COLUMNS[name]
    missing = [column for column in required if column not in header]
    if missing:
        found = ", ".join(header)
        message = f"the header of {name} traces has {', '.join(map(repr, missing))}; found: {found}"
        hint = _separator_hint(found)
        raise TraceError(path, 1, f"{message}; {hint}" if hint else message)
    unknown = [column for column in header if column not in required and column not in optional]
    if unknown:
        hint = nearest(unknown[0], (*required, *optional))
        raise TraceError(path, 1, f"unknown column {unknown[0]!r}{hint}")
    if len(set(header)) != len(header):
        raise TraceError(path, 1, "a column occurs twice")
    return {column: i for i, column in enumerate(header)}


def _whole_rows(
    path: str, rows: list[list[str]], lines: Sequence[int], width: int, may_break: bool
) -> tuple[list[list[str]], list[int], TraceError | None]:
    """Return the rows without blank lines, with their lines in the file, up to the first row of another width or with a
    line break, and the error of that row; None if there is none. may_break: whether a row may have a line break."""
    kept: list[list[str]] = []
    kept_lines: list[int] = []
    for row, line in zip(rows, lines, strict=True):
        if may_break and any("\n" in cell or "\r" in cell for cell in row):
            message = "a quoted field with a line break (a quotation mark too many?)"
            return kept, kept_lines, TraceError(path, line, message)
        if row and len(row) != width:
            message = f"{len(row)} fields, expected {width} (a truncated line?)"
            return kept, kept_lines, TraceError(path, line, message)
        if row:
            kept.append(row)
            kept_lines.append(line)
    return kept, kept_lines, None


def _csv_chunk(
    path: str, name: str, cells: list[tuple[str, ...]], columns: dict[str, int], lines: list[int]
) -> Iterator[TraceRows]:
    parsers: dict[str, Callable[[Sequence[str]], np.ndarray]]
    if name == "azure":
        parsers = {
            "TIMESTAMP": parse_date_times_ns,
            "ContextTokens": parse_counts,
            "GeneratedTokens": parse_counts,
        }
    else:
        parsers = {"Timestamp": parse_seconds_ns, "Request tokens": parse_counts, "Response tokens": parse_counts}
    parsed = [
        partial(_parse, path, f"column {label!r}", cells[columns[label]], lines, parse)
        for label, parse in parsers.items()
    ]
    session = columns.get("Session ID")
    yield from _above_problem(lines, parsed, sessions=None if session is None else list(cells[session]))


def _above_problem(
    lines: list[int],
    columns: Sequence[Callable[[int], np.ndarray]],
    hash_ids: list[list[int]] | None = None,
    sessions: list[str] | None = None,
) -> Iterator[TraceRows]:
    """Yield the rows above the first problem of any column, then raise the problem, so that the checks of whole rows
    and of times that go back come before it.

    columns: parse the times, prompts and outputs of so many rows. Each raises TraceError at its first bad cell.
    """
    count, problem = len(lines), None
    while True:
        try:
            parsed = [column(count) for column in columns]
        except TraceError as error:
            assert error.line is not None, "a cell stands in a line"
            count, problem = bisect_left(lines, error.line), error
            if not count:
                raise
        else:
            break
    yield TraceRows(
        parsed[0],
        parsed[1],
        parsed[2],
        lines[:count],
        None if hash_ids is None else hash_ids[:count],
        None if sessions is None else sessions[:count],
    )
    if problem is not None:
        raise problem


def _mooncake_chunks(path: str, name: str, text_lines: Iterator[str]) -> Iterator[TraceRows]:
    line = 0
    problem: ForedraftError | None = None
    while problem is None:
        rows: list[list[Any]] = []
        lines: list[int] = []
        before = line
        try:
            for text in islice(text_lines, CHUNK_ROWS):
                line += 1
                if not text.isspace():
                    rows.append(_json_row(path, line, text))
                    lines.append(line)
        except ForedraftError as error:
            problem = error
        if rows:
            times, prompts, outputs, hash_ids = zip(*rows, strict=True)
            columns = [
                partial(_parse, path, "key 'timestamp'", times, lines, parse_milliseconds_ns),
                partial(_prompts, path, prompts, hash_ids, lines),
                partial(_parse, path, "key 'output_length'", outputs, lines, parse_json_counts),
            ]
            yield from _above_problem(lines, columns, hash_ids=list(hash_ids))
        if problem is None and line == before:
            return
    raise problem


def _json_row(path: str, line: int, text: str) -> list[Any]:
    """Return the values of the object in a line, in the order of `_JSON_KEYS`. Raises TraceError."""
    try:
        value = parse_json(text, long_integers=True)
    except ParseError as error:
        raise TraceError(path, line, f"is not JSON (a truncated line?): {error}") from None
    missing = [key for key in _JSON_KEYS if not isinstance(value, dict) or key not in value]
    if missing:
        lacks = f"; it lacks {', '.join(missing)}" if isinstance(value, dict) else f", found {shown(value)}"
        raise TraceError(path, line, f"expected an object with the keys {', '.join(_JSON_KEYS)}{lacks}")
    row = [value[key] for key in _JSON_KEYS]
    if not isinstance(row[3], list):
        raise TraceError(path, line, f"key 'hash_ids': found {shown(row[3])}, expected a list")
    return row


def _prompts(
    path: str, prompts: Sequence[Any], hash_ids: Sequence[list[Any]], lines: list[int], count: int
) -> np.ndarray:
    """Return the lengths of the first `count` prompts, after a check of their hash ids. Raises TraceError."""
    for length, ids, line in zip(prompts[:count], hash_ids[:count], lines[:count], strict=True):
        if isinstance(length, int) and len(ids) != -(-length // MOONCAKE_BLOCK_SIZE):
            expected = -(-length // MOONCAKE_BLOCK_SIZE)
            raise TraceError(path, line, f"{len(ids)} hash_ids for {length} tokens: expected {expected}")
        if ids and (set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > MAX_HASH_ID):
            raise TraceError(path, line, "hash_ids: expected whole numbers, 0 ... 2**63 - 1")
    return _parse(path, "key 'input_length'", prompts, lines, parse_json_counts, count)


def _parse(
    path: str,
    label: str,
    cells: Sequence[Cell],
    lines: list[int],
    parse: Callable[[Sequence[Cell]], np.ndarray],
    count: int,
) -> np.ndarray:
    """Parse the first `count` cells of a column at once; if that fails, find the bad cell by parsing each beside the
    first, whose form it must share."""
    try:
        return parse(cells[:count])
    except ValueError:
        for cell, line in zip(cells, lines, strict=True):
            try:
                parse((cells[0], cell))
            except ValueError as error:
                raise TraceError(path, line, f"{label}: found {shown(cell)}, {error}") from None
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
