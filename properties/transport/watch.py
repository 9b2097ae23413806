"""What the transport's trial observes: the messages, the requests that joined or ended, and what is wrong with them.
`pools.py` has the pages."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..harness.operation import Operation
from ..harness.trial import Trial
from . import contract
from .contract import (
    DECODE,
    PREFILL,
    SIDES,
    Counters,
    Ended,
    Message,
    TransferWish,
    TransportCapabilities,
    TransportConfig,
    TransportPair,
)
from .model import AttemptSeen, Joined, TransferRun, TransportMoment, draft_of, first_token_of, tokens_of
from .pools import TransportPools
from .record import CarriedMessage, PlannedFault, TransportRecord

MAX_UNDER_WAY = 60
MAX_PAST = 8
OTHER_SIDE = {PREFILL: DECODE, DECODE: PREFILL}
TRANSFERRING = (contract.OFFER, contract.ACCEPT, contract.PAGE, contract.MANIFEST)
BEFORE_DECODING = (
    ("its start", "its prompt's end", "its manifest", "the manifest's arrival", "its acknowledgement", "its decoding"),
    ("its start", "its offer", "its reservation", "the reservation's arrival", "its manifest"),
)
"""Events in the order in which each request must see them for the first time."""


class TransportWatch(Trial):
    """Hold the subject, its model and the link. `TransportTrial` adds the operations."""

    subject: TransportPair
    config: TransportConfig
    capabilities: TransportCapabilities
    moment: TransportMoment

    def prepare(self) -> None:
        self.pools = TransportPools(self)
        self.record = TransportRecord(self.config, self.pools.of)
        self.model, self.ledger = self.record.model, self.record.ledger
        self.now_ns = 1
        self.under_way: dict[str, list[CarriedMessage]] = {
            PREFILL: [],
            DECODE: [],
        }  # side where they will arrive -> parcels
        self.past: dict[str, deque[CarriedMessage]] = {side: deque(maxlen=MAX_PAST) for side in SIDES}
        self._num_parcels = 0
        self._num_runs = 0
        self._is_ticking = self._is_slow = False
        self._arrived: dict[tuple[str, int], int] = {}  # (side, parcel) that has arrived and had an effect -> when
        self.must(self.subject.connect, self.pools.read, self.pools.write)
        self.begin(self.operation)
        self._observe()

    # -- around every operation ---------------------------------------------------------------------------------------

    def begin(self, operation: Operation | str) -> None:
        self.moment = TransportMoment(self.config, self.capabilities, operation)
        self.record.is_client = False

    def end(self) -> None:
        self._collect()
        self._observe()

    # -- work ---------------------------------------------------------------------------------------------------------

    def _submit(
        self, request: int, family: int, num_tokens: int, num_shown: int = 0, num_output: int = 0
    ) -> TransferRun | None:
        """Give a request to the prefill worker; returns None if the worker refuses it. With `num_shown`, the output
        continues after that many tokens."""
        tokens, serial = tokens_of(family, num_tokens), self._num_runs
        self._num_runs += 1
        draft = draft_of(tokens, serial, self.config.hidden)
        wish = TransferWish(request, tokens, first_token_of(tokens), draft, num_output or self.config.num_output)
        if num_shown:
            accepted = self.ask(self.subject.go_on, wish, num_shown, self.now_ns)
        else:
            accepted = self.ask(self.subject.submit, wish, self.now_ns)
        if accepted is not True and accepted is not None:
            return None
        num_pages = -(-num_tokens // self.config.page_size)
        self.model.runs[request] = run = TransferRun(request, tokens, num_pages, serial, wish.num_output)
        self.record.note(run, "its start")
        return run

    def _run_prefill(self) -> None:
        model = self.model
        for run in model.live(PREFILL):
            if run.is_asked_back and not run.is_computed:
                run.pages.clear()  # they are computed again
            run.is_asked_back = False
        for request, index, page in self.must(self.subject.compute, self.now_ns):
            run = model.runs[request]
            self.pools.compute(PREFILL, run, index, page)
            run.pages[index] = page
            self.record.computed(run, index, self.now_ns)
            if index == run.num_pages - 1:
                self.record.note(run, "its prompt's end")

    def _run_decode(self) -> None:
        m = self.moment
        for request, index, page in self.must(self.subject.decode, self.now_ns):
            m.num_roles += 1
            run = self.model.decoding.get(request)
            if run is None:
                m.role = f"the decode worker computes the prompt of request {request}, which never arrived there"
                continue
            self.pools.compute(DECODE, run, index, page)
        self._note_joined()  # before other news of these requests arrive
        self._note_ends()

    def _arrive_all(self, side: str, is_reversed: bool = False) -> None:
        """Deliver all that is under way to a worker, in order, or the newest first."""
        parcels, self.under_way[side] = self.under_way[side], []
        for parcel in reversed(parcels) if is_reversed else parcels:
            self._arrive(side, parcel)

    def _arrive(self, side: str, parcel: CarriedMessage) -> None:
        """Deliver a message to a worker, if it lives. A repeated or stale one may change nothing."""
        model, message = self.model, parcel.message
        if model.dead[side]:
            return
        seen = model.attempts.get((message.request, message.generation, message.attempt))
        is_stale = seen is not None and self._is_stale(side, seen, message)
        first_ns = self._arrived.get((side, parcel.number))
        is_double = first_ns is not None and self.now_ns - first_ns < self.config.hold_ns
        if first_ns is None:
            self.past[side].append(parcel)
        before = self._visible(side)
        has_transfers = before[0][-1] > 0
        num_reading = len(self.must(self.subject.reading)) if side == PREFILL else 0
        if message.kind == contract.OFFER and has_transfers and message.generation > self.record.generation:
            is_stale = False  # though its transfer is over, it tells that the worker of the others is gone
        is_awaited = side == PREFILL and message.kind == contract.NACK and self.record.expects(message)
        self.record.arrives(side, parcel, self.now_ns, has_transfers)
        self.must(self.subject.deliver, side, message, self.now_ns)
        answers = self._take(side)
        for answer in answers:
            self._sent(side, answer)
        if is_awaited and not any(answer.kind in (contract.OFFER, contract.CANCEL) for answer in answers):
            self.moment.late = (
                f"the prefill side does nothing when request {message.request} has not arrived as it was sent"
            )
        if message.kind == contract.CANCEL and (count := [one.kind for one in answers].count(contract.CANCEL_ACK)) != 1:
            self.moment.leaked = f"the {side} side answers a cancel for request {message.request} {count} times"
        after = self._visible(side)
        acted = after != before or bool(answers)
        if message.kind == contract.OFFER:
            # An offer may have ended another request of that id without being accepted.
            acted = any(answer.attempt == message.attempt for answer in answers)
        if acted:
            self._arrived.setdefault((side, parcel.number), self.now_ns)
        if is_stale or is_double:
            self.moment.num_repeated += 1
            begun = [one.kind for one in answers if one.request == message.request and one.kind in TRANSFERRING]
            if after != before or begun or (side == PREFILL and len(self.must(self.subject.reading)) > num_reading):
                what = f"{message.kind} of attempt {message.attempt}, generation {message.generation}"
                why = "had arrived before" if is_double else "counts no more"
                did = f"was followed by {begun[0]}" if begun else "changed what the side has, or sends"
                self.moment.repeated = f"{what} for request {message.request} {why}, and {did}"

    def _is_stale(self, side: str, seen: AttemptSeen, message: Message) -> bool:
        """Return whether the request has a newer attempt, or the worker that took part in this one is gone.

        An offer counts no more if its transfer has ended, or if the decode worker knows a newer prefill worker. A side
        that has forgotten the request may accept an old offer: it will time out.
        """
        if message.kind == contract.OFFER:
            return self.record.is_over(message, self.now_ns)
        newest = seen.run.newest.get(side)
        name = (message.request, message.generation, message.attempt)
        is_retracted = side == PREFILL and self.ledger.outgoing_of(*name) is not None  # two transfers of one run
        if newest is not None and name[1:] < newest and not is_retracted:
            return True
        if message.kind == contract.CANCEL and self.record.has_earlier_attempt(side, seen, message):
            return False
        return side in seen.ends

    def _visible(self, side: str) -> tuple[object, ...]:
        counters = self.integers(self.must(self.subject.counters, side), f"counters({side})")
        held = tuple(self.pools.of(side, request) for request in self.model.runs)
        return counters, tuple(self.pools.free(side)), held

    def _pass(self, ns: int) -> None:
        self.now_ns += ns
        for side in self._living():
            self.must(self.subject.tick, side, self.now_ns)
            self._is_ticking = True
            for message in self._take(side):
                self._sent(side, message)
            self._is_ticking = False
            self.moment.num_timed += self.ledger.look_for_overdue(side, self.now_ns)

    def _work(self) -> None:
        """Let both workers run a step, if they live."""
        if not self.model.dead[PREFILL]:
            self._run_prefill()
            self.must(self.subject.read_out, 0 if self._is_slow else MAX_UNDER_WAY)
        if not self.model.dead[DECODE]:
            self._run_decode()

    def _num_read(self) -> int:
        """Return how many pages the link reads now:
        all, or half, and the last ones singly, which may take longer than a lease."""
        count = len(self.must(self.subject.reading))
        return count if not self._is_slow else count // 2 if count > 4 else 1

    def _is_over(self) -> bool:
        """Return whether no side has a request or a transfer."""
        counters = self.moment.counters
        return all(
            side in counters and not counters[side].in_flight and not self.model.live(side) for side in self._living()
        )

    def _go_on(
        self, pace: int, late: Sequence[tuple[str, CarriedMessage]] = (), fault: PlannedFault | None = None
    ) -> None:
        """Let both sides work over a good link until all is over.

        Each tick one of the parcels in `late` arrives, too. `fault` is done to one of the others.
        """
        step = max(1, self.config.lease_ns // 4)
        limit = (len(self.model.runs) + 2) * self.config.patience_ns * pace // step
        left = list(late)
        for tick in range(limit):
            self._observe()
            if not left and self._is_over() and not any(self.under_way.values()):
                return
            self._pass(step)
            self.must(self.subject.read_out, self._num_read())
            if tick % pace == 0:
                self._work()
            self._collect()
            if left:
                self._arrive(*left.pop())
            for side in (DECODE, PREFILL):
                parcels, self.under_way[side] = self.under_way[side], []
                for parcel in parcels:
                    for affected in (parcel,) if fault is None else fault.affect(parcel, self._damaged):
                        self._arrive(side, affected)
        self.moment.leaked = f"after {limit * step} ns on a good link not everything has ended"

    def _damaged(self, parcel: CarriedMessage, how: int) -> CarriedMessage | None:
        """Return a page's parcel with a damaged page; None for what is no page."""
        changed = self.must(self.subject.damaged, parcel.message, how)
        if changed is None:
            return None
        self._num_parcels += 1
        return CarriedMessage(self._num_parcels, changed, True)

    # -- what is seen -------------------------------------------------------------------------------------------------

    def _living(self) -> list[str]:
        return [side for side in SIDES if not self.model.dead[side]]

    def _collect(self) -> None:
        """Take the messages of both sides. Pages are written meanwhile, and read unless the link is slow."""
        for side in self._living():
            for message in self._take(side):
                self._sent(side, message)

    def _take(self, side: str) -> list[Message]:
        messages = list(self.must(self.subject.collect, side))
        if side == PREFILL and not self.config.slow_link:
            while count := len(self.must(self.subject.reading)):
                self.must(self.subject.read_out, count)
                messages += self.must(self.subject.collect, side)
        return messages

    def _sent(self, side: str, message: Message) -> None:
        self.record.sent(side, message, self.now_ns, self._is_ticking)
        if self.record.has_reserved and self.capabilities.reserves:
            self.pools.check_reserves(self.moment, self.model, message)
        parcels = self.under_way[OTHER_SIDE[side]]
        if len(parcels) < MAX_UNDER_WAY:
            self._num_parcels += 1
            parcels.append(CarriedMessage(self._num_parcels, message))

    def _observe(self) -> None:
        m = self.moment
        self._note_joined()
        self._note_ends()
        self.ledger.decide()
        for side in self._living():
            c = Counters(*self.integers(self.must(self.subject.counters, side), f"counters({side})"))
            m.counters[side] = c
            reading = self.pools.check_readers(m) if side == PREFILL else {}
            m.miscounted = m.miscounted or self.ledger.miscounted(side, c)
            if side == PREFILL and not reading:
                m.leaked = m.leaked or self.ledger.kept(c)
            free = self.pools.free(side)
            self.pools.check_holds(m, self.model, side, free, self.now_ns)
            self.pools.clear_free(m, side, free, reading)
            if side == DECODE and self.capabilities.ahead:
                self.pools.check_steps_in_flight(m, self.model, free)
        m.acknowledged, self.record.acknowledged = m.acknowledged or self.record.acknowledged, ""
        m.late, self.ledger.problem = m.late or self.ledger.problem, ""

    def _note_ends(self) -> None:
        for side in self._living():
            for ended in self.must(self.subject.ended, side):
                self._note_ended(side, Ended(*ended))

    def _note_joined(self) -> None:
        m, model = self.moment, self.model
        joined = []
        if model.dead[DECODE]:
            return
        for request, first_token, draft in self.must(self.subject.joined):
            run = model.decoding.get(request) or model.runs[request]
            whole = [a for a in model.attempts.values() if a.run is run and a.is_whole]
            if run.num_joined and self.record.is_remembered(run, self.now_ns):
                m.repeated = f"request {request} is decoded twice"
            elif run.called_back or run.withdrawn:
                m.unserved = f"request {request} is decoded, and was given up"
            run.num_joined += 1
            self.record.note(run, "its decoding")
            wrong = self._wrong(run, self.integer(first_token, "a first token"), self.integers(draft, "a draft input"))
            order = tuple(tuple((name, run.times.get(name)) for name in names) for names in BEFORE_DECODING)
            joined.append(Joined(request, "" if whole else self.record.missing(run), wrong, order))
        m.joined = (*m.joined, *joined)

    def _wrong(self, run: TransferRun, first_token: int, draft: tuple[int, ...]) -> str:
        if page := self.pools.wrong_page(run):
            return page
        if first_token != first_token_of(run.tokens):
            return f"its first token is {first_token}, and was {first_token_of(run.tokens)}"
        if draft != draft_of(run.tokens, run.serial, self.config.hidden):
            return f"its draft input is {draft}, and was {draft_of(run.tokens, run.serial, self.config.hidden)}"
        return ""

    def _note_ended(self, side: str, ended: Ended) -> None:
        m, request, how = self.moment, ended.request, ended.how
        run = (self.model.runs if side == PREFILL else self.model.decoding).get(request)
        if run is None:
            return
        m.num_ended += 1
        if how == "error" and not ended.reason:
            m.unserved = f"request {request} fails on the {side} side, without a reason"
        if how == "length" and ended.num_output != run.num_output:
            m.miscounted = f"request {request} ended with {ended.num_output} tokens of {run.num_output}"
        if side == PREFILL:
            run.is_over, run.how = True, how
            if how == "length" and run.num_output > 1:
                m.unserved = f"request {request} ends with its prompt, and has {run.num_output - 1} tokens left"
            if run.must_abort and how != "aborted":
                m.unserved = f"request {request} was given up by its client, and ends there as {how!r}"
            self.ledger.prefill_ended(run, how)
            return
        run.is_decoding = False
        if how != "length":
            return
        run.was_served = True
        if run.called_back:
            m.unserved = f"request {request} is decoded to its end, and was given up"
