"""The scheduler's CPU thread: drives one `core.Engine` and one device on simulated time.

```
cpu     plan k │ launch │ commit k−1 │ plan k+1 │ launch │ commit k │ …          overlap: what the device hides is free
device         └───────── run k ───────────────┘└────── run k+1 ────
```

Look-ups need the tokens of the step before: k + 1 is planned while k runs, and launched when it has ended, before it is
committed. Nothing hides this launch.

Host time is charged per round. In a multi-step it is charged as if the rounds were single steps, although the next
round is not planned there. The one step that is planned while a multi-step runs (its *tail*) is charged as the round
after the multi-step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

import numpy as np
import simpy

from ...core.contract.arrays import total_of
from ...core.contract.outcomes import LossOutcome
from ...core.contract.request import FinishedRequest, FinishReason, Request
from ...core.contract.step import DecodeStep, Step, StepFailure, StepResult
from ...core.errors import InvariantViolation
from ...core.scheduler.engine import Engine
from ..cost.host import NO_DELAY, FrontEnd
from .clock import Environment, turn_priority, until
from .device import DrawnRounds, SimulatedDevice, Truth
from .hooks import NO_HOOKS, HandoffPart, Hooks, NoHandoff, StepFault
from .host_work import HostWork
from .intake import Intake
from .multi_step_times import RunningMultiStep, overlap_times, synchronous_times
from .spans import EngineSpans, SpanSink

NOTHING_LOST = LossOutcome((), ())


@dataclass(slots=True)
class StepFlight:
    """A planned step on its way. `launched_ns` is None for the tail of a multi-step that has not ended."""

    step: Step
    launched_ns: int | None
    host_ns: int  # planning and launching it, on average
    late_ns: int = 0  # of that, when the step before has ended
    waits: bool = False  # for that end
    drawn: DrawnRounds | None = None


class EngineActor:
    """One replica. Messages arrive by `receive` and `cancel`; ends of requests are reported to `on_finished`."""

    def __init__(
        self,
        env: Environment,
        replica: int,
        engine: Engine,
        device: SimulatedDevice,
        host: HostWork,
        on_finished: Callable[[int, FinishedRequest], None],
        spans: SpanSink | None = None,
        hooks: Hooks = NO_HOOKS,
        front_end: FrontEnd = NO_DELAY,
        lane: int = 0,
    ) -> None:
        self.env = env
        self.replica = replica
        self.lane = lane
        self.engine = engine
        self.device = device
        self.host = host
        self.hooks = hooks
        self.intake: Intake = Intake(env, front_end, self._look_soon, lane)
        self.handoff: HandoffPart = NoHandoff(engine, lambda: hooks.stamp(env.now))  # a cluster sets its own
        self.rounds: int = 0
        self.worked_until_ns: int = 0  # when the newest result, or its loss, was taken
        self.on_first_token: Callable[[int, str], None] | None = (
            None  # called with the replica's number and the request
        )
        self.ran_ns: tuple[int, int] = (0, 0)  # from and to when the device was at the newest step of one round
        self.next_commit: tuple[Step, StepResult] | None = None  # a single round that is drawn and not over
        self._on_finished = on_finished
        self._spans: EngineSpans = EngineSpans(replica, spans)
        self._flights: deque[StepFlight] = deque()
        self._cpu_free_ns = 0
        self._device_free_ns = 0
        self._stop_id = 0  # steps up to here end at their next round boundary
        self._tail_planned_ns = 0
        self._idle: simpy.Event | None = None
        self._multi_step: RunningMultiStep | None = None  # a multi-step that messages may end early
        self.process: simpy.Process = env.process(self._run())

    # -- messages -----------------------------------------------------------------------------------------------------

    def receive(self, request: Request, truth: Truth) -> None:
        """Take a request that arrives at the server now."""
        if self.intake.front_end.delays:
            request = replace(request, arrived_ns=self.hooks.stamp(self.env.now))
        self.intake.pass_on(request.prompt.length, self._submit, request, truth)

    def _submit(self, request: Request, truth: Truth) -> None:
        refusal = self.hooks.on_request(request, truth)
        if refusal is None:
            return
        if refusal:
            self._refuse(request, refusal)
            return
        self.device.truths[request.request_id] = truth
        outcome = self.handoff.submit(request)
        if outcome.refusal:
            del self.device.truths[request.request_id]
            self._refuse(request, outcome.refusal)
        self.wake(outcome.replan)

    def _refuse(self, request: Request, reason: str) -> None:
        self._on_finished(self.replica, FinishedRequest(request.request_id, FinishReason.ERROR, 0, message=reason))

    def cancel(self, request_id: str) -> None:
        """Take a client's cancel, which arrives at the server now."""
        self.intake.pass_on(0, self._cancel, request_id)

    def _cancel(self, request_id: str) -> None:
        if self.hooks.on_cancel(request_id):
            self.abort(request_id)

    def abort(self, request_id: str) -> None:
        """End a request now."""
        outcome = self.handoff.abort(request_id)
        if outcome.finished is not None:
            self.report(outcome.finished)
        self.wake(outcome.replan)

    def wake(self, replan: bool) -> None:
        """Plan again if the actor waits for work.
        With `replan`, also end the steps in flight at their next round boundary."""
        if self._idle is not None:
            idle, self._idle = self._idle, None
            idle._ok, idle._value = True, None  # what `Event.succeed` does, which takes no priority
            self.env.schedule(idle, priority=turn_priority(self.lane))
        elif replan:
            self._stop_id = self.engine.last_step_id
            self._look_at_multi_step()

    def _look_soon(self) -> None:
        """Look at the queue now if nothing runs; else let a running multi-step end where the scheduler looks again."""
        if self._idle is not None:
            self.intake.release()
        else:
            self._look_at_multi_step()

    def _look_at_multi_step(self) -> None:
        """Let a running multi-step find out where it ends now."""
        if self._multi_step is not None:
            self._multi_step = None
            self.process.interrupt()

    def stop_launched_steps(self) -> None:
        """End the steps in flight after one round each; not the tail of a multi-step, which goes on."""
        if self._flights[-1].launched_ns is not None:
            self._stop_id = self.engine.last_step_id

    def report(self, finished: FinishedRequest) -> None:
        """Pass on the end of a request that was submitted."""
        self.hooks.on_finished(finished)
        del self.device.truths[finished.request_id]
        self._on_finished(self.replica, finished)

    # -- the main loop ------------------------------------------------------------------------------------------------

    def _run(self) -> Generator[simpy.Event, None, None]:
        env, engine, stamp = self.env, self.engine, self.hooks.stamp
        while True:
            self.intake.look()
            step = engine.plan(stamp(env.now))
            if step is not None:
                self.hooks.before_launch(step)
                self._launch(step)
                self.hooks.after_launch(step)
                self.handoff.launched()
                if engine.num_uncommitted < engine.pipeline_depth:
                    if not env.passed(self._cpu_free_ns):
                        yield until(env, self._cpu_free_ns, self.lane)
                    continue
            elif not engine.num_uncommitted:
                yield from self._wait_for_work()
                continue
            yield from self._commit_oldest()

    def _wait_for_work(self) -> Generator[simpy.Event, None, None]:
        if self.intake.is_waiting:
            self.intake.release()
            return
        fault = self.hooks.fault_of(None)
        if fault is not None:
            self.handoff.lost(NOTHING_LOST, fault.restarts)
            yield from self._resume(None, fault)
            return
        self.handoff.before_wait()
        if not self.engine.is_idle and not self.handoff.may_wait:
            raise InvariantViolation("ENGINE-07", "requests wait, nothing runs, and the plan is empty")
        self._idle = self.env.event()
        yield self._idle
        self._cpu_free_ns = self.env.now

    def _launch(self, step: Step) -> None:
        """Charge planning and launching, now or, behind a multi-step, as part of it."""
        batch_size = (len(step.prefill.rows) if step.prefill is not None else 0) + (
            len(step.decode.rows) if step.decode is not None else 0
        )
        host_ns, late_ns = self.host.mean_launch_ns(batch_size), self.host.mean_late_ns(batch_size)
        self.device.open_rows(step.joins)
        self.intake.launched(step)
        if self._flights and self._is_multi_step(self._flights[0]):
            self._flights.append(StepFlight(step, None, host_ns, late_ns))
            self._tail_planned_ns = self.env.now
            return
        # The steps in flight run one round each.
        waits = late_ns > 0 and bool(self._flights)
        charged_ns = host_ns - late_ns if waits else host_ns
        taken_ns = self.host.launch_ns(self.device.num_run + len(self._flights), charged_ns)
        self._cpu_free_ns = self.env.now + taken_ns
        self._flights.append(StepFlight(step, self._cpu_free_ns, host_ns, late_ns, waits))
        self._spans.add_host("plan", step, self.env.now, taken_ns)

    def _is_multi_step(self, flight: StepFlight) -> bool:
        """Return whether a step will run more than one round, as far as its requests and the driver let it.
        Draws its rounds."""
        step = flight.step
        if step.max_rounds == 1 or step.step_id <= self._stop_id:
            return False
        if flight.drawn is None:
            assert step.decode is not None, "a step of several rounds has a decode part"
            flight.drawn = self.device.draw(step.decode, step.max_rounds)
        return flight.drawn.rounds > 1

    def _commit_oldest(self) -> Generator[simpy.Event, None, None]:
        flight = self._flights[0]
        fault = self.hooks.fault_of(flight.step)
        if fault is not None:
            yield from self._lose_steps(flight, fault)
            return
        if self._is_multi_step(flight):
            assert flight.step.decode is not None and flight.drawn is not None
            result = yield from self._run_multi_step(flight, flight.step.decode, flight.drawn)
        else:
            result = self._run_single(flight)
            self.next_commit = flight.step, result
            if not self.env.passed(self._cpu_free_ns):
                yield until(self.env, self._cpu_free_ns, self.lane)
            self.next_commit = None
        self._flights.popleft()
        self.worked_until_ns = self.env.now
        outcome = self.engine.commit(self.hooks.after_run(result), self.hooks.stamp(self.env.now))
        if self.on_first_token is not None:
            for request_id in outcome.first_tokens:
                self.on_first_token(self.replica, request_id)
        for finished in outcome.finished:
            self.report(finished)
        self.handoff.committed(outcome)

    # -- a step that fails --------------------------------------------------------------------------------------------

    def _lose_steps(self, flight: StepFlight, fault: StepFault) -> Generator[simpy.Event, None, None]:
        """Let the oldest step fail while it runs, and with it those launched behind it; then resume."""
        env, engine = self.env, self.engine
        started_ns = self._start_ns(flight)
        lasts_ns = fault.timeout_ns
        if lasts_ns is None:
            lasts_ns = int(fault.run_share * self._device_ns(flight))
        yield until(env, max(started_ns + lasts_ns, self._cpu_free_ns, env.now), self.lane)
        self.device.busy_ns += lasts_ns
        self.worked_until_ns = env.now
        message = f"{fault.message}; in flight: {engine.requests.describe_in_flight()}"
        failure = StepFailure(flight.step.step_id, fault.cause, message)
        outcome = engine.lose_steps(failure, self.hooks.stamp(env.now))
        self._flights.clear()
        for finished in outcome.finished:
            self.report(finished)
        self.handoff.lost(outcome, fault.restarts)
        self.hooks.after_loss(flight.step, outcome)
        yield from self._resume(flight.step, fault)

    def _resume(self, step: Step | None, fault: StepFault) -> Generator[simpy.Event, None, None]:
        """Wait until the device is quiet, or a new worker runs, and plan again."""
        yield until(self.env, self.env.now + fault.away_ns, self.lane)
        if fault.restarts:
            while not self.handoff.may_restart:
                yield until(self.env, self.env.now + fault.away_ns, self.lane)
            self.handoff.restarted()
        self.engine.resume(self.hooks.stamp(self.env.now), restarted=fault.restarts)
        self.hooks.after_resume(step, fault.restarts)
        self._device_free_ns = self._cpu_free_ns = self.env.now

    def _device_ns(self, flight: StepFlight) -> int:
        if flight.step.prefill is not None:
            return self.device.step_ns(flight.step)
        if flight.drawn is None:
            assert flight.step.decode is not None, "a step without prompts decodes"
            flight.drawn = self.device.draw(flight.step.decode, flight.step.max_rounds)
        return int(flight.drawn.device_ns[: flight.drawn.rounds].sum())

    def _start_ns(self, flight: StepFlight) -> int:
        """Return when the device begins the oldest step in flight; it was launched, as no multi-step runs before it."""
        assert flight.launched_ns is not None
        return max(self._device_free_ns, flight.launched_ns)

    # -- one step -----------------------------------------------------------------------------------------------------

    def _run_single(self, flight: StepFlight) -> StepResult:
        """Run a step of one round: its result, and the times at which device and CPU are free again."""
        step, device = flight.step, self.device
        number = device.num_run
        decode = prefill = drawn = None
        tokens = 0
        if step.prefill is not None:
            if step.decode is not None:
                drawn = device.draw(step.decode, 1, timed=False)
            device_ns = device.step_ns(step, drawn)
            prefill = device.prefill(step)
            tokens = int(np.count_nonzero(step.prefill.is_last))
        else:
            assert step.decode is not None, "a step without prompts decodes"
            drawn = flight.drawn if flight.drawn is not None else device.draw(step.decode, 1)
            device_ns = int(drawn.device_ns[0])
        if step.decode is not None and drawn is not None:
            decode = device.apply(step.decode, drawn, 1, asked=step.max_rounds > 1)
            tokens += int(drawn.emitted[0])
            self.rounds += 1
        started_ns = self._start_ns(flight)
        self._device_free_ns = started_ns + device_ns
        self.ran_ns = (started_ns, self._device_free_ns)
        committing_ns = self._launch_waiting(number, max(self._cpu_free_ns, self._device_free_ns))
        commit_ns = self.host.commit_ns(number, step.decode, tokens)
        self._cpu_free_ns = committing_ns + commit_ns
        device.busy_ns += device_ns
        self._spans.add_device(step, started_ns, device_ns, 1)
        self._spans.add_host("commit", step, committing_ns, commit_ns)
        return StepResult(step.step_id, prefill, decode, np.array([self._cpu_free_ns], dtype=np.int64))

    def _launch_waiting(self, number: int, now_ns: int) -> int:
        """Launch the step that waits for the end of the oldest one, if there is one. Returns when the CPU is free
        again. `number`: of the oldest step's round."""
        if len(self._flights) < 2 or not self._flights[1].waits:
            return now_ns
        behind = self._flights[1]
        taken_ns = self.host.launch_ns(number + 1, behind.late_ns)
        behind.launched_ns = launched_ns = now_ns + taken_ns
        self._spans.add_host("launch", behind.step, now_ns, taken_ns)
        return launched_ns

    # -- a multi-step -------------------------------------------------------------------------------------------------

    def _run_multi_step(
        self, flight: StepFlight, decode: DecodeStep, drawn: DrawnRounds
    ) -> Generator[simpy.Event, None, StepResult]:
        """Run a multi-step until it ends, or to the first round boundary at which the CPU would plan and see new
        arrivals."""
        step = flight.step
        has_tail = len(self._flights) > 1  # none in synchronous mode, nor where a step behind the multi-step got no KV
        started_ns = self._start_ns(flight)
        number = self.device.num_run
        commit_ns = self.host.commits_ns(number, decode, drawn)
        if has_tail:
            plan_ns = self.host.launches_ns(number, flight.host_ns - flight.late_ns, drawn.rounds)
            late_ns = self.host.launches_ns(number, flight.late_ns, drawn.rounds) if flight.late_ns else 0
            times = overlap_times(started_ns, self._tail_planned_ns, drawn.device_ns, commit_ns, plan_ns, late_ns)
        else:
            launch_ns = self.host.launches_ns(number, flight.host_ns, drawn.rounds)
            times = synchronous_times(started_ns, drawn.device_ns, commit_ns, launch_ns)
        running = RunningMultiStep(times, drawn.rounds)
        if self.intake.is_waiting:
            running.end_after(self.intake.rounds_before_look(1))
        if not self.env.passed(running.end_ns):
            yield from self._until_end(step, running)
        rounds = running.rounds
        asked = rounds < drawn.rounds
        self.intake.count_rounds(rounds - 1)
        self._device_free_ns = int(times.device_end_ns[rounds - 1])
        self._cpu_free_ns = self.env.now
        if has_tail:
            self._flights[1].launched_ns = int(times.next_launch_ns[rounds - 1])
        self.device.busy_ns += total_of(drawn.device_ns[:rounds])
        self.rounds += rounds
        self._spans.add_device(step, started_ns, self._device_free_ns - started_ns, rounds)
        decoded = self.device.apply(decode, drawn, rounds, asked)
        return StepResult(step.step_id, None, decoded, times.commit_end_ns[:rounds])

    def _until_end(self, step: Step, running: RunningMultiStep) -> Generator[simpy.Event, None, None]:
        """Wait for the end of a multi-step, which each message that the scheduler must see may bring forward."""
        self._multi_step, has_ended = running, False
        while not has_ended:
            try:
                yield until(self.env, running.end_ns, self.lane)
                has_ended = True
            except simpy.Interrupt:
                in_round = running.round_at(self.env.now)
                is_asked = step.step_id <= self._stop_id
                running.end_after(in_round if is_asked else self.intake.rounds_before_look(in_round))
                self._multi_step = running if running.rounds > in_round else None
        self._multi_step = None
