"""The slots that a request takes beside those of its tokens: the memory of its recurrent states and of layers with a
window.

They are pages of the same pool, so one number of free slots bounds all that requests keep. They hold no token of the
pool and do not stand in the request table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..contract.arrays import Int64Array
from .allocator import KVAllocator, Slots
from .request_table import ceil_to_page


@dataclass(frozen=True, slots=True)
class BesideSlots:
    """The slots that a row takes beside those of its tokens, for what other layers keep of its request.

    `request_slots`: its recurrent states. `window_slots`: of each of its last `window` tokens, in layers with a window;
    a slot of the pool counts the other layers only.
    """

    request_slots: int = 0
    window: int = 0
    window_slots: float = 0.0
    page_size: int = 1

    def __bool__(self) -> bool:
        return bool(self.request_slots or self.window_slots)

    def of(self, length: int, chunk: int = 0) -> int:
        """Return the slots, page aligned, beside `length` tokens; `chunk`: tokens computed at once behind a window."""
        in_window = math.ceil(self.window_slots * min(length, self.window + chunk))
        return ceil_to_page(self.request_slots + in_window, self.page_size)

    def total(self, slots: int) -> int:
        """Return `slots` slots of tokens and those beside them."""
        return slots + self.of(slots) if self else slots

    def of_each(self, lengths: Int64Array) -> Int64Array:
        """Return the slots beside each of `lengths` tokens, int64 [n]."""
        in_window = np.ceil(self.window_slots * np.minimum(lengths, self.window)).astype(np.int64)
        return ceil_to_page(self.request_slots + in_window, self.page_size)

    def longest_in(self, num_slots: int, chunk: int) -> int:
        """Return the tokens of the longest request that `num_slots` slots hold while its last `chunk` is computed."""
        longest = num_slots - self.of(self.window + chunk, chunk)
        if self.window_slots and longest < self.window + chunk:
            longest = int((num_slots - self.request_slots - self.page_size) / (1 + self.window_slots))
        return longest // self.page_size * self.page_size


NOTHING_BESIDE = BesideSlots()
_NONE: Slots = np.empty(0, dtype=np.int32)


class HeldBeside:
    """The slots that each open row holds by a rule. The caller sees to it that so many are free."""

    def __init__(self, rule: BesideSlots, allocator: KVAllocator) -> None:
        self.rule = rule
        self.allocator = allocator
        self._held: dict[int, Slots] = {}

    def open(self, row: int, length: int) -> None:
        """Take the slots beside the first `length` tokens of a row."""
        self._held[row] = self.allocator.allocate(self.rule.of(length))

    def close(self, row: int) -> None:
        """Give back all slots beside a row."""
        if row in self._held:
            self.allocator.free(self._held.pop(row))

    def growth(self, before: Int64Array, after: Int64Array) -> Sequence[int]:
        """Return by how many slots rows grow whose lengths are `before` and then `after`; empty if none does."""
        if not self.rule.window_slots:
            return ()
        growth: list[int] = (self.rule.of_each(after) - self.rule.of_each(before)).tolist()
        return growth

    def grow(self, rows: Iterable[int], growth: Sequence[int]) -> None:
        """Take so many slots more for each row."""
        for row, count in zip(rows, growth, strict=False):
            if count:
                self._held[row] = np.concatenate([self._held[row], self.allocator.allocate(count)])

    def trim(self, rows: Iterable[int], excess: Sequence[int]) -> None:
        """Give back so many slots of each row."""
        for row, count in zip(rows, excess, strict=False):
            if count:
                kept = self._held[row].size - count
                self.allocator.free(self._held[row][kept:])
                self._held[row] = self._held[row][:kept]

    def num_of(self, row: int) -> int:
        """Return how many slots a row holds."""
        return self.slots_of(row).size

    def slots_of(self, row: int) -> Slots:
        """Return the slots that a row holds."""
        return self._held.get(row, _NONE)

    def holders(self) -> Iterable[Slots]:
        """Return the slots of each row."""
        return self._held.values()
