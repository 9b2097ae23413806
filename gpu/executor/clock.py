"""How long the phases of decoding take: by the host's clock on a CPU, by events in the stream on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

OnLap = Callable[[str, float], None]
"""Told each phase and its seconds as it has passed; the sums go on beside it."""


class PhaseClock:
    """Seconds per phase by `now_s`; right where device work is done when a call returns."""

    def __init__(self, on_lap: OnLap | None = None, now_s: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._on_lap = on_lap
        self._now_s = now_s

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = self._now_s()
        try:
            yield
        finally:
            self._passed(name, self._now_s() - begin)

    def _passed(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        if self._on_lap is not None:
            self._on_lap(name, seconds)

    def settle(self) -> None:
        """Do nothing: a CPU has no outstanding work."""


class EventPhaseClock(PhaseClock):
    """Seconds per phase on the device's stream. Recording an event does not wait; `settle` reads those that have passed."""

    def __init__(self, on_lap: OnLap | None = None) -> None:
        super().__init__(on_lap)
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
                self._passed(name, begin.elapsed_time(end) / 1e3)
            else:
                waiting.append((name, begin, end))
        self._open = waiting
