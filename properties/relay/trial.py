"""The relay's trial: each call on the subject and on a plain relay, each value compared, the cells recounted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from ..harness.operation import Operation, operation
from ..harness.trial import Trial
from . import invariants as invariants  # registers the checkers
from .contract import ALL, HIDDEN, LENGTHS, Relay, RelayCapabilities, RelayConfig
from .model import PADDING, Owner, PlainRelay, RelayMoment

REQUESTS = (1, 2, 3, 4)
# A batch is a list of requests; 0 is a padding lane, and what is no request a row that is not there.
BATCHES = (
    *((1,), (2,), (3,), (4,), (1, 2), (2, 1), (3, 1), (4, 2), (1, 2, 3), (3, 2, 1), (1, 2, 3, 4), (4, 3, 2, 1)),
    *((), (0,), (0, 1), (2, 0), (0, 1, 0, 2), (3, 0, 0, 1), (0, 4, 3, 0, 2, 1, 0)),
)
FEW = ((), (1,), (2, 1), (0, 3))
ODD = (
    *((1, 1), (2, 1, 2), (0, 3, 3), (1, 2, 3, 4, 1)),
    *((-1,), (-2, 1), (9,), (1, 9), (1 << 16,), (0, 1 << 31), (1 << 40,)),
)
FIRST_VALUE = 1 << 16  # lengths pass 2¹⁵, as long contexts do


def _is_open(t: RelayTrial, request: int) -> bool:
    return request in t.model.owners


class RelayTrial(Trial):
    """`subject` under operations. `call` is "read", "drop", or the part of the cells that is written."""

    contract = "relay"
    looks = ("num_unread",)
    quick = 40_000
    refuses_by_violation = True
    values: ClassVar = {
        "request": REQUESTS,
        "batch": BATCHES,
        "call": lambda c, has: ("read", *c.parts(has), "drop"),
        "ahead": (1, -1, 2, 256, -(1 << 16), 1 << 32),
        "oddity": ("none", "missing", "extra"),
    }

    subject: Relay
    config: RelayConfig
    capabilities: RelayCapabilities
    moment: RelayMoment

    def prepare(self) -> None:
        self.model = PlainRelay(self.config, self.capabilities)
        super().prepare()

    def begin(self, operation: Operation | str) -> None:
        self.moment = RelayMoment(operation)

    def end(self) -> None:
        if self.capabilities.inspection:
            unread = self.integer(self.must(self.subject.num_unread), "num_unread()")
            self.moment.unread = unread, len(self.model.cells)

    @operation(weight=8, when=lambda t, request: not _is_open(t, request))
    def open(self, request: int) -> None:
        """Give a request the lowest free row, and a generation of its own."""
        taken = [owner.row for owner in self.model.owners.values()]
        free = [row for row in self.model.rows if row not in taken]
        self.only_if(free)
        self.model.generation += 1
        self.model.owners[request] = Owner(free[0], self.model.generation)

    @operation(weight=4, when=_is_open)
    def release(self, request: int) -> None:
        """Let the request leave and drop its row, with a padding lane as in a padded batch."""
        self._call("drop", [self.model.owners.pop(request), *self._lanes((0,))])

    @operation(weight=4, needs="halves", part=(LENGTHS, "others"))
    @operation(weight=14)
    def write(self, batch: tuple[int, ...], part: str = ALL) -> None:
        """Write all fields, or one half, as a step does, for those of the batch whose cells have nothing of it."""
        lanes, parts = self._ready(part, batch), self.model.parts
        self.only_if(lanes or not batch)
        for name in parts if part == ALL else (part,):
            self._call(name, lanes)

    @operation(weight=14)
    def read(self, batch: tuple[int, ...]) -> None:
        """Read those of the batch whose cells are whole."""
        lanes = self._ready("read", batch)
        self.only_if(lanes or not batch)
        self._call("read", lanes)

    # -- what no step does --------------------------------------------------------------------------------------------

    @operation(weight=8, needs="misuse", batch=BATCHES + ODD)
    def anyway(self, call: str, batch: tuple[int, ...]) -> None:
        """Make a call with the whole batch as it stands: whatever its cells hold, with equal rows, or with rows that
        are not there."""
        lanes = self._lanes(batch)
        self.only_if(lanes or not batch)
        self._call(call, lanes)

    @operation(weight=2, needs="misuse", when=_is_open)
    def write_oddly(self, request: int, oddity: str) -> None:
        """Write with None for a field, without it, or with a field too many."""
        part = list(self.model.parts)[-1]
        lanes = self._ready(part, (request,))
        self.only_if(lanes and (oddity == "extra" or len(self.config.fields) > 1))
        self.moment.forbidden["RELAY-02"] = f"{oddity} fields"
        self._call(part, lanes, oddity)

    @operation(weight=10, needs="generations", probes="RELAY-03", batch=FEW)
    def pretend(self, call: str, request: int, ahead: int, batch: tuple[int, ...]) -> None:
        """Read or write the cell of a request, too, with a generation that is `ahead` of its own, or behind."""
        ready, owner = self._ready(call, (request, *batch)), self.model.owners.get(request)
        self.only_if(call != "drop" and ahead and owner in ready and owner.row in self.model.cells)
        others = [lane for lane in ready if lane != owner]
        self._call(call, [*others, owner._replace(generation=owner.generation + ahead)])

    # -- calls --------------------------------------------------------------------------------------------------------

    def _lanes(self, batch: Sequence[int]) -> list[Owner]:
        """Return the open requests of a batch, padding where there is such a row, and rows that are not there."""
        known = self.model.owners | ({0: PADDING} if self.capabilities.padding_row else {})
        known |= {row: Owner(row, 1 << 20) for row in batch if not 0 <= row <= len(REQUESTS)}
        return [known[request] for request in batch if request in known]

    def _ready(self, call: str, batch: Sequence[int]) -> list[Owner]:
        return [lane for lane in self._lanes(batch) if not self.model.forbids(call, [lane])]

    def _call(self, call: str, lanes: Sequence[Owner], oddity: str = "") -> None:
        """Make a call for these lanes, if there is such a call; the model follows if it is accepted."""
        m, model = self.moment, self.model
        self.only_if(call in ("read", "drop", *model.parts))
        m.forbidden |= model.forbids(call, lanes)
        rows, generations = [lane.row for lane in lanes], [lane.generation for lane in lanes]
        values = {name: [self._value(name, lane) for lane in lanes] for name in model.parts.get(call, ())}
        if call == "drop":
            answer = self.ask(self.subject.drop, rows)
        elif call == "read":
            answer = self.ask(self.subject.read, rows, generations)
        else:
            answer = self.ask(self.subject.write, rows, generations, self._given(values, oddity))
        if self.refused(answer) or not m.forbidden.keys() <= {""}:
            return
        if call == "read":
            self._compare(lanes, answer)
        for number, lane in enumerate(lanes):
            _, before = model.cells.pop(lane.row, (0, {}))
            if values and lane is not PADDING:
                written = {name: column[number] for name, column in values.items()}
                model.cells[lane.row] = lane.generation, before | written

    def _value(self, name: str, lane: Owner) -> int | list[Any]:
        """Return a value that is in no other write; a float32 holds its entries."""
        first, width = FIRST_VALUE + 8 * len(self.model.writers), self.config.fields[name]
        self.model.writers[first] = lane.generation
        return [(float if name == HIDDEN else int)(first + at) for at in range(width)] if width else first

    def _given(self, values: dict[str, list[Any]], oddity: str) -> dict[str, Any]:
        given: dict[str, Any] = values if list(values) == [LENGTHS] else {HIDDEN: None, **values}
        if oddity:
            given = {**given, **({"other": [1]} if oddity == "extra" else {list(values)[-1]: None})}
        return {name: given[name] for name in given if oddity != "missing" or name != list(values)[-1]}

    def _compare(self, lanes: Sequence[Owner], answer: object) -> None:
        """Note in the moment the values that are not what was written."""
        m, model, fields = self.moment, self.model, self.config.fields
        found = self.mapping(answer, "what read answered", "a mapping of the fields")
        for name, given in found.items():
            if name not in fields and given is not None:
                m.wrong["RELAY-02"] = f"a field {name!r} is {given}", f"None or nothing: there is {', '.join(fields)}"
        for name, width in fields.items():
            column = self.sequence(found.get(name), name, f"{len(lanes)} rows, one per lane of the batch", len(lanes))
            m.lengths = m.lengths or list(column)  # the first field
            for lane, row in zip(lanes, column, strict=True):
                due = model.cells[lane.row][1][name] if lane is not PADDING else [0] * width if width else 0
                value = list(row) if isinstance(row, tuple) else row
                if value == due:
                    continue
                entries = value if isinstance(value, list) else [value]
                writer = model.writers.get(entries[0], 0) if entries else 0
                is_anothers = self.capabilities.generations and writer not in (0, lane.generation)
                was = f"{name} of row {lane.row} is {value}" + (f", of generation {writer}" if is_anothers else "")
                m.wrong["RELAY-03" if is_anothers else "RELAY-02"] = was, f"{due}"

    def drain(self) -> None:
        """Read all that is whole and release every request; then do it with the whole table."""
        requests = tuple(range(1, self.config.num_rows + 1))
        for names in (tuple(self.model.owners), requests):
            self.read((*names, 0))
            for request in names:
                self.release(request)
            for request in requests:
                self.open(request)
            self.write((0, *reversed(requests)))

    def describe(self) -> str:
        return f"-> lengths {self.moment.lengths}" if self.moment.lengths is not None else super().describe()
