"""The promises that hold under every fault, checked while a service runs and at its end.

A `Witness` sees every event of one engine, and keeps an account of them (`core/contract/account.py`): the tokens that
each request has got, its row, its arrival. The account shares nothing with the engine's records.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...core.contract.account import AccountedRequest, EngineAccount, LifeState, LifeStep
from ...core.contract.events import (
    AllocationsDenied,
    Committed,
    EngineStarted,
    Event,
    Planned,
    Reloaded,
    RetractionAsked,
    StepsLost,
    Submitted,
)
from ...core.contract.request import FinishedRequest, FinishReason
from ...core.contract.step import FailureCause
from ...core.errors import InvariantViolation, count_of
from ...core.scheduler.config import EngineConfig
from ...core.scheduler.engine import Engine
from ..actors.device import Truth

PROMISES = {
    "nothing_seen": "no token of a lost step is delivered",
    "stream_intact": "delivered tokens are never repeated or lost: a request continues after them, and its usage counts them",
    "fenced": "slots of a lost step are not reused until the device is quiet, and are free then",
    "victim_alone": "a request fails only after a step in which it was alone",
    "fails_for_itself": "a request without numbers fails with that reason, and no other",
    "watchdog_speaks": "a step that does not come back is reported with what was in flight",
    "one_end": "each request reaches exactly one end",
    "no_later_token": "nothing is delivered after a cancel",
    "refused_at_the_door": "bad requests and live ids are refused, with the limit",
    "counts_once": "a message that comes twice counts once",
    "first_end_wins": "a request ends at its stop or its limit, whichever comes first, and for that reason",
    "steps_valid": "draft steps are candidates; impossible feedback is refused and changes nothing",
    "last_good_config": "after half a table the last good one is in force",
    "bounded_queue": "the queue never exceeds its bound, except by requests that were retracted",
    "fails_closed": "a request joins only with every page as it was sent, all of one attempt",
    "joins_once": "a request is decoded on one engine, once",
    "one_retry": "a transfer is tried twice at most",
    "pages_kept": "a page belongs to its transfer as long as it is read or written",
    "time_forward": "no time stamp goes back, no duration is negative",
    "books_agree": "after each fault a recount from scratch finds nothing wrong",
    "no_crash": "nothing raises out of the service",
    "recovered": "after the last fault everything ends within the bound",
    "drained": "in the end every slot is free again",
}

OF_KIND: dict[str, tuple[str, ...]] = {
    "device.raises": ("nothing_seen", "fenced", "stream_intact", "victim_alone"),
    "device.out_of_memory": ("nothing_seen", "fenced", "stream_intact", "victim_alone"),
    "device.hangs": ("nothing_seen", "fenced", "stream_intact", "victim_alone", "watchdog_speaks"),
    "device.slow": ("recovered",),
    "device.restarts": ("nothing_seen", "fenced", "stream_intact", "victim_alone"),
    "device.poison": ("victim_alone", "one_end"),
    "device.nan": ("fails_for_itself", "one_end", "stream_intact"),
    "link.late": ("one_end", "no_later_token"),
    "link.duplicated": ("counts_once", "one_end"),
    "link.lost": ("one_end",),
    "client.cancels": ("no_later_token", "one_end", "drained"),
    "client.gone": ("no_later_token", "one_end", "drained"),
    "client.duplicate_id": ("refused_at_the_door", "one_end"),
    "client.bad_request": ("refused_at_the_door",),
    "client.token_limits": ("first_end_wins",),
    "client.stop_edge": ("first_end_wins",),
    "draft.right": ("first_end_wins", "steps_valid"),
    "draft.wrong": ("first_end_wins", "steps_valid"),
    "draft.nan": ("steps_valid",),
    "pool.denied": ("books_agree", "stream_intact"),
    "pool.retraction": ("books_agree", "stream_intact"),
    "load.burst": ("bounded_queue", "one_end"),
    "clock.jump": ("time_forward",),
    "clock.freeze": ("time_forward",),
    "config.half_written": ("last_good_config",),
    "service.shutdown": ("drained", "one_end"),
    "transfer.lost": ("fails_closed", "one_retry", "drained"),
    "transfer.short": ("fails_closed", "one_retry", "drained"),
    "transfer.corrupt": ("fails_closed", "one_retry", "drained"),
    "transfer.duplicated": ("joins_once", "stream_intact"),
    "transfer.reordered": ("fails_closed", "joins_once"),
    "transfer.late": ("fails_closed", "joins_once", "pages_kept"),
    "transfer.slow": ("recovered", "pages_kept"),
    "transfer.ack_lost": ("joins_once", "one_retry", "one_end"),
    "transfer.cancelled": ("no_later_token", "one_end", "drained"),
    "transfer.peer_dies": ("one_end", "recovered", "drained", "joins_once"),
    "transfer.decoder_lost": ("one_end", "stream_intact", "first_end_wins", "recovered", "drained", "joins_once"),
}

MAX_BROKEN = 20


@dataclass(frozen=True, slots=True)
class BrokenPromise:
    """A promise that was not kept."""

    promise: str
    message: str
    now_ns: int

    def __str__(self) -> str:
        return f"{self.promise} at {self.now_ns / 1e9:.6f} s: {self.message} (promised: {PROMISES[self.promise]})"


class Promises:
    """Counts evaluations and keeps the first broken ones."""

    def __init__(self) -> None:
        self.checked: dict[str, int] = dict.fromkeys(PROMISES, 0)
        self.broken: list[BrokenPromise] = []

    def check(self, promise: str, kept: bool, now_ns: int, message: str = "") -> None:
        self.checked[promise] += 1
        if not kept and len(self.broken) < MAX_BROKEN:
            self.broken.append(BrokenPromise(promise, message, now_ns))

    def recount(self, promise: str, engine: Engine, now_ns: int) -> None:
        """Let the engine recount its state from scratch."""
        self.checked[promise] += 1
        try:
            engine.check()
        except InvariantViolation as violation:
            self.check(promise, False, now_ns, str(violation))


class Witness:
    """Checks one replica by an account of its events; `take` is an event sink of its engine."""

    def __init__(self, promises: Promises, config: EngineConfig) -> None:
        self.promises = promises
        self.truths: dict[str, Truth] = {}  # by id
        self.just_joined: set[str] = set()  # their acknowledgement comes next; only asked
        self._account = EngineAccount(counts_tokens=True, report=self._contradicted)
        self._queue_limit = None if config.max_queue is None else config.max_queue + config.num_rows
        self._taken: set[str] = set()  # ids ever let in; only asked
        self._ended: dict[str, AccountedRequest] = {}  # and not yet reported
        self._may_fail: set[str] = set()  # ended by a failed step that they had to themselves; only asked
        self._lost_through = 0
        self._last_ns = 0
        self._round_end_ns = 0

    def take(self, event: Event) -> None:
        """Check an event against those before it."""
        if not isinstance(event, EngineStarted | RetractionAsked | AllocationsDenied | Reloaded):
            self._forward(event.now_ns, event.now_ns)
        match event:
            case Submitted(refusal=""):
                self._check_entry(event)
            case Planned():
                self._check_joins(event)
            case Committed():
                self._check_commit(event)
            case StepsLost():
                self._check_loss(event)
        for step, request, before in self._account.take(event):
            if step is LifeStep.ARRIVE:
                self.just_joined.add(request.request_id)
            elif step is LifeStep.END:
                self._end(request, before)

    def _end(self, request: AccountedRequest, before: LifeState) -> None:
        if request.reason is FinishReason.ERROR:
            self._may_fail.add(request.request_id)
        elif request.reason is FinishReason.MOVED:
            self._taken.discard(request.request_id)
        if before is not LifeState.EXPECTED:  # else its prefill engine tells its end
            self._ended[request.request_id] = request

    @property
    def live(self) -> tuple[str, ...]:
        return tuple(self._account.requests)

    def _contradicted(self, message: str) -> None:
        self.promises.check("books_agree", False, self._last_ns, message)

    def _forward(self, from_ns: int, to_ns: int) -> None:
        self.promises.check("time_forward", from_ns >= self._last_ns, to_ns, f"{from_ns} ns after {self._last_ns} ns")
        self._last_ns = max(self._last_ns, to_ns)

    # -- events -------------------------------------------------------------------------------------------------------

    def _check_entry(self, event: Submitted) -> None:
        name = event.request.request_id
        once = name not in self._taken or event.request.shown.length > 0
        self.promises.check("counts_once", once, event.now_ns, f"{name} is let in a second time")
        self._taken.add(name)
        if self._queue_limit is not None:
            num_waiting = self._account.num_waiting + 1
            fits = num_waiting <= self._queue_limit
            self.promises.check("bounded_queue", fits, event.now_ns, f"{num_waiting} wait")

    def _check_joins(self, event: Planned) -> None:
        for join in event.step.joins if event.step is not None else ():
            name = join.request.request_id
            request = self._account.requests.get(name)
            is_live = request is not None
            self.promises.check("no_later_token", is_live, event.now_ns, f"{name} enters and is not live")
            had, repeats_last = (request.num_tokens, request.repeats_last) if request is not None else (0, False)
            goes_on = join.num_emitted == had - repeats_last
            self.promises.check(
                "stream_intact", goes_on, event.now_ns, f"{name} goes on from {join.num_emitted}, has had {had}"
            )

    def _check_commit(self, event: Committed) -> None:
        step, result, promises = event.step, event.result, self.promises
        unseen = step.step_id > self._lost_through
        promises.check("nothing_seen", unseen, event.now_ns, f"step {step.step_id} is lost, and is committed")
        self._check_failures(event)
        ends = result.round_end_ns
        ordered = ends[0] >= self._round_end_ns and ends[-1] <= event.now_ns and bool((ends[1:] >= ends[:-1]).all())
        promises.check("time_forward", ordered, event.now_ns, f"rounds of step {step.step_id} end at {ends.tolist()}")
        self._round_end_ns = int(ends[-1])
        for name in event.first_tokens:
            request = self._account.requests.get(name)
            is_live = request is not None
            promises.check("no_later_token", is_live, event.now_ns, f"{name} has a token and is not live")
            arrival_ns = 0 if request is None else request.arrival_ns
            promises.check("time_forward", ends[0] >= arrival_ns, event.now_ns, f"{name}: a token before its arrival")
        if event.kept is not None:
            assert step.decode is not None, "only a decode part emits tokens of rounds"
            self._check_leaving(event, step.decode.rows, event.kept)

    def _check_failures(self, event: Committed) -> None:
        """Check that requests fail only if the result says that their rows have failed."""
        reasons = dict(event.result.failures)
        for finished in event.finished:
            if finished.reason is FinishReason.ERROR:
                request = self._account.requests.get(finished.request_id)
                row = 0 if request is None or request.state is not LifeState.RUNNING else request.row
                due = reasons.get(row, "") == finished.message
                self.promises.check(
                    "fails_for_itself", due, event.now_ns, f"{finished.request_id} fails: {finished.message}"
                )

    def _check_leaving(self, event: Committed, rows: np.ndarray, kept: np.ndarray) -> None:
        """Check that an aborted request gets the tokens of rounds that ended before the abort, and no others."""
        for request in self._account.leaving:
            column = np.flatnonzero(rows == request.row)
            if len(column):
                later = event.result.round_end_ns > request.end_ns
                tokens = int(kept[later, column[0]].sum())
                late = f"{request.request_id}: {count_of(tokens, 'token')} too late"
                self.promises.check("no_later_token", not tokens, event.now_ns, late)

    def _check_loss(self, event: StepsLost) -> None:
        promises, failure = self.promises, event.failure
        in_step = self._requests_of(failure.step_id)
        victims = [finished.request_id for finished in event.finished]
        promises.check("victim_alone", not victims or victims == in_step, event.now_ns, f"{victims} of {in_step} fail")
        if failure.cause is FailureCause.HUNG:
            speaks = f"step {failure.step_id} (" in failure.message
            promises.check("watchdog_speaks", speaks, event.now_ns, f"said of it: {failure.message!r}")
        self._lost_through = max(event.step_ids)

    def _requests_of(self, step_id: int) -> list[str]:
        """Return the requests that a step in flight computes, and that still have their rows."""
        steps = (planned.step for planned in self._account.in_flight)
        step = next((step for step in steps if step is not None and step.step_id == step_id), None)
        parts = [] if step is None else [part for part in (step.prefill, step.decode) if part is not None]
        rows = {row for part in parts for row in part.rows.tolist()}
        running = (one for one in self._account.requests.values() if one.state is LifeState.RUNNING)
        return [request.request_id for request in running if request.row in rows]

    # -- ends ---------------------------------------------------------------------------------------------------------

    def reported(self, finished: FinishedRequest, now_ns: int) -> None:
        """Check the end of a request that was queued."""
        name, reason, promises = finished.request_id, finished.reason, self.promises
        request = self._ended.pop(name, None) or self._account.close(name)
        had = 0 if request is None else request.num_tokens
        same = finished.num_output == had
        promises.check(
            "stream_intact", same, now_ns, f"{name} is charged {count_of(finished.num_output, 'token')}, has had {had}"
        )
        truth = self.truths.pop(name)
        if reason is FinishReason.ERROR:
            promises.check("victim_alone", name in self._may_fail, now_ns, f"{name} fails: {finished.message}")
        elif reason not in (FinishReason.ABORT, FinishReason.TRANSFERRED, FinishReason.MOVED):
            assert request is not None and request.join is not None, f"{name} ends by itself without having joined"
            limit = request.join.max_tokens
            until_stop = truth.output_len
            right = FinishReason.STOP if until_stop < limit + truth.stops_at_limit else FinishReason.LENGTH
            as_due = reason is right and had == min(until_stop, limit)
            promises.check(
                "first_end_wins", as_due, now_ns, f"{name} ends by {reason.name} after {had}; due {until_stop}, {limit}"
            )
