"""What an engine's trial keeps track of around every operation: who is where, whose page is whose, how long every row is."""

from __future__ import annotations

from collections.abc import Iterable

from ..harness.trial import Trial, Violation
from ..invariants.registry import Invariant
from . import operations as ops
from .contract import METHODS, Answer, Engine, EngineCapabilities, ServingConfig
from .device import Device
from .model import RUNNING, WAITING, EngineModel, Flight, Life
from .moment import Moment, Observation
from .reading import names
from .rules import ahead_of, written_pages


class EngineWatch(Trial):
    """`ahead[S]`: slots past its length that a round of S steps may write."""

    methods = METHODS

    def __init__(
        self,
        subject: Engine,
        config: ServingConfig,
        capabilities: EngineCapabilities,
        invariants: Iterable[Invariant],
    ) -> None:
        super().__init__(subject, config, capabilities, invariants)
        self.model = EngineModel(config)
        self.ahead = {steps: ahead_of(config, steps) for steps in config.candidates}
        self.device = Device(config, capabilities, self.ahead)
        self.num_steps = 0
        self._all_pages = frozenset(range(1, config.num_pages + 1))
        self._has_cache = capabilities.prefix_cache and config.prefix_cache
        self._asked_back: set[str] = set()
        self._owners: dict[int, str] = {}
        self._was_denied = self._was_lost = False
        self.moment = Moment(config, capabilities, self.model, self.ahead, self.device.cells)
        self._observe()
        self.check()

    # -- around every operation ---------------------------------------------------------------------------------------

    def _begin(self, operation: ops.Operation) -> Moment:
        last = self.moment
        m = self.moment = Moment(
            self.config, self.capabilities, self.model, self.ahead, last.cells, operation, last.after
        )
        self.operation = operation
        return m

    def _end(self) -> bool:
        self._observe()
        self.transcript.append(self.moment.refusal)
        return True

    def _observe(self) -> None:
        """Ask the engine for all that it shows, and recount the pages."""
        subject, has, m = self.subject, self.capabilities, self.moment
        slots = free = cached = None
        try:
            method = subject.waiting
            waiting = names(self, method(), "waiting()")
            method = subject.running
            running = names(self, method(), "running()")
            if has.slots:
                integers, method = self.integers, subject.slots_of
                slots = {name: integers(method(name), "slots_of()") for name in running}
                method = subject.free_pages
                free = integers(method(), "free_pages()")
                if self._has_cache:
                    method = subject.cached_pages
                    cached = integers(method(), "cached_pages()")
        except Violation:
            raise
        except Exception as error:
            raise self._accident(method, error) from error
        m.after = Observation(waiting, running, slots, free, cached)
        self._follow_states(waiting)
        if has.slots:
            self._follow_pages(m.after)

    def _follow_states(self, waiting: tuple[str, ...]) -> None:
        """Who ran and waits now has been retracted."""
        lives = self.model.lives
        for name in waiting:
            if name in lives and lives[name].state is RUNNING:
                self.retract(lives[name])

    def retract(self, life: Life) -> None:
        """A request that ran waits again."""
        self.moment.retracted.append(life)
        self.depart(life, "retracted")
        life.retractions += 1
        life.depart(WAITING)
        self.model.holding = True
        if life.name not in self._asked_back:
            self.model.retractions_since_progress += 1

    def depart(self, life: Life, why: str) -> None:
        """Remember whose pages those are that must come back."""
        slots = self.moment.before.slots or {}
        size = self.config.page_size
        for page in {slot // size for slot in slots.get(life.name, ())}:
            self.model.lingering.setdefault(page, (0, life.name, why))

    def _follow_pages(self, shown: Observation) -> None:
        """Who has which page. Those that are neither free, nor cached, nor anybody's wait for a step; note one that waits for none."""
        size, model, m = self.config.page_size, self.model, self.moment
        before = m.before
        if shown.slots == before.slots and shown.free == before.free and shown.cached == before.cached:
            # Plans and commits change what is in flight; else the steps see the same pages as before.
            m.is_still = shown.running == before.running and not m.asked and m.committed is None
            if not model.lingering:
                m.owners = self._owners
                return
        owners: dict[int, str] = {}
        for name, slots in shown.slots.items():
            owners.update(dict.fromkeys(slots if size == 1 else [slot // size for slot in slots[::size]], name))
        if shown.cached:
            owners.update(dict.fromkeys(shown.cached, "*"))
        owners.update(dict.fromkeys(shown.free, ""))
        m.owners = self._owners = owners
        if shown.free != m.before.free:
            self.device.forget(set(shown.free).difference(m.before.free or ()))
        if owners.keys() == self._all_pages:
            model.lingering = {}
            return
        if not owners.keys() <= self._all_pages:
            foreign = sorted(owners.keys() - self._all_pages)
            raise self.misbehaviour("TYPE", f"page {foreign[0]} is in use", f"pages 1 … {self.config.num_pages}")
        lingering = {}
        for page in sorted(self._all_pages - owners.keys()):
            step, whose, why = model.lingering.get(page, (0, "nobody", ""))
            lingering[page] = (step or model.launched, whose, why)
            if lingering[page][0] <= model.committed and m.lost is None:
                m.lost = (page, whose, why)
        model.lingering = lingering

    # -- steps in flight ----------------------------------------------------------------------------------------------

    @staticmethod
    def _overtake(m: Moment) -> None:
        """Whoever stands first in its class, and is passed by a later one, remembers it."""
        m.overtaken = []
        waiting = sorted((*m.was_waiting, *m.retracted), key=lambda life: life.number)
        for entered, _ in m.admitted:
            waiting = [life for life in waiting if life is not entered]
            for front in {life.wish.priority: life for life in reversed(waiting)}.values():
                if front.number < entered.number:
                    front.overtaken += 1
                    m.overtaken.append(front)

    def _launch(self, flight: Flight) -> None:
        model, size, slots = self.model, self.config.page_size, self.moment.after.slots
        model.launched = max(model.launched, flight.number)
        for chunk in flight.chunks:
            life = chunk.life
            life.launched = chunk.start + len(chunk.tokens)
            life.decoding = chunk.is_last
        if slots is not None:
            for life in flight.lives():
                flight.slots[life.name] = slots.get(life.name, ())
            flight.writes = written_pages(flight, size)
        model.flights.append(flight)
        self.num_steps += 1

    def _settle(self, flight: Flight, answer: Answer) -> None:
        """The committed lengths after this step, and the counters."""
        model = self.model
        for number, chunk in enumerate(flight.chunks):
            life = chunk.life
            if chunk.stay == life.stay:
                life.computed = chunk.start + len(chunk.tokens)
                if chunk.is_last:
                    life.kv = life.computed
                    if life.wish.marks and life.name not in answer.failed:
                        life.marks.append(answer.first_marks[number])
        for number, row in enumerate(flight.rows):
            life = row.life
            if row.stay != life.stay:
                continue
            got, reason = self.moment.expected[life.name]
            life.kv += len(got)
            counted = len(answer.runs) - (reason in ("abort", "error"))
            model.verified += counted
            model.proposed += counted * (self.config.nodes(flight.steps) - 1)
            model.correct += sum(len(runs[number]) - 1 for runs in answer.runs[:counted])
            if life.wish.marks:
                beside = [mark for marks in answer.marks for mark in marks[number]]
                life.marks += beside[: len(got)]

    def _recount_flight(self) -> None:
        """The lengths at which the next step begins are known now, also of those who have left; it may write less than was feared."""
        if not self.model.flights:
            return
        flight = self.model.flights[0]
        for number, row in enumerate(flight.rows):
            last_start = row.row.length
            if flight.rounds > 1 and not row.row.over:
                last_start += (flight.rounds - 1) * (flight.steps + 1)
                last_start = max(row.row.length, min(last_start, row.life.end_kv - 1))
            reach = min(row.reach, last_start + self.ahead[flight.steps])
            flight.rows[number] = row._replace(latest=row.row.length, reach=reach)
        if self.capabilities.slots:
            flight.writes = written_pages(flight, self.config.page_size)

    def _follow_progress(self, m: Moment, flight: Flight) -> None:
        if any(row.life.name in m.delivered for row in flight.rows):
            self.model.holding = False
        if m.delivered or m.ends:
            self.model.retractions_since_progress = 0
