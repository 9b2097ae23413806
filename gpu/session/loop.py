"""The decode loop: a driver whose turns return the pieces that each request got."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...core.contract.account import EngineAccount
from ...core.contract.events import Committed, Event, EventSink
from ...core.contract.request import FinishedRequest, Request
from ...core.contract.step import FailureCause, StepFailure
from ...core.errors import InvariantViolation
from ...core.scheduler.driver import Driver, Executor
from ...core.scheduler.engine import Engine

_NOTHING = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class RequestDelta:
    """What one step delivered to one request. All deltas of a request together are its output."""

    request_id: str
    tokens: np.ndarray  # int64 [n]: new output tokens; n may be 0 in the last delta
    outputs: dict[str, list[np.ndarray]] = field(default_factory=dict)  # what the request asked for, n entries each
    finished: FinishedRequest | None = None  # in the last delta


class DeliverySink:
    """An event sink that sorts the deliveries of steps by request."""

    def __init__(self) -> None:
        self._account = EngineAccount()
        self._tokens: dict[str, list[np.ndarray]] = {}
        self._outputs: dict[str, dict[str, list[np.ndarray]]] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, Committed):
            self._first_tokens(event)
            self._rounds(event)
        self._account.take(event)

    def take(self) -> tuple[dict[str, list[np.ndarray]], dict[str, dict[str, list[np.ndarray]]]]:
        """Return tokens and outputs since the last call, by request id."""
        taken = self._tokens, self._outputs
        self._tokens, self._outputs = {}, {}
        return taken

    def _first_tokens(self, event: Committed) -> None:
        if not event.first_tokens:
            return
        part, result = event.step.prefill, event.result.prefill
        assert part is not None and result is not None and result.tokens is not None, "a prompt gave the token"
        for i in np.flatnonzero(part.is_last).tolist():
            request = self._account.in_row[int(part.rows[i])].request
            if request.request_id in event.first_tokens:
                entries = {name: (result.outputs or {})[name][i : i + 1] for name in request.outputs}
                self._deliver(request, result.tokens[i : i + 1], entries)

    def _rounds(self, event: Committed) -> None:
        if event.kept is None:
            return
        decode = event.result.decode
        assert decode is not None and decode.tokens is not None, "rounds gave the tokens"
        outputs = decode.outputs or ()
        for owner, number, i, count in self._account.runs(event):
            if number >= 0:
                entries = {name: outputs[number][name][i, :count] for name in owner.request.outputs}
                self._deliver(owner.request, decode.tokens[number, i, :count], entries)

    def _deliver(self, request: Request, tokens: np.ndarray, entries: dict[str, np.ndarray]) -> None:
        self._tokens.setdefault(request.request_id, []).append(tokens)
        for name, values in entries.items():
            self._outputs.setdefault(request.request_id, {}).setdefault(name, []).extend(values)


def all_of(sinks: Sequence[EventSink]) -> EventSink:
    """Return a sink that hands every event to each of `sinks`, in order."""

    def tell(event: Event) -> None:
        for sink in sinks:
            sink(event)

    return tell


class DecodeLoop:
    """Drives `engine` with `executor`; `deliveries` must be among the engine's event sinks. Not thread-safe."""

    def __init__(
        self,
        engine: Engine,
        executor: Executor,
        deliveries: DeliverySink,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.driver = Driver(engine, executor, clock_ns)
        self._deliveries = deliveries
        self._live: dict[str, None] = {}  # in the order of submission
        self._ended_between_turns: list[FinishedRequest] = []  # the next turn returns their last deltas

    @property
    def is_idle(self) -> bool:
        """Whether no request is live and no delta is left to return."""
        return self.driver.engine.is_idle and not self._ended_between_turns

    def submit(self, request: Request) -> str:
        """Queue a request; returns why it was refused, or an empty text."""
        refusal = self.driver.submit(request).refusal
        if not refusal:
            self._live[request.request_id] = None
        return refusal

    def abort(self, request_id: str) -> None:
        """Give a request up. Its last delta comes with one of the next turns;
        an id that is not live changes nothing."""
        finished = self.driver.abort(request_id).finished
        if finished is not None:
            self._ended_between_turns.append(finished)

    def abort_all(self) -> None:
        for request_id in tuple(self._live):
            self.abort(request_id)

    def lose_steps(self, cause: FailureCause, message: str, restart: Callable[[], None]) -> None:
        """Give up the steps in flight, since the executor has failed, and resume when `restart` has made it as new.

        Their requests wait again, with what they have; one that has failed alone ends with the next turn.
        """
        engine, clock_ns = self.driver.engine, self.driver.clock_ns
        failed = engine.requests.in_flight[0].step.step_id
        self._ended_between_turns += engine.lose_steps(StepFailure(failed, cause, message), clock_ns()).finished
        restart()
        engine.resume(clock_ns(), restarted=True)

    def turn(self) -> list[RequestDelta]:
        """Take a driver's turn; returns the pieces that requests got. Raises InvariantViolation if requests live, but
        no step is planned."""
        outcome = self.driver.turn()
        finished, self._ended_between_turns = self._ended_between_turns, []
        if outcome is not None:
            finished += outcome.finished
        elif not finished and self._live:
            message = f"no step is planned, but these requests live: {', '.join(self._live)}"
            raise InvariantViolation("ENGINE-11", message)
        return self._deltas(finished)

    def _deltas(self, finished: list[FinishedRequest]) -> list[RequestDelta]:
        tokens, outputs = self._deliveries.take()
        ends: dict[str, Any] = {end.request_id: end for end in finished}
        for request_id in ends:
            del self._live[request_id]
        return [
            RequestDelta(
                request_id,
                np.concatenate(tokens[request_id]).astype(np.int64) if request_id in tokens else _NOTHING,
                outputs.get(request_id, {}),
                ends.get(request_id),
            )
            for request_id in {**tokens, **ends}
        ]
