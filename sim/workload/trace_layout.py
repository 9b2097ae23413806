"""Finds what the columns of a trace mean: which one has the arrival, the prompt and the output, in which unit times
are, and how many tokens a block of its hash ids has.

Formats that were published say all of it. Other CSV and JSON lines are read by the names that people use
(`arrival_ms`, `prompt_tokens`, `output_length`, …). What the file implies without saying it stands in `Layout.notes`;
where two readings are possible, the file is refused with the key that says which one is right.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path

from ...core.errors import nearest, shown
from ...core.parsing import ParseError, parse_json
from ...observe.input_files import read_lines
from .prometheus import PAGE_BEGINS
from .request_logs import READERS, log_format
from .trace_columns import ARRIVAL, OUTPUT, PROMPT, ROLES, SESSION, role_of
from .trace_inference import (
    BLOCK_SIZES,
    BLOCKS,
    DATE,
    JSON_FORMATS,
    TraceError,
    block_size_of,
    delay_of,
    seen_rows,
    unit_of,
)

FORMATS = ("azure", "mooncake", "bailian", "burstgpt", "csv", "jsonl", *READERS)
_CSV_COLUMNS = {  # the columns by role, the others that there must be, those that there may be
    "azure": ({ARRIVAL: "TIMESTAMP", PROMPT: "ContextTokens", OUTPUT: "GeneratedTokens"}, (), {}),
    "burstgpt": (
        {ARRIVAL: "Timestamp", PROMPT: "Request tokens", OUTPUT: "Response tokens"},
        ("Model", "Total tokens", "Log Type"),
        {SESSION: "Session ID", "": "Elapsed time"},
    ),
}
_MOONCAKE = {ARRIVAL: "timestamp", PROMPT: "input_length", OUTPUT: "output_length", BLOCKS: "hash_ids"}
_BAILIAN_KEYS = {"chat_id", "parent_chat_id"}
_KNOWN = (
    "known are CSV and JSON lines with a column of arrivals, one of prompt tokens and one of output tokens, under their usual "
    "names or those of workload.columns; the traces of Azure (azure), Mooncake, Qwen-Bailian and BurstGPT; logs of vLLM and SGLang with "
    "their requests (vllm-log, sglang-log); OpenTelemetry spans (otlp); and, for `foredraft trace` alone, Prometheus pages of "
    "these servers. docs/traces.md describes them"
)
_LONGEST_HEADER = 4096
MOST_SEEN = 1_000  # rows of a table, for the unit of its times and the size of its blocks
MOST_SEARCHED = 20_000  # lines of a log, for one that tells its format
_SEPARATORS = {";": "semicolons", "\t": "tabs"}  # other than the comma that is expected
_MOST_KEYS = 8  # of an object that are shown


@dataclass(frozen=True, slots=True)
class TraceLayout:
    """How a file is read.

    format:     one of `FORMATS`
    columns:    the names of its columns or keys, by role
    unit:       of its times: one of `UNITS`, or `DATE`
    block_size: tokens of a block of hash ids
    delay:      the column of the time behind the row before of the session, where rows have that instead of an arrival
    notes:      what the file does not say but implies, in words
    """

    format: str
    columns: Mapping[str, str] = field(default_factory=dict)
    unit: str = DATE
    block_size: int = BLOCK_SIZES[0]
    delay: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_json(self) -> bool:
        return self.format in JSON_FORMATS


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What a scenario says of its trace: `workload.format`, `columns` and `time_unit`."""

    format: str = "auto"
    columns: str | None = None
    time_unit: str = "auto"


AS_IT_SAYS = TraceOptions()


def resolve_layout(path: str, options: TraceOptions = AS_IT_SAYS) -> TraceLayout:
    """Return the layout by the file's first lines and by what the scenario says. Raises TraceError, and ConfigError
    for a file that cannot be read.

    A run asks several times (for its notices, its requests, its key's conditions). The first lines of a file that has
    not changed since are read once.
    """
    file = Path(path)
    state = file.stat() if file.is_file() else None
    return _resolve(path, options, None if state is None else (state.st_ino, state.st_mtime_ns, state.st_size))


