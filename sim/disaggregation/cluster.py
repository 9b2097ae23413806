"""The router of engines in two roles: it chooses the engine that computes a prompt and the engine that decodes it, and
reports the ends of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from ...core.contract.request import FinishedRequest, FinishReason, Request
from ...core.handoff import HandoffTiming, PageFormat
from ...core.handoff.placement import Name, Placement, Placements, Verdict
from ...core.prompt import Prompt
from ...core.scheduler.config import EngineRole
from ...observe.measuring.summary import share
from ..actors.clock import Environment, call_at
from ..actors.device import Truth
from ..actors.engine import EngineActor
from ..actors.router import BYTES_PER_TOKEN, Balancer, EngineWire
from ..assembly import Assembly
from ..assembly.pools import timing_of
from .endpoint import EndpointHooks, HandoffEndpoint, Surroundings
from .network import DisaggregationReport, HandoffNetwork, Network, PacketHooks, TransferTimes

# Engines change roles one at a time, out of the pool that is less busy, and only when the engine is empty:
#
#     serving ──the other pool is much busier──► draining: no new requests ──empty──► serving in the other role
#
# Empty means that no request, no row, no transfer is left, nor the memory of one that could still be asked for
# (HANDOFF-10).

BUSIER_BY = 0.2
"""A pool gets an engine of the other one when its devices were busier by more than this share of the time."""

ROLES = (EngineRole.PREFILL, EngineRole.DECODE)


class Engines(Protocol):
    """What `Roles` needs of a cluster."""

    env: Environment
    endpoints: list[HandoffEndpoint]

    @property
    def outstanding(self) -> list[int]: ...
    @property
    def has_requests(self) -> bool: ...


class Roles:
    """Which engine has which role, for how long, and how busy it was in it. `every_ns` None: roles never change."""

    def __init__(self, cluster: Engines, every_ns: int | None) -> None:
        self.draining: HandoffEndpoint | None = None
        self.num_changes: int = 0
        self._cluster = cluster
        self._every_ns = every_ns
        self._is_looking = False
        self._since: dict[int, tuple[int, int]] = {}  # engine -> when its role began, and its device's work by then
        self._last_look: dict[int, int] = {}  # engine -> its device's work at the last look
        self._busy_ns: dict[EngineRole, int] = dict.fromkeys(ROLES, 0)
        self._engine_ns: dict[EngineRole, int] = dict.fromkeys(ROLES, 0)

    def serving(self, role: EngineRole) -> list[int]:
        """Return the engines that take new requests in this role."""
        engines = [e for e in self._cluster.endpoints if e.engine.role is role and not e.is_lost]
        return [e.replica for e in engines if e is not self.draining]

    def keep_looking(self) -> None:
        """Look at the pools every `every_ns` from now on, as long as there are requests."""
        if self._every_ns is not None and not self._is_looking:
            self._is_looking = True
            self._last_look = {endpoint.replica: endpoint.device.busy_ns for endpoint in self._cluster.endpoints}
            call_at(self._cluster.env, self._cluster.env.now + self._every_ns, self._look, self._every_ns)

    def _look(self, since_ns: int) -> None:
        """Look at what the pools did in the last `since_ns`."""
        self._is_looking = False
        if self.draining is None:
            self._drain_one(since_ns)
        elif self.draining.is_empty:
            self._change(self.draining)
            self.draining = None
        if self._cluster.has_requests or self.draining is not None:
            self.keep_looking()

    def _drain_one(self, since_ns: int) -> None:
        prefill, decode = (self.serving(role) for role in ROLES)
        gap = self._busy_share(prefill, since_ns) - self._busy_share(decode, since_ns)
        donors = decode if gap > BUSIER_BY else prefill if gap < -BUSIER_BY else []
        if len(donors) > 1:
            outstanding = self._cluster.outstanding
            least = min(donors, key=lambda engine: (outstanding[engine], engine))
            self.draining = self._cluster.endpoints[least]

    def _busy_share(self, engines: Sequence[int], since_ns: int) -> float:
        endpoints = self._cluster.endpoints
        busy_ns = sum(endpoints[engine].device.busy_ns - self._last_look[engine] for engine in engines)
        return busy_ns / (since_ns * max(len(engines), 1))  # all may be lost

    def _change(self, endpoint: HandoffEndpoint) -> None:
        self._account(endpoint, self._cluster.env.now)
        endpoint.change_role(EngineRole.DECODE if endpoint.is_prefill else EngineRole.PREFILL)
        self.num_changes += 1

    def _account(self, endpoint: HandoffEndpoint, now_ns: int) -> None:
        since_ns, before_ns = self._since.get(endpoint.replica, (0, 0))
        role = endpoint.engine.role
        self._busy_ns[role] += endpoint.device.busy_ns - before_ns
        self._engine_ns[role] += now_ns - since_ns
        self._since[endpoint.replica] = (now_ns, endpoint.device.busy_ns)

    def busy_shares(self, now_ns: int) -> dict[EngineRole, float | None]:
        """Return the devices' busy share per role, of the time that engines had it; called once, at the end."""
        for endpoint in self._cluster.endpoints:
            self._account(endpoint, max(now_ns, self._since.get(endpoint.replica, (0, 0))[0]))
        return {role: share(self._busy_ns[role], time_ns) for role, time_ns in self._engine_ns.items()}

    def share_of_prefill(self, busy_ns: int) -> float | None:
        """Return `busy_ns` as a share of the time that engines computed prompts, after `busy_shares`."""
        return share(busy_ns, self._engine_ns[EngineRole.PREFILL])


