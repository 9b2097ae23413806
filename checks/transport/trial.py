"""The transport's trial: the trial is the link, both pools, and both clients; what arrives twice or late must change nothing."""

from __future__ import annotations

from typing import ClassVar

from . import contract
from . import operations as ops
from .contract import DECODE, PREFILL, SIDES, Message
from .model import AttemptSeen, Run, content_of, draft_of, first_token_of, tokens_of
from .watch import MAX_UNDER_WAY, OTHER_SIDE, WORDS, Parcel, TransportWatch


class TransportTrial(TransportWatch):
    """`subject` under operations."""

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
        if hold is not None and hold.run is seen.run and message.kind in WORDS[side] and attempt[1:] >= newest:
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
        other = OTHER_SIDE[op.side]
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
