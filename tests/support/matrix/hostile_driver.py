"""`HostileDriver` disturbs an engine and checks everything after each move. `UnitClock` counts time, to compare blocks
with single rounds.

The hostile one submits, aborts, plans, launches and commits as any driver does, but at arbitrary points: between plan
and launch, in the middle of a block, with two steps in flight. Forced retraction is the one move that only a test may
make.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from foredraft.core.contract.events import Committed, Planned
from foredraft.core.contract.request import FinishedRequest, FinishReason, Request
from foredraft.core.contract.step import Step, StepResult
from foredraft.core.draws import Purpose, hash64
from foredraft.core.errors import InvariantViolation
from foredraft.core.scheduler.driver import Driver
from foredraft.core.scheduler.engine import Engine
from foredraft.properties.executor.reference import HashLanguageModel, ReferenceExecutor, expected_outputs, plain_greedy


class Dice:
    """A stream of decisions of one case, a pure function of the seed and of how many were made."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._count = 0

    def below(self, n: int) -> int:
        """Draw an integer in 0 … n − 1."""
        self._count += 1
        return int(hash64(self._seed, Purpose.SWARM, 0, self._count)) % n

    def chance(self, percent: int) -> bool:
        return percent > 0 and self.below(100) < percent

    def choose(self, options):
        return options[self.below(len(options))]


@dataclass(frozen=True, slots=True)
class Disturbance:
    """How likely each move is at each point where it could be made, in per cent; and how often at most."""

    submit: int = 30
    abort: int = 0
    retract: int = 0
    most: int = 12
    idle: int = 0  # not planning although a step is in flight


CALM = Disturbance(submit=100)


