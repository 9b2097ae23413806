"""Lengths of prompts and outputs, drawn by key: the length of request i does not depend on the number of requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...core.draws import Purpose, hash64, normal, uniform
from ...core.prompt import Prompt


class LengthDistribution(ABC):
    """The port: token counts for requests by number."""

    @abstractmethod
    def draw(self, seed: int, purpose: int, index: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the lengths of the requests `index` (uint64 [n]): int64 [n], each at least 1."""

    @property
    @abstractmethod
    def moments(self) -> tuple[float, float]:
        """Configured mean and standard deviation in tokens, before any clipping."""


@dataclass(frozen=True, slots=True)
class FixedLength(LengthDistribution):
    """A constant length."""

    tokens: int

    def draw(self, seed: int, purpose: int, index: NDArray[np.uint64]) -> NDArray[np.int64]:
        return np.full(len(index), self.tokens, np.int64)

    @property
    def moments(self) -> tuple[float, float]:
        return float(self.tokens), 0.0


@dataclass(frozen=True, slots=True)
class UniformLength(LengthDistribution):
    """Every length from `low` to `high`, both included, equally often."""

    low: int
    high: int

    def draw(self, seed: int, purpose: int, index: NDArray[np.uint64]) -> NDArray[np.int64]:
        coins = np.asarray(uniform(seed, purpose, index, 0), np.float64)
        return self.low + (coins * (self.high - self.low + 1)).astype(np.int64)

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

    def draw(self, seed: int, purpose: int, index: NDArray[np.uint64]) -> NDArray[np.int64]:
        median = self.mean * np.exp(-0.5 * self.sigma**2)
        deviations = np.asarray(normal(seed, purpose, index, 0), np.float64)
        lengths = median * np.exp(self.sigma * deviations)
        drawn: NDArray[np.int64] = np.rint(np.clip(lengths, self.low, self.high)).astype(np.int64)
        return drawn

    @property
    def moments(self) -> tuple[float, float]:
        return self.mean, self.mean * float(np.expm1(self.sigma**2)) ** 0.5


@dataclass(frozen=True, slots=True)
class EmpiricalLength(LengthDistribution):
    """Recorded lengths with weights (counts, say)."""

    values: tuple[int, ...]
    weights: tuple[float, ...]

    def draw(self, seed: int, purpose: int, index: NDArray[np.uint64]) -> NDArray[np.int64]:
        edges = np.cumsum(np.array(self.weights, float))
        where = np.searchsorted(edges, uniform(seed, purpose, index, 0) * edges[-1], side="right")
        drawn: NDArray[np.int64] = np.array(self.values, np.int64)[np.minimum(where, len(self.values) - 1)]
        return drawn

    @property
    def moments(self) -> tuple[float, float]:
        values = np.array(self.values, float)
        mean = float(np.average(values, weights=self.weights))
        return mean, float(np.average((values - mean) ** 2, weights=self.weights)) ** 0.5


_GROUP_LANE, _UNIQUE_LANE, _TURN_LANE = 1, 2, 3


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """`num_groups` system prompts, each of its own length; a request belongs to one group and continues on its own.

    The share of requests of the i-th group is proportional to 1 / i^`popularity` (Zipf's law; 0: all alike). A
    request's prompt length counts the system prompt too: the rest is unique, at least one token, so a short prompt
    has a cut prefix.
    """

    num_groups: int
    prefix_len: LengthDistribution
    popularity: float = 0.0

    def groups(self, seed: int, index: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the group of each request: int64 [n], 0 … num_groups − 1."""
        edges = np.cumsum(np.arange(1, self.num_groups + 1, dtype=np.float64) ** -self.popularity)
        coins = np.asarray(uniform(seed, Purpose.PREFIX, index, 0), np.float64) * edges[-1]
        groups: NDArray[np.int64] = np.minimum(np.searchsorted(edges, coins, side="right"), self.num_groups - 1)
        return groups

    def prompts(self, seed: int, index: NDArray[np.uint64], prompt_lens: NDArray[np.int64]) -> list[Prompt]:
        """Return one prompt per request (uint64 [n]) of the given total lengths (int64 [n], at least 1)."""
        groups = self.groups(seed, index)
        prefix_lens = self.prefix_len.draw(seed, Purpose.PREFIX, groups.astype(np.uint64) + np.uint64(1 << 62))
        prefix_lens = np.minimum(prefix_lens, prompt_lens - 1)
        shared = segment_id(seed, groups.astype(np.uint64), _GROUP_LANE)
        unique = segment_id(seed, index, _UNIQUE_LANE)
        rest = prompt_lens - prefix_lens
        columns = (shared.tolist(), prefix_lens.tolist(), unique.tolist(), rest.tolist())
        return [
            Prompt.of_segments(((group, prefix), (own, tail)) if prefix else ((own, tail),))
            for group, prefix, own, tail in zip(*columns, strict=True)
        ]


def segment_id(seed: int, number: NDArray[np.uint64], lane: int) -> NDArray[np.uint64]:
    """Return the hash id of a piece of text: uint64 [n], below 2**63. Lanes keep kinds of pieces apart."""
    return np.asarray(hash64(seed, Purpose.PREFIX, number, 0, lane), np.uint64) >> np.uint64(1)
