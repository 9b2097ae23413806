"""What a worker does in one session: its engine and executor, its side of the handoff, and the news for the parent.

turn     plan and launch, run round by round (between rounds `poll` lets messages in), commit, tell
take     a parcel from a peer ─► the state machine ─► what it asks for is carried out at once
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from torch import Tensor

from ...core.algorithm.arrival import DraftPayload
from ...core.contract.events import Event, HandoffMove, HandoffMoved
from ...core.contract.request import FinishedRequest, Request
from ...core.contract.step import StepResult
from ...core.handoff import (
    DecodeSide,
    HandoffTiming,
    Message,
    PrefillSide,
    Send,
    SendPages,
    WritePage,
)
from ...core.handoff.messages import Page
from ...core.scheduler.driver import Driver
from ...core.scheduler.engine import CommitOutcome, Engine
from ..executor.executor import TorchExecutor
from ..session.loop import Deliveries
from .link import Parcel, PeerLink
from .page_tensors import PageTensors

MAX_PAGES_BYTES = 64 << 20  # of the pages of one parcel: what is on its way takes memory on both sides

now_ns = time.perf_counter_ns


class PolledDriver(Driver):
    """Calls `poll` between the rounds of a step, so that messages are read while a block runs."""

    poll: Callable[[], None]

    def collect(self) -> StepResult:
        while not self.executor.advance(1):
            self.poll()
        return super().collect()


class News:
    """What the parent has not been told yet, in order of its kind: who joined, tokens, ends."""

    def __init__(self, send: Callable[[Mapping[str, Any]], None], session: int) -> None:
        self._send = send
        self._session = session
        self._joined: list[str] = []
        self._tokens: list[list[Any]] = []
        self._ended: list[list[Any]] = []
        self._num_told: dict[str, int] = {}

    def joined(self, request_id: str) -> None:
        self._joined.append(request_id)
        self._num_told[request_id] = 1  # the first token was told by the prefill worker

    def tokens(self, request_id: str, tokens: Iterable[np.ndarray], outputs: Mapping[str, Iterable[Any]]) -> None:
        values = np.concatenate(list(tokens)).tolist()
        told = self._num_told.get(request_id, 0)
        self._num_told[request_id] = told + len(values)
        shown = {name: [np.asarray(entry).tolist() for entry in entries] for name, entries in outputs.items()}
        self._tokens.append([request_id, told, values, shown])

    def ended(self, end: FinishedRequest) -> None:
        self._num_told.pop(end.request_id, None)
        self._ended.append([end.request_id, end.reason.value, end.num_output, end.message])

    def refused(self, request_id: str, why: str) -> None:
        self._ended.append([request_id, "refused", 0, why])

    def flush(self) -> None:
        if self._joined or self._tokens or self._ended:
            news = {"joined": self._joined, "tokens": self._tokens, "ended": self._ended}
            self._joined, self._tokens, self._ended = [], [], []
            self._send({"say": "news", "session": self._session, **news})


class Serving(ABC):
    """Either role; see `PrefillServing` and `DecodeServing`."""

    side: PrefillSide | DecodeSide

    def __init__(
        self,
        session: int,
        engine: Engine,
        executor: TorchExecutor,
        deliveries: Deliveries,
        links: Mapping[str, PeerLink],
        news: News,
    ) -> None:
        self.engine = engine
        self.executor = executor
        self.driver = PolledDriver(engine, executor, now_ns)
        self.pages = PageTensors(executor, engine.config.page_size)
        self.news = news
        self.num_malformed = 0
        self._session = session
        self._deliveries = deliveries
        self._links = links
        self._lost: dict[str, None] = {}

    # -- from outside -------------------------------------------------------------------------------------------------

    def turn(self, poll: Callable[[], None]) -> bool:
        """One step; says whether there was one. `poll` is called between its rounds."""
        self.driver.poll = poll
        outcome = self.driver.turn()
        if outcome is None:
            return False
        tokens, outputs = self._deliveries.take()
        for request_id, values in tokens.items():
            self.news.tokens(request_id, values, outputs.get(request_id, {}))
        for end in outcome.finished:
            self.news.ended(end)
        self._committed(outcome)
        self.carry_out()
        return True

    def take(self, peer: str, parcel: Parcel, num_malformed: int) -> None:
        """What `peer` has sent. Of a peer that the parent called lost nothing is heard any more."""
        if peer in self._lost or parcel.session != self._session:
            return
        self.num_malformed += num_malformed
        self._take(peer, parcel)
        self.carry_out()

    def abort(self, request_id: str) -> None:
        outcome = self.side.abort(request_id, now_ns())
        self.driver.interrupt(outcome.replan)
        if outcome.finished is not None:
            self.news.ended(outcome.finished)
        self.carry_out()

    def lose(self, peer: str) -> None:
        """The parent says that `peer` is dead."""
        self._lost[peer] = None
        self.side.peer_lost(peer, now_ns())
        self.carry_out()

    def tick(self) -> None:
        self.side.tick(now_ns())
        self.carry_out()

    def wait_s(self) -> float | None:
        """Seconds until `tick` has something to do; None: never, as things are."""
        due = self.side.next_deadline_ns
        return None if due is None else max(0.0, (due - now_ns()) / 1e9)

    def report(self) -> dict[str, Any]:
        """What is held, and what was done. Slots that only the prefix cache has can be given up at any time: they are free."""
        store, counts = self.engine.store, self.side.counts
        self.side.check()
        self.engine.check()
        metrics = self.engine.controller.metrics()
        return {
            "total_slots": store.allocator.num_total_slots,
            "free_slots": store.available_slots,
            "cached_slots": store.available_slots - store.allocator.num_free_slots,
            "held_rows": store.num_held_rows,
            "is_idle": self.engine.is_idle and self.side.is_idle,
            "transfers": asdict(counts),
            "malformed": self.num_malformed,
            "rounds": metrics.verify_calls,
            "verified_rows": metrics.verified_rows,
            "drafted": metrics.proposed_drafts,
            "correct_drafts": metrics.correct_drafts,
            "prefilled": self.executor.counters.prefilled,
            "phase_seconds": dict(self.executor.clock.seconds),
        }

    # -- inside ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _committed(self, outcome: CommitOutcome) -> None:
        """Hand the state machine what a committed step has brought."""

    @abstractmethod
    def _take(self, peer: str, parcel: Parcel) -> None:
        """What a peer has sent: messages, and pages with them."""

    def carry_out(self) -> None:
        """Do what the state machine asks for. The parent hears of it first: what it is told of a request is then in the order in which
        the workers did it, whichever of them it listens to first."""
        self._tell_ends()
        outgoing: dict[str, list[Message]] = {}
        while actions := self._actions():
            for action in actions:
                if isinstance(action, Send):
                    outgoing.setdefault(action.peer, []).append(action.message)
                else:
                    self._post(action.peer, outgoing.pop(action.peer, []))
                    self._send_pages(action)
        for peer, messages in outgoing.items():
            self._post(peer, messages)
        self._tell_ends()

    def _actions(self) -> list[Send | SendPages]:
        return self.side.take_actions()

    def _tell_ends(self) -> None:
        for end in self.side.take_finished():
            self.news.ended(end)
        self.side.take_outcomes()
        self.news.flush()

    def _send_pages(self, action: SendPages) -> None:
        raise AssertionError(f"{type(self).__name__} has no pages to send")

    def _post(self, peer: str, messages: list[Message], pages: Tensor | None = None) -> None:
        if messages and peer not in self._lost:
            self._links[peer].send(Parcel(self._session, tuple(messages), pages))


class PrefillServing(Serving):
    """Computes prompts and sends their KV to the decode workers that the parent names."""

    side: PrefillSide

    def __init__(self, *arguments: Any, timing: HandoffTiming) -> None:
        super().__init__(*arguments)
        self.side = PrefillSide(self.engine, self.pages.format, self._session, timing)

    def submit(self, request: Request, peer: str) -> None:
        outcome = self.side.submit(request, peer, now_ns())
        if outcome.refusal:
            self.news.refused(request.request_id, outcome.refusal)
        self.driver.interrupt(outcome.replan)
        self.carry_out()

    def _committed(self, outcome: CommitOutcome) -> None:
        payloads = {request_id: self._draft_payload(request_id) for request_id in outcome.computed}
        # The first tokens are told before the messages that let somebody go on from them.
        self.news.flush()
        self.side.committed(outcome, now_ns(), payloads)

    def _draft_payload(self, request_id: str) -> DraftPayload:
        """The row's first relay cell, which no round here will read."""
        progress = self.engine.progress_of(request_id)
        _, values = self.executor.future_map.resolve(np.array([progress.row]), np.array([progress.epoch]))
        on_host = {name: value.cpu().numpy() for name, value in values.items()}
        return DraftPayload.of_cell(self.executor.algorithm, on_host)

    def _take(self, peer: str, parcel: Parcel) -> None:
        for message in parcel.messages:
            self.side.receive(peer, message, now_ns())

    def _send_pages(self, action: SendPages) -> None:
        at_once = max(1, MAX_PAGES_BYTES // self.pages.row_bytes)
        for begin in range(0, len(action.indices), at_once):
            indices = action.indices[begin : begin + at_once]
            rows = self.pages.read(action.slots[begin : begin + at_once])
            seals = self.pages.seals(rows)
            messages = [Page(action.key, action.epoch, *page) for page in zip(indices, seals, strict=True)]
            self._post(action.peer, messages, rows.view(-1))
            # What travels is a copy: the slots may be written again.
            for index, seal in zip(indices, seals, strict=True):
                self.side.page_sent(action.key, index, seal, now_ns())


class DecodeServing(Serving):
    """Takes requests from prefill workers and decodes them to their end."""

    side: DecodeSide

    def __init__(self, *arguments: Any, timing: HandoffTiming) -> None:
        super().__init__(*arguments)
        self.side = DecodeSide(self.engine, self.pages.format, self._session, timing, self.executor.relayed)
        self._others: list[Send] = []

    def watch(self, event: Event) -> None:
        """An event sink: who joins is told to the parent."""
        if isinstance(event, HandoffMoved) and event.move is HandoffMove.JOIN and not event.finished:
            self.news.joined(event.request_id)

    def _committed(self, outcome: CommitOutcome) -> None:
        self.news.flush()
        self.side.committed(now_ns())

    def _take(self, peer: str, parcel: Parcel) -> None:
        """Verify every page by what arrived of it; all that are to be kept are written in one operation."""
        count = sum(isinstance(message, Page) for message in parcel.messages)
        rows, seals = self.pages.seals_of_arrived(parcel.pages, count)
        number = 0
        kept: list[int] = []
        slots: list[np.ndarray] = []
        for message in parcel.messages:
            measured = None
            if isinstance(message, Page):
                measured, number = seals[number], number + 1
            self.side.receive(peer, message, now_ns(), measured)
            if measured is None:
                continue
            for action in self.side.take_actions():
                if isinstance(action, WritePage):
                    kept.append(number - 1)
                    slots.append(action.slots)
                else:
                    self._others.append(action)
        if kept:
            self.pages.write(np.stack(slots), rows[kept])

    def _actions(self) -> list[Send]:
        others, self._others = self._others, []
        return others + self.side.take_actions()

    def carry_out(self) -> None:
        super().carry_out()
        self.driver.interrupt(self.side.take_replan())
