"""A worker in one session: its engine and executor, the transport of its handoffs, and the news for the parent.

turn     plan and launch, run round by round (between rounds `poll` lets messages in), commit, tell the parent
take     a parcel from a peer ─► the handoff's driver ─► its actions are carried out at once
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from torch import Tensor

from ...core.algorithm.arrival import DraftPayload
from ...core.contract.events import Committed, Event, HandoffMove, HandoffMoved, Planned
from ...core.contract.request import FinishedRequest, FinishReason, Request
from ...core.contract.step import StepResult
from ...core.handoff import (
    DecodeSide,
    HandoffTiming,
    Message,
    PageSeal,
    PrefillDriver,
    PrefillSide,
    SendPages,
    TransferOutcome,
    WritePage,
    make_driver,
)
from ...core.handoff.messages import Page
from ...core.scheduler.config import EngineRole
from ...core.scheduler.driver import Driver
from ...core.scheduler.engine import Engine
from ...observe.measuring.gauges import count_drafts, gauges_of
from ..executor.executor import TorchExecutor
from ..parallel.link import PageParcel, PeerLink
from ..parallel.page_tensors import PageTensors
from ..parallel.ranked_pages import RankedPages
from ..parallel.ranks import RankedExecutor
from ..session.loop import DeliverySink
from ..session.text_session import numbers_of

MAX_PAGES_BYTES = 64 << 20  # of the pages of one parcel: what is on its way takes memory on both sides

now_ns = time.perf_counter_ns


class PolledDriver(Driver):
    """Calls `poll` between the rounds of a step, so that messages are read while a block runs."""

    executor: TorchExecutor | RankedExecutor
    poll: Callable[[], None]

    def collect(self) -> StepResult:
        while not self.executor.advance(1):
            self.poll()
        return super().collect()


class News:
    """News that the parent does not have yet, in this order: admitted and joined requests, tokens, ends."""

    def __init__(self, send: Callable[[Mapping[str, Any]], None], session: int) -> None:
        self._send = send
        self._session = session
        self._admitted: list[list[Any]] = []
        self._joined: list[str] = []
        self._tokens: list[list[Any]] = []
        self._ended: list[list[Any]] = []
        self._num_sent: dict[str, int] = {}

    def submitted(self, request: Request) -> None:
        self._num_sent[request.request_id] = request.shown.length

    def admitted(self, request_id: str, num_cached: int, at_ns: int) -> None:
        """Note that a prompt begins, with so many tokens from the prefix cache."""
        self._admitted.append([request_id, num_cached, at_ns])

    def joined(self, request: Request) -> None:
        self._joined.append(request.request_id)
        self._num_sent[request.request_id] = max(request.shown.length, 1)  # the prefill worker has sent the first one

    def tokens(self, request_id: str, tokens: Iterable[np.ndarray], outputs: Mapping[str, Iterable[Any]]) -> None:
        values = np.concatenate(list(tokens)).tolist()
        num_before = self._num_sent[request_id]
        self._num_sent[request_id] = num_before + len(values)
        shown = {name: [np.asarray(entry).tolist() for entry in entries] for name, entries in outputs.items()}
        self._tokens.append([request_id, num_before, values, shown])

    def ended(self, end: FinishedRequest) -> None:
        self._num_sent.pop(end.request_id, None)
        self._ended.append([end.request_id, end.reason.value, end.num_output, end.message])

    def refused(self, request_id: str, why: str) -> None:
        self._ended.append([request_id, "refused", 0, why])

    def flush(self) -> None:
        if self._admitted or self._joined or self._tokens or self._ended:
            news = {"admitted": self._admitted, "joined": self._joined, "tokens": self._tokens, "ended": self._ended}
            self._admitted, self._joined, self._tokens, self._ended = [], [], [], []
            self._send({"say": "news", "session": self._session, **news})


class Serving:
    """One worker in one session: the transport of its handoff driver.

    A prefill worker computes prompts and sends their KV to the decode workers that the parent names; a decode worker
    takes requests from prefill workers and decodes them to their end.
    """

    def __init__(
        self,
        session: int,
        engine: Engine,
        executor: TorchExecutor | RankedExecutor,
        deliveries: DeliverySink,
        links: Mapping[str, PeerLink],
        news: News,
        timing: HandoffTiming,
    ) -> None:
        self.engine = engine
        self.executor = executor
        self.driver = PolledDriver(engine, executor, now_ns)
        self.pages: PageTensors | RankedPages = (
            RankedPages(executor, session)
            if isinstance(executor, RankedExecutor)
            else PageTensors(executor, engine.config.page_size)
        )
        self.handoff = make_driver(engine, self.pages.format, session, self, timing, executor.relayed)
        self.news = news
        self.num_malformed = 0
        self._totals: Counter[tuple[str, str]] = Counter()
        self._session = session
        self._deliveries = deliveries
        self._links = links
        self._lost: dict[str, None] = {}
        self._outgoing: dict[str, list[Message]] = {}
        self._arrived: dict[int, int] = {}  # id of a page's message -> its number in the parcel that is being taken
        self._writes: list[tuple[int, np.ndarray]] = []  # numbers there, and the slots that they go to

    @property
    def side(self) -> PrefillSide | DecodeSide:
        return self.handoff.side

    # -- from outside -------------------------------------------------------------------------------------------------

    def submit(self, request: Request, peer: str) -> None:
        outcome = self.handoff.submit(request, peer, now_ns())
        if outcome.refusal:
            self.news.refused(request.request_id, outcome.refusal)
            self.news.flush()
        else:
            self.news.submitted(request)
        self.driver.interrupt(outcome.replan)

    def turn(self, poll: Callable[[], None]) -> bool:
        """Run one step; returns whether there was one. `poll` is called between its rounds."""
        self.driver.poll = poll
        outcome = self.driver.turn()
        if outcome is None:
            return False
        tokens, outputs = self._deliveries.take()
        for request_id, values in tokens.items():
            self.news.tokens(request_id, values, outputs.get(request_id, {}))
        for end in outcome.finished:
            self.news.ended(end)
        self.news.flush()
        payloads = {request_id: self._draft_payload(request_id) for request_id in outcome.computed}
        self.handoff.committed(outcome, now_ns(), payloads)
        return True

    def _draft_payload(self, request_id: str) -> DraftPayload:
        """Read the row's first relay cell, which no round here will read."""
        progress = self.engine.transfers.progress_of(request_id)
        assert progress is not None, "a request whose prompt was computed has its row until it is handed over"
        return DraftPayload.of_cell(self.engine.algorithm, self.executor.relay_cell(progress.row, progress.epoch))

    def take(self, peer: str, parcel: PageParcel, num_malformed: int) -> None:
        """Take what `peer` has sent, unless the parent has called it lost.
        Pages are verified by the bytes that arrived."""
        if peer in self._lost or parcel.session != self._session:
            return
        self.num_malformed += num_malformed
        pages = [message for message in parcel.messages if isinstance(message, Page)]
        seals: list[PageSeal] = []
        if pages:
            self._arrived = {id(page): row for row, page in enumerate(pages)}
            seals = self.pages.arrived(parcel, peer, len(pages))
        measured = iter(seals)
        messages = [(message, next(measured) if isinstance(message, Page) else None) for message in parcel.messages]
        self.handoff.receive(peer, messages, now_ns())

    def abort(self, request_id: str) -> None:
        """End a request here, and tell the parent before other workers."""
        outcome = self.side.abort(request_id, now_ns())
        self.driver.interrupt(outcome.replan)
        if outcome.finished is not None:
            self.news.ended(outcome.finished)
        self.handoff.carry_out()

    def lose(self, peer: str) -> None:
        """Treat `peer` as dead, since the parent says so: end its transfers, and ignore what still arrives from it."""
        self._lost[peer] = None
        self.handoff.peer_lost(peer, now_ns(), FinishReason.MOVED)

    def tick(self) -> None:
        """Act on deadlines that have passed."""
        self.handoff.tick(now_ns())

    def wait_s(self) -> float | None:
        """Return the seconds until `tick` has something to do; None if nothing is due as things are."""
        due = self.side.next_deadline_ns
        return None if due is None else max(0.0, (due - now_ns()) / 1e9)

    def describe(self) -> dict[str, Any]:
        """Describe the held rows and slots, and the work so far. Slots that only the prefix cache has are free: they
        can be given up at any time."""
        store, counts = self.engine.store, self.side.counts
        self.side.check()
        self.engine.check()
        ema_accept_len = self.engine.controller.metrics().ema_accept_len
        return {
            **numbers_of(self.engine),
            "total_slots": store.allocator.num_total_slots,
            "free_slots": store.available_slots,
            "cached_slots": store.available_slots - store.allocator.num_free_slots,
            "held_rows": store.num_held_rows,
            "is_idle": self.engine.is_idle and self.side.is_idle,
            "transfers": asdict(counts),
            "malformed": self.num_malformed,
            "prefilled": self.executor.counters.prefilled,
            "ema_accept_len": {str(bound): ema for bound, ema in ema_accept_len.items()},
            "phase_seconds": {**self.executor.clock.seconds, "host": self.driver.host_ns / 1e9},
        }

    def gauges(self) -> dict[str, Any]:
        """Return how full this worker is, and [what, label, number] of what it counted, as a server's metrics name
        it."""
        return {"gauges": gauges_of(self.engine), "totals": [[*key, number] for key, number in self._totals.items()]}

    def watch(self, event: Event) -> None:
        """Tell the parent of prompts that begin, and of requests that join; an event sink."""
        if isinstance(event, Planned) and event.step is not None and self.engine.role is EngineRole.PREFILL:
            for entry in event.step.joins:
                self.news.admitted(entry.request.request_id, entry.num_cached, event.now_ns)
        if isinstance(event, Planned):
            self._totals["retractions", ""] += len(event.retracted)
        elif isinstance(event, Committed):
            count_drafts(self._totals, event)
        if isinstance(event, HandoffMoved) and event.move is HandoffMove.JOIN and not event.finished:
            self.news.joined(self.engine.requests.live[event.request_id].request)

    # -- what the driver calls (`core.handoff.Transport`) --------------------------------------------------------------
    #
    # Tell the parent before the peer: then messages reach it in the order in which the workers acted, whichever socket
    # it reads first.

    def send(self, peer: str, message: Message) -> None:
        self._outgoing.setdefault(peer, []).append(message)

    def send_pages(self, action: SendPages, driver: PrefillDriver) -> None:
        self._post(action.peer, self._outgoing.pop(action.peer, []))
        at_once = max(1, MAX_PAGES_BYTES // self.pages.row_bytes)
        for begin in range(0, len(action.indices), at_once):
            indices = action.indices[begin : begin + at_once]
            seals, content, number = self.pages.send(action.peer, action.slots[begin : begin + at_once])
            messages = [Page(action.key, action.epoch, *page) for page in zip(indices, seals, strict=True)]
            self._post(action.peer, messages, content, number)
            driver.pages_sent(messages, now_ns())  # a copy travels: the slots may be written again

    def write_page(self, action: WritePage) -> None:
        self._writes.append((self._arrived[id(action.page)], action.slots))

    def report(self, finished: FinishedRequest) -> None:
        self.news.ended(finished)

    def transfer_ended(self, outcome: TransferOutcome) -> None:
        """Do nothing: the parent follows requests, not transfers."""

    def flush(self, replan: bool) -> None:
        """Write pages in one operation, then tell the parent, then the other workers."""
        if self._writes:
            rows, slots = zip(*self._writes, strict=True)
            self.pages.write_arrived(np.stack(slots), rows)
        self._writes, self._arrived = [], {}
        self.news.flush()
        outgoing, self._outgoing = self._outgoing, {}
        for peer, messages in outgoing.items():
            self._post(peer, messages)
        self.driver.interrupt(replan)

    def _post(self, peer: str, messages: Sequence[Message], pages: Tensor | None = None, number: int = 0) -> None:
        self.news.flush()
        if messages and peer not in self._lost:
            self._links[peer].send(PageParcel(self._session, tuple(messages), pages, number))