class HostileDriver(Driver):
    """Serves `requests` with an engine and its reference executor to the end; `run` returns how each of them ended."""

    def __init__(
        self,
        engine: Engine,
        executor: ReferenceExecutor,
        requests: list[Request],
        dice: Dice,
        disturbance: Disturbance = CALM,
    ) -> None:
        super().__init__(engine, executor)
        self.dice = dice
        self.disturbance = disturbance
        self.finished: dict[str, FinishedRequest] = {}
        self.refused: dict[str, str] = {}
        self.num_disturbances = 0
        self._coming = list(reversed(requests))
        self._live: list[str] = []
        self._aborted: list[str] = []

    def run(self, max_steps: int = 20_000) -> dict[str, FinishedRequest]:
        """Run all requests and return their ends.
        Raises InvariantViolation ENGINE-11 if the engine stands still or never ends."""
        while self._coming or self._live or self.engine.num_uncommitted:
            self._meddle()
            if not self._idles():
                self.plan()
            if not self.engine.num_uncommitted:
                if self._coming:
                    self._submit()
                elif self._live:
                    raise InvariantViolation("ENGINE-11", f"{len(self._live)} requests live, but nothing is planned")
                continue
            self._commit_oldest()
            if self.num_steps > max_steps:
                raise InvariantViolation("ENGINE-11", f"no end after {max_steps} steps")
        self._check_drained()
        return self.finished

    def _idles(self) -> bool:
        return bool(self.engine.num_uncommitted) and self.dice.chance(self.disturbance.idle)

    # -- moves ----------------------------------------------------------------------------------------------------

    def launch(self, step: Step) -> None:
        self._meddle()
        super().launch(step)
        self._check_table()
        self._meddle()

    def collect(self) -> StepResult:
        while self.dice.chance(50) and not self.executor.advance(1):
            self._meddle()
        result = super().collect()
        self._meddle()
        return result

    def _commit_oldest(self) -> None:
        outcome = self.commit()
        for finished in outcome.finished:
            self._finish(finished)
        self.engine.check()

    def _meddle(self) -> None:
        """Submit, abort or retract something now, perhaps."""
        if self._coming and self.dice.chance(self.disturbance.submit):
            self._submit()
        if self.num_disturbances >= self.disturbance.most:
            return
        if self._live and self.dice.chance(self.disturbance.abort):
            victim = self.dice.choose(self._live)
            if victim not in self._aborted:
                self._abort(victim)
        if self.dice.chance(self.disturbance.retract):
            self._retract()

    def _submit(self) -> None:
        request = self._coming.pop()
        refusal = self.submit(request).refusal
        if refusal:
            self.refused[request.request_id] = refusal
        else:
            self._live.append(request.request_id)

    def _abort(self, request_id: str) -> None:
        outcome = self.abort(request_id)
        self.num_disturbances += 1
        self._aborted.append(request_id)
        if outcome.finished is not None:
            self._finish(outcome.finished)
        elif not outcome.replan:
            raise InvariantViolation("ENGINE-13", f"{request_id!r} lives, but could not be aborted")
        if self.engine.abort(request_id, 0).finished is not None:
            raise InvariantViolation("ENGINE-13", f"{request_id!r} was aborted twice")
        self.engine.check()

    def _retract(self) -> None:
        """Take a random running request's row, as memory pressure would. Only a test asks for it."""
        running = list(self.engine.requests.running.values())
        if not running:
            return
        self.engine.requests.retract(self.dice.choose(running))
        self.executor.request_stop(self.engine.last_step_id)
        self.num_disturbances += 1
        self.engine.check()

    def _finish(self, finished: FinishedRequest) -> None:
        if finished.request_id in self.finished:
            raise InvariantViolation("ENGINE-02", f"{finished.request_id!r} ends a second time")
        if finished.request_id in self._aborted and finished.reason is not FinishReason.ABORT:
            message = f"{finished.request_id!r} was aborted, but ends with {finished.reason.name}"
            raise InvariantViolation("ENGINE-13", message)
        self.finished[finished.request_id] = finished
        self._live.remove(finished.request_id)

    # -- checks ---------------------------------------------------------------------------------------------------

    def _check_table(self) -> None:
        """Check that the executor's copy of the request table says what the engine's says, for all
        that is allocated."""
        store = self.engine.store
        for row in self.engine.requests.running:
            allocated = int(store.allocated[row])
            ours = store.table.gather(row, 0, allocated)
            if (ours != self.executor.launched_table[row, :allocated]).any():
                raise InvariantViolation("ALLOC-06", f"the table writes of row {row} are incomplete")

    def _check_drained(self) -> None:
        engine = self.engine
        if not engine.is_idle or engine.requests.num_with_row or engine.num_waiting or self.executor.num_in_flight:
            raise InvariantViolation("ENGINE-01", "all requests have ended, but the engine is not idle")
        engine.check()
        engine.store.allocator.free(engine.store.cache.clear())
        if engine.store.allocator.num_free_slots != engine.store.allocator.num_total_slots:
            held = engine.store.allocator.num_held_slots
            raise InvariantViolation("ALLOC-15", f"drained and flushed, but {held} slots are held")


def check_greedy_output(
    engine: Engine,
    model: HashLanguageModel,
    requests: list[Request],
    finished: Mapping[str, FinishedRequest],
    refused: Mapping[str, str],
    decode_text: Callable[[np.ndarray], str] | None = None,
) -> None:
    """Compare every request's output with the plain greedy loop, and its per-token outputs with the final sequence."""
    for request in requests:
        if request.request_id in refused:
            continue
        end = finished[request.request_id]
        cap = engine.sizes.max_tokens(engine.config, request.prompt.length, request.max_tokens)
        wanted = plain_greedy(model, request, cap)
        stopped = len(wanted) > 0 and int(wanted[-1]) in request.stop_tokens
        if request.stop_strings:
            for length in range(1, len(wanted) + 1):
                if any(text in decode_text(wanted[:length]) for text in request.stop_strings):
                    wanted, stopped = wanted[:length], True
                    break
        got = end.tokens
        if end.reason is FinishReason.ABORT or end.reason is FinishReason.ERROR:
            wanted = wanted[: len(got)]
        elif (end.reason is FinishReason.STOP) != stopped:
            raise InvariantViolation("ACCEPT-10", f"{request.request_id!r} ended with {end.reason.name}")
        if len(got) != end.num_output or got.tolist() != wanted.tolist():
            message = f"{request.request_id!r} emitted {got.tolist()} (count {end.num_output}), not {wanted.tolist()}"
            raise InvariantViolation("ACCEPT-03", message)
        check_outputs(model, request, end)


