"""A service without faults, and one under a fault plan: its injectors, its early end, and the report on injected faults
and broken promises."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import simpy

from ...core.contract.events import EventSink
from ...core.contract.request import Request
from ...core.errors import ForedraftError, InvariantViolation, count_of
from ...core.scheduler.config import EngineConfig
from ...core.scheduler.engine import Engine
from ..actors.clock import Environment
from ..actors.device import Truth
from ..actors.engine import EngineActor
from ..actors.hooks import NO_HOOKS, Hooks
from ..actors.router import EngineWire, Link
from ..assembly import Assembly
from ..disaggregation.cluster import Cluster
from ..disaggregation.endpoint import EndpointHooks
from ..disaggregation.network import PacketHooks
from ..workload.workload import TimedRequest
from .clients import FaultyClients
from .clock import StampedMoves
from .injector import FaultInjector
from .kinds import KINDS
from .plan import FaultPlan, Ledger
from .promises import OF_KIND, BrokenPromise, Promises, Witness
from .transfers import TransferFaultInjector, UnreliableLink


@dataclass(frozen=True, slots=True)
class FaultReport:
    """The injected faults and the checked promises, each with its count, and the broken promises."""

    plan: FaultPlan
    injected: dict[str, int]  # of the enabled kinds
    checked: dict[str, int]  # by promise
    cancelled_in: dict[str, int]  # by state of the request
    broken: tuple[BrokenPromise, ...]

    @property
    def kept(self) -> bool:
        return not self.broken

    @property
    def never_fired(self) -> tuple[str, ...]:
        """Enabled kinds that never happened, so that their promises were not tested."""
        return tuple(kind for kind, count in self.injected.items() if not count)

    def checked_of(self, kind: str) -> int:
        """Return how often the promises of a kind were checked."""
        return sum(self.checked[promise] for promise in OF_KIND[kind])

    def to_json(self) -> dict[str, Any]:
        """Return the numbers for summary.json."""
        return {
            "faults_injected": self.injected,
            "faults_never_fired": list(self.never_fired),
            "promises_checked": {kind: self.checked_of(kind) for kind in self.injected},
            "promises_broken": [str(broken) for broken in self.broken],
        }


class SoundService:
    """A service in which nothing goes wrong. `FaultyService` says what each method is for."""

    is_faulty = False

    def join(self, config: EngineConfig, sinks: Sequence[EventSink]) -> tuple[Hooks, Sequence[EventSink]]:
        return NO_HOOKS, sinks

    def attach(self, actor: EngineActor) -> None: ...

    def wire(self, link: Link, replica: int, unreachable: Callable[..., None]) -> EngineWire:
        return link

    def start_transfers(self, cluster: Cluster, actors: list[EngineActor], links: Sequence[EngineWire]) -> None:
        cluster.start(actors, links, PacketHooks(), EndpointHooks())

    def arrivals(self, workload: Iterable[TimedRequest]) -> Iterator[TimedRequest]:
        return iter(workload)

    def start(self) -> None: ...

    def copies(self, arrival: TimedRequest) -> int:
        return 1

    def shape(self, arrival: TimedRequest, request: Request, truth: Truth) -> Request:
        return request

    def sent(self, arrival: TimedRequest, request: Request, replica: int) -> None: ...
    def came(self, request_id: str, number: int) -> None: ...
    def ended(self, request_id: str) -> None: ...
    def forget(self, request_id: str) -> None: ...

    def is_waiting_for(self, request_id: str) -> bool:
        return False

    def reports(self, error: Exception) -> bool:
        return False

    def finish(self, complete: bool) -> FaultReport | None:
        return None


class FaultyService(SoundService):
    """The parts of one run that inject faults, and the checks that need all of them."""

    is_faulty = True

    def __init__(self, env: Environment, plan: FaultPlan, seed: int, assembly: Assembly) -> None:
        self.env = env
        self.plan = plan
        self.ledger: Ledger = Ledger(plan, seed)
        self.promises: Promises = Promises()
        self.injectors: list[FaultInjector] = []
        context_len = assembly.spec.config.context_len
        self.clients: FaultyClients = FaultyClients(env, self.ledger, self.injectors, context_len)
        self._has_transfers = assembly.pools.is_disaggregated
        self._sent: dict[str, int] = {}  # id -> how often it has ended
        self._last_end_ns = 0

    # -- parts --------------------------------------------------------------------------------------------------------

    def join(self, config: EngineConfig, sinks: Sequence[EventSink]) -> tuple[Hooks, Sequence[EventSink]]:
        """Return the hooks of the next replica, whose engine has this configuration, and the sinks of its events:
        `sinks` and a witness."""
        witness = Witness(self.promises, config)
        injector = FaultInjector(len(self.injectors), self.ledger, self.promises, witness)
        self.injectors.append(injector)
        sinks = [*sinks, witness.take]
        return injector, [StampedMoves(sink, injector.clock) for sink in sinks] if self._has_transfers else sinks

    def attach(self, actor: EngineActor) -> None:
        """Take a replica's actor, once it is made."""
        self.injectors[actor.replica].actor = actor

    def wire(self, link: Link, replica: int, unreachable: Callable[..., None]) -> EngineWire:
        """Return what carries the clients' messages to a replica. `unreachable` takes a message whose attempts were
        all lost, with what should have got it."""
        return UnreliableLink(link, replica, self.ledger, unreachable)

    def start_transfers(self, cluster: Cluster, actors: list[EngineActor], links: Sequence[EngineWire]) -> None:
        """Make the endpoints of a cluster, with the faults between them."""
        TransferFaultInjector(self.env, self.ledger, self.promises).start(cluster, self.injectors, links)

    def arrivals(self, workload: Iterable[TimedRequest]) -> Iterator[TimedRequest]:
        """Yield the workload; faults end with its last arrival."""
        yield from workload
        self.ledger.end()

    def start(self) -> None:
        """Begin the faults of the run as a whole."""
        if self.ledger.draws.at("run", 0, 0):
            self.env.process(self._shut_down())

    def _shut_down(self) -> Generator[simpy.Event, None, None]:
        kind, draws = "service.shutdown", self.ledger.draws
        at_s = draws.amount(kind, 0, 0) * self.plan.service.shutdown.within_s
        yield self.env.timeout(round(at_s * 1e9))
        self.ledger.note(kind, self.env.now)
        give_up = draws.amount(kind, 0, 0, 1) < 0.5
        for injector in self.injectors:
            injector.shut_down(give_up)

    # -- requests -----------------------------------------------------------------------------------------------------

    def copies(self, arrival: TimedRequest) -> int:
        """Return how many requests come for this arrival: one, or a burst."""
        return self.clients.copies(arrival, self.env.now)

    def shape(self, arrival: TimedRequest, request: Request, truth: Truth) -> Request:
        """Return the request as its client sends it now."""
        shaped = self.clients.shape(arrival, request, truth, self.env.now)
        self._sent[shaped.request_id] = 0
        return shaped

    def sent(self, arrival: TimedRequest, request: Request, replica: int) -> None:
        """Let a client do what it does after it has sent its request to `replica`."""
        self.clients.after(arrival, request, replica, self.env.now)

    def came(self, request_id: str, number: int) -> None:
        """Take a request, the `number`th, of a client that is no part of the run."""
        self._sent[request_id] = 0
        self.clients.take(number, request_id, self.env.now)

    def ended(self, request_id: str) -> None:
        """Count an end that is reported to a client."""
        self._sent[request_id] += 1
        once = self._sent[request_id] == 1
        self.promises.check(
            "one_end", once, self.env.now, f"{request_id} has ended {count_of(self._sent[request_id], 'time')}"
        )
        self._last_end_ns = self.env.now

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended, in a run without an end."""
        self._sent.pop(request_id, None)

    def is_waiting_for(self, request_id: str) -> bool:
        return self._sent.get(request_id) == 0

    # -- the end ------------------------------------------------------------------------------------------------------

    def reports(self, error: Exception) -> bool:
        """Report an exception that left the service, with the last places that it passed. Returns whether it is a
        broken promise, and no error of the input or of a file."""
        if isinstance(error, ForedraftError | OSError):
            return False
        places = [f"{frame.name} ({frame.filename.rpartition('/')[2]}:{frame.lineno})" for frame in _frames(error)[-4:]]
        message = f"{type(error).__name__}: {error}; in {' > '.join(places)}"
        self.promises.check("no_crash", False, self.env.now, message)
        return True

    def finish(self, complete: bool) -> FaultReport:
        """Check that nothing is left, if the run came to its end; returns the report."""
        if complete and not self.promises.broken:
            self._check_drained()
        ledger = self.ledger
        assert set(KINDS) == set(OF_KIND), "a kind of fault without a promise"
        return FaultReport(
            self.plan,
            dict(ledger.injected),
            dict(self.promises.checked),
            dict(ledger.cancelled_in),
            tuple(self.promises.broken),
        )

    def _check_drained(self) -> None:
        promises, now_ns = self.promises, self.env.now
        for name, times in self._sent.items():
            promises.check("one_end", times == 1, now_ns, f"{name} has ended {count_of(times, 'time')}")
        took_ns = self._last_end_ns - self.ledger.last_ns
        in_time = took_ns <= self.plan.recovery_s * 1e9
        promises.check(
            "recovered", in_time, now_ns, f"the last request ended {took_ns / 1e9:.1f} s after the last fault"
        )
        for injector in self.injectors:
            left = injector.left_over
            promises.check("drained", not left, now_ns, f"replica {injector.replica}: {left}")
            promises.recount("books_agree", injector.engine, now_ns)
            if not promises.broken:
                left = _left_over(injector.engine)
                promises.check("drained", not left, now_ns, f"replica {injector.replica}: {left}")


def make_service(env: Environment, plan: FaultPlan | None, assembly: Assembly) -> SoundService:
    """Return what injects the faults of `plan` into a run."""
    return SoundService() if plan is None else FaultyService(env, plan, assembly.scenario.seed, assembly)


def _left_over(engine: Engine) -> str:
    """Describe the slots that are not free although the prefix cache has given all of its own back;
    empty if there are none."""
    try:
        engine.store.forget()
    except InvariantViolation as violation:
        return str(violation)
    held = engine.store.allocator.num_held_slots
    return f"still held in the end: {count_of(held, 'slot')}" if held else ""


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return where an error was raised first: SimPy passes errors of a process on as the cause of another."""
    while error.__cause__ is not None:
        error = error.__cause__
    return list(traceback.extract_tb(error.__traceback__))
