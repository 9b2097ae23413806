"""A KV store that only counts slots, for simulations that need no slot ids: the engine decides the same, and faster."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ..contract.arrays import total_of
from ..errors import InvalidFree, InvariantViolation
from .allocator import KVAllocator, Slots
from .groups import StoreSizes
from .request_table import Index, RequestTable
from .store import KVStore


class SlotCount(KVAllocator):
    """Counts the held slots, and hands every slot out as slot 0."""

    def __init__(self, num_pages: int, page_size: int = 1) -> None:
        super().__init__(0, page_size)  # no list of free pages
        self.num_pages = self._num_free_pages = num_pages
        self._unnamed = np.zeros(num_pages * page_size, dtype=np.int32)

    def allocate(self, num_slots: int) -> Slots:
        """Allocate as `KVAllocator.allocate` does, but return slot 0 for every slot."""
        if not self.can_allocate(num_slots):
            return super().allocate(num_slots)  # which raises
        self._num_free_pages -= num_slots // self.page_size
        return self._unnamed[:num_slots]

    def free(self, slots: Slots) -> None:
        """Take back the number of slots in `slots`. Raises `InvalidFree` if fewer are held."""
        if slots.size > self.num_held_slots or slots.size % self.page_size:
            raise InvalidFree(f"{slots.size} slots are given back, {self.num_held_slots} are held")
        self._num_free_pages += slots.size // self.page_size

    def check(self, holders: Iterable[Slots] | None = None) -> None:
        """Raise `InvariantViolation` ALLOC-01 unless `holders` have as many slots as are held."""
        if holders is not None and (claimed := sum(slots.size for slots in holders)) != self.num_held_slots:
            raise InvariantViolation("ALLOC-01", f"{self.num_held_slots} slots are held, {claimed} by a holder")


class SlotlessTable(RequestTable):
    """A request table without slots: rows and epochs alone, for a `SlotCount`.

    `gather` and `gather_ragged` return zeros of the right length.
    """

    def __init__(self, num_rows: int, width: int) -> None:
        super().__init__(num_rows, 0)  # no slots
        self.width = width
        self._unnamed = np.zeros(num_rows * width, dtype=np.int32)

    def write(self, rows: Index, starts: Index, counts: Index, slots: NDArray[np.int32]) -> None:
        """Do nothing."""

    def write_row(self, row: int, start: int, slots: NDArray[np.int32]) -> None:
        """Do nothing."""

    def gather(self, row: int, start: int, stop: int) -> NDArray[np.int32]:
        """Return zeros, int32 [stop − start]."""
        return self._unnamed[: stop - start]

    def gather_ragged(self, rows: Index, starts: Index, counts: Index) -> NDArray[np.int32]:
        """Return zeros, int32 [sum of counts]."""
        return self._unnamed[: total_of(counts)]


class CountingStore(KVStore):
    """A `KVStore` whose slots have no ids. It has no prefix cache, and its rows cannot be transferred."""

    def __init__(self, sizes: StoreSizes, at_once: bool = False) -> None:
        super().__init__(sizes, at_once=at_once)

    def _new_allocator(self, num_pages: int, page_size: int) -> KVAllocator:
        return SlotCount(num_pages, page_size)

    def _new_table(self, num_rows: int, width: int) -> RequestTable:
        return SlotlessTable(num_rows, width)
