"""Planted defects of relays: each is a subclass of a part of ours, done wrong in a way that has been
done wrong before."""

import numpy as np

from ...core.contract.future_map import CellState, FutureMap, NumpyStorage, RelayField
from ...core.errors import InvariantViolation
from ...properties.relay.contract import HIDDEN, LENGTHS, RelayCapabilities
from ..adapters.future_map import FutureMapAdapter
from .planting import Defects

RELAY = Defects("relay", FutureMapAdapter)


@RELAY.breaks("RELAY-02")
class ReadsAgain(FutureMap):
    """A value stays readable after it was consumed."""

    def resolve(self, rows, epochs):
        before = self._states.copy()
        found = super().resolve(rows, epochs)
        self._states[:] = before
        return found


@RELAY.breaks("RELAY-02")
class ReadsTheUnwritten(FutureMap):
    """An empty cell can be read: the last consumed value is read again."""

    def _readable(self, rows, epochs, event):
        rows, real, epochs, _ = self._enter(rows, epochs)
        states = self._states[real]
        self._refuse(self._epochs[real] != epochs, states != CellState.EMPTY, real, epochs)
        return rows, real, self._following[event][states]


@RELAY.breaks("RELAY-02")
class ReadsAHalf(FutureMap):
    """A published length makes the fields readable, too: those of the step before."""

    def publish(self, rows, epochs, lengths):
        super().publish(rows, epochs, lengths)
        self._states[rows[rows != 0]] = CellState.WHOLE


@RELAY.breaks("RELAY-02")
class Overwrites(FutureMap):
    """An unread length is overwritten by the next one."""

    def publish(self, rows, epochs, lengths):
        _, real, own, _ = self._enter(rows, epochs)
        is_unread = (self._states[real] == CellState.PUBLISHED) & (self._epochs[real] == own)
        self._states[real[is_unread]] = CellState.EMPTY
        super().publish(rows, epochs, lengths)


@RELAY.breaks("RELAY-02")
class ConsumesBeforeItLooks(FutureMap):
    """A read of several rows that is refused for one of them has consumed the others."""

    def _readable(self, rows, epochs, event):
        try:
            return super()._readable(rows, epochs, event)
        except InvariantViolation:
            self._states[rows[(rows > 0) & (rows <= self.num_rows)]] = CellState.EMPTY
            raise


@RELAY.breaks("RELAY-02")
class AcceptsARowTwice(FutureMap):
    """A row that stands twice in a batch is written twice, and the later lane wins."""

    def _enter(self, rows, epochs):
        self._in_range(rows)
        places = np.flatnonzero(rows)
        if len(np.unique(rows[places])) == len(places):
            return super()._enter(rows, epochs)
        return rows, rows[places], epochs[places], places


@RELAY.breaks("RELAY-02")
class KeepsWhatIsReleased(FutureMap):
    """The cell of a released row keeps its unread value."""

    def drop(self, rows):
        self._in_range(rows)


@RELAY.breaks("RELAY-03")
class ComparesTheLowBits(FutureMap):
    """Generations are compared in 32 bits."""

    def _enter(self, rows, epochs):
        return super()._enter(rows, np.asarray(epochs) & 0xFFFFFFFF)


@RELAY.breaks("RELAY-03")
class CompletesAnothersCell(FutureMap):
    """The fields of one request complete the length of another."""

    def stash(self, rows, epochs, values):
        _, real, own, _ = self._enter(rows, epochs)
        self._epochs[real] = own
        super().stash(rows, epochs, values)


@RELAY.breaks("RELAY-03")
class WrapsNegativeRows(FutureMap):
    """Row −1 is the last row, as an index into an array is."""

    def _enter(self, rows, epochs):
        return super()._enter(np.where(np.asarray(rows) < 0, np.asarray(rows) % (self.num_rows + 1), rows), epochs)


@RELAY.breaks("RELAY-03")
class ClampsTheRows(FutureMap):
    """A row beyond the table is the last row."""

    def _enter(self, rows, epochs):
        return super()._enter(np.minimum(np.asarray(rows), self.num_rows), epochs)

    def drop(self, rows):
        return super().drop(np.minimum(np.asarray(rows), self.num_rows))


@RELAY.breaks("RELAY-02")
class SharesThePaddingRow(FutureMap):
    """The padding lanes of a batch write into row 0, and the next batch's padding lanes read that."""

    def publish(self, rows, epochs, lengths):
        super().publish(rows, epochs, lengths)
        padding = np.asarray(rows) == 0
        if padding.any():
            self._buffers["lengths"][0] = np.asarray(lengths)[padding][-1]

    def check(self):
        pass


@RELAY.breaks("RELAY-02", "RELAY-03")
class StoresByLane(NumpyStorage):
    """A value is stored under the number of its lane in the batch, and read under its row."""

    def scatter(self, buffer, rows, values, sources):
        lanes = np.arange(1, len(rows) + 1) if len(buffer) > len(rows) else rows
        super().scatter(buffer, lanes, values, sources)


@RELAY.breaks("RELAY-02")
class LengthsIn16Bits(NumpyStorage):
    """A length is stored in 16 bits."""

    def scatter(self, buffer, rows, values, sources):
        super().scatter(buffer, rows, values.astype(np.int16) if values.ndim == 1 else values, sources)


@RELAY.breaks("RELAY-02")
class HiddenForEverybody(FutureMapAdapter):
    """The buffer of hidden states is there for every algorithm; one that has none relays zeros."""

    def __init__(self, config, debug_poison=False):
        super().__init__(config)
        if HIDDEN not in self.fields:
            self.fields[HIDDEN] = RelayField(HIDDEN, (2,), "float32")
            self.relay = FutureMap(config.num_rows, tuple(self.fields.values()))

    def write(self, rows, generations, values):
        if list(values) != [LENGTHS] and values[HIDDEN] is None:
            values = {**values, HIDDEN: np.zeros((len(rows), *self.fields[HIDDEN].shape_suffix))}
        super().write(rows, generations, values)


@RELAY.breaks("RELAY-02")
class IgnoresWhatIsNotDeclared(FutureMapAdapter):
    """A field that is not declared is ignored."""

    def write(self, rows, generations, values):
        super().write(rows, generations, {name: values[name] for name in values if name in (*self.fields, LENGTHS)})


@RELAY.breaks("RELAY-02")
class FillsWhatIsMissing(FutureMapAdapter):
    """A declared field that is not given is filled with zeros."""

    def write(self, rows, generations, values):
        fields = {} if list(values) == [LENGTHS] else self.fields
        missing = [(name, field) for name, field in fields.items() if values.get(name) is None]
        zeros = {name: np.zeros((len(rows), *field.shape_suffix)) for name, field in missing}
        super().write(rows, generations, {**values, **zeros})


SORTING = Defects("relay", FutureMapAdapter, RelayCapabilities(padding_row=True, halves=True))


@SORTING.breaks("RELAY-02")
class SortsTheBatch(NumpyStorage):
    """Values come back in the order of the rows, not of the batch."""

    def gather(self, buffer, rows):
        return buffer[np.sort(rows)]


MUTANTS = (*RELAY.mutants, *SORTING.mutants)
