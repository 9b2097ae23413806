"""Reads recordings of acceptance: the longest acceptable run at every output position of real requests. Two forms:

JSONL   {"request": "a17", "runs": [3, 2, 1, 0, 5, …]}           one line per request
CSV     request,position,longest_run                             one line per position, 0, 1, 2, … within a request
"""

from __future__ import annotations

from collections.abc import Iterable

from ....core.errors import ForedraftError
from ....core.parsing import ParseError, parse_json
from ....observe.input_files import read_lines

_CSV_HEADER = ["request", "position", "longest_run"]
_MAX_COUNT = 2**31 - 1


class AcceptanceTraceError(ForedraftError):
    """A recording that cannot be read; the message names the source, the line, and what was found."""

    def __init__(self, source: str, line: int, message: str) -> None:
        super().__init__(f"{source}, line {line}: {message}" if line else f"{source}: {message}")
        self.source: str = source
        self.line: int = line


def load_recorded_runs(path: str) -> dict[str, list[int]]:
    """Read the runs in a file, by request id. Raises AcceptanceTraceError, or ConfigError for a file
    that cannot be read."""
    return parse_recorded_runs(read_lines(path), path)


def parse_recorded_runs(lines: Iterable[str], source: str) -> dict[str, list[int]]:
    """Parse lines in either form. Raises AcceptanceTraceError."""
    numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    first = next(numbered, None)
    if first is None:
        raise AcceptanceTraceError(source, 0, "empty: expected JSON objects or a CSV header")
    number, line = first
    recorded: dict[str, list[int]] = {}
    if line.lstrip().startswith("{"):
        _read_object(recorded, source, number, line)
        for number, line in numbered:
            _read_object(recorded, source, number, line)
    else:
        if [cell.strip() for cell in line.split(",")] != _CSV_HEADER:
            raise AcceptanceTraceError(source, number, f"{line.strip()[:80]!r}: expected {','.join(_CSV_HEADER)}")
        for number, line in numbered:
            _read_row(recorded, source, number, line)
    if not recorded:
        raise AcceptanceTraceError(source, 0, "no rows behind the header")
    return recorded


def _read_object(recorded: dict[str, list[int]], source: str, number: int, line: str) -> None:
    try:
        value = parse_json(line, long_integers=True)
    except ParseError as error:
        raise AcceptanceTraceError(source, number, f"is not JSON (a truncated line?): {error}") from None
    if not isinstance(value, dict) or set(value) != {"request", "runs"} or not isinstance(value["runs"], list):
        raise AcceptanceTraceError(source, number, 'expected an object with "request" and a list "runs"')
    request, runs = str(value["request"]), value["runs"]
    if request in recorded:
        raise AcceptanceTraceError(source, number, f"request {request!r} occurs twice")
    if not runs or any(type(run) is not int or not 0 <= run <= _MAX_COUNT for run in runs):
        raise AcceptanceTraceError(source, number, f"runs: expected at least one whole number, each 0 ... {_MAX_COUNT}")
    recorded[request] = runs


def _read_row(recorded: dict[str, list[int]], source: str, number: int, line: str) -> None:
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(_CSV_HEADER):
        raise AcceptanceTraceError(source, number, f"{len(cells)} fields, expected 3 (a truncated line?)")
    if not all(
        cell.isascii() and cell.isdecimal() and len(cell) <= 10 and int(cell) <= _MAX_COUNT for cell in cells[1:]
    ):
        message = f"{line.strip()[:80]!r}: expected whole numbers, each 0 ... {_MAX_COUNT}"
        raise AcceptanceTraceError(source, number, message)
    runs = recorded.setdefault(cells[0], [])
    if int(cells[1]) != len(runs):
        message = f"position {cells[1]} of request {cells[0]!r}: expected {len(runs)}"
        raise AcceptanceTraceError(source, number, message)
    runs.append(int(cells[2]))
