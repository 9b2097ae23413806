"""The relay's trial: each operation on the subject and on the model, every value compared, then a
recount of the cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from ..harness.operation import Operation, operation
from ..harness.trial import Trial
from . import invariants as invariants  # registers the checkers
from .contract import HIDDEN, Relay, RelayCapabilities, RelayConfig
from .model import PADDING, Owner, RelayModel, RelayMoment, WrongValue, length_of, stamp_of

REQUESTS = (1, 2, 3, 4)
# A batch is a list of requests; 0 is a padding lane.
BATCHES = (
    *((1,), (2,), (3,), (4,), (1, 2), (2, 1), (3, 1), (4, 2), (1, 2, 3), (3, 2, 1), (1, 2, 3, 4), (4, 3, 2, 1)),
    *((), (0,), (0, 1), (2, 0), (0, 1, 0, 2), (3, 0, 0, 1), (0, 4, 3, 0, 2, 1, 0)),
)
FEW = ((), (1,), (2, 1), (0, 3))
TWICE = ((1, 1), (2, 1, 2), (0, 3, 3), (1, 2, 3, 4, 1))
AHEAD = (1, -1, 2, 256, -(1 << 16), 1 << 32)
CALLS = ("resolve", "publish", "stash", "drop")
OFFSETS = (-1, 0, -2, 1, 1 << 16, 1 << 31, 1 << 40)
ODDITIES = {
    "hidden": "hidden states are given where none are declared, or None where they are",
    "extra": "a field is given that is not declared",
    "missing": "a declared field is missing",
}


def _can_open(t: RelayTrial, request: int) -> bool:
    return request >= 1 and request not in t.model.owners and t.model.free_row() is not None


def _can_inherit(t: RelayTrial, request: int, heir: int) -> bool:
    return request in t.model.owners and heir not in t.model.owners and heir >= 1


def _can_read_as(t: RelayTrial, request: int, ahead: int) -> bool:
    return bool(ahead) and request in t.model.owners and t.model.may_read(t.model.owners[request])


def _is_half_written(t: RelayTrial, request: int, ahead: int) -> bool:
    owner = t.model.owners.get(request)
    cell = t.model.cells.get(owner.row) if owner is not None else None
    return bool(ahead) and cell is not None and cell.generation == owner.generation and not t.model.may_read(owner)


def _can_stash_oddly(t: RelayTrial, how: str, request: int) -> bool:
    owner = t.model.owners.get(request)
    is_possible = how in ODDITIES and (how != "missing" or bool(t.config.fields))
    return is_possible and owner is not None and t.model.may_write(owner, "fields")


class RelayTrial(Trial):
    """`subject` under operations."""

    contract = "relay"
    looks = ("num_unread",)
    quick = 40_000
    refuses_by_violation = True
    values: ClassVar = {
        "request": REQUESTS,
        "heir": REQUESTS,
        "batch": BATCHES,
        "ahead": AHEAD,
        "half": ("lengths", "fields"),
        "call": CALLS,
        "offset": OFFSETS,
    }

    subject: Relay
    config: RelayConfig
    capabilities: RelayCapabilities
    moment: RelayMoment

    def prepare(self) -> None:
        self.model = RelayModel(self.config, 1 if self.capabilities.padding_row else 0)
        self.begin("make")
        self.end()

    def begin(self, operation: Operation | str) -> None:
        self.moment = RelayMoment(self.config, self.capabilities, operation)

    def end(self) -> None:
        m = self.moment
        if self.capabilities.inspection:
            m.num_unread = self.integer(self.must(self.subject.num_unread), "num_unread()")
        m.should_be_unread = len(self.model.cells)

    # -- requests -----------------------------------------------------------------------------------------------------

    @operation(weight=8, when=_can_open)
    def open(self, request: int) -> None:
        """Give a request the lowest free row, and a generation of its own."""
        self.model.owners[request] = self.model.new_owner(self.model.free_row())

    @operation(weight=4, when=lambda t, request: request in t.model.owners)
    def release(self, request: int) -> None:
        """Let the request leave and drop its row, with a padding lane as in a padded batch."""
        row = self.model.owners.pop(request).row
        self._call("drop", [row, 0] if self.capabilities.padding_row else [row])
        self.model.cells.pop(row, None)

    @operation(weight=2, needs="generations", when=_can_inherit, probes="RELAY-03")
    def inherit(self, request: int, heir: int) -> None:
        """Give `heir` the row of `request` at once, without dropping the cell."""
        self.model.owners[heir] = self.model.new_owner(self.model.owners.pop(request).row)

    # -- steps --------------------------------------------------------------------------------------------------------

    @operation(weight=14)
    def write(self, batch: tuple[int, ...]) -> bool:
        """Publish and stash, as a step does, for those of the batch whose cells are empty."""
        lanes = self._lanes(batch, lambda owner: owner.row not in self.model.cells)
        return self._write_half("lengths", lanes, batch) and (
            self.moment.refusal is not None or self._write_half("fields", lanes, batch)
        )

    @operation(weight=2)
    def publish(self, batch: tuple[int, ...]) -> bool:
        """Publish the lengths alone, for those of the batch whose cells have none."""
        return self._write_half("lengths", self._writable("lengths", batch), batch)

    @operation(weight=2)
    def stash(self, batch: tuple[int, ...]) -> bool:
        """Stash the fields alone, for those of the batch whose cells have none."""
        return self._write_half("fields", self._writable("fields", batch), batch)

    @operation(weight=14)
    def read(self, batch: tuple[int, ...]) -> bool:
        """Resolve those of the batch whose cells are whole."""
        return self._resolve(self._lanes(batch, self.model.may_read), batch)

    # -- what no step does --------------------------------------------------------------------------------------------

    @operation(weight=4, needs="misuse", batch=BATCHES + TWICE)
    def read_anyway(self, batch: tuple[int, ...]) -> bool:
        """Read the whole batch as it stands, whatever its cells hold, equal rows included."""
        return self._resolve(self._lanes(batch), batch)

    @operation(weight=4, needs="misuse", when=lambda t, half: half in ("lengths", "fields"), batch=BATCHES + TWICE)
    def write_anyway(self, half: str, batch: tuple[int, ...]) -> bool:
        """Write the lengths or the fields (`half`) of the whole batch as it stands."""
        return self._write_half(half, self._lanes(batch), batch)

    @operation(weight=2, needs="misuse", when=lambda t, call: call in CALLS, probes="RELAY-03", batch=FEW)
    def stray(self, call: str, offset: int, batch: tuple[int, ...]) -> None:
        """Make the call `call` with the batch and a row that is not there:
        `offset` if it is negative, else `offset` + 1 past the last."""
        stray = Owner(offset if offset < 0 else self.model.rows.stop + offset, 1 << 20)
        if call == "resolve":
            self._resolve([*self._lanes(batch, self.model.may_read), stray])
        elif call == "drop":
            lanes = [*self._lanes(batch, lambda owner: True), stray]
            self._real(lanes)
            self._call("drop", [lane.row for lane in lanes])
        else:
            half = "lengths" if call == "publish" else "fields"
            self._write_half(half, [*self._writable(half, batch), stray])

    @operation(weight=2, needs="misuse", when=_can_stash_oddly, how=tuple(ODDITIES))
    def stash_oddly(self, how: str, request: int) -> None:
        """Stash for a request with a field missing, or one too many, or with the opposite of the hidden states
        that are declared."""
        self.moment.trace = ODDITIES[how]
        self._write_half("fields", [self.model.owners[request]], odd=how)

    @operation(weight=3, needs="generations", when=_can_read_as, probes="RELAY-03", batch=FEW)
    def read_as(self, request: int, ahead: int, batch: tuple[int, ...]) -> None:
        """Read the batch, and a request's cell with a generation that is `ahead` of its own, or behind."""
        owner = self.model.owners[request]
        others = self._lanes(batch, lambda lane: lane != owner and self.model.may_read(lane))
        self._resolve([*others, owner._replace(generation=owner.generation + ahead)])

    @operation(weight=2, needs="generations", when=_is_half_written, probes="RELAY-03")
    def half_as(self, request: int, ahead: int) -> None:
        """Write the missing half of a request's cell with a generation that is `ahead` of its own, or behind."""
        owner = self.model.owners[request]
        half = "fields" if "lengths" in self.model.cells[owner.row].stamps else "lengths"
        self._write_half(half, [owner._replace(generation=owner.generation + ahead)])

    # -- batches ------------------------------------------------------------------------------------------------------

    def _lanes(self, batch: Sequence[int], keep: Callable[[Owner], bool] | None = None) -> list[Owner]:
        """Return the open requests that `keep` keeps (with it, each once), and padding where there is such a row."""
        lanes: list[Owner] = []
        for request in batch:
            owner = PADDING if request == 0 and self.capabilities.padding_row else self.model.owners.get(request)
            if owner is None or (keep is not None and owner is not PADDING and (owner in lanes or not keep(owner))):
                continue
            lanes.append(owner)
        return lanes

    def _writable(self, half: str, batch: Sequence[int]) -> list[Owner]:
        return self._lanes(batch, lambda owner: self.model.may_write(owner, half))

    def _real(self, lanes: Sequence[Owner]) -> list[Owner]:
        """Return the lanes that are no padding; note in the moment what is wrong with their rows."""
        m = self.moment
        real = [lane for lane in lanes if lane is not PADDING]
        rows = [lane.row for lane in real]
        for row in rows:
            if row not in self.model.rows:
                m.foreign = m.foreign or f"there is no row {row}"
            elif rows.count(row) > 1:
                m.trace = m.trace or f"row {row} occurs twice in the call"
        return real

    def _call(self, name: str, *arguments: object) -> object | None:
        """Return the subject's answer, True for None; None if it refused."""
        self.moment.call = name
        answer = self.ask(getattr(self.subject, name), *arguments)
        return None if self.refused(answer) else True if answer is None else answer

    def _write_half(self, half: str, lanes: Sequence[Owner], batch: Sequence[int] = (), odd: str = "") -> bool:
        """Publish or stash for these lanes; the model follows if it is accepted.
        Return False if none is left of the batch."""
        if batch and not lanes:
            return False
        m, model = self.moment, self.model
        for lane in self._real(lanes):
            cell = model.cells.get(lane.row)
            if cell is None:
                continue
            if cell.generation == lane.generation:
                if half in cell.stamps:
                    m.trace = m.trace or f"row {lane.row} has unread {half}"
            elif lane in model.owners.values():
                # An heir may overwrite the cell that was not dropped, or be refused. It may not complete it.
                m.optional = True
            else:
                by = f"{cell.generation}, and {lane.generation} writes"
                m.foreign = m.foreign or f"row {lane.row} is half written by generation {by}"
        stamps = [0 if lane is PADDING else model.new_stamp(lane.generation) for lane in lanes]
        rows, generations = [lane.row for lane in lanes], [lane.generation for lane in lanes]
        if half == "lengths":
            accepted = self._call("publish", rows, generations, [length_of(stamp) for stamp in stamps])
        else:
            accepted = self._call("stash", rows, generations, self._values(stamps, odd))
        if accepted is not None:
            for lane, stamp in zip(lanes, stamps, strict=True):
                if lane is not PADDING:
                    model.write(lane, half, stamp)
        return True

    def _values(self, stamps: Sequence[int], odd: str) -> dict[str, object]:
        """Return what `stash` is given, with one thing wrong if it is to be `odd`.
        Padding lanes get numbers like any other."""
        per_lane = [self.model.values(stamp) for stamp in stamps]
        values = {HIDDEN: None, **{name: [found[name] for found in per_lane] for name in self.config.fields}}
        if odd == "hidden":
            values[HIDDEN] = None if self.config.hidden_width else [[0.0, 0.0] for _ in stamps]
        elif odd == "extra":
            values["other"] = list(stamps)
        elif odd == "missing":
            values.pop(next(iter(self.config.fields)))
        return values

    def _resolve(self, lanes: Sequence[Owner], batch: Sequence[int] = ()) -> bool:
        """Read these lanes and compare what comes back with what was written last.
        Return False if none is left of the batch."""
        if batch and not lanes:
            return False
        m, model = self.moment, self.model
        real = self._real(lanes)
        for lane in real:
            cell = model.cells.get(lane.row)
            if cell is None:
                m.trace = m.trace or f"row {lane.row} has nothing unread"
            elif cell.generation != lane.generation:
                by = f"{cell.generation}, and {lane.generation} reads"
                m.foreign = m.foreign or f"row {lane.row} was written by generation {by}"
            elif not model.may_read(lane):
                m.trace = m.trace or f"row {lane.row} has no {'fields' if 'lengths' in cell.stamps else 'length'} yet"
        answer = self._call("resolve", [lane.row for lane in lanes], [lane.generation for lane in lanes])
        if answer is None or m.trace or m.foreign:
            return True
        should = "the lengths, and a mapping of the fields"
        lengths, fields = self.sequence(answer, "what resolve answered", should, 2)
        self._compare(lanes, lengths, self.mapping(fields, "what resolve answered of the fields", should))
        for lane in real:
            del model.cells[lane.row]
        return True

    def _compare(self, lanes: Sequence[Owner], lengths: object, fields: Mapping[str, object]) -> None:
        m, model = self.moment, self.model
        m.answer = self.integers(lengths, "the lengths, one per lane of the batch, that resolve answered", len(lanes))
        undeclared = [name for name, found in fields.items() if name not in self.config.fields and found is not None]
        m.undeclared = undeclared[0] if undeclared else ""
        columns = {name: self._column(name, fields.get(name), len(lanes)) for name in self.config.fields}
        columns = {"length": m.answer, **columns}
        for at, lane in enumerate(lanes):
            found = {name: column[at] for name, column in columns.items()}
            if lane is PADDING:
                dirty = [f"{name} {value}" for name, value in found.items() if any(_flat(value))]
                m.padding = m.padding or (dirty[0] if dirty else "")
                continue
            expected = model.content(model.cells[lane.row])
            if found != expected and m.wrong is None:
                name = next(name for name in expected if found[name] != expected[name])
                writer = model.written.get(stamp_of(_flat(found[name])[0]))
                m.wrong = WrongValue(f"{name} of row {lane.row}", found[name], expected[name], lane.generation, writer)

    def _column(self, name: str, answer: object, count: int) -> list[object]:
        """Return a field's rows as plain numbers, or lists of them. Raises Violation for anything else."""
        tolist = getattr(answer, "tolist", None)
        plain = self.sequence(
            answer if tolist is None else tolist(), name, f"{count} rows, one per lane of the batch", count
        )
        width = self.config.fields[name]
        rows = [list(row) if isinstance(row, tuple) else row for row in plain]
        for row in rows:
            is_right = isinstance(row, list) == bool(width) and len(_flat(row)) == max(width, 1)
            if not is_right or not all(type(entry) in (int, float) for entry in _flat(row)):
                raise self.misbehaviour("TYPE", f"a row of {name} is {row!r}", f"{width or 'one'} of them per row")
        return rows

    # -- the end ------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Read all that is whole, release every request;
        then write and read the whole table once more, and empty it."""
        self.read(tuple(self.model.owners))
        for request in list(self.model.owners):
            self.release(request)
        requests = tuple(range(1, self.config.num_rows + 1))
        for request in requests:
            self.open(request)
        self.write((0, *reversed(requests)))
        self.read((*requests, 0))
        for request in requests:
            self.release(request)

    def describe(self) -> str:
        m = self.moment
        return f"-> lengths {list(m.answer)}" if m.answer is not None else "done"


def _flat(entry: object) -> list[Any]:
    return entry if isinstance(entry, list) else [entry]
