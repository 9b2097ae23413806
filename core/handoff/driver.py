"""The drivers of the two sides of a handoff: a driver tells its side what happens, and carries out what the side asks
for, over a transport.

```
abort, committed, receive, peer_lost, tick ──► side ──► actions ──► transport
prefill: submit, launched, pages_sent                   send_pages
decode:                                                 write_page
```

The transport is a network model in the simulator, sockets and device memory in real workers, a list in the reference
executor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from ..algorithm.algorithm import AlgorithmShape
from ..algorithm.arrival import DraftPayload
from ..contract.outcomes import AbortOutcome, CommitOutcome, SubmitOutcome
from ..contract.request import FinishedRequest, FinishReason, Request
from ..scheduler.config import EngineRole
from ..scheduler.engine import Engine
from .decode_side import DecodeSide
from .messages import Message, Page, PageFormat, PageSeal
from .prefill_side import PrefillSide
from .side import HandoffTiming, Send, SendPages, TransferOutcome, WritePage

SideT = TypeVar("SideT", PrefillSide, DecodeSide)


class Transport(Protocol):
    """Carries out the actions of one side, and takes its reports. The driver calls it in the order of the actions."""

    def send(self, peer: str, message: Message) -> None:
        """Give a message to the link to `peer`."""

    def send_pages(self, action: SendPages, driver: PrefillDriver) -> None:
        """Read pages and send them, then call `driver.pages_sent`; see `SendPages`."""

    def write_page(self, action: WritePage) -> None:
        """Write a verified page into the pools."""

    def report(self, finished: FinishedRequest) -> None:
        """Take a request that has ended here."""

    def transfer_ended(self, outcome: TransferOutcome) -> None:
        """Take a transfer that has ended on this side."""

    def flush(self, replan: bool) -> None:
        """Note that all actions are carried out. With `replan`, stop the running multi-step, because a new plan
        could differ."""


def _pages_of(messages: Iterable[tuple[Message, PageSeal | None]]) -> list[tuple[Page, PageSeal]]:
    pages = []
    for message, found in messages:
        assert isinstance(message, Page) and found is not None, "only a page is measured"
        pages.append((message, found))
    return pages


class HandoffDriver(ABC, Generic[SideT]):
    """One side and its transport. Every method carries out the actions that follow from it;
    none follow from `submit`."""

    def __init__(self, side: SideT, transport: Transport) -> None:
        self.side: SideT = side
        self._transport = transport
        self._is_carrying_out = False

    @abstractmethod
    def submit(self, request: Request, peer: str, now_ns: int) -> SubmitOutcome:
        """Queue a request of a client, whose KV will go to the decode worker `peer`, or refuse it."""

    def abort(self, request_id: str, now_ns: int) -> AbortOutcome:
        """Give up a request on this worker. The caller reports the end that the outcome holds."""
        outcome = self.side.abort(request_id, now_ns)
        self.carry_out()
        return outcome

    def committed(self, outcome: CommitOutcome, now_ns: int, payloads: dict[str, DraftPayload] | None = None) -> None:
        """Tell the side that a step was committed.
        `payloads`: the draft inputs of `outcome.computed`, if the executor has any."""
        self.side.committed(outcome, now_ns, payloads)
        self.carry_out()

    def receive(self, peer: str, messages: Iterable[tuple[Message, PageSeal | None]], now_ns: int) -> None:
        """Take messages from `peer`, each with the measured seal of a page whose bytes went another way."""
        for are_pages, group in groupby(messages, lambda arrived: arrived[1] is not None):
            if are_pages:
                self._receive_pages(peer, _pages_of(group), now_ns)
            else:
                for message, _ in group:
                    self.side.receive(peer, message, now_ns)
        self.carry_out()

    @abstractmethod
    def _receive_pages(self, peer: str, pages: list[tuple[Page, PageSeal]], now_ns: int) -> None:
        """Pass pages on to the side, each with the seal of what has arrived."""

    def launched(self, now_ns: int) -> None:
        """Tell the side that a step was launched, where layers are sent as they are computed."""

    def peer_lost(self, peer: str, now_ns: int, reason: FinishReason = FinishReason.ERROR) -> None:
        """Tell the side that the worker `peer` is gone.
        `reason`: how its requests end here, MOVED if `Placements` goes on with them."""
        self.side.peer_lost(peer, now_ns, reason)
        self.carry_out()

    def worker_lost(self, incarnation: int, now_ns: int) -> None:
        """Tell the side that its own worker was restarted, as another incarnation and without its KV."""
        self.side.worker_lost(incarnation, now_ns)
        self.carry_out()

    def tick(self, now_ns: int) -> None:
        """Let the side act on deadlines that have passed."""
        self.side.tick(now_ns)
        self.carry_out()

    def carry_out(self) -> None:
        """Carry out the side's actions in order, and pass on its reports. Actions that these cause come last."""
        if self._is_carrying_out:
            return
        self._is_carrying_out = True
        try:
            self._carry_out()
        finally:
            self._is_carrying_out = False

    def _carry_out(self) -> None:
        while True:
            self._pass_reports_on()  # clients learn of an end before another worker can continue the request
            if not self._act():
                break
        self._transport.flush(self.side.take_replan())

    def _act(self) -> bool:
        """Carry out the actions that the side has ready. Returns whether there were any."""
        actions = self.side.take_actions()
        for action in actions:
            if isinstance(action, Send):
                self._transport.send(action.peer, action.message)
            else:
                self._move(action)
        return bool(actions)

    @abstractmethod
    def _move(self, action: SendPages | WritePage) -> None:
        """Move the pages of an action."""

    def _pass_reports_on(self) -> None:
        for finished in self.side.take_finished():
            self._transport.report(finished)
        for outcome in self.side.take_outcomes():
            self._transport.transfer_ended(outcome)


