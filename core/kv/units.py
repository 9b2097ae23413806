"""The units that the rows hold of one group of layers, and those of them that the prefix cache keeps.

A unit is free, or it belongs to one row, or to the prefix cache with any number of rows that read it (`PageState` has
the same states for pages). The cache names a unit by a *tag*: the unit with the number of its stay in the cache. A tag
in a node of the tree is stale once the unit was evicted, so an eviction does not look for the node.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..contract.arrays import BoolArray, Int64Array
from ..errors import InvariantViolation
from .allocator import KVAllocator, Slots
from .groups import KVGroup
from .request_table import RequestTable

Tags = Int64Array
_UNIT = (1 << 31) - 1
_NONE: Slots = np.empty(0, dtype=np.int32)

MakeAllocator = Callable[[int, int], KVAllocator]
MakeTable = Callable[[int, int], RequestTable]


class UnitPool:
    """The units of a group: those in use take whole pages of the pool of full layers, as many as they fill together."""

    def __init__(self, group: KVGroup, pages: KVAllocator, make: MakeAllocator) -> None:
        parts = group.pages_of(1 << 20) / (1 << 20)
        most = int(pages.num_pages / parts) if group.capacity is None else group.capacity
        self.group = group
        self.ids: KVAllocator = make(most, 1)
        self._pages = pages
        self._held: list[Slots] = []
        self._num_held = 0

    @property
    def num_used(self) -> int:
        return self.ids.num_held_slots

    def slots_for(self, num_units: int) -> int:
        """Return by how many slots of full layers the pool grows with so many units more; below 0: fewer."""
        used, group = self.num_used, self.group
        return (group.pages_of(used + num_units) - group.pages_of(used)) * self._pages.page_size

    def allocate(self, num_units: int) -> Slots:
        """Take units, int32 [n]. The caller sees to it that so many are free, with their pages."""
        self._resize(self.num_used + num_units)
        return self.ids.allocate(num_units)

    def free(self, units: Slots) -> None:
        """Give units back, and the pages that are no longer needed."""
        if units.size:
            self.ids.free(units)
            self._resize(self.num_used)

    def _resize(self, num_units: int) -> None:
        wanted = self.group.pages_of(num_units) * self._pages.page_size
        if wanted > self._num_held:
            self._held.append(self._pages.allocate(wanted - self._num_held))
        else:
            excess = self._num_held - wanted
            while excess:
                last = self._held.pop()
                keep = max(last.size - excess, 0)
                self._pages.free(last[keep:])
                if keep:
                    self._held.append(last[:keep])
                excess -= last.size - keep
        self._num_held = wanted

    def slots(self) -> Iterator[Slots]:
        """Yield the slots of full layers that the units take."""
        return iter(self._held)


class GroupUnits(ABC):
    """The units of a group, by rows and in the cache. `WindowUnits` and `StateUnits` say which a row holds.

    `clock` is that of the prefix cache, None without one.
    """

    def __init__(
        self, group: KVGroup, pages: KVAllocator, make: MakeAllocator, clock: Callable[[], int] | None
    ) -> None:
        self.group = group
        self.pool: UnitPool = UnitPool(group, pages, make)
        self._clock = clock
        size = self.pool.ids.num_pages + 1 if clock is not None else 1
        self._stays: Tags = np.zeros(size, dtype=np.int64)  # of each unit: how often it was cached, and is now if odd
        self._readers = np.zeros(size, dtype=np.int32)  # rows that hold a cached unit
        self._evictable: dict[int, int] = {}  # cached units that no row holds -> since when, oldest first

    # -- the cache ----------------------------------------------------------------------------------------------------

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    @property
    def num_available(self) -> int:
        """Units that `allocate` could get from the group's own pool."""
        return self.pool.ids.num_free_slots + len(self._evictable)

    @property
    def oldest(self) -> int | None:
        """The time since which the unit that is evicted first is unused; None if there is no such unit."""
        return next(iter(self._evictable.values()), None)

    def evict(self) -> None:
        """Free the cached unit that was not used for longest."""
        unit = next(iter(self._evictable))
        del self._evictable[unit]
        self._stays[unit] += 1
        self.pool.free(np.array([unit], dtype=np.int32))

    def is_cached(self, tags: Tags) -> BoolArray:
        """Return which tags name units that are still cached, bool [n]."""
        units = tags & _UNIT
        is_cached: BoolArray = (tags != 0) & (self._stays[units] == tags >> 31)
        return is_cached

    def units_in(self, tags: Tags) -> Slots:
        """Return the units of these tags that are cached, int32."""
        return (tags[self.is_cached(tags)] & _UNIT).astype(np.int32)

    def num_evictable_in(self, units: Slots) -> int:
        """Return how many of these cached units no row holds."""
        return int(np.count_nonzero(self._readers[units] == 0))

    def cache(self, units: Slots, is_held: bool) -> Tags:
        """Give units to the cache. `is_held`: a row holds each of them still. Returns their tags."""
        self._stays[units] += 1
        self._readers[units] = is_held
        if not is_held:
            self._evictable.update(dict.fromkeys(units.tolist(), self._now()))
        return self._stays[units] << 31 | units

    def uncache(self, units: Slots) -> None:
        """Free cached units: their node leaves the tree, so no row reads them."""
        for unit in units.tolist():
            if self._evictable.pop(unit, None) is None:
                raise InvariantViolation("GROUP-03", f"unit {unit} leaves the cache while a row reads it")
        self._stays[units] += 1
        self.pool.free(units)

    def take_over(self, unit: int) -> None:
        """Let a cached unit that one row holds belong to this row alone."""
        self._stays[unit] += 1

    def read(self, units: Slots) -> None:
        """Hold cached units for a row that reads them."""
        for unit in units[self._readers[units] == 0].tolist():
            del self._evictable[unit]
        self._readers[units] += 1

    def release(self, units: Slots) -> None:
        """Give up the units of rows: what is cached stays until it is evicted, the others are free. A cached unit comes
        once for each row that has read it."""
        if self._clock is None:
            self.pool.free(units)
            return
        is_cached = self._stays[units] & 1 == 1
        self.pool.free(units[~is_cached])
        cached = units[is_cached]
        np.subtract.at(self._readers, cached, 1)
        left = self._readers[cached]
        if left.size and left.min() < 0:
            raise InvariantViolation("GROUP-03", f"unit {cached[left.argmin()]} is released more often than read")
        self._evictable.update(dict.fromkeys(cached[left == 0].tolist(), self._now()))

    @abstractmethod
    def units_of(self, row: int) -> Slots:
        """Return the units that a row holds."""

    def num_gained_without(self, rows: Sequence[int]) -> int:
        """Return how many units more are free or evictable once these rows have left."""
        if not rows:
            return 0
        units = np.concatenate([self.units_of(row) for row in rows])
        if self._clock is None:
            return units.size
        own = self._stays[units] & 1 == 0
        cached, times = np.unique(units[~own], return_counts=True)
        return int(np.count_nonzero(own)) + int(np.count_nonzero(self._readers[cached] == times))

    def _now(self) -> int:
        assert self._clock is not None, "without a prefix cache no unit is cached"
        return self._clock()

    # -- checks -------------------------------------------------------------------------------------------------------

    def check(self, held: Slots, cached: Slots) -> None:
        """Recount the units. `held`: those of all rows, one entry for each; `cached`: those in the tree."""
        if self._clock is None:
            if held.size != self.pool.num_used:
                raise InvariantViolation("GROUP-01", f"{self.pool.num_used} units are used, {held.size} by rows")
            return
        if np.unique(cached).size != cached.size:
            raise InvariantViolation("GROUP-01", "a unit stands in the tree twice")
        own = held[self._stays[held] & 1 == 0]
        self.pool.ids.check([own, cached])
        readers = np.bincount(held, minlength=self._readers.size)
        wrong = cached[readers[cached] != self._readers[cached]]
        if wrong.size:
            raise InvariantViolation("GROUP-03", f"unit {wrong[0]} has {readers[wrong[0]]} readers")
        if sorted(self._evictable) != sorted(cached[readers[cached] == 0].tolist()):
            raise InvariantViolation("GROUP-01", "the cached units that no row reads are not those that may be evicted")


