"""A simulated run: actors around the real scheduler, from a scenario to a report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import simpy

from ..core.acceptance import AcceptanceProcess, GaussianAcceptance
from ..core.acceptance_drift import DayCurve
from ..core.draws import request_key
from ..core.errors import ForetokenError
from ..core.events import Event, EventSink
from ..core.request import FinishedRequest, Request
from .actors.client import Patience, closed_loop_client
from .actors.device import Device, Truth
from .actors.engine import EngineActor, SpanSink
from .actors.link import Link
from .actors.router import Router
from .actors.source import open_loop_source
from .assembly import Assembly, assemble
from .load import make_workload, scan_workload
from .scenario import Scenario
from .workload.arrival import Arrival


class NothingFits(ForetokenError):
    """There is nothing to simulate: the workload has no requests, or every one of them was refused."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands."""

    now_ns: int
    num_submitted: int
    num_ended: int
    num_rounds: int
    num_expected: int | None


@dataclass(frozen=True, slots=True)
class RunReport:
    """How a run ended. `complete` is False if it was interrupted."""

    complete: bool
    duration_ns: int  # from the start to the last thing that happened
    num_submitted: int
    num_ended: int
    num_rounds: int
    device_busy_ns: tuple[int, ...]  # per replica
    refusals: dict[str, int]  # reason -> requests
    num_skipped_rows: int  # of the trace: rows without prompt or output, which cannot be replayed


