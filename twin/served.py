"""Serves requests on the real executor as they arrive, and notes how long each move of its loop takes."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ..core.contract.events import Committed, Event
from ..core.contract.request import Request
from ..core.contract.step import Step, StepResult
from ..core.errors import ConfigError, ForedraftError, InvariantViolation
from ..core.scheduler.driver import Driver
from ..observe.measuring.metrics import RunMetrics
from .arms import TwinArm

WALL, CPU = "wall", "cpu"


class Clock:
    """Real time, in nanoseconds from `start`."""

    read_ns = staticmethod(time.perf_counter_ns)
    _start_ns = 0

    def start(self) -> None:
        self._start_ns = self.read_ns()

    def now_ns(self) -> int:
        return self.read_ns() - self._start_ns

    def sleep_until(self, at_ns: int) -> None:
        left_ns = at_ns - self.now_ns()
        if left_ns > 0:
            time.sleep(left_ns / 1e9)


class CpuClock(Clock):
    """The processor time of this thread; waiting takes none, it moves the clock on.
    For a busy machine: other processes do not count."""

    read_ns = staticmethod(time.thread_time_ns)

    def sleep_until(self, at_ns: int) -> None:
        self._start_ns -= max(at_ns - self.now_ns(), 0)


def make_clock(name: str, device: str) -> Clock:
    """Return the clock called "wall" or "cpu". Raises ConfigError where processor time is not the time of the work."""
    if name not in (WALL, CPU):
        raise ConfigError.of("<arguments>", "clock", f"{name!r} is neither {WALL} nor {CPU}")
    if name == WALL:
        return Clock()
    if device != "cpu" or torch.get_num_threads() > 1:
        threads = (
            "another device does the work" if device != "cpu" else f"{torch.get_num_threads()} threads share the work"
        )
        raise ConfigError.of("<arguments>", "clock", f"cpu measures one thread of this process; {threads}")
    return CpuClock()


@dataclass(frozen=True, slots=True)
class TimedOrder:
    """A request and when it arrives; None: when one of the clients of a closed loop is free."""

    request: Request
    arrival_ns: int | None

    @property
    def due_ns(self) -> int:
        """When it arrives, of a request that waits for no client."""
        assert self.arrival_ns is not None, "requests of an open loop have their times"
        return self.arrival_ns


@dataclass(frozen=True, slots=True)
class StepLap:
    """One committed step, its result, and the nanoseconds of each move. `run_ns`: from the request for the result to
    its arrival."""

    step: Step
    result: StepResult
    plan_ns: int
    launch_ns: int
    run_ns: int
    commit_ns: int
    ended_ns: int  # on the run's clock

    @property
    def rows(self) -> int:
        """Rows that were planned: prompts in prefill, and decoding."""
        return (0 if self.step.prefill is None else len(self.step.prefill.rows)) + self.decode_rows

    @property
    def decode_rows(self) -> int:
        return 0 if self.step.decode is None else len(self.step.decode.rows)

    @property
    def tokens(self) -> int:
        """Tokens that the step brought, first ones included."""
        first = 0 if self.step.prefill is None else int(np.count_nonzero(self.step.prefill.is_last))
        return first + (0 if self.result.decode is None else int(self.result.decode.accept_lens.sum()))

    @property
    def host_ns(self) -> int:
        return self.plan_ns + self.launch_ns + self.commit_ns


@dataclass(slots=True)
class ServedRun:
    """A finished run: its events, and its steps."""

    events: list[Event]
    laps: list[StepLap] = field(default_factory=list)
    busy_s: float = 0.0  # not waiting for an arrival
    processor_s: float = 0.0  # of this thread, meanwhile

    @property
    def processor_share(self) -> float:
        """The share of the busy time in which this thread had a processor;
        on a quiet machine, with one thread, nearly 1."""
        return min(self.processor_s / self.busy_s, 1.0) if self.busy_s else 1.0

    def metrics(self) -> RunMetrics:
        """Return the run's metrics. A token counts as delivered when its step is committed, as in a simulation."""
        ended = {lap.step.step_id: lap.ended_ns for lap in self.laps}
        events = []
        for event in self.events:
            if isinstance(event, Committed):
                at = ended[event.step.step_id]
                ends = np.full(len(event.result.round_end_ns), at)
                event = replace(event, now_ns=at, result=replace(event.result, round_end_ns=ends))
            events.append(event)
        # Requests arrive while a step runs, but are noted after it.
        return metrics_of(sorted(events, key=lambda event: getattr(event, "now_ns", -1)))


