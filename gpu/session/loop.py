"""The loop around engine and executor: plan until None, launch, commit the oldest; submits and aborts go in between.

submit / abort ─► Engine ─ plan ─► Step ─► Executor.launch        (until None)
                    ▲                          │
                    └── commit ◄─ result ◄─ Executor.collect      (the oldest) ─► what each request got
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...core.contract.events import Committed, Event, EventSink, Planned
from ...core.contract.request import FinishedRequest, Request
from ...core.scheduler.driver import Executor
from ...core.scheduler.engine import Engine

_NOTHING = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step brought to one request. All deltas of a request together are its output."""

    request_id: str
    tokens: np.ndarray  # int64 [n]: new output tokens; n is 0 in a delta that only says how it ended
    outputs: dict[str, list[np.ndarray]] = field(default_factory=dict)  # what the request asked for, n entries each
    finished: FinishedRequest | None = None  # in the last delta


class Deliveries:
    """An event sink that takes apart what steps delivered: tokens by request."""

    def __init__(self) -> None:
        self._request_of_row: dict[int, Request] = {}
        self._tokens: dict[str, list[np.ndarray]] = {}
        self._outputs: dict[str, dict[str, list[np.ndarray]]] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, Planned) and event.step is not None:
            for join in event.step.joins:
                self._request_of_row[join.row] = join.request
        elif isinstance(event, Committed):
            self._first_tokens(event)
            if event.kept is not None:
                self._rounds(event)

    def take(self) -> tuple[dict[str, list[np.ndarray]], dict[str, dict[str, list[np.ndarray]]]]:
        """Tokens and outputs since the last call, by request id."""
        taken = self._tokens, self._outputs
        self._tokens, self._outputs = {}, {}
        return taken

    def _first_tokens(self, event: Committed) -> None:
        if not event.first_tokens:
            return
        part, result = event.step.prefill, event.result.prefill
        for i in np.flatnonzero(part.is_last).tolist():
            request = self._request_of_row[int(part.rows[i])]
            if request.request_id in event.first_tokens:
                entries = {name: result.outputs[name][i : i + 1] for name in request.outputs}
                self._deliver(request, result.tokens[i : i + 1], entries)

    def _rounds(self, event: Committed) -> None:
        rows, decode = event.step.decode.rows.tolist(), event.result.decode
        for number, kept in enumerate(event.kept):
            for i in np.flatnonzero(kept).tolist():
                request, count = self._request_of_row[rows[i]], kept[i]
                entries = {name: decode.outputs[number][name][i, :count] for name in request.outputs}
                self._deliver(request, decode.tokens[number, i, :count], entries)

    def _deliver(self, request: Request, tokens: np.ndarray, entries: dict[str, np.ndarray]) -> None:
        self._tokens.setdefault(request.request_id, []).append(tokens)
        for name, values in entries.items():
            self._outputs.setdefault(request.request_id, {}).setdefault(name, []).extend(values)


def all_of(sinks: Sequence[EventSink]) -> EventSink:
    """One sink that hands every event to each of `sinks`, in order."""

    def tell(event: Event) -> None:
        for sink in sinks:
            sink(event)

    return tell


@dataclass(slots=True)
class LoopTimes:
    """Where the loop's own thread spent its time, in ns. On a CPU collecting is computing; on a GPU it is waiting."""

    plan_ns: int = 0
    launch_ns: int = 0
    collect_ns: int = 0
    commit_ns: int = 0

    @property
    def host_ns(self) -> int:
        return self.plan_ns + self.launch_ns + self.commit_ns


class DecodeLoop:
    """Drives `engine` with `executor`; `deliveries` must be among the engine's event sinks. Not thread-safe."""

    def __init__(
        self,
        engine: Engine,
        executor: Executor,
        deliveries: Deliveries,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.engine = engine
        self.executor = executor
        self.times = LoopTimes()
        self.num_steps = 0
        self._deliveries = deliveries
        self._clock_ns = clock_ns
        self._live: dict[str, None] = {}  # in the order of submission
        self._aborted: list[FinishedRequest] = []  # at once, to be told by the next turn

    @property
    def is_idle(self) -> bool:
        """Nothing is left to do and nothing to tell."""
        return self.engine.is_idle and not self._aborted

    def submit(self, request: Request) -> str:
        """Queue a request; returns why it was refused, or an empty text."""
        outcome = self.engine.submit(request, self._clock_ns())
        if not outcome.refusal:
            self._live[request.request_id] = None
        if outcome.replan:
            self.executor.request_stop(self.engine.last_step_id)
        return outcome.refusal

    def abort(self, request_id: str) -> None:
        """Give a request up. Its last delta comes with one of the next turns; an id that is not live changes nothing."""
        outcome = self.engine.abort(request_id, self._clock_ns())
        if outcome.finished is not None:
            self._aborted.append(outcome.finished)
        if outcome.replan:
            self.executor.request_stop(self.engine.last_step_id)

    def abort_all(self) -> None:
        for request_id in tuple(self._live):
            self.abort(request_id)

    def turn(self) -> list[Delta]:
        """Plan and launch what can be, then commit the oldest step. Returns what requests got; empty if nothing was in flight."""
        engine, times, now = self.engine, self.times, self._clock_ns
        begin = now()
        while True:
            step = engine.plan(begin)
            planned = now()
            times.plan_ns += planned - begin
            if step is None:
                break
            self.executor.launch(step)
            begin = now()
            times.launch_ns += begin - planned
        finished = self._aborted
        self._aborted = []
        if engine.num_uncommitted:
            begin = now()
            result = self.executor.collect()
            collected = now()
            finished += engine.commit(result, collected).finished
            times.collect_ns += collected - begin
            times.commit_ns += now() - collected
            self.num_steps += 1
        return self._deltas(finished)

    def _deltas(self, finished: list[FinishedRequest]) -> list[Delta]:
        tokens, outputs = self._deliveries.take()
        ends: dict[str, Any] = {end.request_id: end for end in finished}
        for request_id in ends:
            del self._live[request_id]
        return [
            Delta(
                request_id,
                np.concatenate(tokens[request_id]).astype(np.int64) if request_id in tokens else _NOTHING,
                outputs.get(request_id, {}),
                ends.get(request_id),
            )
            for request_id in {**tokens, **ends}
        ]
