"""Replays recorded acceptance: the longest acceptable run at every output position of real requests.

Such a recording (one pass of target and draft over finished outputs) says what any step count would have accepted, for chains exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..draws import Purpose, hash64, request_key
from ..errors import ConfigError, Problem
from .process import AcceptanceProcess
from .tree import MAX_DEPTH


@dataclass(frozen=True, slots=True, eq=False)
class TraceAcceptance(AcceptanceProcess):
    """Replays recorded runs. Make one with `of_runs`.

    runs:     int16 [total], the runs of all requests one after the other
    starts:   int64 [n + 1], where each request's begin
    keys:     uint64 [n], `request_key` of the recorded ids, ascending
    Each request replays a recording that is drawn by (seed, its key), so any number of them can be played.
    A request that is longer than its recording starts it again.
    """

    runs: np.ndarray
    starts: np.ndarray
    keys: np.ndarray
    seed: int = 0
    max_depth: int = field(init=False)

    def __post_init__(self) -> None:
        problems = []
        if len(self.keys) == 0 or len(self.starts) != len(self.keys) + 1 or (np.diff(self.starts) < 1).any():
            problems.append(Problem("runs", "expected at least one request, each with at least one position"))
        elif self.runs.min() < 0 or self.runs.max() > MAX_DEPTH:
            problems.append(Problem("runs", f"expected runs of 0 ... {MAX_DEPTH}"))
        if problems:
            raise ConfigError("<acceptance trace>", problems)
        object.__setattr__(self, "max_depth", max(1, int(self.runs.max())))

    @classmethod
    def of_runs(cls, recorded: Mapping[str, Sequence[int]], seed: int = 0) -> TraceAcceptance:
        """Make one from runs by request id. Runs deeper than `MAX_DEPTH` are cut to it. Errors: ConfigError."""
        by_key = sorted((request_key(request), runs) for request, runs in recorded.items())
        lens = np.array([len(runs) for _, runs in by_key], np.int64)
        columns = [np.minimum(np.asarray(runs, np.int64), MAX_DEPTH).astype(np.int16) for _, runs in by_key]
        return cls(
            np.concatenate([np.empty(0, np.int16), *columns]),
            np.concatenate([[0], np.cumsum(lens)]).astype(np.int64),
            np.array([key for key, _ in by_key], np.uint64),
            seed,
        )

    def longest_run(
        self, request_keys: np.ndarray, positions: np.ndarray, shifts: np.ndarray | float = 0.0
    ) -> np.ndarray:
        """See `AcceptanceProcess`; `shifts` are ignored."""
        keys = np.atleast_1d(np.asarray(request_keys, np.uint64))
        which = (hash64(self.seed, Purpose.ACCEPTANCE, keys, 0) % np.uint64(len(self.keys))).astype(np.int64)
        starts = self.starts[which]
        where = np.atleast_1d(np.asarray(positions, np.int64)) % (self.starts[which + 1] - starts)
        return self.runs[starts + where].astype(np.int32)
