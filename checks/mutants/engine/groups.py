"""Planted defects of engines whose models have groups of layers: windows that move too far, states that two have,
units that are lost, and pages of the pool that units keep."""

import numpy as np

from ....core.kv.groups import KVGroup
from ....core.kv.units import StateUnits, UnitPool, WindowUnits
from ....core.scheduler.admission import Admission
from ....core.scheduler.rounds import DecodeRounds
from ...adapters.core_engine import CoreEngineWithGroups
from ..planting import Defects

GROUPS = Defects("engine", CoreEngineWithGroups)


@GROUPS.breaks("GROUP-02", "GROUP-04")
class MovesToTheLaunchedChunk(Admission):
    """A window moves on to the end of the launched chunks, although the step in flight reads what is before it."""

    def _pass_tokens(self, record):
        self.store.groups.move(np.array([record.row]), np.array([record.prefill_launched]))


@GROUPS.breaks("GROUP-02", "GROUP-04")
class MovesUnderTheLastChunk(DecodeRounds):
    """A window moves on to the end of the prompt while the step that computes the prompt is in flight."""

    def _passed(self, kv_len):
        return kv_len


@GROUPS.breaks("GROUP-02", "GROUP-04")
class MovesAPageTooFar(WindowUnits):
    """The page in which the window begins is given back, too."""

    def move(self, rows, lengths):
        super().move(rows, lengths + self._page_size)


@GROUPS.breaks("GROUP-03", "GROUP-04")
class GoesOnInTheCachedState(StateUnits):
    """A row that starts from a cached state updates it in place."""

    def open(self, row):
        super().open(row)
        if row in self._sources:
            spare, self._held[row][0] = self._held[row][:1].copy(), self._sources[row][0]
            self.pool.free(spare)


@GROUPS.breaks("GROUP-04")
class StartsWithoutAState(StateUnits):
    """A prefix counts as cached wherever its pages are, also where there is no state."""

    def reachable(self, is_there):
        return np.ones_like(is_there)

    def start_from(self, row, length, tags):
        if self.is_cached(tags).all():
            super().start_from(row, length, tags)


@GROUPS.breaks("GROUP-01", "GROUP-04")
class KeepsTheStateItStartedFrom(StateUnits):
    """A request that leaves before its first step is committed does not give up the state from which it started."""

    def units_of(self, row):
        return self._held.get(row, np.empty(0, np.int32))


@GROUPS.breaks("GROUP-01")
class LosesAStateAtRetraction(StateUnits):
    """One of the states of a row that leaves is not given back."""

    def close(self, row):
        if row in self._held:
            self._held[row] = self._held[row][1:]
        super().close(row)


@GROUPS.breaks("GROUP-01")
class LosesWhatAMultiStepTook(WindowUnits):
    """The units behind the tokens that a multi-step has left unused are not given back."""

    def trim(self, rows, stops):
        self.stop[rows] = np.minimum(self.stop[rows], np.maximum(stops, self.first[rows]))


@GROUPS.breaks("GROUP-01")
class KeepsPagesWithoutUnits(UnitPool):
    """The pages that units have taken of the pool of full layers are never given back."""

    most = 0

    def _resize(self, num_units):
        self.most = max(self.most, num_units)
        super()._resize(self.most)


@GROUPS.breaks("GROUP-01")
class RoundsThePagesOfUnitsDown(KVGroup):
    """A page of the pool that units fill in part is not taken for them."""

    def pages_of(self, num_units):
        return 0 if self.capacity is not None else int(num_units * self.pages)
