"""The executor port, and the loop that connects an engine with an executor on which the caller can wait.

submit / abort ─► Engine ─ plan ─► Step ─► Executor.launch        (until None)
                    ▲                          │
                    └── commit ◄─ result ◄─ Executor.collect      (the oldest step)

The simulator's `EngineActor` makes the same three moves on simulated time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..contract.events import Reloaded
from ..contract.outcomes import AbortOutcome, CommitOutcome, SubmitOutcome
from ..contract.request import FinishedRequest, Request
from ..contract.step import Step, StepResult
from .engine import Engine


def reload_table(engine: Engine, table: str, source: str, now_ns: int) -> None:
    """Give the controller another adaptive table (JSON text).

    Raises ConfigError if the table is invalid here; then the last table stays in use.
    """
    engine.controller.reload(table, source)
    engine.emit(Reloaded(now_ns, table))


class Executor(Protocol):
    """Runs steps in order. It never allocates and never schedules."""

    def launch(self, step: Step) -> None:
        """Begin `step`. The method may return before the step has run.

        The step's `released` and `table_writes` take effect now, in order.
        """

    def collect(self) -> StepResult:
        """Wait for the oldest launched step and return its result."""
        ...

    def request_stop(self, last_step_id: int) -> None:
        """End every step up to `last_step_id` at its next round boundary, whether it is running, launched or only
        planned.
        """


class Driver:
    """Serves requests with `engine` and `executor`. Not thread-safe.

    `clock_ns` stamps events and measures `host_ns`. Subclasses override `launch` or `collect` to act between the moves.
    """

    def __init__(self, engine: Engine, executor: Executor, clock_ns: Callable[[], int] = lambda: 0) -> None:
        self.engine = engine
        self.executor = executor
        self.clock_ns = clock_ns
        self.num_steps: int = 0  # committed
        self.host_ns: int = 0  # time spent in planning, launching and committing, without waiting for results

    def submit(self, request: Request) -> SubmitOutcome:
        """Queue a request, unless the engine refuses it."""
        outcome = self.engine.submit(request, self.clock_ns())
        self.interrupt(outcome.replan)
        return outcome

    def abort(self, request_id: str) -> AbortOutcome:
        """Give a request up. It ends now or in a later commit. An id that is not live changes nothing."""
        outcome = self.engine.abort(request_id, self.clock_ns())
        self.interrupt(outcome.replan)
        return outcome

    def interrupt(self, replan: bool) -> None:
        """End the planned steps at their next round boundary if the engine wants to `replan`."""
        if replan:
            self.executor.request_stop(self.engine.last_step_id)

    def turn(self) -> CommitOutcome | None:
        """Plan and launch all steps that the engine has, then commit the oldest.

        Returns None if no step is in flight.
        """
        self.plan()
        return self.commit()

    def run_until_idle(self) -> dict[str, FinishedRequest]:
        """Repeat `turn` until no step is in flight. Returns the requests that ended meanwhile, by id."""
        ended: dict[str, FinishedRequest] = {}
        while (outcome := self.turn()) is not None:
            ended.update((end.request_id, end) for end in outcome.finished)
        return ended

    def plan(self) -> list[Step]:
        """Plan and launch until the engine has no step. Returns the launched steps."""
        steps, begin = [], self.clock_ns()
        while (step := self.engine.plan(self.clock_ns())) is not None:
            self.launch(step)
            steps.append(step)
        self.host_ns += self.clock_ns() - begin
        return steps

    def commit(self) -> CommitOutcome | None:
        """Commit the result of the oldest step; None if no step is in flight."""
        if not self.engine.num_uncommitted:
            return None
        result = self.collect()
        begin = self.clock_ns()
        outcome = self.engine.commit(result, begin)
        self.host_ns += self.clock_ns() - begin
        self.num_steps += 1
        return outcome

    def launch(self, step: Step) -> None:
        self.executor.launch(step)

    def collect(self) -> StepResult:
        return self.executor.collect()
