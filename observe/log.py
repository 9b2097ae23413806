"""The event log: `events.jsonl`, a header, the events of all replicas in their order, and a last line that says how the
run ended.

A log is written under its final name from the first line on. An interrupted run ends it as incomplete; a killed one has
no last line `{"t":"end",…}`: readable, and visibly not complete. A long one may go on in `events.2.jsonl`,
`events.3.jsonl` and so on, which are read as one with the first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from heapq import merge
from pathlib import Path
from typing import Any, NamedTuple

from ..core.contract.events import Event
from ..core.errors import ForedraftError, nearest
from ..core.parsing import parse_json
from .encoding import LineEncoder, dump_line

SCHEMA = 1
MAX_LINE_BYTES = 1 << 28  # a prompt of 2**24 tokens is about 2**27 bytes
_BUFFER_CHARACTERS = 1 << 20

_REQUIRED: dict[str, tuple[tuple[str, type | tuple[type, ...]], ...]] = {
    "header": (("schema", int),),
    "engine": (("r", int), ("config", dict)),
    "submit": (("r", int), ("ns", int), ("id", str), ("prompt", dict), ("max_tokens", int)),
    "abort": (("r", int), ("ns", int), ("id", str)),
    "plan": (("r", int), ("ns", int), ("step", (int, type(None))), ("waiting", int), ("held", int)),
    "commit": (("r", int), ("ns", int), ("step", int), ("at", (int, list))),
    "lost": (("r", int), ("ns", int), ("step", int), ("cause", str), ("message", str), ("steps", list)),
    "resume": (("r", int), ("ns", int), ("restarted", bool)),
    "retract": (("r", int), ("ns", int), ("id", str)),
    "deny": (("r", int), ("ns", int), ("count", int)),
    "reload": (("r", int), ("ns", int), ("table", str)),
    "handoff": (("r", int), ("ns", int), ("move", str)),
    "end": (("complete", bool),),
}


class LogError(ForedraftError):
    """A log that cannot be written or read; the message names file, line (0: the file as a whole), what was
    found and expected."""

    def __init__(self, path: str | os.PathLike[str], line: int, message: str) -> None:
        place = f"{os.fspath(path)}:{line}" if line else os.fspath(path)
        super().__init__(f"{place}: {message}")
        self.path: str = os.fspath(path)
        self.line: int = line
        self.message: str = message


class LogLine(NamedTuple):
    """One line of a log: its number (from 1), its kind ("t"), the object, and the line as it stands in the file."""

    line: int
    kind: str
    data: dict[str, Any]
    text: str


class EventLog:
    """Writes a log. `header` describes the run (the resolved scenario); schema and package version are added in front.

    `part_bytes`: the log goes on in another file once one has so many. As a context manager it closes the log as
    complete, or as incomplete if an exception passes through. Errors: LogError.
    """

    def __init__(
        self, path: str | os.PathLike[str], header: Mapping[str, Any], *, part_bytes: int | None = None
    ) -> None:
        self.path: Path = Path(path)
        self.num_events: int = 0
        self._part_bytes = part_bytes
        self._part = 1
        self._lines: list[str] = []
        self._characters = 0
        self._sinks: dict[int, Callable[[Event], None]] = {}
        try:
            first = dump_line({"t": "header", "schema": SCHEMA, "foredraft": package_version(), **header})
        except (TypeError, ValueError) as error:
            raise LogError(path, 1, f"a header that is no JSON: {error}") from error
        self._open()
        self._lines.append(first)
        self.flush()

    def _open(self) -> None:
        path = part_path(self.path, self._part)
        try:
            self._file = path.open("w", encoding="ascii", newline="\n")
        except OSError as error:
            raise LogError(path, 0, f"cannot be written: {error.strerror or error}") from error
        self._written = 0

    def sink(self, replica: int) -> Callable[[Event], None]:
        """Return the event sink for the engine of `replica`; one per replica."""
        if replica in self._sinks:
            raise ValueError(f"replica {replica} has a sink already; two engines cannot share one")
        encode = LineEncoder(replica).encode

        def write(event: Event) -> None:
            self._add(encode(event))

        self._sinks[replica] = write
        return write

    def add_parts(self, paths: Iterable[str | os.PathLike[str]]) -> None:
        """Add the events of whole logs of other replicas of the run, in the order of their times, and of replicas at
        the same time."""
        with ExitStack() as files:
            logs = [files.enter_context(Path(path).open(encoding="ascii")) for path in paths]
            for line in merge(*map(_event_lines, logs), key=_place):
                self._add(line)

    def _add(self, line: str) -> None:
        self._lines.append(line)
        self.num_events += 1
        self._characters += len(line)
        if self._characters >= _BUFFER_CHARACTERS:
            self.flush()

    def flush(self) -> None:
        """Hand everything written so far to the operating system."""
        if not self._lines:
            return
        self._lines.append("")
        text = "\n".join(self._lines)
        self._lines.clear()
        self._characters = 0
        try:
            if self._part_bytes is not None and self._written >= self._part_bytes:
                self._file.close()
                self._part += 1
                self._open()
            self._written += len(text)
            self._file.write(text)
            self._file.flush()
        except (OSError, ValueError) as error:
            raise LogError(self.path, 0, f"cannot be written: {error}") from error

    def close(self, complete: bool, **facts: Any) -> None:
        """Write the last line, with `facts` about the end of the run. A second call does nothing."""
        if self._file.closed:
            return
        try:
            end = {"t": "end", "complete": complete, "events": self.num_events, **facts}
            self._lines.append(dump_line(end))
            self.flush()
        finally:
            try:
                self._file.close()
            except OSError as error:
                raise LogError(self.path, 0, f"cannot be written: {error}") from error

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(complete=kind is None)


def _event_lines(log: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a log, without the newlines; not the first and the last line."""
    return (line[:-1] for line in log if not line.startswith(('{"t":"header"', '{"t":"end"')))