@lru_cache(maxsize=16)
def _resolve(path: str, options: TraceOptions, state: tuple[int, int, int] | None) -> TraceLayout:
    first = first_line(path)
    given = _given_columns(path, options.columns)
    name, columns = _recognised(path, first, options.format, given)
    if name in READERS:
        if given or options.time_unit != "auto":
            message = f"{name} has no columns: leave workload.columns and workload.time_unit out"
            raise TraceError(path, None, message)
        return TraceLayout(name)
    notes = []
    if name in ("csv", "jsonl"):
        found = ", ".join(f"{columns[role]!r} as {role}" for role in (*ROLES, BLOCKS) if role in columns)
        ignored = [column for column in _columns_of(path, first, name) if column not in columns.values()]
        notes.append(f"reads {found}{f'; leaves out {_some(ignored)}' if ignored else ''}")
    seen = list(islice(seen_rows(path, name, columns), MOST_SEEN))
    unit, note = unit_of(path, name, columns[ARRIVAL], [row[0] for row in seen if row[0]], options.time_unit)
    notes += [note] if note else []
    delay = delay_of(path, columns, seen, unit)
    if delay is not None:
        notes.append(
            f"rows without {columns[ARRIVAL]!r} come their {delay!r} after the row before of their session, as if its answer "
            "took no time"
        )
    block_size, note = block_size_of(name, [(length, blocks) for _, length, blocks, _ in seen])
    notes += [note] if note else []
    return TraceLayout(name, columns, unit, block_size, delay, tuple(notes))


def first_line(path: str) -> str:
    """Return the first line of a file. Raises TraceError for an empty one."""
    first = next(read_lines(path), "")
    if not first.strip():
        raise TraceError(path, 1, "the file is empty" if not first else "the first line is blank, expected a header")
    return first


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(map(repr, names[:_MOST_KEYS]))}{', …' if len(names) > _MOST_KEYS else ''}"


# -- formats ----------------------------------------------------------------------------------------------------------


