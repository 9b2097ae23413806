"""Rows and slots that wait behind a fence: a launched step may still touch them until it is committed."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from .allocator import Slots


class Departure(NamedTuple):
    """A row to be released once `fence` is committed. `tokens` int64 [≥ num_valid] are cached if they are known."""

    fence: int
    row: int
    tokens: np.ndarray | None
    num_valid: int  # KV positions that are computed and verified
    namespace: str
    has_states: bool = True  # False: a step was lost that may have changed the row's recurrent states


class Fence:
    """What waits, in the order in which it came."""

    def __init__(self) -> None:
        self.rows: list[Departure] = []
        self.slots: deque[tuple[int, Slots]] = deque()  # the step, and slots that a running row no longer reads

    def slots_due(self, committed: int) -> list[Slots]:
        """Remove and return the slots that waited for steps up to `committed`."""
        due: list[Slots] = []
        while self.slots and self.slots[0][0] <= committed:
            due.append(self.slots.popleft()[1])
        return due

    def rows_due(self, committed: int) -> list[Departure]:
        """Remove and return the rows that waited for steps up to `committed`."""
        if not self.rows:
            return []
        due = [departure for departure in self.rows if departure.fence <= committed]
        if due:
            self.rows = [departure for departure in self.rows if departure.fence > committed]
        return due
