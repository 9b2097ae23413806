"""Planted defects of relays: each is one method of a good one, done wrong in a way that has been done wrong before."""

from __future__ import annotations

from functools import partial

import numpy as np

from ...core.contract.future_map import FutureMap, NumpyStorage, RelayField
from ...properties.harness.mutants import Mutant
from ...properties.relay.contract import HIDDEN, RelayCapabilities
from ..adapters.future_map import FutureMapAdapter


def _existing(relay: FutureMap, rows: np.ndarray) -> np.ndarray:
    """Return those of the rows that a request can have."""
    rows = np.asarray(rows)
    return rows[(rows > 0) & (rows <= relay.num_rows)]


# -- of core.future_map -----------------------------------------------------------------------------------------------


class ReadsAgain(FutureMap):
    """A value stays readable after it was consumed."""

    def resolve(self, rows, epochs):
        found = super().resolve(rows, epochs)
        self._written[_existing(self, rows)] = self._complete
        return found


class ReadsTheUnwritten(FutureMap):
    """An empty cell can be read: the last consumed value is read again."""

    def resolve(self, rows, epochs):
        self._written[_existing(self, rows)] = self._complete
        return super().resolve(rows, epochs)


class ReadsAHalf(FutureMap):
    """A published length makes the fields readable, too: those of the step before."""

    def publish(self, rows, epochs, lengths):
        super().publish(rows, epochs, lengths)
        self._written[_existing(self, rows)] |= self._complete


class Overwrites(FutureMap):
    """An unread length is overwritten by the next one."""

    def publish(self, rows, epochs, lengths):
        self._written[_existing(self, rows)] &= ~np.uint8(1)
        super().publish(rows, epochs, lengths)


class ConsumesBeforeItLooks(FutureMap):
    """A read of several rows that is refused for one of them has consumed the others."""

    def resolve(self, rows, epochs):
        try:
            return super().resolve(rows, epochs)
        except Exception:
            self._written[_existing(self, rows)] = 0
            raise


class AcceptsARowTwice(FutureMap):
    """A row that stands twice in a batch is written twice, and the later lane wins."""

    def publish(self, rows, epochs, lengths):
        _, first = np.unique(np.asarray(rows), return_index=True)
        first.sort()
        super().publish(*(np.asarray(given)[first] for given in (rows, epochs, lengths)))


class KeepsWhatIsReleased(FutureMap):
    """The cell of a released row keeps its unread value."""

    def drop(self, rows):
        self._in_range(np.asarray(rows, np.int64))


class DropsTheWholeTable(FutureMap):
    """A release empties the cells of all rows."""

    def drop(self, rows):
        super().drop(rows)
        self._written[:] = 0


class ReadsAnyEpoch(FutureMap):
    """The generation is stored and never compared when a cell is read."""

    def resolve(self, rows, epochs):
        rows = np.asarray(rows)
        inside = (rows >= 0) & (rows <= self.num_rows)
        return super().resolve(rows, self._epochs[np.where(inside, rows, 0)])


class ComparesTheLowBits(FutureMap):
    """Generations are compared in 32 bits."""

    def _enter(self, rows, epochs):
        return super()._enter(rows, np.asarray(epochs) & 0xFFFFFFFF)


class CompletesAnothersCell(FutureMap):
    """The fields of one request complete the length of another."""

    def stash(self, rows, epochs, values):
        rows = np.asarray(rows)
        inside = (rows >= 0) & (rows <= self.num_rows)
        there = np.where(inside, rows, 0)
        super().stash(rows, np.where(self._written[there] != 0, self._epochs[there], epochs), values)


class WrapsNegativeRows(FutureMap):
    """Row −1 is the last row, as an index into an array is."""

    def _enter(self, rows, epochs):
        rows = np.asarray(rows)
        return super()._enter(np.where(rows < 0, rows % (self.num_rows + 1), rows), epochs)


class ClampsTheRows(FutureMap):
    """A row beyond the table is the last row."""

    def _enter(self, rows, epochs):
        return super()._enter(np.minimum(np.asarray(rows), self.num_rows), epochs)

    def drop(self, rows):
        super().drop(np.minimum(np.asarray(rows), self.num_rows))


class SharesThePaddingRow(FutureMap):
    """The padding lanes of a batch write into row 0, and the next batch's padding lanes read that."""

    def publish(self, rows, epochs, lengths):
        super().publish(rows, epochs, lengths)
        padding = np.asarray(rows) == 0
        if padding.any():
            self._buffers["lengths"][0] = np.asarray(lengths)[padding][-1]

    def check(self):
        pass


class ShiftsPastThePadding(NumpyStorage):
    """Behind a padding lane every row gets its neighbour's values: they are taken from the front of the batch."""

    def scatter(self, buffer, rows, values, sources):
        super().scatter(buffer, rows, values, None if sources is None else np.arange(len(sources)))


