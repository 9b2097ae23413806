"""Planted defects of transports: those of the prefill side, and of both workers."""

from dataclasses import replace

import numpy as np

from ....core.algorithm.arrival import DraftPayload
from ....core.contract.request import FinishReason
from ....core.handoff import DecodeSide, PrefillSide, TransferState
from ....core.handoff.life import TransferCounts
from ....core.handoff.messages import Nack, TransferKey
from ....core.handoff.transfer import Outgoing
from ....core.scheduler.output import OutputLog
from ....core.scheduler.transfers import Transfers
from ....properties.transport.contract import Ended
from ...adapters.handoff import CountingWorker, HandoffTransport
from ..planting import Defects

PREFILLING = Defects("transport", HandoffTransport)


@PREFILLING.breaks("HANDOFF-02", "HANDOFF-05")
class FreesWhenAllIsSent(PrefillSide):
    """The source's pages are given back when everything is sent, before its acknowledgement: a retry reads what others
    wrote.
    """

    def _send_manifest(self, transfer, now_ns):
        was = transfer.state
        super()._send_manifest(transfer, now_ns)
        if transfer.state is TransferState.SENT and was is not TransferState.SENT:
            self.engine.transfers.release_hold(transfer.row, now_ns)
            self.engine.transfers.end_transfer(transfer.request.request_id, now_ns)
            transfer.row = 0


@PREFILLING.breaks("HANDOFF-02")
class FreesWhatIsCancelled(PrefillSide):
    """A cancelled request gives its pages back at once, while some may still be sent."""

    def _give_up(self, transfer, end, why, now_ns):
        super()._give_up(transfer, end, why, now_ns)
        self._finish(transfer, end, now_ns)


@PREFILLING.breaks("HANDOFF-03", "ANSWER")
class WaitsForEver(PrefillSide):
    """There is a lease, and it is never read."""

    def tick(self, now_ns):
        pass


@PREFILLING.breaks("HANDOFF-04")
class BelievesAnyAttempt(PrefillSide):
    """Messages are matched by request alone: an acknowledgement or a refusal of the first attempt ends the second."""

    def receive(self, peer, message, now_ns):
        transfer = self._current.get(message.key.request_id)
        if transfer is not None and transfer.key.generation == message.key.generation:
            message = replace(message, key=transfer.key)
        super().receive(peer, message, now_ns)


@PREFILLING.breaks("HANDOFF-08", "HANDOFF-03")
class KeepsTheRequest(PrefillSide):
    """When the other worker is gone its transfers end, and their requests stay as they are."""

    def _fail_engine_request(self, request_id, why, now_ns, reason=FinishReason.ERROR):
        if "gone" not in why:
            super()._fail_engine_request(request_id, why, now_ns)


@PREFILLING.breaks("HANDOFF-05")
class CountsNoCancelled(TransferCounts):
    """Cancelled transfers are in no counter."""

    def end(self, state):
        return None if state is TransferState.CANCELLED else super().end(state)


@PREFILLING.breaks("HANDOFF-04", "HANDOFF-01", "HANDOFF-02", "ANSWER", "HANDOFF-03")
class OldGenerations(PrefillSide):
    """A worker that begins anew counts from the same generation: what was sent to the old one is taken for its own."""

    def __init__(self, engine, page_format, generation, timing=None):
        super().__init__(engine, page_format, 1, timing)


@PREFILLING.breaks("HANDOFF-02")
class ReleasesWhatIsRead(PrefillSide):
    """A row is released with the last answer, though the link still reads its pages."""

    def _release_when_read(self, transfer, now_ns):
        return self._finish(transfer, transfer.end, now_ns)


@PREFILLING.breaks("HANDOFF-02", "HANDOFF-07", "ANSWER", "HANDOFF-03")
class ForgetsReaders(PrefillSide):
    """A retry counts the pages that are read anew; those of the attempt before are read on, uncounted."""

    def _retry(self, transfer, why, now_ns):
        transfer.num_reading = 0
        super()._retry(transfer, why, now_ns)


@PREFILLING.breaks("HANDOFF-03")
class TriesOnceMore(PrefillSide):
    """There is one attempt more than allowed."""

    def _retry(self, transfer, why, now_ns):
        if transfer.attempts == self.timing.max_attempts:
            transfer.attempts -= 1
            super()._retry(transfer, why, now_ns)
            transfer.attempts += 1
        else:
            super()._retry(transfer, why, now_ns)


