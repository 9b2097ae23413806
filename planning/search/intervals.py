"""Means over seeds, with their confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and half the width of its interval (Student's t); infinite for a single value."""

    mean: float
    half_width: float

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width


def estimate(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Return the mean of independent values, one at least, with its interval.

    For the difference of two settings give the differences of their values seed by seed: with common draws these vary
    much less.
    """
    from scipy.special import stdtrit

    count = len(values)
    if count < 2:
        return Estimate(float(values[0]), math.inf)
    spread = float(np.std(values, ddof=1)) / math.sqrt(count)
    return Estimate(float(np.mean(values)), float(stdtrit(count - 1, 0.5 + confidence / 2)) * spread)
