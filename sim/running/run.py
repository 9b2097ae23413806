"""A simulated run: actors around the real scheduler, from a scenario to a report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import simpy
from simpy.core import EmptySchedule

from ...core.acceptance.process import DayCurve
from ...core.adaptive.controller import AdaptiveMetrics
from ...core.contract.events import EventSink
from ...core.contract.request import FinishedRequest, FinishReason, Request
from ...core.draws import request_key
from ...core.scheduler.config import EngineConfig
from ..actors.client import Patience, closed_loop_client, open_loop_source
from ..actors.clock import Environment, call_at
from ..actors.device import Truth
from ..actors.engine import EngineActor
from ..actors.interruption import deferred_signals
from ..actors.router import ReplicaRouter
from ..actors.spans import SpanSink
from ..assembly import Assembly, assemble
from ..cost.calibration import Calibration
from ..disaggregation.cluster import Cluster
from ..effects.given_keys import refuse_without_effect
from ..effects.notices import notices_of
from ..faults.plan import FaultPlan
from ..faults.service import SoundService, make_service
from ..load import asked_lengths, contents_are_known, make_workload, scan_workload
from ..scenario import Clients, Scenario
from ..workload.traces import TraceSource
from ..workload.workload import SyntheticWorkload, TimedRequest
from .building import ServiceBuilder
from .coupling import coupling
from .report import RunProgress, RunReport


class Simulation:
    """One run of one scenario. `sinks(replica)` are the event sinks of a replica's engine, `spans` takes device and
    scheduler times."""

    clients_are_outside: ClassVar[bool] = False
    PROGRESS_EVERY_S = 0.1
    EVENTS_PER_LOOK = 2000
    REQUESTS_FORESEEN = 64

    def __init__(
        self,
        scenario: Scenario,
        *,
        sinks: Callable[[int], Sequence[EventSink]] | None = None,
        spans: SpanSink | None = None,
        faults: FaultPlan | None = None,
        origins: Mapping[str, str] | None = None,
        calibration: Calibration | None = None,
        on_assembled: Callable[[Assembly], None] | None = None,
        named_slots: bool = True,
        own: range | None = None,
    ) -> None:
        """Assemble the run.

        `faults`: to be injected; `RunReport.faults` has the results. `origins`: where each key was given, as
        `load_scenario` returns it; keys without effect are then refused or noted (`sim/effects/`). `calibration`:
        instead of the file `hardware.profile`. `on_assembled` takes the parts of the run before `sinks` is asked.
        `named_slots` False: no sink asks which KV slots a step writes; then engines count them, unless a prefix cache
        with known prompts, a transfer or a fault needs to know. `own`: the replicas that this process simulates, of a
        run whose replicas do not depend on each other (`coupling`); None: all.

        Raises a ForedraftError for anything that cannot run: configuration, memory, an unreadable or broken trace.
        """
        self.scenario = scenario
        self.assembly: Assembly = replace(assemble(scenario, calibration), clients_are_outside=self.clients_are_outside)
        refuse_without_effect(self.assembly, origins or {})
        if on_assembled is not None:
            on_assembled(self.assembly)
        self.notices: tuple[str, ...] = notices_of(self.assembly, origins or {})
        self.workload: TraceSource | SyntheticWorkload = make_workload(scenario, self.assembly.spec.config.context_len)
        self.num_expected: int | None
        self.num_skipped_rows: int
        self.num_expected, self.num_skipped_rows = scan_workload(self.workload)
        self.env: Environment = Environment()
        self.refusals: dict[str, int] = {}
        self._num_submitted = 0
        self._last_arrival_ns = 0
        self._num_ended = 0
        self._last_request_ns = 0  # when a request was last sent, or ended
        self._foreseen = 0  # requests below this number are announced to the device
        self._waiting_clients: dict[str, simpy.Event] = {}
        clients_may_leave = scenario.clients != Clients()
        self._has_listeners = scenario.workload.concurrency is not None or clients_may_leave
        day = scenario.acceptance.day_amplitude
        self._day = DayCurve(day) if day else None
        self.faults: SoundService = make_service(self.env, faults, self.assembly)
        config, pools, asked = self.assembly.spec.config, self.assembly.pools, scenario.workload.max_tokens
        self._max_tokens = _max_tokens_of(asked, config)
        # Without a guarantee no decision depends on it.
        self._has_fixed_lengths = asked == "output" and config.rules.guarantee_output > 0
        reads_slots = pools.is_disaggregated or (config.prefix_cache and contents_are_known(scenario))
        needs_slots = named_slots or faults is not None or reads_slots
        self._own = own
        self._has_lanes = not coupling(scenario, faults is not None)
        builder = ServiceBuilder(
            self.env, self.assembly, self.faults, has_lanes=self._has_lanes, named_slots=needs_slots
        )
        self._streamers = builder.streamers
        self.cluster: Cluster | None = builder.make_cluster(self._ended) if pools.is_disaggregated else None
        self._on_finished = self._ended if self.cluster is None else self.cluster.finished
        numbers = range(pools.num_engines) if own is None else own
        self.replicas: list[EngineActor] = [
            builder.make_replica(replica, sinks(replica) if sinks else (), spans, self._on_finished)
            for replica in numbers
        ]
        self.router: ReplicaRouter | Cluster = builder.connect(self.replicas, self.cluster, self._given_up)

    def run(self, on_progress: Callable[[RunProgress], None] | None = None) -> RunReport:
        """Simulate to the end of the workload. Ctrl-C ends the run early, and the report says so."""
        self._start_workload()
        complete = True
        try:
            with deferred_signals() as handle_signals:
                self._step_through(on_progress, handle_signals)
        except KeyboardInterrupt:
            complete = False
        except Exception as error:
            if not self.faults.reports(error):
                raise
            complete = False
        report = RunReport(
            complete=complete,
            duration_ns=self._duration_ns(complete),
            num_submitted=self._num_submitted,
            num_ended=self._num_ended,
            num_rounds=sum(replica.rounds for replica in self.replicas),
            device_busy_ns=tuple(replica.device.busy_ns for replica in self.replicas),
            refusals=dict(self.refusals),
            num_skipped_rows=self.num_skipped_rows,
            faults=self.faults.finish(complete),
            disaggregation=self.router.report(self._duration_ns(complete)),
            asked_lengths=asked_lengths(self.workload),
            ema_accept_len=tuple(_ema_of(actor.engine.controller.metrics()) for actor in self.replicas),
            assembly=self.assembly,
            last_arrival_ns=self._last_arrival_ns,
            notices=self.notices,
        )
        if self._own is None:
            report.check_that_some_fit()
        return report

    def _duration_ns(self, complete: bool) -> int:
        """Return the time of the last request, result or page. Timers without effect do not lengthen the run. Examples
        are the timer of a client whose request has ended, and an engine's timer for a remembered transfer."""
        if not complete:
            return self.env.now
        worked_until_ns = (replica.worked_until_ns for replica in self.replicas)
        return max(self._last_request_ns, self.router.last_busy_ns, *worked_until_ns)

    def _start_workload(self) -> None:
        env, clients = self.env, self.scenario.clients
        patience = Patience(self.scenario.seed, clients.deadline_s, clients.cancel_share, clients.cancel_mean_s)
        concurrency = self.scenario.workload.concurrency
        arrivals = self.faults.arrivals(self.workload)
        self.faults.start()
        if self._own is not None:
            assert isinstance(self.router, ReplicaRouter) and self._has_lanes, (
                "only replicas that are not coupled run apart"
            )
            arrivals = self.router.own(arrivals)
        if concurrency is None:
            env.process(open_loop_source(env, arrivals, self._send, self.router.cancel, patience))
            return
        for _ in range(concurrency):
            env.process(closed_loop_client(env, arrivals, self._send, self.router.cancel, patience))

    def _step_through(
        self, on_progress: Callable[[RunProgress], None] | None, handle_signals: Callable[[], None]
    ) -> None:
        step = self.env.step
        next_look = time.monotonic()
        try:
            while True:
                self.env.passes_left = self.EVENTS_PER_LOOK
                for _ in range(self.EVENTS_PER_LOOK):
                    step()
                handle_signals()
                if on_progress is not None and time.monotonic() >= next_look:
                    on_progress(self.progress())
                    next_look = time.monotonic() + self.PROGRESS_EVERY_S
        except EmptySchedule:
            handle_signals()
            if on_progress is not None:
                on_progress(self.progress())

    def progress(self) -> RunProgress:
        rounds = sum(replica.rounds for replica in self.replicas)
        return RunProgress(self.env.now, self._num_submitted, self._num_ended, rounds, self.num_expected)

    def _send(self, arrival: TimedRequest) -> tuple[str, simpy.Event | None]:
        """Send a client's request to its replica, in a burst together with similar requests."""
        copies = self.faults.copies(arrival)
        sent = self._send_one(arrival, f"r{arrival.row}")
        for copy in range(1, copies):
            self._send_one(arrival, f"r{arrival.row}.{copy}")
        return sent

    def _send_one(self, arrival: TimedRequest, request_id: str) -> tuple[str, simpy.Event | None]:
        request = Request(
            request_id,
            arrival.prompt,
            self._max_tokens or arrival.output_len,
            arrival.priority,
            fixed_length=self._has_fixed_lengths,
        )
        shift = self._day.shift(self.env.now) if self._day is not None else 0.0
        truth = Truth(arrival.output_len, request_key(request_id), shift)
        self._num_submitted += 1
        self._last_arrival_ns = self._last_request_ns = self.env.now
        if arrival.row >= self._foreseen and self.assembly.pools.num_engines == 1 and self._day is None:
            self._foresee(arrival.row)
        ended = None
        if self._has_listeners:
            ended = self._waiting_clients[request_id] = self.env.event()
        asked, request = request, self.faults.shape(arrival, request, truth)
        if request.max_tokens != asked.max_tokens:  # a client that asks for fewer or more than the model emits
            truth = replace(truth, stops_at_limit=True)
        self.faults.sent(arrival, request, self.router.submit(request, truth))
        return request_id, ended

    def _foresee(self, first: int) -> None:
        """Announce the next requests to the device:
        their ids, and so the keys of all draws, are known before they arrive."""
        self._foreseen = first + self.REQUESTS_FORESEEN
        if not self.replicas[0].device.draws_ahead:
            return
        keys = [request_key(f"r{row}") for row in range(first, self._foreseen)]
        self.replicas[0].device.foresee(np.array(keys, dtype=np.uint64))

    def _ended(self, replica: int, finished: FinishedRequest) -> None:
        """Take a replica's report that a request has ended, or was refused."""
        self.faults.ended(finished.request_id)
        streamer = self._streamers.get(replica)
        end_ns = None if streamer is None else streamer.take_end(finished.request_id)
        if end_ns is not None and end_ns > self.env.now:
            call_at(self.env, end_ns, self._answered, replica, finished)
        else:
            self._answered(replica, finished)

    def _answered(self, replica: int, finished: FinishedRequest) -> None:
        """Take the end of a request as its client sees it."""
        self._num_ended += 1
        self._last_request_ns = self.env.now
        self.router.ended(replica, finished.request_id)
        if finished.reason is FinishReason.ERROR and finished.message:
            self.refusals[finished.message] = self.refusals.get(finished.message, 0) + 1
        ended = self._waiting_clients.pop(finished.request_id, None)
        if ended is not None:
            ended.succeed()

    def _given_up(self, deliver: Callable[..., None], *arguments: Any) -> None:
        """End a request if every delivery of it was lost and no copy has arrived. A lost cancel changes nothing."""
        request = arguments[0]
        if not isinstance(request, Request) or not self.faults.is_waiting_for(request.request_id):
            return
        home = self.router.home_of_lost(deliver, *arguments)
        if home is not None:
            message = "unreachable: every attempt to send it was lost"
            self._on_finished(home, FinishedRequest(request.request_id, FinishReason.ERROR, 0, message=message))


def _ema_of(metrics: AdaptiveMetrics) -> Mapping[int, float]:
    """Return the EMA of each range; an empty result if the engine has verified nothing, for example a prefill
    engine."""
    return metrics.ema_accept_len if metrics.verify_calls else {}


def _max_tokens_of(asked: int | str | None, config: EngineConfig) -> int | None:
    """Return how many tokens each request asks for. None: as many as it emits; else a guaranteed output would be a
    whole context."""
    if isinstance(asked, str) or (asked is None and config.rules.guarantee_output):
        return None
    return asked or config.context_len
