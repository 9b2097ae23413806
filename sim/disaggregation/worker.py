"""An engine of one role: an `EngineActor` with its side of the handoff.

```
prefill   submit ─► plan, launch ─► commit ─► side.committed ─► actions ─► network
decode    network ─► side.receive ─► actions, join ─► plan, launch ─► commit ─► side.committed
```

The state machines are those of the real executors. No KV exists here: a page is its seal, and the network says how long its bytes take.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING
from zlib import crc32

import simpy

from ...core.contract.request import Request
from ...core.handoff import (
    DecodeSide,
    Message,
    PageSeal,
    PrefillSide,
    Send,
    SendPages,
    TransferOutcome,
    TransferState,
    WritePage,
)
from ...core.handoff.messages import Accept, Offer, Page
from ...core.scheduler.config import EngineRole
from ...core.scheduler.engine import AbortOutcome, CommitOutcome, SubmitOutcome
from ...core.scheduler.life import RequestState
from ..actors.clock import call_at
from ..actors.device import Truth
from ..actors.engine import EngineActor
from .network import Layers

if TYPE_CHECKING:
    from .cluster import Cluster


NOTHING_ENDED = CommitOutcome((), ())


class HandoffPart:
    """What makes an `EngineActor` one of a cluster; mixed into it and into its relatives with faults."""

    side: PrefillSide | DecodeSide

    def join_cluster(self, cluster: Cluster) -> None:
        """Before the first event."""
        self.cluster = cluster
        self.name = f"engine {self.replica}"
        self.incarnation = 1
        self.num_layers = cluster.num_layers
        self._accepted_ns: dict[str, int] = {}
        self._within_commit = False
        self._tick_at_ns: int | None = None
        self.side = self._make_side()

    def _make_side(self) -> PrefillSide | DecodeSide:
        cluster = self.cluster
        if self.engine.role is EngineRole.PREFILL:
            return PrefillSide(self.engine, cluster.page_format, self.incarnation, cluster.timing)
        return DecodeSide(self.engine, cluster.page_format, self.incarnation, cluster.timing)

    @property
    def is_empty(self) -> bool:
        """Nothing is here, and nothing that was here can still be asked for."""
        outstanding = self.cluster.outstanding[self.replica]
        return not outstanding and self.engine.is_idle and self.side.is_idle and self.side.next_deadline_ns is None

    def change_role(self, role: EngineRole) -> None:
        """Raises InvariantViolation HANDOFF-10 unless the engine is empty."""
        self.engine.change_role(role, self.now_ns)
        self.incarnation += 1
        self.side = self._make_side()

    @property
    def is_prefill(self) -> bool:
        return self.engine.role is EngineRole.PREFILL

    @property
    def now_ns(self) -> int:
        """The time by which transfers are waited for: monotonic, whatever a host's clock shows."""
        return self.env.now

    # -- what `EngineActor` asks --------------------------------------------------------------------------------------

    def _submit(self, request: Request) -> SubmitOutcome:
        return self.side.submit(request, self.cluster.peer_of(request.request_id), self._stamp(self.env.now))

    def _abort(self, request_id: str) -> AbortOutcome:
        # Until a request has joined, its end is the prefill engine's to tell.
        is_told_elsewhere = not self.is_prefill and self.engine.state_of(request_id) is RequestState.TRANSFERRING
        outcome = self.side.abort(request_id, self.now_ns)
        if self.cluster.decoder_of(request_id) is not self:
            self.cluster.pass_cancel_on(self, request_id)
        self.carry_out()
        return AbortOutcome(None, outcome.replan) if is_told_elsewhere else outcome

    def _planned(self) -> None:
        if self.is_prefill and self.cluster.is_layerwise:
            self.side.launched(self.now_ns)
            self.carry_out()

    def _committed(self, outcome: CommitOutcome) -> None:
        self._within_commit = True
        if self.is_prefill:
            for request_id in outcome.computed:
                self.cluster.transfers.computed(request_id, self.env.now)
            self.side.committed(outcome, self.now_ns)
        else:
            self.side.committed(self.now_ns)
        self.carry_out()
        self._within_commit = False

    def _wait_for_work(self) -> Generator[simpy.Event, None, None]:
        if self.is_prefill:
            # What a retracted request holds for its transfer may be what it waits for.
            self.side.committed(NOTHING_ENDED, self.now_ns)
            self.carry_out()
        yield from super()._wait_for_work()

    @property
    def _may_wait(self) -> bool:
        """What is on its way between engines wakes us: a message, or a deadline."""
        return self.engine.is_idle or self.engine.store.num_held_rows > 0 or not self.side.is_idle

    # -- mailbox ------------------------------------------------------------------------------------------------------

    def withdraw(self, request_id: str) -> None:
        """On a decode engine: a client has left, as the prefill engine of its request says."""
        outcome = self._abort(request_id)
        if outcome.finished is not None:
            self._report(outcome.finished)
        self._wake(outcome.replan)

    def hear(self, peer: str, message: Message, truth: Truth | None) -> None:
        """A message from another engine. An offer brings what this device will have to know of the request."""
        if self.is_prefill:
            if type(message) is Accept:
                self._accepted_ns[message.key.request_id] = self.env.now
            self.side.receive(peer, message, self.now_ns)
        else:
            before = self.side.counts.started
            self.side.receive(peer, message, self.now_ns)
            if type(message) is Offer and self.side.counts.started > before:
                self._expect(message.key.request_id, truth)
        self.carry_out()

    def hear_pages(self, peer: str, pages: list[tuple[Page, PageSeal]]) -> None:
        """Pages of one action, each with the seal of what has arrived of it; too late if the role has changed."""
        if self.is_prefill:
            return
        for page, measured in pages:
            self.side.receive(peer, page, self.now_ns, measured)
        self.carry_out()

    def _expect(self, request_id: str, truth: Truth) -> None:
        """A request may come."""
        self.device.truths.setdefault(request_id, truth)

    # -- what the state machine wants ---------------------------------------------------------------------------------

    def carry_out(self) -> None:
        """Do what the state machine asks for, pass on what it reports, and see to it that it is woken in time."""
        side = self.side
        while actions := side.take_actions():
            for action in actions:
                if type(action) is Send:
                    self._send(action)
                elif type(action) is SendPages:
                    self._send_pages(action)
                else:
                    self._write_page(action)
        for finished in side.take_finished():
            self._report(finished)
        for outcome in side.take_outcomes():
            self._transfer_over(outcome)
        self._wake_in_time()
        self._wake(not self.is_prefill and side.take_replan())

    def _send(self, action: Send) -> None:
        message = action.message
        truth = self.device.truths.get(message.key.request_id) if type(message) is Offer else None
        self.cluster.send(self, action.peer, message, truth)

    def _write_page(self, action: WritePage) -> None:
        """There are no bytes here."""

    def _send_pages(self, action: SendPages) -> None:
        """Pages of the step that was just committed left while it ran, as far as they were wanted by then."""
        request_id = action.key.request_id
        layers = None
        if self._within_commit and self.cluster.is_layerwise:
            began_ns, ended_ns = self._ran_ns
            first_ns = began_ns + (ended_ns - began_ns) // self.num_layers
            layers = Layers(max(first_ns, self._accepted_ns.get(request_id, self.env.now)), ended_ns, self.num_layers)
        page_format = self.cluster.page_format
        row = self.side.row_of(action.key)
        epoch = int(self.engine.store.table.epochs[row])
        pages = []
        for index in action.indices:
            mark = crc32(f"{request_id}/{index}/{epoch}".encode())
            seal = PageSeal(
                page_format.target_bytes, mark, page_format.draft_bytes, mark if page_format.draft_bytes else 0
            )
            pages.append(Page(action.key, action.epoch, index, seal))
        started_ns, read_ns = self.cluster.send_pages(self, action.peer, pages, layers)
        self.cluster.transfers.started(request_id, started_ns)
        call_at(self.env, read_ns, self._pages_read, pages, row, epoch)

    def _pages_read(self, pages: list[Page], row: int, epoch: int) -> None:
        """The bytes of the pages are with the network; `row` and `epoch`: where they were read."""
        if not self.is_prefill:
            return
        for page in pages:
            self.side.page_sent(page.key, page.index, page.seal, self.now_ns)
        self.carry_out()

    def _transfer_over(self, outcome: TransferOutcome) -> None:
        request_id = outcome.request_id
        if self.is_prefill:
            self._accepted_ns.pop(request_id, None)
            self.cluster.transfers.ended(request_id, outcome.state)
        elif outcome.state is TransferState.COMPLETED:
            self.cluster.transfers.joined(request_id, self.env.now)
        elif self.engine.state_of(request_id) is None:
            self.device.truths.pop(request_id, None)

    # -- deadlines ----------------------------------------------------------------------------------------------------

    def _wake_in_time(self) -> None:
        """See that `tick` comes when the side's next deadline is due. It may come early, then it looks again."""
        due_ns = self.side.next_deadline_ns
        if due_ns is None:
            return
        at_ns = max(due_ns, self.env.now)
        if self._tick_at_ns is None or at_ns < self._tick_at_ns:
            self._tick_at_ns = at_ns
            call_at(self.env, at_ns, self._tick, at_ns)

    def _tick(self, at_ns: int) -> None:
        if at_ns != self._tick_at_ns:
            return  # an earlier one was wanted meanwhile
        self._tick_at_ns = None
        due_ns = self.side.next_deadline_ns
        if due_ns is not None and due_ns <= self.now_ns:
            self.side.tick(self.now_ns)
            self.carry_out()
        else:
            self._wake_in_time()


class Worker(HandoffPart, EngineActor):
    """An engine of a cluster."""
