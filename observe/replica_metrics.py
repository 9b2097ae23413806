"""What the metrics know of one replica between its events."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np


class ReplicaMetrics:
    """What is known of one engine between its events."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.config: dict[str, Any] = {}
        self.slots: dict[str, int] = {}  # open requests: id → slot
        self.rows: dict[int, int] = {}  # those with a row: slot → row
        self.awaited: dict[int, None] = {}  # slots of requests whose KV is still to arrive from a prefill worker
        self.leaving: list[tuple[int, int]] = []  # slot and time of running requests aborted since the last commit
        self.slot_of_row = np.zeros(64, dtype=np.int64)
        self.planned: deque[tuple[int, int]] = deque()  # per uncommitted step: held slots, waiting
        self.waiting = 0
        self.held = 0
        self.max_held = 0
        self.last_steps = -1
        self.busy_ns: int | None = None
        self._seen_rows: np.ndarray | None = None
        self._seen_slots = np.empty(0, dtype=np.int64)

    @property
    def capacity(self) -> int:
        """KV slots of the pool; 0 if the engine did not say."""
        return self.config.get("num_pages", 0) * self.config.get("page_size", 1)

    def enter(self, slot: int, row: int) -> None:
        if row >= len(self.slot_of_row):
            self.slot_of_row = np.concatenate([self.slot_of_row, np.zeros(row + 1, dtype=np.int64)])
        self.slot_of_row[row] = slot
        self.rows[slot] = row

    def slots_of(self, rows: np.ndarray) -> np.ndarray:
        """Slots of a decode batch. Steps share one array of rows while nobody comes or goes."""
        if rows is not self._seen_rows:
            self._seen_rows, self._seen_slots = rows, self.slot_of_row[rows]
        return self._seen_slots
