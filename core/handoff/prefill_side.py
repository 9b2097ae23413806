"""The prefill side of a handoff: it holds the KV of computed prompts and sends it until the decode side acknowledges
it.

Every transfer holds the row of its request in the engine (`Transfers.hold`), from its offer on. The row is released on
an ack or on the answer to a cancel; without either, when a lease and a fence have passed. It is never released while
the driver still reads a page of it. The request itself ends as soon as the outcome is certain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..algorithm.arrival import DraftPayload
from ..contract.outcomes import AbortOutcome, CommitOutcome, SubmitOutcome
from ..contract.request import FinishReason, Request
from ..scheduler.engine import Engine
from ..scheduler.transfers import PromptProgress
from .ended import AcknowledgedAttempts
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
    PageFormat,
    PageSeal,
    Reject,
    Renew,
    TransferKey,
)
from .side import HandoffSide, HandoffTiming, SendPages
from .transfer import Outgoing


class PrefillSide(HandoffSide[Outgoing, SendPages]):
    """The prefill side of all transfers from one engine. Drivers submit and abort here instead of at the engine, and
    call

    * `committed` after every `Engine.commit`, with the draft input of each prompt that it computed;
    * `receive`, `pages_sent`, `peer_lost` when something has happened, and `tick` when `next_deadline_ns` is due;
    * then carry out `take_actions`, and pass on `take_finished` and `take_outcomes` (see `PrefillDriver`).
    """

    def __init__(
        self,
        engine: Engine,
        page_format: PageFormat,
        generation: int,
        timing: HandoffTiming | None = None,
    ) -> None:
        super().__init__(engine, page_format, timing)
        self.generation: int = generation
        self._num_attempts = 0
        self._peers: dict[str, str] = {}  # request -> decode worker, for requests without a transfer yet
        self._transfers: dict[TransferKey, Outgoing] = {}
        self._readers: dict[TransferKey, Outgoing] = {}  # by every attempt whose pages may still be read
        self._current: dict[str, Outgoing] = {}  # request -> its transfer, while neither has ended
        self._payloads: dict[str, DraftPayload | None] = {}  # of computed prompts
        self._acknowledged_attempts: AcknowledgedAttempts = AcknowledgedAttempts()

    @property
    def is_idle(self) -> bool:
        return not self._transfers and not self._peers

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: Request, peer: str, now_ns: int) -> SubmitOutcome:
        """Queue a request whose KV will go to the decode worker `peer`."""
        outcome = self.engine.submit(request, now_ns)
        if not outcome.refusal:
            self._peers[request.request_id] = peer
        return outcome

    def abort(self, request_id: str, now_ns: int) -> AbortOutcome:
        """End a request. Its pages are free when the decode side has confirmed that it expects none."""
        outcome = self.engine.abort(request_id, now_ns)
        self._drop(request_id, TransferState.CANCELLED, "aborted", now_ns)
        return outcome

    def committed(self, outcome: CommitOutcome, now_ns: int, payloads: dict[str, DraftPayload] | None = None) -> None:
        """Send what a committed step has computed.
        `payloads`: the draft inputs of `outcome.computed`, where the executor has tokens."""
        for finished in outcome.finished:
            self._drop(finished.request_id, TransferState.CANCELLED, "ended on the prefill side", now_ns)
        progresses = self.engine.transfers.prompts()
        self._give_up_retracted({progress.request.request_id: progress.row for progress in progresses}, now_ns)
        for request_id in outcome.computed:
            payload = None if payloads is None else payloads[request_id]
            if payload is not None:
                payload.check(self.engine.algorithm, f"the handoff of {request_id!r}")
            self._payloads[request_id] = payload
        for progress in progresses:
            current = self._current.get(progress.request.request_id)
            if current is None and progress.num_computed and progress.is_to_transfer:
                self._offer(progress, now_ns)
            elif current is not None and current.state is TransferState.SENDING:
                self._send_pages(current, progress, now_ns)

    def _give_up_retracted(self, rows: dict[str, int], now_ns: int) -> None:
        """Give up the transfers of requests that were retracted. They start again, perhaps in a new row already, and
        are offered again; what is held for the old row is useless. `rows`: of the requests that have one."""
        for request_id, transfer in list(self._current.items()):
            if rows.get(request_id) != transfer.row:
                self._give_up(transfer, TransferState.CANCELLED, "retracted", now_ns)
                self._peers[request_id] = transfer.peer

    def launched(self, now_ns: int) -> None:
        """Offer prompts as soon as they have a row, so that slots are reserved when the first layers are computed.

        Optional for drivers: without it a prompt is offered when its first chunk is computed.
        """
        for progress in self.engine.transfers.prompts():
            if progress.is_to_transfer and progress.request.request_id not in self._current:
                self._offer(progress, now_ns)

    def state_of(self, request_id: str) -> TransferState | None:
        """Return the state of a request's open transfer, or None."""
        transfer = self._current.get(request_id)
        return None if transfer is None else transfer.state

    def row_of(self, key: TransferKey) -> int:
        """Return the row that an attempt reads its pages from."""
        return self._readers[key].row

    def worker_lost(self, generation: int, now_ns: int) -> None:
        """End all transfers: this worker was restarted, without its KV, so no page is read any more."""
        for transfer in list(self._transfers.values()):
            transfer.num_reading = 0
            if transfer.state not in (TransferState.CANCELLING, TransferState.FENCED):
                self._fail_request(transfer, "the prefill worker was restarted", now_ns)
                self._say(transfer.peer, Cancel(transfer.key, transfer.first_attempt, True, transfer.message))
            self._finish(transfer, transfer.end, now_ns)
        self._peers = {name: peer for name, peer in self._peers.items() if self.engine.state_of(name) is not None}
        self.generation = generation

    # -- events -------------------------------------------------------------------------------------------------------

    def receive(self, peer: str, message: Message, now_ns: int) -> None:
        """Take a message from the decode worker `peer`. Late, duplicate and meaningless messages change nothing."""
        transfer = self._transfers.get(message.key)
        if transfer is None or transfer.peer != peer:
            self.counts.ignored += 1
            current = self._current.get(message.key.request_id)
            is_earlier = current is not None and current.is_earlier_attempt(message.key)
            answer = self._acknowledged_attempts.answer(message, is_expected=transfer is not None or is_earlier)
            if answer is not None:
                self._say(peer, answer)
            return
        handler = _HANDLERS.get(type(message))
        if handler is None or not handler(self, transfer, message, now_ns):
            self.counts.ignored += 1

    def pages_sent(self, key: TransferKey, seals: Mapping[int, PageSeal], now_ns: int) -> None:
        """Note that pages are read out, so that their slots may be written again. `seals`: by the page's index."""
        transfer = self._readers.get(key)
        if transfer is None or transfer.num_reading < len(seals):
            self.counts.ignored += len(seals)
            return
        transfer.num_reading -= len(seals)
        if transfer.state is TransferState.FENCED and transfer.awaits_readers and not transfer.num_reading:
            self._finish(transfer, transfer.end, now_ns)
        elif transfer.state is TransferState.SENDING and key == transfer.key:
            transfer.seals.update(seals)
            self._deadlines.set(transfer, now_ns + self.timing.lease_ns)  # it starts when the pages have left here
            self._send_manifest(transfer, now_ns)

    def peer_lost(self, peer: str, now_ns: int, reason: FinishReason = FinishReason.ERROR) -> None:
        """End the requests of a decode worker that is gone, as MOVED if their router places them anew. Their pages are
        free when a fence has passed."""
        for transfer in [t for t in self._transfers.values() if t.peer == peer]:
            if transfer.state is TransferState.FENCED:
                continue
            if transfer.state is not TransferState.CANCELLING:
                self._fail_request(transfer, f"decode worker {peer!r} is gone", now_ns, reason)
            self._fence(transfer, now_ns)
        for request_id in [name for name, wanted in self._peers.items() if wanted == peer]:
            del self._peers[request_id]
            self._fail_engine_request(request_id, f"decode worker {peer!r} is gone", now_ns, reason)

    def tick(self, now_ns: int) -> None:
        """Act on deadlines that have passed."""
        while (transfer := self._renewals.pop_due(now_ns)) is not None:
            if transfer.state in (TransferState.SENDING, TransferState.OFFERED) and transfer.peer_epoch is not None:
                self._say(transfer.peer, Renew(transfer.key, transfer.peer_epoch))
                self._renewals.set(transfer, now_ns + transfer.renewal_ns)
        while (transfer := self._deadlines.pop_due(now_ns)) is not None:
            if transfer.state is TransferState.FENCED:
                # A fence does not end while this worker still reads pages; the last reader ends it.
                transfer.awaits_readers = transfer.num_reading > 0
                if not transfer.awaits_readers:
                    self._finish(transfer, transfer.end, now_ns)
            elif transfer.state is TransferState.CANCELLING:
                # Cancel once more: if all messages were lost, the decode side may run the request.
                failed = transfer.end is TransferState.FAILED
                self._say(transfer.peer, Cancel(transfer.key, transfer.first_attempt, failed, transfer.message))
                self._fence(transfer, now_ns)
            elif not self._is_computed(transfer) and transfer.state is TransferState.SENDING:
                # The decode side waits for pages that are still to be computed here.
                self._deadlines.set(transfer, now_ns + self.timing.lease_ns)
            else:
                self._retry(transfer, "no answer in time", now_ns)

    def _accepted(self, transfer: Outgoing, message: Accept, now_ns: int) -> bool:
        if not transfer.try_move(TransferEvent.ACCEPT):
            return False
        transfer.accept(message, self.page_format.num_pages(transfer.request.prefill_len))
        self._renewals.set(transfer, now_ns + transfer.renewal_ns)
        self._deadlines.set(transfer, now_ns + self.timing.lease_ns)
        progress = self.engine.transfers.progress_of(transfer.request_id)
        if progress is not None:
            self._send_pages(transfer, progress, now_ns)
        return True

    def _renewed(self, transfer: Outgoing, message: Renew, now_ns: int) -> bool:
        if transfer.state is not TransferState.OFFERED:
            return False
        self._deadlines.set(transfer, now_ns + self.timing.lease_ns)
        return True

    def _rejected(self, transfer: Outgoing, message: Reject, now_ns: int) -> bool:
        if transfer.state is not TransferState.OFFERED:
            return False
        self._fail_request(transfer, f"refused by the decode worker: {message.reason}", now_ns)
        self._release_when_read(transfer, now_ns)
        return True

    def _acknowledged(self, transfer: Outgoing, message: Ack, now_ns: int) -> bool:
        # In OFFERED this answers a retry: an earlier attempt had arrived, and its ack was lost.
        answers = transfer.state is TransferState.SENT and message.epoch == transfer.peer_epoch
        if not answers and not (transfer.state is TransferState.OFFERED and transfer.attempts > 1):
            return False
        if not self._is_computed(transfer):
            return False
        self._forget_request(transfer)
        transfer.end = TransferState.COMPLETED
        self._acknowledged_attempts.add(transfer.key)
        finished = self.engine.transfers.end_transfer(transfer.request_id, now_ns)
        if finished is not None:
            self._finished.append(finished)
        self._release_when_read(transfer, now_ns)
        return True

    def _not_acknowledged(self, transfer: Outgoing, message: Nack, now_ns: int) -> bool:
        if transfer.state not in (TransferState.SENDING, TransferState.SENT):
            return False
        if message.epoch != transfer.peer_epoch:
            return False
        self._retry(transfer, f"the decode worker did not accept it: {message.reason}", now_ns)
        return True

    def _cancelled(self, transfer: Outgoing, message: Cancel, now_ns: int) -> bool:
        self._say(transfer.peer, CancelAck(message.key))
        if transfer.state is TransferState.FENCED:
            return False
        if transfer.state is not TransferState.CANCELLING:
            if message.failed:
                self._fail_request(transfer, f"given up by the decode worker: {message.reason}", now_ns)
            else:
                self._forget_request(transfer)
                transfer.end, transfer.message = TransferState.CANCELLED, message.reason
                self._abort_engine_request(transfer.request_id, now_ns)
        self._release_when_read(transfer, now_ns)
        return True

    def _cancel_answered(self, transfer: Outgoing, message: CancelAck, now_ns: int) -> bool:
        if transfer.state not in (TransferState.CANCELLING, TransferState.FENCED) or transfer.awaits_readers:
            return False
        self._release_when_read(transfer, now_ns)
        return True

    # -- moves --------------------------------------------------------------------------------------------------------

    def _offer(self, progress: PromptProgress, now_ns: int) -> None:
        request_id = progress.request.request_id
        peer = self._peers.pop(request_id, None)
        if peer is None:
            return
        row = self.engine.transfers.hold(request_id, now_ns)
        key = self._new_key(request_id)
        transfer = Outgoing(progress.request, peer, row, key, key.attempt)
        self.counts.started += 1
        self._transfers[transfer.key] = self._current[request_id] = transfer
        self._send_offer(transfer, now_ns)

    def _send_offer(self, transfer: Outgoing, now_ns: int) -> None:
        name = self.engine.algorithm.name
        lease_ns = self.timing.lease_ns
        offer = Offer(transfer.key, transfer.first_attempt, transfer.request, name, self.page_format, lease_ns)
        self._say(transfer.peer, offer)
        self._deadlines.set(transfer, now_ns + self.timing.lease_ns)

    def _send_pages(self, transfer: Outgoing, progress: PromptProgress, now_ns: int) -> None:
        """Send the pages that are final by now: the last one, usually not full, once the prompt is complete."""
        page_size = self.page_format.page_size
        ready = progress.num_computed // page_size
        if progress.is_complete:
            ready = self.page_format.num_pages(progress.num_computed)
        assert transfer.peer_epoch is not None, "pages follow an Accept"
        indices = transfer.begin_reading(ready)
        if indices:
            slots = self.engine.store.table.gather(transfer.row, indices[0] * page_size, ready * page_size)
            self._deadlines.set(transfer, now_ns + self.timing.lease_ns)
            self._readers[transfer.key] = transfer
            self._actions.append(
                SendPages(transfer.peer, transfer.key, transfer.peer_epoch, indices, slots.reshape(-1, page_size))
            )
        self._send_manifest(transfer, now_ns)

    def _send_manifest(self, transfer: Outgoing, now_ns: int) -> None:
        """Tell the decode side what must have arrived, once everything is computed and read out."""
        seals = transfer.seals_to_send(self.page_format.num_pages(transfer.request.prefill_len))
        if seals is None or not self._is_computed(transfer):
            return
        assert transfer.peer_epoch is not None, "a manifest follows an Accept"
        request_id = transfer.request_id
        arrival = replace(self.engine.transfers.first_token_of(request_id), draft=self._payloads[request_id])
        self._say(transfer.peer, Manifest(transfer.key, transfer.peer_epoch, transfer.first_page, seals, arrival))
        transfer.try_move(TransferEvent.SENT)
        self._renewals.clear(transfer)
        self._deadlines.set(transfer, now_ns + self.timing.lease_ns)

    def _retry(self, transfer: Outgoing, why: str, now_ns: int) -> None:
        """Offer the transfer again under a new key, or give up after the last attempt."""
        if transfer.attempts >= self.timing.max_attempts:
            self._fail_request(transfer, why, now_ns)
            self._give_up(transfer, TransferState.FAILED, transfer.message, now_ns)
            return
        del self._transfers[transfer.key]
        transfer.begin_attempt(self._new_key(transfer.request_id))
        self._transfers[transfer.key] = transfer
        self._renewals.clear(transfer)
        self.counts.retries += 1
        self._send_offer(transfer, now_ns)

    def _drop(self, request_id: str, end: TransferState, why: str, now_ns: int) -> None:
        """Give up the transfer of a request that has ended here; it ends when the other side has agreed."""
        self._peers.pop(request_id, None)
        transfer = self._current.get(request_id)
        if transfer is not None:
            self._give_up(transfer, end, why, now_ns)

    def _give_up(self, transfer: Outgoing, end: TransferState, why: str, now_ns: int) -> None:
        """Cancel a transfer. Its row is released when the decode side answers, or after lease and fence."""
        self._forget_request(transfer)
        transfer.end, transfer.message = end, why
        transfer.try_move(TransferEvent.GIVE_UP)
        self._renewals.clear(transfer)
        self._say(transfer.peer, Cancel(transfer.key, transfer.first_attempt, end is TransferState.FAILED, why))
        self._deadlines.set(transfer, now_ns + self.timing.lease_ns)

    def _fail_request(
        self, transfer: Outgoing, why: str, now_ns: int, reason: FinishReason = FinishReason.ERROR
    ) -> None:
        """End the request of a transfer now. The row stays held."""
        self._forget_request(transfer)
        transfer.end, transfer.message = TransferState.FAILED, why
        self._fail_engine_request(transfer.request_id, why, now_ns, reason)

    def _forget_request(self, transfer: Outgoing) -> None:
        """Drop the data kept for the request's first token, because the request's end is certain and its id may be used
        again."""
        request_id = transfer.request_id
        if self._current.get(request_id) is transfer:
            del self._current[request_id]
            self._payloads.pop(request_id, None)

    def _release_when_read(self, transfer: Outgoing, now_ns: int) -> None:
        """Release the row as soon as no page of it is being read, because the other side does not need it any more."""
        if transfer.num_reading:
            transfer.awaits_readers = True
            self._fence(transfer, now_ns)
        else:
            self._finish(transfer, transfer.end, now_ns)

    def _fence(self, transfer: Outgoing, now_ns: int) -> None:
        """Release the row when a fence has passed, because the other side will not answer any more."""
        # The table refuses the event where a fence is up already; its time starts again.
        transfer.try_move(TransferEvent.FENCE)
        self._renewals.clear(transfer)
        self._deadlines.set(transfer, now_ns + self.timing.fence_ns)

    def _finish(self, transfer: Outgoing, end: TransferState, now_ns: int) -> None:
        """End a transfer and release its row: no page of it is touched any more."""
        transfer.finish(end)
        self._forget_request(transfer)
        del self._transfers[transfer.key]
        for key in [key for key, reader in self._readers.items() if reader is transfer]:
            del self._readers[key]
        self._close(transfer, end, now_ns)

    def _is_computed(self, transfer: Outgoing) -> bool:
        return transfer.request_id in self._payloads and self._current.get(transfer.request_id) is transfer

    def _new_key(self, request_id: str) -> TransferKey:
        self._num_attempts += 1
        return TransferKey(request_id, self._num_attempts, self.generation)


_HANDLERS: dict[type[Message], Callable[[PrefillSide, Outgoing, Any, int], bool]] = {
    Accept: PrefillSide._accepted,
    Renew: PrefillSide._renewed,
    Reject: PrefillSide._rejected,
    Ack: PrefillSide._acknowledged,
    Nack: PrefillSide._not_acknowledged,
    Cancel: PrefillSide._cancelled,
    CancelAck: PrefillSide._cancel_answered,
}
