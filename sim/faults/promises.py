"""The promises that hold under every fault, checked while a service runs and at its end.

A `Witness` sees every event of one engine and keeps records of its own: the tokens that each request has got, its row,
its arrival. They share nothing with the engine's records.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...core.contract.events import (
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
from ...core.contract.request import FinishedRequest, FinishReason
from ...core.contract.step import FailureCause, Step
from ...core.errors import InvariantViolation, count_of
from ...core.scheduler.config import EngineConfig
from ...core.scheduler.engine import Engine

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
    """Keeps the records of one replica; `take` is an event sink of its engine."""

    def __init__(self, promises: Promises, config: EngineConfig) -> None:
        self.promises = promises
        self._delivers_late = config.rules.delivers_late_tokens  # to requests that were retracted
        self._late: set[str] = set()  # retracted, and a step in flight may still compute tokens for them; only asked
        self.expected_output: dict[str, int] = {}  # id -> tokens until its own stop
        self._queue_limit = None if config.max_queue is None else config.max_queue + config.num_rows
        self._limit: dict[str, int] = {}  # id -> its cap, as its join says
        self._live: dict[str, int] = {}  # id -> arrival
        self._taken: set[str] = set()  # ids ever let in; only asked
        self._leaving: dict[str, int] = {}  # cancelled and not yet reported: id -> when
        self._row_of: dict[str, int] = {}
        self._delivered: dict[str, int] = {}  # of those without a row
        self._knows_last: set[str] = set()  # the last token that was delivered ends their prefill; only asked
        self._by_row = np.zeros(config.num_rows + 1, dtype=np.int64)
        self._awaited: dict[str, int] = {}  # reserved for, and not here yet: the tokens that they come with
        self.just_joined: set[str] = set()  # their acknowledgement comes next; only asked
        self._in_flight: dict[int, Step] = {}
        self._lost_through = 0
        self._may_fail: set[str] = set()  # ended by a failed step that they had to themselves; only asked
        self._last_ns = 0
        self._round_end_ns = 0
        self._num_waiting = 0

    def take(self, event: Event) -> None:
        if isinstance(event, EngineStarted | RetractionAsked | AllocationsDenied | Reloaded):
            return
        self._forward(event.now_ns, event.now_ns)
        match event:
            case Planned():
                self._planned(event)
            case Committed():
                self._committed(event)
            case Submitted():
                self._submitted(event)
            case Aborted():
                self._aborted(event)
            case StepsLost():
                self._lost(event)
            case Resumed():
                self._leave(event.retracted)
            case HandoffMoved():
                self._handed(event)

    @property
    def live(self) -> tuple[str, ...]:
        return tuple(self._live)

    def _forward(self, from_ns: int, to_ns: int) -> None:
        self.promises.check("time_forward", from_ns >= self._last_ns, to_ns, f"{from_ns} ns after {self._last_ns} ns")
        self._last_ns = max(self._last_ns, to_ns)

    # -- events -------------------------------------------------------------------------------------------------------

    def _submitted(self, event: Submitted) -> None:
        if event.refusal:
            return
        name, shown = event.request.request_id, event.request.shown.length
        once = name not in self._taken or shown > 0
        self.promises.check("counts_once", once, event.now_ns, f"{name} is let in a second time")
        self._taken.add(name)
        if shown:
            self._delivered[name] = shown
            self._knows_last.add(name)
        self._live[name] = event.now_ns
        self._num_waiting += 1
        if self._queue_limit is not None:
            fits = self._num_waiting <= self._queue_limit
            self.promises.check("bounded_queue", fits, event.now_ns, f"{self._num_waiting} wait")

    def _aborted(self, event: Aborted) -> None:
        if event.request_id in self._awaited:
            del self._awaited[event.request_id]
            self._live.pop(event.request_id, None)
        elif self._live.pop(event.request_id, None) is not None:
            self._leaving[event.request_id] = event.now_ns
            if event.request_id not in self._row_of:
                self._num_waiting -= 1  # until the next plan counts

    def _planned(self, event: Planned) -> None:
        self._leave(event.retracted)
        self._num_waiting = event.num_waiting
        step, promises = event.step, self.promises
        if step is None:
            return
        self._in_flight[step.step_id] = step
        for join in step.joins:
            name = join.request.request_id
            promises.check("no_later_token", name in self._live, event.now_ns, f"{name} enters and is not live")
            had = self._delivered.pop(name, 0)
            goes_on = join.num_emitted == had - (name in self._knows_last)
            promises.check(
                "stream_intact", goes_on, event.now_ns, f"{name} goes on from {join.num_emitted}, has had {had}"
            )
            self._row_of[name] = join.row
            self._by_row[join.row] = had
            self._limit[name] = join.max_tokens

    def _committed(self, event: Committed) -> None:
        step, result, promises = event.step, event.result, self.promises
        unseen = step.step_id > self._lost_through
        promises.check("nothing_seen", unseen, event.now_ns, f"step {step.step_id} is lost, and is committed")
        self._in_flight.pop(step.step_id, None)
        self._check_failures(event)
        ends = result.round_end_ns
        ordered = ends[0] >= self._round_end_ns and ends[-1] <= event.now_ns and bool((ends[1:] >= ends[:-1]).all())
        promises.check("time_forward", ordered, event.now_ns, f"rounds of step {step.step_id} end at {ends.tolist()}")
        self._round_end_ns = int(ends[-1])
        for name in event.first_tokens:
            promises.check("no_later_token", name in self._live, event.now_ns, f"{name} has a token and is not live")
            arrival_ns = self._live.get(name, 0)
            promises.check("time_forward", ends[0] >= arrival_ns, event.now_ns, f"{name}: a token before its arrival")
            self._by_row[self._row_of[name]] += 1
        if event.kept is not None:
            assert step.decode is not None, "only a decode part emits tokens of rounds"
            rows = step.decode.rows
            if self._leaving:
                self._check_leaving(event, rows, event.kept)
            self._by_row[rows] += np.add.reduce(event.kept, axis=0)
        self._settle_late()

    def _check_failures(self, event: Committed) -> None:
        """Check that requests fail only if the result says that their rows have failed."""
        reasons = dict(event.result.failures)
        for finished in event.finished:
            if finished.reason is FinishReason.ERROR:
                name = finished.request_id
                reason = reasons.get(self._row_of[name], "") if name in self._row_of else ""
                due = reason == finished.message
                self.promises.check("fails_for_itself", due, event.now_ns, f"{name} fails: {finished.message}")
                self._may_fail.add(name)

    def _check_leaving(self, event: Committed, rows: np.ndarray, kept: np.ndarray) -> None:
        """Check that an aborted request gets the tokens of rounds that ended before the abort, and no others."""
        for name, left_ns in self._leaving.items():
            column = np.flatnonzero(rows == self._row_of[name]) if name in self._row_of else np.empty(0, np.intp)
            if len(column):
                later = event.result.round_end_ns > left_ns
                tokens = int(kept[later, column[0]].sum())
                self.promises.check(
                    "no_later_token", not tokens, event.now_ns, f"{name}: {count_of(tokens, 'token')} too late"
                )

    def _lost(self, event: StepsLost) -> None:
        self._settle_late()
        promises, failure = self.promises, event.failure
        failed = self._in_flight.get(failure.step_id)
        in_step = self._requests_of(failed) if failed is not None else []
        victims = [finished.request_id for finished in event.finished]
        promises.check("victim_alone", not victims or victims == in_step, event.now_ns, f"{victims} of {in_step} fail")
        for finished in event.finished:
            self._may_fail.add(finished.request_id)
            self._live.pop(finished.request_id, None)
        if failure.cause is FailureCause.HUNG:
            speaks = f"step {failure.step_id} (" in failure.message
            promises.check("watchdog_speaks", speaks, event.now_ns, f"said of it: {failure.message!r}")
        self._lost_through = max(event.step_ids)
        for step_id in event.step_ids:
            self._in_flight.pop(step_id, None)
        self._leave(event.retracted)

    def _handed(self, event: HandoffMoved) -> None:
        """Take a move of a handoff. On a decode engine a request begins after the tokens that other engines have
        delivered."""
        name = event.request_id
        if event.move is HandoffMove.RESERVE:
            self._live[name] = event.now_ns
            assert event.request is not None, "a reservation brings its request"
            self._awaited[name] = max(event.request.shown.length, 1)
        elif event.move is HandoffMove.JOIN and event.row:
            self.just_joined.add(name)
            self._delivered[name] = self._awaited.pop(name)
        for finished in event.finished:
            if finished.reason is FinishReason.ERROR:
                self._may_fail.add(name)
            elif finished.reason is FinishReason.MOVED:
                self._taken.discard(name)
            if self._awaited.pop(name, None) is not None:
                self._live.pop(name, None)  # its prefill engine tells its end

    def _requests_of(self, step: Step) -> list[str]:
        parts = [part for part in (step.prefill, step.decode) if part is not None]
        rows = {row for part in parts for row in part.rows.tolist()}
        return [
            name for name, row in self._row_of.items() if row in rows and name in self._live and name not in self._late
        ]

    def _leave(self, names: tuple[str, ...]) -> None:
        for name in names:
            if self._delivers_late and self._in_flight and name in self._row_of:
                self._late.add(name)
            else:
                self._close_row(name)
        self._num_waiting += len(names)

    def _close_row(self, name: str) -> None:
        if name in self._row_of:  # else it has joined, and no step has it yet
            self._delivered[name] = int(self._by_row[self._row_of.pop(name)])

    def _settle_late(self) -> None:
        """Close the rows of retracted requests: no step in flight computes tokens for them any more."""
        for name in sorted(self._late):
            self._close_row(name)
        self._late.clear()

    # -- ends ---------------------------------------------------------------------------------------------------------

    def reported(self, finished: FinishedRequest, now_ns: int) -> None:
        """Check the end of a request that was queued."""
        name, reason, promises = finished.request_id, finished.reason, self.promises
        row = self._row_of.pop(name, None)
        had = self._delivered.pop(name, 0) if row is None else int(self._by_row[row])
        same = finished.num_output == had
        promises.check(
            "stream_intact", same, now_ns, f"{name} is charged {count_of(finished.num_output, 'token')}, has had {had}"
        )
        self._live.pop(name, None)
        self._leaving.pop(name, None)
        self._knows_last.discard(name)
        limit = self._limit.pop(name, None)
        until_stop = self.expected_output.pop(name)
        if reason is FinishReason.ERROR:
            promises.check("victim_alone", name in self._may_fail, now_ns, f"{name} fails: {finished.message}")
        elif reason not in (FinishReason.ABORT, FinishReason.TRANSFERRED, FinishReason.MOVED):
            assert limit is not None, f"{name} ends by itself without having joined"
            right = FinishReason.STOP if until_stop <= limit else FinishReason.LENGTH
            as_due = reason is right and had == min(until_stop, limit)
            promises.check(
                "first_end_wins", as_due, now_ns, f"{name} ends by {reason.name} after {had}; due {until_stop}, {limit}"
            )
