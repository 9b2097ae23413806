"""The collaborators of an `EngineActor`: hooks, which are called at named points, and its part in handoffs. Both have
one that does nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ...core.contract.outcomes import AbortOutcome, CommitOutcome, LossOutcome, SubmitOutcome
from ...core.contract.request import FinishedRequest, Request
from ...core.contract.step import FailureCause, Step, StepResult
from ...core.scheduler.config import EngineRole
from ...core.scheduler.engine import Engine
from .device import Truth


@dataclass(frozen=True, slots=True)
class StepFault:
    """The way in which a step fails."""

    cause: FailureCause
    message: str
    away_ns: int  # until the device is quiet, or a new worker runs
    run_share: float = 1.0  # of the step's device time, after which it fails
    timeout_ns: int | None = None  # instead: it never returns, and is given up after so long

    @property
    def restarts(self) -> bool:
        """Whether the worker has to be started again."""
        return self.cause in (FailureCause.HUNG, FailureCause.WORKER_LOST)


class Hooks:
    """Hooks that change nothing; subclasses override what they need."""

    def stamp(self, time_ns: int) -> int:
        """Return the time on the host's clock at a simulated time, for the scheduler."""
        return time_ns

    def on_request(self, request: Request, truth: Truth) -> str | None:
        """Take a request that arrives: return "" to submit it, a reason to refuse it, None to ignore it."""
        return ""

    def on_cancel(self, request_id: str) -> bool:
        """Take a client's cancel: return whether to abort the request."""
        return True

    def on_finished(self, finished: FinishedRequest) -> None:
        """Note that a submitted request has ended."""

    def before_launch(self, step: Step) -> None:
        """Take a step that was planned and is not launched yet."""

    def after_launch(self, step: Step) -> None:
        """Take a step that was launched."""

    def fault_of(self, step: Step | None) -> StepFault | None:
        """Return how the oldest step in flight fails, if it does.
        `step` None: nothing is in flight, the worker waits."""
        return None

    def after_run(self, result: StepResult) -> StepResult:
        """Return the result that the engine commits."""
        return result

    def after_loss(self, step: Step, outcome: LossOutcome) -> None:
        """Note that `step` has failed and that the engine has given up all steps in flight."""

    def after_resume(self, step: Step | None, restarted: bool) -> None:
        """Note that the engine plans again; `step` is the one that had failed."""


NO_HOOKS = Hooks()


class HandoffPart(Protocol):
    """An engine's part in the handoffs of a cluster (`sim/disaggregation/endpoint.py`)."""

    @property
    def may_wait(self) -> bool:
        """Whether an engine with requests may be idle, because a message or a deadline will wake it."""

    def submit(self, request: Request) -> SubmitOutcome: ...
    def abort(self, request_id: str) -> AbortOutcome: ...
    def launched(self) -> None: ...
    def committed(self, outcome: CommitOutcome) -> None: ...
    def before_wait(self) -> None: ...
    @property
    def may_restart(self) -> bool:
        """Whether a new worker may take the place of a lost one."""

    def lost(self, outcome: LossOutcome, restarts: bool) -> None: ...
    def restarted(self) -> None: ...
    def change_role(self, role: EngineRole) -> None: ...


class NoHandoff:
    """The part of an engine that serves whole requests."""

    may_wait = False
    may_restart = True

    def __init__(self, engine: Engine, now_ns: Callable[[], int]) -> None:
        """Pass requests to `engine`. `now_ns` returns the time on the host's clock."""
        self._engine = engine
        self._now_ns = now_ns

    def submit(self, request: Request) -> SubmitOutcome:
        return self._engine.submit(request, self._now_ns())

    def abort(self, request_id: str) -> AbortOutcome:
        return self._engine.abort(request_id, self._now_ns())

    def launched(self) -> None:
        """Do nothing, like all that follow: no KV leaves or comes."""

    def committed(self, outcome: CommitOutcome) -> None: ...
    def before_wait(self) -> None: ...
    def lost(self, outcome: LossOutcome, restarts: bool) -> None: ...
    def restarted(self) -> None: ...

    def change_role(self, role: EngineRole) -> None:
        raise AssertionError("an engine outside of a cluster has one role")
