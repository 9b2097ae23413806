"""One way of decoding that is timed, and a batch of requests that it serves again and again.

submit │ prefill of all rows │ round │ round │ … │ round in which the first row ends │ give up, drain
                             └───────── timed: the batch is full throughout ─────────┘

If there are more prompts than rows in a batch, they are served batch by batch, and the times are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from ...core.acceptance.process import AcceptanceProcess
from ...core.contract.events import Event, EventSink
from ...core.contract.request import Request
from ...core.prompt import Prompt
from ...core.scheduler.engine import Engine
from ...core.scheduler.spec import EngineSpec
from ..executor.build import build_executor
from ..executor.executor import TorchExecutor
from ..executor.graphs import CaptureReport
from ..executor.parts import DraftModel, ExecutorOptions
from ..models.decoder import Decoder
from ..parallel.ranks import RankedExecutor
from ..session.loop import DeliverySink
from ..types.ops import Ops
from .clock import Clock, wall_and_cpu_s
from .floor import RoundBytes, round_bytes
from .served import GoesOn, ServedRun, StepLap, TimedOrder, TimedServing

ROUND_PHASES = ("draft", "verify", "graph", "relay")  # the executor's phases within a decode round


@dataclass(frozen=True, slots=True)
class Arm:
    """A named way of decoding: `spec`, of which its engine is made, and the models that its executor runs."""

    name: str
    spec: EngineSpec
    target: Decoder
    draft: DraftModel | None
    ops: Ops
    acceptance: AcceptanceProcess | None = None  # simulated; None: as the draft's tokens are accepted
    seed: int = 0

    @property
    def algorithm(self) -> str:
        return self.spec.algorithm

    def executor(self, engine: Engine) -> TorchExecutor:
        """Make the executor of an `engine` that `spec` has made. Timed requests are greedy and ask for no outputs, so
        no graphs are captured for others."""
        options = ExecutorOptions(
            graph_sizes=self.spec.graph_sizes,
            graph_sampling=False,
            graph_outputs=False,
            acceptance=self.acceptance,
            seed=self.seed,
        )
        return build_executor(engine, self.target, self.draft, self.ops, options)

    def open(self, events: EventSink) -> tuple[Engine, TorchExecutor]:
        """Make an engine and its executor."""
        engine = self.spec.make_engine(events)
        return engine, self.executor(engine)

    def serve(self, asked: Sequence[TimedOrder], clock: Clock, concurrency: int | None = None) -> ServedRun:
        """Serve `asked` with an engine made for them, to their end; the clock starts with the first of them. Raises
        ForedraftError if a request is refused."""
        events: list[Event] = []
        engine, executor = self.open(events.append)
        serving = TimedServing(engine, executor, clock)
        clock.start()
        served = serving.run(asked, concurrency)
        served.events = events
        return served


@dataclass(frozen=True, slots=True)
class Timing:
    """One run of an arm over its requests. Seconds of `decode_s`'s window unless a name says otherwise."""

    prefill_s: float  # from the submission to the end of the last prefill step
    prefill_tokens: int
    decode_s: float
    cpu_s: float  # processor time of the whole process in that window
    rounds: int
    tokens: int  # delivered in the window
    accept_length: float
    bytes_read: int  # what the rounds of the window had to read
    shared_s: float  # from the commit of the last prefill to that of the first end: what these are parts of:
    phase_s: dict[str, float]  # of the executor, by its clock
    host_s: float  # plan, launch and commit
    outputs: tuple[tuple[int, ...], ...]  # every request's tokens, as far as they came

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.decode_s