class PrefillDriver(HandoffDriver[PrefillSide]):
    """Drives the prefill side: requests come from clients, pages go out."""

    def submit(self, request: Request, peer: str, now_ns: int) -> SubmitOutcome:
        return self.side.submit(request, peer, now_ns)

    def launched(self, now_ns: int) -> None:
        self.side.launched(now_ns)
        self.carry_out()

    def pages_sent(self, pages: Iterable[Page], now_ns: int) -> None:
        """Tell the side that these pages are read out: their slots may be written again."""
        for key, of_one in groupby(pages, attrgetter("key")):
            self.side.pages_sent(key, {page.index: page.seal for page in of_one}, now_ns)
        self.carry_out()

    def _receive_pages(self, peer: str, pages: list[tuple[Page, PageSeal]], now_ns: int) -> None:
        """Pass pages on as messages that mean nothing here: the side counts and ignores them."""
        for page, _ in pages:
            self.side.receive(peer, page, now_ns)

    def _move(self, action: SendPages | WritePage) -> None:
        assert isinstance(action, SendPages), "a prefill side sends pages"
        self._transport.send_pages(action, self)


class DecodeDriver(HandoffDriver[DecodeSide]):
    """Drives the decode side: requests come as offers, pages come in."""

    def submit(self, request: Request, peer: str, now_ns: int) -> SubmitOutcome:
        return self.side.engine.submit(request, now_ns)  # which refuses it: the engine only decodes

    def _receive_pages(self, peer: str, pages: list[tuple[Page, PageSeal]], now_ns: int) -> None:
        self.side.receive_pages(peer, pages, now_ns)

    def _move(self, action: SendPages | WritePage) -> None:
        assert isinstance(action, WritePage), "a decode side writes pages"
        self._transport.write_page(action)


def make_driver(
    engine: Engine,
    page_format: PageFormat,
    incarnation: int,
    transport: Transport,
    timing: HandoffTiming | None = None,
    shape: AlgorithmShape | None = None,
) -> PrefillDriver | DecodeDriver:
    """Return the driver for the engine's role. `incarnation` counts restarts of the worker, from 1; `shape`:
    see `DecodeSide`."""
    if engine.role is EngineRole.PREFILL:
        return PrefillDriver(PrefillSide(engine, page_format, incarnation, timing), transport)
    return DecodeDriver(DecodeSide(engine, page_format, incarnation, timing, shape), transport)