class WindowUnits(GroupUnits):
    """A row holds the units of its pages [first, stop): those that the window of a later step may see.

    Let w be the window, p the page size and c the committed length. A step in flight begins at c or behind it, so it
    reads no position before c − (w − 1), and pages that end there can be given back without a fence.
    """

    def __init__(
        self,
        group: KVGroup,
        pages: KVAllocator,
        make: MakeAllocator,
        clock: Callable[[], int] | None,
        table: RequestTable,
    ) -> None:
        super().__init__(group, pages, make, clock)
        self._page_size = pages.page_size
        self._behind = group.window - 1
        self.num_read = -(-self._behind // pages.page_size)  # whole pages before a page-aligned position
        self.table = table
        self.first: Int64Array = np.zeros(table.num_rows + 1, dtype=np.int64)
        self.stop: Int64Array = np.zeros(table.num_rows + 1, dtype=np.int64)

    def reachable(self, is_there: BoolArray) -> BoolArray:
        """Return behind which pages a request may start, if these pages of its prefix have units."""
        at = np.arange(is_there.size)
        run = at - np.maximum.accumulate(np.where(is_there, -1, at))
        return run >= np.minimum(at + 1, self.num_read)

    def open(self, row: int, length: int, tags: Tags) -> None:
        """Open a row behind `length` cached tokens, of whose last pages these are the tags."""
        self.stop[row] = length // self._page_size
        units = (tags & _UNIT).astype(np.int32)
        self.first[row] = self.stop[row] - units.size
        if units.size:
            self.read(units)
            self.table.write_row(row, int(self.first[row]), units)

    def skip(self, row: int, length: int) -> None:
        """Leave out of an open row what `length` committed tokens have behind the window, if it holds nothing yet."""
        if self.first[row] == self.stop[row]:
            begin = max(length - self._behind, 0) // self._page_size
            self.first[row] = self.stop[row] = max(int(self.stop[row]), begin)

    def num_to_grow(self, rows: np.ndarray, stops: Int64Array) -> int:
        """Return how many units the rows take until they have `stops` pages."""
        return int(np.maximum(stops - self.stop[rows], 0).sum())

    def grow(self, rows: np.ndarray, stops: Int64Array) -> None:
        """Take the units of the rows, intp [n], up to `stops` pages, int64 [n]."""
        before = self.stop[rows]
        counts = np.maximum(stops - before, 0)
        units = self.pool.allocate(int(counts.sum()))
        self.table.write(rows, before, counts, units)
        self.stop[rows] = before + counts

    def trim(self, rows: np.ndarray, stops: Int64Array) -> None:
        """Give back the units of the rows from page `stops` on."""
        kept = np.minimum(self.stop[rows], np.maximum(stops, self.first[rows]))
        self.release(self.table.gather_ragged(rows, kept, self.stop[rows] - kept))
        self.stop[rows] = kept

    def move(self, rows: np.ndarray, lengths: Int64Array) -> None:
        """Give back the units that no step reads once the rows have `lengths` committed tokens."""
        first = self.first[rows]
        begin = np.minimum((lengths - self._behind) // self._page_size, self.stop[rows])
        counts = np.maximum(begin - first, 0)
        if counts.any():
            self.release(self.table.gather_ragged(rows, first, counts))
            self.first[rows] = first + counts

    def close(self, row: int) -> None:
        """Give back all units of a row."""
        self.release(self.units_of(row))
        self.first[row] = self.stop[row] = 0

    def units_of(self, row: int) -> Slots:
        """Return the units that a row holds, in the order of positions."""
        first, stop = np.array([row]), self.stop[[row]] - self.first[[row]]
        return self.table.gather_ragged(first, self.first[[row]], stop)


class StateUnits(GroupUnits):
    """A row holds `states` units from its begin to its end, and until its first step is committed the cached state that
    it starts from."""

    def __init__(
        self, group: KVGroup, pages: KVAllocator, make: MakeAllocator, clock: Callable[[], int] | None
    ) -> None:
        super().__init__(group, pages, make, clock)
        self._held: dict[int, Slots] = {}
        self._sources: dict[int, tuple[int, int]] = {}  # row -> (cached unit, the length up to which it was computed)
        self.branches: dict[int, int] = {}  # row -> cached tokens behind which there was no state

    def reachable(self, is_there: BoolArray) -> BoolArray:
        """Return behind which pages a request may start, if these pages of its prefix have units."""
        return is_there

    def start_from(self, row: int, length: int, tags: Tags) -> None:
        """Hold the cached state, one tag, of the first `length` tokens of a row that is opened."""
        unit = int(tags[0]) & _UNIT
        self.read(np.array([unit], dtype=np.int32))
        self._sources[row] = unit, length

    def open(self, row: int) -> None:
        """Take the units of a row."""
        self._held[row] = self.pool.allocate(self.group.states)

    def open_with_source(self, row: int) -> None:
        """Take the units of a row where one is missing: the state that it starts from leaves the cache for it."""
        unit, _ = self._sources.pop(row)
        self.take_over(unit)
        rest = self.pool.allocate(self.group.states - 1)
        self._held[row] = np.append(rest, np.int32(unit))

    def can_take_source(self, row: int) -> bool:
        """Return whether a row starts from a cached state that no other row reads."""
        return row in self._sources and bool(self._readers[self._sources[row][0]] == 1)

    def take_source(self, row: int) -> bool:
        """Replace one of a row's units by the state that it starts from, if no other row reads that."""
        if not self.can_take_source(row):
            return False
        unit, _ = self._sources.pop(row)
        self.take_over(unit)
        spare, self._held[row] = self._held[row][-1:], np.append(self._held[row][:-1], np.int32(unit))
        self.pool.free(spare)
        return True

    def move(self, rows: np.ndarray, lengths: Int64Array) -> None:
        """Give up the states from which rows started that now have `lengths` committed tokens."""
        if self._sources:
            for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
                if row in self._sources and length > self._sources[row][1]:
                    self.release(np.array([self._sources.pop(row)[0]], dtype=np.int32))

    def num_own(self, row: int) -> int:
        """Return how many states a row has, without the one that it starts from."""
        return self._held[row].size

    def give_last(self, row: int, renew: bool) -> Tags:
        """Give the cache one of a row's states. `renew`: the row goes on and takes another in its place."""
        held = self._held[row]
        tags = self.cache(held[-1:], is_held=False)
        self._held[row] = np.concatenate((held[:-1], self.pool.allocate(1))) if renew else held[:-1]
        return tags

    def close(self, row: int) -> None:
        """Give back all units of a row."""
        if row in self._held:
            self.release(self.units_of(row))
            del self._held[row]
            self._sources.pop(row, None)
            self.branches.pop(row, None)

    def units_of(self, row: int) -> Slots:
        """Return the units that a row holds, the one that it starts from last."""
        held = self._held.get(row, _NONE)
        return np.append(held, np.int32(self._sources[row][0])) if row in self._sources else held
