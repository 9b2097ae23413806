"""All groups of layers beside those with full attention, as the KV store moves them: rows, cached prefixes, room.

A cached prefix of length n is usable if each group has what the next position reads: a group with a window the units of
the last pages before n, a group with states the unit of the state at n. The cache keeps a state where it got one: at
the last whole page of what a request hands over (a chunk of its prompt, or all at its end), or where the request found
pages of full layers but no state: one state each time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..contract.arrays import Int64Array
from .allocator import KVAllocator, Slots
from .groups import GroupSizes, KVGroup, StoreSizes
from .radix import PrefixMatch, RadixCache
from .radix_node import RadixNode, nodes_below
from .units import GroupUnits, MakeAllocator, MakeTable, StateUnits, Tags, WindowUnits

Wanted = Sequence[int]
"""Units of each group."""


class HeldGroups:
    """The units of every group. Falsy without groups: then it is not called."""

    def __init__(
        self,
        store: StoreSizes,
        pages: KVAllocator,
        cache: RadixCache,
        make_allocator: MakeAllocator,
        make_table: MakeTable,
    ) -> None:
        self.sizes: GroupSizes = store.groups
        self._pages = pages
        self._cache = cache
        self._page_size = pages.page_size
        clock = cache.now if cache.keeps_prefixes else None

        def held(group: KVGroup) -> WindowUnits | StateUnits:
            if group.has_states:
                return StateUnits(group, pages, make_allocator, clock)
            table = make_table(store.num_rows, store.row_width // pages.page_size)
            return WindowUnits(group, pages, make_allocator, clock, table)

        self.all: list[WindowUnits | StateUnits] = [held(group) for group in store.groups.groups]
        self.windows = [each for each in self.all if isinstance(each, WindowUnits)]
        self.states = [each for each in self.all if isinstance(each, StateUnits)]
        self._shared: list[GroupUnits] = [each for each in self.all if each.group.capacity is None]
        self._spared = [0] * len(self.all)  # evictable units of a prefix that a newcomer is about to read
        if self.all and cache.keeps_prefixes:
            cache.groups = self

    def __bool__(self) -> bool:
        return bool(self.all)

    # -- room ---------------------------------------------------------------------------------------------------------

    @property
    def evictable_slots(self) -> int:
        """Slots of full layers that come free with all cached units that no row reads."""
        return sum(
            -each.pool.slots_for(spared - each.num_evictable)
            for each, spared in zip(self.all, self._spared, strict=True)
        )

    def slots_of_pages(self, num_pages: int) -> int:
        """Return the slots that come free with the units of the last `num_pages` pages of rows."""
        return sum(-each.pool.slots_for(-num_pages) for each in self.windows)

    def has_own_room(
        self, length: int, ahead: int, num_cached: int = 0, gained: int = 0, leaving: Sequence[int] = ()
    ) -> bool:
        """Return whether the groups with pools of their own have the units of a newcomer with `length` slots. `gained`:
        pages of tokens whose units are taken as free; `leaving`: rows that give way first."""
        size = self._page_size
        return all(
            each.group.units_of(length, ahead, size) - each.group.units_before(num_cached, size)
            <= each.num_available - spared + (0 if each.group.has_states else gained) + each.num_gained_without(leaving)
            for each, spared in zip(self.all, self._spared, strict=True)
            if each.group.capacity is not None
        )

    @property
    def num_free_pages(self) -> int | None:
        """The pages of tokens for which each pool of windows has units, without eviction; None: there is none."""
        return min(
            (each.pool.ids.num_free_slots for each in self.windows if each.group.capacity is not None), default=None
        )

    def make_room_to_grow(self, num_slots: int, rows: np.ndarray, targets: Int64Array) -> bool:
        """Evict until `num_slots` slots and the units that the rows take up to `targets` slots are free.

        Returns whether they are. Where they are not otherwise, cached states from which the rows start leave the cache.
        """
        stops = targets // self._page_size
        wanted = [each.num_to_grow(rows, stops) if isinstance(each, WindowUnits) else 0 for each in self.all]
        fits = self.make_room(num_slots, wanted)
        return fits or (self._take_sources(rows) and self.make_room(num_slots, wanted))

    def make_room(self, num_slots: int, wanted: Wanted) -> bool:
        """Evict until `num_slots` slots and the wanted units are free. Returns whether they are; if not, nothing is
        evicted."""
        asked = list(zip(self.all, wanted, strict=True))
        if any(each.group.capacity is not None and n > each.num_available for each, n in asked):
            return False
        in_all = sum(each.pool.slots_for(n - each.num_evictable) for each, n in asked)  # below 0: more can be evicted
        if num_slots + in_all > self._pages.num_free_slots + self._cache.evictable_slots:
            return False
        for each, n in asked:
            while each.group.capacity is not None and n > each.pool.ids.num_free_slots:
                each.evict()
        while (missing := num_slots + self._slots_for(wanted) - self._pages.num_free_slots) > 0:
            self._evict_oldest(missing)
        return True

    def _slots_for(self, wanted: Wanted) -> int:
        return sum(each.pool.slots_for(n) for each, n in zip(self.all, wanted, strict=True))

    def _evict_oldest(self, num_slots: int) -> None:
        """Evict the unit or the pages of full layers that were not used for longest, at most so many slots of these."""
        ages = [(since, i) for i, each in enumerate(self._shared) if (since := each.oldest) is not None]
        leaf = self._cache.oldest_leaf()
        if ages and (leaf is None or min(ages)[0] <= leaf.last_access):
            self._shared[min(ages)[1]].evict()
        else:
            assert leaf is not None, "what was found to fit does not"
            self._pages.free(self._cache.evict(min(num_slots, leaf.slots.size)))

    # -- rows ---------------------------------------------------------------------------------------------------------

    def spare(self, prefix: PrefixMatch | None) -> None:
        """Take the units of a prefix that a newcomer is about to read as not available; None: no longer."""
        self._spared = [0] * len(self.all)
        if prefix is not None:
            for i, each in enumerate(self.all):
                if isinstance(each, WindowUnits):
                    self._spared[i] = each.num_evictable_in(each.units_in(self._last_tags(prefix.node, i)))

    def open(self, row: int, prefix: PrefixMatch | None) -> None:
        """Hold what a prefix has for a row that is opened, and take the row's states. The states fit."""
        self.spare(None)
        length = 0 if prefix is None else prefix.length
        for i, each in enumerate(self.all):
            tags = np.empty(0, np.int64) if prefix is None or not length else self._last_tags(prefix.node, i)
            if isinstance(each, WindowUnits):
                each.open(row, length, tags)
            elif length:
                each.start_from(row, length, tags)
            if isinstance(each, StateUnits) and prefix is not None and prefix.known > length:
                each.branches[row] = prefix.known
        for i, each in enumerate(self.all):
            if isinstance(each, StateUnits):
                self._take_states(row, i, each)

    def _take_states(self, row: int, i: int, states: StateUnits) -> None:
        if self.make_room(0, self._units_of(i, states.group.states)):
            states.open(row)
            return
        assert states.can_take_source(row), "what was found to fit does not"
        fits = self.make_room(0, self._units_of(i, states.group.states - 1))
        assert fits, "what was found to fit does not"
        states.open_with_source(row)

    def _units_of(self, i: int, count: int) -> Wanted:
        return [count if i == at else 0 for at in range(len(self.all))]

    def _take_sources(self, rows: np.ndarray) -> bool:
        """Let the rows have the cached states from which they start for their own, where no other row reads them, in
        the place of a unit. Returns whether there were any."""
        taken = [each.take_source(row) for each in self.states for row in rows.tolist()]
        return any(taken)

    def skip(self, row: int, length: int) -> None:
        """Leave out of a row whose KV arrives from elsewhere what lies behind the windows at `length` tokens."""
        for each in self.windows:
            each.move(np.array([row]), np.array([length]))
            each.skip(row, length)

    def grow(self, rows: np.ndarray, targets: Int64Array) -> None:
        """Take the units of the rows up to `targets` slots. They fit."""
        for each in self.windows:
            each.grow(rows, targets // self._page_size)

    def trim(self, rows: np.ndarray, targets: Int64Array) -> None:
        """Give back the units of the rows behind `targets` slots."""
        for each in self.windows:
            each.trim(rows, targets // self._page_size)

    def move(self, rows: np.ndarray, lengths: Int64Array) -> None:
        """Give back what no step reads once the rows have `lengths` committed tokens."""
        for each in self.all:
            each.move(rows, lengths)

    def close(self, row: int) -> None:
        """Give back all units of a row."""
        for each in self.all:
            each.close(row)

    def slots_gained_without(self, rows: Sequence[int]) -> int:
        """Count the slots of full layers that are free, or that the cache could evict, once these rows have left."""
        gained = 0
        for each in self._shared:
            left = -each.num_evictable
            gained += each.pool.slots_for(left) - each.pool.slots_for(left - each.num_gained_without(rows))
        return gained

    # -- the prefix cache ---------------------------------------------------------------------------------------------

    def cache_row(self, row: int, node: RadixNode, length: int, goes_on: bool, has_states: bool = True) -> None:
        """Give the cache what it lacks and a row has of its first `length` tokens, where `node` ends. `goes_on`: the
        row keeps on running."""
        for i, each in enumerate(self.all):
            if isinstance(each, WindowUnits):
                self._cache_window(i, each, row, node, length // self._page_size)
            elif has_states:
                branch = each.branches.get(row, length)
                if branch <= length:
                    each.branches.pop(row, None)
                self._cache_state(i, each, row, node, length, min(branch, length), goes_on)

    def _cache_window(self, i: int, window: WindowUnits, row: int, node: RadixNode, end: int) -> None:
        # Also a page that the cache had before may have lost its unit, and the row have one of its own.
        first, stop = int(window.first[row]), int(window.stop[row])
        above: RadixNode | None = node
        while above is not None and above.parent is not None and end > first:
            begin = end - above.units[i].size
            low, high = max(first, begin), min(stop, end)
            if low < high:
                tags = above.units[i][low - begin : high - begin]
                missing = ~window.is_cached(tags)
                if missing.any():
                    units = window.table.gather_ragged(np.array([row]), np.array([low]), np.array([high - low]))
                    tags[missing] = window.cache(units[missing], is_held=True)
            end, above = begin, above.parent

    def _cache_state(
        self, i: int, states: StateUnits, row: int, node: RadixNode, length: int, at: int, goes_on: bool
    ) -> None:
        """Give the cache the state of a row at `at` tokens, if it has none there and there is room for one."""
        end, above = length, node
        while end - above.keys.size >= at:
            end -= above.keys.size
            assert above.parent is not None, "the path has so many tokens"
            above = above.parent
        place = (at - (end - above.keys.size)) // self._page_size - 1
        tags = above.units[i][place : place + 1]
        if states.is_cached(tags).any():
            return
        has_one = self.make_room(0, self._units_of(i, 1)) if goes_on else states.num_own(row) > 0
        if has_one:
            tags[:] = states.give_last(row, goes_on)

    def usable(self, path: Sequence[RadixNode], child: RadixNode | None, part: int) -> int:
        """Return how many tokens of the pages along a path, and of `part` tokens of the next node, a request may start
        from."""
        pieces = [node.units for node in path]
        if child is not None and part:
            pieces.append([tags[: part // self._page_size] for tags in child.units])
        if not pieces:
            return 0
        fits = np.ones(sum(tags[0].size for tags in pieces), dtype=bool)
        for i, each in enumerate(self.all):
            fits &= each.reachable(each.is_cached(np.concatenate([tags[i] for tags in pieces])))
        places = np.flatnonzero(fits)
        return int(places[-1] + 1) * self._page_size if places.size else 0

    def no_units(self, num_keys: int) -> list[Tags]:
        """Return the tags of a node that has no unit yet."""
        return [np.zeros(num_keys // self._page_size, dtype=np.int64) for _ in self.all]

    def forget(self, node: RadixNode) -> None:
        """Free the units of a node that leaves the tree."""
        for each, tags in zip(self.all, node.units, strict=True):
            each.uncache(each.units_in(tags))

    def _last_tags(self, node: RadixNode, i: int) -> Tags:
        """Return the tags of the pages that a step behind `node` reads of a group."""
        each = self.all[i]
        missing = 1 if isinstance(each, StateUnits) else each.num_read
        parts: list[Tags] = []
        above: RadixNode | None = node
        while missing > 0 and above is not None and above.parent is not None:
            parts.append(above.units[i][-missing:])
            missing -= parts[-1].size
            above = above.parent
        return np.concatenate(parts[::-1]) if parts else np.empty(0, dtype=np.int64)

    # -- checks -------------------------------------------------------------------------------------------------------

    def units_of(self, row: int) -> list[Slots]:
        """Return the units that a row holds of each group."""
        return [each.units_of(row) for each in self.all]

    def holders(self) -> Iterator[Slots]:
        """Yield the slots of full layers that units take."""
        for each in self.all:
            yield from each.pool.slots()

    def cached_units(self) -> list[Slots]:
        """Return the units of each group that the prefix cache has. Walks its tree: for checks."""
        nodes = list(nodes_below(self._cache.root))
        return [
            each.units_in(np.concatenate([node.units[i] for node in nodes] or [np.empty(0, np.int64)]))
            for i, each in enumerate(self.all)
        ]

    def check(self, num_rows: int) -> None:
        """Recount all units; raises InvariantViolation with the id of what is broken."""
        for each, cached in zip(self.all, self.cached_units(), strict=True):
            held = np.concatenate([each.units_of(row) for row in range(1, num_rows + 1)] or [np.empty(0, np.int32)])
            each.check(held, cached)
