"""Faults between engines: packets that are lost, damaged, doubled, late; lost acknowledgements; engines that die.

The `TransferWitness` sees what is sent and what arrives, and keeps its own records: which pages arrived undamaged, how
often each request was offered, where it joined.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import simpy

from ...core.errors import InvariantViolation
from ...core.handoff import Message, PageSeal, PrefillSide, TransferKey, TransferOutcome, TransferState, WritePage
from ...core.handoff.messages import Accept, Ack, Offer, Page
from ..actors.clock import Arguments, Environment, call_at
from ..actors.device import Truth
from ..actors.router import EngineWire, Link
from ..disaggregation.cluster import Cluster
from ..disaggregation.endpoint import EndpointHooks, HandoffEndpoint
from ..disaggregation.network import ArrivedPages, HandoffNetwork, PacketHooks, Station
from .injector import DEATH, FaultInjector
from .place import PooledEngine
from .plan import Ledger
from .promises import Promises


class UnreliableLink:
    """Sends over `link`, with faults. `unreachable(*arguments)` is called for a message if all of its attempts were
    lost."""

    def __init__(self, link: Link, number: int, ledger: Ledger, unreachable: Callable[..., None]) -> None:
        self.link = link
        self._number = number
        self._ledger = ledger
        self._unreachable = unreachable
        self._num_sent = 0

    def send(self, num_bytes: int, deliver: Callable[[*Arguments], None], *arguments: *Arguments) -> None:
        self._attempt(1, num_bytes, deliver, *arguments)

    def _attempt(
        self, attempt: int, num_bytes: int, deliver: Callable[[*Arguments], None], *arguments: *Arguments
    ) -> None:
        """Send a message; if it is lost, try again later, up to the plan's number of attempts."""
        ledger, env = self._ledger, self.link.env
        now_ns, occasion = env.now, self._num_sent
        self._num_sent += 1
        kinds = ledger.kinds_at("message", self._number, occasion, now_ns)
        if "link.lost" in kinds:
            ledger.note("link.lost", now_ns)
            lost = ledger.plan.link.lost
            again_ns = now_ns + round(lost.retry_s * 1e9)
            if attempt < lost.retries:
                call_at(env, again_ns, partial(self._attempt, attempt + 1, num_bytes, deliver, *arguments))
            else:
                call_at(env, again_ns, partial(self._unreachable, deliver, *arguments))
            return
        for kind in kinds:
            # A copy of its own, past all others: order is not kept.
            ledger.note(kind, now_ns)
            delay_s = ledger.plan.late(kind).delay_s * ledger.draws.amount(kind, self._number, occasion)
            call_at(env, now_ns + self.link.latency_ns + round(delay_s * 1e9), deliver, *arguments)
        if "link.late" not in kinds:
            self.link.send(num_bytes, deliver, *arguments)


SHUFFLE_NS = 1_000_000  # by so much at most a packet is passed by others
CANCEL_WITHIN_NS = 100_000_000  # a client leaves so soon after its transfer has begun, at most
DEATH_WITHIN_NS = 30_000_000
MAX_REMEMBERED = 1 << 14  # attempts; the oldest are forgotten


@dataclass(slots=True)
class _Attempt:
    """The witness's record of one attempt of a transfer."""

    first_page: int = 0
    num_pages: int = 0
    num_shown: int = 0  # tokens that the request had when it was placed; more each time that it moves
    whole: set[int] = field(default_factory=set)  # pages of it that arrived as they were sent; only asked


class TransferWitness:
    """Records of the transfers of all engines of a run."""

    def __init__(self, promises: Promises, max_attempts: int) -> None:
        self.promises = promises
        self._max_attempts = max_attempts
        self._attempts: dict[tuple[str, TransferKey], _Attempt] = {}  # by (prefill engine, key)
        self._offers: dict[tuple[str, str, int, int], int] = {}
        self._joined: set[tuple[str, int]] = set()  # requests, with `num_shown`; only asked

    def sent(self, source: str, target: str, message: Message, num_pages: int) -> None:
        key = message.key
        if type(message) is Offer:
            self._attempts[source, key] = _Attempt(num_pages=num_pages, num_shown=message.request.shown.length)
            if len(self._attempts) > MAX_REMEMBERED:
                del self._attempts[next(iter(self._attempts))]
            transfer = (source, key.request_id, message.first_attempt, key.generation)
            self._offers[transfer] = self._offers.get(transfer, 0) + 1
            bounded = self._offers[transfer] <= self._max_attempts
            self.promises.check("one_retry", bounded, 0, f"{key} is attempt {self._offers[transfer]}")
        elif type(message) is Accept and (target, key) in self._attempts:
            self._attempts[target, key].first_page = message.first_page

    def arrived(self, source: str, page: Page, measured: PageSeal) -> None:
        attempt = self._attempts.get((source, page.key))
        if attempt is not None and measured == page.seal:
            attempt.whole.add(page.index)

    def joined(self, source: str, key: TransferKey, now_ns: int) -> None:
        """Check a request that takes part in the rounds of a decode engine from now on."""
        name, attempt = key.request_id, self._attempts.get((source, key))
        joined = name, 0 if attempt is None else attempt.num_shown
        self.promises.check("joins_once", joined not in self._joined, now_ns, f"{name} joins a second time")
        self._joined.add(joined)
        missing: list[int] = []
        if attempt is not None:
            pages = range(attempt.first_page, attempt.num_pages)
            missing = [index for index in pages if index not in attempt.whole]
        kept = attempt is not None and not missing
        self.promises.check("fails_closed", kept, now_ns, f"{name} joins without pages {missing[:5]} of {key}")


