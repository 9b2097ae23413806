"""The executor's record of each request-table row: the request on the host, its slots on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from ...core.acceptance.process import AcceptanceProcess
from ...core.contract.request import Request, cut_runs
from ...core.contract.step import DraftBudget, Join, TableWrites
from ...core.draws import request_key
from ...core.errors import InvariantViolation
from ..batch.uploads import uploads_to
from ..draft.port import SamplingInputs

NO_STOP = -2  # fills a row's list of stop tokens; no token, and no placeholder either


@dataclass(frozen=True, slots=True)
class HostSampling:
    """How each of n rows turns logits into tokens, as `SamplingInputs` on the host."""

    DTYPES: ClassVar = {"temperature": np.float64, "top_p": np.float64, "top_k": np.int64, "keys": np.int64}

    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    keys: np.ndarray
    filtered: bool

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name) for name in self.DTYPES}


class HostBudget(NamedTuple):
    """`BudgetInputs` on the host."""

    drafts: np.ndarray  # int64 [1]
    weights: np.ndarray  # float64 [2, steps]

    @classmethod
    def of(cls, budget: DraftBudget, steps: int) -> HostBudget:
        return cls(np.array([budget.drafts], np.int64), np.array([budget.slopes[:steps], budget.biases[:steps]]))


class Rows:
    """Request-table rows 1 … num_rows; row 0 is padding and keeps slot 0 everywhere.

    What every round asks of all its rows is kept in columns, so that a round costs a constant number of vector
    operations.
    """

    def __init__(self, num_rows: int, row_width: int, device: torch.device, seed: int) -> None:
        self.table = torch.zeros((num_rows + 1, row_width), dtype=torch.int32, device=device)
        self.seed = seed
        self.ended = np.zeros(num_rows + 1, bool)
        self._device = device
        self._requests: list[Request | None] = [None] * (num_rows + 1)
        self._epochs = np.zeros(num_rows + 1, np.int64)
        self._remaining = np.zeros(num_rows + 1, np.int64)  # tokens that the request may still emit
        self._stop_tokens = np.full((num_rows + 1, 1), NO_STOP, np.int64)
        self._has_outputs = np.zeros(num_rows + 1, bool)
        self._temperature = np.zeros(num_rows + 1)
        self._top_p = np.ones(num_rows + 1)
        self._top_k = np.zeros(num_rows + 1, np.int64)
        self._keys = np.zeros(num_rows + 1, np.uint64)

    def open(self, join: Join) -> None:
        """Give a row to a request. Raises InvariantViolation RELAY-03 if another request has it."""
        if self._requests[join.row] is not None:
            raise InvariantViolation("RELAY-03", f"row {join.row} is given away before it was released")
        request, row = join.request, join.row
        self._requests[row] = request
        self._epochs[row] = join.epoch
        self._remaining[row] = join.max_tokens - join.num_emitted
        self.ended[row] = False
        missing = len(request.stop_tokens) - self._stop_tokens.shape[1]
        if missing > 0:
            self._stop_tokens = np.pad(self._stop_tokens, ((0, 0), (0, missing)), constant_values=NO_STOP)
        self._stop_tokens[row] = NO_STOP
        self._stop_tokens[row, : len(request.stop_tokens)] = request.stop_tokens
        self._has_outputs[row] = bool(request.outputs)
        self._temperature[row] = request.sampling.temperature
        self._top_p[row] = request.sampling.top_p
        self._top_k[row] = request.sampling.top_k
        # Like every key, a seed counts modulo 2**64.
        self._keys[row] = (request.sampling.seed & 0xFFFF_FFFF_FFFF_FFFF) or request_key(request.request_id)

    def close(self, row: int) -> None:
        self._requests[row] = None
        self._epochs[row] = -1  # no step may run it until it is opened again

    def forget(self) -> None:
        self._requests = [None] * len(self._requests)

    def check_owners(self, rows: np.ndarray, epochs: np.ndarray) -> None:
        """Raise RELAY-03 unless each row belongs to the request that the step means."""
        foreign = self._epochs[rows] != epochs
        if foreign.any():
            i = int(foreign.argmax())
            message = f"a step runs row {rows[i]} of epoch {epochs[i]}, which has another owner"
            raise InvariantViolation("RELAY-03", message)

    def requests_of(self, rows: np.ndarray) -> list[Request]:
        return [self._requests[row] for row in rows.tolist()]

    def wanted(self, rows: np.ndarray) -> frozenset[str]:
        """Return the outputs that any of the rows asked for."""
        if not self._has_outputs[rows].any():
            return frozenset()
        return frozenset(name for request in self.requests_of(rows) for name in request.outputs)

    def settle(
        self, rows: np.ndarray, runs: np.ndarray, accept_lens: np.ndarray, failed: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Record the tokens that rows have emitted, runs int64 [n, width], and end rows. Return each row's first stop
        int32 [n], −1 if none, and which rows have ended now, bool [n].

        Rows that had ended before have neither. One rule with the engine's: `core.contract.request.cut_runs`.
        """
        live = ~self.ended[rows]
        hits = (runs[:, :, None] == self._stop_tokens[rows][:, None, :]).any(axis=2)
        hits &= (np.arange(runs.shape[1]) < accept_lens[:, None]) & live[:, None]
        stops = np.where(hits.any(axis=1), hits.argmax(axis=1), -1).astype(np.int32)
        settled = cut_runs(accept_lens.astype(np.int64), stops, self._remaining[rows])
        self._remaining[rows] -= np.where(live, settled.kept, 0)
        ended = live & (settled.ended | failed)
        self.ended[rows] |= ended
        return stops, ended

    def sampling(self, rows: np.ndarray) -> HostSampling | None:
        """Return the rows' sampling parameters, None if all of them are greedy."""
        temperature = self._temperature[rows]
        if not temperature.any():
            return None
        top_p, top_k = self._top_p[rows], self._top_k[rows]
        filtered = bool((top_p < 1.0).any() or (top_k > 0).any())
        return HostSampling(temperature, top_p, top_k, self._keys[rows].view(np.int64), filtered)

    def on_device(self, sampling: HostSampling | None) -> SamplingInputs | None:
        """Return what `sampling` gave as tensors."""
        if sampling is None:
            return None
        temperature, top_p, top_k, keys = uploads_to(self._device).send(*sampling.arrays.values())
        return SamplingInputs(temperature, top_p, top_k, keys, sampling.filtered, self.seed)

    def write_table(self, writes: TableWrites) -> None:
        if not len(writes.slots):
            return
        cells = writes.rows.astype(np.int64) * self.table.shape[1] + writes.columns
        cells, slots = uploads_to(self._device).send(cells, writes.slots)
        self.table.view(-1)[cells] = slots


class ForcedRuns:
    """Draws from `process`, and keeps the lengths of the rows that this needs. Without a process it draws nothing."""

    def __init__(self, process: AcceptanceProcess | None, num_rows: int) -> None:
        self.process = process
        self._lengths = np.zeros(num_rows + 1, np.int64)

    def begin(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        """Take the lengths int64 [n] at which rows begin to decode."""
        self._lengths[rows] = lengths

    def draw(self, rows: np.ndarray, requests: Sequence[Request], width: int | np.ndarray) -> np.ndarray | None:
        """Return the drafts that each row accepts, int64 [n], fewer than `width`, its own or one of all rows; None
        without a process."""
        if self.process is None:
            return None
        keys = np.array([request_key(request.request_id) for request in requests], dtype=np.uint64)
        lengths = self._lengths[rows]
        prompts = np.array([request.prompt.length for request in requests])
        num_emitted = lengths + 1 - prompts  # the last emitted token has no KV yet
        runs: np.ndarray = np.minimum(self.process.longest_run(keys, num_emitted), width - 1).astype(np.int64)
        self._lengths[rows] = lengths + runs + 1
        return runs
