"""Faults between engines: packets that are lost, damaged, doubled, late; acknowledgements that never come; engines that die; and a witness.

The `TransferWitness` sees what is sent and what really arrives, and keeps books of its own: which pages came whole, how often each request
was offered, where it joined.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace

import simpy

from ...core.errors import InvariantViolation
from ...core.handoff import Message, PageSeal, TransferKey
from ...core.handoff.messages import Accept, Ack, Offer, Page
from ..actors.clock import call_at
from ..actors.device import Truth
from ..actors.link import Link
from ..disaggregation.cluster import Cluster
from ..disaggregation.network import Layers
from .ledger import Ledger
from .promises import Promises
from .worker import FaultyWorker

SHUFFLE_NS = 1_000_000  # by so much at most a packet is passed by others
CANCEL_WITHIN_NS = 100_000_000  # a client leaves so soon after its transfer has begun, at most
DEATH_WITHIN_NS = 30_000_000
MAX_REMEMBERED = 1 << 14  # attempts; the oldest are forgotten
PAGE_KINDS = ("transfer.short", "transfer.corrupt")


@dataclass(slots=True)
class _Attempt:
    """What the witness knows of one attempt of a transfer."""

    first_page: int = 0
    num_pages: int = 0
    whole: set[int] = field(default_factory=set)  # pages of it that arrived as they were sent; only asked


class TransferWitness:
    """Books about transfers, of all engines of a run."""

    def __init__(self, promises: Promises, max_attempts: int) -> None:
        self.promises = promises
        self._max_attempts = max_attempts
        self._attempts: dict[tuple[str, TransferKey], _Attempt] = {}  # by (prefill engine, key)
        self._offers: dict[tuple[str, str, int, int], int] = {}
        self._joined: set[str] = set()  # only asked

    def sent(self, source: str, target: str, message: Message, num_pages: int) -> None:
        key = message.key
        if type(message) is Offer:
            self._attempts[source, key] = _Attempt(num_pages=num_pages)
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
        """A request takes part in the rounds of a decode engine from now on."""
        name = key.request_id
        self.promises.check("joins_once", name not in self._joined, now_ns, f"{name} joins a second time")
        self._joined.add(name)
        attempt = self._attempts.get((source, key))
        wanted = range(attempt.first_page, attempt.num_pages) if attempt is not None else ()
        missing = [index for index in wanted if index not in attempt.whole]
        kept = attempt is not None and not missing
        self.promises.check("fails_closed", kept, now_ns, f"{name} joins without pages {missing[:5]} of {key}")


class FaultyCluster(Cluster):
    """A cluster whose packets meet the faults of a plan."""

    def __init__(self, *arguments, ledger: Ledger, promises: Promises) -> None:
        super().__init__(*arguments)
        self.ledger = ledger
        self.witness = TransferWitness(promises, self.timing.max_attempts)
        self._num_packets: dict[int, int] = {}
        self._num_transfers = 0
        self._ack_lost: set[str] = set()  # whose acknowledgement is to be lost; only asked
        self._slow_until_ns = 0

    def start(self, workers: list[FaultyWorker], links: list[Link]) -> None:
        super().start(workers, links)
        self.env.process(self._watch())

    def _watch(self) -> Generator[simpy.Event, None, None]:
        """Engines that wait for each other for ever would keep the run going: that is no end, and is reported."""
        bound_ns = round(2 * self.ledger.plan.recovery_s * 1e9)
        while True:
            yield self.env.timeout(bound_ns)
            if not self._routes and self.ledger.has_ended:
                return
            if self.env.now - max(self.last_end_ns, self.last_sent_ns) > bound_ns:
                stuck = next(iter(self._routes))
                raise InvariantViolation(
                    "ENGINE-11", f"{len(self._routes)} requests wait for ever, {stuck!r} among them"
                )

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(self, source: FaultyWorker, peer: str, message: Message, truth: Truth | None) -> None:
        if source.is_dead:
            return
        target = self._named(peer)
        num_pages = self.page_format.num_pages(message.request.prompt.length) if type(message) is Offer else 0
        self.witness.sent(source.name, peer, message, num_pages)
        if type(message) is Offer and message.first_attempt == message.key.attempt:
            self._begin(source, target, message.key.request_id)
        if type(message) is Ack and message.key.request_id in self._ack_lost:
            self._ack_lost.discard(message.key.request_id)
            self.ledger.note("transfer.ack_lost", self.env.now)
            return
        kinds, occasion = self._kinds(source)
        now_ns, ledger = self.env.now, self.ledger
        if "transfer.lost" in kinds:
            ledger.note("transfer.lost", now_ns)
            return
        self._copies(kinds, occasion, source, self.deliver, source, target, message, truth)
        for kind in ("transfer.reordered", "transfer.late"):
            if kind in kinds:
                ledger.note(kind, now_ns)
                call_at(
                    self.env,
                    now_ns + self._delay_ns(kind, source, occasion),
                    self.deliver,
                    source,
                    target,
                    message,
                    truth,
                )
                return
        super().send(source, peer, message, truth)

    def send_pages(self, source: FaultyWorker, peer: str, pages: list[Page], layers: Layers | None) -> tuple[int, int]:
        now_ns, ledger = self.env.now, self.ledger
        if source.is_dead:
            return now_ns, now_ns
        kinds, occasion = self._kinds(source)
        if "transfer.slow" in kinds:
            ledger.note("transfer.slow", now_ns)
            self._slow_until_ns = now_ns + round(ledger.plan.transfer.slow.lasts_s * 1e9)
        self.network.slowdown = ledger.plan.transfer.slow.factor if now_ns < self._slow_until_ns else 1.0
        target = self._named(peer)
        arrived = [(page, page.seal) for page in pages]
        chosen = int(ledger.draws.amount("transfer.lost", source.replica, occasion) * len(pages))
        page, seal = arrived[chosen]
        damaged = {
            "transfer.short": replace(seal, target_bytes=seal.target_bytes - 1),
            "transfer.corrupt": replace(seal, target_checksum=seal.target_checksum ^ 1),
        }
        for kind in PAGE_KINDS:
            if kind in kinds:
                ledger.note(kind, now_ns)
                arrived[chosen] = (page, damaged[kind])
        if "transfer.lost" in kinds:
            ledger.note("transfer.lost", now_ns)
            del arrived[chosen]
        if "transfer.reordered" in kinds:
            ledger.note("transfer.reordered", now_ns)
            arrived.reverse()
        self._copies(kinds, occasion, source, self.deliver_pages, source, target, list(arrived))
        page_bytes = self.page_format.target_bytes + self.page_format.draft_bytes
        deliver = (self.deliver_pages, source, target, arrived)
        if "transfer.late" in kinds:
            ledger.note("transfer.late", now_ns)
            deliver = (self._later, self._delay_ns("transfer.late", source, occasion), *deliver)
        return self.network.send(source.replica, target.replica, len(pages) * page_bytes, *deliver, layers=layers)

    def _kinds(self, source: FaultyWorker) -> tuple[tuple[str, ...], int]:
        """The faults of the next packet of an engine, and its number."""
        occasion = self._num_packets.get(source.replica, 0)
        self._num_packets[source.replica] = occasion + 1
        return self.ledger.kinds_at("packet", source.replica, occasion, self.env.now), occasion

    def _copies(self, kinds: tuple[str, ...], occasion: int, source: FaultyWorker, deliver, *arguments) -> None:
        if "transfer.duplicated" in kinds:
            self.ledger.note("transfer.duplicated", self.env.now)
            delay_ns = self._delay_ns("transfer.duplicated", source, occasion)
            call_at(self.env, self.env.now + self.network.latency_ns + delay_ns, deliver, *arguments)

    def _later(self, delay_ns: int, deliver: Callable[..., None], *arguments) -> None:
        call_at(self.env, self.env.now + delay_ns, deliver, *arguments)

    def _delay_ns(self, kind: str, source: FaultyWorker, occasion: int) -> int:
        most_s = SHUFFLE_NS / 1e9 if kind == "transfer.reordered" else self.ledger.plan.of(kind).delay_s
        share = self.ledger.draws.amount(kind, source.replica, occasion)
        return self.network.latency_ns + int(share * most_s * 1e9)

    # -- arriving -----------------------------------------------------------------------------------------------------

    def deliver(self, source: FaultyWorker, target: FaultyWorker, message: Message, truth: Truth | None) -> None:
        if not target.is_dead:
            super().deliver(source, target, message, truth)

    def deliver_pages(self, source: FaultyWorker, target: FaultyWorker, pages: list[tuple[Page, PageSeal]]) -> None:
        if target.is_dead:
            return
        for page, measured in pages:
            self.witness.arrived(source.name, page, measured)
        super().deliver_pages(source, target, pages)

    # -- what begins with a transfer ----------------------------------------------------------------------------------

    def _begin(self, source: FaultyWorker, target: FaultyWorker, request_id: str) -> None:
        occasion, now_ns = self._num_transfers, self.env.now
        self._num_transfers += 1
        for kind in self.ledger.kinds_at("transfer", 0, occasion, now_ns):
            share = self.ledger.draws.amount(kind, 0, occasion)
            if kind == "transfer.ack_lost":
                self._ack_lost.add(request_id)
            elif kind == "transfer.cancelled":
                call_at(self.env, now_ns + int(share * CANCEL_WITHIN_NS), source.leave, request_id, kind)
            else:
                victim = source if self.ledger.draws.amount(kind, 0, occasion, 1) < 0.5 else target
                call_at(self.env, now_ns + int(share * DEATH_WITHIN_NS), victim.die)

    def tell_of_death(self, dead: FaultyWorker) -> None:
        """The other engines hear that one is gone."""
        for worker in self.workers:
            if worker.is_prefill != dead.is_prefill and not worker.is_dead:
                worker.peer_is_lost(dead.name)
