"""One account of the lives of an engine's requests, kept from its events and from nothing else.

```
event ──► EngineAccount.take ──► changes: which request took which step of its life
                                 requests, in_row, in_flight, num_running, num_waiting: as they are after the event
```

Metrics, traces and the promises under faults ask the account which request has a row, which of them wait, and when each
began and ended. The account shares nothing with the engine's own records, and it checks their order: `TRANSITIONS` says
which step is possible in which state. An impossible one is reported with the number of the event and the request; then
the account goes on from what the event says.

A request that is aborted while it runs is LEAVING until the next commit or loss. Rounds of a running multi-step that
ended before the abort still count for it, and are known only when it is committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from ..errors import InvariantViolation
from .arrays import Int64Array
from .events import (
    Aborted,
    AllocationsDenied,
    Committed,
    EngineStarted,
    Event,
    HandoffMove,
    HandoffMoved,
    Planned,
    Reloaded,
    Resumed,
    RetractionAsked,
    StepsLost,
    Submitted,
)
from .request import FinishedRequest, FinishReason, Request
from .step import Join, Step


class LifeState(IntEnum):
    """Where a request is, as far as events tell."""

    NEW = 0
    WAITING = 1
    RUNNING = 2  # a step has given it a row
    EXPECTED = 3  # decode side: it has a row for KV that is still to arrive
    ARRIVED = 4  # decode side: its KV has arrived, and no step has it yet
    LEAVING = 5
    ENDED = 6


class LifeStep(IntEnum):
    """What an event says about a request."""

    SUBMIT = 0
    REFUSE = 1
    RESERVE = 2
    ARRIVE = 3
    ENTER = 4  # a step gives it a row
    HAND_OVER = 5  # prefill side: its row is held for a transfer
    RETRACT = 6
    LEAVE = 7
    END = 8


S, E = LifeState, LifeStep
TRANSITIONS: dict[LifeState, dict[LifeStep, LifeState]] = {
    S.NEW: {E.SUBMIT: S.WAITING, E.REFUSE: S.ENDED, E.RESERVE: S.EXPECTED},
    S.WAITING: {E.ENTER: S.RUNNING, E.END: S.ENDED},
    S.RUNNING: {E.HAND_OVER: S.RUNNING, E.RETRACT: S.WAITING, E.LEAVE: S.LEAVING, E.END: S.ENDED},
    S.EXPECTED: {E.ARRIVE: S.ARRIVED, E.END: S.ENDED},
    S.ARRIVED: {E.ENTER: S.RUNNING, E.RETRACT: S.WAITING, E.END: S.ENDED},
    S.LEAVING: {E.END: S.ENDED},
    S.ENDED: {},
}
_AFTER = {step: state for steps in TRANSITIONS.values() for step, state in steps.items()}


@dataclass(slots=True, eq=False)
class AccountedRequest:
    """One request on one engine. `num_tokens` counts those that other engines have delivered, too."""

    request: Request
    arrival_ns: int
    state: LifeState = LifeState.NEW
    join: Join | None = None  # the last
    num_tokens: int = 0  # delivered, if the account counts tokens
    repeats_last: bool = False  # its prompt ends with a token that another engine has delivered
    end_ns: int = -1  # when it ended, or was aborted
    reason: FinishReason | None = None
    num_output: int = -1  # as its end says; −1: its end does not say
    column: int = -1  # its place in the columns of who uses the account

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def row(self) -> int:
        """The last row that a step has given it; 0 if none has."""
        return 0 if self.join is None else self.join.row


LifeChange = tuple[LifeStep, AccountedRequest, LifeState]
"""A step of one request's life, the request, and its state before."""


class Run(NamedTuple):
    """Tokens that a committed step gave one request: `place` is of `first_tokens`, or of the rows of `round`."""

    request: AccountedRequest
    round: int  # −1: the token after a prompt
    place: int
    tokens: int


def _refuse(message: str) -> None:
    raise InvariantViolation("ENGINE-02", message)


