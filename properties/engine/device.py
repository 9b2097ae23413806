"""The device of a trial: runs the steps of an engine on the toy language model, over a pool whose cells say what stands in them.

A cell holds the hash of the text up to its position. Before a row computes, all that it reads is compared with its own text: where a
slot holds anything else, the row goes on with garbage, as a real one would. What a round drafts and does not keep, it leaves in its slots
as garbage too, and rows whose request has ended go on writing until the step is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .contract import Answer, EngineCapabilities, ServingConfig
from .language import GARBAGE, NOTHING, num_correct, stream_of
from .model import Chunk, EngineModel, Flight, RoundRow, Row

Slots = tuple[int, ...]


class Device:
    """`ahead[S]`: slots past its length that a round of S steps writes."""

    def __init__(self, config: ServingConfig, capabilities: EngineCapabilities, ahead: Mapping[int, int]) -> None:
        self.config = config
        self.has_slots = capabilities.slots
        self.has_marks = capabilities.marks
        self.ahead = ahead
        self.cells = [NOTHING] * ((config.num_pages + 1) * config.page_size)

    def execute(self, flight: Flight, model: EngineModel, limit: int) -> Answer:
        """Run a step, its rounds until `limit`, or until a request ends."""
        first, first_marks = [], []
        for chunk in flight.chunks:
            token, mark = self._prefill(chunk, flight.slots.get(chunk.life.name, ()))
            first.append(token)
            first_marks.append(mark)
        runs: list[list[list[int]]] = []
        marks: list[list[list[int]]] = []
        ended = not flight.rows
        while not ended and len(runs) < limit:
            tokens, beside = [], []
            for row in flight.rows:
                run, mark, over = self._round(row, flight, model, not runs)
                tokens.append(run)
                beside.append(mark)
                ended |= over
            runs.append(tokens)
            marks.append(beside)
        parts = (*flight.chunks, *flight.rows)
        failed = [part.life.name for part in parts if part.life.failing and part.stay == part.life.stay]
        if self.has_marks:
            return Answer(flight.number, first, runs, first_marks, marks, failed)
        return Answer(flight.number, first, runs, (), (), failed)

    def forget(self, pages: Iterable[int]) -> None:
        """Pages have been freed: what stands in them is nothing to build on."""
        size = self.config.page_size
        for page in pages:
            self.cells[page * size : page * size + size] = [NOTHING] * size

    def spoil(self, flight: Flight) -> None:
        """A step has failed half way: whatever it may write holds nothing."""
        size = self.config.page_size
        for part in (*flight.chunks, *flight.rows):
            slots = flight.slots.get(part.life.name, ())
            start, stop = part.row.length, len(slots)
            if isinstance(part, Chunk):
                start, stop = part.start, part.start + len(part.tokens)
            for slot in slots[start:stop]:
                if slot // size in flight.writes:
                    self.cells[slot] = NOTHING

    def _read(self, row: Row, slots: Slots, length: int) -> None:
        """All of the row's text up to `length` must stand where the step says that it is."""
        if not self.has_slots or not row.good:
            return
        cells = self.cells
        if length > len(slots) or [cells[slot] for slot in slots[:length]] != row.stream.hashes[:length]:
            row.good = False
            for position in range(length):
                slot = slots[position] if position < len(slots) else None
                if slot is None or cells[slot] != row.stream.hashes[position]:
                    row.wrong = f"slot {slot} was read for position {position}, and does not hold it"
                    return

    def _write(self, row: Row, slots: Slots, start: int, kept: int, reach: int) -> None:
        """Positions [start, start + kept) get the row's text, the rest up to `reach` garbage."""
        if not self.has_slots:
            return
        cells, hashes = self.cells, row.stream.hashes
        reach = min(reach, len(slots))
        for position in range(start, reach):
            good = position < start + kept and row.good
            cells[slots[position]] = hashes[position] if good else NOTHING

    def _prefill(self, chunk: Chunk, slots: Slots) -> tuple[int, int]:
        row, start, stop = chunk.row, chunk.start, chunk.start + len(chunk.tokens)
        self._read(row, slots, start)
        if row.good and list(chunk.tokens) != row.stream.tokens[start:stop]:
            row.good = False
            row.wrong = f"the chunk from position {start} has other tokens than the text"
        if row.length != start:
            row.good = False
            row.wrong = f"a chunk begins at {start}, the device has computed {row.length} positions"
        self._write(row, slots, start, stop - start, stop)
        row.length = stop
        if not chunk.is_last:
            return -1, 0
        row.stream.reach(stop + 1)
        token = row.stream.tokens[stop] if row.good else GARBAGE
        life = chunk.life
        emitted = stop + 1 - len(life.wish.prompt)
        row.over = token in life.wish.stop_tokens or emitted >= life.promise
        return token, row.stream.hashes[stop - 1] & 0xFFFF

    def _round(
        self, part: RoundRow, flight: Flight, model: EngineModel, is_first: bool
    ) -> tuple[list[int], list[int], bool]:
        """One round of one row: its run, the marks beside it, and whether the request has met its end."""
        life, row, steps = part.life, part.row, flight.steps
        slots = flight.slots.get(life.name, ())
        start, ahead = row.length, self.ahead[steps]
        if row.over:
            self._write(row, slots, start, 0, start + ahead)
            return [GARBAGE] * (steps + 1), [0] * (steps + 1), False
        stream = row.stream
        stream.reach(start + 1)
        if is_first and part.is_known and part.length != start:
            row.good = False
            row.wrong = f"the step says that {part.length} positions have KV, the device has {start}"
        if part.root is not None and is_first and part.root != stream.tokens[start]:
            row.good = False
            row.wrong = f"the step's input is {part.root}, the last token was {stream.tokens[start]}"
        if part.key != stream.key:
            stream = row.stream = stream_of(stream.tokens[: start + 1], part.key, self.config.model)
        self._read(row, slots, start)
        deepest = min(steps, self.config.nodes(steps) - 1)
        kept = 1 + num_correct(life.number, start - len(life.wish.prompt), deepest, self.config.accept)
        stop = start + kept
        stream.reach(stop + 1)
        self._write(row, slots, start, kept, start + ahead)
        row.length = stop
        run = stream.tokens[start + 1 : stop + 1] if row.good else [GARBAGE] * kept
        emitted = stop + 1 - len(life.wish.prompt)
        stops = life.wish.stop_tokens
        if emitted >= life.promise or (stops and any(token in stops for token in run)):
            row.over = True
        marks = [value & 0xFFFF for value in stream.hashes[start:stop]] if life.wish.marks else []
        return run, marks, row.over and life.is_live and life.stay == part.stay
