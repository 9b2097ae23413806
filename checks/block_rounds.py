"""A block of rounds equals its rounds committed one by one (SIM-12), checked on two engines over the same history.

Both engines see the same submits and aborts at the same times on a device whose every round, and every step without one, takes one unit of
time. One may plan blocks, the other may not. Afterwards everything must agree: what was decided for every unit, and when each request
finished with which tokens. Whenever the first engine has committed and no block is in flight, each request's length and number of slots
must agree, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.contract.events import Planned
from ..core.contract.request import FinishReason, Request
from ..core.contract.step import Step, StepResult
from ..core.errors import InvariantViolation
from ..core.scheduler.driver import Driver
from ..core.scheduler.engine import Engine
from ..properties.reference import ReferenceExecutor


@dataclass(frozen=True, slots=True)
class Operation:
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
class History:
    """What one engine did, by units of device time."""

    units: list[tuple] = field(default_factory=list)  # per unit: prefill chunks, decode batch, steps, nodes
    retractions: list[tuple] = field(default_factory=list)  # (units planned before, who)
    standings: dict[int, Standing] = field(default_factory=dict)  # by the time of the commit
    ends: dict[str, tuple] = field(default_factory=dict)  # request → (time, reason, tokens)
    blocks: int = 0  # steps that ran more than one round


class UnitClock(Driver):
    """Walks one engine and its executor through a list of operations, unit by unit."""

    def __init__(self, engine: Engine, executor: ReferenceExecutor, operations: list[Operation]) -> None:
        super().__init__(engine, executor, lambda: self._time)
        self.history = History()
        self._operations = sorted(operations, key=lambda operation: operation.time)
        self._time = 0
        self._steps: list[Step] = []
        self._step_retractions: dict[int, tuple[str, ...]] = {}
        engine._events = self._on_event

    def run(self) -> History:
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

    def _apply(self, operation: Operation) -> None:
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
            decode = (tuple(names[row] for row in part.rows.tolist()), part.steps, part.num_draft_tokens)
        return prefill, decode

    def _standing(self) -> Standing:
        engine = self.engine
        requests = []
        for row, record in sorted(engine.requests.running.items(), key=lambda item: item[1].arrival_number):
            length = int(engine.rounds.kv_len[row]) if engine.rounds.live[row] else record.prefill_launched
            requests.append((record.request.request_id, length, int(engine.store.allocated[row])))
        waiting = tuple(record.request.request_id for record in engine.requests.waiting)
        return Standing(tuple(requests), engine.store.allocator.num_held_slots, waiting)


def compare_histories(blocks: History, singles: History) -> None:
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
            raise InvariantViolation(
                "SIM-12", f"{name!r} ended as {blocks.ends.get(name)} in blocks, {singles.ends[name]} singly"
            )
    for time, standing in blocks.standings.items():
        if standing != singles.standings.get(time):
            raise InvariantViolation("SIM-12", f"at {time} in blocks {standing}, singly {singles.standings.get(time)}")
