"""The step controller's trial: rounds are launched, results come back late, in part, or damaged; after each, all choices are looked at."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from ..harness.trial import Refused, Trial
from ..invariants.registry import Invariant
from . import operations as ops
from .contract import METHODS, StepController, StepsCapabilities, StepsConfig
from .host import RecordingBuilder
from .moment import Built, Moment, Offered, Shown, Stretch, Told
from .processes import PROCESSES, accepted, correct_drafts
from .table import DAMAGES, damaged, read_table, reloaded

MAX_IN_FLIGHT = 2
MAX_REPEATED = 64
PHASE_ROUNDS = 400
GOODPUT_PHASE_ROUNDS = 16_000
SETTLING_ROUNDS = 10_000
"""Who has spent its ten switches on what came before the stretch may make the next one so many rounds later. Only then it is judged."""

GOODPUT_OFFER_ROUNDS = 20_000
MAX_JUDGED = 2
FEWEST_ROWS = 4
"""Of a stretch whose throughput is judged: one row tells too little in so many rounds to be right to three per cent."""

MIN_GAIN = 1.1
"""How much faster than plain decoding the best steps must be, all drafts accepted, before a controller that knows the cost must draft."""

GARBAGE: dict[str, Callable[[int], float]] = {
    "nan": lambda steps: math.nan,
    "infinite": lambda steps: math.inf,
    "minus-infinite": lambda steps: -math.inf,
    "negative": lambda steps: -1,
    "too-many": lambda steps: steps + 1,
    "a-bit-too-many": lambda steps: steps + 0.5,
    "huge": lambda steps: 10**30,
    "huge-integer": lambda steps: 2**63 - 1,
    "minus-huge": lambda steps: -(2**63),
}


class StepControllerTrial(Trial):
    """`subject` under operations. Batch sizes other than those of `looked_at` are legal, too; these stand for all."""

    methods = METHODS

    def __init__(
        self,
        subject: StepController,
        config: StepsConfig,
        capabilities: StepsCapabilities,
        invariants: Iterable[Invariant],
    ) -> None:
        super().__init__(subject, config, capabilities, invariants)
        self.table = read_table(config.table)
        self.batch_sizes = looked_at(config)
        self.in_flight: list[tuple[int, int, tuple[int, ...]]] = []
        self.stretches: list[tuple[object, Stretch]] = []
        self.build = RecordingBuilder()
        self.graphs: dict[tuple[int, int, int], str] = {}
        self.captured = () if capabilities.runtime else config.captured  # known once it is attached
        self._shown: Shown | None = None
        self._begin("make")
        self._end()
        self.check()
        if capabilities.runtime:
            self._attach(config.fail_at)

    # -- around every operation ---------------------------------------------------------------------------------------

    def _begin(self, operation: object) -> Moment:
        candidates = tuple(self._candidates(batch_size) for batch_size in self.batch_sizes)
        m = self.moment = Moment(self.config, self.capabilities, self.batch_sizes, candidates, operation)
        m.before = self._shown
        m.update_interval = self.table.update_interval
        m.bounded = self.capabilities.goodput or self.table.min_dwell_batches > 0
        return m

    def _end(self) -> bool:
        m = self.moment
        self._shown = m.after = self._look()
        m.graphs = self._each_round(self._graph_due) if self.capabilities.runtime else None
        self.transcript.append((str(m.operation), m.refusal, m.after.steps))
        return True

    def _candidates(self, batch_size: int) -> tuple[int, ...]:
        """Those that a round of so many rows may have now."""
        return self.table.candidates[self.table.range_of(batch_size, self.captured)]

    def _kv_tokens(self, batch_size: int) -> int:
        return batch_size * self.config.kv_per_row

    def _steps_for(self, batch_size: int) -> int:
        answer = self.must(self.subject.steps_for, batch_size, self._kv_tokens(batch_size))
        return self.integer(answer, f"steps_for({batch_size}, …)")

    def _look(self) -> Shown:
        """Ask for all that is shown."""
        subject, has = self.subject, self.capabilities
        steps = tuple([self._steps_for(batch_size) for batch_size in self.batch_sizes])
        averages = counted = state = None
        if has.averages:
            averages = tuple([self._average(batch_size) for batch_size in self.batch_sizes])
        if has.counters:
            counted = tuple([self._count(number) for number in self._counted()])
        if has.inspection:
            state = self._frozen(self.must(subject.state), "state()")
        return Shown(steps, state, averages, counted, self._each_round(self._graph) if has.runtime else None)

    def _each_round(self, find: Callable[[int, int], object]) -> tuple[object, ...]:
        """`find(steps, batch_size)` for every batch size and each of its candidates."""
        return tuple(find(steps, size) for size in self.batch_sizes for steps in self._candidates(size))

    def _graph(self, steps: int, batch_size: int) -> object:
        answer = self.ask(self.subject.graph, steps, batch_size)
        return answer.reason if isinstance(answer, Refused) else answer

    def _graph_due(self, steps: int, batch_size: int) -> str | None:
        """The graph that a round must find: the one that was built for the captured size it is padded to."""
        size = min((size for size in self.captured if size >= batch_size), default=0)
        return self.graphs.get((steps, steps + 1, size))

    def _average(self, batch_size: int) -> float:
        answer = self.must(self.subject.average, batch_size)
        if isinstance(answer, bool) or not isinstance(answer, int | float):
            raise self.misbehaviour("TYPE", f"average({batch_size}) is {answer!r}", "a number")
        if not math.isfinite(answer):
            self.moment.unfinite = f"average({batch_size}) is {answer}"
        return float(answer)

    def _counted(self) -> Sequence[object]:
        answer = self.must(self.subject.counted)
        if not isinstance(answer, list | tuple) or len(answer) != 4:
            raise self.misbehaviour("TYPE", f"counted() is {answer!r}", "four numbers")
        return answer

    def _count(self, number: object) -> int:
        # A sum of correct drafts may be a float that is whole.
        if isinstance(number, float) and number.is_integer():
            return int(number)
        return self.integer(number, "a number of counted()")

    def _frozen(self, value: object, place: str) -> object:
        """The state as a value that nothing can change; notes the first number that is not finite."""
        if isinstance(value, dict):
            return tuple((str(key), self._frozen(item, f"{place}[{key!r}]")) for key, item in value.items())
        if isinstance(value, list | tuple):
            return tuple(self._frozen(item, f"{place}[{at}]") for at, item in enumerate(value))
        if isinstance(value, float) and not math.isfinite(value):
            self.moment.unfinite = self.moment.unfinite or f"{place} is {value}"
            return str(value)
        if value is None or isinstance(value, int | float | str):
            return value
        raise self.misbehaviour(
            "TYPE", f"{place} is {value!r}", "numbers, strings, None, lists and dictionaries of them"
        )

    # -- rounds -------------------------------------------------------------------------------------------------------

    def _launch(self, batch_size: int) -> int | None:
        """Choose the steps of a round, as a launch does; None if they are none that it may have."""
        steps = self._steps_for(batch_size)
        if steps not in self._candidates(batch_size):
            self.moment.stray_choice = (batch_size, steps, self._candidates(batch_size))
            return None
        return steps

    def _tell(self, correct: Sequence[float], batch_size: int, executed: int, valid: bool = True) -> bool:
        """Tell one result; whether it was taken. What is counted is added up in the moment."""
        m = self.moment
        answer = self.ask(self.subject.observe, correct, batch_size, executed)
        if isinstance(answer, Refused) or answer is False:
            m.refusal = answer.reason if isinstance(answer, Refused) else "False"
            return False
        if valid and correct:
            calls, rows, total, proposed = m.added
            m.added = (
                calls + 1,
                rows + len(correct),
                total + int(sum(correct)),
                proposed + executed * len(correct),
            )
        return True

    def _told(self, correct: Sequence[float], batch_size: int, executed: int, valid: bool = True) -> None:
        """Tell a single result, whose effect is looked at by itself."""
        m = self.moment
        m.told = Told(batch_size, executed, self._steps_for(batch_size), tuple(correct))
        where = self.table.range_of(batch_size, self.captured)
        m.same_slot = tuple(self.table.range_of(size, self.captured) == where for size in self.batch_sizes)
        m.alpha = self.table.ema_alpha
        self._tell(correct, batch_size, executed, valid)

    def _round(self, op: ops.Round) -> bool:
        if op.batch_size < 1 or not op.runs or min(op.runs) < 0 or len(self.in_flight) >= MAX_IN_FLIGHT:
            return False
        self._begin(op)
        steps = self._launch(op.batch_size)
        if steps is not None:
            correct = tuple(min(op.runs[row % len(op.runs)], steps) for row in range(op.batch_size))
            self.in_flight.append((op.batch_size, steps, correct))
        return self._end()

    def _deliver(self, op: ops.Deliver) -> bool:
        if not self.in_flight or op.gone < 0:
            return False
        self._begin(op)
        batch_size, steps, correct = self.in_flight.pop(0)
        self._told(list(correct[: max(len(correct) - op.gone, 0)]), batch_size, steps)
        return self._end()

    def _idle(self, op: ops.Idle) -> bool:
        if op.batch_size < 1:
            return False
        self._begin(op)
        self._told([], op.batch_size, self._steps_for(op.batch_size))
        return self._end()

    def _observe(self, op: ops.Observe) -> bool:
        if op.batch_size < 1 or not op.runs or min(op.runs) < 0 or not 0 <= op.steps <= self.table.union[-1]:
            return False
        self._begin(op)
        self._told([min(run, op.steps) for run in op.runs], op.batch_size, op.steps)
        return self._end()

    def _garbage(self, op: ops.Garbage) -> bool:
        if op.batch_size < 1 or op.kind not in GARBAGE:
            return False
        m = self._begin(op)
        steps = self._steps_for(op.batch_size)
        m.garbage = GARBAGE[op.kind](steps)
        self._told([0, m.garbage], op.batch_size, steps, valid=False)
        return self._end()

    def _repeat(self, op: ops.Repeat) -> bool:
        if op.batch_size < 1 or not op.runs or min(op.runs) < 0 or not 0 < op.rounds <= MAX_REPEATED:
            return False
        self._begin(op)
        for _ in range(op.rounds):
            steps = self._launch(op.batch_size)
            correct = [min(op.runs[row % len(op.runs)], steps or 0) for row in range(op.batch_size)]
            if steps is None or not self._tell(correct, op.batch_size, steps):
                break
        return self._end()

    # -- long stretches -------------------------------------------------------------------------------------------------

    def _phase(self, op: ops.Phase) -> bool:
        if op.process not in PROCESSES or op.batch_size < 1:
            return False
        if self.capabilities.goodput and (op.batch_size < FEWEST_ROWS or len(self.stretches) >= MAX_JUDGED):
            return False  # each of them is long
        m = self._begin(op)
        rounds = GOODPUT_PHASE_ROUNDS if self.capabilities.goodput else PHASE_ROUNDS
        lift, size = self.config.lift, op.batch_size
        history: list[int] = []
        for at in range(rounds):
            steps = self._launch(size)
            if steps is None:
                break
            history.append(steps)
            if not self._tell(correct_drafts(op.process, size, rounds, lift, steps)[at].tolist(), size, steps):
                break
        else:
            m.stretch = self._stretch(op, history)
            self.stretches.append((op, m.stretch))
        return self._end()

    def _stretch(self, op: ops.Phase, history: Sequence[int]) -> Stretch:
        """What a phase is judged by: all of it, or what comes after settling, and what fixed steps would have reached meanwhile."""
        size, lift, rounds = op.batch_size, self.config.lift, len(history)
        begin = SETTLING_ROUNDS if self.capabilities.goodput else 0
        judged = history[begin:]
        candidates = self._candidates(size)
        times = {steps: self._time_ns(steps, size) for steps in candidates}
        sums = {steps: accepted(op.process, size, rounds, lift, steps) for steps in candidates}
        rates = {
            steps: (len(judged) * size + int(sums[steps][begin:].sum())) * 1e9 / (len(judged) * times[steps])
            for steps in candidates
        }
        tokens = len(judged) * size + sum(int(sums[steps][begin + at]) for at, steps in enumerate(judged))
        rate = tokens * 1e9 / sum(times[steps] for steps in judged)
        return Stretch(op.process, size, candidates, tuple(judged), rates, rate)

    def _time_ns(self, steps: int, batch_size: int) -> int:
        return self.config.round_time_ns(steps, batch_size, self._kv_tokens(batch_size))

    def _offer(self, op: ops.Offer) -> bool:
        if op.batch_size < 1 or not self._ought_to_draft(op.batch_size):
            return False
        m = self._begin(op)
        limit = self._offer_limit()
        for rounds in range(limit + 1):
            steps = self._launch(op.batch_size)
            if steps is None or (m.offered is not None and m.offered.drafts):
                break
            m.offered = Offered(op.batch_size, rounds, steps > 0, limit)
            if steps or rounds == limit or not self._tell([0] * op.batch_size, op.batch_size, 0):
                break
        return self._end()

    def _offer_limit(self) -> int:
        """Rounds within which a controller must have tried to draft. 0 steps are told nothing, so that is all up to its probes."""
        if self.capabilities.goodput:
            return GOODPUT_OFFER_ROUNDS
        dwell = 10_000 if self.table.min_dwell_batches else 0
        return self.table.warmup_batches + 40 * self.table.update_interval + dwell

    def _ought_to_draft(self, batch_size: int) -> bool:
        """Whether there is something to choose from 0 upwards, and it pays, if the controller knows the cost."""
        candidates = self._candidates(batch_size)
        if candidates[0] > 0 or len(candidates) == 1:
            return False
        plain = self._time_ns(0, batch_size)
        gain = max((1 + steps) * plain / self._time_ns(steps, batch_size) for steps in candidates)
        return gain >= MIN_GAIN or not self.capabilities.goodput

    # -- graphs -----------------------------------------------------------------------------------------------------

    def _attach(self, fail_at: int) -> None:
        """Let it build its graphs; once more if that was to fail."""
        captured, build = self.config.captured, self.build
        ranges = self.table.candidates
        reachable = frozenset(
            (steps, steps + 1, size) for size in captured for steps in ranges[self.table.range_of(size, captured)]
        )
        for fails in (True, False) if 0 < fail_at <= len(reachable) else (False,):
            self.operation = "attach, and a build fails" if fails else "attach"
            m = self._begin(self.operation)
            build.built.clear()
            build.builds_to_failure = fail_at if fails else 0
            answer = self.ask(self.subject.attach, build, list(captured) or None)
            build.builds_to_failure = 0
            refusal = answer.reason if isinstance(answer, Refused) else "False" if answer is False else None
            if not fails:
                self.captured, self.graphs = captured, dict(build.built)
                m = self._begin(self.operation)
                m.built_keys = frozenset(build.built), reachable
            m.refusal, m.built = refusal, Built(fails, refusal)
            self._end()
            self.check()

    # -- another table ----------------------------------------------------------------------------------------------------

    def _reload(self, op: ops.Reload) -> bool:
        if op.update_interval < 1:
            return False
        table = reloaded(read_table(self.config.table), op.dropped, op.update_interval)
        answer = self.ask(self.subject.reload, table.text())
        refused = isinstance(answer, Refused) or answer is False
        if not refused:
            self.table = table
        m = self._begin(op)
        m.refusal = None if not refused else answer.reason if isinstance(answer, Refused) else "False"
        m.reload = "valid"
        return self._end()

    def _reload_broken(self, op: ops.ReloadBroken) -> bool:
        if op.how not in DAMAGES:
            return False
        m = self._begin(op)
        answer = self.ask(self.subject.reload, damaged(read_table(self.config.table), op.how))
        m.refusal = answer.reason if isinstance(answer, Refused) else "False" if answer is False else None
        m.reload = op.how
        return self._end()

    actions: ClassVar = {
        ops.Round: _round,
        ops.Deliver: _deliver,
        ops.Idle: _idle,
        ops.Observe: _observe,
        ops.Garbage: _garbage,
        ops.Repeat: _repeat,
        ops.Phase: _phase,
        ops.Offer: _offer,
        ops.Reload: _reload,
        ops.ReloadBroken: _reload_broken,
    }

    # -- the end --------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """All results arrive. Then every range is offered perfect drafts, and a last stretch is stationary."""
        while self.in_flight:
            self.apply(ops.Deliver(0))
        if self.capabilities.adaptive:
            for batch_size in self.batch_sizes:
                self.apply(ops.Offer(batch_size))
            number = self.num_operations % len(PROCESSES)
            batch_size = self.batch_sizes[number % len(self.batch_sizes)]
            self.apply(ops.Phase(PROCESSES[number], max(batch_size, FEWEST_ROWS)))

    def describe(self) -> str:
        m = self.moment
        if m.refusal is not None:
            return f"refused ({m.refusal})"
        if m.offered is not None:
            return f"-> drafts after {m.offered.rounds} rounds"
        if m.stretch is not None:
            s = m.stretch
            return f"-> {len(s.switches)} switches, settled at {s.settled} steps, {s.rate:,.0f} tokens per second"
        sizes = zip(self.batch_sizes, m.after.steps, strict=True)
        return "-> steps " + ", ".join(f"{steps} for {size} rows" for size, steps in sizes)


def looked_at(config: StepsConfig) -> tuple[int, ...]:
    """Batch sizes at both sides of every edge that routing has, at most eight."""
    edges = [*read_table(config.table).bounds, *(size + 1 for size in config.captured)]
    sizes = sorted({size for edge in edges for size in (edge - 1, edge) if 0 < size <= 64} | {1})
    return tuple(sizes[:8])
