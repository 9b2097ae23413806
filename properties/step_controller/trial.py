"""The step controller's trial: rounds are launched, results come back late, in part, or damaged;
after each, all choices are looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

from ..harness.operation import Operation, operation
from ..harness.trial import Refused, Trial
from . import invariants as invariants  # registers the checkers
from .contract import StepController, StepControllerCapabilities, StepControllerConfig
from .model import (
    GARBAGE,
    PROCESSES,
    RUNS,
    GaugeAccount,
    Offered,
    RecordingBuilder,
    Shown,
    StepControllerMoment,
    Stretch,
    VerifyResult,
    correct_drafts,
    looked_at,
)
from .reading import read_average, read_counted, read_expected, read_gauges, read_state
from .rule import DAMAGES, AverageRule, RuleTable, Undecided, damages, read_table, reloaded

MAX_IN_FLIGHT = 2
MAX_REPEATED = 64
PHASE_ROUNDS = 400
GOODPUT_PHASE_ROUNDS = 16_000
SETTLING_ROUNDS = 10_000
"""A controller that used up its ten switches before the stretch may make the next one so many rounds later.
The rest is judged."""

GOODPUT_OFFER_ROUNDS = 20_000
MAX_JUDGED = 2
FEWEST_ROWS = 4
"""Of a stretch whose throughput is judged: one row tells too little in so many rounds to be right to three per cent."""

MIN_GAIN = 1.1
"""How much faster than plain decoding the best steps must be, all drafts accepted, before a controller that knows the
cost must draft."""


def _small(config: StepControllerConfig, has: StepControllerCapabilities) -> list[int]:
    return [size for size in looked_at(config) if size <= 16] or [1]


def _judged(config: StepControllerConfig, has: StepControllerCapabilities) -> list[int]:
    return [size for size in _small(config, has) if size >= FEWEST_ROWS] or [FEWEST_ROWS]


def _rows(runs: Sequence[int], batch_size: int, steps: int, at: int | None = None) -> list[int]:
    """Return how many of `steps` drafts each row accepts, at most its run; or, in round `at` of several, another number
    in each round."""
    own = [runs[row % len(runs)] for row in range(batch_size)]
    return [min(run, steps) if at is None else (run + at) % (steps + 1) for run in own]


def _can_hold(t: StepControllerTrial, process: str, batch_size: int) -> bool:
    # With a known cost a stretch is long.
    can_judge = not t.capabilities.goodput or (batch_size >= FEWEST_ROWS and len(t.stretches) < MAX_JUDGED)
    return process in PROCESSES and can_judge


def _ought_to_draft(t: StepControllerTrial, batch_size: int) -> bool:
    """Return whether the controller can choose from 0 upwards, and drafting pays, if it knows the cost."""
    if batch_size < 1:
        return False
    candidates, plain = t.candidates(batch_size), t.time_ns(0, batch_size)
    gain = max((1 + steps) * plain / t.time_ns(steps, batch_size) for steps in candidates)
    has_choice = candidates[0] == 0 and len(candidates) > 1
    return has_choice and (gain >= MIN_GAIN or not t.capabilities.goodput)


class StepControllerTrial(Trial):
    """`subject` under operations. Batch sizes other than those of `looked_at` are legal, too; these stand for all."""

    contract = "step-controller"
    looks = ("state", "graph", "average", "counted")
    quick = 12_000
    limit_s = 10.0
    values: ClassVar = {
        "batch_size": looked_at,
        "runs": RUNS,
        "steps": lambda c, has: sorted({0, 1, *read_table(c.table).union}),
        "kind": tuple(GARBAGE),
        "dropped": (-1, 0, 1, 2),
        "update_interval": (5, 1, 2),
    }

    subject: StepController
    config: StepControllerConfig
    capabilities: StepControllerCapabilities
    moment: StepControllerMoment

    @classmethod
    def twin_config(cls, kind: str, config: StepControllerConfig) -> StepControllerConfig:
        """Return the other configuration of an invariant over two runs."""
        if kind == "again":
            return config
        if config.varied == "acceptance":
            return replace(config, lift=1)
        return replace(config, token_ns=4 * config.token_ns, draft_ns=2 * config.draft_ns)

    def prepare(self) -> None:
        self.batch_sizes = looked_at(self.config)
        # The captured sizes are known to a controller with a runtime once it is attached.
        self._route(read_table(self.config.table), () if self.capabilities.runtime else self.config.captured)
        self.in_flight: list[tuple[int, int, list[int]]] = []
        self.stretches: list[tuple[Operation, Stretch]] = []
        self.num_told: int = 0  # results with a row
        self.account = GaugeAccount(self.table.union)
        self.build = RecordingBuilder()
        self.graphs: dict[tuple[int, int, int], str] = {}
        self._shown: Shown | None = None
        # A dwell holds switches up; the rule does not know it.
        follows_rule = self.capabilities.average_rule and not self.table.min_dwell_batches
        self.rule = AverageRule(self.table, self.config.initial, self.capabilities.probes) if follows_rule else None
        super().prepare()
        if self.capabilities.runtime:
            self.check()
            self._attach()

    # -- around every operation ---------------------------------------------------------------------------------------

    def begin(self, operation: Operation | str) -> None:
        self.moment = StepControllerMoment(
            self.config, self.capabilities, self.batch_sizes, operation, self._shown, *self._routing
        )

    def _route(self, table: RuleTable, captured: tuple[int, ...]) -> None:
        """Expect the choices of this table, for batches padded to these sizes."""
        self.table, self.captured = table, captured
        self._routing = table, tuple(map(self.candidates, self.batch_sizes))
        if self.moment is not None:
            self.moment.table, self.moment.candidates = self._routing

    def end(self) -> None:
        m = self.moment
        self._shown = m.after = self._look()
        m.miscounted = read_gauges(self, self.account, self.rule) if self.capabilities.gauges else None
        for size, steps in zip(self.batch_sizes, m.after.steps, strict=True):
            self._compare(size, steps)
        if self.capabilities.sizing:
            most = read_table(self.config.table).union[-1] + 1
            m.reserved = self.integer(self.must(self.subject.reserved), "reserved()"), self.table.union[-1] + 1, most
        m.graphs = self._each_round(self._graph_due) if self.capabilities.runtime else None
        self.transcript.append((str(m.operation), m.refusal, m.after.steps))

    def candidates(self, batch_size: int) -> tuple[int, ...]:
        """Return the steps that a round of so many rows may have now."""
        return self.table.candidates[self._range_of(batch_size)]

    def time_ns(self, steps: int, batch_size: int) -> int:
        """Return the time of a round. With a captured graph all of its rows are computed; those that pad the batch have
        no KV."""
        size = min((size for size in self.captured if size >= batch_size), default=batch_size)
        return self.config.round_time_ns(steps, size, batch_size * self.config.kv_per_row)

    def _range_of(self, batch_size: int) -> int:
        return self.table.range_of(batch_size, self.captured)

    def _steps_for(self, batch_size: int) -> int:
        self.only_if(batch_size > 0)
        answer = self.must(self.subject.steps_for, batch_size, batch_size * self.config.kv_per_row)
        return self.account.choose(self.integer(answer, f"steps_for({batch_size}, …)"))

    def _look(self) -> Shown:
        has = self.capabilities
        return Shown(
            tuple(map(self._steps_for, self.batch_sizes)),
            read_state(self, self.must(self.subject.state), "state()") if has.inspection else None,
            tuple(read_average(self, size) for size in self.batch_sizes) if has.averages else None,
            read_counted(self) if has.counters else None,
            self._each_round(self._graph) if has.runtime else None,
        )

    def _each_round(self, find: Callable[[int, int], object]) -> tuple[object, ...]:
        """Return `find(steps, batch_size)` for every batch size and each of its candidates."""
        rounds = zip(self.batch_sizes, self._routing[1], strict=True)
        return tuple([find(steps, size) for size, members in rounds for steps in members])

    def _graph(self, steps: int, batch_size: int) -> object:
        answer = self.ask(self.subject.graph, steps, batch_size)
        return answer.reason if isinstance(answer, Refused) else answer

    def _graph_due(self, steps: int, batch_size: int) -> str | None:
        """Return the graph that a round must find: the one that was built for the captured size it is padded to."""
        size = min((size for size in self.captured if size >= batch_size), default=0)
        return self.graphs.get((steps, steps + 1, size))

    # -- rounds -------------------------------------------------------------------------------------------------------

    def _compare(self, batch_size: int, steps: int) -> None:
        """Note the first choice that is not the rule's."""
        if self.rule is not None and self.moment.departed is None:
            due = self.rule.steps(self._range_of(batch_size))
            if steps != due:
                self.moment.departed = batch_size, steps, due

    def _expect(self, batch_size: int) -> None:
        """Ask for the accept lengths that are expected of all candidates."""
        if self.capabilities.estimates:
            self.moment.expected = read_expected(self, self.subject, self.candidates(batch_size), batch_size)

    def _launch(self, batch_size: int) -> int | None:
        """Choose the steps of a round, as a launch does. Returns None if they are none that it may have."""
        steps = self._steps_for(batch_size)
        if steps not in self.candidates(batch_size):
            self.moment.stray_choice = (batch_size, steps, self.candidates(batch_size))
            return None
        self._compare(batch_size, steps)
        return steps

    def _run(self, batch_size: int, rounds: int, correct: Callable[[int, int], Sequence[int]]) -> list[int]:
        """Run so many rounds, and pass each result at once: `correct` of its steps and its number. Returns the steps of
        all rounds, before the first that goes wrong."""
        history: list[int] = []
        for at in range(rounds):
            steps = self._launch(batch_size)
            if steps is None or not self._tell(correct(steps, at), batch_size, steps):
                break
            history.append(steps)
        return history

    def _tell(self, correct: Sequence[float], batch_size: int, executed: int) -> bool:
        """Tell one result; whether it was taken. What is counted is added up in the moment."""
        if self.refused(self.ask(self.subject.observe, correct, batch_size, executed)):
            return False
        self._add(correct, batch_size, executed)
        return True

    def _add(self, correct: Sequence[float], batch_size: int, executed: int) -> None:
        """Note that the controller has taken one result."""
        m = self.moment
        self.num_told += bool(correct)
        if self.rule is not None and m.garbage is None:
            try:
                number = self._range_of(batch_size)
                known = self.rule.steps(number) if self.capabilities.untold_steps else executed
                self.rule.take(number, correct, known)
            except Undecided:
                self.rule = None
        self.account.take(correct, executed, is_good=m.garbage is None)
        if correct and m.garbage is None:
            results, rows, total, proposed = m.added
            m.added = results + 1, rows + len(correct), total + int(sum(correct)), proposed + executed * len(correct)

    def _tell_alone(self, correct: list[float], batch_size: int, executed: int) -> None:
        """Pass a single result to the controller, and check its effect alone."""
        here = self._range_of(batch_size)
        in_range = tuple(self._range_of(size) == here for size in self.batch_sizes)
        self.moment.observed = VerifyResult(executed, self._steps_for(batch_size), tuple(correct), in_range)
        self._tell(correct, batch_size, executed)

    @operation(weight=20, when=lambda t, batch_size, runs: bool(runs) and len(t.in_flight) < MAX_IN_FLIGHT)
    def round(self, batch_size: int, runs: tuple[int, ...]) -> None:
        """Launch a round; its result is on its way."""
        steps = self._launch(batch_size)
        if steps is not None:
            self.in_flight.append((batch_size, steps, _rows(runs, batch_size, steps)))

    @operation(weight=24, when=lambda t: bool(t.in_flight), gone=(0, 0, 0, 1, 2, 64))
    def deliver(self, gone: int) -> None:
        """Deliver the oldest result, without its last `gone` rows, which have finished meanwhile."""
        batch_size, steps, correct = self.in_flight.pop(0)
        self._tell_alone(correct[: max(len(correct) - gone, 0)], batch_size, steps)

    @operation(weight=3)
    def idle(self, batch_size: int) -> None:
        """Tell a result without rows."""
        self._tell_alone([], batch_size, self._steps_for(batch_size))

    @operation(weight=8, hostile=True, when=lambda t, batch_size, steps: 0 <= steps <= t.table.union[-1])
    def observe(self, batch_size: int, steps: int, runs: tuple[int, ...]) -> None:
        """Pass a result of a round with these steps, which may differ from the current ones."""
        self.only_if(runs)
        self._tell_alone([min(run, steps) for run in runs], batch_size, steps)

    @operation(
        weight=8, hostile=True, needs="misuse", probes="STEPS-02", when=lambda t, batch_size, kind: kind in GARBAGE
    )
    def garbage(self, batch_size: int, kind: str) -> None:
        """Tell a result of the current steps, with one value that no round can have produced."""
        steps = self._steps_for(batch_size)
        self.moment.garbage = GARBAGE[kind](steps)
        self._tell_alone([0, self.moment.garbage], batch_size, steps)

    @operation(needs="adaptive", weight=12, batch_size=_small, rounds=(5, 1, 20, 50))
    def repeat(self, batch_size: int, runs: tuple[int, ...], rounds: int) -> None:
        """Run a number of rounds of one kind, and pass each result at once."""
        self.only_if(runs and 0 < rounds <= MAX_REPEATED)
        self._run(batch_size, rounds, lambda steps, at: _rows(runs, batch_size, steps))
        self._expect(batch_size)

    @operation(needs="multi_steps", weight=8, batch_size=_small, rounds=(2, 8, 32))
    def multi_step(self, batch_size: int, runs: tuple[int, ...], rounds: int) -> None:
        """Launch a step of a number of rounds, which accept different drafts, and pass their results together."""
        self.only_if(runs and 0 < rounds <= MAX_REPEATED)
        steps = self._launch(batch_size)
        if steps is not None:
            results = [_rows(runs, batch_size, steps, at) for at in range(rounds)]
            if not self.refused(self.ask(self.subject.observe_multi_step, results, batch_size, steps)):
                for correct in results:
                    self._add(correct, batch_size, steps)
        self._expect(batch_size)

    @operation(needs="unordered", weight=12, batch_size=_small)
    def interval(self, batch_size: int, runs: tuple[int, ...]) -> None:
        """Launch the rounds that are left before the next look, which accept different drafts. Pass their results, and
        to a copy of the controller the last first."""
        table, interval = self.table, self.table.update_interval
        left = max(table.warmup_batches, interval) - self.num_told
        left = left if left > 0 else left % interval or interval
        self.only_if(runs and left > 1 and table == read_table(self.config.table))
        steps = self._launch(batch_size)
        if steps is not None:
            other = self.must(self.subject.copied)
            results = [_rows(runs, batch_size, steps, at) for at in range(left)]
            for correct, of_other in zip(results, reversed(results), strict=True):
                self._tell(correct, batch_size, steps)
                self.must(other.observe, of_other, batch_size, steps)
            self._expect(batch_size)
            self.moment.reordered = read_expected(self, other, self.candidates(batch_size), batch_size)

    # -- long stretches ------------------------------------------------------------------------------------------------

    @operation(needs="adaptive", weight=1, when=_can_hold, process=PROCESSES, batch_size=_judged)
    def phase(self, process: str, batch_size: int) -> None:
        """Run a long stretch of rounds with one stationary acceptance process, each result at once."""
        rounds = GOODPUT_PHASE_ROUNDS if self.capabilities.goodput else PHASE_ROUNDS
        accepted = partial(correct_drafts, process, batch_size, rounds, self.config.lift)
        history = self._run(batch_size, rounds, lambda steps, at: accepted(steps)[at].tolist())
        if len(history) < rounds:
            return
        # All of it is judged, or what comes after settling.
        begin, candidates = SETTLING_ROUNDS if self.capabilities.goodput else 0, self.candidates(batch_size)
        runs = {each: accepted(each)[begin:] for each in candidates}
        times = {each: self.time_ns(each, batch_size) for each in candidates}
        self.moment.stretch = Stretch.of(process, batch_size, history[begin:], runs, times)
        self._expect(batch_size)
        self.stretches.append((self.operation, self.moment.stretch))

    @operation(needs="adaptive", weight=1, when=_ought_to_draft, batch_size=_small)
    def offer(self, batch_size: int) -> None:
        """Accept every draft, until the controller drafts at all."""
        m = self.moment
        # A round of 0 steps tells nothing, so that all is up to the controller's probes.
        limit = GOODPUT_OFFER_ROUNDS
        if not self.capabilities.goodput:
            dwell = 10_000 if self.table.min_dwell_batches else 0
            limit = self.table.warmup_batches + 40 * self.table.update_interval + dwell
        for rounds in range(limit + 1):
            steps = self._launch(batch_size)
            if steps is None:
                break
            m.offered = Offered(batch_size, rounds, steps > 0, limit)
            if steps or rounds == limit or not self._tell([0] * batch_size, batch_size, 0):
                break

    # -- graphs and tables ---------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        """Let the controller build its graphs; once more if that was to fail."""
        captured, build, fail_at = self.config.captured, self.build, self.config.fail_at
        ranges = self.table.candidates
        reachable = frozenset(
            (steps, steps + 1, size) for size in captured for steps in ranges[self.table.range_of(size, captured)]
        )
        for fails in (True, False) if 0 < fail_at <= len(reachable) else (False,):
            with self.stage("attach, and a build fails" if fails else "attach") as m:
                build.built.clear()
                build.builds_to_failure = fail_at if fails else 0
                self.refused(self.ask(self.subject.attach, build, list(captured) or None))
                build.builds_to_failure = 0
                m.attached = "failing" if fails else "whole"
                if not fails:
                    self.graphs = dict(build.built)
                    self._route(self.table, captured)
                    m.built_keys = frozenset(build.built), reachable

    @operation(needs="reload", weight=2, when=lambda t, dropped, update_interval: update_interval >= 1)
    def reload(self, dropped: int, update_interval: int) -> None:
        """Load the table again, with another interval, and without candidate number `dropped` of every range that has
        more (−1: with all)."""
        table = reloaded(read_table(self.config.table), dropped, update_interval)
        self.rule = None  # which ranges keep their state is the controller's own choice
        if not self.refused(self.ask(self.subject.reload, table.text())):
            self._route(table, self.captured)

    @operation(needs="reload", weight=4, probes="STEPS-09", when=lambda t, how: how in DAMAGES, how=DAMAGES)
    def reload_broken(self, how: str) -> None:
        """Load the table, damaged."""
        self.refused(self.ask(self.subject.reload, damages(read_table(self.config.table))[how]))

    # -- the end -------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Deliver all results. Then offer every range perfect drafts, and end with a stationary stretch."""
        while self.in_flight:
            self.deliver(0)
        if self.capabilities.adaptive:
            for batch_size in self.batch_sizes:
                self.offer(batch_size)
            number = self.num_operations % len(PROCESSES)
            batch_size = self.batch_sizes[number % len(self.batch_sizes)]
            self.phase(PROCESSES[number], max(batch_size, FEWEST_ROWS))

    def describe(self) -> str:
        m = self.moment
        if m.offered is not None:
            return f"-> drafts after {m.offered.rounds} rounds"
        if m.stretch is not None:
            s = m.stretch
            return f"-> {len(s.switches)} switches, settled at {s.settled} steps, {s.rate:,.0f} tokens per second"
        sizes = zip(self.batch_sizes, m.after.steps, strict=True)
        return "-> steps " + ", ".join(f"{steps} for {size} rows" for size, steps in sizes)
