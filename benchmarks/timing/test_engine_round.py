"""The engine alone: plan and commit of one overlapped, adaptive decode round at page size 1.

    pytest benchmarks/timing/test_engine_round.py

The host time of a round is what a GPU waits for when it is the faster one. Nothing here touches a device: results are
made before.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from foredraft.core.adaptive import build_controller
from foredraft.core.algorithm.builtin import Eagle3
from foredraft.core.contract.request import Request
from foredraft.core.contract.step import DecodeResult, MultiStepEnd, PrefillResult, StepResult
from foredraft.core.prompt import Prompt
from foredraft.core.scheduler.config import EngineConfig
from foredraft.core.scheduler.engine import Engine


class EngineRounds:
    """An engine with `batch_size` requests that decode for ever, and results to feed it."""

    def __init__(self, batch_size: int) -> None:
        config = EngineConfig(
            num_pages=4_000_000, context_len=60_000, max_running=batch_size, chunk_size=1 << 20, multi_step_rounds=1
        )
        self.engine = Engine(config, Eagle3(), build_controller("ema"))
        for i in range(batch_size):
            self.engine.submit(Request(f"r{i}", Prompt.of_length(100), max_tokens=50_000), 0)
        prefill = self.engine.plan(0)
        self._end = np.zeros(1, np.int64)
        self.engine.commit(StepResult(prefill.step_id, PrefillResult(None, None), None, self._end), 0)
        runs = np.random.default_rng(0).geometric(0.4, (64, batch_size)) - 1
        self._lens = {
            s: (1 + np.minimum(runs, s)).astype(np.int32)[:, None, :] for s in self.engine.controller.candidates
        }
        self._no_row_ended = np.zeros(batch_size, bool)
        self._launched: deque = deque()
        self._number = 0
        self.result = None
        self.plan()

    def plan(self) -> None:
        while (step := self.engine.plan(0)) is not None:
            self._launched.append(step)

    def make_result(self) -> None:
        step = self._launched.popleft()
        lens = self._lens[step.decode.shape.steps][self._number % 64]
        self._number += 1
        decode = DecodeResult(1, lens, None, self._no_row_ended, MultiStepEnd.MAX_ROUNDS)
        self.result = StepResult(step.step_id, None, decode, self._end)

    def commit_and_plan(self) -> None:
        self.engine.commit(self.result, 0)
        self.plan()


@pytest.mark.parametrize("batch_size", [1, 32, 256])
def test_plan_and_commit(benchmark, batch_size):
    rounds = EngineRounds(batch_size)
    benchmark.pedantic(rounds.commit_and_plan, setup=rounds.make_result, rounds=3000, warmup_rounds=200)
    rounds.engine.check()
