"""The router of engines in two roles: it chooses where a prompt is computed and where it is decoded, and tells when a request has ended."""

from __future__ import annotations

from collections.abc import Callable

import simpy

from ...core.contract.request import FinishedRequest, FinishReason, Request
from ...core.handoff import PageFormat
from ...core.scheduler.config import EngineRole
from ..actors.device import Truth
from ..actors.engine import EngineActor
from ..actors.link import Link
from ..actors.router import BYTES_PER_TOKEN, Balancer
from ..assembly import Assembly
from .endpoint import EndpointHooks, HandoffEndpoint, Surroundings
from .network import Interconnect, Network, PacketHooks
from .pools import timing_of
from .roles import Roles
from .transfers import DisaggregationReport, TransferTimes

OnFinished = Callable[[int, FinishedRequest], None]


class _Route:
    """Where a request is computed and where it will be decoded."""

    __slots__ = ("decode", "is_computing", "prefill")

    def __init__(self, prefill: int, decode: int) -> None:
        self.prefill = prefill
        self.decode = decode
        self.is_computing = True


class Cluster:
    """Routes requests of a disaggregated service (see `ReplicaRouter`), and holds its endpoints.

    Both engines of a request are chosen when it arrives. A request has ended for its client at the first end that one of them reports,
    other than that its prompt was handed over.
    """

    def __init__(self, env: simpy.Environment, assembly: Assembly, network: Network, on_finished: OnFinished) -> None:
        scenario = assembly.scenario
        table = scenario.disaggregation
        self.env = env
        self.assembly = assembly
        self.network = network
        self.page_format = page_format_of(assembly)
        self.timing = timing_of(scenario)
        self.last_end_ns = 0
        self.last_sent_ns = 0
        self._on_finished = on_finished
        num_engines = assembly.pools.num_engines
        tokens = assembly.cache_tokens
        self._prefill = Balancer(table.prefill_policy, num_engines, scenario.seed, tokens, 1)
        self._decode = Balancer(table.decode_policy, num_engines, scenario.seed, tokens, 2)
        self._routes: dict[str, _Route] = {}
        self.endpoints: list[HandoffEndpoint] = []
        self.roles = Roles(self, None if table.rebalance_s is None else round(table.rebalance_s * 1e9))
        self._times = TransferTimes()
        self._links: list[Link] = []

    def start(
        self, actors: list[EngineActor], links: list[Link], packet_hooks: PacketHooks, endpoint_hooks: EndpointHooks
    ) -> Interconnect:
        """Make the endpoints of the actors, before the first event. `links` are those from the clients, one per actor."""
        size = draft_input_bytes(self.assembly)
        interconnect = Interconnect(self.network, self.page_format, size, self.endpoints, packet_hooks)
        around = Surroundings(
            interconnect,
            self.timing,
            self._times,
            self.assembly.target.kv_layers,
            self.assembly.scenario.disaggregation.layerwise,
            self._peer_of,
            self.decoder_of,
            lambda engine: self.outstanding[engine],
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
        return list(self._routes)

    @property
    def has_requests(self) -> bool:
        return bool(self._routes)

    def submit(self, request: Request, truth: Truth) -> int:
        """Send a request to its prefill engine, whose number is returned."""
        self.last_sent_ns = self.env.now
        route = _Route(
            self._prefill.assign(request, self.roles.serving(EngineRole.PREFILL)),
            self._decode.assign(request, self.roles.serving(EngineRole.DECODE)),
        )
        self.roles.keep_looking()
        self._routes[request.request_id] = route
        size = request.prompt.length * BYTES_PER_TOKEN
        self._links[route.prefill].send(size, self.endpoints[route.prefill].actor.receive, request, truth)
        return route.prefill

    def cancel(self, request_id: str) -> None:
        """Tell the engine that has the request that its client has left; does nothing if the request has ended."""
        route = self._routes.get(request_id)
        if route is not None and not route.is_computing:
            self._links[route.decode].send(0, self.endpoints[route.decode].withdraw, request_id)
        elif route is not None:
            self._links[route.prefill].send(0, self.endpoints[route.prefill].actor.cancel, request_id)

    def ended(self, replica: int, request_id: str) -> None:
        """Do nothing: `finished` has counted the end."""

    def finished(self, replica: int, finished: FinishedRequest) -> None:
        """Take an engine's report of an end. The first one counts, and a handover is none."""
        route = self._routes.get(finished.request_id)
        if route is None:
            return
        if replica == route.prefill and route.is_computing:
            route.is_computing = False
            self._prefill.ended(replica, finished.request_id)
        if finished.reason is FinishReason.TRANSFERRED:
            return
        del self._routes[finished.request_id]
        if route.is_computing:
            self._prefill.ended(route.prefill, finished.request_id)
        self._decode.ended(route.decode, finished.request_id)
        self.last_end_ns = self.env.now
        self._on_finished(replica, finished)

    # -- engines ------------------------------------------------------------------------------------------------------

    def _peer_of(self, request_id: str) -> str:
        decode = self.decoder_of(request_id)
        if decode is None:
            # A copy of a request that has ended for its client has no route; any decode engine will do.
            decode = self.roles.serving(EngineRole.DECODE)[0]
        return self.endpoints[decode].name

    def decoder_of(self, request_id: str) -> int | None:
        """Return the engine where a request is or will be decoded; None if it is over."""
        route = self._routes.get(request_id)
        return None if route is None else route.decode

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
    """Return the size of what goes with the last page: first token, top-k, hidden state, and the algorithm's relayed fields."""
    return sum(field.bytes_per_row for field in assembly.algorithm.relay_fields(assembly.relay_shape))
