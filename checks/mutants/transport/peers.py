"""Planted defects of transports that need a peer's second life, a lost answer, a slow link, or a clock that is read too early."""

from __future__ import annotations

from dataclasses import replace

from ....core.handoff import DecodeSide, HandoffTiming, PrefillSide, TransferState
from ....core.handoff.actions import Send
from ....core.handoff.messages import CancelAck, TransferKey
from ...transport.contract import Ended
from ...transport.handoff_subject import CountingWorker, HandoffTransport

# -- the prefill side -------------------------------------------------------------------------------------------------


class ReleasesWhatIsRead(PrefillSide):
    """A row is released with the last answer, though the link still reads its pages."""

    def _release_when_read(self, transfer, now_ns):
        self._finish(transfer, transfer.end, now_ns)


class ForgetsReaders(PrefillSide):
    """A retry counts the pages that are read anew; those of the attempt before are read on, uncounted."""

    def _retry(self, transfer, why, now_ns):
        transfer.num_reading = 0
        super()._retry(transfer, why, now_ns)


class TriesOnceMore(PrefillSide):
    """There is one attempt more than allowed."""

    def _retry(self, transfer, why, now_ns):
        if transfer.attempts == self.timing.max_attempts:
            transfer.attempts -= 1
            super()._retry(transfer, why, now_ns)
            transfer.attempts += 1
        else:
            super()._retry(transfer, why, now_ns)


class TriesOnce(PrefillSide):
    """The first attempt is the last."""

    def __init__(self, engine, page_format, generation, timing):
        super().__init__(engine, page_format, generation, replace(timing, max_attempts=1))


class WaitsAHold(PrefillSide):
    """The prefill side waits for an answer as long as the decode side holds pages."""

    def __init__(self, engine, page_format, generation, timing):
        times = HandoffTiming(timing.hold_ns, timing.hold_ns + 1, timing.fence_ns, timing.max_attempts)
        super().__init__(engine, page_format, generation, times)


class FenceOneShort(PrefillSide):
    """A fence ends one nanosecond before its time."""

    def _fence(self, transfer, now_ns):
        super()._fence(transfer, now_ns - 1)


class CountsFailedAsCancelled(PrefillSide):
    """Every end but a completion is counted as a cancelled transfer."""

    def _finish(self, transfer, end, now_ns):
        transfer.state = TransferState.FENCED
        super()._finish(transfer, TransferState.CANCELLED if end is TransferState.FAILED else end, now_ns)


class KeepsWhatIsAcknowledged(PrefillSide):
    """Pages wait for a fence after an acknowledgement, too."""

    def _release_when_read(self, transfer, now_ns):
        if transfer.end is TransferState.COMPLETED:
            self._fence(transfer, now_ns)
        else:
            super()._release_when_read(transfer, now_ns)


class SendsTheFirstDraft(PrefillSide):
    """The draft input is kept by request id: another request of that id starts from the first one's."""

    def committed(self, outcome, now_ns, payloads=None):
        first = self.__dict__.setdefault("_first", {})
        super().committed(outcome, now_ns, {name: first.setdefault(name, value) for name, value in payloads.items()})


# -- the decode side --------------------------------------------------------------------------------------------------


class RefusesAfterANack(DecodeSide):
    """What did not arrive intact once is not taken again."""

    def _offered_again(self, transfer, offer, now_ns):
        return False if transfer.is_refused else super()._offered_again(transfer, offer, now_ns)


class JoinsAgain(DecodeSide):
    """A retry for a request that has joined, whose acknowledgement was lost, is a new request."""

    def _offered(self, peer, offer, now_ns):
        name = (peer, offer.key.request_id)
        trace = self._traces.get(name)
        if trace is not None and trace.joined and offer.key > trace.key:
            del self._traces[name]
        return super()._offered(peer, offer, now_ns)


class DecodesWhatIsCalledBack(DecodeSide):
    """A cancel comes too late for a request that has joined: it is decoded to its end, and its client was told that it failed."""

    def _abort_joined(self, name, now_ns):
        pass


class ForgetsCancels(DecodeSide):
    """A cancel that overtakes its offer is answered and forgotten; the offer is then taken up."""

    def _cancelled(self, peer, message, now_ns):
        name = (peer, message.key.request_id)
        known = self._traces.get(name)
        understood = super()._cancelled(peer, message, now_ns)
        if known is None:
            self._traces.pop(name, None)
            self._trace_ends.clear(name)
        return understood


class AnswersWhatItKnows(DecodeSide):
    """A cancel for a transfer that is over has no answer; the prefill side keeps its pages until a lease and a fence have passed."""

    def _cancelled(self, peer, message, now_ns):
        known = (peer, message.key.request_id) in self._transfers
        understood = super()._cancelled(peer, message, now_ns)
        if not known:
            self._actions.remove(Send(peer, CancelAck(message.key)))
        return understood


