"""Planted defects of stores whose requests hold units of groups of layers: units that are lost or shared, pages that
are counted wrong, windows that begin too late."""

import numpy as np

from ...core.kv.groups import KVGroup
from ...core.kv.store import KVStore
from ...core.kv.units import StateUnits, UnitPool, WindowUnits
from ..adapters.kv_store import make_with_groups
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
