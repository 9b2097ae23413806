"""Columns that grow: those of open requests, and of values kept to the end."""

from __future__ import annotations

import numpy as np


class GrowingColumn:
    """An array with room to spare at its end."""

    def __init__(self, dtype: type) -> None:
        self._values = np.empty(1024, dtype=dtype)
        self._size = 0

    def extend(self, values: np.ndarray) -> None:
        end = self._size + len(values)
        if end > len(self._values):
            self._values = np.concatenate(
                [self._values[: self._size], np.empty(max(end, self._size), self._values.dtype)]
            )
        self._values[self._size : end] = values
        self._size = end

    @property
    def values(self) -> np.ndarray:
        """The values added so far; valid until the next `extend`."""
        return self._values[: self._size]


class OpenRequests:
    """One column entry (a *slot*) per open request; −1 is "not yet". Memory follows the greatest number open at once."""

    FIELDS = (
        "replica",
        "arrival_ns",
        "first_scheduled_ns",
        "first_token_ns",
        "last_token_ns",
        "prompt_len",
        "max_tokens",
        "num_cached",
        "num_output",
        "correct_drafts",
        "verify_rounds",
        "retractions",
    )

    def __init__(self) -> None:
        self.capacity = 0
        self.ids: list[str] = []
        self._free: list[int] = []
        self._grow(256)

    def open(self, request_id: str, replica: int, arrival_ns: int, prompt_len: int, max_tokens: int) -> int:
        if not self._free:
            self._grow(2 * self.capacity)
        slot = self._free.pop()
        self.ids[slot] = request_id
        self.table[:, slot] = (replica, arrival_ns, -1, -1, -1, prompt_len, max_tokens, 0, 0, 0, 0, 0)
        return slot

    def close(self, slots: np.ndarray) -> tuple[list[str], dict[str, np.ndarray]]:
        """Close the requests in `slots` int64 [n]; returns their ids, and their columns by name."""
        taken = self.table[:, slots]
        numbers = slots.tolist()
        ids = [self.ids[slot] for slot in numbers]
        self._free.extend(reversed(numbers))
        return ids, dict(zip(self.FIELDS, taken, strict=True))

    def _grow(self, capacity: int) -> None:
        table = np.full((len(self.FIELDS), capacity), -1, dtype=np.int64)
        if self.capacity:
            table[:, : self.capacity] = self.table
        self.table = table
        self.ids.extend([""] * (capacity - self.capacity))
        self._free.extend(range(capacity - 1, self.capacity - 1, -1))
        self.capacity = capacity
        for name, column in zip(self.FIELDS, table, strict=True):
            setattr(self, name, column)