@PREFILLING.breaks("ANSWER", "HANDOFF-03")
class TriesOnce(PrefillSide):
    """The first attempt is the last."""

    def __init__(self, engine, page_format, generation, timing=None):
        super().__init__(engine, page_format, generation, replace(timing, max_attempts=1))


@PREFILLING.breaks("HANDOFF-02")
class FenceOneShort(PrefillSide):
    """A fence ends one nanosecond before its time."""

    def _fence(self, transfer, now_ns):
        return super()._fence(transfer, now_ns - 1)


@PREFILLING.breaks("HANDOFF-03")
class KeepsWhatIsAcknowledged(PrefillSide):
    """Pages wait for a fence after an acknowledgement, too."""

    def _release_when_read(self, transfer, now_ns):
        if transfer.end is TransferState.COMPLETED:
            self._fence(transfer, now_ns)
        else:
            super()._release_when_read(transfer, now_ns)


@PREFILLING.breaks("HANDOFF-02")
class EndsAFenceUnderReaders(PrefillSide):
    """A fence ends by its time, whether or not the link has still to read pages behind it."""

    def tick(self, now_ns):
        fenced = [each for each in self._transfers.values() if each.state is TransferState.FENCED]
        reading = {each: each.num_reading for each in fenced}
        for each in fenced:
            each.num_reading = 0
        super().tick(now_ns)
        for each, num_reading in reading.items():
            each.num_reading = num_reading


@PREFILLING.breaks("HANDOFF-03")
class WaitsForNoReader(PrefillSide):
    """What the other side needs no more is free a fence later, not when the link has read the last of its pages."""

    def _release_when_read(self, transfer, now_ns):
        super()._release_when_read(transfer, now_ns)
        transfer.awaits_readers = False


@PREFILLING.breaks("HANDOFF-03")
class CountsNoReading(PrefillSide):
    """A lease ends while the link still reads page after page."""

    def pages_sent(self, key, seals, now_ns):
        transfer = self._readers.get(key)
        if transfer is None or transfer.num_reading < len(seals):
            self.counts.ignored += len(seals)
            return
        transfer.num_reading -= len(seals)
        if transfer.state is TransferState.FENCED and transfer.awaits_readers and not transfer.num_reading:
            self._finish(transfer, transfer.end, now_ns)
        elif transfer.state is TransferState.SENDING and key == transfer.key:
            transfer.seals.update(seals)
            self._send_manifest(transfer, now_ns)


@PREFILLING.breaks("HANDOFF-08")
class HearsOfOneLoss(PrefillSide):
    """Of the requests of a decode worker that is gone one ends, and the others wait for their leases."""

    def peer_lost(self, peer, now_ns, reason=FinishReason.ERROR):
        for transfer in [t for t in self._transfers.values() if t.peer == peer]:
            if transfer.state is TransferState.FENCED:
                break
            if transfer.state is not TransferState.CANCELLING:
                self._fail_request(transfer, f"decode worker {peer!r} is gone", now_ns, reason)
            self._fence(transfer, now_ns)
        for request_id in [name for name, wanted in self._peers.items() if wanted == peer]:
            del self._peers[request_id]
            self._fail_engine_request(request_id, f"decode worker {peer!r} is gone", now_ns, reason)


@PREFILLING.breaks("HANDOFF-03")
class OffersTheLastToken(Transfers):
    """A request is offered that has no token left to decode."""

    def _progress_of(self, record):
        return super()._progress_of(record)._replace(is_to_transfer=True)


@PREFILLING.breaks("HANDOFF-03")
class ForgetsTheRetracted(PrefillSide):
    """A request whose prompt is computed again is not offered again."""

    def _give_up_retracted(self, rows, now_ns):
        had_transfers = set(self._current)
        super()._give_up_retracted(rows, now_ns)
        for request_id in had_transfers & self._peers.keys():
            del self._peers[request_id]


@PREFILLING.breaks("HANDOFF-07")
class SendsTheFirstDraft(PrefillSide):
    """The draft input is kept by request id: another request of that id starts from the first one's."""

    def committed(self, outcome, now_ns, payloads=None):
        first = self.__dict__.setdefault("first", {})
        super().committed(
            outcome, now_ns, {name: first.setdefault(name, value) for name, value in (payloads or {}).items()}
        )


@PREFILLING.breaks("HANDOFF-10")
class ChangesItsRole(Transfers):
    """A worker changes its role at any time."""

    def change_role(self, role, now_ns):
        return self.admission.take_role(role)