def check_feedback(engine: Engine, events: list) -> None:
    """Check that the controller was told of every round of every live row that verified all nodes once, and of no
    other (STEPS-10)."""
    verified = correct = 0
    for event in events:
        if isinstance(event, Committed) and event.kept is not None:
            live, step = event.kept > 0, event.step.decode
            if step.row_nodes is not None:
                live &= step.row_nodes == step.shape.nodes
            verified += int(live.sum())
            correct += int((event.result.decode.accept_lens[live] - 1).sum())
    metrics = engine.controller.metrics()
    if (metrics.verified_rows, metrics.correct_drafts) != (verified, correct):
        raise InvariantViolation(
            "STEPS-10",
            f"{verified} rows with {correct} correct drafts were committed, "
            f"{metrics.verified_rows} with {metrics.correct_drafts} were counted",
        )


def check_outputs(model: HashLanguageModel, request: Request, end: FinishedRequest) -> None:
    """Recompute the per-token outputs that a request asked for from its tokens, and compare."""
    expected = expected_outputs(model, request, end.tokens)
    for name in request.outputs:
        got = (end.outputs or {}).get(name, [])
        if len(got) != end.num_output:
            message = f"{request.request_id!r} has {len(got)} {name} for {end.num_output} tokens"
            raise InvariantViolation("ENGINE-04", message)
        if len(got) and not np.allclose(np.stack(got), expected[name], rtol=0, atol=1e-9):
            raise InvariantViolation("ACCEPT-06", f"{request.request_id!r} got the {name} of other nodes")


@dataclass(frozen=True, slots=True)
class DriverOperation:
    """What happens during unit `time`: `request` is submitted, or, if it is None, `aborted` is given up."""

    time: int
    request: Request | None = None
    aborted: str = ""


@dataclass(frozen=True, slots=True)
class Standing:
    """An engine right after a commit: per live request its KV length and slots; then all slots and who waits."""

    requests: tuple[tuple[str, int, int], ...]
    held_slots: int
    waiting: tuple[str, ...]


@dataclass(slots=True)
class DriverHistory:
    """What one engine did, by units of device time."""

    units: list[tuple] = field(default_factory=list)  # per unit: prefill chunks, decode batch, steps, nodes
    retractions: list[tuple] = field(default_factory=list)  # (units planned before, who)
    standings: dict[int, Standing] = field(default_factory=dict)  # by the time of the commit
    ends: dict[str, tuple] = field(default_factory=dict)  # request → (time, reason, tokens)
    blocks: int = 0  # steps that ran more than one round


