"""Recorded workloads, read as a stream. `trace_layout.py` says what a file's columns are. (`request_logs.py` reads the
logs of servers.)

    azure     CSV    TIMESTAMP (date and time, up to 9 fractional digits, UTC offset optional), ContextTokens,
                     GeneratedTokens                                          (Patel et al., Splitwise, ISCA 2024)
    mooncake  JSONL  timestamp (ms), input_length, output_length, hash_ids    (Qin et al., Mooncake, FAST 2025)
    bailian   JSONL  the same with timestamp (s), blocks of 16 tokens, chat_id, parent_chat_id, type, turn
                                                                              (Wang et al., KVCache Cache, ATC 2025)
    burstgpt  CSV    Timestamp (s), [Session ID], [Elapsed time], Model, Request tokens, Response tokens, Total tokens,
                     Log Type                                                 (Wang et al., BurstGPT, KDD 2025)
    csv       CSV    an arrival, prompt tokens and output tokens, by the names of their columns
    jsonl     JSONL  the same

A file passes in chunks of some thousand rows: parsed column by column, never held as a whole. Times are exact integer
nanoseconds relative to the first row. A request that failed (no output token) or asked nothing (no prompt token) cannot
be replayed; it is skipped and counted. Every other irregularity is a `TraceError` with file and line, because a
workload that is read in part would give a wrong answer that looks right. The first one in the file is raised.
`TraceSource.scan` reads all of it without making requests, so that a broken file is refused before a run starts.
"""

from __future__ import annotations

import csv
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from ...core.errors import ForedraftError, shown
from ...core.parsing import ParseError, parse_json
from ...core.prompt import MAX_HASH_ID
from ...observe.input_files import read_lines
from .request_logs import READERS, LogProblem, read_log
from .trace_cells import parse_counts, parse_date_times_ns, parse_json_counts, parse_json_numbers_ns, parse_numbers_ns
from .trace_columns import ARRIVAL, OUTPUT, PROMPT, SESSION
from .trace_inference import BLOCKS, DATE, UNITS, TraceError
from .trace_layout import TraceLayout

Cell = TypeVar("Cell", str, Any)
"""What a column of a trace holds: text in CSV, any JSON value elsewhere."""

CHUNK_ROWS = 8192


@dataclass(frozen=True, slots=True)
class TraceRows:
    """Some successive rows as columns; `lines[i]` is the file's line of row i."""

    times_ns: np.ndarray
    prompt_lens: np.ndarray
    output_lens: np.ndarray
    lines: list[int]
    hash_ids: list[list[int]] | None = None
    sessions: list[str] | None = None


def read_chunks(path: str, layout: TraceLayout) -> Iterator[TraceRows]:
    """Yield the rows of a file in chunks, checked, with times relative to its first row."""
    origin = last = None
    parse = _log_chunks if layout.format in READERS else _json_chunks if layout.is_json else _csv_chunks
    parse = parse if layout.delay is None else _session_chunks
    for chunk in parse(path, layout, read_lines(path)):
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


def _log_chunks(path: str, layout: TraceLayout, text_lines: Iterator[str]) -> Iterator[TraceRows]:
    """Yield the requests of a server's log, which is read as a whole, in chunks by arrival."""
    try:
        rows = read_log(path, layout.format)
    except LogProblem as problem:
        raise TraceError(path, problem.line or None, problem.message) from None
    has_sessions = any(row.session is not None for row in rows)
    for first in range(0, len(rows), CHUNK_ROWS):
        part = rows[first : first + CHUNK_ROWS]
        times, prompts, outputs = (np.array([row[i] for row in part], np.int64) for i in range(3))
        sessions = [row.session or "" for row in part] if has_sessions else None
        yield TraceRows(times, prompts, outputs, [row.line for row in part], sessions=sessions)


def _session_chunks(path: str, layout: TraceLayout, text_lines: Iterator[str]) -> Iterator[TraceRows]:
    """Yield rows of which some have a delay instead of an arrival. The rows of a session stand one after the other, so
    that the file is read as a whole and sorted."""
    rows = list(_json_objects(path, text_lines) if layout.is_json else _csv_objects(path, text_lines))
    lines, names = [line for line, _ in rows], layout.columns
    numbers, counts = (parse_json_numbers_ns, parse_json_counts) if layout.is_json else (parse_numbers_ns, parse_counts)
    unit, last = partial(numbers, unit_ns=UNITS[layout.unit]), dict[str, int]()
    times, sessions = [], []
    for line, row in rows:
        session = str(row.get(names[SESSION], ""))
        name = names[ARRIVAL] if row.get(names[ARRIVAL]) not in (None, "") else layout.delay
        if name is None or row.get(name) in (None, "") or (name == layout.delay and session not in last):
            message = f"neither {names[ARRIVAL]!r} nor a {layout.delay!r} behind an earlier row of its session"
            raise TraceError(path, line, message)
        (time,) = _parse(path, name, [row[name]], [line], unit, 1).tolist()
        last[session] = time if name != layout.delay else last[session] + time
        times.append(last[session])
        sessions.append(session)
    hash_ids = [row.get(names[BLOCKS]) or [] for _, row in rows] if BLOCKS in names else None
    prompts = _prompts(path, layout, [row.get(names[PROMPT]) for _, row in rows], hash_ids, lines, len(rows))
    outputs = _parse(path, names[OUTPUT], [row.get(names[OUTPUT]) for _, row in rows], lines, counts, len(rows))
    order = np.argsort(np.array(times, np.int64), kind="stable")
    for first in range(0, len(rows), CHUNK_ROWS):
        part = order[first : first + CHUNK_ROWS].tolist()
        yield TraceRows(
            np.array([times[i] for i in part], np.int64),
            prompts[part],
            outputs[part],
            [lines[i] for i in part],
            None if hash_ids is None else [hash_ids[i] for i in part],
            [sessions[i] for i in part],
        )


