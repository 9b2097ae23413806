"""What the executor knows of each request-table row: the request on the host, its slots on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..core.draws import request_key
from ..core.errors import InvariantViolation
from ..core.request import Request
from ..core.step import Join, TableWrites
from .round import SamplingInputs


@dataclass(slots=True)
class RowState:
    """A request's stay in a row."""

    epoch: int
    request: Request
    remaining: int  # tokens that it may still emit
    ended: bool = False
    message: str = ""  # why it failed, empty if it did not


class Rows:
    """Request-table rows 1 … num_rows; row 0 is padding and keeps slot 0 everywhere."""

    def __init__(self, num_rows: int, row_width: int, device: torch.device, seed: int) -> None:
        self.table = torch.zeros((num_rows + 1, row_width), dtype=torch.int32, device=device)
        self._device = device
        self._seed = seed
        self._states: list[RowState | None] = [None] * (num_rows + 1)
        self._temperature = np.zeros(num_rows + 1)
        self._top_p = np.ones(num_rows + 1)
        self._top_k = np.zeros(num_rows + 1, np.int64)
        self._keys = np.zeros(num_rows + 1, np.uint64)

    def open(self, join: Join) -> None:
        """A request takes a row; raises InvariantViolation RELAY-03 if somebody has it."""
        if self._states[join.row] is not None:
            raise InvariantViolation("RELAY-03", f"row {join.row} is given away before it was released")
        request, row = join.request, join.row
        self._states[row] = RowState(join.epoch, request, join.max_tokens - join.num_emitted)
        self._temperature[row] = request.sampling.temperature
        self._top_p[row] = request.sampling.top_p
        self._top_k[row] = request.sampling.top_k
        self._keys[row] = request.sampling.seed or request_key(request.request_id)

    def close(self, row: int) -> None:
        self._states[row] = None
        self._temperature[row] = 0.0

    def states_of(self, rows: np.ndarray, epochs: np.ndarray) -> list[RowState]:
        """The states of live rows; raises RELAY-03 where another request has the row."""
        found = []
        for row, epoch in zip(rows.tolist(), epochs.tolist(), strict=True):
            state = self._states[row]
            if state is None or state.epoch != epoch:
                raise InvariantViolation("RELAY-03", f"a step runs row {row} of epoch {epoch}, which has another owner")
            found.append(state)
        return found

    def sampling(self, rows: np.ndarray) -> SamplingInputs | None:
        """The rows' sampling parameters on the device, None if all of them are greedy."""
        temperature = self._temperature[rows]
        if not temperature.any():
            return None
        top_p, top_k = self._top_p[rows], self._top_k[rows]
        filtered = bool((top_p < 1.0).any() or (top_k > 0).any())
        values = (temperature, top_p, top_k, self._keys[rows].view(np.int64))
        on_device = (torch.from_numpy(value).to(self._device, non_blocking=True) for value in values)
        return SamplingInputs(*on_device, filtered, self._seed)

    def write_table(self, writes: TableWrites) -> None:
        if not len(writes.slots):
            return
        cells = writes.rows.astype(np.int64) * self.table.shape[1] + writes.columns
        slots = torch.from_numpy(np.ascontiguousarray(writes.slots)).to(self._device, non_blocking=True)
        self.table.view(-1)[torch.from_numpy(cells).to(self._device, non_blocking=True)] = slots
