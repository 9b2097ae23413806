"""Engines of two roles behind one router: who computes a prompt, who decodes it, what they send each other, and when a request is over."""

from __future__ import annotations

from collections.abc import Callable

import simpy

from ...core.contract.request import FinishedRequest, FinishReason, Request
from ...core.handoff import Message, PageSeal
from ...core.handoff.messages import Manifest, Page
from ...core.scheduler.config import EngineRole
from ..actors.device import Truth
from ..actors.link import Link
from ..actors.router import BYTES_PER_TOKEN, Balancer
from ..assembly import Assembly
from .network import Layers, Network
from .pools import draft_input_bytes, page_format_of, timing_of
from .roles import Roles
from .transfers import DisaggregationReport, Transfers
from .worker import HandoffPart

OnFinished = Callable[[int, FinishedRequest], None]


class _Route:
    """Where a request is computed and where it will be decoded."""

    __slots__ = ("decode", "is_computing", "prefill")

    def __init__(self, prefill: int, decode: int) -> None:
        self.prefill = prefill
        self.decode = decode
        self.is_computing = True


class Cluster:
    """The router of a disaggregated service (see `Router`), and what its engines share.

    Both engines of a request are chosen when it arrives. A request is over for its client at the first end that any of them tells,
    other than that its prompt has been handed over.
    """

    def __init__(self, env: simpy.Environment, assembly: Assembly, network: Network, on_finished: OnFinished) -> None:
        scenario = assembly.scenario
        table = scenario.disaggregation
        self.env = env
        self.network = network
        self.page_format = page_format_of(assembly)
        self.timing = timing_of(scenario)
        self.is_layerwise = table.layerwise
        self.num_layers = assembly.target.layers
        self.transfers = Transfers()
        self.last_end_ns = 0
        self.last_sent_ns = 0
        self._draft_input_bytes = draft_input_bytes(assembly)
        self._on_finished = on_finished
        num_engines = assembly.pools.num_engines
        self._prefill = Balancer(table.prefill_policy, num_engines, scenario.seed, 1)
        self._decode = Balancer(table.decode_policy, num_engines, scenario.seed, 2)
        self._routes: dict[str, _Route] = {}
        every_s = table.rebalance_s
        self.roles = Roles(self, None if every_s is None else round(every_s * 1e9))
        self.workers: list[HandoffPart] = []
        self.links: list[Link] = []

    def start(self, workers: list[HandoffPart], links: list[Link]) -> None:
        """`links` are those from the clients, one per worker."""
        self.workers = workers
        self.links = links
        for worker in workers:
            worker.join_cluster(self)

    # -- clients ------------------------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> list[int]:
        """Per engine: requests that it computes, or will decode, or decodes."""
        return [p + d for p, d in zip(self._prefill.outstanding, self._decode.outstanding, strict=True)]

    def submit(self, request: Request, truth: Truth) -> int:
        """Send a request to its prefill engine, which is returned."""
        self.last_sent_ns = self.env.now
        route = _Route(
            self._prefill.assign(request, self.roles.serving(EngineRole.PREFILL)),
            self._decode.assign(request, self.roles.serving(EngineRole.DECODE)),
        )
        self.roles.keep_looking()
        self._routes[request.request_id] = route
        size = request.prompt.length * BYTES_PER_TOKEN
        self.links[route.prefill].send(size, self.workers[route.prefill].receive, request, truth)
        return route.prefill

    @property
    def has_requests(self) -> bool:
        return bool(self._routes)

    def cancel(self, request_id: str) -> None:
        """Tell the prefill engine that the client is gone, and it the decode engine; nothing if the request has ended."""
        route = self._routes.get(request_id)
        if route is not None and not route.is_computing:
            self.links[route.decode].send(0, self.workers[route.decode].withdraw, request_id)
        elif route is not None:
            self.links[route.prefill].send(0, self.workers[route.prefill].cancel, request_id)

    def ended(self, replica: int, request_id: str) -> None:
        """The client was told; see `finished` for the rest."""

    def finished(self, replica: int, finished: FinishedRequest) -> None:
        """An engine is done with a request. The first end counts, and a handover is none."""
        route = self._routes.get(finished.request_id)
        if route is None:
            return
        if replica == route.prefill and route.is_computing:
            route.is_computing = False
            self._prefill.ended(replica)
        if finished.reason is FinishReason.TRANSFERRED:
            return
        del self._routes[finished.request_id]
        if route.is_computing:
            self._prefill.ended(route.prefill)
        self._decode.ended(route.decode)
        self.last_end_ns = self.env.now
        self._on_finished(replica, finished)

    # -- engines ------------------------------------------------------------------------------------------------------

    def peer_of(self, request_id: str) -> str:
        """The decode engine of a request."""
        route = self._routes.get(request_id)
        # A copy of a request that is over for its client has no route; it goes anywhere.
        decode = self.roles.serving(EngineRole.DECODE)[0] if route is None else route.decode
        return self.workers[decode].name

    def decoder_of(self, request_id: str) -> HandoffPart | None:
        """Where a request is or will be decoded; None if it is over."""
        route = self._routes.get(request_id)
        return None if route is None else self.workers[route.decode]

    def pass_cancel_on(self, source: HandoffPart, request_id: str) -> None:
        """From the prefill engine of a request to where it is decoded."""
        target = self.decoder_of(request_id)
        if target is not None:
            self.network.say(source.replica, target.replica, 0, target.withdraw, request_id)

    def send(self, source: HandoffPart, peer: str, message: Message, truth: Truth | None) -> None:
        """A message of the handoff; a manifest brings the draft input along."""
        target = self._named(peer)
        size = self._draft_input_bytes if type(message) is Manifest else 0
        self.network.say(source.replica, target.replica, size, self.deliver, source, target, message, truth)

    def send_pages(self, source: HandoffPart, peer: str, pages: list[Page], layers: Layers | None) -> tuple[int, int]:
        """Pages of one action; returns when the first byte left and when the last one does."""
        target = self._named(peer)
        page_bytes = self.page_format.target_bytes + self.page_format.draft_bytes
        arrived = [(page, page.seal) for page in pages]
        arguments = (self.deliver_pages, source, target, arrived)
        return self.network.send(source.replica, target.replica, len(pages) * page_bytes, *arguments, layers=layers)

    def deliver(self, source: HandoffPart, target: HandoffPart, message: Message, truth: Truth | None) -> None:
        """A message has arrived."""
        target.hear(source.name, message, truth)

    def deliver_pages(self, source: HandoffPart, target: HandoffPart, pages: list[tuple[Page, PageSeal]]) -> None:
        """Pages have arrived, each with the seal of what is really there."""
        target.hear_pages(source.name, pages)

    def _named(self, peer: str) -> HandoffPart:
        return self.workers[int(peer.removeprefix("engine "))]

    # -- the end ------------------------------------------------------------------------------------------------------

    def report(self, duration_ns: int) -> DisaggregationReport:
        counts = [worker.side.counts for worker in self.workers]
        prefill = [worker for worker in self.workers if worker.is_prefill]
        shares = self.roles.busy_shares(duration_ns)
        return DisaggregationReport(
            len(prefill),
            len(self.workers) - len(prefill),
            self.roles.num_changes,
            shares[EngineRole.PREFILL],
            shares[EngineRole.DECODE],
            tuple(self.network.out_busy_ns),
            tuple(self.network.in_busy_ns),
            self.network.num_bytes,
            sum(worker.side.counts.retries for worker in prefill),
            sum(count.ignored for count in counts),
            self.transfers.to_json(),
        )