def _json_objects(path: str, text_lines: Iterator[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for line, text in enumerate(text_lines, 1):
        if text.isspace():
            continue
        try:
            value = parse_json(text, long_integers=True)
        except ParseError as error:
            raise TraceError(path, line, f"is not JSON (a truncated line?): {error}") from None
        if not isinstance(value, dict):
            raise TraceError(path, line, f"expected an object, found {shown(value)}")
        yield line, value


def _csv_objects(path: str, text_lines: Iterator[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.reader(text_lines)
    header = [column.strip() for column in next(reader)]
    for row in reader:
        if row and len(row) != len(header):
            message = f"{len(row)} fields, expected {len(header)} (a truncated line?)"
            raise TraceError(path, reader.line_num, message)
        if row:
            yield reader.line_num, dict(zip(header, (cell.strip() for cell in row), strict=True))


def _csv_chunks(path: str, layout: TraceLayout, text_lines: Iterator[str]) -> Iterator[TraceRows]:
    reader = csv.reader(text_lines)
    header = [column.strip() for column in next(reader)]
    columns = {role: header.index(column) for role, column in layout.columns.items()}
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
            yield from _csv_chunk(path, layout, list(zip(*rows, strict=True)), columns, whole_lines)
    raise problem


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
    path: str, layout: TraceLayout, cells: list[tuple[str, ...]], columns: Mapping[str, int], lines: list[int]
) -> Iterator[TraceRows]:
    if layout.unit == DATE:
        times: Callable[[Sequence[str]], np.ndarray] = parse_date_times_ns
    else:
        times = partial(parse_numbers_ns, unit_ns=UNITS[layout.unit])
    parsers = {ARRIVAL: times, PROMPT: parse_counts, OUTPUT: parse_counts}
    parsed = [
        partial(_parse, path, f"column {layout.columns[role]!r}", cells[columns[role]], lines, parse)
        for role, parse in parsers.items()
    ]
    session = columns.get(SESSION)
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


def _json_chunks(path: str, layout: TraceLayout, text_lines: Iterator[str]) -> Iterator[TraceRows]:
    keys = list(layout.columns.values())
    if layout.unit == DATE:
        times: Callable[[Sequence[Any]], np.ndarray] = parse_date_times_ns
    else:
        times = partial(parse_json_numbers_ns, unit_ns=UNITS[layout.unit])
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
                    rows.append(_json_row(path, line, text, keys, BLOCKS in layout.columns))
                    lines.append(line)
        except ForedraftError as error:
            problem = error
        if rows:
            cells = dict(zip(layout.columns, zip(*rows, strict=True), strict=True))
            hash_ids = cells.get(BLOCKS)
            columns = [
                partial(_parse, path, f"key {layout.columns[ARRIVAL]!r}", cells[ARRIVAL], lines, times),
                partial(_prompts, path, layout, cells[PROMPT], hash_ids, lines),
                partial(_parse, path, f"key {layout.columns[OUTPUT]!r}", cells[OUTPUT], lines, parse_json_counts),
            ]
            sessions = [str(session) for session in cells[SESSION]] if SESSION in cells else None
            yield from _above_problem(lines, columns, None if hash_ids is None else list(hash_ids), sessions)
        if problem is None and line == before:
            return
    raise problem


def _json_row(path: str, line: int, text: str, keys: Sequence[str], has_blocks: bool) -> list[Any]:
    """Return the values of the object in a line, in the order of `keys`. Raises TraceError."""
    try:
        value = parse_json(text, long_integers=True)
    except ParseError as error:
        raise TraceError(path, line, f"is not JSON (a truncated line?): {error}") from None
    missing = [key for key in keys if not isinstance(value, dict) or key not in value]
    if missing:
        lacks = f"; it lacks {', '.join(missing)}" if isinstance(value, dict) else f", found {shown(value)}"
        raise TraceError(path, line, f"expected an object with the keys {', '.join(keys)}{lacks}")
    if has_blocks and not isinstance(value[BLOCKS], list):
        raise TraceError(path, line, f"key {BLOCKS!r}: found {shown(value[BLOCKS])}, expected a list")
    return [value[key] for key in keys]


def _prompts(
    path: str,
    layout: TraceLayout,
    prompts: Sequence[Any],
    hash_ids: Sequence[list[Any]] | None,
    lines: list[int],
    count: int,
) -> np.ndarray:
    """Return the lengths of the first `count` prompts, after a check of their hash ids. Raises TraceError."""
    blocks = [] if hash_ids is None else zip(prompts[:count], hash_ids[:count], lines[:count], strict=True)
    for length, ids, line in blocks:
        if isinstance(length, int) and len(ids) != -(-length // layout.block_size):
            expected = -(-length // layout.block_size)
            raise TraceError(path, line, f"{len(ids)} hash_ids for {length} tokens: expected {expected}")
        if ids and (set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > MAX_HASH_ID):
            raise TraceError(path, line, "hash_ids: expected whole numbers, 0 ... 2**63 - 1")
    parse = parse_json_counts if layout.is_json else parse_counts
    return _parse(path, f"key {layout.columns[PROMPT]!r}", prompts, lines, parse, count)


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
