"""A streaming histogram with logarithmic buckets: any quantile of non-negative integers in fixed memory.

The buckets [g^i, g^(i+1)) with g = (1 + α) / (1 − α) are answered by 2·g^(i+1) / (1 + g), which is off by at most the
share α of the true value (Masson, Rim, Lee: "DDSketch", VLDB 2019). Count, mean, standard deviation, minimum and
maximum are exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

RELATIVE_ERROR = 1e-3
_ALPHA = 0.999 * RELATIVE_ERROR  # the rest is room for rounding in the logarithm
_GAMMA = (1 + _ALPHA) / (1 - _ALPHA)
_LOG_GAMMA = float(np.log(_GAMMA))
_ROOT = 3_037_000_500  # squares of smaller values fit into int64
_NUM_BUCKETS = int(np.log(2.0**63) / _LOG_GAMMA) + 2


class LogHistogram:
    """Of int64 values ≥ 0. A quantile's relative error is at most `RELATIVE_ERROR`; zeros are exact."""

    def __init__(self) -> None:
        self.count: int = 0
        self.total: int = 0
        self.minimum: int | None = None
        self.maximum: int | None = None
        self._zeros = 0
        self._squares = 0  # exact, so that moments do not depend on how the values were grouped
        self._buckets = np.zeros(_NUM_BUCKETS, dtype=np.int64)

    def add(self, values: np.ndarray) -> None:
        """Count `values`, int64 [n], each ≥ 0."""
        size = len(values)
        if not size:
            return
        low, high = int(values.min()), int(values.max())
        if low < 0:
            raise ValueError(f"{low} in a histogram of values >= 0")
        self.minimum = low if self.minimum is None else min(low, self.minimum)
        self.maximum = high if self.maximum is None else max(high, self.maximum)
        self.count += size
        self.total += int(values.sum())
        self._squares += _sum_of_squares(values, high)
        if low == 0:
            positive = values[values > 0]
            self._zeros += size - len(positive)
            values = positive
        index = (np.log(values) * (1 / _LOG_GAMMA)).astype(np.int64)
        counts = np.bincount(index)
        self._buckets[: len(counts)] += counts

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    @property
    def std(self) -> float | None:
        """The standard deviation of the population."""
        if not self.count:
            return None
        return math.sqrt(self.count * self._squares - self.total**2) / self.count

    def to_json(self) -> dict[str, Any]:
        """Return what `merge` takes, as plain data."""
        used = np.flatnonzero(self._buckets)
        return {
            "extremes": [self.minimum, self.maximum],
            "sums": [str(number) for number in (self.count, self.total, self._zeros, self._squares)],  # beyond 64 bits
            "buckets": [used.tolist(), self._buckets[used].tolist()],
        }

    def merge(self, counted: Mapping[str, Any]) -> None:
        """Count all values of another histogram, given as its `to_json`, too."""
        count, total, zeros, squares = map(int, counted["sums"])
        if not count:
            return
        low, high = counted["extremes"]
        self.minimum = low if self.minimum is None else min(low, self.minimum)
        self.maximum = high if self.maximum is None else max(high, self.maximum)
        self.count += count
        self.total += total
        self._zeros += zeros
        self._squares += squares
        used, counts = counted["buckets"]
        self._buckets[used] += counts

    def quantile(self, share: float) -> float | None:
        """Return the value below which `share` (0 … 1) of all values lie, interpolated; None if there are none."""
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"quantile {share}: expected 0 ... 1")
        return self.quantiles([share])[0] if self.count else None

    def quantiles(self, shares: Sequence[float]) -> list[float]:
        """Return the quantile of each share, 0 … 1; there must be values."""
        sums = np.cumsum(self._buckets)
        found = []
        for share in shares:
            place = share * (self.count - 1)
            below = int(place)
            low = self._ranked(below, sums)
            high = self._ranked(min(below + 1, self.count - 1), sums)
            found.append(low + (place - below) * (high - low))
        return found

    def _ranked(self, rank: int, sums: np.ndarray) -> float:
        """Return about the value of this rank, 0 … count − 1. sums: of the buckets up to each, int64."""
        if rank < self._zeros:
            return 0.0
        assert self.minimum is not None and self.maximum is not None, "a rank is of a value"
        if rank == self.count - 1:
            return float(self.maximum)
        bucket = int(np.searchsorted(sums, rank - self._zeros, side="right"))
        value = 2.0 * np.exp((bucket + 1) * _LOG_GAMMA) / (1.0 + _GAMMA)
        return float(min(max(value, self.minimum), self.maximum))


def _sum_of_squares(values: np.ndarray, high: int) -> int:
    """Return Σ v² of int64 values in 0 … `high`, exactly."""
    if high >= _ROOT:
        large = values >= _ROOT
        exact: int = sum(value * value for value in values[large].tolist())
        return exact + _sum_of_squares(values[~large], 0)
    squares = values * values
    return (int((squares >> 32).sum()) << 32) + int((squares & 0xFFFFFFFF).sum())


