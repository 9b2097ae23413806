"""How a step fails: what a driver tells the engine instead of a result."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class FailureCause(Enum):
    """What happened to a step, as far as the driver knows."""

    RAISED = "raised"
    OUT_OF_MEMORY = "out_of_memory"
    HUNG = "hung"  # the watchdog gave up waiting for it
    WORKER_LOST = "worker_lost"  # the process or the device is gone, and its KV with it


@dataclass(frozen=True, slots=True)
class StepFailure:
    """The oldest step in flight will have no result."""

    step_id: int
    cause: FailureCause
    message: str = ""

    def __str__(self) -> str:
        detail = f": {self.message}" if self.message else ""
        return f"step {self.step_id} {self.cause.value.replace('_', ' ')}{detail}"
