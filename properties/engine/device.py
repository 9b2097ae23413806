"""The device of a trial runs the steps of an engine on the toy language model, over a pool whose cells say what stands
in them.

A cell holds the hash of the text up to its position. Before a row computes, all that it reads is compared with its own
text: where a slot holds anything else, the row goes on with garbage, as a real one would. Rejected drafts leave garbage
in their slots too, and rows whose request has ended go on writing until the step is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .contract import EngineCapabilities, ServingConfig, StepAnswer
from .groups import UnitCells, UnitTable
from .language import GARBAGE, NOTHING, confidence, num_correct, stream_of
from .model import ChosenDrafts, EngineRow, ModelChunk, ModelFlight, RoundRow

Slots = tuple[int, ...]
Tables = tuple[UnitTable, ...]
ChooseLengths = Callable[[int, Sequence[Sequence[float]]], tuple[int, ...]]


class ContentDevice:
    """`cells[slot]`: the hash of the text whose last token's KV stands there."""

    def __init__(self, config: ServingConfig, capabilities: EngineCapabilities) -> None:
        self.config = config
        self.has_slots = capabilities.slots
        self.has_marks = capabilities.marks
        self.has_invalid = capabilities.invalid_confidences
        self.units: UnitCells = UnitCells(config.layer_groups, config.page_size)
        self.cells = [NOTHING] * ((config.num_pages + 1) * config.page_size)
        # Slot -> the hash of the text up to the next token, at which the draft KV of a head looks; not of what comes
        # from host memory.
        self.looked_at: dict[int, int] = {}
        self.hosted: set[int] = set()  # hashes of all text that was computed: host memory may have it
        self._forgotten: list[tuple[int, int]] = []  # (step, page): a page to be emptied when that step has run

    def execute(self, flight: ModelFlight, limit: int, choose: ChooseLengths) -> StepAnswer:
        """Run a step, its rounds until `limit`, or until a request ends. `choose` says how many drafts of each row are
        verified, where the step has a budget."""
        self._forget_until(flight.number - 1)  # of steps that were lost
        first, first_marks = [], []
        for chunk in flight.chunks:
            name = chunk.life.name
            token, mark = self._prefill(chunk, flight.slots.get(name, ()), flight.units.get(name, ()))
            first.append(token)
            first_marks.append(mark)
        runs: list[list[list[int]]] = []
        marks: list[list[list[int]]] = []
        ended = not flight.rows
        while not ended and len(runs) < limit:
            tokens, beside = [], []
            lengths = [row.drafts for row in flight.rows]
            if flight.budget is not None:
                confidences = [self._confidences(row)[: flight.steps] for row in flight.rows]
                flight.chosen.append(ChosenDrafts(confidences, choose(flight.number, confidences)))
                chosen = flight.chosen[-1].lengths
                lengths = [max(0, min(own, most)) for own, most in zip(chosen, lengths, strict=True)]
            for row, verified in zip(flight.rows, lengths, strict=True):
                run, mark, over = self._round(row, flight, not runs, verified)
                tokens.append(run)
                beside.append(mark)
                ended |= over
            runs.append(tokens)
            marks.append(beside)
        self._forget_until(flight.number)
        failed = [part.life.name for part in flight.parts if part.life.failing and part.is_present]
        proposed = [self._confidences(part) for part in flight.parts] if self.config.costs[0] else []
        if self.has_marks:
            return StepAnswer(flight.number, first, runs, first_marks, marks, failed, proposed)
        return StepAnswer(flight.number, first, runs, (), (), failed, proposed)

    def _confidences(self, part: ModelChunk | RoundRow) -> tuple[float, ...]:
        """Return how sure the draft is of the tokens that it proposes behind the text of now."""
        at, number = part.row.length, part.life.number
        return tuple([confidence(number, at, depth, self.has_invalid) for depth in range(self.config.max_steps)])

    def empty(self) -> None:
        """Be a new device, which has no KV, and with new host memory."""
        self.cells[:] = [NOTHING] * len(self.cells)
        self.hosted.clear()
        self.units.empty()

    def forget(self, pages: Iterable[int]) -> None:
        """Empty the cells of pages that have been freed."""
        size = self.config.page_size
        for page in pages:
            self.cells[page * size : page * size + size] = [NOTHING] * size

    def forget_after(self, step: int, pages: Iterable[int]) -> None:
        """Empty the cells of pages when a step has run: those before it still read them."""
        self._forgotten += [(step, page) for page in pages]

    def _forget_until(self, step: int) -> None:
        if self._forgotten:
            self.forget([page for waits_for, page in self._forgotten if waits_for <= step])
            self._forgotten = [item for item in self._forgotten if item[0] > step]

    def spoil(self, flight: ModelFlight) -> None:
        """Empty all cells that a step which has failed half way may have written."""
        size = self.config.page_size
        for part in flight.parts:
            slots = flight.slots.get(part.life.name, ())
            start, stop = part.written if isinstance(part, ModelChunk) else (part.row.length, len(slots))
            for slot in slots[start:stop]:
                if slot // size in flight.writes:
                    self.cells[slot] = NOTHING

    def _read(self, row: EngineRow, slots: Slots, length: int, tables: Tables) -> None:
        """Compare the row's text up to `length` with the cells where the step says that it is."""
        if not self.has_slots or row.wrong:
            return
        if tables:
            row.wrong = row.lacking = self.units.read(row.stream.hashes, tables, length, row.has_state)
            if row.wrong:
                return
        cells, hashes = self.cells, row.stream.hashes
        if length > len(slots) or [cells[slot] for slot in slots[:length]] != hashes[:length]:
            same = (cells[slot] == value for slot, value in zip(slots, hashes[:length], strict=False))
            position = next((at for at, is_same in enumerate(same) if not is_same), len(slots))
            slot = slots[position] if position < len(slots) else None
            row.wrong = f"slot {slot} was read for position {position}, and does not hold it"
        elif self.looked_at:
            seen = zip(slots[:length], hashes[1 : length + 1], strict=True)
            row.stale = next((slot for slot, value in seen if self.looked_at.get(slot, value) != value), None)

    def _write(self, row: EngineRow, slots: Slots, start: int, kept: int, reach: int, tables: Tables) -> None:
        """Write the row's text to the positions [start, start + kept), and garbage to the rest up to `reach`."""
        if not self.has_slots:
            return
        cells, hashes = self.cells, row.stream.hashes
        reach = min(reach, len(slots))
        if tables:
            is_good = kept > 0 and not row.wrong
            self.units.write(hashes, tables, start, start + kept, reach, is_good)
            row.has_state |= is_good
        for position in range(start, reach):
            good = position < start + kept and not row.wrong
            cells[slots[position]] = hashes[position] if good else NOTHING
            if good and self.config.algorithm == "head":
                self.looked_at[slots[position]] = hashes[position + 1]
        if self.config.host_pages and not row.wrong:
            self.hosted.update(hashes[start : min(start + kept, reach)])

    def _prefill(self, chunk: ModelChunk, slots: Slots, tables: Tables) -> tuple[int, int]:
        row, start, stop = chunk.row, chunk.start, chunk.stop
        for position in range(max(start - chunk.loaded, 0), min(start, len(slots))):
            text = row.stream.hashes[position]
            self.cells[slots[position]] = text if text in self.hosted else NOTHING
            self.looked_at.pop(slots[position], None)
        self._read(row, slots, start, tables)
        if not row.wrong and list(chunk.tokens) != row.stream.tokens[start:stop]:
            row.wrong = f"the chunk from position {start} has other tokens than the text"
        if row.length != start:
            row.wrong = f"a chunk begins at {start}, the device has computed {row.length} positions"
        row.stream.reach(stop + 1)
        self._write(row, slots, start, stop - start, stop, tables)
        row.length = stop
        if not chunk.is_last:
            return -1, 0
        row.stream.reach(stop + 1)
        token = row.stream.tokens[stop] if not row.wrong else GARBAGE
        life = chunk.life
        emitted = stop + 1 - len(life.wish.prompt)
        row.over = token in life.wish.stop_tokens or emitted >= life.promise
        return token, row.stream.hashes[stop - 1] & 0xFFFF

    def _round(
        self, part: RoundRow, flight: ModelFlight, is_first: bool, verified: int
    ) -> tuple[list[int], list[int], bool]:
        """Run one round of one row, of whose drafts the first ones are verified. Returns its run, the marks beside it,
        and whether the request has met its end."""
        life, row, drafts = part.life, part.row, part.drafts
        slots, tables = flight.slots.get(life.name, ()), flight.units.get(life.name, ())
        start, reach = row.length, self.config.reach(row.length, drafts)
        if row.over:
            self._write(row, slots, start, 0, reach, tables)
            return [GARBAGE] * (verified + 1), [0] * (verified + 1), False
        stream = row.stream
        stream.reach(start + 1)
        if is_first and part.is_known and part.length != start:
            row.wrong = f"the step says that {part.length} positions have KV, the device has {start}"
        if part.root is not None and is_first and part.root != stream.tokens[start]:
            row.wrong = f"the step's input is {part.root}, the last token was {stream.tokens[start]}"
        if part.key != stream.key:
            stream = row.stream = stream_of(stream.tokens[: start + 1], part.key, self.config.model)
        self._read(row, slots, start, tables)
        deepest = min(verified, self.config.nodes(verified) - 1)
        kept = 1 + num_correct(life.number, start - len(life.wish.prompt), deepest, self.config.accept)
        stop = start + kept
        stream.reach(stop + 1)
        self._write(row, slots, start, kept, reach, tables)
        row.length = stop
        run = stream.tokens[start + 1 : stop + 1] if not row.wrong else [GARBAGE] * kept
        emitted = stop + 1 - len(life.wish.prompt)
        row.over = emitted >= life.promise or any(stop in run for stop in life.wish.stop_tokens)
        marks = [value & 0xFFFF for value in stream.hashes[start:stop]] if life.wish.marks else []
        return run, marks, row.over and life.is_live and part.is_present