def _recognised(path: str, first: str, name: str, given: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return the format of a file and its columns by role; none for a log."""
    if name in READERS:
        return name, {}
    is_json = first.lstrip().startswith(("{", "["))
    if name in JSON_FORMATS or (name == "auto" and is_json):
        return _recognised_json(path, first, name, given)
    header = [] if len(first) > _LONGEST_HEADER else _header(path, first)
    if name in _CSV_COLUMNS:
        return name, _published_columns(path, name, header)
    if name == "auto" and not given:
        for known, (columns, others, optional) in _CSV_COLUMNS.items():
            if {*columns.values(), *others} <= {*header} <= {*columns.values(), *others, *optional.values()}:
                return known, _published_columns(path, known, header)
    columns = _by_names(path, header, given) if header else {}
    if name == "csv" or given or {ARRIVAL, PROMPT, OUTPUT} <= {*columns}:
        return "csv", _complete(path, header, columns)
    for known, (published, others, _) in _CSV_COLUMNS.items():
        required = {*published.values(), *others}
        if published[ARRIVAL] in header and len(required & {*header}) >= 2:
            return known, _published_columns(path, known, header)
    if len({ARRIVAL, PROMPT, OUTPUT} & {*columns}) >= 2:
        return "csv", _complete(path, header, columns)
    if log_format(islice(read_lines(path), MOST_SEARCHED)) is None and _is_header(header):
        return "csv", _complete(path, header, columns)
    return _recognised_log(path, first), {}


def _is_header(cells: Sequence[str]) -> bool:
    """Return whether these are the names of a table's columns, and no line of a text."""
    return len(cells) >= 3 and all(re.fullmatch(r"[A-Za-z_][\w.()/-]*( [\w.()/-]+)?", cell) for cell in cells)


def _recognised_log(path: str, first: str) -> str:
    if (found := log_format(islice(read_lines(path), MOST_SEARCHED))) is not None:
        return found
    if first.startswith(PAGE_BEGINS):
        message = (
            "a Prometheus page has no single requests: `foredraft trace FILE --out workload.toml` makes a workload"
        )
        raise TraceError(path, 1, message)
    is_json = first.lstrip().startswith(("{", "["))
    what = _keys_of(first) if is_json else f"no header, object or log line of a known format: {first.strip()[:80]!r}"
    raise TraceError(path, 1, f"{what}; {_separator_hint(first) or _KNOWN}")


def _recognised_json(path: str, first: str, name: str, given: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    try:
        value = parse_json(first, long_integers=True)
    except ParseError as error:
        if name == "auto" and sum(f'"{key}"' in first for key in _MOONCAKE.values()) < 2:
            return _recognised_log(path, first), {}
        raise TraceError(path, 1, f"is not JSON (a truncated line?): {error}") from None
    if not isinstance(value, dict):
        if name == "auto":
            return _recognised_log(path, first), {}
        raise TraceError(path, 1, f"expected an object with the keys {_keys_expected()}, found {shown(value)}")
    has_blocks = {BLOCKS: BLOCKS} if BLOCKS in value else {}
    if not given and len({*value} & {*_MOONCAKE.values()}) >= 2:
        columns = {role: key for role, key in _MOONCAKE.items() if role != BLOCKS} | has_blocks
        columns |= {SESSION: session} if (session := _session(value)) is not None else {}
        is_bailian = name == "bailian" or (name == "auto" and {*value} >= _BAILIAN_KEYS)
        return "bailian" if is_bailian else "mooncake", _complete(path, list(value), columns)
    columns = {**_by_names(path, list(value), given), **has_blocks}
    if name == "auto" and not given and len({ARRIVAL, PROMPT, OUTPUT} & {*columns}) < 2:
        return _recognised_log(path, first), {}
    return "jsonl" if name in ("auto", "jsonl") else name, _complete(path, list(value), columns)


def _session(keys: Iterable[str]) -> str | None:
    return next((key for key in keys if role_of(key) == SESSION), None)


def _keys_expected() -> str:
    return ", ".join(list(_MOONCAKE.values())[:3])


def _published_columns(path: str, name: str, header: Sequence[str]) -> dict[str, str]:
    columns, others, optional = _CSV_COLUMNS[name]
    required = [*columns.values(), *others]
    missing = [column for column in required if column not in header]
    if missing:
        found = ", ".join(header)
        message = f"the header of {name} traces has {', '.join(map(repr, missing))}; found: {found}"
        hint = _separator_hint(found)
        raise TraceError(path, 1, f"{message}; {hint}" if hint else message)
    unknown = [column for column in header if column not in required and column not in optional.values()]
    if unknown:
        hint = nearest(unknown[0], (*required, *optional.values()))
        raise TraceError(path, 1, f"unknown column {unknown[0]!r}{hint}")
    if len(set(header)) != len(header):
        raise TraceError(path, 1, "a column occurs twice")
    return columns | {role: column for role, column in optional.items() if role and column in header}


def _header(path: str, first: str) -> list[str]:
    try:
        return [column.strip() for column in next(csv.reader([first]))]
    except csv.Error as error:
        raise TraceError(path, 1, f"not CSV: {error}") from error


def _columns_of(path: str, first: str, name: str) -> list[str]:
    return [*parse_json(first, long_integers=True)] if name == "jsonl" else _header(path, first)


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
        columns = [cell.strip().strip('"') for cell in first.split(mark)]
        if len(columns) > 1 and any(role_of(column) == ARRIVAL for column in columns):
            return f"its columns are separated by {name}, expected commas"
    return ""


# -- names ------------------------------------------------------------------------------------------------------------


def _given_columns(path: str, text: str | None) -> dict[str, str]:
    """Return the columns by role of `arrival=NAME,prompt=NAME,…`."""
    if text is None:
        return {}
    pairs = [part.partition("=") for part in text.split(",")]
    for role, mark, column in pairs:
        if role.strip() not in ROLES or not mark or not column.strip():
            message = f"workload.columns: found {f'{role}{mark}{column}'!r}, expected arrival=NAME,prompt=NAME,output=NAME,session=NAME"
            raise TraceError(path, None, f"{message}{nearest(role.strip(), ROLES)}")
    return {role.strip(): column.strip() for role, _, column in pairs}


def _by_names(path: str, header: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """Return the columns by role: the given ones, and of other roles the one whose name fits."""
    for column in given.values():
        if column not in header:
            hint = nearest(column, header)
            raise TraceError(path, 1, f"workload.columns: no column {column!r}{hint}; found: {_some(header)}")
    columns = dict(given)
    free = [column for column in header if column not in given.values()]
    for role in ROLES:
        fitting = [column for column in free if role_of(column) == role]
        if role == ARRIVAL and len(fitting) > 1:  # a name of arrivals wins over one of any time
            fitting = [column for column in fitting if "arriv" in column.lower()] or fitting
        if role in given or not fitting:
            continue
        if len(fitting) > 1 and role != SESSION:
            message = (
                f"several columns may be the {role}: {_some(fitting)}; give --columns {role}=NAME (workload.columns)"
            )
            raise TraceError(path, 1, message)
        columns[role] = fitting[0]
    return columns


def _complete(path: str, header: Sequence[str], columns: dict[str, str]) -> dict[str, str]:
    if lacks := [role for role in (ARRIVAL, PROMPT, OUTPUT) if columns.get(role) not in header]:
        wanted = ",".join(f"{role}=NAME" for role in lacks)
        names = ", ".join(f"{role} ({columns[role]})" if role in columns else role for role in lacks)
        message = f"it lacks {names}; found: {_some(header)}; if a column has another name, give --columns {wanted} (workload.columns)"
        raise TraceError(path, 1, message)
    if twice := [column for column in columns.values() if list(header).count(column) > 1]:
        raise TraceError(path, 1, f"the column {twice[0]!r} occurs twice")
    return columns
