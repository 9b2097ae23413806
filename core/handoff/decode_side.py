"""The decode side of a handoff: it reserves slots, verifies pages as they arrive, and lets the request join without a
forward pass.

A transfer holds its row in the engine from the reservation until the request joins. If it is given up instead, the row
is held until no page of it can be written any more: the prefill side has confirmed that, or a fence has passed. The
side remembers ended transfers for a while (`EndedTransfers`), to answer late messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import groupby

from ..algorithm.algorithm import AlgorithmShape
from ..algorithm.arrival import DraftPayload
from ..contract.outcomes import AbortOutcome, CommitOutcome
from ..contract.request import FinishReason
from ..scheduler.engine import Engine
from .ended import EndedTransfers, TransferName
from .life import TransferEvent, TransferState
from .messages import (
    Accept,
    Ack,
    Cancel,
    CancelAck,
    Manifest,
    Message,
    Nack,
    Offer,
    Page,
    PageFormat,
    PageSeal,
    Reject,
    Renew,
)
from .side import HandoffSide, HandoffTiming, WritePage
from .transfer import Incoming


class DecodeSide(HandoffSide[Incoming, WritePage]):
    """The decode side of all transfers to one engine.

    A driver (`DecodeDriver`) calls `receive` and `peer_lost` when something has happened, `committed` after every
    `Engine.commit`, and `tick` when `next_deadline_ns` is due. Then it carries out `take_actions` before the engine's
    next plan, and passes on `take_finished` and `take_outcomes`.

    The prefill side reports the end of a request that has not joined. So `take_finished` has only requests that the
    prefill side gave up after they had joined.

    `shape` gives the sizes of the relayed fields; the default follows from the engine's steps and top-k.
    """

    def __init__(
        self,
        engine: Engine,
        page_format: PageFormat,
        epoch: int,
        timing: HandoffTiming | None = None,
        shape: AlgorithmShape | None = None,
    ) -> None:
        super().__init__(engine, page_format, timing)
        self.epoch: int = epoch
        sizes, topk = engine.sizes, engine.controller.topk
        self._shape = shape or AlgorithmShape(sizes.max_steps, topk, page_format.hidden_size)
        self._transfers: dict[TransferName, Incoming] = {}
        self._queue: deque[Incoming] = deque()
        self._generations: dict[str, int] = {}  # the newest known, by peer
        self._ended = EndedTransfers(self.timing)

    # -- what a driver may ask ----------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no transfer is open. Ended ones may be remembered."""
        return not self._transfers

    def _next_times_ns(self) -> tuple[int | None, ...]:
        return *super()._next_times_ns(), self._ended.next_ns

    # -- events -------------------------------------------------------------------------------------------------------

    def abort(self, request_id: str, now_ns: int) -> AbortOutcome:
        """End a request in any state. Its reserved slots are free when the prefill side sends no more pages."""
        outcome = self.engine.abort(request_id, now_ns)
        self._replan = self._replan or outcome.replan
        for transfer in [t for t in self._transfers.values() if t.request_id == request_id]:
            self._give_up(transfer, TransferState.CANCELLED, "aborted", now_ns)
        self._reserve_waiting(now_ns)
        return outcome

    def committed(self, outcome: CommitOutcome, now_ns: int, payloads: dict[str, DraftPayload] | None = None) -> None:
        """Reserve slots for waiting transfers: a committed step may have made room. Mirrors `PrefillSide.committed`."""
        self._reserve_waiting(now_ns)

    def receive(self, peer: str, message: Message, now_ns: int) -> None:
        """Take a message from the prefill worker `peer`. Late, duplicate and meaningless messages change nothing."""
        if isinstance(message, Page):
            self.receive_pages(peer, [(message, PageSeal.of(message.target, message.draft))], now_ns)
            return
        if isinstance(message, Offer):
            understood = self._offered(peer, message, now_ns)
        elif isinstance(message, Cancel):
            understood = self._cancelled(peer, message, now_ns)
        else:
            transfer = self._transfers.get((peer, message.key.request_id))
            if transfer is None or transfer.key != message.key:
                understood = False
                answer = self._ended.answer((peer, message.key.request_id), message)
                if answer is not None:
                    self._say(peer, answer)
            elif isinstance(message, Manifest):
                understood = self._manifest(transfer, message, now_ns)
            elif isinstance(message, Renew):
                understood = self._renewed(transfer, message, now_ns)
            else:
                understood = isinstance(message, CancelAck) and self._cancel_answered(transfer, now_ns)
        self.counts.ignored += not understood
        if understood:
            self._reserve_waiting(now_ns)

    def receive_pages(self, peer: str, pages: Sequence[tuple[Page, PageSeal]], now_ns: int) -> None:
        """Take pages from the prefill worker `peer`, each with the seal of what has arrived."""
        for key, group in groupby(pages, lambda arrived: arrived[0].key):
            transfer = self._transfers.get((peer, key.request_id))
            if transfer is None or transfer.key != key:
                self.counts.ignored += sum(1 for _ in group)
                continue
            num_before = len(transfer.received)
            for page, found in group:
                self.counts.ignored += not self._page(transfer, page, found)
            if len(transfer.received) > num_before:
                self._deadlines.set(transfer, now_ns + self.timing.hold_ns)
                if not transfer.is_refused:
                    self._complete(transfer, now_ns)
                    self._reserve_waiting(now_ns)

    def peer_lost(self, peer: str, now_ns: int, reason: FinishReason = FinishReason.ERROR) -> None:
        """Fail the transfers from a prefill worker that is gone; their requests have not begun here.
        Slots are free after a fence."""
        for transfer in [t for t in self._transfers.values() if t.peer == peer]:
            self._lose(transfer, f"prefill worker {peer!r} is gone", now_ns)
        self._reserve_waiting(now_ns)

    def worker_lost(self, epoch: int, now_ns: int) -> None:
        """End all transfers: this worker was restarted, without its KV.
        Messages for the old epoch are ignored from now on."""
        for transfer in list(self._transfers.values()):
            if transfer.state is not TransferState.QUEUED:
                if transfer.state is TransferState.RECEIVING:
                    self._fail_request(transfer, "the decode worker was restarted", now_ns)
                    self._say(transfer.peer, Cancel(transfer.key, transfer.offer.first_attempt, True, transfer.message))
                self._finish(transfer, transfer.end, now_ns)
        self.epoch = epoch

    def tick(self, now_ns: int) -> None:
        """Act on deadlines that have passed."""
        while (transfer := self._renewals.pop_due(now_ns)) is not None:
            self._say(transfer.peer, Renew(transfer.key, self.epoch))
            self._renew_queued(transfer, now_ns)
        while (transfer := self._deadlines.pop_due(now_ns)) is not None:
            if transfer.state is TransferState.FENCED:
                self._finish(transfer, transfer.end, now_ns)
            elif transfer.state is TransferState.CANCELLING:
                self._fence(transfer, now_ns)
            else:
                self._fail_request(transfer, "nothing arrived in time", now_ns)
                self._give_up(transfer, TransferState.FAILED, transfer.message, now_ns)
        self._ended.forget_due(now_ns)
        self._reserve_waiting(now_ns)

    # -- messages -----------------------------------------------------------------------------------------------------

    def _offered(self, peer: str, offer: Offer, now_ns: int) -> bool:
        key, name = offer.key, (peer, offer.key.request_id)
        newest = self._generations.get(peer, key.generation)
        if key.generation < newest:
            return False
        if key.generation > newest:
            for transfer in [t for t in self._transfers.values() if t.peer == peer]:
                self._lose(transfer, f"prefill worker {peer!r} was restarted", now_ns)
        self._generations[peer] = key.generation
        ended = self._ended.get(name)
        if ended is not None and ended.key.generation == key.generation:
            if key.attempt <= ended.key.attempt:
                return False
            if ended.joined and offer.first_attempt <= ended.key.attempt:
                # The ack was lost; the request has joined already.
                self._ended.add(name, key, True, now_ns)
                self._say(peer, Ack(key, self.epoch))
                return True
        if name in self._transfers:
            return self._offered_again(self._transfers[name], offer, now_ns)
        refusal = self._refusal(offer)
        if refusal:
            self._say(peer, Reject(key, self.epoch, refusal))
            return True
        transfer = Incoming(offer, peer)
        self.counts.started += 1
        self._transfers[name] = transfer
        self._queue.append(transfer)  # it holds nothing, so it needs no deadline; the prefill side may cancel it
        self._reserve_waiting(now_ns)
        if transfer.state is TransferState.QUEUED and self._transfers.get(name) is transfer:
            self._say(peer, Renew(key, self.epoch))
            self._renew_queued(transfer, now_ns)
        return True

    def _refusal(self, offer: Offer) -> str:
        if offer.page_format != self.page_format:
            return f"pages of {offer.page_format}, expected {self.page_format}"
        if offer.algorithm != self.engine.algorithm.name:
            return f"drafts for {offer.algorithm}, expected {self.engine.algorithm.name}"
        return ""

    def _offered_again(self, transfer: Incoming, offer: Offer, now_ns: int) -> bool:
        """Take a retry. The reserved slots stay; pages of the earlier attempt do not count."""
        if offer.key.attempt <= transfer.key.attempt or transfer.state not in (
            TransferState.QUEUED,
            TransferState.RECEIVING,
        ):
            return False
        if offer.request != transfer.offer.request:
            # The offer must be repeated: first both sides must agree that no page of the other request is sent any
            # more.
            self._fail_request(transfer, "another request of this id was offered", now_ns)
            self._give_up(transfer, TransferState.FAILED, transfer.message, now_ns)
            return False
        self.counts.retries += 1
        transfer.begin_attempt(offer)
        if transfer.state is TransferState.RECEIVING:
            self._deadlines.set(transfer, now_ns + self.timing.hold_ns)
            self._say(transfer.peer, Accept(offer.key, self.epoch, transfer.first_page, self.timing.hold_ns))
        else:
            self._say(transfer.peer, Renew(offer.key, self.epoch))
        return True

    def _page(self, transfer: Incoming, page: Page, found: PageSeal) -> bool:
        """Take a page; returns whether it was understood. `found`: the seal of what has arrived."""
        if transfer.state is not TransferState.RECEIVING or transfer.is_refused or page.epoch != self.epoch:
            return False
        if page.index in transfer.received:
            return False
        if problem := transfer.problem_of_page(page, found, self.page_format):
            return self._refuse(transfer, problem)
        transfer.received[page.index] = found
        slots = transfer.slots_of(page.index, self.page_format.page_size)
        self._actions.append(WritePage(page, transfer.row, transfer.row_epoch, slots))
        return True

    def _manifest(self, transfer: Incoming, manifest: Manifest, now_ns: int) -> bool:
        if transfer.state is not TransferState.RECEIVING or transfer.is_refused or manifest.epoch != self.epoch:
            return False
        if transfer.manifest is not None:
            return False
        if problem := transfer.problem_of_manifest(manifest):
            return self._refuse(transfer, problem)
        transfer.manifest = manifest
        self._deadlines.set(transfer, now_ns + self.timing.hold_ns)
        self._complete(transfer, now_ns)
        return True

    def _complete(self, transfer: Incoming, now_ns: int) -> None:
        """Let the request join if every page has arrived as it was sent. No page was used before."""
        manifest = transfer.manifest
        if manifest is None or not transfer.has_all(manifest):
            return
        if problem := transfer.problem_of_pages(manifest):
            self._refuse(transfer, problem)
            return
        arrival = manifest.arrival
        if arrival.draft is not None and (problem := arrival.draft.problem(self.engine.algorithm, self._shape)):
            self._fail_request(transfer, problem, now_ns)
            self._give_up(transfer, TransferState.FAILED, problem, now_ns)
            return
        outcome = self.engine.transfers.join(transfer.request_id, arrival, now_ns)
        self._replan = self._replan or outcome.replan
        if outcome.finished is not None:
            self._give_up(transfer, TransferState.FAILED, outcome.finished.message, now_ns)
            return
        self._ended.note_join((transfer.peer, transfer.request_id))
        self._say(transfer.peer, Ack(transfer.key, self.epoch))
        self._finish(transfer, TransferState.COMPLETED, now_ns)

    def _refuse(self, transfer: Incoming, why: str) -> bool:
        """Reject an attempt that did not arrive as it was sent, and wait for another one until the hold ends."""
        transfer.is_refused = True
        transfer.message = why
        self._say(transfer.peer, Nack(transfer.key, self.epoch, why))
        return True

    def _renewed(self, transfer: Incoming, message: Renew, now_ns: int) -> bool:
        if transfer.state is not TransferState.RECEIVING or message.epoch != self.epoch:
            return False
        self._deadlines.set(transfer, now_ns + self.timing.hold_ns)
        return True

    def _cancelled(self, peer: str, message: Cancel, now_ns: int) -> bool:
        """Make sure that no page of a cancelled transfer is written any more, whatever state it is in."""
        key, name = message.key, (peer, message.key.request_id)
        self._say(peer, CancelAck(key))
        transfer = self._transfers.get(name)
        if (
            transfer is not None
            and transfer.key.generation == key.generation
            and message.first_attempt <= transfer.key.attempt <= key.attempt
        ):
            if transfer.state in (TransferState.QUEUED, TransferState.RECEIVING):
                end = TransferState.FAILED if message.failed else TransferState.CANCELLED
                self._end_request(transfer, end, f"given up by the prefill worker: {message.reason}", now_ns)
            self._finish(transfer, transfer.end, now_ns)
            # An offer of a later attempt that it ends may still arrive.
            self._ended.add(name, key, False, now_ns)
            return True
        ended = self._ended.get(name)
        is_old = ended is not None and (ended.key.generation, ended.key.attempt) > (key.generation, key.attempt)
        if transfer is not None or is_old:
            return False
        was_joined = ended is not None and ended.joined and ended.key.generation == key.generation
        if ended is not None and was_joined and message.first_attempt <= ended.key.attempt:
            self._abort_joined(name, now_ns)
        # The cancel may have overtaken its offer.
        self._ended.add(name, key, False, now_ns)
        return True

    def _abort_joined(self, name: TransferName, now_ns: int) -> None:
        """Abort a running request that the prefill side has given up and reported to its client as ended."""
        if self._ended.has_brought(name):
            self._abort_engine_request(name[1], now_ns)
            self._replan = True

    def _cancel_answered(self, transfer: Incoming, now_ns: int) -> bool:
        if transfer.state not in (TransferState.CANCELLING, TransferState.FENCED):
            return False
        self._finish(transfer, transfer.end, now_ns)
        return True

    # -- moves --------------------------------------------------------------------------------------------------------

    def _reserve_waiting(self, now_ns: int) -> None:
        """Reserve slots for waiting transfers, in the order of their offers."""
        while self._queue:
            transfer = self._queue[0]
            outcome = self.engine.transfers.reserve(transfer.offer.request, now_ns)
            if outcome.refusal:
                self._say(transfer.peer, Reject(transfer.key, self.epoch, outcome.refusal))
                transfer.message = outcome.refusal
                self._finish(transfer, TransferState.FAILED, now_ns)
                continue
            if not outcome.row:
                self._replan = self._replan or outcome.replan
                return
            self._queue.popleft()
            self._renewals.clear(transfer)
            page_size = self.page_format.page_size
            num_pages = self.page_format.num_pages(transfer.offer.request.prefill_len)
            slots = self.engine.store.table.gather(outcome.row, 0, num_pages * page_size)
            transfer.reserve(outcome.row, outcome.epoch, outcome.num_cached // page_size, num_pages, slots)
            self._deadlines.set(transfer, now_ns + self.timing.hold_ns)
            accept = Accept(transfer.key, self.epoch, transfer.first_page, self.timing.hold_ns)
            self._say(transfer.peer, accept)

    def _renew_queued(self, transfer: Incoming, now_ns: int) -> None:
        """Keep telling the prefill side that the transfer waits for room, so that its lease does not end."""
        self._renewals.set(transfer, now_ns + max(1, transfer.offer.lease_ns // 3))

    def _give_up(self, transfer: Incoming, end: TransferState, why: str, now_ns: int) -> None:
        """Cancel a transfer. Its row is released when the prefill side answers, or after lease and fence."""
        transfer.end, transfer.message = end, why
        if transfer.state not in (TransferState.QUEUED, TransferState.RECEIVING):
            return
        self._say(transfer.peer, Cancel(transfer.key, transfer.offer.first_attempt, end is TransferState.FAILED, why))
        if transfer.state is TransferState.QUEUED:
            self._finish(transfer, end, now_ns)
            return
        transfer.move(TransferEvent.GIVE_UP)
        self._deadlines.set(transfer, now_ns + self.timing.lease_ns)

    def _lose(self, transfer: Incoming, why: str, now_ns: int) -> None:
        """Fail a transfer whose peer is gone; since no answer can come, only a fence protects its slots."""
        if transfer.state is TransferState.QUEUED:
            transfer.message = why
            self._finish(transfer, TransferState.FAILED, now_ns)
        elif transfer.state is TransferState.RECEIVING:
            self._fail_request(transfer, why, now_ns)
            self._fence(transfer, now_ns)
        elif transfer.state is TransferState.CANCELLING:
            self._fence(transfer, now_ns)

    def _fail_request(self, transfer: Incoming, why: str, now_ns: int) -> None:
        self._end_request(transfer, TransferState.FAILED, why, now_ns)

    def _end_request(self, transfer: Incoming, end: TransferState, why: str, now_ns: int) -> None:
        """Note how a transfer will end, and end its request in the engine if it has slots there. The row stays held."""
        transfer.end, transfer.message = end, why
        if transfer.state is not TransferState.RECEIVING:
            return
        if end is TransferState.FAILED:
            self.engine.transfers.end_transfer(transfer.request_id, now_ns, why)
        else:
            self.engine.abort(transfer.request_id, now_ns)

    def _fence(self, transfer: Incoming, now_ns: int) -> None:
        """Release the row when a fence has passed, because the prefill side will not answer any more."""
        transfer.move(TransferEvent.FENCE)
        self._deadlines.set(transfer, now_ns + self.timing.fence_ns)

    def _finish(self, transfer: Incoming, end: TransferState, now_ns: int) -> None:
        """End a transfer, release its row if it has one, and remember how it ended."""
        transfer.finish(end)
        name = (transfer.peer, transfer.request_id)
        del self._transfers[name]
        if transfer in self._queue:
            self._queue.remove(transfer)
        self._close(transfer, end, now_ns)
        self._ended.add(name, transfer.key, end is TransferState.COMPLETED, now_ns)
