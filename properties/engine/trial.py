"""The engine's trial: the suite is its client and its device, and recounts everything after each operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from ..harness.trial import Refused
from . import operations as ops
from .contract import Answer, Wish
from .language import STOP, prompt_of
from .model import RUNNING, Flight, Life
from .reading import read_events, read_step
from .rules import decision, limits, shown, verdict
from .watch import EngineWatch

PLAN, COMMIT = ops.Plan(), ops.Commit()


class EngineTrial(EngineWatch):
    """`subject` under operations."""

    # -- clients ------------------------------------------------------------------------------------------------------

    def _submit(self, op: ops.Submit) -> bool:
        if op.request in self.model.lives:
            return False
        prompt = prompt_of(op.stem, op.length, op.variant)
        stops = (STOP,) if op.stops else ()
        wish = Wish(
            op.request, prompt, op.max_tokens, op.priority, op.seed, stops, op.marks and self.capabilities.marks
        )
        self._begin(op)
        self._ask_for(wish, *verdict(self.config, wish, len(self.model.waiting())))
        return self._end()

    def _ask_for(self, wish: Wish, impossible: str, must_accept: str) -> None:
        m, model = self.moment, self.model
        m.wish, m.impossible, m.must_accept = wish, impossible, must_accept
        model.num_attempts += 1
        answer = self.ask(self.subject.submit, wish)
        if answer is None or answer is False or isinstance(answer, Refused):
            m.refusal = answer.reason if isinstance(answer, Refused) else "without a reason"
            model.num_refused += 1
        else:
            m.promise = self.integer(answer, "submit()")
            if wish.request not in model.lives:
                model.num_accepted += 1
                model.lives[wish.request] = Life(wish, model.num_attempts, m.promise, self.config.model)
        model.decisions.append(("submit", wish.request, m.promise))
        self._interrupt()

    def _submit_again(self, op: ops.SubmitAgain) -> bool:
        if op.request not in self.model.lives:
            return False
        self._begin(op)
        wish = Wish(op.request, prompt_of(5, 2, 1), 2)
        self._ask_for(wish, "a live request has this name", "")
        return self._end()

    def _submit_impossible(self, op: ops.SubmitImpossible) -> bool:
        config, name = self.config, "impossible"
        wishes = (
            (Wish(name, [], 1), "the prompt is empty"),
            (Wish(name, prompt_of(0, 2, 0), 0), "no output is wanted"),
            (Wish(name, prompt_of(0, 2, 0), -1), "the output is negative"),
            (Wish(name, prompt_of(0, config.context_len, 0), 1), "the prompt fills the context"),
            (Wish(name, prompt_of(0, config.num_slots, 0), 1), "the prompt fills the pool"),
        )
        wish, why = wishes[op.kind % len(wishes)]
        self._begin(op)
        self._ask_for(wish, why, "")
        return self._end()

    def _abort(self, op: ops.Abort) -> bool:
        life = self.model.lives.get(op.request)
        if life is None or life.aborted:
            return False
        m = self._begin(op)
        life.aborted = True
        m.abort_events = read_events(self, self.must(self.subject.abort, op.request))
        life.leaving = life.is_live
        self._interrupt()
        ends, delivered = m.ends, m.delivered
        m.second_abort_events = read_events(self, self.must(self.subject.abort, op.request))
        m.ends, m.delivered = ends, delivered
        return self._end()

    def _abort_unknown(self, op: ops.AbortUnknown) -> bool:
        if op.request in self.model.lives:
            return False
        m = self._begin(op)
        m.abort_events = read_events(self, self.must(self.subject.abort, op.request))
        return self._end()

    def _interrupt(self) -> None:
        """A new plan could differ: steps that have not begun run one round only. The oldest may have run any number."""
        if not self.capabilities.blocks or not self.model.flights:
            return
        newest = self.integer(self.must(self.subject.interrupts), "interrupts()")
        for flight in self.model.flights[1:]:
            if flight.number <= newest:
                flight.interrupted = True

    # -- steps --------------------------------------------------------------------------------------------------------

    def _plan(self, op: ops.Plan) -> bool:
        m, model = self._begin(op), self.model
        m.asked = True
        if self._asked_back:
            m.asked_back = frozenset(self._asked_back)
        m.was_lost = self._was_lost
        m.is_disturbed = self._was_denied or self._was_lost or bool(self._asked_back)
        m.was_waiting = model.waiting()
        view = self._step(self.subject.plan)
        if view is not None and not isinstance(view, Refused):
            m.flight = read_step(self, view)
        if m.admitted and self._has_cache and m.before.cached is not None:
            size, cells = self.config.page_size, self.device.cells
            m.cached_before = frozenset([cells[page * size + size - 1] for page in m.before.cached])
        self._observe()
        if m.flight is not None:
            self._launch(m.flight)
        if m.admitted:
            self._overtake(m)
        if self._asked_back:
            self._asked_back -= {life.name for life in m.retracted}
            self._asked_back &= set(m.after.running)
        model.decisions.append(decision(m))
        return True

    def _step(self, method: Callable[..., object], *arguments: object) -> object:
        """Plan or commit, with nothing wrong. What fails at a limit of what is legal is a matter of an invariant."""
        m = self.moment
        try:
            return method(*arguments)
        except Exception as error:
            m.degenerate = limits(self.model, m.committed)
            if not m.degenerate or isinstance(error, NotImplementedError):
                raise self._accident(method, error) from error
            m.refusal = f"{type(error).__name__}: {error}"
            return Refused(m.refusal)

    def _commit(self, op: ops.Commit) -> bool:
        model = self.model
        if not model.flights:
            return False
        m = self._begin(op)
        flight = model.flights[0]
        limit = 1 if flight.interrupted else max(1, min(op.rounds, flight.rounds))
        m.committed, m.answer = flight, self.device.execute(flight, model, limit)
        model.last_answer = m.answer
        m.gone = tuple([part.life.name for part in (*flight.chunks, *flight.rows) if part.stay != part.life.stay])
        m.expected = self._expected(flight, m.answer)
        events = self._step(self.subject.commit, m.answer)
        if isinstance(events, Refused):
            self._observe()
            return True
        model.flights.pop(0)
        model.committed = max(model.committed, flight.number)
        self._settle(flight, m.answer)
        read_events(self, events)
        self._recount_flight()
        if self.capabilities.counters and (m.ends or m.gone or (flight.rows and flight.steps == 0)):
            m.counters = self.integers(self.must(self.subject.counters), "counters()")
        self._follow_progress(m, flight)
        model.decisions.append(("answer", [(name, len(got), why) for name, (got, why) in m.expected.items()]))
        self._observe()
        return True

    def _expected(self, flight: Flight, answer: Answer) -> dict[str, tuple[list[int], str]]:
        """What each request that is still there gets, by the contract."""
        expected: dict[str, tuple[list[int], str]] = {}
        model = self.model
        for chunk, token in zip(flight.chunks, answer.first, strict=True):
            life = chunk.life
            if chunk.is_last and chunk.stay == life.stay:
                expected[life.name] = model.cut(life, len(life.delivered), [token])
        for number, row in enumerate(flight.rows):
            life = row.life
            if row.stay != life.stay:
                continue
            got, reason = expected.get(life.name, ([], ""))
            # Who left while a block ran, or met an error in it, gets what came before its last round.
            cut_short = life.leaving or life.name in answer.failed
            for runs in answer.runs[:-1] if cut_short else answer.runs:
                if not reason:
                    kept, reason = model.cut(life, len(life.delivered) + len(got), runs[number])
                    got = got + kept
            expected[life.name] = (got, reason)
        for name in [name for name in expected if model.lives[name].leaving]:
            expected[name] = (expected[name][0], "abort")
        for name in answer.failed:
            if not model.lives[name].leaving:
                expected[name] = (expected[name][0] if len(answer.runs) > 1 else [], "error")
        return expected

    def _commit_again(self, op: ops.CommitAgain) -> bool:
        if self.model.last_answer is None:
            return False
        return self._commit_wrong(op, self.model.last_answer)

    def _commit_early(self, op: ops.CommitEarly) -> bool:
        if len(self.model.flights) < 2:
            return False
        flight = self.model.flights[1]
        runs = [[[STOP] for _ in flight.rows]] if flight.rows else []
        beside = [[[0] for _ in flight.rows]] if flight.rows else []
        first = [STOP for _ in flight.chunks]
        return self._commit_wrong(op, Answer(flight.number, first, runs, first, beside))

    def _commit_wrong(self, op: ops.Operation, answer: Answer) -> bool:
        m = self._begin(op)
        events = self.ask(self.subject.commit, answer)
        if events is None or isinstance(events, Refused):
            m.refusal = events.reason if isinstance(events, Refused) else "None"
        else:
            read_events(self, events)
        return self._end()

    def _run(self, op: ops.Run) -> bool:
        """Cycles of the loop that every driver has; each of its operations is checked like any other."""
        done = False
        for _ in range(op.cycles):
            while len(self.model.flights) < self.config.depth:
                self._inner(PLAN)
                done = True
                if self.moment.flight is None:
                    break
            if not self.model.flights:
                break
            self._inner(COMMIT)
        return done

    def _inner(self, operation: ops.Operation) -> None:
        """An operation inside another one."""
        self.actions[type(operation)](self, operation)
        self.num_operations += 1
        self.executed[type(operation)] = self.executed.get(type(operation), 0) + 1
        self.check()

    # -- what disturbs ------------------------------------------------------------------------------------------------

    def _set_steps(self, op: ops.SetSteps) -> bool:
        steps = self.config.candidates[op.number % len(self.config.candidates)]
        if steps == self.model.steps:
            return False
        self._begin(op)
        self.must(self.subject.set_steps, steps)
        self.model.steps = steps
        self._interrupt()
        return self._end()

    def _retract(self, op: ops.Retract) -> bool:
        life = self.model.lives.get(op.request)
        if life is None or life.state is not RUNNING or life.leaving:
            return False
        self._begin(op)
        self.must(self.subject.retract, op.request)
        self._asked_back.add(op.request)
        self._interrupt()
        return self._end()

    def _deny(self, op: ops.Deny) -> bool:
        if op.count < 1:
            return False
        self._begin(op)
        self.must(self.subject.deny, op.count)
        self._was_denied = True
        return self._end()

    def _fail(self, op: ops.Fail) -> bool:
        life = self.model.lives.get(op.request)
        if life is None or life.state is not RUNNING or life.leaving or life.failing:
            return False
        self._begin(op)
        life.failing = True
        return self._end()

    def _lose(self, op: ops.Lose) -> bool:
        model = self.model
        if not model.flights:
            return False
        m = self._begin(op)
        oldest = model.flights[0]
        m.lost_flights = model.flights[:]
        # Its answer may still come, much too late.
        model.last_answer = Answer(oldest.number, [STOP] * len(oldest.chunks), [[[STOP]] * len(oldest.rows)])
        for flight in model.flights:
            self.device.spoil(flight)
        events = self.must(self.subject.lose, oldest.number)
        model.lost += model.flights
        model.flights = []
        read_events(self, events)
        self._was_lost = True
        self._observe()
        model.decisions.append(("lose", m.after.waiting, m.after.running))
        return True

    def _resume(self, op: ops.Resume) -> bool:
        if not self.model.lost:
            return False
        self._begin(op)
        self.must(self.subject.resume)
        self.model.lost = []
        self.model.committed = self.model.launched
        return self._end()

    actions: ClassVar = {
        ops.Submit: _submit,
        ops.SubmitAgain: _submit_again,
        ops.SubmitImpossible: _submit_impossible,
        ops.Abort: _abort,
        ops.AbortUnknown: _abort_unknown,
        ops.Plan: _plan,
        ops.Commit: _commit,
        ops.Run: _run,
        ops.CommitAgain: _commit_again,
        ops.CommitEarly: _commit_early,
        ops.SetSteps: _set_steps,
        ops.Retract: _retract,
        ops.Deny: _deny,
        ops.Fail: _fail,
        ops.Lose: _lose,
        ops.Resume: _resume,
    }

    # -- the end ------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Serve everybody to the end, within a bound; then nobody may hold anything."""
        if self.model.lost:
            self.apply(ops.Resume())
        lives = list(self.model.lives.values())
        bound = 50 + 10 * sum(len(life.wish.prompt) + life.promise for life in lives)
        self.apply(ops.Run(bound))
        m = self._begin("drained")
        m.drained = True
        self._observe()
        self.check()

    def describe(self) -> str:
        m = self.moment
        if m.refusal is not None:
            return f"refused ({m.refusal})"
        if m.promise is not None:
            return f"accepted, {m.promise} tokens at most"
        if m.asked:
            return shown(m.flight)
        parts = [f"{name} gets {tokens}" for name, tokens in m.delivered.items()]
        parts += [f"{end.request} ends ({end.reason})" for end in m.ends]
        return "; ".join(parts) or "done"