class Simulation:
    """One run of one scenario. `sinks(replica)` are the event sinks of a replica's engine, `spans` takes device and scheduler times."""

    PROGRESS_EVERY_S = 0.1
    EVENTS_PER_LOOK = 2000
    REQUESTS_FORESEEN = 64

    def __init__(
        self,
        scenario: Scenario,
        *,
        sinks: Callable[[int], Sequence[EventSink]] | None = None,
        spans: SpanSink | None = None,
    ) -> None:
        """Raises a ForetokenError for whatever cannot run: configuration, memory, an unreadable or broken trace."""
        self.scenario = scenario
        self.assembly: Assembly = assemble(scenario)
        self.workload = make_workload(scenario)
        self.num_expected, self.num_skipped_rows = scan_workload(self.workload)
        self.env = simpy.Environment()
        self.refusals: dict[str, int] = {}
        self._num_submitted = 0
        self._num_ended = 0
        self._foreseen = 0  # requests below this number were announced to the device
        self._waiting_clients: dict[str, simpy.Event] = {}
        self._has_listeners = scenario.workload.concurrency is not None or scenario.clients != type(scenario.clients)()
        day = scenario.acceptance.day_amplitude
        self._day = DayCurve(day) if day else None
        self._max_tokens = scenario.workload.max_tokens or self.assembly.engine_config.context_len
        self.replicas = [
            self._make_replica(replica, sinks(replica) if sinks else (), spans)
            for replica in range(scenario.hardware.replicas)
        ]
        table = scenario.router
        links = [Link(self.env, round(table.latency_us * 1000), table.bandwidth_gbps * 1e9 / 8) for _ in self.replicas]
        self.router = Router(table.policy, self.replicas, links, scenario.seed)

    def run(self, on_progress: Callable[[Progress], None] | None = None) -> RunReport:
        """Simulate to the end of the workload. Ctrl-C ends the run early, and the report says so."""
        self._start_workload()
        complete = True
        try:
            self._step_through(on_progress)
        except KeyboardInterrupt:
            complete = False
        if complete and not self._num_submitted:
            skipped = f"; {self.num_skipped_rows} rows have no prompt or no output" if self.num_skipped_rows else ""
            raise NothingFits(f"the workload has no requests: nothing arrives between its start and its end{skipped}")
        if complete and sum(self.refusals.values()) == self._num_submitted:
            reason, count = max(self.refusals.items(), key=lambda item: item[1])
            raise NothingFits(f"none of the {self._num_submitted} requests can be served; {count} of them: {reason}")
        return RunReport(
            complete,
            self.env.now,
            self._num_submitted,
            self._num_ended,
            sum(replica.rounds for replica in self.replicas),
            tuple(replica.device.busy_ns for replica in self.replicas),
            dict(self.refusals),
            self.num_skipped_rows,
        )

    def _start_workload(self) -> None:
        env, clients = self.env, self.scenario.clients
        patience = Patience(self.scenario.seed, clients.deadline_s, clients.cancel_share, clients.cancel_mean_s)
        concurrency = self.scenario.workload.concurrency
        if concurrency is None:
            env.process(open_loop_source(env, self.workload, self._send, self.router.cancel, patience))
            return
        arrivals = iter(self.workload)
        for _ in range(concurrency):
            env.process(closed_loop_client(env, arrivals, self._send, self.router.cancel, patience))

    def _step_through(self, on_progress: Callable[[Progress], None] | None) -> None:
        step = self.env.step
        next_look = time.monotonic()
        try:
            while True:
                for _ in range(self.EVENTS_PER_LOOK):
                    step()
                if on_progress is not None and time.monotonic() >= next_look:
                    on_progress(self.progress())
                    next_look = time.monotonic() + self.PROGRESS_EVERY_S
        except simpy.core.EmptySchedule:
            if on_progress is not None:
                on_progress(self.progress())

    def progress(self) -> Progress:
        rounds = sum(replica.rounds for replica in self.replicas)
        return Progress(self.env.now, self._num_submitted, self._num_ended, rounds, self.num_expected)

    def _make_replica(self, replica: int, sinks: Sequence[EventSink], spans: SpanSink | None) -> EngineActor:
        engine = self.assembly.make_engine(_fan_out(sinks))
        config = self.assembly.engine_config
        device = Device(self.assembly.cost, config.max_running, self.assembly.acceptance, self._tree_process)
        return EngineActor(self.env, replica, engine, device, self.assembly.host, self._ended, spans)

    def _tree_process(self, topk: int, steps: int, num_draft_tokens: int) -> AcceptanceProcess:
        """Acceptance along the deepest accepted path of a tree; pinned and recorded processes hold as they are."""
        process = self.assembly.acceptance
        if not isinstance(process, GaussianAcceptance):
            return process
        return process.for_tree(topk, steps, num_draft_tokens, self.scenario.acceptance.rank_ratio)

    def _send(self, arrival: Arrival) -> tuple[str, simpy.Event | None]:
        """A client's request sets off for its replica."""
        request_id = f"r{arrival.row}"
        request = Request(request_id, arrival.prompt, self._max_tokens, arrival.priority)
        shift = self._day.shift(self.env.now) if self._day is not None else 0.0
        truth = Truth(arrival.output_len, request_key(request_id), shift)
        self._num_submitted += 1
        if arrival.row >= self._foreseen and len(self.replicas) == 1 and self._day is None:
            self._foresee(arrival.row)
        ended = None
        if self._has_listeners:
            ended = self._waiting_clients[request_id] = self.env.event()
        self.router.submit(request, truth)
        return request_id, ended

    def _foresee(self, first: int) -> None:
        """Announce the next requests to the device: ids, and with them the keys of all draws, are known before anybody arrives."""
        self._foreseen = first + self.REQUESTS_FORESEEN
        if not self.replicas[0].device.draws_ahead:
            return
        keys = [request_key(f"r{row}") for row in range(first, self._foreseen)]
        self.replicas[0].device.foresee(np.array(keys, dtype=np.uint64))

    def _ended(self, replica: int, finished: FinishedRequest) -> None:
        """A replica is done with a request, or has refused it."""
        self._num_ended += 1
        self.router.ended(replica, finished.request_id)
        if finished.message:
            self.refusals[finished.message] = self.refusals.get(finished.message, 0) + 1
        ended = self._waiting_clients.pop(finished.request_id, None)
        if ended is not None:
            ended.succeed()


def _fan_out(sinks: Sequence[EventSink]) -> EventSink | None:
    if not sinks:
        return None
    if len(sinks) == 1:
        return sinks[0]

    def to_all(event: Event) -> None:
        for sink in sinks:
            sink(event)

    return to_all