_PLACE = re.compile(r'\{"t":"\w+","r":(\d+),(?:"ns":(\d+))?')


def _place(line: str) -> tuple[int, int]:
    """Return time and replica of an event; −1 and the replica for the line of an engine."""
    found = _PLACE.match(line)
    assert found is not None, f"{line[:40]}: expected kind, replica and time"
    return int(found[2] or -1), int(found[1])


def read_log(path: str | os.PathLike[str], *, allow_truncated: bool = False) -> Iterator[LogLine]:
    """Yield the records of a log, header first and end last.

    Raises LogError for a missing file, a line that is no record, another schema, and, unless `allow_truncated`, for a
    log that breaks off (inside a line, or without its last line). With `allow_truncated` a broken last line is left
    out.
    """
    first, part, ended = Path(path), 1, False
    while True:
        place, line = part_path(first, part), 0
        try:
            with place.open("rb") as file:
                while raw := file.readline(MAX_LINE_BYTES):
                    line += 1
                    if not raw.endswith(b"\n"):
                        if len(raw) >= MAX_LINE_BYTES:
                            raise LogError(place, line, f"a line of more than {MAX_LINE_BYTES} bytes")
                        if allow_truncated and (part, line) > (1, 1):
                            return
                        raise LogError(place, line, "the log breaks off inside this line; expected a whole record")
                    if ended:
                        raise LogError(place, line, "a record after the end; expected nothing more")
                    record = _parse(place, line, raw, is_header=(part, line) == (1, 1))
                    ended = record.kind == "end"
                    yield record
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
            raise LogError(place, 0, f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
        if ended or not part_path(first, part + 1).exists():
            break
        part += 1
    if not line and part == 1:
        raise LogError(path, 0, "is empty; expected a header")
    if not ended and not allow_truncated:
        message = 'the log breaks off after this line; expected {"t":"end",…}: the run was interrupted'
        raise LogError(place, line, message)


def part_path(path: Path, number: int) -> Path:
    """Return the file of a part of a log, counted from 1."""
    return path if number == 1 else path.with_name(f"{path.stem}.{number}{path.suffix}")


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the first record of a log. Errors as for `read_log`."""
    return next(read_log(path, allow_truncated=True)).data


def _parse(path: str | os.PathLike[str], line: int, raw: bytes, *, is_header: bool) -> LogLine:
    try:
        text = raw[:-1].decode("utf-8")
        data = parse_json(text)
    except ValueError as error:
        raise LogError(path, line, f"is not JSON: {error}") from error
    kind = data.get("t") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in _REQUIRED:
        hint = nearest(kind, _REQUIRED) if isinstance(kind, str) else ""
        raise LogError(path, line, f'"t" is {kind!r}{hint}; expected one of {", ".join(_REQUIRED)}')
    if (kind == "header") != is_header:
        found = "a second header" if kind == "header" else f"a record of kind {kind!r}"
        raise LogError(path, line, f"{found}; expected the header in line 1 and only there")
    for key, expected in _REQUIRED[kind]:
        value = data.get(key)
        wrong_bool = isinstance(value, bool) and expected is not bool
        if key not in data or wrong_bool or not isinstance(value, expected):
            found = repr(value) if key in data else "missing"
            raise LogError(path, line, f'"{key}" of a {kind!r} record is {found}; expected {_type_name(expected)}')
    if kind == "header" and data["schema"] != SCHEMA:
        raise LogError(path, line, f"schema {data['schema']}; this version reads schema {SCHEMA}")
    return LogLine(line, kind, data, text)


def _type_name(expected: type | tuple[type, ...]) -> str:
    names = {
        int: "an integer",
        dict: "an object",
        str: "a string",
        list: "a list",
        bool: "a boolean",
        type(None): "null",
    }
    kinds = expected if isinstance(expected, tuple) else (expected,)
    return " or ".join(names[kind] for kind in kinds)


def package_version() -> str:
    """Return the version of the installed package."""
    from importlib import metadata  # slow to import, and only a log needs it

    try:
        return metadata.version("foredraft")
    except metadata.PackageNotFoundError:
        return "unknown"
