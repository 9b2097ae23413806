"""The contract of simulated acceptance: how many drafts would be accepted where a round starts, without a model that
says so.

Requests are known by 64-bit keys, positions count output tokens. Every answer is a function of (seed, request,
position).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ...properties.harness.contract import Capabilities, needs
from ...properties.harness.letters import Choices

CONDITIONALS = ((70,), (50, 80), (90, 60, 30), (80, 80, 80, 80), (30, 100, 50))
RECORDINGS = (
    ((2, 0, 1),),
    ((0, 3, 1, 2), (1, 1, 0), (5,)),
    ((1, 2), (2, 1), (0, 0, 4, 4, 1), (3, 0, 1), (2, 2, 2, 0)),
)
SHIFTS, WEIGHTS = (-1.5, 1.0, 0.0), (1.0, 2.0, 5.0)
"""What stretches shift the quality by, and how often each."""


@dataclass(frozen=True)
class ProcessConfig:
    """What `make(config)` builds: a process of this kind. What the kind does not name is not looked at.

    "gaussian": a run reaches depth d where a latent quality, standard normal, exceeds the threshold whose upper tail is
    the product of the first d conditional probabilities; the last one goes on. The quality's variance has three parts.
    One is a single number per request. One is a field that turns by a quarter from knot to knot, `correlation_len`
    positions apart. The rest is drawn anew at every position. Then the drift is added per 1,000 positions, and one of
    SHIFTS per stretch of `stretch_len` positions of a request, drawn by WEIGHTS. "fixed": runs of a mean, of its two
    neighbouring integers. "recorded": each request replays one of the recordings from its start, again and again.
    """

    kind: str = "gaussian"
    seed: int = 0
    percent: tuple[int, ...] = (70,)  # conditional probability by depth
    request_percent: int = 0
    field_percent: int = 0
    correlation_len: int = 8
    drift_tenths: int = 0
    stretch_len: int = 0  # 0: no stretches
    mean_percent: int = 140
    recording: int = 0  # of RECORDINGS
    max_depth: int = 8

    @classmethod
    def draw(cls, choose: Choices, has: ProcessCapabilities) -> ProcessConfig:
        request_percent, field_percent = choose(((0, 0), (50, 0), (0, 60), (30, 40), (0, 100), (100, 0)))
        return cls(
            kind=choose(("gaussian", "gaussian", "gaussian", "gaussian", "fixed", "recorded", "recorded")),
            seed=choose((0, 1, 7)),
            percent=choose(CONDITIONALS),
            request_percent=request_percent,
            field_percent=field_percent,
            correlation_len=choose((8, 1, 5, 16)),
            drift_tenths=choose((0, 0, 4, -6)),
            stretch_len=choose((0, 0, 0, 20)),
            mean_percent=choose((140, 0, 30, 200, 375)),
            recording=choose(range(len(RECORDINGS))),
        )

    @property
    def conditional(self) -> tuple[float, ...]:
        return tuple(percent / 100 for percent in self.percent)

    @property
    def request_share(self) -> float:
        return self.request_percent / 100

    @property
    def field_share(self) -> float:
        return self.field_percent / 100

    @property
    def drift(self) -> float:
        return self.drift_tenths / 10

    @property
    def mean(self) -> float:
        return self.mean_percent / 100

    @property
    def recorded(self) -> tuple[tuple[int, ...], ...]:
        return RECORDINGS[self.recording]


@dataclass(frozen=True, slots=True)
class ProcessCapabilities(Capabilities):
    """What a component declares; each flag adds a method that stands beside the process."""

    trees: bool = False  # `tree_survival(…)`
    days: bool = False  # `day_shift(…)`


class Process(Protocol):
    """Simulated acceptance. Arguments are NumPy arrays; answers are integers of the broadcast shape."""

    def longest_run(self, requests: np.ndarray, positions: np.ndarray, shifts: np.ndarray) -> np.ndarray:
        """Return how many drafts at most are accepted by a round of each request uint64 at each position int64, 0 …
        max_depth. `shifts` float64 are added to the quality."""

    def windows(self, requests: np.ndarray, starts: np.ndarray, width: int) -> np.ndarray:
        """Return the longest runs at `width` positions from each start: [n, width]."""

    def accept_lens(self, requests: np.ndarray, starts: np.ndarray, steps: int, rounds: int) -> np.ndarray:
        """Return what successive rounds of `steps` steps emit, [rounds, n]: the accepted drafts and one more. The next
        one starts behind that."""

    def to_end(self, requests: np.ndarray, lengths: np.ndarray, steps: int, width: int) -> np.ndarray:
        """Return the same for all rounds from position 0 on that start before the request's length, at most `width`;
        then 0."""

    @needs("trees")
    def tree_survival(self, topk: int, steps: int, num_nodes: int, rank_ratio: float) -> np.ndarray:
        """Return the probability that the accepted path of a tree reaches depth 1 … steps, float64, at shift 0 and
        averaged over positions.

        The target's token is the draft's j-th choice at depth d with probability p · (rank_ratio · (1 − p))^(j−1), p
        the conditional acceptance there. The tree is the one that beams of `topk` and the best `num_nodes` − 1 nodes by
        these probabilities give."""

    @needs("days")
    def day_shift(self, amplitude: float, best_hour: float, hour: float) -> float:
        """Return the shift at an hour of the day: a wave of 24 hours that is greatest at the best hour."""