class SortsTheBatch(NumpyStorage):
    """Values come back in the order of the rows, not of the batch."""

    def gather(self, buffer, rows):
        return buffer[np.sort(rows)]


class StoresByLane(NumpyStorage):
    """A value is stored under the number of its lane in the batch, and read under its row."""

    def scatter(self, buffer, rows, values, sources):
        lanes = np.arange(1, len(rows) + 1)
        super().scatter(buffer, lanes if len(buffer) > len(rows) else rows, values, sources)


class LengthsIn16Bits(NumpyStorage):
    """A length is stored in 16 bits."""

    def scatter(self, buffer, rows, values, sources):
        super().scatter(buffer, rows, values.astype(np.int16) if values.ndim == 1 else values, sources)


# -- of the adapter: what an algorithm relays ---------------------------------------------------------------------------


class HiddenForEverybody(FutureMapAdapter):
    """The buffer of hidden states is there for every algorithm; one that has none relays zeros."""

    def __init__(self, config):
        super().__init__(config)
        if HIDDEN not in self.fields:
            self.fields[HIDDEN] = RelayField(HIDDEN, (2,), "float32")
            self.relay = FutureMap(config.num_rows, tuple(self.fields.values()))

    def stash(self, rows, generations, values):
        if values[HIDDEN] is None:
            values = {**values, HIDDEN: np.zeros((len(rows), *self.fields[HIDDEN].shape_suffix))}
        super().stash(rows, generations, values)


class IgnoresWhatIsNotDeclared(FutureMapAdapter):
    """A field that is not declared is ignored."""

    def stash(self, rows, generations, values):
        super().stash(rows, generations, {name: given for name, given in values.items() if name in self.fields})


class FillsWhatIsMissing(FutureMapAdapter):
    """A declared field that is not given is filled with zeros."""

    def stash(self, rows, generations, values):
        zeros = {
            name: np.zeros((len(rows), *field.shape_suffix))
            for name, field in self.fields.items()
            if values.get(name) is None
        }
        super().stash(rows, generations, {**values, **zeros})


class ReadsOneReadLate(FutureMapAdapter):
    """Lengths come one read late: a read of a row brings what the read before it should have brought."""

    def __init__(self, config):
        super().__init__(config)
        self.last = {}

    def resolve(self, rows, generations):
        lengths, fields = super().resolve(rows, generations)
        found = dict(zip(rows, lengths.tolist(), strict=True))
        late = [self.last.get(row, found[row]) if row else 0 for row in rows]
        self.last.update(found)
        return np.array(late, np.int64), fields


# -- how they are made ------------------------------------------------------------------------------------------------


def _maker(kind: type, capabilities: RelayCapabilities = FutureMapAdapter.capabilities) -> object:
    """Return what makes our relay with `kind` in the place of the part that it derives from."""
    if issubclass(kind, FutureMapAdapter):
        return kind
    made = partial(FutureMapAdapter, **{"future_map" if issubclass(kind, FutureMap) else "storage": kind})
    made.capabilities = capabilities
    return made


_DEFECTS = (
    (ReadsAgain, ("RELAY-02",)),
    (ReadsTheUnwritten, ("RELAY-02",)),
    (ReadsAHalf, ("RELAY-02",)),
    (Overwrites, ("RELAY-02",)),
    (ConsumesBeforeItLooks, ("RELAY-02",)),
    (AcceptsARowTwice, ("RELAY-02",)),
    (KeepsWhatIsReleased, ("RELAY-02",)),
    (DropsTheWholeTable, ("RELAY-02",)),
    (ReadsAnyEpoch, ("RELAY-03",)),
    (ComparesTheLowBits, ("RELAY-03",)),
    (CompletesAnothersCell, ("RELAY-03",)),
    (WrapsNegativeRows, ("RELAY-03",)),
    (ClampsTheRows, ("RELAY-03",)),
    (SharesThePaddingRow, ("RELAY-02",)),
    (ShiftsPastThePadding, ("RELAY-02",)),
    (SortsTheBatch, ("RELAY-02",), RelayCapabilities(padding_row=True)),
    (StoresByLane, ("RELAY-02",)),
    (LengthsIn16Bits, ("RELAY-02",)),
    (HiddenForEverybody, ("RELAY-02",)),
    (IgnoresWhatIsNotDeclared, ("RELAY-02",)),
    (FillsWhatIsMissing, ("RELAY-02",)),
    (ReadsOneReadLate, ("RELAY-02", "RELAY-03")),
)
"""(class, the invariants of which one must catch it, what is declared if not all that the good one has)."""

MUTANTS = tuple(
    Mutant(kind.__name__, kind.__doc__, "relay", _maker(kind, *capabilities), caught_by)
    for kind, caught_by, *capabilities in _DEFECTS
)
