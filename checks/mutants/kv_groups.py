"""Planted defects of stores whose requests hold units of groups of layers: units that are lost or shared, pages that
are counted wrong, windows that begin too late; hits without what the next token reads."""

import numpy as np

from ...core.kv.groups import KVGroup
from ...core.kv.held_groups import HeldGroups
from ...core.kv.store import KVStore
from ...core.kv.units import StateUnits, UnitPool, WindowUnits
from ..adapters.kv_store import make_with_groups
from ..adapters.prefix_store import PrefixStoreWithGroups
from .planting import Defects

STORE_WITH_GROUPS = Defects("allocator", make_with_groups)


@STORE_WITH_GROUPS.breaks("ALLOC-17")
class LosesTheUnitsBehindATrim(WindowUnits):
    """A row that is trimmed gives its slots back, and forgets its units there."""

    def trim(self, rows, stops):
        self.stop[rows] = np.minimum(self.stop[rows], np.maximum(stops, self.first[rows]))


@STORE_WITH_GROUPS.breaks("ALLOC-17")
class KeepsThePagesOfFreeUnits(UnitPool):
    """The units come back, the pages that they took do not."""

    def free(self, units):
        self.ids.free(units)


@STORE_WITH_GROUPS.breaks("ALLOC-14", "ALLOC-17")
class RoundsUpEachUnit(KVGroup):
    """Each unit takes whole pages of its own."""

    def pages_of(self, num_units):
        return super().pages_of(1) * num_units


@STORE_WITH_GROUPS.breaks("ALLOC-17", "ALLOC-14")
class ChargesAPoolOfItsOwn(KVGroup):
    """The units of a group with a pool of its own take pages of the other, too."""

    def pages_of(self, num_units):
        return num_units if self.capacity is not None else super().pages_of(num_units)


@STORE_WITH_GROUPS.breaks("ALLOC-18")
class MovesTheWindowAPageTooFar(WindowUnits):
    """The page in which the window begins is given back."""

    def move(self, rows, lengths):
        super().move(rows, lengths + self._page_size)


@STORE_WITH_GROUPS.breaks("ALLOC-18")
class SeesATokenLess(WindowUnits):
    """A window of w tokens is taken to begin w − 2 before the next position."""

    def move(self, rows, lengths):
        super().move(rows, lengths + 1)


@STORE_WITH_GROUPS.breaks("ALLOC-18")
class KeepsTheWholeContext(WindowUnits):
    """A window does not move on."""

    def move(self, rows, lengths):
        pass


@STORE_WITH_GROUPS.breaks("ALLOC-18")
class TakesOneState(StateUnits):
    """A request gets one state, also where its drafts need more."""

    def open(self, row):
        self._held[row] = self.pool.allocate(1)


@STORE_WITH_GROUPS.breaks("ALLOC-19", "ALLOC-17")
class SharesTheFirstState(StateUnits):
    """Requests that enter while another runs get the states of that one."""

    def open(self, row):
        if self._held:
            self._held[row] = next(iter(self._held.values())).copy()
        else:
            super().open(row)

    def close(self, row):
        held = self._held.pop(row, None)
        if held is not None and not self._held:
            self.release(held)


@STORE_WITH_GROUPS.breaks("ALLOC-17", "ALLOC-19")
class FreesUnitsUnderAStep(KVStore):
    """The units of a row that leaves are free at once, though a step in flight may still write to them."""

    def close_row(self, departure, last_committed):
        self.groups.close(departure.row)
        super().close_row(departure, last_committed)


@STORE_WITH_GROUPS.breaks("ALLOC-19")
class PutsNewUnitsFirst(WindowUnits):
    """The table of a window is written from its begin when the row grows."""

    def grow(self, rows, stops):
        before = self.stop[rows]
        counts = np.maximum(stops - before, 0)
        units = self.pool.allocate(int(counts.sum()))
        old = self.units_of(int(rows[0]))
        self.table.write_row(int(rows[0]), int(self.first[rows[0]]), np.concatenate((units, old)))
        self.stop[rows] = before + counts


@STORE_WITH_GROUPS.breaks("ALLOC-14")
class KeepsAUnitBack(WindowUnits):
    """The last unit of a window's own pool is never given out."""

    @property
    def num_available(self):
        return super().num_available - 1


