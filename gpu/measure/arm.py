"""One way of decoding, timed: an engine with its executor that serves the same requests again and again.

submit │ prefill of all rows │ round │ round │ … │ round in which the first row ends │ give up, drain
                             └───────── timed: the batch is full throughout ─────────┘

If there are more prompts than rows in a batch, they are served batch by batch, and the times are added up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from ...core.acceptance.process import AcceptanceProcess
from ...core.contract.events import Committed, Event
from ...core.contract.request import Request
from ...core.errors import ForedraftError
from ...core.prompt import Prompt
from ...core.scheduler.engine import Engine
from ..executor.build import build_executor
from ..executor.executor import TorchExecutor
from ..executor.graphs import CaptureReport
from ..executor.parts import DraftModel, ExecutorOptions
from ..models.decoder import Decoder
from ..parallel.ranks import RankedExecutor
from ..session.loop import DecodeLoop, DeliverySink, all_of
from ..types.ops import Ops
from .floor import RoundBytes, round_bytes
from .plan import ArmPlan

ROUND_PHASES = ("draft", "verify", "graph", "relay")  # the executor's phases within a decode round


@dataclass(frozen=True, slots=True)
class Timing:
    """One run of an arm over its requests. Seconds of `decode_s`'s window unless a name says otherwise."""

    prefill_s: float  # from the submission to the end of the last prefill step
    prefill_tokens: int
    decode_s: float
    rounds: int
    tokens: int  # delivered in the window
    accept_length: float
    bytes_read: int  # what the rounds of the window had to read
    shared_s: float  # from the turn after the last prefill to the turn of the first end: what these are parts of:
    phase_s: dict[str, float]  # of the executor, by its clock
    host_s: float  # plan, launch and commit
    outputs: tuple[tuple[int, ...], ...]  # every request's tokens, as far as they came

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.decode_s


@dataclass(frozen=True, slots=True)
class _Mark:
    """What the clocks say between two turns."""

    now_ns: int
    host_ns: int  # so far
    phase_s: dict[str, float]  # so far


