"""A step between its plan and its commit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..contract.step import Step
from .life import RequestRecord
from .rounds import PlannedRounds


class Chunk(NamedTuple):
    """Positions [start, start + length) of one request's context."""

    record: RequestRecord
    start: int
    length: int

    @property
    def is_last(self) -> bool:
        return self.start + self.length == self.record.prefill_len


@dataclass(slots=True)
class StepInFlight:
    """A step that is planned and not committed yet."""

    step: Step
    chunks: list[Chunk]
    planned: PlannedRounds | None  # of its decode part
    num_departed: int  # DecodeRounds.num_departed when it was planned

    def live_chunks(self) -> Iterator[tuple[int, Chunk]]:
        """Yield the chunks whose requests still have the row, with their indices. Results of the others are dropped."""
        prefill = self.step.prefill
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
        return (prefill is not None and row in prefill.rows) or (decode is not None and row in decode.rows)

    def describe(self, request_ids: list[str]) -> str:
        """Describe the step and the requests that still take part in it."""
        parts, decode = [], self.step.decode
        if self.step.prefill is not None:
            parts.append(f"{int(self.step.prefill.lens.sum())} prefill tokens")
        if decode is not None:
            parts.append(f"{len(decode.rows)} rows × {decode.num_draft_tokens} tokens × {decode.max_rounds} rounds")
        shown = ", ".join(request_ids[:4]) + (f" and {len(request_ids) - 4} more" if len(request_ids) > 4 else "")
        return f"step {self.step.step_id} ({', '.join(parts)}; requests {shown or 'gone'})"
