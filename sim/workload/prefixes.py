"""Shared prefixes: groups of requests that begin with the same system prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...core.draws import Purpose, hash64, uniform
from ...core.errors import ConfigError, Problem
from ...core.prompt import Prompt
from .lengths import LengthDistribution

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

    def __post_init__(self) -> None:
        problems = []
        if not 1 <= self.num_groups <= 1_000_000:
            problems.append(Problem("num_groups", f"{self.num_groups}: expected 1 ... 1000000"))
        if not 0.0 <= self.popularity <= 10.0:
            problems.append(Problem("popularity", f"{self.popularity}: expected an exponent, 0 ... 10"))
        if problems:
            raise ConfigError("<prefixes>", problems)

    def groups(self, seed: int, index: np.ndarray) -> np.ndarray:
        """Return the group of each request: int64 [n], 0 … num_groups − 1."""
        edges = np.cumsum(np.arange(1, self.num_groups + 1, dtype=np.float64) ** -self.popularity)
        coins = uniform(seed, Purpose.PREFIX, index, 0) * edges[-1]
        return np.minimum(np.searchsorted(edges, coins, side="right"), self.num_groups - 1)

    def prompts(self, seed: int, index: np.ndarray, prompt_lens: np.ndarray) -> list[Prompt]:
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


def segment_id(seed: int, number: np.ndarray, lane: int) -> np.ndarray:
    """Return the hash id of a piece of text: uint64 [n], below 2**63. Lanes keep kinds of pieces apart."""
    return hash64(seed, Purpose.PREFIX, number, 0, lane) >> np.uint64(1)