class UnitClock(Driver):
    """Walks one engine and its executor through a list of operations, unit by unit.

    Two engines, of which one may plan blocks, go through the same operations at the same times (SIM-12). Every round,
    and every step without one, takes one unit. What was decided for every unit and each request's end must agree; and,
    whenever the first engine has committed and no block is in flight, each request's length and slots.
    """

    def __init__(self, engine: Engine, executor: ReferenceExecutor, operations: list[DriverOperation]) -> None:
        super().__init__(engine, executor, lambda: self._time)
        self.history = DriverHistory()
        self._operations = sorted(operations, key=lambda operation: operation.time)
        self._time = 0
        self._steps: list[Step] = []
        self._step_retractions: dict[int, tuple[str, ...]] = {}
        engine._events = self._on_event

    def run(self) -> DriverHistory:
        while self._operations or self._steps:
            if not self._steps and self._operations[0].time > self._time:
                self._time = self._operations[0].time
            while self._operations and self._operations[0].time <= self._time:
                self._apply(self._operations.pop(0))
                self._steps += self.plan()
            if not self._steps:
                continue
            over = self.executor.advance(1)
            self._time += 1
            if over:
                for finished in self.commit().finished:
                    self._end(finished)
                self.engine.check()
                if all(launched.max_rounds == 1 for launched in self._steps):
                    self.history.standings[self._time] = self._standing()
                self._steps += self.plan()
        if not self.engine.is_idle:
            raise InvariantViolation("ENGINE-11", "requests live, but nothing is planned")
        return self.history

    def _on_event(self, event: object) -> None:
        if isinstance(event, Planned) and event.retracted:
            key = event.step.step_id if event.step is not None else self.engine.last_step_id + 1
            self._step_retractions[key] = self._step_retractions.get(key, ()) + event.retracted

    def _apply(self, operation: DriverOperation) -> None:
        if operation.request is not None:
            self.submit(operation.request)
        else:
            outcome = self.abort(operation.aborted)
            if outcome.finished is not None:
                self._end(outcome.finished)

    def collect(self) -> StepResult:
        """Note what the oldest step did in each of its rounds."""
        step = self._steps.pop(0)
        names = self._names(step)
        result = self.executor.collect()
        rounds = 1 if result.decode is None else result.decode.rounds
        self.history.blocks += rounds > 1
        if step.step_id in self._step_retractions:
            self.history.retractions.append((len(self.history.units), self._step_retractions[step.step_id]))
        for number in range(rounds):
            self.history.units.append(self._unit(step, names, first=number == 0))
        return result

    def _end(self, finished) -> None:
        # An abort in a block is reported when the block is committed, so its time is the client's, not the engine's.
        time = 0 if finished.reason is FinishReason.ABORT else self._time
        self.history.ends[finished.request_id] = (time, finished.reason, finished.tokens.tolist())

    def _names(self, step: Step) -> dict[int, str]:
        rows = [] if step.decode is None else step.decode.rows.tolist()
        rows += [] if step.prefill is None else step.prefill.rows.tolist()
        return {row: self.executor.request_in(row) for row in rows}

    @staticmethod
    def _unit(step: Step, names: dict[int, str], first: bool) -> tuple:
        prefill = decode = None
        if step.prefill is not None and first:
            part = step.prefill
            prefill = tuple(
                (names[row], start, length)
                for row, start, length in zip(part.rows.tolist(), part.starts.tolist(), part.lens.tolist(), strict=True)
            )
        if step.decode is not None:
            part = step.decode
            decode = (tuple(names[row] for row in part.rows.tolist()), part.shape.steps, part.shape.nodes)
        return prefill, decode

    def _standing(self) -> Standing:
        engine = self.engine
        requests = []
        for row, record in sorted(engine.requests.running.items(), key=lambda item: item[1].arrival_number):
            length = int(engine.rounds.kv_len[row]) if engine.rounds.live[row] else record.prefill_launched
            requests.append((record.request.request_id, length, int(engine.store.allocated[row])))
        waiting = tuple(record.request.request_id for record in engine.requests.waiting)
        return Standing(tuple(requests), engine.store.allocator.num_held_slots, waiting)


def compare_histories(blocks: DriverHistory, singles: DriverHistory) -> None:
    """Raise InvariantViolation SIM-12 at the first difference."""
    for number, (one, other) in enumerate(zip(blocks.units, singles.units, strict=False)):
        if one != other:
            raise InvariantViolation("SIM-12", f"unit {number}: in blocks {one}, singly {other}")
    if len(blocks.units) != len(singles.units):
        raise InvariantViolation("SIM-12", f"{len(blocks.units)} units in blocks, {len(singles.units)} singly")
    if blocks.retractions != singles.retractions:
        raise InvariantViolation("SIM-12", f"retractions {blocks.retractions} in blocks, {singles.retractions} singly")
    for name in singles.ends:
        if blocks.ends.get(name) != singles.ends[name]:
            message = f"{name!r} ended as {blocks.ends.get(name)} in blocks, {singles.ends[name]} singly"
            raise InvariantViolation("SIM-12", message)
    for time, standing in blocks.standings.items():
        if standing != singles.standings.get(time):
            raise InvariantViolation("SIM-12", f"at {time} in blocks {standing}, singly {singles.standings.get(time)}")
