"""The relay's trial: each call on the subject and on a plain relay, each value compared, the cells recounted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from ..harness.operation import Operation, operation
from ..harness.trial import Trial
from . import invariants as invariants  # registers the checkers
from .contract import HIDDEN, LENGTHS, Relay, RelayCapabilities, RelayConfig
from .model import PADDING, Owner, PlainRelay, RelayMoment

REQUESTS = (1, 2, 3, 4)
# A batch is a list of requests; 0 is a padding lane.
BATCHES = (
    *((1,), (2,), (3,), (4,), (1, 2), (2, 1), (3, 1), (4, 2), (1, 2, 3), (3, 2, 1), (1, 2, 3, 4), (4, 3, 2, 1)),
    *((), (0,), (0, 1), (2, 0), (0, 1, 0, 2), (3, 0, 0, 1), (0, 4, 3, 0, 2, 1, 0)),
)
FEW = ((), (1,), (2, 1), (0, 3))
TWICE = ((1, 1), (2, 1, 2), (0, 3, 3), (1, 2, 3, 4, 1))
FIRST_VALUE = 1 << 16  # lengths pass 2¹⁵, as long contexts do


def _is_open(t: RelayTrial, request: int) -> bool:
    return request in t.model.owners


def _is_call(t: RelayTrial, call: str) -> bool:
    return call in _calls(t.config, t.capabilities)


def _calls(config: RelayConfig, has: RelayCapabilities) -> tuple[str, ...]:
    return ("read", *config.parts(has), "drop")


class RelayTrial(Trial):
    """`subject` under operations. `call` is "read", "drop", or the part of the cells that is written."""

    contract = "relay"
    looks = ("num_unread",)
    quick = 40_000
    refuses_by_violation = True
    values: ClassVar = {
        "request": REQUESTS,
        "heir": REQUESTS,
        "batch": BATCHES,
        "call": _calls,
        "row": (-1, 0, -2, 1, 1 << 16, 1 << 31, 1 << 40),
        "ahead": (1, -1, 2, 256, -(1 << 16), 1 << 32),
        "oddity": ("hidden", "extra", "missing"),
    }

    subject: Relay
    config: RelayConfig
    capabilities: RelayCapabilities
    moment: RelayMoment

    def prepare(self) -> None:
        self.model = PlainRelay(self.config, self.capabilities)
        self.begin("make")
        self.end()

    def begin(self, operation: Operation | str) -> None:
        self.moment = RelayMoment(operation)

    def end(self) -> None:
        if self.capabilities.inspection:
            unread = self.integer(self.must(self.subject.num_unread), "num_unread()")
            self.moment.unread = unread, len(self.model.cells)

    @operation(weight=8, when=lambda t, request: request >= 1 and request not in t.model.owners)
    def open(self, request: int) -> bool:
        """Give a request the lowest free row, and a generation of its own."""
        taken = [owner.row for owner in self.model.owners.values()]
        free = [row for row in self.model.rows if row not in taken]
        if free:
            self.model.owners[request] = self.model.new_owner(free[0])
        return bool(free)

    @operation(weight=4, when=_is_open)
    def release(self, request: int) -> None:
        """Let the request leave and drop its row, with a padding lane as in a padded batch."""
        self._call("drop", [self.model.owners.pop(request), *self._lanes((0,))])

    @operation(weight=2, needs="generations", when=_is_open, probes="RELAY-03")
    def inherit(self, request: int, heir: int) -> bool:
        """Give `heir` the row of `request` at once, without dropping the cell."""
        if heir not in self.model.owners and heir >= 1:
            self.model.owners[heir] = self.model.new_owner(self.model.owners.pop(request).row)
        return heir in self.model.owners and request not in self.model.owners

    @operation(weight=14)
    def write(self, batch: tuple[int, ...]) -> bool:
        """Write all fields, as a step does, for those of the batch whose cells are empty."""
        lanes = [lane for lane in self._lanes(batch) if lane.row not in self.model.cells]
        return all(self._call(part, lanes, batch) for part in self.model.parts)

    @operation(weight=14)
    def read(self, batch: tuple[int, ...]) -> bool:
        """Read those of the batch whose cells are whole."""
        return self._call("read", self._ready("read", batch), batch)

    @operation(weight=4, needs="halves", when=_is_call, call=(LENGTHS, "others"))
    def write_half(self, call: str, batch: tuple[int, ...]) -> bool:
        """Write one half of those cells of the batch that have not got it."""
        return self._call(call, self._ready(call, batch), batch)

    # -- what no step does --------------------------------------------------------------------------------------------

    @operation(weight=8, needs="misuse", when=_is_call, batch=BATCHES + TWICE)
    def anyway(self, call: str, batch: tuple[int, ...]) -> bool:
        """Make a call with the whole batch as it stands, whatever its cells hold, equal rows included."""
        return self._call(call, self._lanes(batch), batch)

    @operation(weight=2, needs="misuse", when=_is_call, probes="RELAY-03", batch=FEW)
    def stray(self, call: str, row: int, batch: tuple[int, ...]) -> None:
        """Make a call with the batch and a row that is not there: a number below 0, or so far behind the last."""
        lane = Owner(row if row < 0 else self.model.rows.stop + row, 1 << 20)
        self._call(call, [*self._ready(call, batch), lane])

    @operation(weight=2, needs="misuse", when=_is_open)
    def write_oddly(self, request: int, oddity: str) -> bool:
        """Write with a field missing, or one too many, or with the opposite of the hidden states that are declared."""
        part, lanes = list(self.model.parts)[-1], self._ready(list(self.model.parts)[-1], (request,))
        if not lanes or (oddity == "missing" and len(self.config.fields) == 1):
            return False
        self.moment.forbidden["RELAY-02"] = f"{oddity} fields"
        return self._call(part, lanes, oddity=oddity)

    @operation(weight=10, needs="generations", when=_is_call, probes="RELAY-03", batch=FEW)
    def pretend(self, call: str, request: int, ahead: int, batch: tuple[int, ...]) -> bool:
        """Read or write the cell of a request, too, with a generation that is `ahead` of its own, or behind."""
        ready, owner = self._ready(call, (request, *batch)), self.model.owners.get(request)
        if call == "drop" or not ahead or owner not in ready or owner.row not in self.model.cells:
            return False
        others = [lane for lane in ready if lane != owner]
        return self._call(call, [*others, owner._replace(generation=owner.generation + ahead)])

    # -- calls --------------------------------------------------------------------------------------------------------

    def _lanes(self, batch: Sequence[int]) -> list[Owner]:
        """Return the open requests of a batch, and padding where there is such a row."""
        known = self.model.owners | ({0: PADDING} if self.capabilities.padding_row else {})
        return [known[request] for request in batch if request in known]

    def _ready(self, call: str, batch: Sequence[int]) -> list[Owner]:
        return [lane for lane in self._lanes(batch) if lane is PADDING or not self.model.forbids(call, [lane])]

    def _call(self, call: str, lanes: Sequence[Owner], batch: Sequence[int] = (), oddity: str = "") -> bool:
        """Make a call for these lanes; the model follows if it is accepted. Returns False if none is left of a
        batch."""
        if (batch and not lanes) or self.moment.refusal is not None:
            return bool(lanes)
        m, model, real = self.moment, self.model, [lane for lane in lanes if lane is not PADDING]
        m.call = f"write of {call}" if call in model.parts else call
        m.forbidden |= model.forbids(call, real)
        rows, generations = [lane.row for lane in lanes], [lane.generation for lane in lanes]
        values = {name: [self._value(name, lane) for lane in lanes] for name in model.parts.get(call, ())}
        if call == "drop":
            answer = self.ask(self.subject.drop, rows)
        elif call == "read":
            answer = self.ask(self.subject.read, rows, generations)
        else:
            answer = self.ask(self.subject.write, rows, generations, self._given(values, oddity))
        if not self.refused(answer) and m.forbidden.keys() <= {""}:
            if call == "read":
                self._compare(lanes, answer)
            for number, lane in enumerate(lanes):
                if call in model.parts and lane is not PADDING:
                    model.write(lane, {name: column[number] for name, column in values.items()})
                elif lane is not PADDING:
                    model.cells.pop(lane.row, None)
        return True

    def _value(self, name: str, lane: Owner) -> int | list[Any]:
        """Return a value that is in no other write; a float32 holds its entries."""
        first, width = FIRST_VALUE + 8 * len(self.model.writers), self.config.fields[name]
        self.model.writers[first] = lane.generation
        return [(float if name == HIDDEN else int)(first + at) for at in range(width)] if width else first

    def _given(self, values: dict[str, list[Any]], oddity: str) -> dict[str, Any]:
        given: dict[str, Any] = values if list(values) == [LENGTHS] else {HIDDEN: None, **values}
        if oddity == "hidden":
            return {**given, HIDDEN: None if self.config.hidden_width else [[0.0, 0.0]]}
        if oddity == "missing":
            return {name: column for name, column in given.items() if name != next(iter(values))}
        return {**given, "other": [1]} if oddity else given

    def _compare(self, lanes: Sequence[Owner], answer: object) -> None:
        """Note in the moment the values that are not what was written."""
        m, model, fields = self.moment, self.model, self.config.fields
        found = self.mapping(answer, "what read answered", "a mapping of the fields")
        for name, given in found.items():
            if name not in fields and given is not None:
                m.wrong["RELAY-02"] = f"a field {name!r} is {given}", f"None or nothing: there is {', '.join(fields)}"
        for name, width in fields.items():
            plain = found.get(name)
            column = plain.tolist() if hasattr(plain, "tolist") else plain
            column = self.sequence(column, name, f"{len(lanes)} rows, one per lane of the batch", len(lanes))
            for lane, row in zip(lanes, column, strict=True):
                due = model.cells[lane.row][1][name] if lane is not PADDING else [0] * width if width else 0
                value = list(row) if isinstance(row, tuple) else row
                if value != due:
                    entries = value if isinstance(value, list) else [value]
                    writer = model.writers.get(entries[0]) if entries else None
                    is_anothers = self.capabilities.generations and writer not in (None, 0, lane.generation)
                    was = f"{name} of row {lane.row} is {value}" + (f", of generation {writer}" if is_anothers else "")
                    m.wrong["RELAY-03" if is_anothers and lane is not PADDING else "RELAY-02"] = was, f"{due}"
            m.lengths = list(column) if name == LENGTHS else m.lengths

    def drain(self) -> None:
        """Read all that is whole, release every request; then write and read the whole table, and empty it."""
        self.read(tuple(self.model.owners))
        requests = tuple(range(1, self.config.num_rows + 1))
        for request in list(self.model.owners):
            self.release(request)
        for request in requests:
            self.open(request)
        self.write((0, *reversed(requests)))
        self.read((*requests, 0))
        for request in requests:
            self.release(request)

    def describe(self) -> str:
        return f"-> lengths {self.moment.lengths}" if self.moment.lengths is not None else "done"
