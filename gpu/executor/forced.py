"""Simulated acceptance on a real device: how many drafts each row accepts is drawn on the host, which so knows every length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...core.acceptance.process import AcceptanceProcess
from ...core.contract.request import Request
from ...core.draws import request_key


class ForcedRuns:
    """Draws from `process`, and keeps the lengths of the rows that this needs. Without a process it draws nothing."""

    def __init__(self, process: AcceptanceProcess | None, num_rows: int) -> None:
        self.process = process
        self._lengths = np.zeros(num_rows + 1, np.int64)

    def begin(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        """Take the lengths int64 [n] at which rows begin to decode."""
        self._lengths[rows] = lengths

    def draw(self, rows: np.ndarray, requests: Sequence[Request], width: int) -> np.ndarray | None:
        """Return the drafts that each row accepts, int64 [n], fewer than `width`; None without a process."""
        if self.process is None:
            return None
        keys = np.array([request_key(request.request_id) for request in requests], dtype=np.uint64)
        lengths = self._lengths[rows]
        prompts = np.array([request.prompt.length for request in requests])
        runs = np.minimum(self.process.longest_run(keys, lengths - prompts), width - 1).astype(np.int64)
        self._lengths[rows] = lengths + runs + 1
        return runs
