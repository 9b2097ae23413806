"""Builds the service of a run: engines on simulated time, the links to them, and what routes requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ...core.acceptance.process import AcceptanceProcess, GaussianAcceptance
from ...core.contract.events import Event, EventSink, ignore
from ...core.contract.request import FinishedRequest
from ...core.contract.step import RoundShape
from ...core.draws import Purpose
from ...core.scheduler.config import EngineRole
from ...observe.engine_lines import engine_lines
from ..actors.clock import Environment
from ..actors.device import Jitter, SimulatedDevice
from ..actors.engine import EngineActor
from ..actors.host_work import HostJitter, HostWork
from ..actors.router import EngineWire, Link, ReplicaRouter
from ..actors.spans import SpanSink
from ..actors.streaming import TokenStreamer
from ..assembly import Assembly
from ..disaggregation.cluster import Cluster
from ..disaggregation.network import Network
from ..faults.service import SoundService

Replicas = list[EngineActor]


Ended = Callable[[int, FinishedRequest], None]


class RunService(NamedTuple):
    """What serves the requests of a run. `on_finished` takes the ends that engines report; `streamers` are by replica,
    where tokens arrive later than their rounds end."""

    replicas: Replicas
    router: ReplicaRouter | Cluster
    cluster: Cluster | None
    on_finished: Ended
    streamers: Mapping[int, TokenStreamer]


class ServiceBuilder:
    """Makes the parts of one service."""

    def __init__(
        self, env: Environment, assembly: Assembly, faults: SoundService, *, has_lanes: bool, named_slots: bool
    ) -> None:
        """`has_lanes`: replicas do not depend on each other, and each has its place among events of one time.
        `named_slots`: sinks or parts of the service ask which KV slots a step writes."""
        self._streamers: dict[int, TokenStreamer] = {}
        self._env = env
        self._assembly = assembly
        self._faults = faults
        self._has_lanes = has_lanes
        self._named_slots = named_slots
        pools = assembly.pools
        # By request, where engines hand over: when its first chunk arrives.
        self._begun_ns: dict[str, int] | None = {} if pools.is_disaggregated else None

    def make_service(
        self,
        numbers: Iterable[int],
        sinks: Callable[[int], Sequence[EventSink]],
        spans: SpanSink | None,
        ended: Ended,
        unreachable: Callable[..., None],
    ) -> RunService:
        """Make the replicas with these numbers, and connect clients with them. `ended` takes the ends that clients see,
        `unreachable` a message whose attempts were all lost, with what should have got it."""
        cluster = self._make_cluster(ended) if self._assembly.pools.is_disaggregated else None
        on_finished = ended if cluster is None else cluster.finished
        replicas = [self._make_replica(number, sinks(number), spans, on_finished) for number in numbers]
        router = self._connect(replicas, cluster, unreachable)
        return RunService(replicas, router, cluster, on_finished, self._streamers)

    def _make_cluster(self, on_finished: Ended) -> Cluster:
        """Make what joins prefill and decode engines. `on_finished` takes what their clients see."""
        assembly, table = self._assembly, self._assembly.scenario.disaggregation
        roles = map(assembly.pools.role_of, range(assembly.pools.num_engines))
        bytes_per_s = [assembly.of_role(role).deployment.port_bytes_per_s for role in roles]
        network = Network(self._env, round(table.latency_us * 1000), bytes_per_s)
        return Cluster(self._env, assembly, network, on_finished)

    def _make_replica(
        self, replica: int, sinks: Sequence[EventSink], spans: SpanSink | None, on_finished: Ended
    ) -> EngineActor:
        """Make one engine with its device and its host. `on_finished` takes the ends that it reports."""
        role = self._assembly.pools.role_of(replica)
        assembly = self._assembly.of_role(role)
        name = f"{'engine' if role is EngineRole.BOTH else role} {replica}"
        is_captured = assembly.cost.is_captured if assembly.spec.graph_sizes else None
        lines = engine_lines(name, is_captured=is_captured, from_zero=True)
        if lines is not None:
            sinks = [*sinks, lines]
        if assembly.deployment.front_end.streams_late:
            streamer = self._streamers[replica] = TokenStreamer(assembly.deployment.front_end, self._begun_ns)
            sinks = [streamer.take, *sinks]
        hooks, sinks = self._faults.join(assembly.spec.config, sinks)
        engine = self._assembly.make_engine(_fan_out(sinks), replica, self._named_slots)
        if lines is not None:
            lines.engine = engine
        hardware, seed = assembly.scenario.hardware, assembly.scenario.seed
        jitter = Jitter.of(hardware.device_jitter, seed, Purpose.DEVICE_TIME, replica)
        num_rows = assembly.spec.config.num_rows
        device = SimulatedDevice(
            assembly.cost, num_rows, assembly.acceptance, self._tree_process, jitter, assembly.host_link
        )
        host = HostWork(
            assembly.host,
            not engine.config.overlap,
            HostJitter.of(hardware.host_jitter, seed, replica),
            has_look_ups=assembly.algorithm.has_look_ups,
        )
        front_end, lane = assembly.deployment.front_end, self._lane(replica)
        actor = EngineActor(self._env, replica, engine, device, host, on_finished, spans, hooks, front_end, lane)
        self._faults.attach(actor)
        return actor

    def _connect(
        self, replicas: Replicas, cluster: Cluster | None, unreachable: Callable[..., None]
    ) -> ReplicaRouter | Cluster:
        """Connect clients with the replicas, and return what routes requests to them."""
        links = [self._make_link(actor.replica, unreachable) for actor in replicas]
        if cluster is not None:
            self._faults.start_transfers(cluster, replicas, links)
            return cluster
        numbers = [actor.replica for actor in replicas]
        by_number: Mapping[int, EngineActor] = dict(zip(numbers, replicas, strict=True))
        assembly = self._assembly
        return ReplicaRouter(
            assembly.scenario.router.policy,
            assembly.pools.num_engines,
            by_number,
            dict(zip(numbers, links, strict=True)),
            assembly.scenario.seed,
            assembly.cache_tokens,
        )

    def _make_link(self, replica: int, unreachable: Callable[..., None]) -> EngineWire:
        table = self._assembly.scenario.router
        latency_ns, bytes_per_s = round(table.latency_us * 1000), table.bandwidth_gbps * 1e9 / 8
        return self._faults.wire(Link(self._env, latency_ns, bytes_per_s, self._lane(replica)), replica, unreachable)

    def _lane(self, replica: int) -> int:
        return replica if self._has_lanes else 0

    def _tree_process(self, shape: RoundShape) -> AcceptanceProcess:
        """Return acceptance along the deepest accepted path of a tree;
        fixed and recorded processes hold for trees as they are."""
        process = self._assembly.acceptance
        if not isinstance(process, GaussianAcceptance):
            return process
        return process.for_tree(shape, self._assembly.scenario.acceptance.rank_ratio)


def _fan_out(sinks: Sequence[EventSink]) -> EventSink:
    """Return one sink for all of `sinks`."""
    if len(sinks) < 2:
        return sinks[0] if sinks else ignore

    def to_all(event: Event) -> None:
        for sink in sinks:
            sink(event)

    return to_all
