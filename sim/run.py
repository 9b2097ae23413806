"""A simulated run: actors around the real scheduler, from a scenario to a report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import simpy
from simpy.core import EmptySchedule

from ..core.acceptance.process import AcceptanceProcess, DayCurve, GaussianAcceptance
from ..core.adaptive.controller import AdaptiveMetrics
from ..core.contract.events import Event, EventSink
from ..core.contract.request import FinishedRequest, FinishReason, Request
from ..core.draws import Purpose, request_key
from ..core.errors import ForedraftError
from ..core.handoff.placement import Placement
from ..core.scheduler.config import EngineRole
from ..observe.engine_lines import engine_lines
from .actors.client import Patience, closed_loop_client, open_loop_source
from .actors.clock import Environment, call_at
from .actors.device import Device, Jitter, Truth
from .actors.engine import EngineActor
from .actors.hooks import NO_HOOKS
from .actors.host_work import HostJitter, HostWork
from .actors.interruption import deferred_signals
from .actors.router import Link, ReplicaRouter
from .actors.spans import SpanSink
from .actors.streaming import TokenStreamer
from .assembly import Assembly, assemble
from .cost.calibration import Calibration
from .disaggregation.cluster import Cluster
from .disaggregation.endpoint import EndpointHooks
from .disaggregation.network import Network, PacketHooks
from .effects.given_keys import refuse_without_effect
from .effects.notices import notices_of
from .faults.clock import StampedMoves
from .faults.injector import FaultInjector
from .faults.plan import FaultPlan
from .faults.service import FaultyService
from .faults.transfers import UnreliableLink
from .load import asked_lengths, contents_are_known, make_workload, scan_workload
from .running.coupling import coupling
from .running.report import Progress, RunReport
from .scenario import Clients, Scenario
from .workload.traces import TraceSource
from .workload.workload import Arrival, SyntheticWorkload


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
        `load_scenario` returns it; keys without effect are then refused or noted (`effects.py`). `calibration`: instead
        of the file `hardware.profile`. `on_assembled` takes the parts of the run before `sinks` is asked. `named_slots`
        False: no sink asks which KV slots a step writes; then engines count them, unless a prefix cache with known
        prompts, a transfer or a fault needs to know. `own`: the replicas that this process simulates, of a run whose
        replicas do not depend on each other (`coupling`); None: all.

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
        self._begun_ns: dict[str, int] = {}  # by request, where engines hand over: when its first chunk arrives
        self._streamers: dict[int, TokenStreamer] = {}  # by replica, where tokens arrive later than their rounds end
        clients_may_leave = scenario.clients != Clients()
        self._has_listeners = scenario.workload.concurrency is not None or clients_may_leave
        day = scenario.acceptance.day_amplitude
        self._day = DayCurve(day) if day else None
        self.faults: FaultyService | None = None
        if faults is not None:
            self.faults = FaultyService(self.env, faults, scenario.seed, self.assembly.spec.config.context_len)
        config, pools, asked = self.assembly.spec.config, self.assembly.pools, scenario.workload.max_tokens
        # None: each request asks for as many tokens as it emits; else a guaranteed output would be a whole context.
        self._max_tokens = (
            None
            if asked == "output" or (asked is None and config.rules.guarantee_output)
            else asked or config.context_len
        )
        # Without a guarantee no decision depends on it.
        self._has_fixed_lengths = asked == "output" and config.rules.guarantee_output > 0
        self._named_slots = (
            named_slots
            or faults is not None
            or pools.is_disaggregated
            or (self.assembly.spec.config.prefix_cache and contents_are_known(scenario))
        )
        self.cluster: Cluster | None = None
        self._on_finished = self._ended
        if pools.is_disaggregated:
            self.cluster = Cluster(self.env, self.assembly, self._make_network(), self._ended)
            self._on_finished = self.cluster.finished
        self._own = own
        self._has_lanes = not coupling(scenario, faults is not None)
        numbers = range(pools.num_engines) if own is None else own
        self.replicas: list[EngineActor] = [
            self._make_replica(replica, sinks(replica) if sinks else (), spans) for replica in numbers
        ]
        self.router: ReplicaRouter | Cluster = self._make_router(numbers)

    def run(self, on_progress: Callable[[Progress], None] | None = None) -> RunReport:
        """Simulate to the end of the workload. Ctrl-C ends the run early, and the report says so."""
        self._start_workload()
        complete = True
        try:
            with deferred_signals() as handle_signals:
                self._step_through(on_progress, handle_signals)
        except KeyboardInterrupt:
            complete = False
        except Exception as error:
            if self.faults is None or isinstance(error, ForedraftError | OSError):
                raise
            self.faults.broken_by(error)
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
            faults=self.faults.finish(complete) if self.faults is not None else None,
            disaggregation=self.cluster.report(self._duration_ns(complete)) if self.cluster is not None else None,
            asked_lengths=asked_lengths(self.workload),
            ema_accept_len=tuple(_ema_of(actor.engine.controller.metrics()) for actor in self.replicas),
            assembly=self.assembly,
            last_arrival_ns=self._last_arrival_ns if self.scenario.workload.concurrency is None else None,
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
        last_ns = max([self._last_request_ns, *(replica.worked_until_ns for replica in self.replicas)])
        return last_ns if self.cluster is None else max(last_ns, self.cluster.network.last_busy_ns)

    def _start_workload(self) -> None:
        env, clients = self.env, self.scenario.clients
        patience = Patience(self.scenario.seed, clients.deadline_s, clients.cancel_share, clients.cancel_mean_s)
        concurrency = self.scenario.workload.concurrency
        arrivals = iter(self.workload)
        if self.faults is not None:
            arrivals = self.faults.arrivals(arrivals)
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

    def _step_through(self, on_progress: Callable[[Progress], None] | None, handle_signals: Callable[[], None]) -> None:
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

    def progress(self) -> Progress:
        rounds = sum(replica.rounds for replica in self.replicas)
        return Progress(self.env.now, self._num_submitted, self._num_ended, rounds, self.num_expected)

    def _make_replica(self, replica: int, sinks: Sequence[EventSink], spans: SpanSink | None) -> EngineActor:
        role, hooks = self.assembly.pools.role_of(replica), NO_HOOKS
        assembly = self.assembly.of_role(role)
        injector: FaultInjector | None = None
        name = f"{'engine' if role is EngineRole.BOTH else role} {replica}"
        is_captured = assembly.cost.is_captured if assembly.spec.graph_sizes else None
        lines = engine_lines(name, is_captured=is_captured, from_zero=True)
        if lines is not None:
            sinks = [*sinks, lines]
        if assembly.deployment.front_end.streams_late:
            begun_ns = None if self.cluster is None else self._begun_ns
            streamer = self._streamers[replica] = TokenStreamer(assembly.deployment.front_end, begun_ns)
            sinks = [streamer.take, *sinks]
        if self.faults is None:
            events = _fan_out(sinks) if sinks else None
        else:
            hooks = injector = self.faults.make_injector(assembly.spec.config)
            events = _fan_out([*sinks, injector.witness.take])
            if self.cluster is not None:
                events = StampedMoves(events, injector.clock)
        engine = self.assembly.make_engine(events, replica, self._named_slots)
        if lines is not None:
            lines.engine = engine
        device_spread, host_spread = self.scenario.hardware.device_jitter, self.scenario.hardware.host_jitter
        seed, num_rows = self.scenario.seed, assembly.spec.config.num_rows
        jitter = Jitter(device_spread, seed, Purpose.DEVICE_TIME, replica) if device_spread else None
        device = Device(assembly.cost, num_rows, assembly.acceptance, self._tree_process, jitter, assembly.host_link)
        host_jitter = HostJitter(host_spread, seed, replica) if host_spread else None
        host = HostWork(assembly.host, not engine.config.overlap, host_jitter)
        actor = EngineActor(
            self.env,
            replica,
            engine,
            device,
            host,
            self._on_finished,
            spans,
            hooks,
            assembly.deployment.front_end,
            self._lane(replica),
        )
        if injector is not None:
            injector.actor = actor
        return actor

    def _lane(self, replica: int) -> int:
        return replica if self._has_lanes else 0

    def _make_network(self) -> Network:
        roles = map(self.assembly.pools.role_of, range(self.assembly.pools.num_engines))
        bytes_per_s = [self.assembly.of_role(role).deployment.port_bytes_per_s for role in roles]
        return Network(self.env, round(self.scenario.disaggregation.latency_us * 1000), bytes_per_s)

    def _make_router(self, numbers: range) -> ReplicaRouter | Cluster:
        """Connect clients with the replicas of these numbers, and return what routes requests to them."""
        links = [self._make_link(replica) for replica in numbers]
        if self.cluster is None:
            return ReplicaRouter(
                self.scenario.router.policy,
                self.assembly.pools.num_engines,
                dict(zip(numbers, self.replicas, strict=True)),
                dict(zip(numbers, links, strict=True)),
                self.scenario.seed,
                self.assembly.cache_tokens,
            )
        if self.faults is None:
            self.cluster.start(self.replicas, links, PacketHooks(), EndpointHooks())
        else:
            self.faults.start_transfers(self.cluster, links)
        return self.cluster

    def _make_link(self, replica: int) -> Link | UnreliableLink:
        table = self.scenario.router
        latency_ns, bytes_per_s = round(table.latency_us * 1000), table.bandwidth_gbps * 1e9 / 8
        link = Link(self.env, latency_ns, bytes_per_s, self._lane(replica))
        if self.faults is None:
            return link
        return UnreliableLink(link, replica, self.faults.ledger, self._given_up)

    def _tree_process(self, topk: int, steps: int, num_draft_tokens: int) -> AcceptanceProcess:
        """Return acceptance along the deepest accepted path of a tree;
        fixed and recorded processes hold for trees as they are."""
        process = self.assembly.acceptance
        if not isinstance(process, GaussianAcceptance):
            return process
        return process.for_tree(topk, steps, num_draft_tokens, self.scenario.acceptance.rank_ratio)

    def _send(self, arrival: Arrival) -> tuple[str, simpy.Event | None]:
        """Send a client's request to its replica, in a burst together with similar requests."""
        copies = 1 if self.faults is None else self.faults.clients.copies(arrival, self.env.now)
        sent = self._send_one(arrival, f"r{arrival.row}")
        for copy in range(1, copies):
            self._send_one(arrival, f"r{arrival.row}.{copy}")
        return sent

    def _send_one(self, arrival: Arrival, request_id: str) -> tuple[str, simpy.Event | None]:
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
        if self.faults is None:
            self.router.submit(request, truth)
            return request_id, ended
        clients, now_ns = self.faults.clients, self.env.now
        request = clients.shape(arrival, request, truth, now_ns)
        self.faults.sent(request_id)
        replica = self.router.submit(request, truth)
        clients.after(arrival, request, replica, now_ns)
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
        if self.faults is not None:
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

    def _given_up(self, deliver: Callable[..., None], *arguments: object) -> None:
        """End a request if every delivery of it was lost and no copy has arrived. A lost cancel changes nothing."""
        request, placement = arguments[0], arguments[-1]
        assert self.faults is not None
        if not isinstance(request, Request) or not self.faults.is_waiting_for(request.request_id):
            return
        if self.cluster is None or not isinstance(placement, Placement):
            home = next(actor.replica for actor in self.replicas if actor.receive == deliver)
        elif placement.lost is not None:
            return  # it is placed anew, since its decode engine was lost
        else:
            home = self.cluster.endpoint_of(placement.prefill).replica
        self._on_finished(home, self.faults.unreachable(request.request_id))


def _ema_of(metrics: AdaptiveMetrics) -> Mapping[int, float]:
    """Return the EMA of each range; an empty result if the engine has verified nothing, for example a prefill
    engine."""
    return metrics.ema_accept_len if metrics.verify_calls else {}


def _fan_out(sinks: Sequence[EventSink]) -> EventSink:
    """Return one sink for all of `sinks`, of which there is at least one."""
    if len(sinks) == 1:
        return sinks[0]

    def to_all(event: Event) -> None:
        for sink in sinks:
            sink(event)

    return to_all
