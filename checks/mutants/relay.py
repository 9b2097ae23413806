"""Planted defects of relays: each is one method of a good one, done wrong in a way that has been done wrong before."""

from __future__ import annotations

import numpy as np

from ...core.contract.future_map import FutureMap, NumpyStorage
from ...properties.harness.mutants import Mutant
from ...properties.relay.contract import HIDDEN, RelayCapabilities, RelayConfig
from ..adapters.future_map import FutureMapAdapter, make, relay_fields

# -- of core.future_map -----------------------------------------------------------------------------------------------


class ReadsAgain(FutureMap):
    """A value stays readable after it was consumed."""

    def resolve(self, rows, epochs):
        found = super().resolve(rows, epochs)
        real = np.asarray(rows)
        self._written[real[real != 0]] = self._complete
        return found


class ReadsTheUnwritten(FutureMap):
    """Nobody looks whether there is anything in a cell: the last consumed value is read again."""

    def resolve(self, rows, epochs):
        real = np.asarray(rows)
        self._written[real[(real > 0) & (real <= self.num_rows)]] = self._complete
        return super().resolve(rows, epochs)


class ReadsAHalf(FutureMap):
    """A published length makes the fields readable, too: those of the step before."""

    def publish(self, rows, epochs, lengths):
        super().publish(rows, epochs, lengths)
        real = np.asarray(rows)
        self._written[real[real != 0]] |= self._complete


class Overwrites(FutureMap):
    """An unread length is overwritten by the next one."""

    def publish(self, rows, epochs, lengths):
        real = np.asarray(rows)
        real = real[(real > 0) & (real <= self.num_rows)]
        self._written[real] &= ~np.uint8(1)
        super().publish(rows, epochs, lengths)


class ConsumesBeforeItLooks(FutureMap):
    """A read of several rows that is refused for one of them has consumed the others."""

    def resolve(self, rows, epochs):
        try:
            return super().resolve(rows, epochs)
        except Exception:
            real = np.asarray(rows)
            self._written[real[(real > 0) & (real <= self.num_rows)]] = 0
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
    """A value is stored where its lane stands in the batch, and read where its row is."""

    def scatter(self, buffer, rows, values, sources):
        lanes = np.arange(1, len(rows) + 1)
        super().scatter(buffer, lanes if len(buffer) > len(rows) else rows, values, sources)


class LengthsIn16Bits(NumpyStorage):
    """A length is stored in 16 bits."""

    def scatter(self, buffer, rows, values, sources):
        is_length = values.ndim == 1 and values.size and int(values.max()) > 40_000
        super().scatter(buffer, rows, values.astype(np.int16) if is_length else values, sources)


# -- of the adapter: what an algorithm relays ---------------------------------------------------------------------------


class HiddenForEverybody(FutureMapAdapter):
    """The buffer of hidden states is there for every algorithm; one that has none relays zeros."""

    def stash(self, rows, generations, values):
        super().stash(rows, generations, {**values, HIDDEN: self._hidden(rows, values)})

    def _hidden(self, rows, values):
        given = values[HIDDEN]
        return given if given is not None else np.zeros((len(rows), *self.fields[HIDDEN].shape_suffix))


class IgnoresWhatIsNotDeclared(FutureMapAdapter):
    """Hidden states that no field is declared for are dropped without a word."""

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
    """Lengths come one read late: whoever reads a row gets what its reader before him should have got."""

    def __init__(self, relay):
        super().__init__(relay)
        self.last = {}

    def resolve(self, rows, generations):
        lengths, fields = super().resolve(rows, generations)
        found = dict(zip(rows, lengths.tolist(), strict=True))
        late = [self.last.get(row, found[row]) if row else 0 for row in rows]
        self.last.update(found)
        return np.array(late, np.int64), fields


# -- how they are made ------------------------------------------------------------------------------------------------


def _declared(build) -> object:
    def made(config: RelayConfig) -> FutureMapAdapter:
        return build(config)

    made.capabilities = make.capabilities
    return made


def of_map(kind: type[FutureMap]):
    return _declared(lambda config: FutureMapAdapter(kind(config.num_rows, relay_fields(config))))


def of_storage(kind: type[NumpyStorage]):
    return _declared(lambda config: FutureMapAdapter(FutureMap(config.num_rows, relay_fields(config), kind())))


def of_adapter(kind: type[FutureMapAdapter]):
    return _declared(lambda config: kind(FutureMap(config.num_rows, relay_fields(config))))


def with_hidden(kind: type[FutureMapAdapter]):
    def build(config: RelayConfig) -> FutureMapAdapter:
        always = RelayConfig(config.num_rows, config.widths, config.hidden_width or 2)
        return kind(FutureMap(config.num_rows, relay_fields(always)))

    return _declared(build)


def unseen(kind: type[NumpyStorage]):
    """With nothing to look at but the answers."""
    made = of_storage(kind)
    made.capabilities = RelayCapabilities(padding_row=True)
    return made


_DEFECTS = (
    (ReadsAgain, of_map, ("RELAY-02",)),
    (ReadsTheUnwritten, of_map, ("RELAY-02",)),
    (ReadsAHalf, of_map, ("RELAY-02",)),
    (Overwrites, of_map, ("RELAY-02",)),
    (ConsumesBeforeItLooks, of_map, ("RELAY-02",)),
    (AcceptsARowTwice, of_map, ("RELAY-02",)),
    (KeepsWhatIsReleased, of_map, ("RELAY-02",)),
    (DropsTheWholeTable, of_map, ("RELAY-02",)),
    (ReadsAnyEpoch, of_map, ("RELAY-03",)),
    (ComparesTheLowBits, of_map, ("RELAY-03",)),
    (CompletesAnothersCell, of_map, ("RELAY-03",)),
    (WrapsNegativeRows, of_map, ("RELAY-03",)),
    (ClampsTheRows, of_map, ("RELAY-03",)),
    (SharesThePaddingRow, of_map, ("RELAY-02",)),
    (ShiftsPastThePadding, of_storage, ("RELAY-02",)),
    (SortsTheBatch, unseen, ("RELAY-02",)),
    (StoresByLane, of_storage, ("RELAY-02",)),
    (LengthsIn16Bits, of_storage, ("RELAY-02",)),
    (HiddenForEverybody, with_hidden, ("RELAY-02",)),
    (IgnoresWhatIsNotDeclared, of_adapter, ("RELAY-02",)),
    (FillsWhatIsMissing, of_adapter, ("RELAY-02",)),
    (ReadsOneReadLate, of_adapter, ("RELAY-02", "RELAY-03")),
)
"""(class, how it is made, the invariants of which one must catch it)."""

MUTANTS = tuple(Mutant(kind.__name__, kind.__doc__, "relay", how(kind), caught_by) for kind, how, caught_by in _DEFECTS)