@STORE_WITH_GROUPS.breaks("ALLOC-14", "ALLOC-01")
class CountsFromAnEmptyPool(UnitPool):
    """What units more take is counted in pages of their own, also where the last page has room for them."""

    def slots_for(self, num_units):
        return self.group.pages_of(num_units) * self._pages.page_size if num_units > 0 else super().slots_for(num_units)


CACHE_WITH_GROUPS = Defects("prefix-cache", PrefixStoreWithGroups)


@CACHE_WITH_GROUPS.breaks("RADIX-01", "RADIX-17")
class StartsWhereThereIsNoState(StateUnits):
    """A prefix counts as cached wherever its pages are, also where there is no state."""

    def reachable(self, is_there):
        return np.ones_like(is_there)

    def start_from(self, row, length, tags):
        if self.is_cached(tags).all():
            super().start_from(row, length, tags)


@CACHE_WITH_GROUPS.breaks("RADIX-01", "RADIX-17")
class LooksAtTheLastPage(WindowUnits):
    """A prefix counts as cached if its last page has a unit, whatever the window sees before it."""

    def reachable(self, is_there):
        return is_there


@CACHE_WITH_GROUPS.breaks("RADIX-17")
class TakesTheFirstUnitsOfAPrefix(HeldGroups):
    """A request gets the units of the begin of the last node that it found, not those before its next token."""

    def _last_tags(self, node, i):
        tags = super()._last_tags(node, i)
        return node.units[i][: tags.size] if node.units[i].size >= tags.size else tags


@CACHE_WITH_GROUPS.breaks("RADIX-19", "RADIX-17")
class WritesToTheCachedState(StateUnits):
    """A request that starts from a cached state updates it in place."""

    def open(self, row):
        super().open(row)
        if row in self._sources:
            spare, self._held[row][0] = self._held[row][:1].copy(), self._sources[row][0]
            self.pool.free(spare)


@CACHE_WITH_GROUPS.breaks("RADIX-17", "RADIX-18", "RADIX-19")
class GivesUpForAllReaders(WindowUnits):
    """The first of several requests that leave gives up what all of them read of the cache."""

    def release(self, units):
        self._readers[units] = 1
        super().release(units)


@CACHE_WITH_GROUPS.breaks("RADIX-18")
class KeepsTheUnitsOfEvictedPages(HeldGroups):
    """The pages of a prefix are evicted, their units stay."""

    def forget(self, node):
        pass


@CACHE_WITH_GROUPS.breaks("RADIX-19")
class LeavesTheStateItTakesCached(StateUnits):
    """Where no state is free, a request takes the one from which it starts, and the cache keeps it, too."""

    def take_over(self, unit):
        pass


@CACHE_WITH_GROUPS.breaks("RADIX-19", "RADIX-20")
class FilesUnitsAPageTooLate(HeldGroups):
    """Each unit of a window is filed under the page after its own."""

    def _cache_window(self, i, window, row, node, end):
        window.first[row] += 1
        window.stop[row] += 1
        super()._cache_window(i, window, row, node, end)
        window.first[row] -= 1
        window.stop[row] -= 1


@CACHE_WITH_GROUPS.breaks("RADIX-20")
class HandsOverNoState(HeldGroups):
    """A request that ends leaves no state."""

    def _cache_state(self, i, states, row, node, length, at, goes_on):
        if goes_on:
            super()._cache_state(i, states, row, node, length, at, goes_on)


@CACHE_WITH_GROUPS.breaks("RADIX-20")
class HandsOverTheLastPage(HeldGroups):
    """A request that ends leaves one unit of its window."""

    def _cache_window(self, i, window, row, node, end):
        first = int(window.first[row])
        window.first[row] = max(first, end - 1)
        super()._cache_window(i, window, row, node, end)
        window.first[row] = first


@CACHE_WITH_GROUPS.breaks("RADIX-20")
class FillsNoGap(HeldGroups):
    """A page that was cached before keeps no unit once it has lost one, also where a request has another."""

    def _cache_window(self, i, window, row, node, end):
        begin, above = end, node
        while above.parent is not None and (above.units[i] == 0).all():
            begin, above = begin - above.units[i].size, above.parent
        first = int(window.first[row])
        window.first[row] = max(first, begin)
        super()._cache_window(i, window, row, node, end)
        window.first[row] = first
