"""How long each side of a transfer waits, and when its driver must wake it."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass

from ..errors import ConfigError, Problem

SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class HandoffTiming:
    """Durations in nanoseconds.

    ```
    prefill   |── lease ──| retry |── lease ──| cancel |── fence ──| pages free, with or without an answer
    decode    |──────────── hold ────────────────────| cancel |── fence ──| slots free
    ```
    """

    lease_ns: int = 2 * SECOND_NS  # prefill side: an attempt without a message is given up
    hold_ns: int = (
        5 * SECOND_NS
    )  # decode side: reserved slots without a message are given up; longer than a lease, or no retry arrives
    fence_ns: int = SECOND_NS  # after giving up: for so long a message or a copy may still be on its way
    max_attempts: int = 2  # the first, and one retry

    def __post_init__(self) -> None:
        problems = [
            Problem(name, f"must be at least 1, got {getattr(self, name)}")
            for name in ("lease_ns", "hold_ns", "fence_ns", "max_attempts")
            if getattr(self, name) < 1
        ]
        if not problems and self.hold_ns <= self.lease_ns:
            problems.append(Problem("hold_ns", f"{self.hold_ns} must be more than lease_ns, which is {self.lease_ns}"))
        if problems:
            raise ConfigError("handoff", problems)


class Deadlines:
    """One deadline per owner; setting it again replaces it. Equal deadlines come in the order in which they were set.

    Most are put off many times before they are due: an owner's entry in the heap is moved only when it comes to the top.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Hashable]] = []
        self._queued: dict[Hashable, tuple[int, int]] = {}  # the one entry of an owner that is not out of date
        self._current: dict[Hashable, tuple[int, int]] = {}
        self._count = 0

    def set(self, owner: Hashable, at_ns: int) -> None:
        self._count += 1
        self._current[owner] = (at_ns, self._count)
        queued = self._queued.get(owner)
        if queued is None or at_ns < queued[0]:
            self._push(owner)

    def _push(self, owner: Hashable) -> None:
        self._queued[owner] = self._current[owner]
        heapq.heappush(self._heap, (*self._current[owner], owner))

    def clear(self, owner: Hashable) -> None:
        self._current.pop(owner, None)

    @property
    def next_ns(self) -> int | None:
        """The earliest deadline; None if there is none."""
        while self._heap:
            at_ns, count, owner = self._heap[0]
            if self._current.get(owner) == (at_ns, count):
                return at_ns
            heapq.heappop(self._heap)
            if self._queued.get(owner) == (at_ns, count):
                del self._queued[owner]
                if owner in self._current:
                    self._push(owner)
        return None

    def pop_due(self, now_ns: int) -> Hashable | None:
        """Clear the earliest deadline that has passed and return its owner; None if none has."""
        due = self.next_ns
        if due is None or due > now_ns:
            return None
        owner = heapq.heappop(self._heap)[2]
        del self._current[owner], self._queued[owner]
        return owner
