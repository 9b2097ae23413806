"""Steps in flight: launched, and not committed yet; and the prompt chunks and rounds that a step is made of."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..contract.arrays import BoolArray
from ..contract.step import NO_TOKEN, DecodeStep, Join, PrefillStep, Step
from ..errors import InvariantViolation
from .life import RequestRecord


class Chunk(NamedTuple):
    """Positions [start, start + length) of one request's context. `padding`: tokens and slots that it takes besides."""

    record: RequestRecord
    start: int
    length: int
    padding: int = 0

    @property
    def is_last(self) -> bool:
        return self.start + self.length == self.record.prefill_len


def _token_at(context: np.ndarray, position: int) -> int:
    return int(context[position]) if position < len(context) else NO_TOKEN


def prefill_step(chunks: list[Chunk], with_tokens: bool, is_parked: bool = False) -> PrefillStep:
    """Return the prefill part of a step, one row per chunk. It contains the tokens if the executor computes on them.
    `is_parked`: the draft is."""
    lens = [chunk.length for chunk in chunks]
    tokens = None
    tails = [NO_TOKEN] * len(chunks)
    if with_tokens:
        parts = [c.record.known_context()[c.start : c.start + c.length] for c in chunks]
        tokens = np.concatenate(parts, dtype=np.int64)
        tails = [_token_at(c.record.known_context(), c.start + c.length) for c in chunks]
    return PrefillStep(
        rows=np.array([chunk.record.row for chunk in chunks], dtype=np.int32),
        epochs=np.array([chunk.record.epoch for chunk in chunks], dtype=np.int64),
        starts=np.array([chunk.start for chunk in chunks], dtype=np.int64),
        lens=np.array(lens, dtype=np.int64),
        is_last=np.array([chunk.is_last for chunk in chunks], dtype=bool),
        tokens=tokens,
        tail_tokens=np.array(tails, dtype=np.int64),
        is_parked=is_parked,
    )


def join_of(record: RequestRecord, with_tokens: bool) -> Join:
    """Return what the executor learns of a request that has entered."""
    cached = record.known_context()[: record.num_cached] if with_tokens else None
    return Join(
        record.row,
        record.epoch,
        record.request,
        record.max_tokens,
        record.emitted_before,
        record.num_cached,
        cached,
        num_loaded=record.num_loaded,
    )


@dataclass(slots=True)
class PlannedRounds:
    """The decode part of a planned step, with the values that its commit needs."""

    decode: DecodeStep
    index: np.ndarray  # intp [bs]: its rows; NumPy indexes by intp several times faster than by int32
    allocated: np.ndarray  # int64 [bs]: slots of each row before this reservation


@dataclass(slots=True)
class StepInFlight:
    """A planned step that is not committed yet."""

    step: Step
    chunks: list[Chunk]
    planned: PlannedRounds | None  # of its decode part
    num_departed: int  # DecodeRounds.num_departed when it was planned

    @property
    def is_decode_only(self) -> bool:
        return self.step.prefill is None

    def emits_for(self, row: int) -> bool:
        """Return whether the step computes output tokens for `row`."""
        prefill, decode = self.step.prefill, self.step.decode
        ends_prompt = prefill is not None and bool(prefill.is_last[prefill.rows == row].any())
        return ends_prompt or (decode is not None and row in decode.rows)

    def live_chunks(self) -> Iterator[tuple[int, Chunk]]:
        """Yield the chunks whose requests still have the row, with their indices.

        Results of the other chunks are dropped.
        """
        prefill = self.step.prefill
        if prefill is None:
            return
        places = zip(prefill.rows.tolist(), prefill.epochs.tolist(), strict=True)
        for i, (chunk, place) in enumerate(zip(self.chunks, places, strict=True)):
            if (chunk.record.row, chunk.record.epoch) == place and not chunk.record.is_terminal:
                yield i, chunk

    def row_epochs(self) -> Iterable[tuple[int, int]]:
        """Return each row of the step once, with the epoch that it had at the plan."""
        parts = [part for part in (self.step.prefill, self.step.decode) if part is not None]
        return dict.fromkeys(
            pair for part in parts for pair in zip(part.rows.tolist(), part.epochs.tolist(), strict=True)
        )

    def touches(self, row: int) -> bool:
        """Return whether the step may read or write the KV of `row`."""
        prefill, decode = self.step.prefill, self.step.decode
        return (prefill is not None and row in prefill.rows.tolist()) or (
            decode is not None and row in decode.rows.tolist()
        )

    def describe(self, request_ids: list[str]) -> str:
        """Describe the step and the requests that still take part in it."""
        parts, decode = [], self.step.decode
        if self.step.prefill is not None:
            parts.append(f"{int(self.step.prefill.lens.sum())} prefill tokens")
        if decode is not None:
            parts.append(f"{len(decode.rows)} rows × {decode.shape.nodes} tokens × {decode.max_rounds} rounds")
        shown = ", ".join(request_ids[:4]) + (f" and {len(request_ids) - 4} more" if len(request_ids) > 4 else "")
        return f"step {self.step.step_id} ({', '.join(parts)}; requests {shown or 'gone'})"


class StepsInFlight(deque[StepInFlight]):
    """The steps in flight, oldest first."""

    @property
    def num_rounds(self) -> int:
        """The number of decode rounds that they may run."""
        rounds = 0
        for flight in self:
            if flight.planned is not None:
                rounds += flight.planned.decode.max_rounds
        return rounds

    @property
    def has_multi_step(self) -> bool:
        """Whether one of the steps may run several rounds."""
        return any(flight.step.max_rounds > 1 for flight in self)

    def decode_again(self, rows: np.ndarray) -> BoolArray:
        """Return which of `rows` they decode, bool [len(rows)]."""
        for flight in self:
            if flight.planned is not None:
                later = flight.planned.decode.rows
                if later is rows:
                    return np.ones(len(rows), dtype=bool)
                again = set(later.tolist())  # several times as fast as `np.isin` on arrays this small
                return np.array([row in again for row in rows.tolist()], dtype=bool)
        return np.zeros(len(rows), dtype=bool)

    def oldest(self, step_id: int, what: str) -> StepInFlight:
        """Return the oldest step. Raises RELAY-07, about the result or failure `what`, if it is not `step_id`."""
        flight = self[0] if self else None
        if flight is None or flight.step.step_id != step_id:
            oldest = None if flight is None else flight.step.step_id
            message = f"{what} of step {step_id}, but the oldest uncommitted step is {oldest}"
            raise InvariantViolation("RELAY-07", message)
        return flight

    def fence_of(self, row: int) -> int:
        """Return the newest step that touches `row`; 0 if none does."""
        for flight in reversed(self):
            if flight.touches(row):
                return flight.step.step_id
        return 0

    def runs_multi_step_of(self, row: int) -> bool:
        """Return whether the oldest step is a multi-step with rounds of `row`.

        A multi-step has not begun if another step is in flight before it.
        """
        decode = self[0].step.decode if self else None
        return decode is not None and decode.max_rounds > 1 and row in decode.rows.tolist()