class BatchArm:
    """Serves `prompts` (equally long, whole batches) with `max_tokens` each; `run` again gives the same tokens."""

    def __init__(
        self, arm: Arm, prompts: Sequence[np.ndarray], max_tokens: int, executor: RankedExecutor | None = None
    ) -> None:
        """`executor`: of ranks that have the models; those of `arm` are then parts without memory, of which only sizes
        are asked."""
        self.arm = arm
        self._deliveries = DeliverySink()
        engine = arm.spec.make_engine(self._deliveries)
        self.executor: TorchExecutor | RankedExecutor = executor or arm.executor(engine)
        self._serving = TimedServing(engine, self.executor, Clock())
        size = arm.spec.config.max_running
        assert len(prompts) % size == 0, f"{len(prompts)} prompts are no whole batches of {size}"
        self._batches = [prompts[begin : begin + size] for begin in range(0, len(prompts), size)]
        self._max_tokens = max_tokens
        steps, verified = arm.spec.max_steps, size * arm.spec.max_num_draft_tokens
        self._bytes: RoundBytes = round_bytes(
            arm.target, arm.draft, engine.algorithm.drafter, steps, verified, engine.algorithm.in_one_pass
        )

    @property
    def own_executor(self) -> TorchExecutor:
        """The executor, of an arm whose models are in this process."""
        assert not isinstance(self.executor, RankedExecutor), "its models are in the ranks' processes"
        return self.executor

    @property
    def captures(self) -> tuple[CaptureReport, ...]:
        return () if isinstance(self.executor, RankedExecutor) else tuple(self.executor.graphs.reports)

    def run(self, max_tokens: int | None = None) -> Timing:
        """Serve each batch up to the end of its first request;
        `max_tokens` may be fewer than the arm was made for (a warm-up)."""
        return added_up([self._run(batch, max_tokens or self._max_tokens) for batch in self._batches])

    def decode(
        self, prompts: Sequence[np.ndarray], max_tokens: int, goes_on: GoesOn = lambda lap: True
    ) -> tuple[ServedRun, tuple[tuple[int, ...], ...]]:
        """Serve `prompts` at once, as far as it `goes_on`. Returns the run and every request's tokens."""
        asked = [
            TimedOrder(Request(str(number), Prompt.of_tokens(prompt), max_tokens), None)
            for number, prompt in enumerate(prompts)
        ]
        served = self._serving.run(asked, len(asked), goes_on)
        tokens, _ = self._deliveries.take()
        return served, tuple(tuple(np.concatenate(tokens[one.request.request_id]).tolist()) for one in asked)

    def _run(self, prompts: Sequence[np.ndarray], max_tokens: int) -> Timing:
        executor = self.executor
        on_gpu = not isinstance(executor, RankedExecutor) and executor.device.type == "cuda"
        rounds_before = self.own_executor.counters.rounds if on_gpu else 0
        phases: dict[bool, dict[str, float]] = {}  # what the executor's clock said after the last prefill, at the end
        cpu_s: dict[bool, float] = {}  # what the process had spent then

        def goes_on(lap: StepLap) -> bool:
            if lap.has_ended_one or lap.step.prefill is not None:
                phases[lap.has_ended_one] = dict(executor.clock.seconds)
                cpu_s[lap.has_ended_one] = wall_and_cpu_s()[1]
            return not lap.has_ended_one

        served, outputs = self.decode(prompts, max_tokens, goes_on)
        assert phases.keys() == {False, True}, "every batch is served until a request ends"
        in_window = 1.0
        if on_gpu:  # its phases are measured later, and in overlap mode some rounds ran past the end
            torch.cuda.synchronize(self.own_executor.device)
            executor.clock.settle()
            phases[True] = executor.clock.seconds
            num_rounds = sum(len(lap.kept) for lap in served.laps if lap.kept is not None)
            in_window = num_rounds / (self.own_executor.counters.rounds - rounds_before)
        phase_s = {
            name: (phases[True][name] - phases[False].get(name, 0.0)) * in_window
            for name in ROUND_PHASES
            if name in phases[True]
        }
        return self._timing(served, cpu_s[True] - cpu_s[False], phase_s, outputs, len(prompts[0]))

    def _timing(
        self,
        served: ServedRun,
        cpu_s: float,
        phase_s: dict[str, float],
        outputs: tuple[tuple[int, ...], ...],
        prompt_len: int,
    ) -> Timing:
        prefill = max(number for number, lap in enumerate(served.laps) if lap.step.prefill is not None)
        last_prefill, end, window = served.laps[prefill], served.laps[-1], served.laps[prefill + 1 :]
        kept = np.concatenate([lap.kept for lap in served.laps if lap.kept is not None])
        decoded = [lap.result.decode for lap in served.laps]
        accept_lens = np.concatenate([decode.accept_lens for decode in decoded if decode is not None])
        num_rounds, batch_size = kept.shape
        # The KV of a round's rows: their prompts and what the rounds before delivered.
        kv_lens = prompt_len + np.cumsum(kept, axis=0) - kept
        return Timing(
            prefill_s=(last_prefill.arrived_ns - served.begin_ns) / 1e9,
            prefill_tokens=batch_size * prompt_len,
            decode_s=(end.arrived_ns - last_prefill.arrived_ns) / 1e9,
            cpu_s=cpu_s,
            rounds=num_rounds,
            tokens=int(kept.sum()),
            accept_length=float(accept_lens.mean()),
            bytes_read=self._bytes.total(kv_lens),
            shared_s=(end.ended_ns - last_prefill.ended_ns) / 1e9,
            phase_s=phase_s,
            host_s=sum(lap.host_ns for lap in window) / 1e9,
            outputs=outputs,
        )


def added_up(timings: Sequence[Timing]) -> Timing:
    """Return one timing of several batches: everything added up, the accept length per round."""
    if len(timings) == 1:
        return timings[0]

    def total(name: str):
        return sum(getattr(timing, name) for timing in timings)

    names = dict.fromkeys(name for timing in timings for name in timing.phase_s)
    sums = {
        field.name: total(field.name)
        for field in fields(Timing)
        if field.name not in ("accept_length", "phase_s", "outputs")
    }
    return Timing(
        **sums,
        accept_length=sum(timing.accept_length * timing.rounds for timing in timings) / sums["rounds"],
        phase_s={name: sum(timing.phase_s.get(name, 0.0) for timing in timings) for name in names},
        outputs=tuple(output for timing in timings for output in timing.outputs),
    )


def common_outputs(timing: Timing, other: Timing) -> int:
    """Count the requests whose tokens agree as far as both runs delivered them."""
    pairs = zip(timing.outputs, other.outputs, strict=True)
    return sum(a[: len(b)] == b[: len(a)] for a, b in pairs)
