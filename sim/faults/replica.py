"""A replica whose steps fail, whose worker dies, whose memory is taken away, whose clock lies, and which gets on with it."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

import numpy as np
import simpy

from ...core.adaptive.slot import InvalidObservation
from ...core.contract.failure import FailureCause, StepFailure
from ...core.contract.request import FinishedRequest, FinishReason, Request
from ...core.contract.step import Step, StepResult
from ...core.errors import ConfigError, InvalidRequest, InvariantViolation
from ...core.scheduler.engine import LossOutcome
from ..actors.clock import until
from ..actors.device import Truth
from ..actors.engine import EngineActor, Flight
from .clock import HostClock
from .device import FaultyDevice
from .ledger import Ledger
from .promises import Promises, Witness

NO_NUMBERS = "the target's logits are not finite"
DRAIN_NS = 1_000_000  # until a device that has raised is quiet
MAX_REMEMBERED = 1 << 16  # ids: for messages that come twice, and for cancels that overtake their request


@dataclass(frozen=True, slots=True)
class Doom:
    """How a step that will not be committed ends."""

    kind: str
    cause: FailureCause
    words: str


_DOOMS = {
    "device.raises": Doom("device.raises", FailureCause.RAISED, "the forward pass raised"),
    "device.out_of_memory": Doom("device.out_of_memory", FailureCause.OUT_OF_MEMORY, "no memory for activations"),
    "device.hangs": Doom("device.hangs", FailureCause.HUNG, "no answer in time"),
    "device.restarts": Doom("device.restarts", FailureCause.WORKER_LOST, "the worker is gone"),
    "device.poison": Doom("device.poison", FailureCause.RAISED, "the forward pass raised"),
}


class FaultyReplica(EngineActor):
    """An `EngineActor` that meets the faults of a plan. With none enabled it does what its base does, event for event."""

    device: FaultyDevice

    def __init__(self, *arguments, ledger: Ledger, promises: Promises, witness: Witness, **options) -> None:
        super().__init__(*arguments, **options)
        self.ledger = ledger
        self.promises = promises
        self.witness = witness
        self.clock = HostClock()
        self.is_closed = False
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._cancelled_early: OrderedDict[str, None] = OrderedDict()
        self._doomed: dict[int, Doom] = {}
        self._memory_until_ns = self._slow_until_ns = self._drafts_until_ns = 0
        self._memory_limit = 0
        self._recount_due = False
        self._nan_rows: dict[int, int] = {}  # step -> the row for which the target has no numbers
        self._at_launch: dict[str, Callable[[Step], None]] = {
            "device.out_of_memory": self._run_short_of_memory,
            "device.slow": self._slow_down,
            "device.nan": self._lose_numbers,
            "draft.right": self._draft_right,
            "draft.wrong": self._draft_wrong,
            "draft.nan": self._feed_nonsense,
            "pool.denied": self._deny,
            "pool.retraction": self._retract,
            "clock.jump": self._jump,
            "clock.freeze": self._freeze,
            "config.half_written": self._reload_half,
        }

    # -- the door -----------------------------------------------------------------------------------------------------

    def receive(self, request: Request, truth: Truth) -> None:
        """A request arrives; a second copy of it counts for nothing, and neither does one whose client left before."""
        name = request.request_id
        if name in self._seen:
            return
        self._remember(self._seen, name)
        refusal = ""
        if name in self._cancelled_early:
            refusal = "cancelled before it arrived"
        elif self.is_closed:
            refusal = "shutting down"
        if refusal:
            self._on_finished(self.replica, FinishedRequest(name, FinishReason.ERROR, 0, message=refusal))
            return
        self.witness.expected_output[name] = truth.output_len
        super().receive(request, truth)

    def cancel(self, request_id: str) -> None:
        """A client leaves, perhaps for the second time, perhaps before its request is here."""
        if request_id not in self._seen:
            self._remember(self._cancelled_early, request_id)
            return
        super().cancel(request_id)

    def leave(self, request_id: str, kind: str) -> None:
        """A client leaves as the plan has it."""
        where = self._where(request_id)
        self.ledger.cancelled_in[where] = self.ledger.cancelled_in.get(where, 0) + 1
        self.ledger.note(kind, self.env.now)
        self.cancel(request_id)
        self._recount_due = True

    def _where(self, request_id: str) -> str:
        state = self.engine.state_of(request_id)
        return state.value if state is not None else "ended" if request_id in self._seen else "not here yet"

    def try_duplicate(self, request: Request) -> None:
        """A second request with an id that may be live: refused then, and no affair of this replica otherwise."""
        if self.engine.state_of(request.request_id) is None:
            return
        self.ledger.note("client.duplicate_id", self.env.now)
        outcome = self.engine.submit(request, self._stamp(self.env.now))
        refused = outcome.refusal.startswith("duplicate id") and not outcome.replan
        self.promises.check("refused_at_the_door", refused, self.env.now, f"{request.request_id}: {outcome}")

    def try_bad(self, make: Callable[[], Request]) -> None:
        """A request that cannot be: refused where it is made, or at the engine's door."""
        self.ledger.note("client.bad_request", self.env.now)
        waiting = self.engine.num_waiting
        try:
            request = make()
            refusal = self.engine.submit(request, self._stamp(self.env.now)).refusal
        except InvalidRequest as error:
            refusal = str(error)
        says_number = any(character.isdigit() for character in refusal)
        refused = says_number and self.engine.num_waiting == waiting
        self.promises.check("refused_at_the_door", refused, self.env.now, f"a bad request: {refusal or 'let in'}")

    def shut_down(self, give_up: bool) -> None:
        """Let nobody in any more; those inside finish, or are given up."""
        self.is_closed = True
        if give_up:
            for name in self.witness.live:
                self.cancel(name)

    @staticmethod
    def _remember(names: OrderedDict[str, None], name: str) -> None:
        names[name] = None
        if len(names) > MAX_REMEMBERED:
            names.popitem(last=False)

    def _report(self, finished: FinishedRequest) -> None:
        self.witness.reported(finished, self.env.now)
        super()._report(finished)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _stamp(self, time_ns: int) -> int:
        return self.clock.stamp(time_ns)

    def _launch(self, step: Step) -> None:
        if self._recount_due:
            self._recount_due = False
            self._recount()
        if step.decode is not None:
            valid = step.decode.steps in self.engine.controller.candidates
            self.promises.check("steps_valid", valid, self.env.now, f"{step.decode.steps} steps")
        self._set_device()
        super()._launch(step)
        for kind in self.ledger.kinds_at("step", self.replica, step.step_id, self.env.now):
            if kind in _DOOMS and kind not in self._at_launch:
                self._doomed[step.step_id] = _DOOMS[kind]
            if kind in self._at_launch:
                self.ledger.note(kind, self.env.now)
                self._at_launch[kind](step)
                self._recount_due = True

    def _set_device(self) -> None:
        now_ns = self.env.now
        self.device.factor = self.ledger.plan.device.slow.factor if now_ns < self._slow_until_ns else 1.0
        if now_ns >= self._drafts_until_ns:
            self.device.drafts = ""

    def _commit_oldest(self) -> Generator[simpy.Event, None, None]:
        self._set_device()
        flight = self._flights[0]
        doom = self._doom_of(flight.step)
        if doom is not None:
            yield from self._lose(flight, doom)
            return
        yield from super()._commit_oldest()

    def _run_single(self, flight: Flight) -> StepResult:
        return self._as_seen(super()._run_single(flight))

    def _run_block(self, flight: Flight) -> Generator[simpy.Event, None, StepResult]:
        result = yield from super()._run_block(flight)
        return self._as_seen(result)

    def _as_seen(self, result: StepResult) -> StepResult:
        """With the row that has failed, if one has. Rounds end on the clock that stamps everything else."""
        if self._nan_rows and (row := self._nan_rows.pop(result.step_id, 0)):
            result = replace(result, failures=((row, NO_NUMBERS),))
        if self.clock.is_true:
            return result
        ends = result.round_end_ns.copy()
        ends[:] = [self._stamp(end_ns) for end_ns in ends.tolist()]
        return replace(result, round_end_ns=ends)

    # -- steps that fail ----------------------------------------------------------------------------------------------

    def _doom_of(self, step: Step) -> Doom | None:
        doom = self._doomed.pop(step.step_id, None)
        if doom is not None:
            self.ledger.note(doom.kind, self.env.now)
            return doom
        if self.env.now < self._memory_until_ns and _num_tokens(step) > self._memory_limit:
            return _DOOMS["device.out_of_memory"]
        if self.device.is_poisoned(step):
            self.ledger.note("device.poison", self.env.now)
            return _DOOMS["device.poison"]
        return None

    def _lose(self, flight: Flight, doom: Doom) -> Generator[simpy.Event, None, None]:
        """The oldest step fails on its way; what was launched behind it is lost with it."""
        env, engine, plan, step = self.env, self.engine, self.ledger.plan.device, flight.step
        started_ns = max(self._device_free_ns, flight.launched_ns)
        if doom.cause is FailureCause.HUNG:
            lasts_ns = round(plan.hangs.watchdog_s * 1e9)
        else:
            share = self.ledger.draws.amount(doom.kind, self.replica, step.step_id)
            lasts_ns = int(share * self._device_ns(flight))
        yield until(env, max(started_ns + lasts_ns, self._cpu_free_ns, env.now))
        self.device.busy_ns += lasts_ns
        message = f"{doom.words}; in flight: {engine.describe_in_flight()}"
        rows = [int(row) for part in (step.prefill, step.decode) if part is not None for row in part.rows]
        outcome = engine.lose_steps(StepFailure(step.step_id, doom.cause, message), self._stamp(env.now))
        held = all(engine.store.table.is_held(row) for row in rows)
        self.promises.check("fenced", held, env.now, f"rows {rows} of step {step.step_id} are not all held")
        self._flights.clear()
        for step_id in outcome.step_ids:
            self._doomed.pop(step_id, None)
        for finished in outcome.finished:
            self._report(finished)
        restarted = doom.cause in (FailureCause.HUNG, FailureCause.WORKER_LOST)
        self._lost(outcome, restarted)
        self._recount()
        yield until(env, env.now + (round(self._away_s(doom) * 1e9) if restarted else DRAIN_NS))
        self._before_resume(restarted)
        engine.resume(self._stamp(env.now), restarted=restarted)
        self.promises.check("fenced", not engine.store.has_fenced, env.now, "a fence stands with nothing in flight")
        self._offer_late_result(step)
        self._recount()
        self._device_free_ns = self._cpu_free_ns = env.now
        self.ledger.last_ns = env.now

    def _away_s(self, doom: Doom) -> float:
        """How long a worker that is lost takes to come back."""
        plan = self.ledger.plan.device
        return plan.hangs.restart_s if doom.cause is FailureCause.HUNG else plan.restarts.restart_s

    def _lost(self, outcome: LossOutcome, restarted: bool) -> None:
        """Steps were lost; with `restarted` so is the worker."""

    def _before_resume(self, restarted: bool) -> None:
        """The device is quiet; with `restarted` it is a new one."""

    def _recount(self) -> None:
        self.promises.recount("books_agree", self.engine, self.env.now)

    @property
    def left_over(self) -> str:
        """What should not be there when everything is over, but for slots; empty if nothing."""
        return "" if self.engine.is_idle and not self.device.truths else "it is not idle"

    def _offer_late_result(self, step: Step) -> None:
        """The step that was given up comes back after all, from a worker that nobody waits for."""
        late = StepResult(step.step_id, None, None, np.array([self._stamp(self.env.now)], dtype=np.int64))
        try:
            self.engine.commit(late, self._stamp(self.env.now))
            refused = False
        except InvariantViolation as violation:
            refused = violation.invariant == "RELAY-07"
        self.promises.check("nothing_seen", refused, self.env.now, f"a late result of step {step.step_id} was taken")

    def _device_ns(self, flight: Flight) -> int:
        if flight.step.prefill is not None:
            return self.device.step_ns(flight.step)
        if flight.drawn is None:
            flight.drawn = self.device.draw(flight.step.decode, flight.step.max_rounds)
        return int(flight.drawn.device_ns[: flight.drawn.rounds].sum())

    # -- what happens beside the steps --------------------------------------------------------------------------------

    def _until(self, lasts_s: float) -> int:
        return self.env.now + round(lasts_s * 1e9)

    def _run_short_of_memory(self, step: Step) -> None:
        """From this step on, for a while: half of its tokens is what fits, but never less than one request alone needs."""
        engine = self.engine
        alone = max(
            engine.config.chunk_size // 8, engine.controller.num_draft_tokens_for(engine.controller.fewest_steps(1), 1)
        )
        self._memory_limit = max(_num_tokens(step) // 2, alone)
        self._memory_until_ns = self._until(self.ledger.plan.device.out_of_memory.lasts_s)

    def _lose_numbers(self, step: Step) -> None:
        rows = (step.decode if step.decode is not None else step.prefill).rows
        share = self.ledger.draws.amount("device.nan", self.replica, step.step_id)
        self._nan_rows[step.step_id] = int(rows[int(share * len(rows))])

    def _slow_down(self, step: Step) -> None:
        self._slow_until_ns = self._until(self.ledger.plan.device.slow.lasts_s)

    def _draft_right(self, step: Step) -> None:
        self.device.drafts = "right"
        self._drafts_until_ns = self._until(self.ledger.plan.draft.right.lasts_s)

    def _draft_wrong(self, step: Step) -> None:
        self.device.drafts = "wrong"
        self._drafts_until_ns = self._until(self.ledger.plan.draft.wrong.lasts_s)

    def _feed_nonsense(self, step: Step) -> None:
        controller = self.engine.controller
        before = controller.snapshot()
        most = controller.max_num_draft_tokens
        for nonsense in ([float("nan")], [float("inf")], [-1], [most + 5], [1e300], [0.0, float("-inf")]):
            try:
                controller.on_verify_complete(nonsense, 1, controller.max_steps)
                refused = False
            except InvalidObservation:
                refused = True
            kept = refused and controller.snapshot() == before
            self.promises.check("steps_valid", kept, self.env.now, f"feedback of {nonsense} was taken")

    def _deny(self, step: Step) -> None:
        self.engine.deny_allocations(self.ledger.plan.pool.denied.count, self._stamp(self.env.now))

    def _retract(self, step: Step) -> None:
        running = self.engine.running_ids
        if running:
            share = self.ledger.draws.amount("pool.retraction", self.replica, step.step_id)
            soon = self.engine.request_retraction(running[int(share * len(running))], self._stamp(self.env.now))
            if (
                soon and self._flights[-1].launched_ns is not None
            ):  # else the step is the tail of a block, which goes on
                self._stop_id = self.engine.last_step_id

    def _jump(self, step: Step) -> None:
        share = 2 * self.ledger.draws.amount("clock.jump", self.replica, step.step_id) - 1
        self.clock.jump(self.env.now, int(share * self.ledger.plan.clock.jump.jump_s * 1e9))

    def _freeze(self, step: Step) -> None:
        self.clock.freeze(self.env.now, round(self.ledger.plan.clock.freeze.lasts_s * 1e9))

    def _reload_half(self, step: Step) -> None:
        """A table that was cut off while it was written."""
        controller = self.engine.controller
        before, config = controller.snapshot(), controller.policy.config
        slots = zip(config.bounds, config.slots, strict=True)
        text = json.dumps({str(bound): {"candidate_steps": list(slot.candidate_steps)} for bound, slot in slots})
        share = self.ledger.draws.amount("config.half_written", self.replica, step.step_id)
        try:
            controller.reload(text[: 1 + int(share * (len(text) - 1))], "reload")
            refused = False
        except ConfigError:
            refused = True
        kept = refused and controller.snapshot() == before and controller.policy.config is config
        self.promises.check("last_good_config", kept, self.env.now, "half a table was taken")


def _num_tokens(step: Step) -> int:
    """Tokens that a step computes in its largest pass."""
    tokens = 0 if step.prefill is None else int(step.prefill.lens.sum())
    return tokens + (0 if step.decode is None else len(step.decode.rows) * step.decode.num_draft_tokens)
