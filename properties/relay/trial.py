"""The relay's trial: each operation on the subject and on the model, every value compared, then a recount of the cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, ClassVar

from ...core.errors import InvariantViolation
from ..harness.trial import Refused, Trial
from ..invariants.registry import Invariant
from . import operations as ops
from .contract import HIDDEN, METHODS, Relay, RelayCapabilities, RelayConfig
from .model import Owner, RelayModel, length_of, stamp_of, values_of
from .moment import Moment, Wrong

PADDING = Owner(0, 0)


class RelayTrial(Trial):
    """`subject` under operations. A lane of a batch is an `Owner`: a row, and the generation that it is asked for."""

    methods = METHODS

    def __init__(
        self,
        subject: Relay,
        config: RelayConfig,
        capabilities: RelayCapabilities,
        invariants: Iterable[Invariant],
    ) -> None:
        super().__init__(subject, config, capabilities, invariants)
        self.model = RelayModel(config, 1 if capabilities.padding_row else 0)
        self.moment = Moment(config, capabilities)
        self._observe()
        self.check()

    # -- around every call --------------------------------------------------------------------------------------------

    def _begin(self, operation: object) -> Moment:
        m = self.moment = Moment(self.config, self.capabilities, operation)
        return m

    def _observe(self) -> None:
        m = self.moment
        if self.capabilities.inspection:
            m.num_unread = self.integer(self.must(self.subject.num_unread), "num_unread()")
        m.should_be_unread = self.model.unread()

    def _end(self) -> bool:
        self._observe()
        return True

    def ask(self, method: Callable[..., Any], *arguments: object) -> Any:
        """As for all contracts; and a relay may guard its invariants itself: the error that names one is how it refuses."""

        @wraps(method)
        def guarded(*arguments: object) -> Any:
            try:
                return method(*arguments)
            except InvariantViolation as error:
                return Refused(f"{type(error).__name__}: {error}")

        return super().ask(guarded, *arguments)

    def _call(self, name: str, *arguments: object) -> object | None:
        """The subject's answer, or None with its refusal in the moment."""
        m = self.moment
        m.call = name
        answer = self.ask(getattr(self.subject, name), *arguments)
        if isinstance(answer, Refused) or answer is False:
            m.refusal = answer.reason if isinstance(answer, Refused) else "False"
            return None
        return answer if answer is not None else True

    # -- batches ------------------------------------------------------------------------------------------------------

    def _lanes(self, batch: Sequence[int], keep: Callable[[Owner], bool] | None = None) -> list[Owner]:
        """The lanes of a batch: open requests that `keep` keeps (with it, each once), and padding where there is such a row."""
        lanes: list[Owner] = []
        for request in batch:
            owner = PADDING if request == 0 and self.capabilities.padding_row else self.model.owners.get(request)
            if owner is None or (keep is not None and owner is not PADDING and (owner in lanes or not keep(owner))):
                continue
            lanes.append(owner)
        return lanes

    def _has(self, owner: Owner, half: str) -> bool:
        cell = self.model.cells.get(owner.row)
        return cell is not None and (cell.length if half == "lengths" else cell.fields) is not None

    def _is_untouched(self, owner: Owner) -> bool:
        return owner.row not in self.model.cells

    def _may_write(self, owner: Owner, half: str) -> bool:
        cell = self.model.cells.get(owner.row)
        return cell is None or (cell.generation == owner.generation and not self._has(owner, half))

    def _may_read(self, owner: Owner) -> bool:
        cell = self.model.cells.get(owner.row)
        return self.model.is_whole(cell) and cell.generation == owner.generation

    def _judge_rows(self, lanes: Sequence[Owner]) -> list[Owner]:
        """The lanes that are no padding; notes in the moment what is wrong with their rows."""
        m = self.moment
        real = [lane for lane in lanes if lane is not PADDING]
        rows = [lane.row for lane in real]
        for row in rows:
            if row not in self.model.rows:
                m.foreign = m.foreign or f"there is no row {row}"
            elif rows.count(row) > 1:
                m.trace = m.trace or f"row {row} occurs twice in the call"
        return real

    # -- writing ------------------------------------------------------------------------------------------------------

    def _write_half(self, half: str, lanes: Sequence[Owner], odd: str = "") -> None:
        """Publish or stash for these lanes; the model follows if it is accepted."""
        m, model = self.moment, self.model
        real = self._judge_rows(lanes)
        has_something = half == "lengths" or bool(self.config.fields)
        for lane in real:
            cell = model.cells.get(lane.row)
            if cell is None:
                continue
            if cell.generation == lane.generation:
                if has_something and self._has(lane, half):
                    m.trace = m.trace or f"row {lane.row} has unread {half}"
            elif lane in model.owners.values():
                # Whoever inherits a cell that nobody dropped may overwrite it, or be refused. He may not complete it.
                m.optional = True
            elif has_something:
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

    def _values(self, stamps: Sequence[int], odd: str = "") -> dict[str, object]:
        """What `stash` is given, with one thing wrong if it is to be `odd`. Padding lanes are given numbers like any other."""
        values: dict[str, object] = {HIDDEN: None}
        for number, (name, width) in enumerate(self.config.fields.items()):
            values[name] = [values_of(stamp, number, name, width) for stamp in stamps]
        match odd:
            case "hidden" if self.config.hidden_width:
                values[HIDDEN] = None
            case "hidden":
                values[HIDDEN] = [[0.0, 0.0] for _ in stamps]
            case "extra":
                values["other"] = list(stamps)
            case "missing":
                values.pop(next(iter(self.config.fields)))
        return values

    # -- reading ------------------------------------------------------------------------------------------------------

    def _resolve(self, lanes: Sequence[Owner]) -> None:
        """Read these lanes; what comes back is compared with what was written last."""
        m, model = self.moment, self.model
        real = self._judge_rows(lanes)
        for lane in real:
            cell = model.cells.get(lane.row)
            if cell is None:
                m.trace = m.trace or f"row {lane.row} has nothing unread"
            elif cell.generation != lane.generation:
                m.foreign = m.foreign or (
                    f"row {lane.row} was written by generation {cell.generation}, and {lane.generation} reads"
                )
            elif not model.is_whole(cell):
                missing = "length" if cell.length is None else "fields"
                m.trace = m.trace or f"row {lane.row} has no {missing} yet"
        rows, generations = [lane.row for lane in lanes], [lane.generation for lane in lanes]
        answer = self._call("resolve", rows, generations)
        if answer is None or m.trace or m.foreign:
            return
        if not isinstance(answer, tuple | list) or len(answer) != 2 or not isinstance(answer[1], Mapping):
            raise self.misbehaviour("TYPE", f"resolve answered {answer!r}", "the lengths, and a mapping of the fields")
        self._compare(lanes, *answer)
        for lane in real:
            del model.cells[lane.row]

    def _compare(self, lanes: Sequence[Owner], lengths: object, fields: Mapping[str, object]) -> None:
        m, model = self.moment, self.model
        m.answer = self.integers(lengths, "the lengths that resolve answered")
        self._count("lengths", m.answer, len(lanes))
        undeclared = [name for name, found in fields.items() if name not in self.config.fields and found is not None]
        m.undeclared = undeclared[0] if undeclared else ""
        columns = {name: self._column(name, fields.get(name), len(lanes)) for name in self.config.fields}
        for at, lane in enumerate(lanes):
            if lane is PADDING:
                entries = {"length": m.answer[at], **{name: column[at] for name, column in columns.items()}}
                dirty = [f"{name} {found}" for name, found in entries.items() if any(_flat(found))]
                m.padding = m.padding or (dirty[0] if dirty else "")
                continue
            cell = model.cells[lane.row]
            self._expect(lane, "length", m.answer[at], length_of(cell.length), m.answer[at] - length_of(0))
            for number, name in enumerate(self.config.fields):
                expected = values_of(cell.fields, number, name, self.config.fields[name])
                self._expect(lane, name, columns[name][at], expected, stamp_of(next(iter(_flat(columns[name][at])), 0)))

    def _expect(self, lane: Owner, name: str, found: object, expected: object, stamp: int) -> None:
        if found != expected and self.moment.wrong is None:
            whose = self.model.written.get(stamp)
            self.moment.wrong = Wrong(f"{name} of row {lane.row}", found, expected, lane.generation, whose)

    def _column(self, name: str, answer: object, count: int) -> list[object]:
        """A field's rows as plain numbers, or lists of them."""
        tolist = getattr(answer, "tolist", None)
        plain = tolist() if tolist is not None else answer
        if not isinstance(plain, list | tuple):
            raise self.misbehaviour("TYPE", f"{name} is {plain!r}", f"a sequence of {count} rows")
        self._count(name, plain, count)
        width = self.config.fields[name]
        rows = [list(row) if isinstance(row, tuple) else row for row in plain]
        for row in rows:
            entries = row if isinstance(row, list) else [row]
            is_right = isinstance(row, list) == bool(width) and len(entries) == max(width, 1)
            if not is_right or not all(type(entry) in (int, float) for entry in entries):
                raise self.misbehaviour("TYPE", f"a row of {name} is {row!r}", f"{width or 'one'} of them per row")
        return rows

    def _count(self, name: str, found: Sequence[object], count: int) -> None:
        if len(found) != count:
            raise self.misbehaviour("TYPE", f"{name} has {len(found)} rows", f"{count}, one per lane of the batch")

    # -- operations ---------------------------------------------------------------------------------------------------

    def _open(self, op: ops.Open) -> bool:
        row = self.model.free_row()
        if op.request in self.model.owners or row is None or op.request < 1:
            return False
        self._begin(op)
        self.model.owners[op.request] = self.model.new_owner(row)
        return self._end()

    def _write(self, op: ops.Write) -> bool:
        return self._step(op, ("lengths", "fields"), self._is_untouched)

    def _publish(self, op: ops.Publish) -> bool:
        return self._step(op, ("lengths",), lambda owner: self._may_write(owner, "lengths"))

    def _stash(self, op: ops.Stash) -> bool:
        return self._step(op, ("fields",), lambda owner: self._may_write(owner, "fields"))

    def _step(self, op: Any, halves: Sequence[str], keep: Callable[[Owner], bool]) -> bool:
        lanes = self._lanes(op.batch, keep)
        if op.batch and not lanes:
            return False
        self._begin(op)
        for half in halves:
            if self.moment.refusal is None:
                self._write_half(half, lanes)
        return self._end()

    def _read(self, op: ops.Read) -> bool:
        lanes = self._lanes(op.batch, self._may_read)
        if op.batch and not lanes:
            return False
        self._begin(op)
        self._resolve(lanes)
        return self._end()

    def _release(self, op: ops.Release) -> bool:
        owner = self.model.owners.pop(op.request, None)
        if owner is None:
            return False
        self._begin(op)
        # With a padding lane, as the rows of a padded batch come.
        self._call("drop", [owner.row, 0] if self.capabilities.padding_row else [owner.row])
        self.model.cells.pop(owner.row, None)
        return self._end()

    def _inherit(self, op: ops.Inherit) -> bool:
        owner = self.model.owners.get(op.request)
        if owner is None or op.heir in self.model.owners or op.heir < 1:
            return False
        self._begin(op)
        del self.model.owners[op.request]
        self.model.owners[op.heir] = self.model.new_owner(owner.row)
        return self._end()

    def _read_anyway(self, op: ops.ReadAnyway) -> bool:
        lanes = self._lanes(op.batch)
        if op.batch and not lanes:
            return False
        self._begin(op)
        self._resolve(lanes)
        return self._end()

    def _write_anyway(self, op: ops.WriteAnyway) -> bool:
        lanes = self._lanes(op.batch)
        if (op.batch and not lanes) or op.half not in ("lengths", "fields"):
            return False
        self._begin(op)
        self._write_half(op.half, lanes)
        return self._end()

    def _read_as(self, op: ops.ReadAs) -> bool:
        owner = self.model.owners.get(op.request)
        if owner is None or not op.ahead or not self._may_read(owner):
            return False
        self._begin(op)
        others = [lane for lane in self._lanes(op.batch, self._may_read) if lane.row != owner.row or lane is PADDING]
        self._resolve([*others, owner._replace(generation=owner.generation + op.ahead)])
        return self._end()

    def _half_as(self, op: ops.HalfAs) -> bool:
        owner = self.model.owners.get(op.request)
        cell = self.model.cells.get(owner.row) if owner is not None else None
        if cell is None or cell.generation != owner.generation or not op.ahead or not self.config.fields:
            return False
        if self.model.is_whole(cell):
            return False
        self._begin(op)
        half = "lengths" if cell.length is None else "fields"
        self._write_half(half, [owner._replace(generation=owner.generation + op.ahead)])
        return self._end()

    def _stray(self, op: ops.Stray) -> bool:
        row = op.offset if op.offset < 0 else self.model.rows.stop + op.offset
        m = self._begin(op)
        stray = Owner(row, 1 << 20)
        if op.call == "resolve":
            self._resolve([*self._lanes(op.batch, self._may_read), stray])
        elif op.call == "drop":
            lanes = [*self._lanes(op.batch, lambda owner: True), stray]
            self._judge_rows(lanes)
            self._call("drop", [lane.row for lane in lanes])
        elif op.call in ("publish", "stash"):
            half = "lengths" if op.call == "publish" else "fields"
            self._write_half(half, [*self._lanes(op.batch, lambda owner: self._may_write(owner, half)), stray])
        else:
            return False
        assert m.foreign, op
        return self._end()

    def _stash_oddly(self, op: ops.StashOddly) -> bool:
        owner = self.model.owners.get(op.request)
        if owner is None or not self._may_write(owner, "fields"):
            return False
        reasons = {
            "hidden": "hidden states are None where they are declared"
            if self.config.hidden_width
            else "hidden states are given where none are declared",
            "extra": "a field is given that is not declared",
            "missing": "a declared field is missing",
        }
        if op.how not in reasons or (op.how == "missing" and not self.config.fields):
            return False
        m = self._begin(op)
        m.trace = reasons[op.how]
        self._write_half("fields", [owner], op.how)
        return self._end()

    actions: ClassVar = {
        ops.Open: _open,
        ops.Write: _write,
        ops.Publish: _publish,
        ops.Stash: _stash,
        ops.Read: _read,
        ops.Release: _release,
        ops.Inherit: _inherit,
        ops.ReadAnyway: _read_anyway,
        ops.WriteAnyway: _write_anyway,
        ops.ReadAs: _read_as,
        ops.HalfAs: _half_as,
        ops.Stray: _stray,
        ops.StashOddly: _stash_oddly,
    }

    # -- the end --------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """All that is whole is read, everybody leaves; then the whole table is written and read once more, and must be empty."""
        self.apply(ops.Read(tuple(self.model.owners)))
        for request in list(self.model.owners):
            self.apply(ops.Release(request))
        everybody = tuple(range(1, self.config.num_rows + 1))
        for request in everybody:
            self.apply(ops.Open(request))
        self.apply(ops.Write((0, *reversed(everybody))))
        self.apply(ops.Read((*everybody, 0)))
        for request in everybody:
            self.apply(ops.Release(request))

    def describe(self) -> str:
        m = self.moment
        if m.refusal is not None:
            return f"refused ({m.refusal})"
        return f"-> lengths {list(m.answer)}" if m.answer is not None else "done"


def _flat(entry: object) -> list[Any]:
    return entry if isinstance(entry, list) else [entry]
