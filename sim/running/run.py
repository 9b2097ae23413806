"""A simulated run: actors around the real scheduler, from a scenario to a report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from simpy.core import EmptySchedule

from ...core.adaptive.controller import AdaptiveMetrics
from ...core.contract.events import EventSink
from ..actors.clock import Environment
from ..actors.engine import EngineActor
from ..actors.interruption import deferred_signals
from ..actors.router import ReplicaRouter
from ..actors.spans import SpanSink
from ..actors.streaming import TokenStreamer
from ..assembly import Assembly, assemble
from ..cost.calibration import Calibration
from ..disaggregation.cluster import Cluster
from ..effects.given_keys import refuse_without_effect
from ..effects.notices import notices_of
from ..faults.plan import FaultPlan
from ..faults.service import SoundService, make_service
from ..load import asked_lengths, make_workload, scan_workload
from ..scenario import Scenario
from ..workload.traces import TraceSource
from ..workload.workload import SyntheticWorkload
from .building import ServiceBuilder
from .clients import RunClients
from .coupling import coupling
from .report import RunProgress, RunReport


class Simulation:
    """One run of one scenario. `sinks(replica)` are the event sinks of a replica's engine, `spans` takes device and
    scheduler times."""

    clients_are_outside: ClassVar[bool] = False
    PROGRESS_EVERY_S = 0.1
    EVENTS_PER_LOOK = 2000

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
        self.faults: SoundService = make_service(self.env, faults, self.assembly)
        self.clients: RunClients = self.make_clients()
        self._own = own
        self._has_lanes = not coupling(scenario, faults is not None)
        builder = ServiceBuilder(
            self.env,
            self.assembly,
            self.faults,
            has_lanes=self._has_lanes,
            named_slots=named_slots or faults is not None or self._reads_slots,
        )
        numbers = range(self.assembly.pools.num_engines) if own is None else own
        service = builder.make_service(
            numbers, sinks or (lambda replica: ()), spans, self.clients.ended, self.clients.given_up
        )
        self.clients.connect(service)
        self.replicas: list[EngineActor] = service.replicas
        self.cluster: Cluster | None = service.cluster
        self.router: ReplicaRouter | Cluster = service.router
        self.streamers: Mapping[int, TokenStreamer] = service.streamers

    def make_clients(self) -> RunClients:
        """Make the clients of the run."""
        return RunClients(self.env, self.assembly, self.faults)

    @property
    def _reads_slots(self) -> bool:
        """Whether the service asks which KV slots a step writes: for a transfer, or a prefix that is found again."""
        config = self.assembly.spec.config
        return self.assembly.pools.is_disaggregated or (
            config.prefix_cache and self.scenario.workload.contents_are_known
        )

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
        report = self._report(complete)
        if self._own is None:
            report.check_that_some_fit()
        return report

    def _report(self, complete: bool) -> RunReport:
        clients = self.clients
        return RunReport(
            complete=complete,
            duration_ns=self._duration_ns(complete),
            num_submitted=clients.num_submitted,
            num_ended=clients.num_ended,
            num_rounds=sum(replica.rounds for replica in self.replicas),
            device_busy_ns=tuple(replica.device.busy_ns for replica in self.replicas),
            refusals=dict(clients.refusals),
            num_skipped_rows=self.num_skipped_rows,
            faults=self.faults.finish(complete),
            disaggregation=self.router.report(self._duration_ns(complete)),
            asked_lengths=asked_lengths(self.workload),
            ema_accept_len=tuple(_ema_of(actor.engine.controller.metrics()) for actor in self.replicas),
            assembly=self.assembly,
            last_arrival_ns=clients.last_arrival_ns,
            notices=self.notices,
        )

    def _duration_ns(self, complete: bool) -> int:
        """Return the time of the last request, result or page. Timers without effect do not lengthen the run. Examples
        are the timer of a client whose request has ended, and an engine's timer for a remembered transfer."""
        if not complete:
            return self.env.now
        worked_until_ns = (replica.worked_until_ns for replica in self.replicas)
        return max(self.clients.last_request_ns, self.router.last_busy_ns, *worked_until_ns)

    def _start_workload(self) -> None:
        arrivals = self.faults.arrivals(self.workload)
        self.faults.start()
        if self._own is not None:
            assert isinstance(self.router, ReplicaRouter) and self._has_lanes, (
                "only replicas that are not coupled run apart"
            )
            arrivals = self.router.own(arrivals)
        self.clients.begin(arrivals)

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
        return RunProgress(self.env.now, self.clients.num_submitted, self.clients.num_ended, rounds, self.num_expected)


def _ema_of(metrics: AdaptiveMetrics) -> Mapping[int, float]:
    """Return the EMA of each range; an empty result if the engine has verified nothing, for example a prefill
    engine."""
    return metrics.ema_accept_len if metrics.verify_calls else {}
