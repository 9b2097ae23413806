"""The transport's trial: it is the link, both pools and both clients. What arrives twice or late must change nothing."""

from __future__ import annotations

from ...properties.harness.operation import operation
from . import contract
from . import invariants as invariants  # registers the checkers
from .contract import DECODE, METHODS, PREFILL, SIDES, Message, TransportCapabilities, TransportConfig
from .model import AttemptSeen, Run, content_of, draft_of, first_token_of, tokens_of
from .watch import ENDING, MAX_UNDER_WAY, OTHER_SIDE, Parcel, TransportWatch

REQUESTS = (1, 2, 3, 4)
PLACES = (0, 0, 0, 1, 2, 5)
"""Which of the messages under way, modulo how many there are."""


def _times(config: TransportConfig, has: TransportCapabilities) -> tuple[int, ...]:
    return (1, config.fence_ns, config.lease_ns // 2, config.lease_ns, config.hold_ns)


def _is_alive(t: TransportTrial, side: str) -> bool:
    return t.model.dead.get(side) is False


def _can_start(t: TransportTrial, request: int) -> bool:
    run = t.model.runs.get(request)
    return not t.model.dead[PREFILL] and (run is None or (run.is_over and not run.is_decoding))


def _is_coming(t: TransportTrial, side: str) -> bool:
    return bool(t.under_way.get(side))


def _can_double(t: TransportTrial, side: str) -> bool:
    return 0 < len(t.under_way.get(side, ())) < MAX_UNDER_WAY


def _has_come(t: TransportTrial, side: str) -> bool:
    return bool(t.past.get(side))


def _good_pages(t: TransportTrial) -> list[int]:
    """The places of undamaged pages among what is under way to the decode worker."""
    parcels = enumerate(t.under_way[DECODE])
    return [at for at, parcel in parcels if parcel.message.kind == contract.PAGE and not parcel.is_damaged]


def _can_damage(t: TransportTrial) -> bool:
    return bool(_good_pages(t))


def _can_cancel(t: TransportTrial, side: str, request: int) -> bool:
    return _is_alive(t, side) and request in t.model.runs


def _both_live(t: TransportTrial, side: str) -> bool:
    return side in SIDES and not any(t.model.dead.values())


class TransportTrial(TransportWatch):
    """`subject` under operations. `side` is where a message arrives."""

    contract = "transport"
    config_type = TransportConfig
    capabilities_type = TransportCapabilities
    methods = METHODS
    quick = 12_000
    run_length = 120

    def end(self) -> None:
        super().end()
        if self.moment.was_quiet:
            self._look_for_leaks()

    # -- operations ---------------------------------------------------------------------------------------------------

    @operation(weight=8, when=_can_start, request=REQUESTS, family=(0, 0, 1), num_tokens=(3, 1, 2, 5, 8, 4))
    def start(self, request: int, family: int, num_tokens: int) -> bool:
        """A request comes to the prefill worker. Prompts of one family have equal beginnings."""
        if num_tokens < 1:
            return False
        tokens = tokens_of(family, num_tokens)
        arguments = (request, tokens, first_token_of(tokens), draft_of(tokens, self.config.hidden), self.now_ns)
        accepted = self.ask(self.subject.submit, *arguments)
        if accepted is True or accepted is None:
            num_pages = -(-num_tokens // self.config.page_size)
            self.model.runs[request] = run = Run(request, tokens, num_pages, self.now_ns)
            run.times["its start"] = self._num_events
        return True

    @operation(weight=10, when=lambda t: _is_alive(t, PREFILL))
    def compute(self) -> None:
        """The prefill worker computes a chunk."""
        self._run_prefill()

    def _run_prefill(self) -> None:
        model = self.model
        for request, index, page in self.must(self.subject.compute, self.now_ns):
            run = model.runs[request]
            self.pools[PREFILL][page] = content_of(run.tokens, index, self.config)
            run.pages[index] = page
            if index == run.num_pages - 1:
                run.times.setdefault("its prompt's end", self._num_events)

    @operation(weight=6, when=lambda t: _is_alive(t, DECODE))
    def decode(self) -> None:
        """The decode worker runs a round."""
        self._run_decode()

    def _run_decode(self) -> None:
        m = self.moment
        computed = self.integers(self.must(self.subject.decode, self.now_ns), "decode()")
        for request in computed:
            m.num_roles += 1
            run = self.model.decoding.get(request)
            if run is None:
                m.role = f"the decode worker computes the prompt of request {request}, which never arrived there"
                continue
            for index, page in enumerate(self._pages(DECODE, request)):
                self.pools[DECODE][page] = content_of(run.tokens, index, self.config)

    @operation(weight=12, when=_is_coming, side=SIDES, nth=PLACES)
    def deliver(self, side: str, nth: int) -> None:
        """One message arrives, not always the oldest."""
        parcels = self.under_way[side]
        self._arrive(side, parcels.pop(nth % len(parcels)))

    @operation(weight=12, when=_is_coming, side=SIDES)
    def deliver_all(self, side: str) -> None:
        """All that is under way arrives, in order."""
        parcels, self.under_way[side] = self.under_way[side], []
        for parcel in parcels:
            self._arrive(side, parcel)

    def _arrive(self, side: str, parcel: Parcel) -> None:
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
        self._note_arrival(side, parcel)
        self.must(self.subject.deliver, side, message, self.now_ns)
        answers = self.must(self.subject.collect, side)
        for answer in answers:
            self._sent(side, answer)
        after = self._visible(side)
        acted = after != before or bool(answers)
        if message.kind == contract.OFFER:
            # An offer may have ended another request of that id without being accepted.
            acted = any(answer.attempt == message.attempt for answer in answers)
        if acted:
            self._arrived.setdefault((side, parcel.number), self.now_ns)
        if is_stale or is_double:
            self.moment.num_repeated += 1
            if after != before:
                what = f"{message.kind} of attempt {message.attempt}, generation {message.generation}"
                why = "had arrived before" if is_double else "counts no more"
                self.moment.repeated = f"{what} for request {message.request} {why}, and changed what the side has"

    def _is_stale(self, side: str, seen: AttemptSeen, message: Message) -> bool:
        """Whether the request has a newer attempt, or the worker that took part in this one is gone.

        A side that has forgotten the request may accept an old offer: it will time out.
        """
        if message.kind == contract.OFFER:
            return False
        newest = seen.run.newest.get(side)
        if newest is not None and (message.generation, message.attempt) < newest:
            return True
        if message.kind == contract.CANCEL and self._has_earlier_attempt(side, seen, message):
            return False
        return side in seen.ends

    def _has_earlier_attempt(self, side: str, seen: AttemptSeen, message: Message) -> bool:
        """Whether an earlier attempt of the transfer is open here: a cancel ends all attempts up to its own.

        A worker that begins anew may accept a late offer of one attempt while the next one was accepted by the worker before it.
        """
        for (_, generation, attempt), earlier in self.model.attempts.items():
            is_of_transfer = earlier.run is seen.run and generation == message.generation and attempt < message.attempt
            if is_of_transfer and earlier.was_accepted and side not in earlier.ends:
                return True
        return False

    def _visible(self, side: str) -> tuple[object, ...]:
        subject = self.subject
        counters = self.integers(self.must(subject.counters, side), f"counters({side})")
        held = tuple(self._pages(side, request) for request in self.model.runs)
        return counters, tuple(self._free(side)), held

    def _note_arrival(self, side: str, parcel: Parcel) -> None:
        model, message = self.model, parcel.message
        request = message.request
        attempt = (request, message.generation, message.attempt)
        seen = model.attempts.get(attempt)
        if seen is None:
            return
        newest = seen.run.newest.get(side, attempt[1:])
        if side == DECODE:
            if message.kind == contract.OFFER:
                model.lose_peer(DECODE, self.now_ns, message.generation)
            if message.kind == contract.PAGE and not parcel.is_damaged:
                seen.intact[message.number] = None
            elif message.kind == contract.MANIFEST:
                seen.manifest = True
                seen.run.times.setdefault("the manifest's arrival", self._num_events)
        hold = model.holds[side].get(request)
        if hold is not None and hold.run is seen.run and message.kind in ENDING[side] and attempt[1:] >= newest:
            hold.may_go = True

    @operation(weight=3, hostile=True, when=_is_coming, side=SIDES, nth=PLACES)
    def drop(self, side: str, nth: int) -> None:
        """A message is lost."""
        parcels = self.under_way[side]
        parcels.pop(nth % len(parcels))

    @operation(weight=2, hostile=True, when=_can_double, side=SIDES, nth=PLACES)
    def duplicate(self, side: str, nth: int) -> None:
        """A message will arrive twice."""
        parcels = self.under_way[side]
        parcels.append(parcels[nth % len(parcels)])

    @operation(weight=6, hostile=True, when=_has_come, side=(DECODE, DECODE, PREFILL), nth=(0, 1, 2, 3, 5, 7))
    def again(self, side: str, nth: int) -> None:
        """A message that has arrived arrives once more, however late; `nth` counts back from the newest."""
        past = self.past[side]
        self._arrive(side, past[-1 - nth % len(past)])

    @operation(weight=4, hostile=True, when=_can_damage, nth=PLACES, how=(3, 0, 1, 2, 3))
    def damage(self, nth: int, how: int) -> bool:
        """A page under way is changed, cut short, or misnumbered."""
        parcels, places = self.under_way[DECODE], _good_pages(self)
        at = places[nth % len(places)]
        changed = self.must(self.subject.damaged, parcels[at].message, how) if 0 <= how <= 3 else None
        if changed is None:
            return False
        self._num_parcels += 1
        damaged = Parcel(self._num_parcels, changed, True)
        if how == 3:
            parcels.insert(at, damaged)  # the page itself arrives too, under its own number
        else:
            parcels[at] = damaged
        return True

    @operation(weight=2, hostile=True, when=_can_cancel, side=SIDES, request=REQUESTS)
    def cancel(self, side: str, request: int) -> None:
        """The client of one side gives a request up."""
        self.must(self.subject.cancel, side, request, self.now_ns)
        if side == DECODE and request in self.model.decoding:
            self.model.decoding[request].is_decoding = False

    @operation(weight=3, when=lambda t, ns: ns >= 1, ns=_times)
    def advance(self, ns: int) -> None:
        """Time passes, and both sides notice."""
        self._pass(ns)

    def _pass(self, ns: int) -> None:
        self.now_ns += ns
        for side in self._living():
            self.must(self.subject.tick, side, self.now_ns)

    @operation(weight=1, hostile=True, when=_both_live, side=(DECODE, PREFILL), told=(True, False))
    def kill(self, side: str, told: bool) -> None:
        """A worker dies. The other one is told, or has to find out."""
        self.model.dead[side] = True
        self._gone(side)
        if told:
            other = OTHER_SIDE[side]
            self.model.lose_peer(other, self.now_ns)
            self.must(self.subject.peer_lost, other, self.now_ns)

    def _gone(self, side: str) -> None:
        """End a worker's requests and pages. What it sent is still under way."""
        self.model.forget(side)
        self.model.bereaved = [run for run in self.model.bereaved if not run.is_over]
        if side == DECODE:
            self.model.bereaved += [run for run in self.model.live(PREFILL) if run not in self.model.bereaved]
        self.pools[side].clear()

    @operation(weight=1, hostile=True, when=lambda t, side: side in SIDES, side=SIDES)
    def restart(self, side: str) -> None:
        """A worker begins anew; messages to and from the old one are still under way."""
        self._gone(side)
        self.model.dead[side] = False
        self._arrived = {key: at for key, at in self._arrived.items() if key[0] != side}
        self.must(self.subject.restart, side)

    @operation(weight=2, needs="roles", when=_is_alive, probes="HANDOFF-10", side=SIDES)
    def change_role(self, side: str) -> None:
        """A worker is to take another role for a moment."""
        self.moment.num_roles += 1
        is_empty = self.model.is_empty(side)
        accepted = self.must(self.subject.change_role, side) is not False
        if accepted and not is_empty:
            self.moment.role = f"the {side} worker changed its role while it had requests or pages"

    @operation(weight=1)
    def quiet(self) -> None:
        """All messages are lost, now and later, until every timeout is over."""
        patience = (len(self.model.runs) + 2) * self.config.patience_ns
        step = max(1, self.config.lease_ns // 2)
        for _ in range(patience // step + 1):
            for parcels in self.under_way.values():
                parcels.clear()
            self._pass(step)
            if not self.model.dead[PREFILL]:
                self._run_prefill()
            if not self.model.dead[DECODE]:
                self._run_decode()
            self._collect()
            self._observe()
        for parcels in self.under_way.values():
            parcels.clear()
        self.moment.was_quiet = True
        self.moment.a_peer_is_gone = bool(self.model.bereaved)

    def _look_for_leaks(self) -> None:
        m, model = self.moment, self.model
        for side in self._living():
            in_flight = m.counters[side].in_flight
            total = self.config.prefill_pages if side == PREFILL else self.config.decode_pages
            cached = self.integers(self.must(self.subject.cached, side), f"cached({side})")
            kept = total - len(self._free(side)) - len(cached)
            if in_flight:
                m.leaked = f"{in_flight} transfers are in flight on the {side} side, for ever"
            elif kept:
                m.leaked = f"{kept} pages of the {side} side belong to no request, and are neither free nor cached"
        waiting = [] if model.dead[PREFILL] else model.live(PREFILL)
        for run in waiting:
            if run in model.bereaved:
                m.unheard = f"request {run.request} never ended on the prefill side, though its decode worker was gone"
            else:
                m.leaked = f"request {run.request} never ended on the prefill side"
        model.bereaved.clear()

    # -- the end --------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Check after a silence that nothing is left; then that one request arrives between good workers over a good link."""
        self.quiet()
        for side in SIDES:
            if self.model.dead[side]:
                self.restart(side)
        request = 9
        self.start(request, 2, 3)
        for _ in range(24):
            self.compute()
            self.deliver_all(DECODE)
            self.decode()
            self.deliver_all(PREFILL)
        run = self.model.runs.get(request)
        if run is None or not run.has_joined or run.is_decoding:
            was = "after all faults are over a request does not come through"
            raise self.misbehaviour("ANSWER", was, "on a good link every request arrives and is decoded to its end")

    def describe(self) -> str:
        m = self.moment
        parts = [f"{side} {tuple(counters)}" for side, counters in m.counters.items()]
        return "; ".join(parts) or "done"
