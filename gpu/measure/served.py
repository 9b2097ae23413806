"""Serves requests on a real executor as they arrive, and notes how long each move of its loop takes."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...core.contract.events import Committed, Event
from ...core.contract.outcomes import CommitOutcome
from ...core.contract.request import Request
from ...core.contract.step import Step, StepResult
from ...core.errors import ForedraftError, InvariantViolation
from ...core.scheduler.driver import Driver, Executor
from ...core.scheduler.engine import Engine
from ...observe.measuring.metrics import RunMetrics
from .clock import Clock, CpuClock


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
    its arrival. `kept`: tokens that each round delivered to each row, int64 [rounds, bs]; None without rounds."""

    step: Step
    result: StepResult
    plan_ns: int
    launch_ns: int
    run_ns: int
    commit_ns: int
    ended_ns: int  # on the run's clock
    kept: np.ndarray | None = None

    @property
    def arrived_ns(self) -> int:
        """When the result was there, on the run's clock."""
        return self.ended_ns - self.commit_ns

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
    def has_ended_one(self) -> bool:
        """Whether a row has ended in one of its rounds."""
        return self.result.decode is not None and bool(self.result.decode.ended.any())

    @property
    def host_ns(self) -> int:
        return self.plan_ns + self.launch_ns + self.commit_ns


@dataclass(slots=True)
class ServedRun:
    """A finished run: its steps, and its events if they were kept."""

    begin_ns: int  # on its clock
    laps: list[StepLap] = field(default_factory=list)
    events: Sequence[Event] = ()
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
    """Makes a lap of each step: when its moves begin and end."""

    laps: list[StepLap]
    _mark_ns = 0  # the end of the last move

    def __init__(self, engine: Engine, executor: Executor, clock_ns: Callable[[], int]) -> None:
        super().__init__(engine, executor, clock_ns)
        self.laps = []
        self._launched: dict[int, tuple[Step, int, int]] = {}
        self._collected: tuple[StepResult, int, int] | None = None

    def begin_turn(self) -> None:
        self._mark_ns = self.clock_ns()

    def launch(self, step: Step) -> None:
        begin_ns = self.clock_ns()
        super().launch(step)
        end_ns = self.clock_ns()
        self._launched[step.step_id] = (step, begin_ns - self._mark_ns, end_ns - begin_ns)
        self._mark_ns = end_ns

    def collect(self) -> StepResult:
        begin_ns = self.clock_ns()
        result = super().collect()
        self._collected = result, begin_ns, self.clock_ns()
        return result

    def commit(self) -> CommitOutcome | None:
        outcome = super().commit()
        if outcome is not None:
            assert self._collected is not None, "what is committed was collected"
            ended_ns = self.clock_ns()
            result, begin_ns, end_ns = self._collected
            step, plan_ns, launch_ns = self._launched.pop(result.step_id)
            # What the loop does between its moves belongs to the plan; the last plan of a turn, which finds nothing,
            # as well.
            plan_ns += begin_ns - self._mark_ns
            moves = plan_ns, launch_ns, end_ns - begin_ns, ended_ns - end_ns
            self.laps.append(StepLap(step, result, *moves, ended_ns, outcome.kept))
            self._mark_ns = ended_ns
        return outcome


GoesOn = Callable[[StepLap], bool]
"""Called with each step once it is committed; where it answers False, the rest is given up."""


class TimedServing:
    """Serves requests with one engine and its executor, again and again, by one clock."""

    def __init__(self, engine: Engine, executor: Executor, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        self._driver = _TimedDriver(engine, executor, clock.now_ns)

    def run(
        self, asked: Sequence[TimedOrder], concurrency: int | None = None, goes_on: GoesOn = lambda lap: True
    ) -> ServedRun:
        """Serve `asked` to their end. With `concurrency` that many clients send one after another; else requests come
        at their times.

        Raises ForedraftError if a request is refused, KeyboardInterrupt as it comes.
        """
        gc.collect()
        gc.freeze()  # what was made up to here is not looked at again while steps are timed
        try:
            return self._run(asked, concurrency, goes_on)
        finally:
            gc.unfreeze()

    def _run(self, asked: Sequence[TimedOrder], clients: int | None, goes_on: GoesOn) -> ServedRun:
        driver, clock, engine = self._driver, self._clock, self._engine
        waiting, live = deque(asked), set[str]()
        served = ServedRun(clock.now_ns())
        driver.laps = served.laps
        begin_ns, begin_cpu_ns, idle_ns = Clock.read_ns(), CpuClock.read_ns(), 0  # whatever clock the run has
        driver.begin_turn()
        while True:
            now_ns = clock.now_ns()
            while waiting and (clients if clients is not None else waiting[0].due_ns <= now_ns):
                one = waiting.popleft()
                self._submit(one.request, now_ns if clients is not None else one.due_ns)
                live.add(one.request.request_id)
                clients = None if clients is None else clients - 1
            driver.plan()
            if (outcome := driver.commit()) is not None:
                live -= {end.request_id for end in outcome.finished}
                clients = None if clients is None else clients + len(outcome.finished)
                if not goes_on(served.laps[-1]):
                    break
            elif not engine.is_idle:
                raise InvariantViolation("ENGINE-11", "requests wait, nothing runs, and no step is planned")
            elif not waiting:
                break
            else:
                since_ns = Clock.read_ns()
                clock.sleep_until(waiting[0].due_ns)
                idle_ns += Clock.read_ns() - since_ns
                driver.begin_turn()
        served.busy_s = (Clock.read_ns() - begin_ns - idle_ns) / 1e9
        served.processor_s = (CpuClock.read_ns() - begin_cpu_ns) / 1e9
        self._give_up(live)
        return served

    def _submit(self, request: Request, at_ns: int) -> None:
        outcome = self._engine.submit(request, at_ns)
        if outcome.refusal:
            raise ForedraftError(f"request {request.request_id!r} of the workload was refused: {outcome.refusal}")
        self._driver.interrupt(outcome.replan)

    def _give_up(self, live: set[str]) -> None:
        """Abort what is live, and let the steps in flight end, which count no longer."""
        self._driver.laps = []
        for request_id in sorted(live):
            self._driver.abort(request_id)
        while self._driver.turn() is not None:
            pass
