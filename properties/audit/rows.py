"""What a log says of the rows of one engine: whose they are, how many tokens each has delivered, and which steps in flight touch them.

The first two are columns by row number.

A commit is settled for all its rows at once: a log of a million requests has as many commits as rounds, and each costs the same few
vector operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...observe.encoding import MalformedRecord

MAX_ROW = 1 << 20
"""No engine runs as many requests at once; a damaged number must not cost memory."""


class Settled(NamedTuple):
    """What a commit's decode part delivered, as the log's own columns imply it; arrays [bs], entries of departed rows mean nothing."""

    live: np.ndarray  # bool: the row still belongs to the request that was planned
    kept: np.ndarray  # int64: tokens delivered
    ended: np.ndarray  # bool: at the length cap, or at a stop
    stopped: np.ndarray  # bool: … at a stop
    went_on: np.ndarray  # bool: rounds came after the one in which the request ended


class Rows:
    """The columns; they grow with the greatest row number."""

    def __init__(self) -> None:
        self.owner: list[str | None] = [None] * 8
        self.epoch = np.zeros(8, np.int64)
        self.emitted = np.zeros(8, np.int64)  # tokens delivered, those before a retraction among them
        self.cap = np.zeros(8, np.int64)
        self.first_ns = np.full(8, -1, np.int64)
        self.last_ns = np.full(8, -1, np.int64)
        self.alive = np.zeros(8, bool)
        self.decoding = np.zeros(8, bool)  # the last chunk of its prompt is launched

    def reach(self, row: int) -> None:
        """Make room for `row`; MalformedRecord for a number that no row has."""
        if type(row) is not int or not 0 <= row <= MAX_ROW:
            raise MalformedRecord(f"row {row!r}, expected a number from 0 to {MAX_ROW:,}")
        size = len(self.owner)
        if row < size:
            return
        more = max(row + 1, 2 * size) - size
        self.owner += [None] * more
        for name in ("epoch", "emitted", "cap", "alive", "decoding"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(more, column.dtype)]))
        for name in ("first_ns", "last_ns"):
            setattr(self, name, np.concatenate([getattr(self, name), np.full(more, -1, np.int64)]))

    def open(self, row: int, epoch: int, owner: str, emitted: int, cap: int, first_ns: int, last_ns: int) -> None:
        self.owner[row] = owner
        self.epoch[row], self.emitted[row], self.cap[row] = epoch, emitted, cap
        self.first_ns[row], self.last_ns[row] = first_ns, last_ns
        self.alive[row], self.decoding[row] = True, False

    def close(self, row: int) -> None:
        self.owner[row] = None
        self.alive[row] = self.decoding[row] = False

    def live(self, rows: np.ndarray, epochs: np.ndarray) -> np.ndarray:
        """Which of these rows still belong to those who had them at these epochs."""
        return self.alive[rows] & (self.epoch[rows] == epochs)

    def settle(self, rows: np.ndarray, epochs: np.ndarray, lens: np.ndarray, stops: list[list[int]]) -> Settled:
        """Deliver the rounds `lens` [rounds, bs] to their rows: each run is cut at its first stop, and at the request's cap."""
        live = self.live(rows, epochs)
        remaining = self.cap[rows] - self.emitted[rows]
        reached = lens.sum(axis=0, dtype=np.int64)
        before_last = reached - lens[-1]
        kept = np.minimum(reached, remaining)
        ended = reached >= remaining
        went_on = before_last >= remaining
        stopped = np.zeros(len(rows), bool)
        for number, column, index in sorted(stops):
            if stopped[column] or not 0 <= index < lens[number, column]:
                continue
            at = int(lens[:number, column].sum()) + index + 1
            if at <= remaining[column]:
                kept[column], ended[column], stopped[column] = at, True, True
                went_on[column] = number < len(lens) - 1
        delivered = np.where(live, kept, 0)
        self.emitted[rows] += delivered
        return Settled(live, delivered, ended & live, stopped & live, went_on & live)

    def mark(self, rows: np.ndarray, first_ns: int, last_ns: int) -> None:
        """These rows were delivered tokens from `first_ns` to `last_ns`."""
        first = self.first_ns[rows]
        self.first_ns[rows] = np.where(first < 0, first_ns, first)
        self.last_ns[rows] = last_ns


@dataclass(slots=True)
class Launched:
    """A step in flight. `prefill`: (row, epoch, whether the chunk is the prompt's last)."""

    step: int
    ns: int
    prefill: list[tuple[int, int, bool]]
    rows: np.ndarray | None = None
    epochs: np.ndarray | None = None
    width: int = 1
    max_rounds: int = 1

    def touches(self, row: int, epoch: int) -> bool:
        if any(chunk[:2] == (row, epoch) for chunk in self.prefill):
            return True
        return self.rows is not None and bool(((self.rows == row) & (self.epochs == epoch)).any())
