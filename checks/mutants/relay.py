"""Planted defects of relays: each is one method of a good one, done wrong in a way that has been done wrong before."""

from ...core.contract.future_map import FutureMap, NumpyStorage
from ...properties.relay.contract import RelayCapabilities
from ..adapters.future_map import FutureMapAdapter
from .planting import defects, lookup

RELAY = """
ReadsAgain (RELAY-02): A value stays readable after it was consumed.
    FutureMap.resolve
        - self._states[real] = following

ReadsTheUnwritten (RELAY-02): An empty cell can be read: the last consumed value is read again.
    FutureMap._readable
        - if refused.any():
        + if False:

ReadsAHalf (RELAY-02): A published length makes the fields readable, too: those of the step before.
    FutureMap.publish
        - = following
        + = CellState.WHOLE

Overwrites (RELAY-02): An unread length is overwritten by the next one.
    FutureMap._writable
        - refused = following == _REFUSED
        + following = np.where(states == CellState.PUBLISHED, states, following)
        + refused = (following == _REFUSED) & (event != CellEvent.PUBLISH)

ConsumesBeforeItLooks (RELAY-02): A read of several rows that is refused for one of them has consumed the others.
    FutureMap._readable
        - foreign = self._epochs[real] != epochs
        + self._states[real], foreign = 0, self._epochs[real] != epochs

AcceptsARowTwice (RELAY-02): A row that stands twice in a batch is written twice, and the later lane wins.
    FutureMap._enter
        - if twice.any():
        + if False:

KeepsWhatIsReleased (RELAY-02): The cell of a released row keeps its unread value.
    FutureMap.drop
        - self._states[rows] = CellState.EMPTY

ComparesTheLowBits (RELAY-03): Generations are compared in 32 bits.
    FutureMap._enter = good(self, rows, np.asarray(epochs) & 0xFFFFFFFF)

CompletesAnothersCell (RELAY-03): The fields of one request complete the length of another.
    FutureMap._writable
        - self._epochs[rows] != epochs
        + (self._epochs[rows] != epochs) & (event == CellEvent.PUBLISH)

WrapsNegativeRows (RELAY-03): Row −1 is the last row, as an index into an array is.
    FutureMap._enter = good(self, np.where(np.asarray(rows) < 0, np.asarray(rows) % (self.num_rows + 1), rows), epochs)

ClampsTheRows (RELAY-03): A row beyond the table is the last row.
    FutureMap._enter = good(self, np.minimum(np.asarray(rows), self.num_rows), epochs)
    FutureMap.drop = good(self, np.minimum(np.asarray(rows), self.num_rows))

SharesThePaddingRow (RELAY-02): The padding lanes of a batch write into row 0, and the next batch's padding lanes read that.
    FutureMap.publish:
        good(self, rows, epochs, lengths)
        padding = np.asarray(rows) == 0
        if padding.any():
            self._buffers["lengths"][0] = np.asarray(lengths)[padding][-1]
    FutureMap.check = None

StoresByLane (RELAY-02): A value is stored under the number of its lane in the batch, and read under its row.
    NumpyStorage.scatter
        - buffer[rows]
        + buffer[np.arange(1, len(rows) + 1) if len(buffer) > len(rows) else rows]

LengthsIn16Bits (RELAY-02): A length is stored in 16 bits.
    NumpyStorage.scatter
        - buffer[rows]
        + values = values.astype(np.int16) if values.ndim == 1 else values
        + buffer[rows]

HiddenForEverybody (RELAY-02): The buffer of hidden states is there for every algorithm; one that has none relays zeros.
    FutureMapAdapter.__init__:
        good(self, config)
        if HIDDEN not in self.fields:
            self.fields[HIDDEN] = RelayField(HIDDEN, (2,), "float32")
            self.relay = FutureMap(config.num_rows, tuple(self.fields.values()))
    FutureMapAdapter.stash:
        if values[HIDDEN] is None:
            values = {**values, HIDDEN: np.zeros((len(rows), *self.fields[HIDDEN].shape_suffix))}
        good(self, rows, generations, values)

IgnoresWhatIsNotDeclared (RELAY-02): A field that is not declared is ignored.
    FutureMapAdapter.stash = good(self, rows, generations, {name: values[name] for name in values if name in self.fields})

FillsWhatIsMissing (RELAY-02): A declared field that is not given is filled with zeros.
    FutureMapAdapter.stash:
        missing = [(name, field) for name, field in self.fields.items() if values.get(name) is None]
        zeros = {name: np.zeros((len(rows), *field.shape_suffix)) for name, field in missing}
        good(self, rows, generations, {**values, **zeros})
"""

SORTING = """
SortsTheBatch (RELAY-02): Values come back in the order of the rows, not of the batch.
    NumpyStorage.gather = buffer[np.sort(rows)]
"""

_PLACES = [FutureMap, NumpyStorage, FutureMapAdapter]
MUTANTS = (
    *defects("relay", FutureMapAdapter, _PLACES, RELAY),
    *defects("relay", FutureMapAdapter, _PLACES, SORTING, RelayCapabilities(padding_row=True)),
)
__getattr__ = lookup(MUTANTS)
