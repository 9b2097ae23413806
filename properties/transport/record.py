"""What the messages say: each one that is sent or arrives is noted in the model and in the ledger before
it has an effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from . import contract
from .contract import DECODE, PREFILL, Message, TransportConfig
from .ledger import TransportLedger
from .model import AttemptSeen, Hold, TransferRun, TransportModel

ENDING: dict[str, tuple[str, ...]] = {  # side -> the messages after which its pages may go
    PREFILL: (contract.ACK, contract.REJECT, contract.CANCEL, contract.CANCEL_ACK),
    DECODE: (contract.CANCEL, contract.CANCEL_ACK),
}


MISNUMBERED = 3  # one of the ways in which `damaged` changes a page


class CarriedMessage(NamedTuple):
    """A message under way. Copies of one message have one number."""

    number: int
    message: Message
    is_damaged: bool = False


class PlannedFault:
    """Is done once: the message number `nth` is lost (1) or doubled (2), or the page number `nth` is
    damaged (3 and more)."""

    def __init__(self, kind: int, nth: int) -> None:
        self._kind = kind
        self._left = nth

    def affect(
        self, parcel: CarriedMessage, damaged: Callable[[CarriedMessage, int], CarriedMessage | None]
    ) -> tuple[CarriedMessage, ...]:
        """Return what arrives instead of a parcel."""
        if self._left < 0 or (self._kind >= 3 and parcel.message.kind != contract.PAGE):
            return (parcel,)
        self._left -= 1
        if self._left >= 0:
            return (parcel,)
        if self._kind < 3:
            return (parcel, parcel) if self._kind == 2 else ()
        changed = damaged(parcel, self._kind - 3)
        if changed is None:
            return (parcel,)
        # A misnumbered page is a copy: the page itself arrives, too.
        return (changed, parcel) if self._kind - 3 == MISNUMBERED else (changed,)


def covers(cancel: Message, attempt: tuple[int, int]) -> bool:
    """Return whether a cancel is about this (generation, attempt)."""
    return cancel.generation == attempt[0] and cancel.number <= attempt[1] <= cancel.attempt


class TransportRecord:
    """Feeds `model` and `ledger`. `pages` returns the pages of a request on a side."""

    def __init__(self, config: TransportConfig, pages: Callable[[str, int], tuple[int, ...]]) -> None:
        self.config = config
        self.model = TransportModel(config)
        self.ledger = TransportLedger(config)
        # request -> (generation, attempt, when) that ended at the decode side
        self.ended: dict[int, tuple[int, int, int]] = {}
        self.generation = 0  # the newest that the decode worker knows
        # (request, generation) that waits there for room, in its turn -> its attempt
        self._queued: dict[tuple[int, int], int] = {}
        self.is_client = False  # what is sent now follows from what a client does
        self.acknowledged: str = ""  # an ack for what has not arrived
        self.now_ns: int = 0
        self._pages = pages
        self._num_events = 0
        self._timed_out = False
        self.has_reserved = False  # the last message gave a request pages at the decode side

    def note(self, run: TransferRun, event: str) -> None:
        """Number the events of a run when they are first seen."""
        self._num_events += 1
        run.times.setdefault(event, self._num_events)

    def lose_peer(self, side: str, now_ns: int, generation: int | None = None) -> None:
        """Note that a side has learned of the other worker's end, or of a worker with a newer `generation`."""
        self.model.lose_peer(side, now_ns, generation)
        self.ledger.lose_peer(side, generation)
        if side == DECODE:
            queued = self._queued.items() if generation is not None else ()
            self._queued = {name: attempt for name, attempt in queued if name[1] >= generation}

    def forget(self, side: str) -> None:
        """Note that a worker is gone, and its requests and pages with it."""
        self.model.forget(side)
        if side == DECODE:
            self.ended.clear()
            self._queued.clear()
            self.generation = 0
        self.ledger.forget(side)

    def is_over(self, offer: Message, now_ns: int) -> bool:
        """Return whether the decode worker must know that an offer is too late."""
        generation, attempt, ended_ns = self.ended.get(offer.request, (0, 0, 0))
        is_late = (
            offer.generation == generation and offer.attempt <= attempt and now_ns < ended_ns + self.config.memory_ns
        )
        return is_late or offer.generation < self.generation

    def is_remembered(self, run: TransferRun, now_ns: int) -> bool:
        """Return whether the decode worker must still know that it has had this run."""
        return run.acked_ns is not None and now_ns < run.acked_ns + self.config.memory_ns

    def expects(self, message: Message) -> bool:
        """Return whether a refusal of the newest attempt is for pages that the prefill side sends, or has sent."""
        name = (message.request, message.generation, message.attempt)
        entry, seen = self.ledger.outgoing_of(*name), self.model.attempts.get(name)
        if entry is None or seen is None or DECODE in seen.ends or self.ledger.num_accepts.get(name) != 1:
            return False
        is_over = entry.is_cancelled or entry.is_lost or entry.is_answered or bool(entry.end)
        return not is_over and (not entry.is_waiting or entry.manifest == entry.newest)

    def has_earlier_attempt(self, side: str, seen: AttemptSeen, message: Message) -> bool:
        """Return whether an earlier attempt that the cancel is about is open here.

        A worker that begins anew may accept a late offer of one attempt while the next one was accepted by the worker
        before it.
        """
        return any(
            earlier.run is seen.run and covers(message, key[1:]) and earlier.was_accepted and side not in earlier.ends
            for key, earlier in self.model.attempts.items()
        )

    def sent(self, side: str, message: Message, now_ns: int, timed_out: bool) -> None:
        """Note a message that a side sends; `timed_out`: because time has passed."""
        self.now_ns, self._timed_out, self.has_reserved = now_ns, timed_out, False
        model, ledger, request = self.model, self.ledger, message.request
        attempt = (request, message.generation, message.attempt)
        run = model.runs.get(request)
        if side == PREFILL and message.kind == contract.OFFER and run is not None:
            model.attempts.setdefault(attempt, AttemptSeen(run))
            ledger.offered(run, *attempt[1:], message.number, self.now_ns, self._timed_out)
            run.newest[PREFILL] = attempt[1:]
            hold = model.holds[PREFILL].get(request)
            if hold is None or hold.run is not run or hold.cancelled_ns is not None:
                model.holds[PREFILL][request] = Hold(run, run.pages, self.now_ns, message.generation)
            hold = model.holds[PREFILL][request]
            hold.since_ns = self.now_ns
            self.note(run, "its offer")
            if run.num_output == 1:
                ledger.problem = f"request {request} is offered, and has no token left to decode"
        seen = model.attempts.get(attempt)
        if seen is None:
            return
        if side == PREFILL:
            self._note_sent_by_prefill(seen, message)
        else:
            self._note_sent_by_decode(seen, message)
        if message.kind == contract.CANCEL:
            hold = model.holds[side].get(request)
            if hold is not None and hold.run is seen.run and hold.cancelled_ns is None:
                hold.cancelled_ns = self.now_ns

    def computed(self, run: TransferRun, index: int, now_ns: int) -> None:
        """Note that a page of a prompt has become final; where it is to be sent, the link has it to read."""
        attempt = (run.request, *run.newest.get(PREFILL, (0, 0)))
        entry, seen = self.ledger.outgoing_of(*attempt), self.model.attempts.get(attempt)
        if entry is not None and seen.run is run and index >= seen.first_page:
            self.ledger.advances(entry, now_ns)

    def _note_sent_by_prefill(self, seen: AttemptSeen, message: Message) -> None:
        entry = self.ledger.outgoing_of(message.request, message.generation, message.attempt)
        if message.kind == contract.MANIFEST:
            self.note(seen.run, "its manifest")
            if entry is not None:
                self.ledger.sent_manifest(entry, self.now_ns)
                self.model.holds[PREFILL][message.request].since_ns = self.now_ns
        elif message.kind == contract.PAGE and entry is not None:
            self.ledger.advances(entry, self.now_ns)
        elif message.kind == contract.CANCEL and entry is not None:
            self.ledger.gave_up(entry, self.now_ns, self._timed_out)

    def _note_sent_by_decode(self, seen: AttemptSeen, message: Message) -> None:
        model, ledger, run, request = self.model, self.ledger, seen.run, message.request
        attempt = (message.generation, message.attempt)
        entry = ledger.incoming_of(request, *attempt)
        if message.kind == contract.RENEW and entry is None:
            self._queued[request, message.generation] = message.attempt
        elif message.kind in (contract.REJECT, contract.CANCEL):
            self._queued.pop((request, message.generation), None)
        if message.kind == contract.ACCEPT:
            hold = model.holds[DECODE].get(request)
            if entry is None and (hold is None or hold.run is not run):
                self._check_turn(run, message.generation)
                self.has_reserved = True
            self._queued.pop((request, message.generation), None)
            ledger.accepted(run, *attempt, self.now_ns)
            seen.first_page = message.number
            seen.was_accepted, run.called_back = True, False
            seen.ends.pop(DECODE, None)
            run.newest[DECODE] = attempt
            hold = model.holds[DECODE].get(request)
            if hold is None or hold.run is not run or hold.may_go:
                pages = dict(enumerate(self._pages(DECODE, request)))
                hold = model.holds[DECODE][request] = Hold(run, pages, self.now_ns, message.generation)
            hold.since_ns = self.now_ns
            self.note(run, "its reservation")
        elif message.kind == contract.NACK and entry is not None:
            entry.is_refused = True
        elif message.kind == contract.RENEW and self._timed_out and entry is not None and not entry.is_cancelled:
            ledger.problem = f"the decode side still says that request {request} waits for room, which it has"
        elif message.kind == contract.CANCEL and entry is not None:
            ledger.withdrew(entry, self.now_ns, self._timed_out)
            seen.is_withdrawn = self.is_client
            self._end_at_decode(message)
        elif message.kind == contract.ACK:
            if not any(a.is_whole for a in model.attempts.values() if a.run is run):
                self.acknowledged = f"request {request} is acknowledged, and {self.missing(run)}"
            self.note(run, "its acknowledgement")
            self._end_at_decode(message)
            run.newest[DECODE] = max(attempt, run.newest.get(DECODE, attempt))
            ledger.acknowledged(run, *attempt)
            model.holds[DECODE].pop(request, None)
            if run.acked_ns is None:
                run.acked_ns = self.now_ns
            if not run.has_joined:
                run.has_joined = run.is_decoding = True
                model.decoding[request] = run
            run.target_pages = self._pages(DECODE, request) or run.target_pages

    def _check_turn(self, run: TransferRun, generation: int) -> None:
        """Check that no request waits for room at the decode side that came before one that gets it."""
        for other in self.model.decoding.values():
            if other is not run and other.goes_on and other.num_joined and not self._pages(DECODE, other.request):
                self.ledger.problem = f"request {run.request} gets slots, and {other.request}, which was decoded, waits"
        for request, newest in self._queued:
            if (request, newest) == (run.request, generation):
                return
            self.ledger.problem = (
                f"request {run.request} gets slots before request {request}, which was offered earlier"
            )
            return

    def missing(self, run: TransferRun) -> str:
        attempts = [attempt for attempt in self.model.attempts.values() if attempt.run is run]
        if not any(attempt.manifest for attempt in attempts):
            return "no manifest of it has arrived"
        best = max(attempts, key=lambda attempt: (attempt.manifest, len(attempt.intact)))
        gone = [index for index in range(best.first_page, run.num_pages) if index not in best.intact]
        return f"pages {gone} have not arrived intact"

    def arrives(self, side: str, parcel: CarriedMessage, now_ns: int, has_transfers: bool) -> None:
        """Note a message that is about to reach a side; `has_transfers`: some are open there."""
        self.now_ns = now_ns
        model, message = self.model, parcel.message
        request = message.request
        attempt = (request, message.generation, message.attempt)
        seen = model.attempts.get(attempt)
        if seen is None:
            return
        if (
            side == DECODE
            and message.kind == contract.CANCEL
            and (not has_transfers or self._ends_or_precedes(message))
        ):
            self._end_at_decode(message)
        newest = seen.run.newest.get(side, attempt[1:])
        if side == DECODE:
            self._note_arrival_at_decode(seen, parcel)
        else:
            self._note_arrival_at_prefill(seen, message)
        hold = model.holds[side].get(request)
        is_of_newest = covers(message, newest) if message.kind == contract.CANCEL else attempt[1:] >= newest
        if hold is not None and hold.run is seen.run and message.kind in ENDING[side] and is_of_newest:
            hold.may_go = True
            hold.is_called_back = side == DECODE and message.kind == contract.CANCEL

    def _ends_or_precedes(self, cancel: Message) -> bool:
        """Return whether the decode worker, as it lives now, has of the request of a cancel nothing else than what the
        cancel ends."""
        queued = [(name[1], attempt) for name, attempt in self._queued.items() if name[0] == cancel.request]
        entries = [entry for name, entry in self.ledger.incoming.items() if name[0] == cancel.request]
        return all(entry.is_answered for entry in entries) and all(covers(cancel, attempt) for attempt in queued)

    def _end_at_decode(self, message: Message) -> None:
        """Note that the decode side has ended a transfer up to this attempt, or was asked to."""
        known = self.ended.get(message.request, (0, 0, 0))
        if (message.generation, message.attempt) > known[:2]:
            self.ended[message.request] = (message.generation, message.attempt, self.now_ns)

    def _note_arrival_at_prefill(self, seen: AttemptSeen, message: Message) -> None:
        if message.kind == contract.ACCEPT:
            self.note(seen.run, "the reservation's arrival")
        entry = self.ledger.outgoing_of(message.request, message.generation, message.attempt)
        if entry is None:
            return
        entry.heard_ns = self.now_ns
        if entry.is_lost:
            return
        if message.kind == contract.CANCEL and seen.is_withdrawn and not entry.is_cancelled:
            seen.run.must_abort = True
        is_offered = entry.is_waiting and entry.manifest != entry.newest and not entry.is_cancelled
        if is_offered and message.kind in (contract.ACCEPT, contract.RENEW):
            entry.renewed_ns = self.now_ns
            entry.is_waiting = message.kind == contract.RENEW
            entry.is_sending = not entry.is_waiting and seen.run.is_computed
        elif is_offered and message.kind == contract.REJECT:
            entry.is_answered = True
        elif message.kind == contract.ACK and not entry.is_cancelled:
            entry.is_answered = entry.is_answered or entry.manifest == entry.newest
        elif (message.kind == contract.CANCEL and not entry.is_fenced) or (
            message.kind == contract.CANCEL_ACK and entry.is_cancelled
        ):
            entry.is_answered = True

    def _note_arrival_at_decode(self, seen: AttemptSeen, parcel: CarriedMessage) -> None:
        message, run = parcel.message, seen.run
        attempt = (message.request, message.generation, message.attempt)
        entry = self.ledger.incoming_of(*attempt)
        if message.kind == contract.OFFER:
            self.ledger.num_offers += 1
            run.withdrawn = False
            self.generation = max(self.generation, message.generation)
            self.lose_peer(DECODE, self.now_ns, message.generation)
        elif message.kind == contract.PAGE and not parcel.is_damaged:
            if entry is not None:
                is_new = message.number not in seen.intact and message.number >= seen.first_page
                self.ledger.arrived(entry, message.attempt, is_new and not entry.is_refused, self.now_ns)
            seen.intact[message.number] = None
        elif message.kind == contract.MANIFEST:
            if entry is not None:
                self.ledger.arrived(entry, message.attempt, not seen.manifest and not entry.is_refused, self.now_ns)
            seen.manifest = True
            self.note(run, "the manifest's arrival")
        elif message.kind == contract.CANCEL:
            self._queued.pop((message.request, message.generation), None)
            self._note_cancel_at_decode(seen, message)
        elif entry is not None:
            self.ledger.arrived(entry, message.attempt, False, self.now_ns)

    def _note_cancel_at_decode(self, seen: AttemptSeen, message: Message) -> None:
        run = seen.run
        newest = run.newest.get(DECODE)
        if newest is not None and covers(message, newest):
            run.called_back = run.acked_ns is None or self.is_remembered(run, self.now_ns)
            entry = self.ledger.incoming_of(message.request, *newest)
            if entry is not None:
                entry.is_answered = True
                self._end_at_decode(message)
