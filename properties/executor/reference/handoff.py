"""A prefill and a decode worker over reference executors, joined by a link in memory: every cell of KV is its own
canary.

    ReferenceWorker ──► Wire ──► ReferenceWorker     messages may be lost, late, doubled, reordered,
         ▲              │                            cut short or changed by the test
         └──── Wire ◄───┘

A page travels as the bytes of its shadow cells (position, token, prefix hash) of both pools. The receiver writes them
under its own name. The first step of the request reads the whole prefix, and so finds a page that is missing, old, or
of another prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ....core.algorithm.arrival import DraftPayload
from ....core.contract.outcomes import AbortOutcome
from ....core.contract.request import FinishedRequest, FinishReason, Request
from ....core.handoff import (
    DecodeSide,
    HandoffTiming,
    Message,
    PageFormat,
    PageSeal,
    PrefillDriver,
    PrefillSide,
    SendPages,
    TransferOutcome,
    WritePage,
    make_driver,
)
from ....core.handoff.messages import Page, decode, encode
from ....core.scheduler.driver import Driver
from ....core.scheduler.engine import Engine
from .executor import ReferenceExecutor
from .language_model import HIDDEN_SIZE
from .shadow import ShadowPool, stay_of

_COLUMNS = ("positions", "tokens", "hashes")
CELL_BYTES = 8 * len(_COLUMNS)


def page_format_of(executor: ReferenceExecutor) -> PageFormat:
    page_bytes = executor.page_size * CELL_BYTES
    return PageFormat(
        page_size=executor.page_size,
        target_bytes=page_bytes,
        draft_bytes=page_bytes if executor.kv.draft is not None else 0,
        hidden_size=HIDDEN_SIZE if executor.algorithm.needs_hidden_states else 0,
        layout=f"shadow cells, {executor.kv.draft_kv} draft",
    )


def read_page(pool: ShadowPool | None, slots: np.ndarray) -> bytes:
    """Return the cells at `slots` int32 [page_size] as bytes, column after column; nothing where there is no pool."""
    if pool is None:
        return b""
    return b"".join(getattr(pool, name)[slots].tobytes() for name in _COLUMNS)


def write_page(pool: ShadowPool | None, slots: np.ndarray, stay: int, content: bytes) -> None:
    """Put a page's cells where `stay` (see `shadow.stay_of`) will read them."""
    if pool is None:
        return
    size = len(slots) * 8
    for i, name in enumerate(_COLUMNS):
        column = getattr(pool, name)
        column[slots] = np.frombuffer(content[i * size : (i + 1) * size], dtype=column.dtype)
    pool.stays[slots] = stay


@dataclass(slots=True)
class MessageWire:
    """Messages on their way in one direction; a test may look at them, reorder, drop or change them."""

    messages: list[Message] = field(default_factory=list)

    def take(self) -> list[Message]:
        messages, self.messages = self.messages, []
        return messages


class ReferenceWorker:
    """An engine, its executor and its side of the handoff: the transport of its driver, over `out`.

    `name` is what the other side calls it, `peer` what it calls the other side; `incarnation` counts its lives.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        executor: ReferenceExecutor,
        out: MessageWire,
        *,
        peer: str = "",
        incarnation: int = 1,
        timing: HandoffTiming | None = None,
    ) -> None:
        self.name = name
        self.peer = peer
        self.engine = engine
        self.executor = executor
        self.out = out
        self.driver = Driver(engine, executor, lambda: self.now_ns)
        self.handoff = make_driver(engine, page_format_of(executor), incarnation, self, timing)
        self.finished: dict[str, FinishedRequest] = {}
        self.outcomes: list[TransferOutcome] = []
        self.now_ns = 0

    @property
    def side(self) -> PrefillSide | DecodeSide:
        return self.handoff.side

    def submit(self, request: Request, now_ns: int) -> str:
        """Queue a request; returns why it was refused, or nothing."""
        return self.handoff.submit(request, self.peer, now_ns).refusal

    def turn(self, now_ns: int) -> bool:
        """Plan and launch until None, then commit the oldest step; returns whether there was one."""
        self.now_ns = now_ns
        outcome = self.driver.turn()
        if outcome is None:
            self.handoff.carry_out()
            return False
        payloads = {request_id: self._draft_payload(request_id) for request_id in outcome.computed}
        for finished in outcome.finished:
            self.report(finished)
        self.handoff.committed(outcome, now_ns, payloads)
        return True

    def _draft_payload(self, request_id: str) -> DraftPayload:
        """Read the row's first relay cell, which no round here will read."""
        progress = self.engine.transfers.progress_of(request_id)
        _, values = self.executor.future_map.resolve(np.array([progress.row]), np.array([progress.epoch]))
        return DraftPayload.of_cell(self.executor.algorithm, values)

    def receive(self, peer: str, message: Message, now_ns: int) -> None:
        self.handoff.receive(peer, [(message, None)], now_ns)

    def tick(self, now_ns: int) -> None:
        self.handoff.tick(now_ns)

    def abort(self, request_id: str, now_ns: int) -> AbortOutcome:
        outcome = self.handoff.abort(request_id, now_ns)
        self.driver.interrupt(outcome.replan)
        if outcome.finished is not None:
            self.report(outcome.finished)
        return outcome

    def check(self) -> None:
        self.engine.check()
        self.side.check()

    # -- what the driver calls (`core.handoff.Transport`) -------------------------------------------------------------

    def send(self, peer: str, message: Message) -> None:
        self.out.messages.append(message)

    def send_pages(self, action: SendPages, driver: PrefillDriver) -> None:
        kv = self.executor.kv
        pages = []
        for index, slots in zip(action.indices, action.slots, strict=True):
            target, draft = read_page(kv.target, slots), read_page(kv.draft, slots)
            pages.append(Page(action.key, action.epoch, index, PageSeal.of(target, draft), target, draft))
        self.out.messages += pages
        driver.pages_sent(pages, self.now_ns)

    def write_page(self, action: WritePage) -> None:
        kv, stay = self.executor.kv, int(stay_of(action.row, action.row_epoch))
        write_page(kv.target, action.slots, stay, action.page.target)
        write_page(kv.draft, action.slots, stay, action.page.draft)

    def report(self, finished: FinishedRequest) -> None:
        assert finished.request_id not in self.finished, f"{finished.request_id!r} ended twice on {self.name}"
        self.finished[finished.request_id] = finished

    def transfer_ended(self, outcome: TransferOutcome) -> None:
        self.outcomes.append(outcome)

    def flush(self, replan: bool) -> None:
        self.driver.interrupt(replan)