class _Rounds:
    """An event sink that notes the ends of prefills and rounds, and the tokens that they delivered."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.num_prefilled = 0
        self.prefill_end_ns = 0
        self.end_ns = 0
        self.has_ended = False
        self.kept: list[np.ndarray] = []
        self.accept_lens: list[np.ndarray] = []

    def __call__(self, event: Event) -> None:
        if not isinstance(event, Committed) or self.has_ended:
            return
        if event.step.prefill is not None:
            self.num_prefilled += int(event.step.prefill.is_last.sum())
            self.prefill_end_ns = int(event.result.round_end_ns[-1])
        if (decode := event.result.decode) is not None:
            assert event.kept is not None, "a step with rounds says what was kept of them"
            self.kept.append(event.kept)
            self.accept_lens.append(decode.accept_lens)
            self.end_ns = int(event.result.round_end_ns[-1])
            self.has_ended = bool(decode.ended.any())


def make_executor(
    plan: ArmPlan,
    engine: Engine,
    target: Decoder,
    draft: DraftModel | None,
    ops: Ops,
    acceptance: AcceptanceProcess | None,
    seed: int,
) -> TorchExecutor:
    """Make the executor of an arm, whose `engine` is made of `plan.spec`."""
    return build_executor(
        engine,
        target,
        draft if plan.steps else None,
        ops,
        ExecutorOptions(
            graph_sizes=plan.spec.graph_sizes,
            graph_sampling=False,
            graph_outputs=False,
            acceptance=acceptance,
            seed=seed,
        ),
    )


class BenchArm:
    """Serves `prompts` (equally long, whole batches) with `max_tokens` each; `run` again gives the same tokens."""

    def __init__(
        self,
        plan: ArmPlan,
        target: Decoder,
        draft: DraftModel | None,
        ops: Ops,
        prompts: Sequence[np.ndarray],
        max_tokens: int,
        acceptance: AcceptanceProcess | None = None,
        seed: int = 0,
        executor: RankedExecutor | None = None,
    ) -> None:
        """`executor`: of ranks that have the models; those given are then parts without memory, of which only sizes are
        asked."""
        self.plan = plan
        deliveries = DeliverySink()
        self._rounds = _Rounds()
        engine = plan.spec.make_engine(all_of([deliveries, self._rounds]))
        self.executor: TorchExecutor | RankedExecutor = executor or make_executor(
            plan, engine, target, draft, ops, acceptance, seed
        )
        self.loop = DecodeLoop(engine, self.executor, deliveries)
        size = plan.spec.config.max_running
        assert len(prompts) % size == 0, f"{len(prompts)} prompts are no whole batches of {size}"
        given = [Prompt.of_tokens(prompt) for prompt in prompts]
        self._batches = [given[begin : begin + size] for begin in range(0, len(given), size)]
        self._max_tokens = max_tokens
        verified = size * plan.num_nodes
        self._bytes: RoundBytes = round_bytes(
            target, draft if plan.steps else None, engine.algorithm.drafter, plan.steps, verified
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

    def _run(self, prompts: Sequence[Prompt], max_tokens: int) -> Timing:
        loop, rounds, executor = self.loop, self._rounds, self.executor
        rounds.clear()
        on_gpu = not isinstance(executor, RankedExecutor) and executor.device.type == "cuda"
        rounds_before = self.own_executor.counters.rounds if on_gpu else 0
        begin_ns = time.perf_counter_ns()
        for number, prompt in enumerate(prompts):
            refusal = loop.submit(Request(str(number), prompt, max_tokens))
            if refusal:
                raise ForedraftError(f"a request of the benchmark was refused: {refusal}")
        tokens: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
        begin: _Mark | None = None
        end: _Mark | None = None
        while not loop.is_idle:
            for delta in loop.turn():
                tokens[delta.request_id].extend(delta.tokens.tolist())
            if begin is None and rounds.num_prefilled == len(prompts):
                begin = self._mark()
            if rounds.has_ended and end is None:
                end = self._mark()
                loop.abort_all()
        assert begin is not None and end is not None, "every batch is served until a request ends"
        if on_gpu:
            end = self._with_phases_of(end, begin, self.own_executor.counters.rounds - rounds_before)
        outputs = tuple(tuple(part) for part in tokens.values())
        return self._timing(begin_ns, begin, end, outputs, prompts[0].length)

    def _mark(self) -> _Mark:
        return _Mark(time.perf_counter_ns(), self.loop.driver.host_ns, dict(self.executor.clock.seconds))

    def _with_phases_of(self, end: _Mark, begin: _Mark, num_rounds: int) -> _Mark:
        """Return `end` with what the rounds up to it took:
        a GPU's are measured later, and in overlap mode some ran past the end."""
        executor = self.own_executor
        torch.cuda.synchronize(executor.device)
        executor.clock.settle()
        in_window = sum(len(kept) for kept in self._rounds.kept) / num_rounds
        before, now = begin.phase_s, executor.clock.seconds
        phase_s = {n: before.get(n, 0.0) + (now[n] - before.get(n, 0.0)) * in_window for n in now}
        return replace(end, phase_s=phase_s)

    def _timing(
        self, begin_ns: int, begin: _Mark, end: _Mark, outputs: tuple[tuple[int, ...], ...], prompt_len: int
    ) -> Timing:
        rounds = self._rounds
        kept, accept_lens = np.concatenate(rounds.kept), np.concatenate(rounds.accept_lens)
        num_rounds, batch_size = kept.shape
        # The KV of a round's rows: their prompts and what the rounds before delivered.
        kv_lens = prompt_len + np.cumsum(kept, axis=0) - kept
        return Timing(
            prefill_s=(rounds.prefill_end_ns - begin_ns) / 1e9,
            prefill_tokens=batch_size * prompt_len,
            decode_s=(rounds.end_ns - rounds.prefill_end_ns) / 1e9,
            rounds=num_rounds,
            tokens=int(kept.sum()),
            accept_length=float(accept_lens.mean()),
            bytes_read=self._bytes.total(kv_lens),
            shared_s=(end.now_ns - begin.now_ns) / 1e9,
            phase_s={n: end.phase_s[n] - begin.phase_s.get(n, 0.0) for n in ROUND_PHASES if n in end.phase_s},
            host_s=(end.host_ns - begin.host_ns) / 1e9,
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
