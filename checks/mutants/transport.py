"""Planted defects of transports: each is the good one with one move done wrong, in a way that has been
done wrong before."""

from dataclasses import replace

import numpy as np

from ...core.handoff import DecodeSide, PageSeal, PrefillSide, TransferState
from ...core.handoff.ended import EndedTransfers
from ...core.handoff.life import TransferCounts
from ...core.handoff.messages import Ack, CancelAck, Nack, TransferKey
from ...core.handoff.side import Send
from ...core.scheduler.output import OutputLog
from ...core.scheduler.transfers import Transfers
from ..adapters.handoff import CountingWorker, HandoffTransport
from .planting import defects, lookup

PREFILL_SIDE = """
FreesWhenAllIsSent (HANDOFF-02, HANDOFF-05): The source's pages are given back when everything is sent, before its acknowledgement: a
retry reads what others wrote.
    PrefillSide._send_manifest:
        was = transfer.state
        good(self, transfer, now_ns)
        if transfer.state is TransferState.SENT and was is not TransferState.SENT:
            self.engine.transfers.release_hold(transfer.row, now_ns)
            self.engine.transfers.end_transfer(transfer.request.request_id, now_ns)
            transfer.row = 0

FreesWhatIsCancelled (HANDOFF-02): A cancelled request gives its pages back at once, while some may still be sent.
    PrefillSide._give_up:
        good(self, transfer, end, why, now_ns)
        self._finish(transfer, end, now_ns)

WaitsForEver (HANDOFF-03, ANSWER): There is a lease, and it is never read.
    PrefillSide.tick = None

BelievesAnyAttempt (HANDOFF-04): Messages are matched by request alone: an acknowledgement or a refusal of the first attempt ends the
second.
    PrefillSide.receive:
        transfer = self._current.get(message.key.request_id)
        if transfer is not None and transfer.key.generation == message.key.generation:
            message = replace(message, key=transfer.key)
        good(self, peer, message, now_ns)

KeepsTheRequest (HANDOFF-08, HANDOFF-03): When the other worker is gone its transfers end, and their requests stay as they are.
    PrefillSide._fail_engine_request:
        if "gone" not in why:
            good(self, request_id, why, now_ns)

CountsNoCancelled (HANDOFF-05): Cancelled transfers are in no counter.
    TransferCounts.end = None if state is TransferState.CANCELLED else good(self, state)

OldGenerations (HANDOFF-04, HANDOFF-01, HANDOFF-02, ANSWER, HANDOFF-03): A worker that begins anew counts from the same generation:
what was sent to the old one is taken for its own.
    PrefillSide.__init__ = good(self, engine, page_format, 1, timing)

ReleasesWhatIsRead (HANDOFF-02): A row is released with the last answer, though the link still reads its pages.
    PrefillSide._release_when_read = self._finish(transfer, transfer.end, now_ns)

ForgetsReaders (HANDOFF-02, HANDOFF-07, ANSWER, HANDOFF-03): A retry counts the pages that are read anew; those of the attempt
before are read on, uncounted.
    PrefillSide._retry:
        transfer.num_reading = 0
        good(self, transfer, why, now_ns)

TriesOnceMore (HANDOFF-03): There is one attempt more than allowed.
    PrefillSide._retry:
        if transfer.attempts == self.timing.max_attempts:
            transfer.attempts -= 1
            good(self, transfer, why, now_ns)
            transfer.attempts += 1
        else:
            good(self, transfer, why, now_ns)

TriesOnce (ANSWER, HANDOFF-03): The first attempt is the last.
    PrefillSide.__init__ = good(self, engine, page_format, generation, replace(timing, max_attempts=1))

FenceOneShort (HANDOFF-02): A fence ends one nanosecond before its time.
    PrefillSide._fence = good(self, transfer, now_ns - 1)

KeepsWhatIsAcknowledged (HANDOFF-03): Pages wait for a fence after an acknowledgement, too.
    PrefillSide._release_when_read:
        if transfer.end is TransferState.COMPLETED:
            self._fence(transfer, now_ns)
        else:
            good(self, transfer, now_ns)

CountsNoReading (HANDOFF-03): A lease ends while the link still reads page after page.
    PrefillSide.pages_sent
        - self._deadlines.set(transfer, now_ns + self.timing.lease_ns)  # it starts when the pages have left here
        + pass

HearsOfOneLoss (HANDOFF-08): Of the requests of a decode worker that is gone one ends, and the others wait for their leases.
    PrefillSide.peer_lost
        - if transfer.state is TransferState.FENCED:
        -     continue
        + if transfer.state is TransferState.FENCED:
        +     break

OffersTheLastToken (HANDOFF-03): A request is offered that has no token left to decode.
    Transfers._progress_of = good(self, record)._replace(is_to_transfer=True)

ForgetsTheRetracted (HANDOFF-03): A request whose prompt is computed again is not offered again.
    PrefillSide.committed
        - self._peers[request_id] = transfer.peer
        + pass

SendsTheFirstDraft (HANDOFF-07): The draft input is kept by request id: another request of that id starts from the first one's.
    PrefillSide.committed:
        first = self.__dict__.setdefault("first", {})
        good(self, outcome, now_ns, {name: first.setdefault(name, value) for name, value in (payloads or {}).items()})
"""

