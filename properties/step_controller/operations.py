"""What is done to a step controller. `runs` say how many drafts of each row would be accepted at most; with S steps, min(run, S) are."""

from __future__ import annotations

from dataclasses import dataclass

from ..harness.operation import Operation


@dataclass(frozen=True, slots=True)
class Round(Operation):
    """A round is launched; its result is on its way."""

    tag = "round"
    batch_size: int
    runs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Deliver(Operation):
    """The oldest result arrives, without its last `gone` rows, which have finished meanwhile."""

    tag = "deliver"
    gone: int


@dataclass(frozen=True, slots=True)
class Idle(Operation):
    """A result without rows."""

    tag = "idle"
    batch_size: int


@dataclass(frozen=True, slots=True)
class Observe(Operation):
    """A result of a round with these steps, whatever the current ones are."""

    tag = "observe"
    batch_size: int
    steps: int
    runs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Garbage(Operation):
    """A result of the current steps, with one value that no round can have produced."""

    tag = "garbage"
    batch_size: int
    kind: str


@dataclass(frozen=True, slots=True)
class Repeat(Operation):
    """So many rounds of one kind, each result at once."""

    tag = "repeat"
    batch_size: int
    runs: tuple[int, ...]
    rounds: int


@dataclass(frozen=True, slots=True)
class Phase(Operation):
    """A long stretch of rounds with one stationary acceptance process, each result at once."""

    tag = "phase"
    process: str
    batch_size: int


@dataclass(frozen=True, slots=True)
class Offer(Operation):
    """Every draft is accepted, until the controller drafts at all."""

    tag = "offer"
    batch_size: int


@dataclass(frozen=True, slots=True)
class Reload(Operation):
    """The table again, with another interval, and without candidate number `dropped` of every range that has more (−1: with all)."""

    tag = "reload"
    dropped: int
    update_interval: int


@dataclass(frozen=True, slots=True)
class ReloadBroken(Operation):
    """The table, damaged."""

    tag = "reload-broken"
    how: str


OPERATIONS: tuple[type[Operation], ...] = (
    *(Round, Deliver, Idle, Observe, Garbage, Repeat, Phase, Offer),
    *(Reload, ReloadBroken),
)
