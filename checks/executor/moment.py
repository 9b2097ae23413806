"""One moment of an executor's trial: what it keeps, what it has just answered, and what became of the two engines."""

from __future__ import annotations

from dataclasses import dataclass

from .arrays import FoundArray
from .contract import ExecutorCapabilities, ExecutorConfig


@dataclass(slots=True)
class Moment:
    """None where an operation has nothing of the kind, or the executor does not show it."""

    config: ExecutorConfig
    capabilities: ExecutorCapabilities
    needs_hidden_states: bool
    hidden_sizes: tuple[int, ...] = ()
    relay: tuple[tuple[str, tuple[int, ...]], ...] | None = None
    hidden_bytes: int | None = None
    kept: list[FoundArray] | None = None  # arrays of a hidden state's width that it keeps
    in_step: list[FoundArray] | None = None  # … that a launched step carries
    in_result: list[FoundArray] | None = None  # … that a result carries, though nobody asked to see them
    merged: tuple[int, int] | None = None  # rows of the two batches, −1 for None
    merge: int | str | None = None  # rows of both together, −1 for None, or how it was refused
    sent: tuple[int, ...] | None = None  # of requests that were handed over: 1 with a hidden state, 0 with None
    served: int = 0  # how many of them the draft input is for
    received: tuple[int, ...] | None = None  # the shape of its hidden states
    difference: tuple[str, str] | None = None
    num_events: int = 0

    def forget(self) -> None:
        """The next operation begins."""
        self.in_step = self.in_result = self.merged = self.merge = self.sent = self.received = None