@PREFILLING.breaks("HANDOFF-06")
class ReadsAhead(HandoffTransport):
    """The last page is read, and the manifest sent, while the last chunk is still being computed."""

    def compute(self, now_ns):
        final, late = super().compute(now_ns), getattr(self, "late", [])
        kept = len(final) - 1 if final else 0
        self.late = final[kept:]
        return [*late, *final[:kept]]


@PREFILLING.breaks("HANDOFF-07")
class TargetPagesAlone(HandoffTransport):
    """The draft's KV stays where it was computed."""

    def _write_page(self, action):
        self.write(int(action.slots[0]) // self.config.page_size, (action.page.target, bytes(8)))


@PREFILLING.breaks("HANDOFF-07")
class DraftIdsIn32Bits(HandoffTransport):
    """Token ids are sent in 32 bits."""

    def _payload(self, name):
        payload = super()._payload(name)
        ids = payload.values["topk_ids"].astype(np.int32).astype(np.int64)
        return DraftPayload({**payload.values, "topk_ids": ids}, payload.hidden_states, payload.needs_hidden_states)


@PREFILLING.breaks("HANDOFF-05")
class CountsNothing(HandoffTransport):
    """The counters are constant, and add up."""

    def counters(self, side):
        return 3, 2, 1, 0, 0


@PREFILLING.breaks("HANDOFF-03")
class ServesTheLastFirst(DecodeSide):
    """Of the requests that wait for room at the decode side the one that came last is next."""

    def _reserve_waiting(self, now_ns):
        self._queue.reverse()
        super()._reserve_waiting(now_ns)
        self._queue.reverse()


@PREFILLING.breaks("HANDOFF-03")
class OvertakesTheLost(Transfers):
    """What comes gets slots before a request that the decode worker had, and has to compute again."""

    def _fits(self, request):
        requests, room = self.requests, self.admission.room
        has_precedence = requests.in_progress is None
        if not has_precedence or requests.steps_are_lost or requests.is_admission_paused or not self.admission.has_row:
            return False
        slots = room.to_find_for_transfer(request, self.admission.max_tokens(request))
        return slots + room.to_leave(len(requests.rounds.rows)) <= self.store.available_slots


@PREFILLING.breaks("HANDOFF-03")
class WaitsWhenRefused(PrefillSide):
    """A refusal of pages is taken note of when they are all sent, and not before."""

    def receive(self, peer, message, now_ns):
        transfer = self._transfers.get(message.key)
        if isinstance(message, Nack) and transfer is not None and transfer.state is TransferState.SENDING:
            self.counts.ignored += 1
        else:
            super().receive(peer, message, now_ns)


@PREFILLING.breaks("HANDOFF-08")
class FailsWithoutAReason(HandoffTransport):
    """A request that fails has no reason."""

    def ended(self, side):
        return [Ended(end.request, end.how, end.num_output, "") for end in super().ended(side)]


@PREFILLING.breaks("ANSWER", "HANDOFF-04", "HANDOFF-03")
class GenerationsIn32Bits(HandoffTransport):
    """Generations travel in 32 bits."""

    def deliver(self, side, message, now_ns):
        key = message.body.key
        narrow = TransferKey(key.request_id, key.attempt, key.generation & 0xFFFF_FFFF)
        super().deliver(side, message._replace(body=replace(message.body, key=narrow)), now_ns)


@PREFILLING.breaks("HANDOFF-05")
class DecodesOneMore(CountingWorker):
    """The token that came with the KV is not counted: an answer has one too many."""

    def run(self, step, first_tokens):
        joins = tuple(replace(join, num_emitted=0) if join.num_received else join for join in step.joins)
        return super().run(replace(step, joins=joins), first_tokens)


@PREFILLING.breaks("HANDOFF-07")
class DrawsWhatWasShown(OutputLog):
    """The token that a request goes on from is drawn again, instead of the one that its client was shown."""

    def first_token(self, record, result, i):
        self._tokens[record.row, record.prefill_len] = result.tokens[i]
        return super().first_token(record, result, i)


@PREFILLING.breaks("HANDOFF-05")
class ForgetsWhatWasShown(Transfers):
    """A request that goes on behind its lost worker has as many tokens left as at its begin."""

    def _join_of(self, record):
        return replace(super()._join_of(record), num_emitted=1)


@PREFILLING.breaks("HANDOFF-04")
class TakesWhatItsTableRefuses(Outgoing):
    """An event that the table does not have for a state is taken, too: a second accept has all pages sent again."""

    __slots__ = ()

    def try_move(self, event):
        super().try_move(event)
        return True
