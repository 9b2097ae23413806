"""The load of a run over time: what its gauges were between two events, and what its rounds counted."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..output_files import ParquetColumns
from .histogram import Timeline
from .summary import GAUGES, Measurements

SYSTEM = 1 + GAUGES.index("system")  # column of the samples


class LoadSamples(Protocol):
    """Takes the samples of gauges and the counts of rounds, in the order of their times."""

    timeline: Timeline | None

    def add_samples(self, samples: np.ndarray) -> np.ndarray:
        """Take (time, *GAUGES) of events, int64 [n, 5]; returns those to pass again, with the next."""
        ...

    def add_rounds(self, ends_ns: np.ndarray, tokens: np.ndarray, steps: np.ndarray) -> None:
        """Take the end of each round, its tokens and its draft steps (−1: it has not decoded), int64 [n]."""


class MeasuredLoad:
    """Integrates the load of a whole run into its `Measurements` and a timeline of `num_buckets`."""

    def __init__(self, measured: Measurements, num_buckets: int) -> None:
        self.timeline: Timeline | None = None
        self._measured = measured
        self._num_buckets = num_buckets

    def add_samples(self, samples: np.ndarray) -> np.ndarray:
        """Integrate the gauges up to the last time at which the system had requests; later times may be after the run's
        end."""
        measured = self._measured
        if self.timeline is None:
            measured.first_ns = int(samples[0, 0])
            counters = ("tokens", "decode_rounds", "steps")
            self.timeline = Timeline(measured.first_ns, GAUGES, counters, self._num_buckets)
        samples[:, 0] = np.maximum.accumulate(samples[:, 0])
        measured.last_ns = int(samples[-1, 0])
        occupied = np.flatnonzero(samples[:-1, SYSTEM])
        size = occupied[-1] + 1 if len(occupied) else 0
        if size:
            times, values = samples[: size + 1, 0], samples[:size, 1:].T
            measured.gauges.add(times, values)
            self.timeline.add_gauges(times, values)
        measured.empty_system = np.array(samples[size:])
        return measured.empty_system

    def add_rounds(self, ends_ns: np.ndarray, tokens: np.ndarray, steps: np.ndarray) -> None:
        """See `Load.add_rounds`."""
        assert self.timeline is not None, "each step was an event, at which the gauges were read"
        decoding = steps >= 0
        self.timeline.add_counts(ends_ns, np.stack([tokens, decoding, np.where(decoding, steps, 0)]))


class PartLoad:
    """Writes how the gauges of some replicas changed. The load of the run is the sum over all of its replicas."""

    timeline: Timeline | None = None

    def __init__(self, file: ParquetColumns) -> None:
        self._file = file
        self._last: np.ndarray | None = None

    def add_samples(self, samples: np.ndarray) -> np.ndarray:
        """See `Load.add_samples`."""
        values = samples[:, 1:]
        changes = np.diff(values, axis=0, prepend=np.zeros_like(values[:1]) if self._last is None else self._last)
        is_kept: np.ndarray = np.asarray(changes.any(axis=1))
        is_kept[0] |= self._last is None
        self._last = np.array(values[-1:])
        kept = changes[is_kept]
        columns = {"event_ns": samples[is_kept, 0], "replica": np.zeros(len(kept), dtype=np.int64)}
        self._file.add(columns | dict(zip(GAUGES, kept.T, strict=True)), len(kept))
        return samples[:0]

    def add_rounds(self, ends_ns: np.ndarray, tokens: np.ndarray, steps: np.ndarray) -> None:
        """Do nothing: the file of the rounds has the same numbers."""