class FailsWhatIsAborted(DecodeSide):
    """A request that the client of the decode side gives up ends as an error on the prefill side."""

    def _give_up(self, transfer, end, why, now_ns):
        super()._give_up(transfer, TransferState.FAILED, why, now_ns)


class CancelsOneAttempt(DecodeSide):
    """A cancel ends the attempt that it names. If that one's offer was lost, the attempt before keeps its slots."""

    def _cancelled(self, peer, message, now_ns):
        transfer = self._transfers.get((peer, message.key.request_id))
        if transfer is not None and transfer.key.attempt < message.key.attempt:
            self._say(peer, CancelAck(message.key))
            return False
        return super()._cancelled(peer, message, now_ns)


class RenewsNothing(DecodeSide):
    """A transfer that waits for room does not say so, and the prefill side gives it up."""

    def _renew_queued(self, transfer, now_ns):
        pass


class BelievesOldGenerations(DecodeSide):
    """Offers of every generation count, the old worker's too."""

    def _offered(self, peer, offer, now_ns):
        if offer.key.generation < self._generations.get(peer, 0):
            self._generations[peer] = offer.key.generation
        return super()._offered(peer, offer, now_ns)


class KeepsWhatTheDeadReserved(DecodeSide):
    """The transfers of a worker that was restarted are open until their holds end."""

    def _lose(self, transfer, why, now_ns):
        if "restarted" not in why:
            super()._lose(transfer, why, now_ns)


class ForgetsWithTheDevice(DecodeSide):
    """With its device the decode worker forgets which requests have joined."""

    def worker_lost(self, epoch, now_ns):
        super().worker_lost(epoch, now_ns)
        self._traces.clear()
        self._joined_by.clear()


# -- the workers ------------------------------------------------------------------------------------------------------


class CountsNothing(HandoffTransport):
    """The counters are constant, and add up."""

    def counters(self, side):
        return 3, 2, 1, 0, 0


class FailsWithoutAReason(HandoffTransport):
    """A request that fails has no reason."""

    def ended(self, side):
        return [Ended(end.request, end.how, end.num_output, "") for end in super().ended(side)]


class GenerationsIn32Bits(HandoffTransport):
    """Generations travel in 32 bits."""

    def deliver(self, side, message, now_ns):
        key = message.body.key
        narrow = TransferKey(key.request_id, key.attempt, key.generation & 0xFFFF_FFFF)
        super().deliver(side, message._replace(body=replace(message.body, key=narrow)), now_ns)


class CountsTheFirstTokenTwice(CountingWorker):
    def run(self, step, first_tokens):
        joins = tuple(replace(join, num_emitted=0) if join.num_received else join for join in step.joins)
        return super().run(replace(step, joins=joins), first_tokens)


class DecodesOneMore(HandoffTransport):
    """The token that came with the KV is not counted: an answer has one too many."""

    def _make_decode(self):
        worker = super()._make_decode()
        return CountsTheFirstTokenTwice(worker.engine, worker.side)


PREFILL_SIDES = (
    (ReleasesWhatIsRead, ("HANDOFF-02",)),
    (ForgetsReaders, ("HANDOFF-02", "HANDOFF-07", "ANSWER")),
    (TriesOnceMore, ("HANDOFF-03",)),
    (TriesOnce, ("ANSWER", "HANDOFF-03")),
    (WaitsAHold, ("HANDOFF-03",)),
    (FenceOneShort, ("HANDOFF-02",)),
    (CountsFailedAsCancelled, ("HANDOFF-05",)),
    (KeepsWhatIsAcknowledged, ("HANDOFF-03",)),
    (SendsTheFirstDraft, ("HANDOFF-07",)),
)
DECODE_SIDES = (
    (RefusesAfterANack, ("ANSWER",)),
    (JoinsAgain, ("HANDOFF-04", "ANSWER", "RAISES")),
    (DecodesWhatIsCalledBack, ("HANDOFF-08",)),
    (ForgetsCancels, ("HANDOFF-04",)),
    (AnswersWhatItKnows, ("HANDOFF-03",)),
    (FailsWhatIsAborted, ("HANDOFF-08",)),
    (CancelsOneAttempt, ("HANDOFF-03",)),
    (RenewsNothing, ("ANSWER",)),
    (BelievesOldGenerations, ("HANDOFF-04", "HANDOFF-02")),
    (KeepsWhatTheDeadReserved, ("HANDOFF-03", "HANDOFF-04")),
    (ForgetsWithTheDevice, ("HANDOFF-04", "HANDOFF-08", "ANSWER", "RAISES")),
)
TRANSPORTS = (
    (CountsNothing, ("HANDOFF-05",)),
    (FailsWithoutAReason, ("HANDOFF-08",)),
    (GenerationsIn32Bits, ("ANSWER", "HANDOFF-04", "HANDOFF-03")),
    (DecodesOneMore, ("HANDOFF-05",)),
)
