"""A device whose drafts are always right or always wrong for a while, which is slow, or cannot bear a certain request."""

from __future__ import annotations

import numpy as np

from ...core.contract.step import DecodeStep, Join, Step
from ..actors.device import Batch, Device, DrawnRounds


class FaultyDevice(Device):
    """`drafts`: "right", "wrong" or "" for as they are. `factor` multiplies all times. `poisoned` are ids of requests."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.drafts = ""
        self.factor = 1.0
        self.poisoned: set[str] = set()  # only asked, never iterated
        self._poisoned_rows: set[int] = set()  # the same

    def open_rows(self, joins: tuple[Join, ...]) -> None:
        super().open_rows(joins)
        for join in joins:
            if join.request.request_id in self.poisoned:
                self._poisoned_rows.add(join.row)
            else:
                self._poisoned_rows.discard(join.row)

    def is_poisoned(self, step: Step) -> bool:
        """Whether a request takes part in the step that the device cannot bear."""
        if not self._poisoned_rows:
            return False
        parts = [part for part in (step.prefill, step.decode) if part is not None]
        return any(row in self._poisoned_rows for part in parts for row in part.rows.tolist())

    def step_ns(self, step: Step) -> int:
        device_ns = super().step_ns(step)
        return device_ns if self.factor == 1.0 else int(device_ns * self.factor)

    def draw(self, decode: DecodeStep, limit: int, timed: bool = True) -> DrawnRounds:
        drawn = super().draw(decode, limit, timed)
        if timed and self.factor != 1.0:
            drawn.device_ns = (drawn.device_ns * self.factor).astype(np.int64)
        return drawn

    def _draw_lens(self, decode: DecodeStep, batch: Batch, left: np.ndarray, limit: int) -> tuple[np.ndarray, int]:
        if not self.drafts:
            return super()._draw_lens(decode, batch, left, limit)
        accepted = min(decode.steps + 1, decode.num_draft_tokens) if self.drafts == "right" else 1
        rounds = min(limit, max(1, -(-int(left.min()) // accepted)))
        return np.full((rounds, len(batch.index)), accepted, dtype=np.int32), rounds
