"""The transport's trial: it is the link, both pools and both clients.
What arrives twice or late must change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ..harness.operation import operation
from . import contract
from . import invariants as invariants  # registers the checkers
from .contract import DECODE, PREFILL, SIDES, TransportCapabilities, TransportConfig
from .model import TransferRun
from .record import MISNUMBERED, PlannedFault
from .watch import MAX_UNDER_WAY, OTHER_SIDE, TransportWatch

REQUESTS = (1, 2, 3, 4)
NEXT_REQUEST = 5  # the first of those that only `serve` has
MAX_FAULT = 3 + MISNUMBERED  # of `serve`: see `PlannedFault`
PLACES = (0, 0, 0, 1, 2, 5)
"""Which of the messages under way, modulo how many there are."""


def _times(config: TransportConfig, has: TransportCapabilities) -> tuple[int, ...]:
    times = (config.fence_ns, config.lease_ns, config.hold_ns)
    return (1, *times, config.lease_ns // 2, *(time - 1 for time in times))


def _is_alive(t: TransportTrial, side: str) -> bool:
    return t.model.dead.get(side) is False


def _can_start(t: TransportTrial, request: int) -> bool:
    run = t.model.runs.get(request)
    return not t.model.dead[PREFILL] and (run is None or (run.is_over and not run.is_decoding))


def _is_reading(t: TransportTrial) -> bool:
    return t.config.slow_link and _is_alive(t, PREFILL) and t.pools.is_read


def _is_coming(t: TransportTrial, side: str) -> bool:
    return bool(t.under_way.get(side))


def _has_come(t: TransportTrial, side: str) -> bool:
    return bool(t.past.get(side))


def _good_pages(t: TransportTrial) -> list[int]:
    """Return the places of undamaged pages among what is under way to the decode worker."""
    parcels = enumerate(t.under_way[DECODE])
    return [at for at, parcel in parcels if parcel.message.kind == contract.PAGE and not parcel.is_damaged]


def _has_it(t: TransportTrial, side: str, request: int) -> bool:
    run = (t.model.runs if side == PREFILL else t.model.decoding).get(request)
    is_begun = run is not None and not run.is_over and bool(run.pages) and not run.is_computed
    return _is_alive(t, side) and (run is not None and run.is_decoding if side == DECODE else is_begun)


def _both_live(t: TransportTrial, side: str) -> bool:
    return side in SIDES and not any(t.model.dead.values())


class TransportTrial(TransportWatch):
    """`subject` under operations. `side` is where a message arrives."""

    contract = "transport"
    quick = 10_000
    run_length = 120
    parts: ClassVar = {"a slow link": "", "hidden states beside drafts": "", "a decode step ahead": "ahead"}
    values: ClassVar = {
        "side": SIDES,
        "nth": PLACES,
        "request": REQUESTS,
        "num_tokens": (3, 1, 2, 5, 8, 20),
        "num_shown": (1, 2, 4),
        "num": (1, 2, 3),
        "pace": (1, 3, 1, 11),
        "fault": (1, 0, 3, 2, 4, 5, 6),
    }

    def end(self) -> None:
        super().end()
        has_joined = bool(self.moment.joined)
        self.use(
            {
                "a slow link": self.config.slow_link and self.pools.is_read,
                "hidden states beside drafts": self.config.hidden and has_joined,
                "a decode step ahead": self.config.ahead and has_joined,
            }
        )
        if self.moment.was_quiet:
            self._look_for_leaks()

    # -- operations ---------------------------------------------------------------------------------------------------

    @operation(weight=8, when=_can_start, family=(0, 0, 1), is_short=(False, False, False, False, True))
    def start(self, request: int, family: int, num_tokens: int, is_short: bool = False) -> None:
        """Send a request to the prefill worker; `is_short`: for one token.
        Prompts of one family have equal beginnings."""
        self.only_if(num_tokens > 0)
        self._submit(request, family, num_tokens, num_output=int(is_short))

    @operation(weight=3, needs="going_on", when=_can_start, family=(0, 1), num_tokens=(3, 1, 5, 8, 20))
    def go_on(self, request: int, family: int, num_tokens: int, num_shown: int) -> None:
        """Send a request that a decode worker was lost with, when its client had been shown `num_shown` tokens."""
        self.only_if(1 <= num_shown <= min(num_tokens, self.config.num_output - 1))
        self._submit(request, family, num_tokens, num_shown)

    @operation(weight=10, when=lambda t: _is_alive(t, PREFILL))
    def compute(self) -> None:
        """Let the prefill worker compute a chunk."""
        self._run_prefill()

    @operation(weight=4, when=_is_reading, count=(1, 2, 30))
    def read(self, count: int) -> None:
        """Let the link read pages out of the prefill pool."""
        self.only_if(count > 0)
        self.must(self.subject.read_out, count)

    @operation(weight=6, when=lambda t: _is_alive(t, DECODE))
    def decode(self) -> None:
        """Let the decode worker run a round."""
        self._run_decode()

    @operation(weight=12, when=_is_coming)
    def deliver(self, side: str, nth: int) -> None:
        """Deliver one message, not always the oldest."""
        parcels = self.under_way[side]
        self._arrive(side, parcels.pop(nth % len(parcels)))

    @operation(weight=2, needs="late", when=_is_coming, is_reversed=(True,))
    @operation(weight=12, when=_is_coming, is_reversed=(False,))
    def deliver_all(self, side: str, is_reversed: bool = False) -> None:
        """Deliver all that is under way, in order, or the newest first."""
        self._arrive_all(side, is_reversed)

    @operation(weight=3, hostile=True, when=_is_coming)
    def drop(self, side: str, nth: int) -> None:
        """Lose a message."""
        self.under_way[side].pop(nth % len(self.under_way[side]))

    @operation(
        weight=2, needs="late", hostile=True, when=lambda t, side: 0 < len(t.under_way.get(side, ())) < MAX_UNDER_WAY
    )
    def duplicate(self, side: str, nth: int) -> None:
        """Let a message arrive twice."""
        parcels = self.under_way[side]
        parcels.append(parcels[nth % len(parcels)])

    @operation(
        weight=6, needs="late", hostile=True, when=_has_come, side=(DECODE, DECODE, PREFILL), nth=(0, 1, 2, 3, 5, 7)
    )
    def again(self, side: str, nth: int) -> None:
        """Deliver a message that has arrived once more, however late; `nth` counts back from the newest."""
        self._arrive(side, self.past[side][-1 - nth % len(self.past[side])])

    @operation(weight=4, hostile=True, when=lambda t: bool(_good_pages(t)), how=(3, 0, 1, 2, 3))
    def damage(self, nth: int, how: int) -> None:
        """Change, cut short, or misnumber a page under way."""
        parcels, places = self.under_way[DECODE], _good_pages(self)
        at = places[nth % len(places)]
        damaged = self._damaged(parcels[at], how) if 0 <= how <= MISNUMBERED else None
        self.only_if(damaged is not None)
        if how == MISNUMBERED:
            parcels.insert(at, damaged)  # the page itself arrives too, under its own number
        else:
            parcels[at] = damaged

    @operation(weight=2, hostile=True, when=lambda t, side, request: _is_alive(t, side) and request in t.model.runs)
    def cancel(self, side: str, request: int) -> None:
        """Let the client of one side give a request up."""
        self._cancel(side, request)

    def _cancel(self, side: str, request: int) -> None:
        self.record.is_client = True
        self.must(self.subject.cancel, side, request, self.now_ns)
        if side == DECODE and request in self.model.decoding:
            self.model.decoding[request].is_decoding = False
        if side == DECODE:
            self.model.runs[request].withdrawn = True

    @operation(weight=5, needs="retraction", when=_has_it)
    def retract(self, side: str, request: int) -> None:
        """Have a worker compute what it has of a request again."""
        self.model.runs[request].is_asked_back |= side == PREFILL
        self.must(self.subject.retract, side, request, self.now_ns)

    @operation(weight=3, when=lambda t, ns: ns >= 1, ns=_times)
    def advance(self, ns: int) -> None:
        """Let time pass, and tell both sides."""
        self._pass(ns)

    @operation(weight=1, hostile=True, when=_both_live, side=(DECODE, PREFILL), is_announced=(True, False))
    def kill(self, side: str, is_announced: bool) -> None:
        """Kill a worker. The other one is informed, or has to find out."""
        self.model.dead[side] = True
        self._gone(side)
        if is_announced:
            other = OTHER_SIDE[side]
            self.record.lose_peer(other, self.now_ns)
            self.must(self.subject.peer_lost, other, self.now_ns)
            self._collect()
            self._note_ends()
            for run in self.model.live(PREFILL) if other == PREFILL else ():
                self.moment.unheard = f"request {run.request} goes on at the prefill side, knowing of its peer's end"

    def _gone(self, side: str) -> None:
        """End a worker's requests and pages. What it sent is still under way."""
        self.record.forget(side)
        self.model.bereaved = [run for run in self.model.bereaved if not run.is_over]
        if side == DECODE:
            self.model.bereaved += [run for run in self.model.live(PREFILL) if run not in self.model.bereaved]
        self.pools.lose(side)

    @operation(weight=1, hostile=True, when=lambda t, side: side in SIDES)
    def restart(self, side: str) -> None:
        """Start a worker anew; messages to and from the old one are still under way."""
        self._begin_anew(side)

    def _begin_anew(self, side: str) -> None:
        self._gone(side)
        self.model.dead[side] = False
        self._arrived = {key: at for key, at in self._arrived.items() if key[0] != side}
        self.must(self.subject.restart, side)

    @operation(weight=1, hostile=True, needs="device_loss", when=_is_alive)
    def lose_kv(self, side: str) -> None:
        """Replace a worker's device; its host goes on as another incarnation."""
        self.model.lose_kv(side)
        self.ledger.lose_kv(side)
        self.pools.lose(side)
        self.must(self.subject.lose_kv, side, self.now_ns)

    @operation(weight=2, needs="roles", when=_is_alive, probes="HANDOFF-10")
    def change_role(self, side: str) -> None:
        """Ask a worker to take another role for a moment."""
        self.moment.num_roles += 1
        is_empty = self.model.is_empty(side)
        accepted = self.must(self.subject.change_role, side) is not False
        if accepted and not is_empty:
            self.moment.role = f"the {side} worker changed its role while it had requests or pages"

    @operation(weight=1)
    def quiet(self) -> None:
        """Lose all messages, now and later, until every timeout is over."""
        step = max(2, self.config.lease_ns // 2)
        left = (len(self.model.runs) + 2) * self.config.patience_ns // step + 1
        while left > 0:
            # When everything has ended, the rest of the time passes at once. Else each end of a wait is looked at from
            # both sides.
            is_over = self._is_over()
            for ns in (step * left,) if is_over else (step - 1, 1):
                for parcels in self.under_way.values():
                    parcels.clear()
                self._pass(ns)
                self._observe()
            left -= left if is_over else 1
            self._work()
            self._collect()
            self._observe()
        for parcels in self.under_way.values():
            parcels.clear()
        self.moment.was_quiet = True
        self.moment.a_peer_is_gone = bool(self.model.bereaved)

    @operation(weight=1, num_tokens=(5, 2, 8), nth=(0, 1, 2, 3, 5, 8))
    def serve(self, num: int, num_tokens: int, pace: int, fault: int, nth: int) -> None:
        """Stop all faults but one, and let workers run a step every `pace` ticks.
        What comes from now on is decoded to its end."""
        self.only_if(min(num, num_tokens, pace) > 0 and 0 <= fault <= MAX_FAULT)
        for side in SIDES:
            if self.model.dead[side]:
                self._begin_anew(side)
        self._go_on(pace)
        runs = [self._submit(NEXT_REQUEST + n, n % 2, num_tokens) for n in range(num)]
        # Where there is no second attempt, a request need not come through.
        self._is_slow = num == 1 and not fault  # several would wait for each other longer than for a lease
        self._go_on(pace, fault=PlannedFault(fault, nth) if fault and self.config.max_attempts > 1 else None)
        self._is_slow = False
        self._must_have_come(runs)

    def _must_have_come(self, runs: Sequence[TransferRun | None]) -> None:
        if all(run is not None and run.was_served and run.how == "transferred" for run in runs):
            return
        self.end()
        self.check()  # an invariant that is broken says more
        if None in runs:
            was = "a request is refused, and does not come through"
        elif lost := [run.request for run in runs if not run.was_served]:
            was = f"request {lost[0]} does not come through after all faults are over"
        else:
            was = "a request that was decoded to its end has failed on the prefill side"
        raise self.misbehaviour("ANSWER", was, "every request arrives and is decoded to its end")

    def _look_for_leaks(self) -> None:
        m, model = self.moment, self.model
        for side in self._living():
            in_flight = m.counters[side].in_flight
            total = self.config.prefill_pages if side == PREFILL else self.config.decode_pages
            cached = self.integers(self.must(self.subject.cached, side), f"cached({side})")
            kept = total - len(self.pools.free(side)) - len(cached)
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

    # -- the end -------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Check after a silence that nothing is left, and that requests come through. While messages of earlier workers
        arrive late, each request ends once; then, over a good link, each is decoded to its end."""
        self.quiet()
        for side in SIDES:
            if self.model.dead[side]:
                self.restart(side)
        if self.capabilities.late:
            self._give_up_in_disorder()
        self.start(1, 0, 3)
        self.start(2, 1, 5)
        for _ in range(2):
            self.compute()
            self.deliver_all(DECODE)
            self.deliver_all(PREFILL)
        for side, is_announced in ((DECODE, True), (PREFILL, self._num_runs % 2 == 0)):
            self._lose_with_several_open(side, is_announced)
        late = [(side, parcel) for side in SIDES for parcel in (*self.past[side], *self.under_way[side])]
        for side in SIDES:
            self.restart(side)
        with self.stage("requests between new workers, with messages of the old ones"):
            self._submit(1, 1, 4)
            self._submit(2, 0, 2)
            self._go_on(1, late)
        for request in REQUESTS:
            self.start(request, request % 2, 8)
        for _ in range(2 * len(REQUESTS)):
            self.compute()
            self.deliver_all(DECODE)
            # All acknowledgements are lost.
            self.under_way[PREFILL] = [p for p in self.under_way[PREFILL] if p.message.kind != contract.ACK]
            self.deliver_all(PREFILL)
        if self.config.slow_link:
            self.advance(self.config.lease_ns)  # all are offered again, and no page of the first attempts is read yet
            self.under_way[DECODE] = [p for p in self.under_way[DECODE] if p.message.request != REQUESTS[0]]
        self.cancel(PREFILL, REQUESTS[0])  # is decoded already, where pages have arrived
        self.cancel(DECODE, REQUESTS[-1])  # waits for room, in a small pool
        self.deliver_all(DECODE)
        self.deliver_all(PREFILL)
        with self.stage("requests whose acknowledgements were lost, and some that wait for room"):
            self._go_on(6)
            if self.config.max_attempts > 1:
                self._must_have_come([self.model.runs.get(request) for request in REQUESTS[1:-1]])
        self.serve(1, 8, 1, 0, 0)

    def _give_up_in_disorder(self) -> None:
        """Let each side give up a request, the one after it was offered twice. What is under way arrives with the
        newest first, and all that has arrived comes again: nothing of it begins, and the last answer ends it."""
        for past in self.past.values():
            past.clear()  # what is forgotten may begin
        for request, gives_up in ((REQUESTS[0], PREFILL), (REQUESTS[1], DECODE)):
            self.begin(f"the {gives_up} side gives request {request} up, and messages of it arrive in another order")
            if self._submit(request, request % 2, 3) is None:
                continue
            self._run_prefill()
            self._collect()
            self._arrive_all(DECODE)
            if gives_up == PREFILL:
                self._pass(self.config.lease_ns)  # it is offered again, where it may be
            self._cancel(gives_up, request)
            self._collect()
            if gives_up == DECODE:
                self._arrive_all(PREFILL)
                self._pass(self.config.lease_ns)  # a fence is up when the answer to the cancel comes
            self.must(self.subject.read_out, MAX_UNDER_WAY)
            for is_again in (False, True):
                for side in (DECODE, PREFILL):
                    self._arrive_all(side, is_reversed=True)
                    for parcel in list(self.past[side]) if is_again else ():
                        self._arrive(side, parcel)
                self.end()
                for side, counters in self.moment.counters.items():
                    if counters.in_flight:
                        self.moment.leaked = f"a transfer is in flight on the {side} side, and both have given it up"
            self.check()

    def _lose_with_several_open(self, side: str, is_announced: bool) -> None:
        """Lose a worker, and tell the other one, or let it hear of the next generation:
        behind a fence it has nothing that both shared."""
        other = OTHER_SIDE[side]
        self.begin(f"the {side} worker is lost with several transfers open")
        self.start(REQUESTS[0], 0, 5)
        self.compute()
        self._collect()
        self.cancel(PREFILL, REQUESTS[0])
        self._collect()
        self._pass(self.config.lease_ns)  # the cancel has no answer: a fence is up
        for request in REQUESTS[1:]:
            self.start(request, request % 2, 3)
            self.compute()
            self._collect()
            self.deliver_all(DECODE)
        self.kill(side, is_announced)
        if not is_announced:
            self.restart(side)
            self.start(REQUESTS[0], 0, 3)
            self.compute()
            self._collect()
            self.deliver_all(DECODE)
        if self.config.slow_link:
            self._pass(self.config.fence_ns)  # a fence ends while the link has still to read
            self.end()
            self.check()
        self.must(self.subject.read_out, MAX_UNDER_WAY)
        self._pass(self.config.fence_ns)
        self.end()
        left = self.moment.counters[other].in_flight
        if left > (not is_announced):
            self.moment.leaked = (
                f"{left} transfers are in flight on the {other} side, and the worker of the others is gone"
            )
        self.check()
        self.restart(side)

    def describe(self) -> str:
        parts = [f"{side} {tuple(counters)}" for side, counters in self.moment.counters.items()]
        return "; ".join(parts) or super().describe()
