"""The common parts of both sides of a handoff: counters, deadlines, and the actions and reports for the driver."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from ..contract.request import FinishedRequest, FinishReason
from ..errors import ConfigError, Problem
from ..scheduler.engine import Engine
from .life import TransferCounts, TransferState
from .messages import Message, Page, PageFormat, TransferKey
from .transfer import Incoming, Outgoing

SECOND_NS = 1_000_000_000

OwnerT = TypeVar("OwnerT", bound=Hashable)


@dataclass(frozen=True, slots=True)
class HandoffTiming:
    """Durations in nanoseconds.

    ```
    prefill   |── lease ──| retry |── lease ──| cancel |── fence ──| pages free, with or without an answer
    decode    |──────────── hold ────────────────────| cancel |── fence ──| slots free
    ```
    """

    lease_ns: int = 2 * SECOND_NS  # prefill side: an attempt without a message is given up
    # decode side: reserved slots without a message are given up; longer than a lease, or no retry arrives
    hold_ns: int = 5 * SECOND_NS
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


class Deadlines(Generic[OwnerT]):
    """One deadline per owner; setting it again replaces it. Equal deadlines come in the order in which they were set.

    Most are put off many times before they are due: an owner's entry in the heap is moved only when it comes to the
    top.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, OwnerT]] = []
        self._queued: dict[OwnerT, tuple[int, int]] = {}  # the one entry of an owner that is not out of date
        self._current: dict[OwnerT, tuple[int, int]] = {}
        self._count = 0

    def set(self, owner: OwnerT, at_ns: int) -> None:
        self._count += 1
        self._current[owner] = (at_ns, self._count)
        queued = self._queued.get(owner)
        if queued is None or at_ns < queued[0]:
            self._push(owner)

    def _push(self, owner: OwnerT) -> None:
        self._queued[owner] = self._current[owner]
        heapq.heappush(self._heap, (*self._current[owner], owner))

    def clear(self, owner: OwnerT) -> None:
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

    def pop_due(self, now_ns: int) -> OwnerT | None:
        """Clear the earliest deadline that has passed and return its owner; None if none has."""
        due = self.next_ns
        if due is None or due > now_ns:
            return None
        owner = heapq.heappop(self._heap)[2]
        del self._current[owner], self._queued[owner]
        return owner


@dataclass(frozen=True, slots=True)
class Send:
    """Give `message` to the link to `peer`."""

    peer: str
    message: Message


@dataclass(frozen=True, slots=True, eq=False)
class SendPages:
    """Read these pages of KV, in both pools, send a `Page` for each, and call `PrefillSide.pages_sent` once their bytes
    are read out.

    Until then the slots do not change.
    """

    peer: str
    key: TransferKey
    epoch: int
    indices: tuple[int, ...]
    slots: np.ndarray  # int32 [len(indices), page_size]


@dataclass(frozen=True, slots=True, eq=False)
class WritePage:
    """Write a verified page to these slots of both pools, before the next step is launched."""

    page: Page
    row: int
    row_epoch: int  # identifies the request that will own the KV
    slots: np.ndarray  # int32 [page_size]


@dataclass(frozen=True, slots=True)
class TransferOutcome:
    """The end of a transfer on one side. This side holds no row or page for it any more. Its request may have ended
    before."""

    request_id: str
    state: TransferState  # COMPLETED, FAILED or CANCELLED
    message: str = ""


TransferT = TypeVar("TransferT", Outgoing, Incoming)
PagesT = TypeVar("PagesT", SendPages, WritePage)


class HandoffSide(Generic[TransferT, PagesT]):
    """The driver's view of a side, and the base of `PrefillSide` and `DecodeSide`. A side acts by messages and by what
    it does with pages."""

    _transfers: dict[Any, TransferT]

    def __init__(self, engine: Engine, page_format: PageFormat, timing: HandoffTiming | None) -> None:
        assert page_format.page_size == engine.config.page_size, "the pages that travel are the engine's pages"
        self.engine = engine
        self.page_format = page_format
        self.timing: HandoffTiming = timing if timing is not None else HandoffTiming()
        self.counts: TransferCounts = TransferCounts()
        self._deadlines: Deadlines[TransferT] = Deadlines()
        self._renewals: Deadlines[TransferT] = Deadlines()
        self._actions: list[Send | PagesT] = []
        self._finished: list[FinishedRequest] = []
        self._outcomes: list[TransferOutcome] = []
        self._replan = False

    @property
    def num_in_flight(self) -> int:
        """Open transfers, those that only wait to be released included."""
        return len(self._transfers)

    @property
    def next_deadline_ns(self) -> int | None:
        """When `tick` has something to do; None if nothing is due."""
        return min((at_ns for at_ns in self._next_times_ns() if at_ns is not None), default=None)

    def _next_times_ns(self) -> tuple[int | None, ...]:
        return self._deadlines.next_ns, self._renewals.next_ns

    def take_actions(self) -> list[Send | PagesT]:
        """Return the actions to carry out now, in this order."""
        actions, self._actions = self._actions, []
        return actions

    def take_finished(self) -> list[FinishedRequest]:
        """Return the requests that have ended here, except those that `Engine.commit` and `abort` have reported."""
        finished, self._finished = self._finished, []
        return finished

    def take_outcomes(self) -> list[TransferOutcome]:
        """Return the transfers that have ended."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def take_replan(self) -> bool:
        """Return whether the running multi-step should be stopped, since a new plan could differ."""
        replan, self._replan = self._replan, False
        return replan

    def check(self) -> None:
        """Recount; raises InvariantViolation with the id of the broken invariant."""
        self.counts.check(self.num_in_flight)

    def _say(self, peer: str, message: Message) -> None:
        self._actions.append(Send(peer, message))

    def _close(self, transfer: TransferT, end: TransferState, now_ns: int) -> None:
        """Release the row of a transfer that has ended, if it has one, forget its deadlines and note its outcome."""
        self._deadlines.clear(transfer)
        self._renewals.clear(transfer)
        if transfer.row:
            self.engine.transfers.release_hold(transfer.row, now_ns)
        self.counts.end(end)
        self._outcomes.append(TransferOutcome(transfer.request_id, end, transfer.message))

    def _fail_engine_request(
        self, request_id: str, why: str, now_ns: int, reason: FinishReason = FinishReason.ERROR
    ) -> None:
        finished = self.engine.transfers.end_transfer(request_id, now_ns, why, reason)
        if finished is not None:
            self._finished.append(finished)

    def _abort_engine_request(self, request_id: str, now_ns: int) -> None:
        outcome = self.engine.abort(request_id, now_ns)
        if outcome.finished is not None:
            self._finished.append(outcome.finished)