OnFinished = Callable[[int, FinishedRequest], None]


class EnginePool:
    """The engines that serve in one role (`core.handoff.placement.WorkerPool`), by their numbers."""

    def __init__(self, cluster: Cluster, role: EngineRole, balancer: Balancer) -> None:
        self._cluster = cluster
        self._role = role
        self._balancer = balancer

    def __iter__(self) -> Iterator[int]:
        return (e.replica for e in self._cluster.endpoints if e.engine.role is self._role and not e.is_lost)

    def assign(self, request: Request) -> int | None:
        among = self._cluster.roles.serving(self._role)
        return self._balancer.assign(request, among) if among else None

    def release(self, name: Name, request: Request) -> None:
        self._balancer.ended(self._cluster.endpoint_of(name).replica, request.request_id)

    def lose(self, name: Name) -> None:
        """Do nothing, because the endpoint is lost already."""


class Cluster:
    """Routes requests of a disaggregated service (see `ReplicaRouter`), and holds its endpoints.

    Both engines of a request are chosen when it arrives, and again when its decode engine is lost (`Placements`). A
    request has ended for its client when an endpoint first reports an end. A handover and a move to another engine are
    no ends.
    """

    def __init__(self, env: Environment, assembly: Assembly, network: Network, on_finished: OnFinished) -> None:
        scenario = assembly.scenario
        table = scenario.disaggregation
        self.env = env
        self.assembly = assembly
        self.network = network
        self.page_format: PageFormat = page_format_of(assembly)
        self.timing: HandoffTiming = timing_of(scenario)
        self.last_end_ns: int = 0
        self.last_sent_ns: int = 0
        self._on_finished = on_finished
        num_engines = assembly.pools.num_engines
        tokens = assembly.of_role(EngineRole.PREFILL).cache_tokens
        self._prefill = Balancer(table.prefill_policy, num_engines, scenario.seed, tokens, 1)
        self._decode = Balancer(table.decode_policy, num_engines, scenario.seed, assembly.cache_tokens, 2)
        self.placements: Placements = Placements(
            EnginePool(self, EngineRole.PREFILL, self._prefill),
            EnginePool(self, EngineRole.DECODE, self._decode),
            lambda request_id: Prompt.of_length(self._shown.get(request_id, 0)),
        )
        self._truths: dict[str, Truth] = {}  # of the requests that have not ended for their clients
        self._shown: dict[str, int] = {}  # tokens of those that an engine has handed on
        self.num_moved: int = 0  # how often a request was placed anew
        self.endpoints: list[HandoffEndpoint] = []
        self.roles: Roles = Roles(self, None if table.rebalance_s is None else round(table.rebalance_s * 1e9))
        self._times = TransferTimes()
        self._links: Sequence[EngineWire] = ()

    def start(
        self,
        actors: list[EngineActor],
        links: Sequence[EngineWire],
        packet_hooks: PacketHooks,
        endpoint_hooks: EndpointHooks,
    ) -> HandoffNetwork:
        """Make the endpoints of the actors, before the first event.
        `links` are those from the clients, one per actor."""
        sizes = self.page_format.page_size * self.assembly.sent_kv_bytes, draft_input_bytes(self.assembly)
        interconnect = HandoffNetwork(self.network, self.page_format, *sizes, self.endpoints, packet_hooks)
        around = Surroundings(
            interconnect,
            self.timing,
            self._times,
            self.assembly.target.kv_layers,
            self.assembly.scenario.disaggregation.layerwise,
            self,
            endpoint_hooks,
        )
        self._links = links
        self.endpoints += [HandoffEndpoint(actor, around) for actor in actors]
        return interconnect

    # -- clients ------------------------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> list[int]:
        """Per engine: requests that it computes, or will decode, or decodes."""
        return [p + d for p, d in zip(self._prefill.outstanding, self._decode.outstanding, strict=True)]

    @property
    def balancers(self) -> dict[str, Balancer]:
        """By the key of a scenario that sets their policy."""
        return {"disaggregation.prefill_policy": self._prefill, "disaggregation.decode_policy": self._decode}

    @property
    def request_ids(self) -> list[str]:
        """The requests that have not ended for their clients."""
        return list(self._truths)

    @property
    def has_requests(self) -> bool:
        return bool(self._truths)

    def submit(self, request: Request, truth: Truth) -> int:
        """Send a request to its prefill engine, whose number is returned."""
        self.last_sent_ns = self.env.now
        placement = self.placements.place(request)
        self.roles.keep_looking()
        self._truths[request.request_id] = truth
        if placement is None:
            self._end(0, FinishedRequest(request.request_id, FinishReason.ERROR, 0, message="no decode engine is left"))
            return 0
        return self._send(placement)

    def _send(self, placement: Placement) -> int:
        """Send a request to its prefill engine, whose number is returned."""
        request, engine = placement.request, self.endpoint_of(placement.prefill).replica
        size, truth = request.prefill_len * BYTES_PER_TOKEN, self._truths[request.request_id]
        self._links[engine].send(size, self._arrive, request, truth, placement)
        return engine

    def _arrive(self, request: Request, truth: Truth, placement: Placement) -> None:
        if placement.lost is None:  # else it is placed anew
            self.endpoint_of(placement.prefill).actor.receive(request, truth)

    def cancel(self, request_id: str) -> None:
        """Tell the engine that has the request that its client has left; does nothing if the request has ended."""
        placement = self.placements.abort(request_id)
        if placement is None:
            return
        if placement.is_handed_over:
            endpoint = self.endpoint_of(placement.decode)
            self._links[endpoint.replica].send(0, endpoint.withdraw, request_id)
        else:
            endpoint = self.endpoint_of(placement.prefill)
            self._links[endpoint.replica].send(0, endpoint.actor.cancel, request_id)

    def home_of_lost(
        self, deliver: Callable[..., None], request: Request, truth: Truth, placement: Placement
    ) -> int | None:
        """Return the engine that should have got a lost request; None if the request is placed anew, since its decode
        engine was lost."""
        return None if placement.lost is not None else self.endpoint_of(placement.prefill).replica

    @property
    def last_busy_ns(self) -> int:
        """When the network between the engines last carried something."""
        return self.network.last_busy_ns

    def ended(self, replica: int, request_id: str) -> None:
        """Do nothing, because `finished` has counted the end."""

    def finished(self, replica: int, finished: FinishedRequest) -> None:
        """Take an engine's report of an end. The first report counts; reports of a handover, or of a move away from a
        lost engine, do not count."""
        request_id, reason = finished.request_id, finished.reason
        placement = self.placements.get(request_id)
        if placement is None:
            return
        if replica == placement.prefill:
            self.placements.handed_over(request_id)
        if reason in (FinishReason.TRANSFERRED, FinishReason.MOVED):
            self._shown[request_id] = max(finished.num_output, self._shown.get(request_id, 0))
            return
        self.placements.end(request_id)
        self._end(replica, finished)

    def _end(self, replica: int, finished: FinishedRequest) -> None:
        del self._truths[finished.request_id]
        self._shown.pop(finished.request_id, None)
        self.last_end_ns = self.env.now
        self._on_finished(replica, finished)

    # -- engines ------------------------------------------------------------------------------------------------------

    def endpoint_of(self, name: Name) -> HandoffEndpoint:
        """Return the endpoint of an engine by its name in placements, which is its number."""
        assert isinstance(name, int)
        return self.endpoints[name]

    def peer_of(self, request_id: str) -> str:
        """Return the name of a request's decode engine; for a copy of one that has ended for its client any will do."""
        placement = self.placements.get(request_id)
        if placement is not None:
            return self.endpoint_of(placement.decode).name
        return next(endpoint.name for endpoint in self.endpoints if not endpoint.is_prefill)

    # -- an engine that is lost ----------------------------------------------------------------------------------------

    def lose(self, lost: HandoffEndpoint) -> None:
        """Treat a decode engine as dead, and let all living engines confirm that they have dropped everything that they
        share with it."""
        verdicts = self.placements.lose(lost.replica, f"{lost.name} was lost")
        for endpoint in self.endpoints:
            if not endpoint.is_lost:
                self.network.say(lost.replica, endpoint.replica, 0, self._tell, endpoint, lost)
        self._carry_out(verdicts)

    def _tell(self, endpoint: HandoffEndpoint, lost: HandoffEndpoint) -> None:
        if not endpoint.is_lost:  # else its own loss is heard
            endpoint.handoff.peer_lost(lost.name, self.env.now, FinishReason.MOVED)
            self.network.say(endpoint.replica, lost.replica, 0, self._answered, endpoint, lost)

    def _answered(self, endpoint: HandoffEndpoint, lost: HandoffEndpoint) -> None:
        self._carry_out(self.placements.acknowledge_loss(endpoint.replica, lost.replica))

    def _carry_out(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            if verdict.placement is not None:
                self.num_moved += 1
                self._send(verdict.placement)
            else:
                reason = FinishReason.ERROR if verdict.failure else FinishReason.ABORT
                shown = self._shown.get(verdict.request_id, 0)
                self._end(0, FinishedRequest(verdict.request_id, reason, shown, message=verdict.failure))

    def may_replace(self, lost: HandoffEndpoint) -> bool:
        """Return whether a new engine may come in place of a lost one:
        none of its requests waits for a verdict any more."""
        return not self.placements.awaits_answers(lost.replica)

    # -- the end ------------------------------------------------------------------------------------------------------

    def report(self, duration_ns: int) -> DisaggregationReport:
        """Summarize the run, at its end."""
        counts = [endpoint.side.counts for endpoint in self.endpoints]
        num_prefill = sum(endpoint.is_prefill for endpoint in self.endpoints)
        shares = self.roles.busy_shares(duration_ns)
        return DisaggregationReport(
            num_prefill,
            len(self.endpoints) - num_prefill,
            self.roles.num_changes,
            shares[EngineRole.PREFILL],
            shares[EngineRole.DECODE],
            tuple(self.network.out_busy_ns),
            tuple(self.network.in_busy_ns),
            self.roles.share_of_prefill(sum(self.network.out_busy_ns)),
            self.network.num_bytes,
            sum(endpoint.side.counts.retries for endpoint in self.endpoints if endpoint.is_prefill),
            sum(count.ignored for count in counts),
            self.num_moved,
            self._times.to_json(),
        )


def page_format_of(assembly: Assembly) -> PageFormat:
    """Return the format of a page in both pools, all layers: the bytes that the cost model counts per token of KV."""
    size, target, draft = assembly.spec.config.page_size, assembly.target, assembly.draft
    needs_hidden = assembly.algorithm.needs_hidden_states
    return PageFormat(
        page_size=size,
        target_bytes=size * target.kv_bytes_per_token,
        draft_bytes=size * draft.kv_bytes_per_token if draft is not None else 0,
        hidden_size=assembly.relay_shape.hidden_size if needs_hidden else 0,
        layout=f"{target.name}, {target.layers} layers of {target.kv_dtype}",
    )


def draft_input_bytes(assembly: Assembly) -> int:
    """Return the size of the data that is sent with the last page: first token, top-k, hidden state, and the
    algorithm's relayed fields."""
    return sum(field.bytes_per_row for field in assembly.algorithm.relay_fields(assembly.relay_shape))
