"""The engine's trial: the suite is its client and its device, and recounts everything after each operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from ..harness.operation import Handles, Operation, operation
from ..harness.trial import Refused, Trial
from . import invariants as invariants  # registers the checkers
from .contract import UNITS, EngineCapabilities, SchedulingEngine, ServingConfig, StepAnswer, Wish
from .device import ContentDevice
from .language import STOP, STOP_STRINGS, prompt_of
from .model import RUNNING, EngineModel
from .observation import EngineMoment, EngineObservation
from .reading import follow_pages, names, read_account, read_confidences, read_events, read_step
from .recovery import DeviceLimits
from .rules import PARTS, limits, limits_of, note_waits, promises, shown, twin_of, used_parts, verdict, why_given_way

REQUESTS = Handles("abcdef")


def _lengths(config: ServingConfig, has: EngineCapabilities) -> list[int]:
    """Return prompt lengths at the edges of pages and chunks, and the longest that the context takes."""
    size, chunk, room = config.page_size, config.chunk_size, config.context_len
    lengths = {1, 2, 3, 5, size - 1, size, size + 1, 2 * size, chunk, chunk + 1, room - 1, room - 3}
    return sorted(length for length in lengths if 1 <= length < config.context_len)


def _is_live(t: EngineTrial, request: str) -> bool:
    return request in t.model.lives


def _is_running(t: EngineTrial, request: str) -> bool:
    life = t.model.lives.get(request)
    return life is not None and life.state is RUNNING and not life.leaving


def _can_fail(t: EngineTrial, request: str) -> bool:
    return _is_running(t, request) and not t.model.lives[request].failing


class EngineTrial(Trial):
    """`subject` under operations. An answer of another form than the contract's is a Violation at once."""

    contract = "engine"
    looks = ("waiting", "running", "slots_of", "free_pages", "cached_pages", "interrupts", "counters", *UNITS)
    quick = 120_000
    run_length = 100
    limit_s = 10.0
    parts = PARTS
    values: ClassVar = {"request": REQUESTS, "number": (0, 1, 2), "others": (0, 0, 1, 3)}

    subject: SchedulingEngine
    config: ServingConfig
    capabilities: EngineCapabilities
    moment: EngineMoment

    def prepare(self) -> None:
        self.model = EngineModel(self.config)
        self.device = ContentDevice(self.config, self.capabilities)
        self.all_pages = frozenset(range(1, self.config.num_pages + 1))
        self._has_cache = self.capabilities.prefix_cache and self.config.prefix_cache
        self._recovery = DeviceLimits(self.config) if self.capabilities.isolation else None
        self.owners: dict[int, str] = {}
        self._was_denied = self._was_lost = False
        self.moment = EngineMoment(self.model, self.device.cells, "make", EngineObservation((), (), None, None, None))
        self._observe()

    @classmethod
    def twin_config(cls, kind: str, config: ServingConfig) -> ServingConfig | list[ServingConfig] | None:
        return twin_of(config, kind)

    # -- around every operation ---------------------------------------------------------------------------------------

    def begin(self, operation: Operation | str) -> None:
        self.operation = operation
        m = self.moment = EngineMoment(self.model, self.device.cells, operation, self.moment.after)
        m.recovery, has = self._recovery, self.capabilities
        has_no_rules = self._was_lost and self._recovery is None
        if self._was_denied or has_no_rules or self.model.lost or self.model.asked_back:
            m.is_disturbed = True
        m.reuse_is_ordered, m.keeps_reserves, m.has_table = has.ordered_reuse, has.reserves, has.table
        for name in ("own_victims", "to_tail", "estimates", "strict_priorities", "caches_at_allocation", "own_ties"):
            setattr(m, name, getattr(has, name))

    def end(self) -> None:
        self.use(used_parts(self.moment))
        if not self.moment.observed:
            self._observe()

    def _observe(self) -> None:
        """Ask the engine for everything that it shows, and recount the pages."""
        subject, must, integers, m = self.subject, self.must, self.integers, self.moment
        slots = free = cached = None
        waiting = names(self, must(subject.waiting), "waiting()")
        running = names(self, must(subject.running), "running()")
        if self.capabilities.slots:
            slots = {name: integers(must(subject.slots_of, name), "slots_of()") for name in running}
            free = integers(must(subject.free_pages), "free_pages()")
        if self._has_cache:
            cached = integers(must(subject.cached_pages), "cached_pages()")
        m.after = EngineObservation(waiting, running, slots, free, cached)
        m.observed = True
        lives = self.model.lives
        for name in waiting:
            if name in lives and lives[name].state is RUNNING:
                m.retract(lives[name])
        if slots is not None:
            follow_pages(self, m.after)

    # -- clients ------------------------------------------------------------------------------------------------------

    @operation(needs="stop_strings", weight=5, ends=(1, 2, 3, 4), max_tokens=(8, 30))
    @operation(needs="priorities", weight=6, priority=(0, 0, 1, 2), seed=(0, 1))
    @operation(
        weight=12,
        when=lambda t, request, length, max_tokens: request not in t.model.lives and length > 0 and max_tokens > 0,
        length=_lengths,
        max_tokens=(1, 2, 3, 5, 8, 30),
        stem=(0, 0, 1),
        variant=(0, 0, 1),
        seed=(0, 0, 1),
        marks=lambda c, has: (False, True) if has.marks else (False,),
    )
    def submit(
        self,
        request: str,
        length: int,
        max_tokens: int,
        stem: int = 0,
        variant: int = 0,
        priority: int = 0,
        seed: int = 0,
        stops: bool = False,
        marks: bool = False,
        ends: int = 0,
    ) -> None:
        """Submit a request. Equal `stem`s share all but the last token of the shorter prompt, equal `variant`s that
        too. `ends` is the number of its stop strings."""
        prompt = prompt_of(stem, length, variant)
        stop_tokens = (STOP,) if stops else ()
        strings = STOP_STRINGS[ends % len(STOP_STRINGS)] if self.capabilities.stop_strings else ()
        wish = Wish(
            request, prompt, max_tokens, priority, seed, stop_tokens, marks and self.capabilities.marks, strings
        )
        self._ask_for(wish, *verdict(self.config, wish, len(self.model.waiting())))

    def _ask_for(self, wish: Wish, impossible: str, must_accept: str = "") -> None:
        m, model = self.moment, self.model
        m.wish, m.impossible, m.must_accept = wish, impossible, must_accept
        m.promises, m.has_reasons = promises(self.config, wish), self.capabilities.reasons
        m.limits = limits_of(self.config, wish, len(model.waiting()))
        model.num_attempts += 1
        answer = self.ask(self.subject.submit, wish)
        if not self.refused(answer, None, False):
            m.promise = self.integer(answer, "submit()")
            if wish.request not in model.lives:
                model.accept(wish, m.promise)
        model.decisions.append(("submit", wish.request, m.promise))
        self._interrupt()

    @operation(weight=2, needs="misuse", probes="ENGINE-12", when=_is_live)
    def submit_again(self, request: str) -> None:
        """Submit a request under the name of a live one. Must be refused."""
        self._ask_for(Wish(request, prompt_of(5, 2, 1), 2), "a live request has this name")

    @operation(weight=1, needs="misuse", probes="ENGINE-08", kind=(0, 1, 2, 3, 4))
    def submit_impossible(self, kind: int) -> None:
        """Submit a request that can never run: 0 no prompt, 1 no output, 2 negative output, 3 beyond the context, 4
        beyond the pool."""
        prompt = prompt_of(0, (0, 2, 2, self.config.context_len, self.config.num_slots)[kind % 5], 0)
        whys = ("the prompt is empty", "no output is wanted", "the output is negative")
        whys += ("the prompt fills the context", "the prompt fills the pool")
        self._ask_for(Wish("impossible", prompt, (1, 0, -1, 1, 1)[kind % 5]), whys[kind % 5])

    @operation(weight=5, when=lambda t, request: request in t.model.lives and not t.model.lives[request].aborted)
    def abort(self, request: str) -> None:
        """Abort a live request, twice."""
        m, life = self.moment, self.model.lives[request]
        life.aborted = True
        m.abort_events = read_events(self, self.must(self.subject.abort, request))
        life.leaving = life.is_live
        self._interrupt()
        m.second_abort_events = read_events(self, self.must(self.subject.abort, request))

    @operation(weight=1, needs="misuse", when=lambda t, request: request not in t.model.lives)
    def abort_unknown(self, request: str) -> None:
        """Abort a request that is not there."""
        self.moment.abort_events = read_events(self, self.must(self.subject.abort, request))

    def _interrupt(self) -> None:
        """Note which steps run one round only since a new plan could differ: of those that have not begun.
        The oldest may have."""
        if not self.capabilities.multi_steps or not self.model.flights:
            return
        m, newest = self.moment, self.integer(self.must(self.subject.interrupts), "interrupts()")
        m.cuts = newest >= self.model.flights[0].number > self.model.interrupted and not self._was_lost
        m.interrupted = self.model.interrupted = newest
        for flight in self.model.flights[1:]:
            flight.interrupted |= flight.number <= newest

    # -- steps --------------------------------------------------------------------------------------------------------

    @operation(weight=10)
    def plan(self) -> None:
        """Ask for one step, and launch it."""
        m, model = self.moment, self.model
        m.asked = True
        m.asked_back = frozenset(model.asked_back)
        m.was_lost, m.first = self._was_lost, self._recovery.first() if self._recovery else ()
        m.was_waiting, m.before_plan, m.lingering_before = model.waiting(), tuple(model.flights), tuple(model.lingering)
        before = model.running()
        read_confidences(self)
        view = self._step(self.subject.plan)
        if view is not None and not isinstance(view, Refused):
            m.flight = read_step(self, view)
        if m.admitted and self._has_cache and m.before.cached is not None:
            size, cells = self.config.page_size, self.device.cells
            due = {page for flight in m.before_plan for page in flight.writes}  # it may hold what was there before
            m.cached_before = frozenset([cells[page * size + size - 1] for page in m.before.cached if page not in due])
        self._observe()
        if m.flight is not None:
            model.launch(m.flight, m.after.slots)
            m.flight.held = {name: len(slots) for name, slots in (m.before.slots or {}).items()}
        m.note_hold(before)
        note_waits(m, before)
        if m.admitted:
            m.count_overtaken()
            self._was_denied = False  # what enters has been allocated something
        self._follow_given_way(m, model)
        if model.asked_back:
            model.asked_back -= {life.name for life in m.retracted}
            model.asked_back &= set(m.after.running)
        model.decisions.append(m.decision())

    def _follow_given_way(self, m: EngineMoment, model: EngineModel) -> None:
        """Note what this plan has retracted for greater priorities, and whether they enter."""
        m.given_way = given = why_given_way(m)
        if m.is_disturbed or (m.recovery is not None and m.recovery.is_reduced):
            model.given_way = []  # others may go first, and slots may be denied
        elif given is not None and given.gainers and m.keeps_reserves:
            model.given_way.append(given)
        model.follow_given_way([life for life, _ in m.admitted], m.before_plan)

    def _step(self, method: Callable[..., object], *arguments: object) -> object:
        """Plan or commit, with nothing wrong. A failure at a limit of what is legal is left to an invariant."""
        m = self.moment
        try:
            return self.call(method, *arguments)
        except Exception as error:
            m.degenerate = limits(self.model, m.committed)
            if not m.degenerate or isinstance(error, NotImplementedError):
                raise self._accident(method, error) from error
            m.refusal = f"{type(error).__name__}: {error}"
            return Refused(m.refusal)

    @operation(needs="multi_steps", weight=3, rounds=(1, 2, 3))
    @operation(weight=8, when=lambda t: bool(t.model.flights) and not t._fails())
    def commit(self, rounds: int = 1_000) -> None:
        """Commit the oldest step, after `rounds` rounds at most, one if it was interrupted before it ran."""
        m, model = self.moment, self.model
        flight = model.flights[0]
        limit = 1 if flight.interrupted else max(1, min(rounds, flight.rounds))
        m.committed, m.answer = flight, self.device.execute(flight, limit, self._lengths)
        model.last_answer = m.answer
        m.gone = tuple([part.life.name for part in flight.parts if not part.is_present])
        m.expected = model.expected(flight, m.answer)
        late = model.late(flight, m.answer) if self.capabilities.late_tokens else {}
        events = self._step(self.subject.commit, m.answer)
        if isinstance(events, Refused):
            return
        model.commit(flight, m.answer, m.expected)
        if self._recovery is not None:
            self._recovery.commit()
        read_events(self, events)
        m.expected = {name: late[name] for name in late if name in m.delivered} | m.expected
        model.recount_flight()
        read_account(self, flight)
        if any(row.life.name in m.delivered for row in flight.rows):
            model.holding = model.may_hold = False
        if m.delivered or m.ends:
            model.retractions_since_progress = 0
        model.decisions += [("lengths", chosen.lengths) for chosen in flight.chosen]
        model.decisions.append(("answer", [(name, len(got), why) for name, (got, why) in m.expected.items()]))

    def _lengths(self, number: int, confidences: Sequence[Sequence[float]]) -> tuple[int, ...]:
        return self.integers(self.must(self.subject.lengths, number, confidences), "lengths()", len(confidences))

    @operation(weight=1, needs="misuse", probes="RELAY-07", when=lambda t: t.model.last_answer is not None)
    def commit_again(self) -> None:
        """Give the answer that was committed last a second time. Must be refused."""
        self._commit_wrong(self.model.last_answer)

    @operation(needs=("overlap", "misuse"), weight=1, probes="RELAY-07", when=lambda t: len(t.model.flights) > 1)
    def commit_early(self) -> None:
        """Give the answer of the newer of two steps in flight first. Must be refused."""
        flight = self.model.flights[1]
        runs = [[[STOP] for _ in flight.rows]] if flight.rows else []
        beside = [[[0] for _ in flight.rows]] if flight.rows else []
        first = [STOP for _ in flight.chunks]
        self._commit_wrong(StepAnswer(flight.number, first, runs, first, beside))

    def _commit_wrong(self, answer: StepAnswer) -> None:
        events = self.ask(self.subject.commit, answer)
        if not self.refused(events, None):
            read_events(self, events)

    @operation(weight=6, when=lambda t, cycles: cycles > 0, cycles=(1, 2, 3, 6), late=(False, False, True))
    def run(self, cycles: int, late: bool = False) -> None:
        """Run some cycles of a driver: plan until there is no more, commit the oldest. A `late` one plans the next step
        only when nothing is in flight. Each is checked like any other operation."""
        for _ in range(cycles):
            while len(self.model.flights) < (1 if late else self.config.depth):
                self._inner(PLAN)
                if self.moment.flight is None:
                    break
            if not self.model.flights:
                break
            for inner in (LOSE, RESUME) if self._fails() else (COMMIT,):
                self._inner(inner)

    @operation(
        needs="multi_steps",
        weight=4,
        when=lambda t, number, rounds: t.config.multi_step_rounds > 1 and bool(t.model.lives) and rounds >= 0,
        rounds=(1_000, 0, 0, 2, 1),
    )
    def leave(self, number: int, rounds: int) -> None:
        """Plan, and let the client of a request leave while a step of several rounds runs with it, or fails (0)."""
        while len(self.model.flights) < self.config.depth:
            self._inner(PLAN)
            if self.moment.flight is None:
                break
        flights = self.model.flights
        there = [row.life for row in flights[0].rows if row.is_present and not row.life.aborted] if flights else []
        if there and flights[0].rounds > 1 and not self._fails():
            self._inner(EngineTrial.abort(there[number % len(there)].name))
            self._inner(EngineTrial.commit(rounds or 1_000) if rounds or not self.config.losses else LOSE)

    def _inner(self, operation: Operation) -> None:
        """Carry out an operation inside another one."""
        self.begin(operation)
        type(operation).body(self, *operation.arguments)
        self.count(type(operation))

    # -- what disturbs ------------------------------------------------------------------------------------------------

    def _steps(self, number: int) -> int:
        return self.config.candidates[number % len(self.config.candidates)]

    @operation(needs="adaptive", weight=4, when=lambda t, number: t._steps(number) != t.model.steps)
    def set_steps(self, number: int) -> None:
        """Draft the candidate of this number (modulo how many there are) from the next plan on."""
        self.model.steps = self._steps(number)
        self.must(self.subject.set_steps, self.model.steps)
        self._interrupt()

    @operation(needs="retraction", weight=3, when=lambda t, request, others=0: others >= 0 and _is_running(t, request))
    def retract(self, request: str, others: int = 0) -> None:
        """Ask a running request to give its memory back, and then so many others, the one that came first
        before the next."""
        running = [life.name for life in self.model.running() if not life.leaving and life.name != request]
        for name in (request, *running[:others]):
            self.must(self.subject.retract, name)
            self.model.asked_back.add(name)
        self._interrupt()

    @operation(needs="denial", weight=1, when=lambda t, count: count > 0, count=(1, 2))
    def deny(self, count: int) -> None:
        """Let the next attempts to allocate find nothing."""
        self.must(self.subject.deny, count)
        self._was_denied = True

    @operation(needs="failures", weight=2, when=_can_fail)
    def fail(self, request: str) -> None:
        """Let the next answer about a running request report that its computation failed."""
        self.model.lives[request].failing = True

    @operation(needs="losses", weight=2, when=lambda t, request: t.config.losses and _is_live(t, request))
    def poison(self, request: str) -> None:
        """Let every step fail that has this request, from now on."""
        self.model.lives[request].poisoned = True

    def _fails(self) -> bool:
        """Return whether the oldest step has a request that lets it fail."""
        return any(part.life.poisoned and part.is_present for part in self.model.flights[0].parts)

    @operation(needs="losses", weight=3, when=lambda t: t.config.losses and bool(t.model.flights))
    def lose(self) -> None:
        """Let the oldest step fail as a whole, and with it those launched behind it."""
        m, model = self.moment, self.model
        oldest = model.flights[0]
        m.lost_flights = model.flights
        # Its answer may still come, much too late.
        model.last_answer = StepAnswer(oldest.number, [STOP] * len(oldest.chunks), [[[STOP]] * len(oldest.rows)])
        for flight in model.flights:
            self.device.spoil(flight)
        if self._recovery is not None:
            m.loss = self._recovery.fail(model.flights, model.running())
        events = self.must(self.subject.lose, oldest.number)
        model.lost, model.flights = model.lost + model.flights, []
        read_events(self, events)
        self._was_lost = True
        self._observe()
        model.retractions_since_progress = 0
        model.decisions.append(("lose", m.after.waiting, m.after.running))

    @operation(needs="losses", weight=3, when=lambda t: bool(t.model.lost))
    def resume(self) -> None:
        """Resume after a loss: the device is quiet again."""
        self.must(self.subject.resume)
        self.model.lost = []
        self.model.committed = self.model.launched

    @operation(needs="restarts", weight=3, when=lambda t: bool(t.model.lost))
    def restart(self) -> None:
        """Resume after a loss with a new device, which has no KV."""
        self.must(self.subject.restart)
        self.device.empty()
        self.model.lost, self.model.committed = [], self.model.launched
        self._observe()
        self.model.retractions_since_progress = 0
        self.model.decisions.append(("restart", self.moment.after.waiting))

    # -- the end ------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Serve all requests to their ends, within a bound; then nothing may be held."""
        if self.model.lost:
            self.resume()
        lives = self.model.lives.values()
        self.run(50 + sum(10 * (len(life.wish.prompt) + life.promise) + 60 * life.poisoned for life in lives))
        self.begin("drained")
        self.moment.drained = True
        self._observe()
        self.check()

    def describe(self) -> str:
        m = self.moment
        if m.promise is not None:
            return f"accepted, {m.promise} tokens at most"
        if m.asked:
            return shown(m.flight)
        parts = [f"{name} gets {tokens}" for name, tokens in m.delivered.items()]
        parts += [f"{end.request} ends ({end.reason})" for end in m.ends]
        return "; ".join(parts) or "done"


PLAN, COMMIT, LOSE, RESUME = EngineTrial.plan(), EngineTrial.commit(), EngineTrial.lose(), EngineTrial.resume()