def metrics_of(events: Sequence[Event]) -> RunMetrics:
    """Return the metrics of the events of one engine, in order of time."""
    metrics = RunMetrics(num_buckets=10)
    take = metrics.sink(0)
    for event in events:
        take(event)
    metrics.flush()
    return metrics


class _TimedDriver(Driver):
    """Notes when each move of a turn begins and ends."""

    def launch(self, step: Step) -> None:
        self.launch_begin_ns = self.clock_ns()
        super().launch(step)
        self.launch_end_ns = self.clock_ns()
        self.moves[step.step_id] = (
            step,
            self.launch_begin_ns - self.turn_begin_ns,
            self.launch_end_ns - self.launch_begin_ns,
        )
        self.turn_begin_ns = self.launch_end_ns

    def collect(self) -> StepResult:
        self.collect_begin_ns = self.clock_ns()
        self.result = super().collect()
        self.collect_end_ns = self.clock_ns()
        return self.result

    def begin_turn(self) -> None:
        self.turn_begin_ns = self.clock_ns()

    moves: dict[int, tuple[Step, int, int]]
    turn_begin_ns = 0


def serve(
    arm: TwinArm, asked: Sequence[TimedOrder], clock: Clock | None = None, concurrency: int | None = None, seed: int = 0
) -> ServedRun:
    """Serve `asked` to their end. With `concurrency` that many clients send one after another; else requests come at
    their times.

    Raises ForedraftError if a request is refused, KeyboardInterrupt as it comes.
    """
    events: list[Event] = []
    engine, executor = arm.real_engine(events.append, seed)
    gc.collect()
    gc.freeze()  # what was made up to here is not looked at again while steps are timed
    try:
        return _Serving(_TimedDriver(engine, executor), clock or Clock(), events, concurrency).run(asked)
    finally:
        gc.unfreeze()


class _Serving:
    def __init__(self, driver: _TimedDriver, clock: Clock, events: list[Event], concurrency: int | None) -> None:
        self.driver, self.clock, self.concurrency = driver, clock, concurrency
        driver.clock_ns, driver.moves = clock.now_ns, {}
        self.served = ServedRun(events)

    def run(self, asked: Sequence[TimedOrder]) -> ServedRun:
        driver, clock, engine = self.driver, self.clock, self.driver.engine
        waiting = deque(asked)
        clients = self.concurrency
        clock.start()
        begin_s, begin_cpu, idle_s = time.perf_counter(), time.thread_time(), 0.0
        driver.begin_turn()
        while True:
            now_ns = clock.now_ns()
            while waiting and (clients if clients is not None else waiting[0].due_ns <= now_ns):
                one = waiting.popleft()
                self._submit(one.request, now_ns if clients is not None else one.due_ns)
                clients = None if clients is None else clients - 1
            driver.plan()
            if engine.num_uncommitted:
                outcome = driver.commit()
                assert outcome is not None, "a step is in flight"
                self._note()
                clients = None if clients is None else clients + len(outcome.finished)
            elif not engine.is_idle:
                raise InvariantViolation("ENGINE-11", "requests wait, nothing runs, and no step is planned")
            elif not waiting:
                break
            else:
                since = time.perf_counter()
                clock.sleep_until(waiting[0].due_ns)
                idle_s += time.perf_counter() - since
                driver.begin_turn()
        self.served.busy_s = time.perf_counter() - begin_s - idle_s
        self.served.processor_s = time.thread_time() - begin_cpu
        return self.served

    def _submit(self, request: Request, at_ns: int) -> None:
        outcome = self.driver.engine.submit(request, at_ns)
        if outcome.refusal:
            raise ForedraftError(f"request {request.request_id!r} of the workload was refused: {outcome.refusal}")
        self.driver.interrupt(outcome.replan)

    def _note(self) -> None:
        driver, ended_ns = self.driver, self.clock.now_ns()
        step, plan_ns, launch_ns = driver.moves.pop(driver.result.step_id)
        # What the loop does between its moves belongs to the plan; the last plan of a turn, which finds nothing, as
        # well.
        plan_ns += driver.collect_begin_ns - driver.turn_begin_ns
        run_ns, commit_ns = driver.collect_end_ns - driver.collect_begin_ns, ended_ns - driver.collect_end_ns
        self.served.laps.append(StepLap(step, driver.result, plan_ns, launch_ns, run_ns, commit_ns, ended_ns))
        driver.turn_begin_ns = ended_ns