class TransferFaultInjector(PacketHooks, EndpointHooks):
    """Injects a plan's faults into the packets between engines, and checks the promises about transfers."""

    def __init__(self, env: Environment, ledger: Ledger, promises: Promises) -> None:
        self.env = env
        self.ledger = ledger
        self.promises = promises
        self._num_packets: dict[int, int] = {}
        self._num_transfers = 0
        self._ack_lost: set[str] = set()  # requests whose acknowledgement will be lost; only asked
        self._slow_until_ns = 0

    def start(self, cluster: Cluster, injectors: list[FaultInjector], links: Sequence[EngineWire]) -> None:
        """Make the endpoints of the injectors' actors, and watch them."""
        self.injectors = injectors
        self.witness: TransferWitness = TransferWitness(self.promises, cluster.timing.max_attempts)
        for injector in injectors:
            injector.place = PooledEngine(cluster, injector.replica)
        self.interconnect: HandoffNetwork = cluster.start([injector.actor for injector in injectors], links, self, self)
        self.env.process(self._watch(cluster))

    def _watch(self, cluster: Cluster) -> Generator[simpy.Event, None, None]:
        """Raise if engines wait for each other for ever, which would keep the run going."""
        bound_ns = round(2 * self.ledger.plan.recovery_s * 1e9)
        while True:
            yield self.env.timeout(bound_ns)
            waiting = cluster.request_ids
            if not waiting and self.ledger.has_ended:
                return
            if self.env.now - max(cluster.last_end_ns, cluster.last_sent_ns) > bound_ns:
                message = f"requests that wait for ever: {len(waiting):,}, {waiting[0]!r} among them"
                raise InvariantViolation("ENGINE-11", message)

    # -- packets ------------------------------------------------------------------------------------------------------

    def on_message(self, source: Station, target: Station, message: Message, truth: Truth | None) -> bool:
        now_ns, ledger, request_id = self.env.now, self.ledger, message.key.request_id
        just_joined = self.injectors[source.replica].witness.just_joined
        if type(message) is Ack and request_id in just_joined:
            just_joined.discard(request_id)
            self.witness.joined(target.name, message.key, now_ns)
        num_pages = 0
        if type(message) is Offer:
            num_pages = self.interconnect.page_format.num_pages(message.request.prefill_len)
        self.witness.sent(source.name, target.name, message, num_pages)
        if type(message) is Offer and message.first_attempt == message.key.attempt:
            self._begin(source, target, request_id)
        if type(message) is Ack and request_id in self._ack_lost:
            self._ack_lost.discard(request_id)
            ledger.note("transfer.ack_lost", now_ns)
            return False
        kinds, occasion = self._kinds(source)
        if "transfer.lost" in kinds:
            ledger.note("transfer.lost", now_ns)
            return False
        deliver = partial(self.interconnect.deliver, source, target, message, truth)
        self._copy(kinds, occasion, source, deliver)
        for kind in ("transfer.reordered", "transfer.late"):
            if kind in kinds:
                ledger.note(kind, now_ns)
                call_at(self.env, now_ns + self._delay_ns(kind, source, occasion), deliver)
                return False
        return True

    def on_pages(self, source: Station, target: Station, pages: ArrivedPages) -> tuple[ArrivedPages, int | None]:
        now_ns, ledger, network = self.env.now, self.ledger, self.interconnect.network
        kinds, occasion = self._kinds(source)
        if "transfer.slow" in kinds:
            ledger.note("transfer.slow", now_ns)
            self._slow_until_ns = now_ns + round(ledger.plan.transfer.slow.lasts_s * 1e9)
        network.slowdown = ledger.plan.transfer.slow.factor if now_ns < self._slow_until_ns else 1.0
        chosen = int(ledger.draws.amount("transfer.lost", source.replica, occasion) * len(pages))
        page, seal = pages[chosen]
        damaged = {
            "transfer.short": replace(seal, target_bytes=seal.target_bytes - 1),
            "transfer.corrupt": replace(seal, target_checksum=seal.target_checksum ^ 1),
        }
        for kind, found in damaged.items():
            if kind in kinds:
                ledger.note(kind, now_ns)
                pages[chosen] = (page, found)
        if "transfer.lost" in kinds:
            ledger.note("transfer.lost", now_ns)
            del pages[chosen]
        if "transfer.reordered" in kinds:
            ledger.note("transfer.reordered", now_ns)
            pages.reverse()
        self._copy(kinds, occasion, source, self.interconnect.deliver_pages, source, target, list(pages))
        if "transfer.late" not in kinds:
            return pages, None
        ledger.note("transfer.late", now_ns)
        return pages, self._delay_ns("transfer.late", source, occasion)

    def on_arrival(self, source: Station, pages: ArrivedPages) -> None:
        for page, measured in pages:
            self.witness.arrived(source.name, page, measured)

    def _kinds(self, source: Station) -> tuple[tuple[str, ...], int]:
        """Return the faults of the next packet of an engine, and the packet's number."""
        occasion = self._num_packets.get(source.replica, 0)
        self._num_packets[source.replica] = occasion + 1
        return self.ledger.kinds_at("packet", source.replica, occasion, self.env.now), occasion

    def _copy(
        self,
        kinds: tuple[str, ...],
        occasion: int,
        source: Station,
        deliver: Callable[[*Arguments], None],
        *arguments: *Arguments,
    ) -> None:
        kind = "transfer.duplicated"
        if kind in kinds:
            self.ledger.note(kind, self.env.now)
            delay_ns = self.interconnect.network.latency_ns + self._delay_ns(kind, source, occasion)
            call_at(self.env, self.env.now + delay_ns, deliver, *arguments)

    def _delay_ns(self, kind: str, source: Station, occasion: int) -> int:
        most_s = SHUFFLE_NS / 1e9 if kind == "transfer.reordered" else self.ledger.plan.late(kind).delay_s
        share = self.ledger.draws.amount(kind, source.replica, occasion)
        return self.interconnect.network.latency_ns + int(share * most_s * 1e9)

    def _begin(self, source: Station, target: Station, request_id: str) -> None:
        """Inject the faults of a transfer that begins."""
        occasion, now_ns = self._num_transfers, self.env.now
        self._num_transfers += 1
        for kind in self.ledger.kinds_at("transfer", 0, occasion, now_ns):
            share = self.ledger.draws.amount(kind, 0, occasion)
            if kind == "transfer.ack_lost":
                self._ack_lost.add(request_id)
            elif kind == "transfer.cancelled":
                leave = self.injectors[source.replica].leave
                call_at(self.env, now_ns + int(share * CANCEL_WITHIN_NS), leave, request_id, kind)
            else:
                of_prefill = kind == DEATH and self.ledger.draws.amount(kind, 0, occasion, 1) < 0.5
                victim = source if of_prefill else target
                call_at(self.env, now_ns + int(share * DEATH_WITHIN_NS), self.injectors[victim.replica].die, kind)

    # -- endpoints ----------------------------------------------------------------------------------------------------

    def on_expected(self, endpoint: HandoffEndpoint, request_id: str, truth: Truth) -> None:
        self.injectors[endpoint.replica].witness.truths.setdefault(request_id, truth)

    def on_pages_read(self, endpoint: HandoffEndpoint, pages: list[Page], row: int, epoch: int) -> None:
        key, store = pages[0].key, endpoint.engine.store
        side = endpoint.side
        if isinstance(side, PrefillSide) and key.generation == side.generation:
            kept = store.is_held_row(row) and int(store.table.epochs[row]) == epoch
            message = f"row {row} of {key} was given away while it was read"
            self.promises.check("pages_kept", kept, self.env.now, message)

    def on_page_written(self, endpoint: HandoffEndpoint, action: WritePage) -> None:
        table = endpoint.engine.store.table
        kept = table.is_taken(action.row) and int(table.epochs[action.row]) == action.row_epoch
        message = f"row {action.row} of {action.page.key} was given away before KV came"
        self.promises.check("pages_kept", kept, self.env.now, message)

    def on_transfer_ended(self, endpoint: HandoffEndpoint, outcome: TransferOutcome) -> None:
        gone = outcome.state is not TransferState.COMPLETED and endpoint.engine.state_of(outcome.request_id) is None
        if not endpoint.is_prefill and gone:
            self.injectors[endpoint.replica].witness.truths.pop(outcome.request_id, None)
