"""Lengths of prompts and outputs, drawn by key: the length of request i does not depend on how many others there are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from ...core.draws import normal, uniform
from ...core.errors import ConfigError, Problem
from ...core.prompt import MAX_PROMPT_LENGTH


class LengthDistribution(ABC):
    """The port: token counts for requests by number."""

    @abstractmethod
    def draw(self, seed: int, purpose: int, index: np.ndarray) -> np.ndarray:
        """Return the lengths of the requests `index` (uint64 [n]): int64 [n], each at least 1."""

    @property
    @abstractmethod
    def moments(self) -> tuple[float, float]:
        """Mean and standard deviation in tokens, as asked for: before any clipping."""


@dataclass(frozen=True, slots=True)
class FixedLength(LengthDistribution):
    """A constant length."""

    tokens: int

    def __post_init__(self) -> None:
        _check_range("tokens", self.tokens, self.tokens)

    def draw(self, seed: int, purpose: int, index: np.ndarray) -> np.ndarray:
        return np.full(len(index), self.tokens, np.int64)

    @property
    def moments(self) -> tuple[float, float]:
        return float(self.tokens), 0.0


@dataclass(frozen=True, slots=True)
class UniformLength(LengthDistribution):
    """Every length from `low` to `high`, both included, equally often."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _check_range("low … high", self.low, self.high)

    def draw(self, seed: int, purpose: int, index: np.ndarray) -> np.ndarray:
        return self.low + (uniform(seed, purpose, index, 0) * (self.high - self.low + 1)).astype(np.int64)

    @property
    def moments(self) -> tuple[float, float]:
        return (self.low + self.high) / 2, (((self.high - self.low + 1) ** 2 - 1) / 12) ** 0.5


@dataclass(frozen=True, slots=True)
class LognormalLength(LengthDistribution):
    """Lognormal of a given mean and standard deviation of the logarithm, rounded and clipped to low … high.

    `mean` is the mean before clipping; the median is mean · exp(−sigma² / 2).
    """

    mean: float
    sigma: float
    low: int = 1
    high: int = 131072

    def __post_init__(self) -> None:
        problems = []
        if not 0 < self.mean < float("inf"):
            problems.append(Problem("mean", f"{self.mean}: expected a positive number of tokens"))
        if not 0 <= self.sigma <= 10:
            problems.append(Problem("sigma", f"{self.sigma}: expected 0 ... 10"))
        if problems:
            raise ConfigError("<length>", problems)
        _check_range("low … high", self.low, self.high)

    def draw(self, seed: int, purpose: int, index: np.ndarray) -> np.ndarray:
        median = self.mean * np.exp(-0.5 * self.sigma**2)
        lengths = median * np.exp(self.sigma * normal(seed, purpose, index, 0))
        return np.rint(np.clip(lengths, self.low, self.high)).astype(np.int64)

    @property
    def moments(self) -> tuple[float, float]:
        return self.mean, self.mean * float(np.expm1(self.sigma**2)) ** 0.5


@dataclass(frozen=True, slots=True)
class EmpiricalLength(LengthDistribution):
    """Recorded lengths with weights (counts, say)."""

    values: tuple[int, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        problems = []
        if not self.values or len(self.values) != len(self.weights):
            message = f"{len(self.weights)} weights for {len(self.values)} values: expected one each, at least one"
            problems.append(Problem("weights", message))
        weights = np.array(self.weights, float)
        if not (np.isfinite(weights).all() and (weights >= 0).all() and weights.any()):
            problems.append(Problem("weights", "expected finite weights, none negative and one positive"))
        if problems:
            raise ConfigError("<length>", problems)
        _check_range("values", min(self.values), max(self.values))

    def draw(self, seed: int, purpose: int, index: np.ndarray) -> np.ndarray:
        edges = np.cumsum(np.array(self.weights, float))
        where = np.searchsorted(edges, uniform(seed, purpose, index, 0) * edges[-1], side="right")
        return np.array(self.values, np.int64)[np.minimum(where, len(self.values) - 1)]

    @property
    def moments(self) -> tuple[float, float]:
        values = np.array(self.values, float)
        mean = float(np.average(values, weights=self.weights))
        return mean, float(np.average((values - mean) ** 2, weights=self.weights)) ** 0.5


def _check_range(key: str, low: int, high: int) -> None:
    if not (isinstance(low, int) and isinstance(high, int) and 1 <= low <= high <= MAX_PROMPT_LENGTH):
        found = str(low) if low == high else f"{low} … {high}"
        raise ConfigError("<length>", [Problem(key, f"{found}: expected whole numbers, 1 ... {MAX_PROMPT_LENGTH}")])
