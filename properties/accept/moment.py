"""One moment of an acceptance trial: the operation, the round that it was about, what the component answered."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .contract import AcceptCapabilities, AcceptConfig
from .model import AcceptModel, Round


@dataclass(slots=True)
class Answer:
    """What verification answered, and what became of KV and outputs behind it.

    paths        the nodes of each live row's lanes up to its accept length, None for a row where that makes no sense
    is_path      whether they are a path from the root
    """

    accept_index: tuple[int, ...]
    accept_lens: tuple[int, ...]
    predict: tuple[int, ...]
    bonus: tuple[int, ...]
    width: int = 0
    is_formed: bool = False  # lengths fit each other; if not, nothing else of it is looked at
    paths: list[list[int]] = field(default_factory=list)
    is_path: list[bool] = field(default_factory=list)
    before: np.ndarray | None = None  # pools int64 [layers, slots] before the moves
    after: np.ndarray | None = None
    moves: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # (sources, targets)
    given: dict[str, np.ndarray] = field(default_factory=dict)  # outputs before compaction
    compacted: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Shares:
    """What many rows emitted, as (share, probability): each token in first place, each accepted child with an accepted grandchild.

    A share may be off by the tolerance, which is known beforehand: the rows' coins lie on a grid.
    """

    first: dict[int, tuple[float, float]]
    second: dict[tuple[int, int], tuple[float, float]]
    first_tolerance: float
    second_tolerance: float
    impossible: tuple[int, int] | None  # (row, token) of something emitted that has probability 0


@dataclass(slots=True)
class Moment:
    """One operation and what came of it."""

    config: AcceptConfig
    capabilities: AcceptCapabilities
    model: AcceptModel
    operation: object = "make"
    round: Round | None = None
    answer: Answer | None = None
    wanted: list[list[int]] | None = None  # [bs][nd]; the target's own choice, −1 where it has none; greedy rounds only
    probs: np.ndarray | None = None  # float64 [bs · nd, V]; sampled rounds only
    failing: list[list[bool]] | None = None  # [bs][nd]; whether the target gives no numbers
    shares: Shares | None = None
    wrong_kv: tuple[int, int, int] | None = None  # (row, position, layer)

    def live(self) -> range:
        """The numbers of the round's live rows, none if the answer is unusable."""
        if self.answer is None or not self.answer.is_formed:
            return range(0)
        return range(len(self.round.rows))

    def row_of(self, number: int) -> int:
        return self.round.rows[number]

    def fails(self, number: int) -> bool:
        """Whether the walk of a live row ends where the target gave no numbers."""
        path = self.answer.paths[number]
        return bool(self.failing and self.answer.is_path[number] and self.failing[number][path[-1]])
