"""Latencies of requests as the caller of a session sees them, whichever processes serve them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ...observe.summary import Measurements, latencies


class _Times:
    """When a request was sent, and when its tokens came."""

    __slots__ = ("first_ns", "last_ns", "num_tokens", "sent_ns")

    def __init__(self, sent_ns: int) -> None:
        self.sent_ns = sent_ns
        self.first_ns = self.last_ns = 0
        self.num_tokens = 0


class LatencyMeter:
    """Measures TTFT, TPOT and E2EL of completed requests, and ITL between deliveries of all."""

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock_ns = clock_ns
        self._open: dict[str, _Times] = {}
        self._measured = Measurements()

    def sent(self, request_id: str) -> None:
        self._open[request_id] = _Times(self._clock_ns())

    def delivered(self, request_id: str, num_tokens: int) -> None:
        times, now_ns = self._open[request_id], self._clock_ns()
        if times.num_tokens:
            self._measured.itl.add(np.array([now_ns - times.last_ns]))
        else:
            times.first_ns = now_ns
        times.last_ns = now_ns
        times.num_tokens += num_tokens

    def ended(self, request_id: str, completed: bool) -> None:
        times = self._open.pop(request_id)
        if completed and times.num_tokens:
            measured = self._measured
            measured.ttft_ns.extend(np.array([times.first_ns - times.sent_ns]))
            measured.e2el_ns.extend(np.array([times.last_ns - times.sent_ns]))
            measured.num_output.extend(np.array([times.num_tokens]))

    def read(self) -> dict[str, Any]:
        """Return the latencies in ms, named as in summary.json."""
        return latencies(self._measured)
