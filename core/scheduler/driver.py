"""The executor port, and the loop that joins an engine to an executor that can be waited for.

The simulator's `EngineActor` walks the same three moves (plan until None, launch, commit the oldest) on simulated time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from ..contract.step import Step, StepResult

if TYPE_CHECKING:
    from .engine import CommitOutcome, Engine


class Executor(Protocol):
    """Runs steps in order. It never allocates and never schedules."""

    def launch(self, step: Step) -> None:
        """Begin `step`; may return before it has run. The step's `released` and `table_writes` take effect now, in order."""

    def collect(self) -> StepResult:
        """Wait for the oldest launched step and return its result."""

    def request_stop(self, last_step_id: int) -> None:
        """Every step up to `last_step_id`, running, launched or only planned, ends at its next round boundary."""


def run_until_idle(
    engine: Engine,
    executor: Executor,
    clock_ns: Callable[[], int],
    on_commit: Callable[[CommitOutcome], None] | None = None,
) -> int:
    """The main loop: plan until None, then commit the oldest step; returns when nothing is left to do.

    Returns the number of committed steps. `clock_ns` only stamps events.
    """
    num_committed = 0
    while True:
        while (step := engine.plan(clock_ns())) is not None:
            executor.launch(step)
        if not engine.num_uncommitted:
            return num_committed
        outcome = engine.commit(executor.collect(), clock_ns())
        num_committed += 1
        if on_commit is not None:
            on_commit(outcome)
