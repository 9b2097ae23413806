"""Planted defects of transports: those of the decode side, and of its requests' slots."""

from dataclasses import replace

from ....core.handoff import DecodeSide, TransferState
from ....core.handoff.ended import EndedTransfers
from ....core.handoff.messages import Ack, CancelAck
from ....core.handoff.side import Send
from ....core.scheduler.transfers import Transfers
from ...adapters.handoff import HandoffTransport
from ..planting import Defects

DECODING = Defects("transport", HandoffTransport)


@DECODING.breaks("HANDOFF-01", "HANDOFF-07")
class TrustsTheLink(DecodeSide):
    """Pages are taken as they come, seals are not looked at."""

    def _page(self, transfer, page, found):
        return super()._page(transfer, page, page.seal)

    def _complete(self, transfer, now_ns):
        if transfer.manifest is not None:
            found = transfer.received.values()
            transfer.manifest = replace(transfer.manifest, seals=tuple(found) or transfer.manifest.seals)
        super()._complete(transfer, now_ns)


@DECODING.breaks("HANDOFF-01")
class ComparesSizes(DecodeSide):
    """A page is good when it is as long as it was said to be."""

    def _page(self, transfer, page, found):
        same = (found.target_bytes, found.draft_bytes) == (page.seal.target_bytes, page.seal.draft_bytes)
        return super()._page(transfer, page, page.seal if same else found)


@DECODING.breaks("HANDOFF-01", "HANDOFF-07")
class IgnoresTheManifest(DecodeSide):
    """Each page is checked against its own seal, and never against what was to be sent: a misnumbered one is good."""

    def _complete(self, transfer, now_ns):
        if transfer.manifest is not None and len(transfer.received) == len(transfer.manifest.seals):
            seals = tuple(transfer.received[index] for index in sorted(transfer.received))
            transfer.manifest = replace(transfer.manifest, seals=seals)
        super()._complete(transfer, now_ns)


@DECODING.breaks("HANDOFF-01", "HANDOFF-05")
class AcknowledgesTheManifest(DecodeSide):
    """The manifest is acknowledged when it comes; pages that it has overtaken, or that are lost, are not waited for."""

    def _manifest(self, transfer, manifest, now_ns):
        understood = super()._manifest(transfer, manifest, now_ns)
        if understood:
            self._say(transfer.peer, Ack(transfer.key, self.epoch))
        return understood


@DECODING.breaks("HANDOFF-02")
class FreesTargetsAtOnce(DecodeSide):
    """Reserved pages are given back when their request is given up, and what is still under way is written into
    another's.
    """

    def _give_up(self, transfer, end, why, now_ns):
        super()._give_up(transfer, end, why, now_ns)
        if transfer.state is TransferState.CANCELLING:
            self._finish(transfer, end, now_ns)


@DECODING.breaks("HANDOFF-03")
class ReservesForEver(DecodeSide):
    """Reserved pages have no deadline: a lost message leaks them."""

    def tick(self, now_ns):
        pass


@DECODING.breaks("HANDOFF-02")
class FreesUnderAStepAtAJoin(Transfers):
    """When a request joins, all that waits for a step in flight is free, with the duplicates of its prompt."""

    def _cache_prompt(self, record):
        super()._cache_prompt(record)
        self.store.pass_fence(self.requests.last_step_id)


@DECODING.breaks("HANDOFF-09")
class CachesWhatIsReserved(DecodeSide):
    """The prompt is in the prefix cache as soon as it has pages; nothing has arrived in them."""

    def _reserve_waiting(self, now_ns):
        super()._reserve_waiting(now_ns)
        for transfer in self._transfers.values():
            if transfer.state is TransferState.RECEIVING and not transfer.message:
                transfer.message = "cached"
                tokens = transfer.offer.request.prompt.materialize()
                self.engine.store.share_prefix(transfer.row, tokens, len(tokens), "", self.engine.last_step_id)


@DECODING.breaks("ANSWER")
class RefusesAfterANack(DecodeSide):
    """What did not arrive intact once is not taken again."""

    def _offered_again(self, transfer, offer, now_ns):
        return False if transfer.is_refused else super()._offered_again(transfer, offer, now_ns)


@DECODING.breaks("HANDOFF-04", "ANSWER", "RAISES")
class JoinsAgain(DecodeSide):
    """A retry for a request that has joined, whose acknowledgement was lost, is a new request."""

    def _offered(self, peer, offer, now_ns):
        name = (peer, offer.key.request_id)
        trace = self._ended.get(name)
        if trace is not None and trace.joined and offer.key > trace.key:
            self._ended.forget(name)
        return super()._offered(peer, offer, now_ns)


@DECODING.breaks("HANDOFF-08")
class DecodesWhatIsCalledBack(DecodeSide):
    """A cancel comes too late for a request that has joined: it is decoded to its end, although its client knows that
    it failed.
    """

    def _abort_joined(self, name, now_ns):
        pass