def added_counts(counts: np.ndarray, more: np.ndarray) -> np.ndarray:
    """Return the sum of two histograms of different lengths."""
    if len(more) > len(counts):
        counts, more = more.astype(np.int64), counts
    counts[: len(more)] += more
    return counts


FIRST_BUCKET_NS = 1 << 20  # about a millisecond
_SHIFT = 20


def _high(widths_ns: np.ndarray) -> np.ndarray:
    """Return the upper part of durations, in units of 1 << `_SHIFT` nanoseconds."""
    return widths_ns >> _SHIFT


def _low(widths_ns: np.ndarray) -> np.ndarray:
    return widths_ns & ((1 << _SHIFT) - 1)


class Timeline:
    """Integrals of gauges and sums of counters per bucket, in fixed memory however long the run is.

    A gauge holds its value from one sample to the next, so a bucket's mean is weighted by time and exact; only where a
    bucket's edges lie depends on the length of the run.
    """

    def __init__(
        self, start_ns: int, gauges: tuple[str, ...], counters: tuple[str, ...], num_buckets: int = 120
    ) -> None:
        assert num_buckets >= 2 and num_buckets % 2 == 0, f"{num_buckets} buckets: expected an even number"
        self.start_ns = start_ns
        self.end_ns: int = start_ns
        self.bucket_ns: int = FIRST_BUCKET_NS
        self.num_buckets = num_buckets
        self._gauges, self._counters = gauges, counters
        # In units of value · nanosecond, exact, so that they do not depend on how the samples were grouped.
        self._integrals = np.zeros((len(gauges), num_buckets), dtype=object)
        self._sums = np.zeros((len(counters), num_buckets))

    def add_gauges(self, times_ns: np.ndarray, values: np.ndarray) -> None:
        """Add gauges that had `values[:, i]` from `times_ns[i]` to `times_ns[i + 1]`:
        int64 [n + 1] ascending, and [gauges, n]."""
        self._reach(int(times_ns[-1]))
        first, last = self._bucket_of(int(times_ns[0])), self._bucket_of(int(times_ns[-1]))
        edges = np.clip(self.start_ns + np.arange(first, last + 2) * self.bucket_ns, times_ns[0], times_ns[-1])
        before = np.minimum(np.searchsorted(times_ns, edges, side="right") - 1, len(times_ns) - 2)
        total = np.zeros((len(values), len(edges)), dtype=object)  # the area up to each edge
        for part, shift in ((_high, _SHIFT), (_low, 0)):  # neither sum leaves 64 bits
            areas = np.zeros((len(values), len(times_ns)), dtype=np.int64)
            np.cumsum(values * part(np.diff(times_ns)), axis=1, out=areas[:, 1:])
            at_edges = areas[:, before] + values[:, before] * part(edges - times_ns[before])
            total += at_edges.astype(object) << shift
        self._integrals[:, first : last + 1] += np.diff(total, axis=1)

    def add_counts(self, times_ns: np.ndarray, amounts: np.ndarray) -> None:
        """Add `amounts` [counters, n] at `times_ns` int64 [n]."""
        if not len(times_ns):
            return
        self._reach(int(times_ns.max()))
        buckets = np.clip((times_ns - self.start_ns) // self.bucket_ns, 0, self.num_buckets - 1)
        for total, amount in zip(self._sums, amounts, strict=True):
            total += np.bincount(buckets, weights=amount, minlength=self.num_buckets)

    def read(self) -> dict[str, Any]:
        """Return start and bucket width in ns, and per used bucket the mean of each gauge and the sum
        of each counter."""
        used = max(1, -(-(self.end_ns - self.start_ns) // self.bucket_ns))
        widths = np.full(used, float(self.bucket_ns))
        widths[-1] = max(self.end_ns - self.start_ns - (used - 1) * self.bucket_ns, 1)
        read: dict[str, Any] = {"start_ns": self.start_ns, "bucket_ns": self.bucket_ns, "widths_ns": widths.tolist()}
        for name, integral in zip(self._gauges, self._integrals, strict=True):
            read[name] = (integral[:used].astype(float) / widths).tolist()
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
        self.areas: list[int] = [0] * num_gauges  # value · nanoseconds
        self.maxima: list[int] = [0] * num_gauges
        self.end_ns: int = 0

    def add(self, times_ns: np.ndarray, values: np.ndarray) -> None:
        """Add gauges that had `values[:, i]` from `times_ns[i]` to `times_ns[i + 1]`:
        int64 [n + 1] ascending, and [gauges, n]."""
        widths = np.diff(times_ns)
        lasting = widths > 0  # states of no duration do not count
        self.end_ns = int(times_ns[-1])
        if not lasting.any():
            return
        high, low = _high(widths), _low(widths)  # neither sum leaves 64 bits
        for i, row in enumerate(values):
            self.areas[i] += (int(row.dot(high)) << _SHIFT) + int(row.dot(low))
            self.maxima[i] = max(self.maxima[i], int(row[lasting].max()))


def series(timeline: Timeline | None, capacity: int) -> dict[str, Any]:
    """Return a timeline of running, waiting, held slots, tokens and steps as a summary shows it: a list per name, one
    number per bucket.

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
