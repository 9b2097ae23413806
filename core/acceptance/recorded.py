"""Recorded acceptance: the longest acceptable run at every output position of real requests, replayed.

Such a recording (one pass of target and draft over finished outputs) answers what any step count would have
accepted, for chains exactly. Two written forms are read, line by line:

    JSONL   {"request": "a17", "runs": [3, 2, 1, 0, 5, …]}           one line per request
    CSV     request,position,longest_run                             one line per position, 0, 1, 2, … within a request
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..draws import Purpose, hash64, request_key
from ..errors import ConfigError, ForetokenError, Problem
from .process import AcceptanceProcess
from .tree import MAX_DEPTH

_CSV_HEADER = ["request", "position", "longest_run"]


class AcceptanceTraceError(ForetokenError):
    """A recording that cannot be read: which source, which line, what was found."""

    def __init__(self, source: str, line: int, message: str) -> None:
        super().__init__(f"{source}, line {line}: {message}" if line else f"{source}: {message}")
        self.source, self.line = source, line


@dataclass(frozen=True, slots=True, eq=False)
class TraceAcceptance(AcceptanceProcess):
    """Replays recorded runs. Make one with `of_runs` or `from_lines`.

    runs:     int16 [total], all requests' runs behind each other
    starts:   int64 [n + 1], where each begins
    keys:     uint64 [n], `request_key` of the recorded ids, ascending
    assign:   "sampled": a request replays a recording drawn by (seed, its key), so any number of them can be played;
              "same": the recording of the same key, an error if there is none
    A request that is longer than its recording begins it again.
    """

    runs: np.ndarray
    starts: np.ndarray
    keys: np.ndarray
    assign: str = "sampled"
    seed: int = 0
    max_depth: int = field(init=False)

    def __post_init__(self) -> None:
        problems = []
        if self.assign not in ("sampled", "same"):
            problems.append(Problem("assign", f"{self.assign!r}: expected 'sampled' or 'same'"))
        if len(self.keys) == 0 or len(self.starts) != len(self.keys) + 1 or (np.diff(self.starts) < 1).any():
            problems.append(Problem("runs", "expected at least one request, each with at least one position"))
        elif self.runs.min() < 0 or self.runs.max() > MAX_DEPTH:
            problems.append(Problem("runs", f"expected runs of 0 ... {MAX_DEPTH}"))
        if problems:
            raise ConfigError("<acceptance trace>", problems)
        object.__setattr__(self, "max_depth", max(1, int(self.runs.max())))

    @classmethod
    def of_runs(cls, recorded: Mapping[str, Sequence[int]], assign: str = "sampled", seed: int = 0) -> TraceAcceptance:
        """From runs by request id. Runs deeper than `MAX_DEPTH` are cut to it. Errors: ConfigError."""
        by_key = sorted((request_key(request), runs) for request, runs in recorded.items())
        lens = np.array([len(runs) for _, runs in by_key], np.int64)
        columns = [np.minimum(np.asarray(runs, np.int64), MAX_DEPTH).astype(np.int16) for _, runs in by_key]
        return cls(
            np.concatenate([np.empty(0, np.int16), *columns]),
            np.concatenate([[0], np.cumsum(lens)]).astype(np.int64),
            np.array([key for key, _ in by_key], np.uint64),
            assign,
            seed,
        )

    @classmethod
    def from_lines(cls, lines: Iterable[str], source: str, assign: str = "sampled", seed: int = 0) -> TraceAcceptance:
        """From the lines of a file (an open file will do) in either form. Errors: AcceptanceTraceError with source
        and line."""
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
        return cls.of_runs(recorded, assign, seed)

    def longest_run(
        self, request_keys: np.ndarray, positions: np.ndarray, shifts: np.ndarray | float = 0.0
    ) -> np.ndarray:
        """As in the port; `shifts` are ignored. With assign "same", ConfigError names a key without recording."""
        keys = np.atleast_1d(np.asarray(request_keys, np.uint64))
        if self.assign == "sampled":
            which = (hash64(self.seed, Purpose.ACCEPTANCE, keys, 0) % np.uint64(len(self.keys))).astype(np.int64)
        else:
            which = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
            missing = keys[self.keys[which] != keys]
            if len(missing):
                message = f"request key {int(missing[0]):#x} was not recorded: expected assign='sampled'?"
                raise ConfigError("<acceptance trace>", [Problem("assign", message)])
        starts = self.starts[which]
        where = np.atleast_1d(np.asarray(positions, np.int64)) % (self.starts[which + 1] - starts)
        return self.runs[starts + where].astype(np.int32)


def _read_object(recorded: dict[str, list[int]], source: str, number: int, line: str) -> None:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise AcceptanceTraceError(source, number, f"not JSON (a truncated line?): {error}") from error
    if not isinstance(value, dict) or set(value) != {"request", "runs"} or not isinstance(value["runs"], list):
        raise AcceptanceTraceError(source, number, 'expected an object with "request" and a list "runs"')
    request, runs = str(value["request"]), value["runs"]
    if request in recorded:
        raise AcceptanceTraceError(source, number, f"request {request!r} occurs twice")
    if not runs or any(type(run) is not int or run < 0 for run in runs):
        raise AcceptanceTraceError(source, number, "runs: expected at least one whole number, none negative")
    recorded[request] = runs


def _read_row(recorded: dict[str, list[int]], source: str, number: int, line: str) -> None:
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(_CSV_HEADER):
        raise AcceptanceTraceError(source, number, f"{len(cells)} fields, expected 3 (a truncated line?)")
    if not (cells[1].isdecimal() and cells[2].isdecimal()):
        raise AcceptanceTraceError(source, number, f"{line.strip()!r}: expected whole numbers, none negative")
    runs = recorded.setdefault(cells[0], [])
    if int(cells[1]) != len(runs):
        message = f"position {cells[1]} of request {cells[0]!r}: expected {len(runs)}"
        raise AcceptanceTraceError(source, number, message)
    runs.append(int(cells[2]))
