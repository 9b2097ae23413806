"""The hooks of an `EngineActor` that inject a plan's faults into one engine and check the promises about these
faults. `launch_effects.py` has the faults that begin when a step is launched."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ...core.contract.outcomes import LossOutcome
from ...core.contract.request import FinishedRequest, Request
from ...core.contract.step import FailureCause, Step, StepResult
from ...core.errors import InvalidRequest, InvariantViolation
from ...core.scheduler.engine import Engine
from ..actors.clock import call_at
from ..actors.device import Truth
from ..actors.engine import EngineActor
from ..actors.hooks import Hooks, StepFault
from .clock import HostClock
from .launch_effects import LaunchEffects
from .place import PooledEngine, WholeEngine
from .plan import Death, Hang, Ledger, Restart
from .promises import Promises, Witness

DEATH = "transfer.peer_dies"
LOSS = "transfer.decoder_lost"
NO_NUMBERS = "the target's logits are not finite"
DRAIN_NS = 1_000_000  # until a device that has raised is quiet
MAX_REMEMBERED = 1 << 16  # ids: for messages that come twice, and for cancels that overtake their request

FAILURES = {
    "device.raises": (FailureCause.RAISED, "the forward pass raised"),
    "device.out_of_memory": (FailureCause.OUT_OF_MEMORY, "no memory for activations"),
    "device.hangs": (FailureCause.HUNG, "no answer in time"),
    "device.restarts": (FailureCause.WORKER_LOST, "the worker is gone"),
    "device.poison": (FailureCause.RAISED, "the forward pass raised"),
    DEATH: (FailureCause.WORKER_LOST, "the worker is gone"),
    LOSS: (FailureCause.WORKER_LOST, "the engine is lost"),
}


class FaultInjector(Hooks):
    """With no kind enabled it changes nothing. Set `actor` once the actor is made, and `place` if it is in a pool."""

    actor: EngineActor

    def __init__(self, replica: int, ledger: Ledger, promises: Promises, witness: Witness) -> None:
        self.replica = replica
        self.ledger = ledger
        self.promises = promises
        self.witness = witness
        self.place: WholeEngine = WholeEngine()
        self.clock: HostClock = HostClock()
        self.poisoned: set[str] = set()  # ids of requests that the device cannot bear; only asked, never iterated
        self._is_closed = False
        self._dies_by = ""  # the kind of fault by which it is dead, until a new worker runs
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._cancelled_early: OrderedDict[str, None] = OrderedDict()
        self._failing: dict[int, str] = {}  # step -> the kind of fault that it will have
        self._recount_due = False
        self._effects = LaunchEffects(replica, ledger, self.clock, self.check)

    @property
    def engine(self) -> Engine:
        return self.actor.engine

    @property
    def now_ns(self) -> int:
        return self.actor.env.now

    def check(self, promise: str, kept: bool, message: str) -> None:
        """Check a promise now."""
        self.promises.check(promise, kept, self.now_ns, message)

    # -- requests -----------------------------------------------------------------------------------------------------

    def on_request(self, request: Request, truth: Truth) -> str | None:
        """Ignore a second copy of a request; refuse one whose client left before it came, and any
        while shutting down."""
        name, message = request.request_id, self.place.name_of_try(request)
        if self.place.was_left(request):
            return "cancelled before it arrived"
        if message is None or message in self._seen:
            return None
        self._remember(self._seen, message)
        if name in self._cancelled_early:
            return "cancelled before it arrived"
        if self._is_closed:
            return "shutting down"
        self.witness.truths[name] = truth
        return ""

    def on_cancel(self, request_id: str) -> bool:
        """Note a cancel that has overtaken its request."""
        if request_id in self._seen or not self.place.is_entrance:
            return True
        self._remember(self._cancelled_early, request_id)
        return False

    def on_finished(self, finished: FinishedRequest) -> None:
        self.witness.reported(finished, self.now_ns)

    def leave(self, request_id: str, kind: str) -> None:
        """Cancel a request as the plan says."""
        where = self._where(request_id)
        self.ledger.cancelled_in[where] = self.ledger.cancelled_in.get(where, 0) + 1
        self.ledger.note(kind, self.now_ns)
        self.place.abort(request_id, self.actor).cancel(request_id)
        self._recount_due = True

    def _where(self, request_id: str) -> str:
        """Describe the state of a request, also where prefill and decode are apart."""
        state = self.engine.state_of(request_id)
        if elsewhere := self.place.state_elsewhere(request_id, state is not None):
            return elsewhere
        return state.value if state is not None else "ended" if request_id in self._seen else "not here yet"

    def try_duplicate(self, request: Request) -> None:
        """Submit a second request under an id that may be live; if it is, the engine must refuse it."""
        if self.engine.state_of(request.request_id) is None:
            return
        self.ledger.note("client.duplicate_id", self.now_ns)
        outcome = self.engine.submit(request, self.stamp(self.now_ns))
        refused = outcome.refusal.startswith("duplicate id") and not outcome.replan
        self.check("refused_at_the_door", refused, f"{request.request_id}: {outcome}")

    def try_bad(self, make: Callable[[], Request]) -> None:
        """Submit an impossible request; it must be refused where it is made, or by the engine."""
        self.ledger.note("client.bad_request", self.now_ns)
        waiting = self.engine.num_waiting
        try:
            refusal = self.engine.submit(make(), self.stamp(self.now_ns)).refusal
        except InvalidRequest as error:
            refusal = str(error)
        says_number = any(character.isdigit() for character in refusal)
        refused = says_number and self.engine.num_waiting == waiting
        self.check("refused_at_the_door", refused, f"a bad request: {refusal or 'let in'}")

    def shut_down(self, give_up: bool) -> None:
        """Refuse new requests; those here finish, or with `give_up` are cancelled."""
        self._is_closed = True
        if give_up:
            for name in self.witness.live:
                self.actor.cancel(name)

    @staticmethod
    def _remember(names: OrderedDict[str, None], name: str) -> None:
        names[name] = None
        if len(names) > MAX_REMEMBERED:
            names.popitem(last=False)

    # -- steps --------------------------------------------------------------------------------------------------------

    def stamp(self, time_ns: int) -> int:
        return self.clock.stamp(time_ns)

    def before_launch(self, step: Step) -> None:
        if self._recount_due:
            self._recount_due = False
            self._recount()
        if step.decode is not None:
            valid = step.decode.shape.steps in self.engine.controller.candidates
            self.check("steps_valid", valid, f"{step.decode.shape.steps} steps")
        self._effects.set_device(self.actor)
        for join in step.joins:
            self._effects.note_poison(join.row, join.request.request_id in self.poisoned)

    def after_launch(self, step: Step) -> None:
        for kind in self.ledger.kinds_at("step", self.replica, step.step_id, self.now_ns):
            if self._effects.knows(kind):
                self.ledger.note(kind, self.now_ns)
                self._effects.begin(kind, step, self.actor)
                self._recount_due = True
            elif kind in FAILURES:
                self._failing[step.step_id] = kind

    def fault_of(self, step: Step | None) -> StepFault | None:
        if self._dies_by:
            if step is not None:
                self._effects.set_device(self.actor)
            return self._fault(self._dies_by, step)
        if step is None:
            return None
        self._effects.set_device(self.actor)
        kind = self._failing.pop(step.step_id, "")
        if kind:
            self.ledger.note(kind, self.now_ns)
        else:
            kind = self._effects.failure_of(step, self.now_ns)
        return self._fault(kind, step) if kind else None

    def _fault(self, kind: str, step: Step | None) -> StepFault:
        cause, message = FAILURES[kind]
        fault = self.ledger.plan.of(kind)
        away_ns = round(fault.restart_s * 1e9) if isinstance(fault, Hang | Restart) else DRAIN_NS
        if isinstance(fault, Hang):
            return StepFault(cause, message, away_ns, timeout_ns=round(fault.watchdog_s * 1e9))
        share = 1.0 if step is None else self.ledger.draws.amount(kind, self.replica, step.step_id)
        return StepFault(cause, message, away_ns, share)

    def after_run(self, result: StepResult) -> StepResult:
        """Add the failed row, if there is one. Rounds end on the clock that stamps everything else."""
        if row := self._effects.take_failed_row(result.step_id):
            result = replace(result, failures=((row, NO_NUMBERS),))
        if self.clock.is_true:
            return result
        ends = result.round_end_ns.copy()
        ends[:] = [self.stamp(end_ns) for end_ns in ends.tolist()]
        return replace(result, round_end_ns=ends)

    def after_loss(self, step: Step, outcome: LossOutcome) -> None:
        rows = [int(row) for part in (step.prefill, step.decode) if part is not None for row in part.rows]
        held = all(self.engine.store.table.is_taken(row) for row in rows)
        self.check("fenced", held, f"rows {rows} of step {step.step_id} are not all held")
        for step_id in outcome.step_ids:
            self._failing.pop(step_id, None)
        self._recount()

    def after_resume(self, step: Step | None, restarted: bool) -> None:
        if restarted:
            self._dies_by = ""
        if step is not None:
            self.check("fenced", not self.engine.store.has_fenced, "a fence stands with nothing in flight")
            self._offer_late_result(step)
        self._recount()
        self.ledger.last_ns = self.now_ns

    def _recount(self) -> None:
        self.promises.recount("books_agree", self.engine, self.now_ns)
        try:
            self.place.check()
        except InvariantViolation as violation:
            self.check("books_agree", False, str(violation))

    def _offer_late_result(self, step: Step) -> None:
        """Commit a result of the step that was given up, as if its old worker had returned after all."""
        late = StepResult(step.step_id, None, None, np.array([self.stamp(self.now_ns)], dtype=np.int64))
        try:
            self.engine.commit(late, self.stamp(self.now_ns))
            refused = False
        except InvariantViolation as violation:
            refused = violation.invariant == "RELAY-07"
        self.check("nothing_seen", refused, f"a late result of step {step.step_id} was taken")

    def die(self, kind: str) -> None:
        """Let the worker die at once, or with `LOSS` the decode engine. The other engines learn of it later, and a new
        worker or engine replaces the dead one."""
        place, fault = self.place, self.ledger.plan.of(kind)
        assert isinstance(place, PooledEngine) and isinstance(fault, Death)
        endpoint = place.endpoint
        if not endpoint.is_alive or (kind == LOSS and endpoint.is_prefill):
            return
        self.ledger.note(kind, self.now_ns)
        endpoint.is_alive = False
        self._dies_by = kind
        noticed_ns = self.now_ns + round(fault.notice_s * 1e9)
        if kind == LOSS:
            endpoint.missed_at_ns = noticed_ns
        else:
            call_at(self.actor.env, noticed_ns, place.tell_of_death)
        self.actor.wake(True)

    @property
    def left_over(self) -> str:
        """Describe what remains, apart from slots, when everything should have ended; empty if nothing remains."""
        if left := self.place.left_over:
            return left
        return "" if self.engine.is_idle and not self.actor.device.truths else "it is not idle"