DECODE_SIDE = """
TrustsTheLink (HANDOFF-01, HANDOFF-07): Pages are taken as they come, seals are not looked at.
    DecodeSide._page = good(self, transfer, page, page.seal)
    DecodeSide._complete:
        if transfer.manifest is not None:
            found = transfer.received.values()
            transfer.manifest = replace(transfer.manifest, seals=tuple(found) or transfer.manifest.seals)
        good(self, transfer, now_ns)

ComparesSizes (HANDOFF-01): A page is good when it is as long as it was said to be.
    DecodeSide._page:
        same = (found.target_bytes, found.draft_bytes) == (page.seal.target_bytes, page.seal.draft_bytes)
        return good(self, transfer, page, page.seal if same else found)

IgnoresTheManifest (HANDOFF-01, HANDOFF-07): Each page is checked against its own seal, and never against what was to be sent: a
misnumbered one is good.
    DecodeSide._complete:
        if transfer.manifest is not None and len(transfer.received) == len(transfer.manifest.seals):
            seals = tuple(transfer.received[index] for index in sorted(transfer.received))
            transfer.manifest = replace(transfer.manifest, seals=seals)
        good(self, transfer, now_ns)

AcknowledgesTheManifest (HANDOFF-01, HANDOFF-05): The manifest is acknowledged when it comes; pages that it has overtaken, or that are
lost, are not waited for.
    DecodeSide._manifest:
        understood = good(self, transfer, manifest, now_ns)
        if understood:
            self._say(transfer.peer, Ack(transfer.key, self.epoch))
        return understood

FreesTargetsAtOnce (HANDOFF-02): Reserved pages are given back when their request is given up, and what is still under way is written into
another's.
    DecodeSide._give_up:
        good(self, transfer, end, why, now_ns)
        if transfer.state is TransferState.CANCELLING:
            self._finish(transfer, end, now_ns)

ReservesForEver (HANDOFF-03): Reserved pages have no deadline: a lost message leaks them.
    DecodeSide.tick:
        pass

FreesUnderAStepAtAJoin (HANDOFF-02): When a request joins, all that waits for a step in flight is free, with the duplicates of its prompt.
    Transfers._cache_prompt
        - self.store.pass_fence(self.requests.last_committed)
        + self.store.pass_fence(self.requests.last_step_id)

CachesWhatIsReserved (HANDOFF-09): The prompt is in the prefix cache as soon as it has pages; nothing has arrived in them.
    DecodeSide._reserve_waiting:
        good(self, now_ns)
        for transfer in self._transfers.values():
            if transfer.state is TransferState.RECEIVING and not transfer.message:
                transfer.message = "cached"
                tokens = transfer.offer.request.prompt.materialize()
                self.engine.store.share_prefix(transfer.row, tokens, len(tokens), "", self.engine.last_step_id)

RefusesAfterANack (ANSWER): What did not arrive intact once is not taken again.
    DecodeSide._offered_again = False if transfer.is_refused else good(self, transfer, offer, now_ns)

JoinsAgain (HANDOFF-04, ANSWER, RAISES): A retry for a request that has joined, whose acknowledgement was lost, is a new request.
    DecodeSide._offered:
        name = (peer, offer.key.request_id)
        trace = self._ended.get(name)
        if trace is not None and trace.joined and offer.key > trace.key:
            self._ended.forget(name)
        return good(self, peer, offer, now_ns)

DecodesWhatIsCalledBack (HANDOFF-08): A cancel comes too late for a request that has joined: it is decoded to its end, and its client was
told that it failed.
    DecodeSide._abort_joined = None

ForgetsCancels (HANDOFF-04): A cancel that overtakes its offer is answered and forgotten; the offer is then taken up.
    DecodeSide._cancelled:
        name = (peer, message.key.request_id)
        known = self._ended.get(name)
        understood = good(self, peer, message, now_ns)
        if known is None:
            self._ended.forget(name)
        return understood

AnswersWhatItKnows (HANDOFF-03): A cancel for a transfer that is over has no answer; the prefill side keeps its pages until a lease and a
fence have passed.
    DecodeSide._cancelled:
        known = (peer, message.key.request_id) in self._transfers
        understood = good(self, peer, message, now_ns)
        if not known:
            self._actions.remove(Send(peer, CancelAck(message.key)))
        return understood

FailsWhatIsAborted (HANDOFF-08): A request that the client of the decode side gives up ends as an error on the prefill side.
    DecodeSide._give_up = good(self, transfer, TransferState.FAILED, why, now_ns)

CancelsOneAttempt (HANDOFF-03): A cancel ends the attempt that it names. If that one's offer was lost, the attempt before keeps its slots.
    DecodeSide._cancelled:
        transfer = self._transfers.get((peer, message.key.request_id))
        if transfer is not None and transfer.key.attempt < message.key.attempt:
            self._say(peer, CancelAck(message.key))
            return False
        return good(self, peer, message, now_ns)

RenewsNothing (ANSWER): A transfer that waits for room does not say so, and the prefill side gives it up.
    DecodeSide._renew_queued = None

BelievesOldGenerations (HANDOFF-04, HANDOFF-02): Offers of every generation count, the old worker's too.
    DecodeSide._offered:
        if offer.key.generation < self._generations.get(peer, 0):
            self._generations[peer] = offer.key.generation
        return good(self, peer, offer, now_ns)

KeepsWhatTheDeadReserved (HANDOFF-03, HANDOFF-04): The transfers of a worker that was restarted are open until their holds end.
    DecodeSide._lose = None if "restarted" in why else good(self, transfer, why, now_ns)

LosesTheLastOfTheDead (HANDOFF-03): Of the transfers of a worker that was restarted only the last is given up at once.
    DecodeSide._lose:
        last = next(reversed(self._transfers.values()))
        return None if "restarted" in why and transfer is not last else good(self, transfer, why, now_ns)

LeavesNoReserve (HANDOFF-03): A request gets all pages that are left, and those that are decoded find none for their next round.
    Transfers._fits
        - room.to_leave(len(requests.rounds.rows))
        + 0

ForgetsWithTheDevice (HANDOFF-04, HANDOFF-08, ANSWER, RAISES): With its device the decode worker forgets which requests have joined.
    DecodeSide.worker_lost:
        good(self, epoch, now_ns)
        self._ended = EndedTransfers(self.timing)
"""

