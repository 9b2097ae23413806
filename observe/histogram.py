"""A streaming histogram with logarithmic buckets: any quantile of non-negative integers in fixed memory.

The buckets [g^i, g^(i+1)) with g = (1 + α) / (1 − α) are answered by 2·g^(i+1) / (1 + g), which is off by at most the share α of the
true value (Masson, Rim, Lee: "DDSketch", VLDB 2019). Count, mean, standard deviation, minimum and maximum are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
        self.count = 0
        self.total = 0
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
        if rank == self.count - 1:
            return float(self.maximum)
        bucket = int(np.searchsorted(sums, rank - self._zeros, side="right"))
        value = 2.0 * np.exp((bucket + 1) * _LOG_GAMMA) / (1.0 + _GAMMA)
        return float(min(max(value, self.minimum), self.maximum))


def _sum_of_squares(values: np.ndarray, high: int) -> int:
    """Return Σ v² of int64 values in 0 … `high`, exactly."""
    if high >= _ROOT:
        large = values >= _ROOT
        return sum(value * value for value in values[large].tolist()) + _sum_of_squares(values[~large], 0)
    squares = values * values
    return (int((squares >> 32).sum()) << 32) + int((squares & 0xFFFFFFFF).sum())


def added_counts(counts: np.ndarray, more: np.ndarray) -> np.ndarray:
    """Return the sum of two histograms of different lengths."""
    if len(more) > len(counts):
        counts, more = more.astype(np.int64), counts
    counts[: len(more)] += more
    return counts