class EngineAccount:
    """Keeps the account of one engine. `report` gets a sentence about each impossible event; without it the event
    raises InvariantViolation ENGINE-02."""

    def __init__(self, *, counts_tokens: bool = False, report: Callable[[str], None] = _refuse) -> None:
        self.requests: dict[str, AccountedRequest] = {}  # accepted, neither ended nor leaving; in order of arrival
        self.leaving: list[AccountedRequest] = []
        self.in_row: dict[int, AccountedRequest] = {}  # row -> the last request that entered it
        self.in_flight: deque[Planned] = deque()  # the plans of steps that are neither committed nor lost
        self.num_running: int = 0
        self.num_waiting: int = 0  # as the last plan says it, and as requests came and went since
        self.num_events: int = 0
        self.config: Mapping[str, Any] = {}
        self.role: str = ""
        self._counts_tokens = counts_tokens
        self._report = report
        self._column_of_row: Int64Array = np.zeros(64, dtype=np.int64)
        self._seen_rows: np.ndarray | None = None
        self._seen_columns = np.empty(0, dtype=np.int64)
        self._takers: dict[type, Callable[[Any], Sequence[LifeChange]]] = {
            EngineStarted: self._started,
            Submitted: self._submitted,
            Aborted: self._aborted,
            Planned: self._planned,
            Committed: self._committed,
            StepsLost: self._lost,
            Resumed: self._resumed,
            RetractionAsked: _tells_nothing,
            AllocationsDenied: _tells_nothing,
            Reloaded: _tells_nothing,
            HandoffMoved: self._moved,
        }

    def take(self, event: Event) -> Sequence[LifeChange]:
        """Take the next event of the engine. Returns what it changed, in order."""
        self.num_events += 1
        return self._takers[type(event)](event)

    def runs(self, event: Committed) -> Iterator[Run]:
        """Yield the tokens of a commit by request, round after round. Call it before `take` with this event."""
        for place, request_id in enumerate(event.first_tokens):
            if request_id in self.requests:
                yield Run(self.requests[request_id], -1, place, 1)
            else:
                self._report_unknown(request_id, "have a token")
        if event.kept is not None:
            assert event.step.decode is not None, "only a decode keeps tokens"
            rows = event.step.decode.rows.tolist()
            for number, kept in enumerate(event.kept):
                for place in np.flatnonzero(kept).tolist():
                    request = self._owner(rows[place])
                    if request is not None:
                        yield Run(request, number, place, int(kept[place]))

    def columns_of(self, rows: np.ndarray) -> Int64Array:
        """Return `column` of the requests in `rows`, int [n]. Steps share one array of rows while the batch stays the
        same."""
        if rows is not self._seen_rows:
            self._seen_rows, self._seen_columns = rows, self._column_of_row[rows.astype(np.intp)]
        return self._seen_columns

    def close(self, request_id: str) -> AccountedRequest | None:
        """End a request that is leaving, for a user who knows that it has ended. Returns None if none of that id is."""
        for request in self.leaving:
            if request.request_id == request_id:
                self.leaving.remove(request)
                self._change(request, LifeStep.END)
                return request
        return None

    def end_leaving(self) -> list[LifeChange]:
        """End the requests that are leaving: no step in flight gives them tokens any more."""
        leaving, self.leaving = self.leaving, []
        return [self._change(request, LifeStep.END) for request in leaving]

    # -- events -------------------------------------------------------------------------------------------------------

    def _started(self, event: EngineStarted) -> Sequence[LifeChange]:
        self.config, self.role = event.config, event.config.get("role", "")
        return ()

    def _submitted(self, event: Submitted) -> Sequence[LifeChange]:
        request = AccountedRequest(event.request, event.now_ns, num_tokens=event.request.shown.length)
        if event.refusal:
            request.end_ns = event.now_ns
            return [self._change(request, LifeStep.REFUSE)]
        request.repeats_last = request.num_tokens > 0
        self._add(request)
        self.num_waiting += 1
        return [self._change(request, LifeStep.SUBMIT)]

    def _aborted(self, event: Aborted) -> Sequence[LifeChange]:
        request = self.requests.pop(event.request_id, None)
        if request is None:
            return ()  # it may be aborted at any time
        request.end_ns, request.reason = event.now_ns, FinishReason.ABORT
        # The steps of a prefill engine are no multi-steps, and without a step in flight no commit will come.
        if request.state is LifeState.RUNNING and self.in_flight and self.role != "prefill":
            self.leaving.append(request)
            return [self._change(request, LifeStep.LEAVE)]
        self.num_waiting -= request.state is LifeState.WAITING
        return [self._change(request, LifeStep.END)]

    def _planned(self, event: Planned) -> Sequence[LifeChange]:
        step, self.num_waiting = event.step, event.num_waiting
        if step is None:
            return self._retract(event.retracted)
        self.in_flight.append(event)
        if not (step.joins or event.retracted):
            return ()  # as most plans
        return self._retract(event.retracted) + [self._enter(join, event.now_ns) for join in step.joins]

    def _enter(self, join: Join, now_ns: int) -> LifeChange:
        request = self.requests.get(join.request.request_id)
        if request is None:
            request = AccountedRequest(join.request, now_ns)
            self._add(request)
        request.join = join
        self.in_row[join.row] = request
        if join.row >= len(self._column_of_row):
            more = np.zeros(join.row + 1, dtype=np.int64)
            self._column_of_row = np.concatenate([self._column_of_row, more])
        self._column_of_row[join.row] = request.column
        return self._change(request, LifeStep.ENTER)

    def _committed(self, event: Committed) -> Sequence[LifeChange]:
        if self._counts_tokens:
            self._count(event)
        oldest = self.in_flight.popleft().step if self.in_flight else None
        if oldest is None or oldest.step_id != event.step.step_id:
            self._report_order(event.step.step_id, "is committed", oldest)
        if not (event.finished or self.leaving):
            return ()  # as most commits
        changes = self.end_leaving() if self.leaving else []
        for finished in event.finished:
            changes += self._finish(finished, event.now_ns)
        return changes

    def _count(self, event: Committed) -> None:
        for request_id in event.first_tokens:
            if request_id in self.requests:
                self.requests[request_id].num_tokens += 1
            else:
                self._report_unknown(request_id, "have a token")
        if event.kept is not None:
            assert event.step.decode is not None, "only a decode keeps tokens"
            counts = np.add.reduce(event.kept, axis=0).tolist()
            for row, tokens in zip(event.step.decode.rows.tolist(), counts, strict=True):
                request = self._owner(row) if tokens else None
                if request is not None:
                    request.num_tokens += tokens

    def _report_order(self, step_id: int, how: str, oldest: Step | None) -> None:
        flying = "none" if oldest is None else f"step {oldest.step_id}"
        self._report(f"event {self.num_events}: step {step_id} {how}, and {flying} is the oldest in flight")

    def _lost(self, event: StepsLost) -> Sequence[LifeChange]:
        for step_id in event.step_ids:
            oldest = self.in_flight.popleft().step if self.in_flight else None
            if oldest is None or oldest.step_id != step_id:
                self._report_order(step_id, "is lost", oldest)
        changes = self.end_leaving() + self._retract(event.retracted)
        self.num_waiting += len(event.retracted)
        for finished in event.finished:
            changes += self._finish(finished, event.now_ns)
        return changes

    def _resumed(self, event: Resumed) -> Sequence[LifeChange]:
        self.num_waiting += len(event.retracted)
        return self._retract(event.retracted)

    def _moved(self, event: HandoffMoved) -> Sequence[LifeChange]:
        changes: list[LifeChange] = []
        if event.move is HandoffMove.ROLE:
            self.role = event.detail
        elif event.move is HandoffMove.HOLD:
            changes += self._step_of(event.request_id, LifeStep.HAND_OVER)
        elif event.request is not None:
            request = AccountedRequest(event.request, event.now_ns, num_tokens=max(event.request.shown.length, 1))
            self._add(request)
            changes.append(self._change(request, LifeStep.RESERVE))
        elif event.move is HandoffMove.JOIN and event.row:
            changes += self._step_of(event.request_id, LifeStep.ARRIVE)
        for finished in event.finished:
            ended = self._finish(finished, event.now_ns)
            self.num_waiting -= sum(before is LifeState.WAITING for _, _, before in ended)
            changes += ended
        return changes

    # -- requests -----------------------------------------------------------------------------------------------------

    def _add(self, request: AccountedRequest) -> None:
        name = request.request.request_id
        if name in self.requests:
            self._report(f"event {self.num_events}: request {name!r} comes while one of this id is live")
            self._change(self.requests[name], LifeStep.END)
        self.requests[name] = request

    def _retract(self, request_ids: Sequence[str]) -> list[LifeChange]:
        return [change for name in request_ids for change in self._step_of(name, LifeStep.RETRACT)]

    def _finish(self, finished: FinishedRequest, now_ns: int) -> list[LifeChange]:
        changes = self._step_of(finished.request_id, LifeStep.END)
        for _, request, _ in changes:
            request.end_ns, request.reason, request.num_output = now_ns, finished.reason, finished.num_output
            del self.requests[finished.request_id]
        return changes

    def _step_of(self, request_id: str, step: LifeStep) -> list[LifeChange]:
        """Let a live request take `step`; of an unknown one, nothing is left to change."""
        request = self.requests.get(request_id)
        if request is None:
            self._report_unknown(request_id, _word(step))
            return []
        return [self._change(request, step)]

    def _report_unknown(self, request_id: str, does: str) -> None:
        self._report(f"event {self.num_events}: request {request_id!r} is not live and cannot {does}")

    def _owner(self, row: int) -> AccountedRequest | None:
        """Return the request to which the tokens of a row go. It may wait since a retraction; one that has ended gets
        none."""
        request = self.in_row.get(row)
        if request is None or request.state is LifeState.ENDED:
            owner = "no request has entered it" if request is None else f"request {request.request_id!r} has ended"
            self._report(f"event {self.num_events}: row {row} has tokens, and {owner}")
            return None
        return request

    def _change(self, request: AccountedRequest, step: LifeStep) -> LifeChange:
        before = request.state
        after = TRANSITIONS[before].get(step)
        if after is None:
            name = f"request {request.request_id!r}"
            self._report(f"event {self.num_events}: {name} is {_word(before)} and cannot {_word(step)}")
            after = _AFTER[step]
        request.state = after
        self.num_running += (after is LifeState.RUNNING) - (before is LifeState.RUNNING)
        return step, request, before


def _word(member: IntEnum) -> str:
    return member.name.lower().replace("_", " ")


def _tells_nothing(event: Event) -> Sequence[LifeChange]:
    """Take an event whose consequences show in later plans."""
    return ()
