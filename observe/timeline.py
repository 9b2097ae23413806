"""A run in a fixed number of equal buckets of time, which double in width when the run gets longer than they reach."""

from __future__ import annotations

from typing import Any

import numpy as np

FIRST_BUCKET_NS = 1 << 20  # about a millisecond


class Timeline:
    """Integrals of gauges and sums of counters per bucket, in fixed memory however long the run is.

    A gauge holds its value from one sample to the next, so a bucket's mean is weighted by time and exact; only where a bucket's
    edges lie depends on the length of the run.
    """

    def __init__(
        self, start_ns: int, gauges: tuple[str, ...], counters: tuple[str, ...], num_buckets: int = 120
    ) -> None:
        assert num_buckets >= 2 and num_buckets % 2 == 0, f"{num_buckets} buckets: expected an even number"
        self.start_ns = start_ns
        self.end_ns = start_ns
        self.bucket_ns = FIRST_BUCKET_NS
        self.num_buckets = num_buckets
        self._gauges, self._counters = gauges, counters
        self._integrals = np.zeros((len(gauges), num_buckets))
        self._sums = np.zeros((len(counters), num_buckets))

    def add_gauges(self, times_ns: np.ndarray, values: np.ndarray) -> None:
        """Add gauges that had `values[:, i]` from `times_ns[i]` to `times_ns[i + 1]`: int64 [n + 1] ascending, and [gauges, n]."""
        self._reach(int(times_ns[-1]))
        areas = np.zeros((len(values), len(times_ns)))
        np.cumsum(values * np.diff(times_ns), axis=1, out=areas[:, 1:])
        # Between samples the area grows in a straight line, so its value at the buckets' edges is an interpolation.
        first, last = self._bucket_of(int(times_ns[0])), self._bucket_of(int(times_ns[-1]))
        edges = self.start_ns + np.arange(first, last + 2) * self.bucket_ns
        for integral, area in zip(self._integrals, areas, strict=True):
            integral[first : last + 1] += np.diff(np.interp(edges, times_ns, area))

    def add_counts(self, times_ns: np.ndarray, amounts: np.ndarray) -> None:
        """Add `amounts` [counters, n] at `times_ns` int64 [n]."""
        if not len(times_ns):
            return
        self._reach(int(times_ns.max()))
        buckets = np.clip((times_ns - self.start_ns) // self.bucket_ns, 0, self.num_buckets - 1)
        for total, amount in zip(self._sums, amounts, strict=True):
            total += np.bincount(buckets, weights=amount, minlength=self.num_buckets)

    def read(self) -> dict[str, Any]:
        """Return start and bucket width in ns, and per used bucket the mean of each gauge and the sum of each counter."""
        used = max(1, -(-(self.end_ns - self.start_ns) // self.bucket_ns))
        widths = np.full(used, float(self.bucket_ns))
        widths[-1] = max(self.end_ns - self.start_ns - (used - 1) * self.bucket_ns, 1)
        read: dict[str, Any] = {"start_ns": self.start_ns, "bucket_ns": self.bucket_ns, "widths_ns": widths.tolist()}
        for name, integral in zip(self._gauges, self._integrals, strict=True):
            read[name] = (integral[:used] / widths).tolist()
        for name, total in zip(self._counters, self._sums, strict=True):
            read[name] = total[:used].tolist()
        return read

    def _bucket_of(self, time_ns: int) -> int:
        return min(max((time_ns - self.start_ns) // self.bucket_ns, 0), self.num_buckets - 1)

    def _reach(self, time_ns: int) -> None:
        """Double the buckets until the last one contains `time_ns`."""
        self.end_ns = max(self.end_ns, time_ns)
        half = self.num_buckets // 2
        while time_ns - self.start_ns > self.num_buckets * self.bucket_ns:
            self.bucket_ns *= 2
            for rows in (self._integrals, self._sums):
                rows[:, :half] = rows[:, ::2] + rows[:, 1::2]
                rows[:, half:] = 0


class GaugeAreas:
    """Exact integrals and maxima of gauges over time: they do not depend on how the samples were grouped."""

    def __init__(self, num_gauges: int) -> None:
        self.areas = [0] * num_gauges  # value · nanoseconds
        self.maxima = [0] * num_gauges
        self.end_ns = 0

    def add(self, times_ns: np.ndarray, values: np.ndarray) -> None:
        """Add gauges that had `values[:, i]` from `times_ns[i]` to `times_ns[i + 1]`: int64 [n + 1] ascending, and [gauges, n]."""
        widths = np.diff(times_ns)
        lasting = widths > 0  # states of no duration do not count
        self.end_ns = int(times_ns[-1])
        if not lasting.any():
            return
        high, low = widths >> 20, widths & 0xFFFFF  # neither sum leaves 64 bits
        for i, row in enumerate(values):
            self.areas[i] += (int(row.dot(high)) << 20) + int(row.dot(low))
            self.maxima[i] = max(self.maxima[i], int(row[lasting].max()))


def series(timeline: Timeline | None, capacity: int) -> dict[str, Any]:
    """Return a timeline of running, waiting, held slots, tokens and steps as a summary shows it: a list per name, one number per bucket.

    `capacity`: KV slots in all. None: nothing was measured.
    """
    if timeline is None:
        return {"bucket_s": 0.0, "running": [], "waiting": [], "kv_occupancy": [], "steps": [], "tokens_per_s": []}
    read = timeline.read()
    rounds = zip(read["steps"], read["decode_rounds"], strict=True)
    return {
        "bucket_s": read["bucket_ns"] / 1e9,
        "running": read["running"],
        "waiting": read["waiting"],
        "kv_occupancy": [held / capacity if capacity else None for held in read["held"]],
        "steps": [total / count if count else None for total, count in rounds],
        "tokens_per_s": [n / width * 1e9 for n, width in zip(read["tokens"], read["widths_ns"], strict=True)],
    }
