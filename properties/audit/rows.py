"""The rows of one engine, as its log tells of them: their owners, their tokens, and the steps in flight on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...observe.decoding import MalformedRecord

MAX_ROW = 1 << 20
"""The greatest row number accepted; a damaged number must not cost memory."""

_EMPTY = {
    "epoch": 0,
    "emitted": 0,
    "cap": 0,
    "first_ns": -1,
    "last_ns": -1,
    "alive": False,
    "decoding": False,
    "knows_first": False,
    "reported": False,
}  # column -> its value in a row that was never given out


class Delivery(NamedTuple):
    """What a step's decode rounds deliver: bool arrays [bs]."""

    live: np.ndarray  # the row still belongs to the request that was planned
    ended: np.ndarray  # live, and the request came to its length cap or to a stop
    stopped: np.ndarray  # ended at a stop
    went_on: np.ndarray  # ended, and rounds came after the one in which it did


class AuditedRows:
    """The columns; they grow with the greatest row number."""

    epoch: np.ndarray
    emitted: np.ndarray  # tokens delivered, those before a retraction among them
    cap: np.ndarray
    first_ns: np.ndarray
    last_ns: np.ndarray
    alive: np.ndarray
    decoding: np.ndarray  # the last chunk of the prompt is launched
    knows_first: np.ndarray  # the token that ends the prefill was delivered before
    reported: np.ndarray  # a step was found to decode it without reason; report that once for each owner

    def __init__(self) -> None:
        self.owner: list[str | None] = [None] * 8
        self.num_tokens = 0  # delivered by all rows
        for name, value in _EMPTY.items():
            setattr(self, name, np.full(8, value))

    def reach(self, row: int) -> None:
        """Make room for `row`. Raises MalformedRecord for a number that no row has."""
        if type(row) is not int or not 0 <= row <= MAX_ROW:
            raise MalformedRecord(f"row {row!r}, expected a number from 0 to {MAX_ROW:,}")
        size = len(self.owner)
        if row < size:
            return
        more = max(row + 1, 2 * size) - size
        self.owner += [None] * more
        for name, value in _EMPTY.items():
            setattr(self, name, np.concatenate([getattr(self, name), np.full(more, value)]))

    def open(self, row: int, epoch: int, owner: str, emitted: int, cap: int, first_ns: int, last_ns: int) -> None:
        self.owner[row] = owner
        self.epoch[row], self.emitted[row], self.cap[row] = epoch, emitted, cap
        self.first_ns[row], self.last_ns[row] = first_ns, last_ns
        self.alive[row], self.decoding[row], self.reported[row] = True, False, False

    def close(self, row: int) -> None:
        self.owner[row] = None
        self.alive[row] = self.decoding[row] = False

    def deliver(self, row: int, num_tokens: int) -> None:
        self.emitted[row] += num_tokens
        self.num_tokens += num_tokens

    def deliver_rounds(
        self, rows: np.ndarray, epochs: np.ndarray, lens: np.ndarray, stops: list[list[int]]
    ) -> Delivery:
        """Deliver rounds of `lens` [rounds, bs] tokens to their rows, up to each row's first stop and its cap."""
        live = self.alive[rows] & (self.epoch[rows] == epochs)
        remaining = self.cap[rows] - self.emitted[rows]
        reached = lens.sum(axis=0, dtype=np.int64)
        kept = np.minimum(reached, remaining)
        ended = reached >= remaining
        went_on = reached - lens[-1] >= remaining
        stopped = np.zeros(len(rows), bool)
        for number, column, index in sorted(stops):
            if stopped[column] or not 0 <= index < lens[number, column]:
                continue
            at = int(lens[:number, column].sum()) + index + 1
            if at <= remaining[column]:
                kept[column], ended[column], stopped[column] = at, True, True
                went_on[column] = number < len(lens) - 1
        kept = np.where(live, kept, 0)
        self.emitted[rows] += kept
        self.num_tokens += int(kept.sum())
        return Delivery(live, ended & live, stopped & live, went_on & live)

    def mark(self, rows: np.ndarray | int, first_ns: int, last_ns: int) -> None:
        """Note that these rows were delivered tokens from `first_ns` to `last_ns`."""
        first = self.first_ns[rows]
        self.first_ns[rows] = np.where(first < 0, first_ns, first)
        self.last_ns[rows] = last_ns


@dataclass(slots=True)
class AuditedStep:
    """A step that is launched and not committed."""

    step: int
    ns: int
    prefill: list[tuple[int, int, bool]]  # (row, epoch, whether the chunk is the prompt's last)
    rows: np.ndarray | None = None
    epochs: np.ndarray | None = None
    width: int = 1
    row_nodes: np.ndarray | None = None  # int64 [bs]: nodes that each row verifies; None: as many as the width
    max_rounds: int = 1
    budget: int | None = None  # drafts over all rows, where the device chooses the nodes, at most `row_nodes`

    def touches(self, row: int, epoch: int) -> bool:
        if any(chunk[:2] == (row, epoch) for chunk in self.prefill):
            return True
        return self.rows is not None and bool(((self.rows == row) & (self.epochs == epoch)).any())
