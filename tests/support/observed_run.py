"""A real engine with a toy executor, driven at random: the event streams that the tests of `observe` are made from."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import cache

import numpy as np
from foredraft.core.adaptive import AdaptiveController, AdaptiveSpeculativeParams, fixed_controller
from foredraft.core.algorithm.builtin import Standalone
from foredraft.core.contract.events import Event
from foredraft.core.contract.request import Request, cut_runs
from foredraft.core.contract.step import DecodeResult, MultiStepEnd, PrefillResult, Step, StepResult
from foredraft.core.prompt import Prompt
from foredraft.core.scheduler.config import EngineConfig
from foredraft.core.scheduler.engine import Engine
from foredraft.core.scheduler.rules import OurRules

ALGORITHM = Standalone()
VARIANTS = [
    {},
    {"overlap": False},
    {"track_tokens": True},
    {"num_pages": 45, "preempt": True, "mixed": False},
    {"num_pages": 1000, "max_running": 80, "rules": OurRules(watermark=0.0)},
]


class ToyExecutor:
    """Draws accept lengths and stops; time is one millisecond per round and 10 µs per row, tokens are
    random if asked for."""

    def __init__(
        self, seed: int, *, with_tokens: bool = False, stop_share: float = 0.01, fail_share: float = 0.0
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.with_tokens, self.stop_share, self.fail_share = with_tokens, stop_share, fail_share
        self.steps: deque[Step] = deque()
        self.clock_ns = 0
        self.remaining: dict[tuple[int, int], int] = {}  # by (row, epoch): output tokens still to come

    def launch(self, step: Step) -> None:
        self.steps.append(step)

    def collect(self, max_rounds: int = 10**9) -> StepResult:
        step = self.steps.popleft()
        for key in step.released:
            self.remaining.pop(key, None)
        for join in step.joins:
            self.remaining[join.row, join.epoch] = join.max_tokens - join.num_emitted
        prefill = None if step.prefill is None else self._prefill(step)
        decode, times = None, []
        if step.prefill is not None:
            self.clock_ns += 100_000 * int(step.prefill.lens.sum())
        if step.decode is None:
            self.clock_ns += 1_000_000
            times.append(self.clock_ns)
        else:
            decode, times = self._decode(step, max_rounds)
        failures = ()
        if step.decode is not None and self.rng.random() < self.fail_share:
            failures = ((int(step.decode.rows[0]), 'toy "failure"'),)
        return StepResult(step.step_id, prefill, decode, np.array(times, dtype=np.int64), failures)

    def _prefill(self, step: Step) -> PrefillResult:
        p = step.prefill
        stopped = self.rng.random(len(p.rows)) < self.stop_share / 2
        for row, epoch, last in zip(p.rows.tolist(), p.epochs.tolist(), p.is_last.tolist(), strict=True):
            if last:
                self.remaining[row, epoch] -= 1
        tokens = self.rng.integers(0, 1000, len(p.rows)) if self.with_tokens else None
        outputs = {"logprobs": self.rng.random(len(p.rows))} if self.with_tokens else None
        return PrefillResult(tokens, stopped if stopped.any() else None, outputs)

    def _decode(self, step: Step, max_rounds: int) -> tuple[DecodeResult, list[int]]:
        d = step.decode
        keys = list(zip(d.rows.tolist(), d.epochs.tolist(), strict=True))
        remaining = np.array([self.remaining[key] for key in keys], dtype=np.int64)
        over = remaining <= 0
        lens, stops, times = [], [], []
        end = MultiStepEnd.MAX_ROUNDS
        while True:
            good = (self.clock_ns // 30_000_000) % 2  # times change, so that adaptive steps follow
            run = (1 + self.rng.binomial(d.shape.steps, 0.9 if good else 0.1, len(keys))).astype(np.int32)
            stop = np.where(self.rng.random(len(keys)) < self.stop_share, run - 1, -1).astype(np.int32)
            settled = cut_runs(run, stop, np.where(over, 1 << 40, remaining))
            remaining = remaining - settled.kept
            ended = settled.ended & ~over
            remaining[settled.stopped] = 0
            self.clock_ns += 1_000_000 + 10_000 * len(keys) + int(self.rng.integers(0, 1000))
            lens.append(run)
            stops.append(stop)
            times.append(self.clock_ns)
            if ended.any():
                end = MultiStepEnd.REQUEST_ENDED
                break
            if len(lens) == min(d.max_rounds, max_rounds):
                end = MultiStepEnd.MAX_ROUNDS if len(lens) == d.max_rounds else MultiStepEnd.ASKED
                break
        for key, left in zip(keys, remaining.tolist(), strict=True):
            self.remaining[key] = left
        accept_lens, stop_index = np.stack(lens), np.stack(stops)
        tokens = outputs = None
        if self.with_tokens:
            width = d.shape.steps + 1
            tokens = self.rng.integers(0, 1000, (len(lens), len(keys), width))
            tokens[np.arange(width) >= accept_lens[:, :, None]] = -1
            outputs = tuple({"logprobs": self.rng.random((len(keys), width))} for _ in lens)
        stop_index = stop_index if (stop_index >= 0).any() else None
        return DecodeResult(len(lens), accept_lens, stop_index, ended, end, tokens, outputs), times


def make_config(**changes) -> EngineConfig:
    sizes = {
        "num_pages": 120,
        "context_len": 160,
        "page_size": 4,
        "max_running": 8,
        "chunk_size": 48,
        "multi_step_rounds": 8,
        "max_queue": 30,
        "overlap": True,
    }
    return EngineConfig(**{**sizes, **changes})


def make_controller(kind: str = "ema") -> AdaptiveController:
    if kind == "ema":
        quick = {"warmup_batches": 2, "update_interval": 2, "ema_alpha": 0.5}
        table = {"1": {"candidate_steps": [1, 3, 5]}, "4": {"candidate_steps": [0, 1, 3]}, **quick}
        return AdaptiveController(AdaptiveSpeculativeParams(3, table))
    return fixed_controller(int(kind.removeprefix("fixed")))


def random_request(rng: np.random.Generator, number: int, *, tokens: bool = False) -> Request:
    blocks = int(rng.integers(1, 6))
    length = blocks * 8 - int(rng.integers(0, 8))
    kind = rng.random()
    if tokens:
        prompt = Prompt.of_tokens(rng.integers(0, 4, length))
    elif kind < 0.5:
        prompt = Prompt.of_blocks([int(rng.integers(0, 3)) + 10 * i for i in range(blocks)], 8, length)
    elif kind < 0.7:
        prompt = Prompt.of_segments([(int(rng.integers(0, 3)), 24), (number, length)])
    else:
        prompt = Prompt.of_length(length)
    return Request(
        f"r{number}" if number % 7 else f'r"{number}é',
        prompt,
        int(rng.integers(1, 60)),
        priority=int(rng.integers(0, 3)) if number % 3 == 0 else 0,
        namespace="tenant" if number % 11 == 0 else "",
        outputs=("logprobs",) if tokens and number % 5 == 0 else (),
    )


def drive(engine: Engine, executor: ToyExecutor, seed: int, num_requests: int) -> None:
    """Submit, plan, commit and abort in a random order until all requests are over."""
    rng = np.random.default_rng([seed, 1])
    submitted: list[str] = []
    number = 0
    now_ns = 0
    while number < num_requests or not engine.is_idle:
        now_ns = max(now_ns + int(rng.integers(1, 2000)), executor.clock_ns)
        choice = rng.random()
        if number < num_requests and choice < 0.06:
            for _ in range(int(rng.integers(1, 8))):
                request = random_request(rng, number, tokens=engine.config.track_tokens)
                if rng.random() < 0.05 and submitted:
                    request = replace(request, request_id=submitted[-1])
                submitted.append(request.request_id)
                engine.submit(request, now_ns)
                number += 1
        elif submitted and choice < 0.075:
            engine.abort(submitted[-int(rng.integers(1, min(len(submitted), 12) + 1))], now_ns)
        elif choice < 0.5:
            while (step := engine.plan(now_ns)) is not None:
                executor.launch(step)
        elif engine.num_uncommitted:
            result = executor.collect(int(rng.integers(1, 12)))
            now_ns = max(now_ns, executor.clock_ns) + 500
            engine.commit(result, now_ns)


@cache
def recorded_events(
    seed: int, num_requests: int = 60, *, controller: str = "ema", fail_share: float = 0.02, **config
) -> tuple[Event, ...]:
    """All events of one random run."""
    events: list[Event] = []
    made = make_config(**config)
    engine = Engine(made, ALGORITHM, make_controller(controller), events=events.append)
    drive(engine, ToyExecutor(seed, with_tokens=made.track_tokens, fail_share=fail_share), seed, num_requests)
    return tuple(events)
