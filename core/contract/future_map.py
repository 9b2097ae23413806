"""The FutureMap: device values of one step that the next step reads without passing through the CPU.

One cell per request-table row. A step publishes the row's new length and stashes its draft inputs; the next step that
contains the row resolves them:

    empty ──publish, stash──► whole ──resolve──► empty ──publish, stash──► …
                                └─────drop─────► empty        (the row is released, its cell unread)

so each owner's writes and reads of a cell alternate, and at most its last write is unread. `CELL_TRANSITIONS` says
which event is possible in which state. Each cell carries the epoch of the request that wrote it; a reader of another
epoch gets an error, never a value. Row 0 is the padding row: writing it does nothing, reading it gives zeros. A call
that fails changes nothing.

States and epochs live on the host, the values behind a `RelayStorage`: NumPy here, device memory in an executor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import prod
from typing import Any, Protocol

import numpy as np

from ..errors import InvariantViolation
from .arrays import BoolArray

_POISON_BYTE = 0xA5


class CellState(IntEnum):
    EMPTY = 0  # never written, read, or dropped
    PUBLISHED = 1  # has a length, its values are to come
    STASHED = 2  # has values, its length is to come
    WHOLE = 3  # can be read


class CellEvent(IntEnum):
    PUBLISH = 0  # a step writes the length
    STASH = 1  # a step writes the values
    RESOLVE = 2  # the next step reads both
    PASS_THROUGH = 3  # the device reads both and writes them anew
    DROP = 4  # the row is released


S, E = CellState, CellEvent
Transitions = Mapping[CellState, Mapping[CellEvent, CellState]]
_READ = {E.RESOLVE: S.EMPTY, E.PASS_THROUGH: S.WHOLE, E.DROP: S.EMPTY}
CELL_TRANSITIONS: Transitions = {
    S.EMPTY: {E.PUBLISH: S.PUBLISHED, E.STASH: S.STASHED, E.DROP: S.EMPTY},
    S.PUBLISHED: {E.STASH: S.WHOLE, E.DROP: S.EMPTY},
    S.STASHED: {E.PUBLISH: S.WHOLE, E.DROP: S.EMPTY},
    S.WHOLE: _READ,
}
LENGTH_TRANSITIONS: Transitions = {
    S.EMPTY: {E.PUBLISH: S.WHOLE, E.STASH: S.EMPTY, E.DROP: S.EMPTY},
    S.WHOLE: {**_READ, E.STASH: S.WHOLE},
}
"""Of a relay without fields: a cell is whole with its length, and a stash has nothing to write."""
_REFUSED = 255


def _as_array(transitions: Transitions) -> np.ndarray:
    """Return the following state, uint8 [events, states]; _REFUSED where the event is not possible."""
    table = np.full((len(CellEvent), len(CellState)), _REFUSED, np.uint8)
    for state, events in transitions.items():
        for event, following in events.items():
            table[event, state] = following
    return table


@dataclass(frozen=True, slots=True)
class RelayField:
    """One value per row that an algorithm relays: its name, the shape of one row and the dtype's name.

    Integer fields hold token ids or indices and are never negative.
    """

    name: str
    shape_suffix: tuple[int, ...]
    dtype: str

    @property
    def bytes_per_row(self) -> int:
        itemsize = 2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize
        return prod(self.shape_suffix) * itemsize


LENGTH_FIELD = RelayField("lengths", (), "int64")
"""The field that `publish` writes; every FutureMap has it."""


class RelayStorage(Protocol):
    """Storage of the relayed values. `rows` are int64 host indices [n]; values are whatever arrays the executor
    computes with."""

    def allocate(self, num_rows: int, relay_field: RelayField) -> Any:
        """Make a zeroed buffer [num_rows, *shape_suffix]."""

    def gather(self, buffer: Any, rows: np.ndarray) -> Any:
        """Return the rows as a new array [n, *shape_suffix]."""

    def scatter(self, buffer: Any, rows: np.ndarray, values: Any, sources: np.ndarray | None) -> None:
        """Write `values[sources]` ([n, *shape_suffix]; all of `values` if sources is None) to the rows."""

    def poison(self, buffer: Any, rows: np.ndarray) -> None:
        """Fill the rows with a pattern that no computation produces (debug mode)."""

    def is_poison(self, values: Any) -> np.ndarray:
        """Return bool [n] on the host: which rows hold only that pattern (debug mode)."""
        ...

    def has_placeholder(self, values: Any) -> np.ndarray:
        """Return bool [n] on the host: which rows of an integer array hold a negative number (debug mode)."""
        ...


class NumpyStorage:
    """Values in NumPy arrays: the specification of the port."""

    def allocate(self, num_rows: int, relay_field: RelayField) -> np.ndarray:
        return np.zeros((num_rows, *relay_field.shape_suffix), np.dtype(relay_field.dtype))

    def gather(self, buffer: np.ndarray, rows: np.ndarray) -> np.ndarray:
        values: np.ndarray = buffer[rows]
        return values

    def scatter(self, buffer: np.ndarray, rows: np.ndarray, values: np.ndarray, sources: np.ndarray | None) -> None:
        buffer[rows] = values if sources is None else values[sources]

    def poison(self, buffer: np.ndarray, rows: np.ndarray) -> None:
        buffer[rows] = np.frombuffer(bytes([_POISON_BYTE]) * buffer.itemsize, buffer.dtype)[0]

    def is_poison(self, values: np.ndarray) -> BoolArray:
        if not values.size:
            return np.zeros(len(values), bool)
        raw = np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)
        found: BoolArray = (raw == _POISON_BYTE).all(axis=1)
        return found

    def has_placeholder(self, values: np.ndarray) -> BoolArray:
        return np.asarray((values < 0).any(axis=tuple(range(1, values.ndim))))


@dataclass(slots=True)
class FutureMap:
    """Relay cells for request-table rows 1 … num_rows, with the fields that the algorithm relays."""

    num_rows: int
    fields: Sequence[RelayField] = ()
    storage: RelayStorage = field(default_factory=NumpyStorage)
    debug_poison: bool = False
    _states: np.ndarray = field(init=False, repr=False)
    _epochs: np.ndarray = field(init=False, repr=False)
    _stamps: np.ndarray = field(init=False, repr=False)
    _order: np.ndarray = field(init=False, repr=False)
    _buffers: dict[str, Any] = field(init=False, repr=False)
    _following: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.fields = tuple(RelayField(*f) if isinstance(f, tuple) else f for f in self.fields)
        names = [LENGTH_FIELD.name, *(f.name for f in self.fields)]
        assert len(set(names)) == len(names), f"relay fields with one name: {names}"
        self._states = np.full(self.num_rows + 1, CellState.EMPTY, np.uint8)
        self._epochs = np.zeros(self.num_rows + 1, np.int64)  # epoch of the request that wrote the cell
        self._stamps = np.zeros(self.num_rows + 1, np.int64)  # scratch that finds rows given twice
        self._order = np.arange(self.num_rows + 1)
        self._buffers = {f.name: self.storage.allocate(self.num_rows + 1, f) for f in (LENGTH_FIELD, *self.fields)}
        self._following = _as_array(CELL_TRANSITIONS if self.fields else LENGTH_TRANSITIONS)
        if self.debug_poison:
            self._poison(np.arange(1, self.num_rows + 1))

    @property
    def bytes_per_row(self) -> dict[str, int]:
        """Bytes of one row by field, lengths included: what a row costs in memory, and in traffic per step and way."""
        return {f.name: f.bytes_per_row for f in (LENGTH_FIELD, *self.fields)}

    @property
    def buffers(self) -> Mapping[str, Any]:
        """The cells of all rows by field, [num_rows + 1, *shape_suffix], lengths included."""
        return self._buffers

    @property
    def num_unread(self) -> int:
        """Cells that are written and not read yet."""
        return int(np.count_nonzero(self._states))

    def publish(self, rows: np.ndarray, epochs: np.ndarray, lengths: Any) -> None:
        """Write the new committed lengths, int64 [bs], of `rows` int [bs] held by `epochs` int64 [bs]."""
        rows, epochs, following, sources = self._writable(rows, epochs, CellEvent.PUBLISH)
        self.storage.scatter(self._buffers[LENGTH_FIELD.name], rows, lengths, sources)
        self._states[rows] = following
        self._epochs[rows] = epochs

    def stash(self, rows: np.ndarray, epochs: np.ndarray, values: Mapping[str, Any]) -> None:
        """Write the draft inputs of the next step: for every field, and no other, an array [bs, *shape_suffix]."""
        present = [name for name, value in values.items() if value is not None]
        if sorted(present) != sorted(f.name for f in self.fields):
            message = f"stashed {sorted(present)}, but the relay has {sorted(f.name for f in self.fields)}"
            raise InvariantViolation("ACCEPT-17", message)
        given = rows
        rows, epochs, following, sources = self._writable(rows, epochs, CellEvent.STASH)
        if self.debug_poison:
            self._refuse_placeholders(np.asarray(given), values)
        if not self.fields:
            return
        for f in self.fields:
            self.storage.scatter(self._buffers[f.name], rows, values[f.name], sources)
        self._states[rows] = following
        self._epochs[rows] = epochs

    def resolve(self, rows: np.ndarray, epochs: np.ndarray) -> tuple[Any, dict[str, Any]]:
        """Read the cells and mark them as read: lengths int64 [bs] and every field [bs, *shape_suffix]; zeros for row
        0."""
        rows, real, following = self._readable(rows, epochs, CellEvent.RESOLVE)
        found = {name: self.storage.gather(buffer, rows) for name, buffer in self._buffers.items()}
        if self.debug_poison:
            self._refuse_poison(rows, found)
            self._poison(real)
        self._states[real] = following
        return found.pop(LENGTH_FIELD.name), found

    def pass_through(self, rows: np.ndarray, epochs: np.ndarray) -> None:
        """Let the device read the cells of `rows` and write them anew for the same requests: `resolve`, `publish` and
        `stash` in one.

        A captured round does both on `buffers`, where the host sees no value.
        """
        rows, _, _ = self._readable(rows, epochs, CellEvent.PASS_THROUGH)
        if self.debug_poison:
            found = {name: self.storage.gather(buffer, rows) for name, buffer in self._buffers.items()}
            self._refuse_poison(rows, found)

    def drop(self, rows: np.ndarray) -> None:
        """Empty the cells of released rows, read or unread. Nothing written before can be read afterwards."""
        rows = np.asarray(rows, np.int64)
        self._in_range(rows)
        rows = rows[rows != 0]
        self._states[rows] = CellState.EMPTY
        if self.debug_poison:
            self._poison(rows)

    def check(self) -> None:
        """Check that row 0 holds only zeros (RELAY-02)."""
        padding = np.zeros(1, np.int64)
        dirty = [name for name, buffer in self._buffers.items() if (self.storage.gather(buffer, padding) != 0).any()]
        if self._states[0] or self._epochs[0] or dirty:
            raise InvariantViolation("RELAY-02", f"the padding row was written: {dirty or 'its flags'}")

    def _readable(
        self, rows: np.ndarray, epochs: np.ndarray, event: CellEvent
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return all rows; those without padding, and the states of their cells after the event. Raises unless the
        cells were written by these epochs."""
        rows, real, epochs, _ = self._enter(rows, epochs)
        states = self._states[real]
        foreign = self._epochs[real] != epochs
        if foreign.any():
            self._refuse(foreign, states != CellState.EMPTY, real, epochs)
        following = self._following[event][states]
        refused = following == _REFUSED
        if refused.any():
            row = int(real[refused.argmax()])
            raise InvariantViolation("RELAY-02", f"row {row} is read, but its cell is not (or not wholly) written")
        return rows, real, following

    def _writable(
        self, rows: np.ndarray, epochs: np.ndarray, event: CellEvent
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """Return rows and epochs without padding, the states of their cells after the event, and where they stand in
        the caller's arrays (None: all of them)."""
        _, rows, epochs, sources = self._enter(rows, epochs)
        states = self._states[rows]
        following = self._following[event][states]
        refused = following == _REFUSED
        if refused.any():
            row = int(rows[refused.argmax()])
            raise InvariantViolation("RELAY-02", f"row {row} is written again before it was read or dropped")
        if states.any():  # the other half of this write must come from the same request
            self._refuse(self._epochs[rows] != epochs, states != CellState.EMPTY, rows, epochs)
        return rows, epochs, following, sources

    def _enter(
        self, rows: np.ndarray, epochs: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """Return all rows; then rows and epochs without padding, and where they stand (None: there is no padding)."""
        rows, epochs = np.asarray(rows, np.int64), np.asarray(epochs)
        assert rows.shape == epochs.shape, f"{rows.shape} rows, but {epochs.shape} epochs"
        self._in_range(rows)
        real, sources = rows, None
        if not rows.all():
            sources = np.flatnonzero(rows)
            real, epochs = rows[sources], epochs[sources]
        if real.size > self.num_rows:
            raise InvariantViolation("RELAY-02", f"{real.size} rows in one call, but there are {self.num_rows}")
        # If a row is given twice, its later stamp overwrites the earlier one, and the comparison finds the difference.
        order = self._order[: real.size]
        self._stamps[real] = order
        twice = self._stamps[real] != order
        if twice.any():
            raise InvariantViolation("RELAY-02", f"row {int(real[twice.argmax()])} occurs twice in one call")
        return rows, real, epochs, sources

    def _in_range(self, rows: np.ndarray) -> None:
        # Seen as unsigned, a negative row is a huge one, so one comparison covers both ends.
        if rows.size and int(rows.view(np.uint64).max()) > self.num_rows:
            raise InvariantViolation("RELAY-03", f"rows {rows.tolist()} are not all in 0 … {self.num_rows}")

    def _refuse(self, foreign: np.ndarray, written: np.ndarray, rows: np.ndarray, epochs: np.ndarray) -> None:
        wrong = foreign & written
        if wrong.any():
            i = int(wrong.argmax())
            message = f"the cell of row {rows[i]} is of epoch {self._epochs[rows[i]]}, not of epoch {epochs[i]}"
            raise InvariantViolation("RELAY-03", message)

    def _refuse_placeholders(self, rows: np.ndarray, values: Mapping[str, Any]) -> None:
        for f in self.fields:
            if np.dtype("float32" if f.dtype == "bfloat16" else f.dtype).kind == "i":
                wrong = self.storage.has_placeholder(values[f.name]) & (rows != 0)
                if wrong.any():
                    raise InvariantViolation("RELAY-05", f"{f.name} of row {rows[wrong.argmax()]} has a placeholder")

    def _refuse_poison(self, rows: np.ndarray, found: Mapping[str, Any]) -> None:
        for name, values in found.items():
            stale = self.storage.is_poison(values) & (rows != 0)
            if stale.any():
                raise InvariantViolation("RELAY-02", f"{name} of row {rows[stale.argmax()]} was consumed before")

    def _poison(self, rows: np.ndarray) -> None:
        for buffer in self._buffers.values():
            self.storage.poison(buffer, rows)
