"""One moment of a step controller's trial: the operation, what it was told, and all that it shows before and after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .contract import StepsCapabilities, StepsConfig


class Shown(NamedTuple):
    """All that a controller shows; None where it declares no such capability. Steps and averages are one per batch size looked at."""

    steps: tuple[int, ...]
    state: object = None
    averages: tuple[float, ...] | None = None
    counted: tuple[int, ...] | None = None
    graphs: tuple[object, ...] | None = None  # of every batch size and each of its candidates


class Told(NamedTuple):
    """One verify result as it was told; `current` are the steps that the controller would have chosen at that moment."""

    batch_size: int
    executed: int
    current: int
    correct: tuple[float, ...]


class Stretch(NamedTuple):
    """A stretch of rounds with immediate results, and the steps of each. `rate` and `best_rate` are tokens per second."""

    process: str
    batch_size: int
    candidates: tuple[int, ...]
    history: tuple[int, ...]
    rates: dict[int, float]
    rate: float

    @property
    def switches(self) -> list[int]:
        """The rounds whose steps differ from the round before."""
        h = self.history
        return [at for at in range(1, len(h)) if h[at] != h[at - 1]]

    @property
    def settled(self) -> int:
        """The steps of most rounds in the last quarter, the fewest of several."""
        last = self.history[-max(len(self.history) // 4, 1) :]
        return max(sorted(set(last)), key=last.count)


class Offered(NamedTuple):
    """All drafts were accepted for `rounds` rounds; whether it drafted in the end, and how many rounds it had."""

    batch_size: int
    rounds: int
    drafts: bool
    limit: int


class Built(NamedTuple):
    """What `attach` did: whether a build failed, and whether the controller said so."""

    failed: bool
    refusal: str | None


@dataclass(slots=True)
class Moment:
    """One operation and what came of it. `choices` are (batch size, steps) of every round that was launched."""

    config: StepsConfig
    capabilities: StepsCapabilities
    batch_sizes: tuple[int, ...]
    candidates: tuple[tuple[int, ...], ...]  # those that each of these batch sizes may have
    operation: object = "make"
    before: Shown | None = None
    after: Shown | None = None
    refusal: str | None = None
    told: Told | None = None
    garbage: object = None  # the value that no round can have produced
    added: tuple[int, int, int, int] = (0, 0, 0, 0)  # what `counted()` must have grown by
    same_slot: tuple[bool, ...] = ()  # which of the batch sizes share the range of what was told
    alpha: float = 0.0
    stray_choice: tuple[int, int, tuple[int, ...]] | None = None  # (batch size, steps, candidates) of a round
    stretch: Stretch | None = None
    update_interval: int = 1
    bounded: bool = False  # whether ten switches are the limit, and not one per interval
    offered: Offered | None = None
    built: Built | None = None
    built_keys: tuple[frozenset[tuple[int, int, int]], frozenset[tuple[int, int, int]]] | None = (
        None  # and reachable ones
    )
    graphs: tuple[object, ...] | None = None  # those that must be found
    reload: str = ""  # "valid" or how it is damaged
    unfinite: str = ""  # a number of the state that is not finite