@DECODING.breaks("HANDOFF-04")
class ForgetsCancels(DecodeSide):
    """A cancel that overtakes its offer is answered and forgotten; the offer is then taken up."""

    def _cancelled(self, peer, message, now_ns):
        name = (peer, message.key.request_id)
        known = self._ended.get(name)
        understood = super()._cancelled(peer, message, now_ns)
        if known is None:
            self._ended.forget(name)
        return understood


@DECODING.breaks("HANDOFF-03")
class AnswersWhatItKnows(DecodeSide):
    """A cancel for a transfer that is over has no answer; the prefill side keeps its pages until a lease and a fence
    have passed.
    """

    def _cancelled(self, peer, message, now_ns):
        known = (peer, message.key.request_id) in self._transfers
        understood = super()._cancelled(peer, message, now_ns)
        if not known:
            self._actions.remove(Send(peer, CancelAck(message.key)))
        return understood


@DECODING.breaks("HANDOFF-08")
class FailsWhatIsAborted(DecodeSide):
    """A request that the client of the decode side gives up ends as an error on the prefill side."""

    def _give_up(self, transfer, end, why, now_ns):
        return super()._give_up(transfer, TransferState.FAILED, why, now_ns)


@DECODING.breaks("HANDOFF-03")
class CancelsOneAttempt(DecodeSide):
    """A cancel ends the attempt that it names. If that one's offer was lost, the attempt before keeps its slots."""

    def _cancelled(self, peer, message, now_ns):
        transfer = self._transfers.get((peer, message.key.request_id))
        if transfer is not None and transfer.key.attempt < message.key.attempt:
            self._say(peer, CancelAck(message.key))
            return False
        return super()._cancelled(peer, message, now_ns)


@DECODING.breaks("ANSWER")
class RenewsNothing(DecodeSide):
    """A transfer that waits for room does not say so, and the prefill side gives it up."""

    def _renew_queued(self, transfer, now_ns):
        pass


@DECODING.breaks("HANDOFF-04", "HANDOFF-02")
class BelievesOldGenerations(DecodeSide):
    """Offers of every generation count, the old worker's too."""

    def _offered(self, peer, offer, now_ns):
        if offer.key.generation < self._generations.get(peer, 0):
            self._generations[peer] = offer.key.generation
        return super()._offered(peer, offer, now_ns)


@DECODING.breaks("HANDOFF-03", "HANDOFF-04")
class KeepsWhatTheDeadReserved(DecodeSide):
    """The transfers of a worker that was restarted are open until their holds end."""

    def _lose(self, transfer, why, now_ns):
        return None if "restarted" in why else super()._lose(transfer, why, now_ns)


@DECODING.breaks("HANDOFF-03")
class LosesTheLastOfTheDead(DecodeSide):
    """Of the transfers of a worker that was restarted only the last is given up at once."""

    def _lose(self, transfer, why, now_ns):
        last = next(reversed(self._transfers.values()))
        return None if "restarted" in why and transfer is not last else super()._lose(transfer, why, now_ns)


@DECODING.breaks("HANDOFF-03")
class LeavesNoReserve(Transfers):
    """A request gets all pages that are left, and those that are decoded find none for their next round."""

    def _fits(self, request):
        requests, room = self.requests, self.admission.room
        has_precedence = not len(requests.waiting) and requests.in_progress is None
        if not has_precedence or requests.steps_are_lost or requests.is_admission_paused or not self.admission.has_row:
            return False
        slots = room.to_find_for_transfer(request, self.admission.max_tokens(request))
        return slots <= self.store.available_slots


@DECODING.breaks("HANDOFF-04", "HANDOFF-08", "ANSWER", "RAISES")
class ForgetsWithTheDevice(DecodeSide):
    """With its device the decode worker forgets which requests have joined."""

    def worker_lost(self, epoch, now_ns):
        super().worker_lost(epoch, now_ns)
        self._ended = EndedTransfers(self.timing)


@DECODING.breaks("HANDOFF-04")
class TakesUpWhatHasEnded(DecodeSide):
    """An offer that comes again behind the end of its attempt begins a transfer."""

    def _offered(self, peer, offer, now_ns):
        name = (peer, offer.key.request_id)
        ended = self._ended.get(name)
        if ended is not None and ended.key == offer.key and not ended.joined:
            self._ended.forget(name)
        return super()._offered(peer, offer, now_ns)


@DECODING.breaks("HANDOFF-04")
class RemembersTheAttemptItHad(DecodeSide):
    """Of a cancel the attempt that was open is remembered, and not the later one that it ends, too."""

    def _cancelled(self, peer, message, now_ns):
        name = (peer, message.key.request_id)
        transfer = self._transfers.get(name)
        understood = super()._cancelled(peer, message, now_ns)
        if understood and transfer is not None:
            self._ended.add(name, transfer.key, False, now_ns)
        return understood


@DECODING.breaks("HANDOFF-03")
class AnswersNothingBehindAFence(DecodeSide):
    """The answer to a cancel is not understood once a fence is up, and the slots are kept until that has passed."""

    def _cancel_answered(self, transfer, now_ns):
        return transfer.state is not TransferState.FENCED and super()._cancel_answered(transfer, now_ns)
