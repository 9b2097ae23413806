"""How long the phases of decoding take: by the host's clock on a CPU, by events in the stream on a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PhaseClock:
    """Seconds per phase; right where device work is done when a call returns."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def settle(self) -> None:
        """Do nothing: a CPU has no outstanding work."""


class EventPhaseClock:
    """Seconds per phase on the device's stream. Recording an event does not wait; `settle` reads those that have passed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        try:
            yield
        finally:
            end.record()
            self._open.append((name, begin, end))

    def settle(self) -> None:
        waiting = []
        for name, begin, end in self._open:
            if end.query():
                self.seconds[name] = self.seconds.get(name, 0.0) + begin.elapsed_time(end) / 1e3
            else:
                waiting.append((name, begin, end))
        self._open = waiting