Meddler = Callable[[list[Message]], list[Message]]
"""What a link does to the messages on it: the list as it is sent -> the list as it arrives."""


class HandoffPair:
    """One prefill and one decode worker. `meddle` may disturb what travels;
    time goes on by `tick_ns` with every turn."""

    def __init__(
        self,
        prefill: tuple[Engine, ReferenceExecutor],
        decode: tuple[Engine, ReferenceExecutor],
        *,
        timing: HandoffTiming | None = None,
        meddle: Meddler | None = None,
        tick_ns: int = 1_000_000,
    ) -> None:
        self.to_decode, self.to_prefill = MessageWire(), MessageWire()
        self.prefill = ReferenceWorker("prefill", *prefill, self.to_decode, peer="decode", timing=timing)
        self.decode = ReferenceWorker("decode", *decode, self.to_prefill, timing=timing)
        self.meddle = meddle
        self.tick_ns = tick_ns
        self.now_ns = 0
        self.prefill_alive = self.decode_alive = True

    def turn(self) -> bool:
        """Take one step of each worker, deliver one message (as bytes) in each direction;
        return whether more than time has changed."""
        self.now_ns += self.tick_ns
        busy = False
        if self.prefill_alive:
            busy = self.prefill.turn(self.now_ns)
        busy = self._deliver(self.to_decode, self.prefill.name, self.decode, self.decode_alive) or busy
        if self.decode_alive:
            busy = self.decode.turn(self.now_ns) or busy
        busy = self._deliver(self.to_prefill, self.decode.name, self.prefill, self.prefill_alive) or busy
        for worker, alive in ((self.prefill, self.prefill_alive), (self.decode, self.decode_alive)):
            if alive:
                worker.tick(self.now_ns)
                worker.check()
        return busy

    def run(self, max_turns: int = 2000) -> dict[str, FinishedRequest]:
        """Run until nothing is left to do on either side, skipping idle time. Return the requests' ends, as users see
        them: on the prefill side where that is not a transfer, else on the decode side."""
        for _ in range(max_turns):
            if self.turn() or self.to_decode.messages or self.to_prefill.messages:
                continue
            if self.is_idle:
                return self.ends()
            deadlines = [worker.side.next_deadline_ns for worker in self._living()]
            waiting = [at for at in deadlines if at is not None]
            assert waiting, "something is left to do, and nothing will ever happen"
            self.now_ns = max(self.now_ns, min(waiting))
        raise AssertionError(f"no end after {max_turns} turns")

    @property
    def is_idle(self) -> bool:
        return all(worker.engine.is_idle and worker.side.is_idle for worker in self._living())

    def ends(self) -> dict[str, FinishedRequest]:
        ends = self.prefill.finished
        here = {name: end for name, end in ends.items() if end.reason is not FinishReason.TRANSFERRED}
        return self.decode.finished | here

    def _living(self) -> list[ReferenceWorker]:
        return [w for w, alive in ((self.prefill, self.prefill_alive), (self.decode, self.decode_alive)) if alive]

    def _deliver(self, link: MessageWire, sender: str, receiver: ReferenceWorker, alive: bool) -> bool:
        messages = link.take()
        if self.meddle is not None:
            messages = self.meddle(messages)
        for message in messages if alive else ():
            receiver.receive(sender, decode(encode(message)), self.now_ns)
        return bool(messages)