WORKERS = """
ChangesItsRole (HANDOFF-10): A worker changes its role at any time.
    Transfers.change_role = self.admission.take_role(role)

ReadsAhead (HANDOFF-06): The last page is read, and the manifest sent, while the last chunk is still being computed.
    HandoffTransport.compute:
        final, late = good(self, now_ns), getattr(self, "late", [])
        kept = len(final) - 1 if final else 0
        self.late = final[kept:]
        return [*late, *final[:kept]]

TargetPagesAlone (HANDOFF-07): The draft's KV stays where it was computed.
    HandoffTransport._write_page
        - action.page.draft
        + bytes(8)

DraftIdsIn32Bits (HANDOFF-07): Token ids are sent in 32 bits.
    HandoffTransport._payload:
        payload = good(self, name)
        ids = payload.values["topk_ids"].astype(np.int32).astype(np.int64)
        return DraftPayload({**payload.values, "topk_ids": ids}, payload.hidden_states, payload.needs_hidden_states)

CountsNothing (HANDOFF-05): The counters are constant, and add up.
    HandoffTransport.counters = 3, 2, 1, 0, 0

ServesTheLastFirst (HANDOFF-03): Of the requests that wait for room at the decode side the one that came last is next.
    DecodeSide._reserve_waiting:
        self._queue.reverse()
        good(self, now_ns)
        self._queue.reverse()

OvertakesTheLost (HANDOFF-03): What comes gets slots before a request that the decode worker had, and has to compute again.
    Transfers._fits
        - not len(requests.waiting) and requests.in_progress is None
        + requests.in_progress is None

WaitsWhenRefused (HANDOFF-03): A refusal of pages is taken note of when they are all sent, and not before.
    PrefillSide.receive:
        transfer = self._transfers.get(message.key)
        if isinstance(message, Nack) and transfer is not None and transfer.state is TransferState.SENDING:
            self.counts.ignored += 1
        else:
            good(self, peer, message, now_ns)

FailsWithoutAReason (HANDOFF-08): A request that fails has no reason.
    HandoffTransport.ended = [Ended(end.request, end.how, end.num_output, "") for end in good(self, side)]

GenerationsIn32Bits (ANSWER, HANDOFF-04, HANDOFF-03): Generations travel in 32 bits.
    HandoffTransport.deliver:
        key = message.body.key
        narrow = TransferKey(key.request_id, key.attempt, key.generation & 0xFFFF_FFFF)
        good(self, side, message._replace(body=replace(message.body, key=narrow)), now_ns)

DecodesOneMore (HANDOFF-05): The token that came with the KV is not counted: an answer has one too many.
    CountingWorker.run:
        joins = tuple(replace(join, num_emitted=0) if join.num_received else join for join in step.joins)
        return good(self, replace(step, joins=joins), first_tokens)

DrawsWhatWasShown (HANDOFF-07): The token that a request goes on from is drawn again, instead of the one that its client was shown.
    OutputLog.first_token:
        self._tokens[record.row, record.prefill_len] = result.tokens[i]
        return good(self, record, result, i)

ForgetsWhatWasShown (HANDOFF-05): A request that goes on behind its lost worker has as many tokens left as at its begin.
    Transfers._join_of = replace(good(self, record), num_emitted=1)
"""

_PLACES = [
    *(PrefillSide, DecodeSide, TransferCounts, Transfers, OutputLog, HandoffTransport, CountingWorker),
    *(replace, EndedTransfers, PageSeal, TransferState, Ack, CancelAck, Nack, Send, TransferKey),
]
MUTANTS = (
    *defects("transport", HandoffTransport, _PLACES, PREFILL_SIDE),
    *defects("transport", HandoffTransport, _PLACES, DECODE_SIDE),
    *defects("transport", HandoffTransport, _PLACES, WORKERS, np=np),
)
__getattr__ = lookup(MUTANTS)
