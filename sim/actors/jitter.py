"""Fluctuation of device and host times: a factor per step, lognormal with mean 1, so that means stay and tails grow.

Factors are keyed by (seed, replica, number of the step), where each decode round counts as a step. So runs with other settings see the same
sequence, and a block of rounds sees what its rounds would see one by one.
"""

from __future__ import annotations

import math

import numpy as np

from ...core.draws import Purpose, normal_at, stream_keys

_WINDOW = 1024


class Jitter:
    """The factors of one kind of time. `spread`: their standard deviation, above 0; `lane` tells kinds of one purpose apart."""

    def __init__(self, spread: float, seed: int, purpose: Purpose, replica: int, lane: int = 0) -> None:
        assert spread > 0
        variance = math.log1p(spread * spread)
        self._sigma, self._shift = math.sqrt(variance), -variance / 2
        self._key = stream_keys(seed, purpose, replica, lane)
        self._start = 0
        self._window = np.empty(0)

    def factors(self, first: int, count: int) -> np.ndarray:
        """Return the factors of steps `first` … `first` + `count` − 1: float64 [count]."""
        offset = first - self._start
        if offset < 0 or offset + count > len(self._window):
            self._start, offset = first, 0
            self._window = normal_at(self._key, np.arange(first, first + max(count, _WINDOW)))
            self._window *= self._sigma
            self._window += self._shift
            np.exp(self._window, out=self._window)
        return self._window[offset : offset + count]

    def time_ns(self, step: int, time_ns: int) -> int:
        """Return what one step takes whose mean is `time_ns`."""
        return int(time_ns * self.factors(step, 1)[0])

    def times_ns(self, first: int, times_ns: np.ndarray) -> np.ndarray:
        """Return what successive steps take whose means are `times_ns`: int64 [m]."""
        return (times_ns * self.factors(first, len(times_ns))).astype(np.int64)


class HostJitter:
    """The fluctuation of the scheduler's work: of planning and launching a step, and of committing it."""

    def __init__(self, spread: float, seed: int, replica: int) -> None:
        self.launch = Jitter(spread, seed, Purpose.HOST_TIME, replica)
        self.commit = Jitter(spread, seed, Purpose.HOST_TIME, replica, lane=1)
