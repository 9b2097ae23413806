"""The transport's trial: the trial is the link, both pools, and both clients; what arrives twice or late must change nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import ClassVar, NamedTuple

from ..invariants.registry import Invariant
from ..trial import Trial, check_methods
from . import contract
from . import operations as ops
from .contract import (
    DECODE,
    METHODS,
    PREFILL,
    SIDES,
    Counters,
    Message,
    PageContent,
    Transport,
    TransportCapabilities,
    TransportConfig,
)
from .model import GARBAGE, AttemptSeen, Hold, Run, TransportModel, content_of, draft_of, first_token_of, tokens_of
from .moment import Joined, Moment

MAX_UNDER_WAY = 60
MAX_PAST = 8
_TO = {PREFILL: DECODE, DECODE: PREFILL}
_WORDS = {
    PREFILL: (contract.ACK, contract.REJECT, contract.CANCEL, contract.CANCEL_ACK),
    DECODE: (contract.CANCEL, contract.CANCEL_ACK),
}


class Parcel(NamedTuple):
    """A message under way. Copies of one message have one number."""

    number: int
    message: Message
    is_damaged: bool = False


class TransportTrial(Trial):
    """`subject` under operations."""

    def __init__(
        self,
        subject: Transport,
        config: TransportConfig,
        capabilities: TransportCapabilities,
        invariants: Iterable[Invariant],
    ) -> None:
        super().__init__(invariants)
        check_methods(subject, METHODS, capabilities)
        self.subject = subject
        self.config = config
        self.capabilities = capabilities
        self.model = TransportModel(config)
        self.now_ns = 1
        self.pools: dict[str, dict[int, PageContent]] = {PREFILL: {}, DECODE: {}}
        self.under_way: dict[str, list[Parcel]] = {PREFILL: [], DECODE: []}
        self._past: dict[str, deque[Parcel]] = {side: deque(maxlen=MAX_PAST) for side in SIDES}
        self._num_parcels = 0
        self._num_events = 0
        self._arrived: dict[tuple[str, int], int] = {}  # (side, parcel) that has arrived and done something -> when
        self.must(subject.connect, self._read, self._write)
        self.moment = Moment(config, capabilities)
        self._observe()
        self.check()

    def _read(self, page: int) -> PageContent:
        return self.pools[PREFILL].get(page, GARBAGE)

    def _write(self, page: int, content: PageContent) -> None:
        self.pools[DECODE][page] = content

    # -- around every operation ---------------------------------------------------------------------------------------

    def _begin(self, operation: object) -> Moment:
        self._num_events += 1
        self.moment = Moment(self.config, self.capabilities, operation)
        return self.moment

    def _end(self) -> bool:
        self._collect()
        self._observe()
        return True

    def _living(self) -> list[str]:
        return [side for side in SIDES if not self.model.dead[side]]

    def _collect(self) -> None:
        """Take what both sides say, until they say nothing; pages are read and written meanwhile."""
        for side in self._living():
            for message in self.must(self.subject.collect, side):
                self._sent(side, message)

    def _sent(self, side: str, message: Message) -> None:
        self._note_sent(side, message)
        parcels = self.under_way[_TO[side]]
        if len(parcels) < MAX_UNDER_WAY:
            self._num_parcels += 1
            parcels.append(Parcel(self._num_parcels, message))

    def _note_sent(self, side: str, message: Message) -> None:
        model, request = self.model, message.request
        attempt = (request, message.generation, message.attempt)
        run = model.runs.get(request)
        if side == PREFILL and message.kind == contract.OFFER and run is not None:
            model.attempts.setdefault(attempt, AttemptSeen(run))
            run.newest[PREFILL] = attempt[1:]
            hold = model.holds[PREFILL].get(request)
            if hold is None or hold.run is not run:
                model.holds[PREFILL][request] = Hold(run, run.pages, self.now_ns, message.generation)
            run.times.setdefault("its transfer's start", self._num_events)
        seen = model.attempts.get(attempt)
        if seen is None:
            return
        if message.kind == contract.MANIFEST:
            seen.run.times.setdefault("its manifest", self._num_events)
        elif message.kind == contract.CANCEL:
            hold = model.holds[side].get(request)
            if hold is not None and hold.run is seen.run and hold.cancelled_ns is None:
                hold.cancelled_ns = self.now_ns
        elif side == DECODE and message.kind == contract.ACCEPT:
            seen.first_page = message.number
            seen.was_accepted = True
            seen.ends.pop(DECODE, None)
            seen.run.newest[DECODE] = attempt[1:]
            hold = model.holds[DECODE].get(request)
            if hold is None or hold.run is not seen.run:
                pages = dict(enumerate(self._pages(DECODE, request)))
                model.holds[DECODE][request] = Hold(seen.run, pages, self.now_ns, message.generation)
        elif side == DECODE and message.kind == contract.ACK:
            if not any(a.is_whole for a in model.attempts.values() if a.run is seen.run):
                self.moment.acknowledged = f"request {request} is acknowledged, and {self._missing(seen.run)}"
            model.holds[DECODE].pop(request, None)
            if not seen.run.has_joined:
                seen.run.has_joined = seen.run.is_decoding = True
                model.decoding[request] = seen.run
            seen.run.target_pages = self._pages(DECODE, request) or seen.run.target_pages

    def _missing(self, run: Run) -> str:
        attempts = [attempt for attempt in self.model.attempts.values() if attempt.run is run]
        if not any(attempt.manifest for attempt in attempts):
            return "no manifest of it has arrived"
        best = max(attempts, key=lambda attempt: (attempt.manifest, len(attempt.intact)))
        gone = [index for index in range(best.first_page, run.num_pages) if index not in best.intact]
        return f"pages {gone} have not arrived intact"

    def _pages(self, side: str, request: int) -> tuple[int, ...]:
        return self.integers(self.must(self.subject.pages, side, request), f"pages({side}, {request})")

    def _observe(self) -> None:
        m = self.moment
        self._note_joined()
        for side in self._living():
            counters = Counters(*self.integers(self.must(self.subject.counters, side), f"counters({side})"))
            m.counters[side] = counters
            free = self._free(side)
            self._check_holds(side, free)
            for page in free:
                self.pools[side][page] = GARBAGE
            for request, _ in self.must(self.subject.ended, side):
                self._note_ended(side, request)

    def _free(self, side: str) -> dict[int, None]:
        return dict.fromkeys(self.integers(self.must(self.subject.free, side), f"free({side})"))

    def _check_holds(self, side: str, free: dict[int, None]) -> None:
        """No page that somebody may still read or write is free, or another's, or cached before it is verified."""
        m, model = self.moment, self.model
        cached = None
        for request, hold in list(model.holds[side].items()):
            if model.may_go(side, hold, self.now_ns):
                if self._pages(side, request)[: len(hold.pages)] != tuple(hold.pages.values()) or hold.run.is_over:
                    del model.holds[side][request]
                continue
            m.num_holds += 1
            for index, page in hold.pages.items():
                if page in free:
                    m.freed = f"page {page} of request {request} is free on the {side} side"
                elif side == PREFILL and self.pools[side].get(page) != content_of(hold.run.tokens, index, self.config):
                    m.freed = f"page {page} of request {request} holds something else on the {side} side"
            if side == DECODE:
                cached = cached if cached is not None else self._cached()
                self._check_unverified(request, hold, cached)

    def _cached(self) -> dict[int, None]:
        return dict.fromkeys(self.integers(self.must(self.subject.cached, DECODE), "cached(decode)"))

    def _check_unverified(self, request: int, hold: Hold, cached: dict[int, None]) -> None:
        first = min((a.first_page for a in self.model.attempts.values() if a.run is hold.run), default=0)
        first = max([a.first_page for a in self.model.attempts.values() if a.run is hold.run], default=first)
        for index, page in hold.pages.items():
            if index >= first:
                self.moment.num_unverified += 1
                if page in cached:
                    self.moment.cached = f"page {page}, reserved for request {request}, is in the prefix cache"

    def _note_joined(self) -> None:
        m, model = self.moment, self.model
        joined = []
        if model.dead[DECODE]:
            return
        for request, first_token, draft in self.must(self.subject.joined):
            run = model.decoding.get(request) or model.runs[request]
            whole = [a for a in model.attempts.values() if a.run is run and a.is_whole]
            run.times.setdefault("its decoding", self._num_events)
            wrong = self._wrong(run, self.integer(first_token, "a first token"), self.integers(draft, "a draft input"))
            names = ("its start", "its prompt's end", "its manifest", "the manifest's arrival", "its decoding")
            order = tuple((name, run.times.get(name)) for name in names)
            joined.append(Joined(request, "" if whole else self._missing(run), wrong, order))
        m.joined = tuple(joined)

    def _wrong(self, run: Run, first_token: int, draft: tuple[int, ...]) -> str:
        pages = run.target_pages
        for index in range(run.num_pages):
            found = self.pools[DECODE].get(pages[index]) if index < len(pages) else None
            if found != content_of(run.tokens, index, self.config):
                return f"page {index} holds {found}"
        if first_token != first_token_of(run.tokens):
            return f"its first token is {first_token}, and was {first_token_of(run.tokens)}"
        if draft != draft_of(run.tokens, self.config.hidden):
            return f"its draft input is {draft}, and was {draft_of(run.tokens, self.config.hidden)}"
        return ""

    def _note_ended(self, side: str, request: int) -> None:
        runs = self.model.runs if side == PREFILL else self.model.decoding
        run = runs.get(request)
        if run is not None and side == PREFILL:
            run.is_over = True
        elif run is not None:
            run.is_decoding = False

    # -- operations ---------------------------------------------------------------------------------------------------

    def _start(self, op: ops.Start) -> bool:
        model = self.model
        run = model.runs.get(op.request)
        if model.dead[PREFILL] or op.num_tokens < 1 or (run is not None and (run.is_decoding or not run.is_over)):
            return False
        self._begin(op)
        tokens = tokens_of(op.family, op.num_tokens)
        arguments = (op.request, tokens, first_token_of(tokens), draft_of(tokens, self.config.hidden), self.now_ns)
        accepted = self.ask(self.subject.submit, *arguments)
        if accepted is True or accepted is None:
            num_pages = -(-op.num_tokens // self.config.page_size)
            model.runs[op.request] = run = Run(op.request, tokens, num_pages, self.now_ns)
            run.times["its start"] = self._num_events
        return self._end()

    def _compute(self, op: ops.Compute) -> bool:
        if self.model.dead[PREFILL]:
            return False
        self._begin(op)
        self._run_prefill()
        return self._end()

    def _run_prefill(self) -> None:
        model = self.model
        for request, index, page in self.must(self.subject.compute, self.now_ns):
            run = model.runs[request]
            self.pools[PREFILL][page] = content_of(run.tokens, index, self.config)
            run.pages[index] = page
            if index == run.num_pages - 1:
                run.times.setdefault("its prompt's end", self._num_events)

    def _decode(self, op: ops.Decode) -> bool:
        if self.model.dead[DECODE]:
            return False
        self._begin(op)
        self._run_decode()
        return self._end()

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

    def _deliver(self, op: ops.Deliver) -> bool:
        parcels = self.under_way[op.side] if op.side in SIDES else []
        if not parcels:
            return False
        self._begin(op)
        self._arrive(op.side, parcels.pop(op.nth % len(parcels)))
        return self._end()

    def _deliver_all(self, op: ops.DeliverAll) -> bool:
        if op.side not in SIDES or not self.under_way[op.side]:
            return False
        self._begin(op)
        parcels, self.under_way[op.side] = self.under_way[op.side], []
        for parcel in parcels:
            self._arrive(op.side, parcel)
        return self._end()

    def _arrive(self, side: str, parcel: Parcel) -> None:
        """A message reaches a worker, if there is one; what it may do depends on whether it is news."""
        model, message = self.model, parcel.message
        if model.dead[side]:
            return
        seen = model.attempts.get((message.request, message.generation, message.attempt))
        is_stale = seen is not None and self._is_stale(side, seen, message)
        first_ns = self._arrived.get((side, parcel.number))
        is_double = first_ns is not None and self.now_ns - first_ns < self.config.hold_ns
        if first_ns is None:
            self._past[side].append(parcel)
        before = self._visible(side)
        self._note_arrival(side, parcel)
        self.must(self.subject.deliver, side, message, self.now_ns)
        answers = self.must(self.subject.collect, side)
        for answer in answers:
            self._sent(side, answer)
        after = self._visible(side)
        acted = after != before or bool(answers)
        if message.kind == contract.OFFER:
            # It may have ended another request of that id, and not begun itself.
            acted = any(answer.attempt == message.attempt for answer in answers)
        if acted:
            self._arrived.setdefault((side, parcel.number), self.now_ns)
        if is_stale or is_double:
            self.moment.num_repeated += 1
            if after != before:
                what = f"{message.kind} of attempt {message.attempt}, generation {message.generation}"
                why = "had arrived before" if is_double else "counts no more"
                self.moment.repeated = f"{what} for request {message.request} {why}, and changed what the side has"

    @staticmethod
    def _is_stale(side: str, seen: AttemptSeen, message: Message) -> bool:
        """Whether a newer attempt of the same request counts, or the worker that took part in this one is no more.

        An old offer may be taken up by a side that has forgotten the request: nothing will come of it.
        """
        if message.kind == contract.OFFER:
            return False
        newest = seen.run.newest.get(side)
        if newest is not None and (message.generation, message.attempt) < newest:
            return True
        return side in seen.ends

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
        if hold is not None and hold.run is seen.run and message.kind in _WORDS[side] and attempt[1:] >= newest:
            hold.may_go = True

    def _drop(self, op: ops.Drop) -> bool:
        parcels = self.under_way[op.side] if op.side in SIDES else []
        if not parcels:
            return False
        self._begin(op)
        parcels.pop(op.nth % len(parcels))
        return self._end()

    def _duplicate(self, op: ops.Duplicate) -> bool:
        parcels = self.under_way[op.side] if op.side in SIDES else []
        if not parcels or len(parcels) >= MAX_UNDER_WAY:
            return False
        self._begin(op)
        parcels.append(parcels[op.nth % len(parcels)])
        return self._end()

    def _again(self, op: ops.Again) -> bool:
        past = self._past[op.side] if op.side in SIDES else []
        if not past or op.nth < 0:
            return False
        self._begin(op)
        self._arrive(op.side, past[-1 - op.nth % len(past)])
        return self._end()

    def _damage(self, op: ops.Damage) -> bool:
        parcels = self.under_way[DECODE]
        pages = [parcel.message.kind == contract.PAGE and not parcel.is_damaged for parcel in parcels]
        places = [at for at, is_page in enumerate(pages) if is_page]
        if not places or not 0 <= op.how <= 3:
            return False
        at = places[op.nth % len(places)]
        changed = self.must(self.subject.damaged, parcels[at].message, op.how)
        if changed is None:
            return False
        self._begin(op)
        self._num_parcels += 1
        damaged = Parcel(self._num_parcels, changed, True)
        if op.how == 3:
            parcels.insert(at, damaged)  # the page itself comes, too: it is a number that somebody else has
        else:
            parcels[at] = damaged
        return self._end()

    def _cancel(self, op: ops.Cancel) -> bool:
        run = self.model.runs.get(op.request)
        if op.side not in SIDES or self.model.dead[op.side] or run is None:
            return False
        self._begin(op)
        self.must(self.subject.cancel, op.side, op.request, self.now_ns)
        if op.side == DECODE and op.request in self.model.decoding:
            self.model.decoding[op.request].is_decoding = False
        return self._end()

    def _advance(self, op: ops.Advance) -> bool:
        if op.ns < 1:
            return False
        self._begin(op)
        self._pass(op.ns)
        return self._end()

    def _pass(self, ns: int) -> None:
        self.now_ns += ns
        for side in self._living():
            self.must(self.subject.tick, side, self.now_ns)

    def _kill(self, op: ops.Kill) -> bool:
        model = self.model
        if op.side not in SIDES or any(model.dead.values()):
            return False
        self._begin(op)
        model.dead[op.side] = True
        self._gone(op.side)
        other = _TO[op.side]
        if op.told:
            model.lose_peer(other, self.now_ns)
            self.must(self.subject.peer_lost, other, self.now_ns)
        return self._end()

    def _gone(self, side: str) -> None:
        """What a worker answered for is over with it; only what it sent is still under way."""
        self.model.forget(side)
        self.model.bereaved = [run for run in self.model.bereaved if not run.is_over]
        if side == DECODE:
            self.model.bereaved += [run for run in self.model.live(PREFILL) if run not in self.model.bereaved]
        self.pools[side].clear()

    def _restart(self, op: ops.Restart) -> bool:
        if op.side not in SIDES:
            return False
        self._begin(op)
        self._gone(op.side)
        self.model.dead[op.side] = False
        self._arrived = {key: at for key, at in self._arrived.items() if key[0] != op.side}
        self.must(self.subject.restart, op.side)
        return self._end()

    def _change_role(self, op: ops.ChangeRole) -> bool:
        if op.side not in SIDES or self.model.dead[op.side]:
            return False
        m = self._begin(op)
        m.num_roles += 1
        is_empty = self.model.is_empty(op.side)
        accepted = self.must(self.subject.change_role, op.side) is not False
        if accepted and not is_empty:
            m.role = f"the {op.side} worker changed its role while it had requests or pages"
        return self._end()

    def _quiet(self, op: ops.Quiet) -> bool:
        m = self._begin(op)
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
            self._observe_quietly()
        for parcels in self.under_way.values():
            parcels.clear()
        m.was_quiet = True
        m.a_peer_is_gone = bool(self.model.bereaved)
        self._end()
        self._look_for_leaks()
        return True

    def _observe_quietly(self) -> None:
        """Between two ticks of a silence, what has ended and joined is noted; checks follow at its end."""
        self._observe()

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
                m.leaked = f"{kept} pages of the {side} side are nobody's, and neither free nor cached"
        waiting = [] if model.dead[PREFILL] else model.live(PREFILL)
        for run in waiting:
            if run in model.bereaved:
                m.unheard = f"request {run.request} never ended on the prefill side, though its decode worker was gone"
            else:
                m.leaked = f"request {run.request} never ended on the prefill side"
        model.bereaved.clear()

    actions: ClassVar = {
        ops.Start: _start,
        ops.Compute: _compute,
        ops.Decode: _decode,
        ops.Deliver: _deliver,
        ops.DeliverAll: _deliver_all,
        ops.Drop: _drop,
        ops.Duplicate: _duplicate,
        ops.Again: _again,
        ops.Damage: _damage,
        ops.Cancel: _cancel,
        ops.Advance: _advance,
        ops.Kill: _kill,
        ops.Restart: _restart,
        ops.Quiet: _quiet,
        ops.ChangeRole: _change_role,
    }

    # -- the end --------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Silence first: nothing may be left. Then two good workers and a good link, over which one request comes through."""
        self.apply(ops.Quiet())
        for side in SIDES:
            if self.model.dead[side]:
                self.apply(ops.Restart(side))
        request = 9
        self.apply(ops.Start(request, 2, 3))
        for _ in range(24):
            self.apply(ops.Compute())
            self.apply(ops.DeliverAll(DECODE))
            self.apply(ops.Decode())
            self.apply(ops.DeliverAll(PREFILL))
        run = self.model.runs.get(request)
        if run is None or not run.has_joined or run.is_decoding:
            was = "after all faults are over a request does not come through"
            raise self.misbehaviour("ANSWER", was, "on a good link every request arrives and is decoded to its end")

    def describe(self) -> str:
        m = self.moment
        parts = [f"{side} {tuple(counters)}" for side, counters in m.counters.items()]
        return "; ".join(parts) or "done"
