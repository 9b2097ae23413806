"""The host's time per step, row and token, fitted to a few served requests, and how well a whole profile adds
up to their steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..core.contract.request import Request
from ..core.prompt import Prompt
from ..gpu.measure.clock import make_clock
from ..gpu.measure.prompts import bench_prompts
from ..gpu.measure.served import StepLap, TimedOrder
from ..gpu.measure.turns import Timed, take_turns
from ..gpu.session.text import Tokenizer
from ..sim.cost.executor_steps import ExecutorSteps, StepCost
from ..sim.cost.host import HostCost
from .arms import TwinArm

HOST_OUTPUT = 16  # tokens of each request that is served
TO_NORMAL = 1.4826  # from a median absolute deviation to a standard deviation


@dataclass(frozen=True, slots=True)
class Closure:
    """Served steps of one arm: what they took, and what the grids say, in seconds altogether."""

    arm: str
    steps: int
    measured_s: float
    priced_s: float


class HostTimes:
    """Serves a few requests with every arm, and fits the host's time."""

    def __init__(self, arms: Sequence[TwinArm], clock: str, seed: int) -> None:
        self._served = list(zip(arms, _served(arms, clock, seed), strict=True))
        laps = self._laps = [lap for _, laps in self._served for lap in laps]
        rows, decoding, tokens = np.array([[lap.rows, lap.decode_rows, lap.tokens] for lap in laps], float).T
        plan = _fit([lap.plan_ns for lap in laps], rows)
        launch = _fit([lap.launch_ns for lap in laps], rows)
        commit = _fit([lap.commit_ns for lap in laps], decoding, tokens)
        self.cost = HostCost(
            name="executor", plan_base_ns=plan[0], plan_row_ns=plan[1], launch_base_ns=launch[0], launch_row_ns=launch[1],
            commit_base_ns=commit[0], commit_row_ns=commit[1], commit_token_ns=commit[2],
            source=f"least squares over {len(laps)} served steps",
        )  # fmt: skip

    def spread(self) -> float:
        """Return the deviation of the logarithm of a step's time from what the fit says."""
        return deviation(np.log([lap.host_ns / self._fitted_ns(lap) for lap in self._laps]))

    def closures(self, steps: ExecutorSteps) -> tuple[Closure, ...]:
        found = []
        for arm, laps in self._served:
            cost = steps.cost(arm.spec, "profile")
            ran = sum(lap.host_ns + lap.run_ns for lap in laps)
            priced = sum(priced_ns(lap, cost) + self._fitted_ns(lap) for lap in laps)
            found.append(Closure(arm.name, len(laps), ran / 1e9, priced / 1e9))
        return tuple(found)

    def _fitted_ns(self, lap: StepLap) -> int:
        host = self.cost
        return host.plan_ns(lap.rows) + host.launch_ns(lap.rows) + host.commit_ns(lap.decode_rows, lap.tokens)


def _served(arms: Sequence[TwinArm], clock: str, seed: int) -> list[list[StepLap]]:
    """Return the steps of a few requests of each arm, served one by one, with half a batch, and with a whole one."""

    def timed(arm: TwinArm, clients: int) -> Timed[list[StepLap]]:
        requests = short_requests(arm, 2 * clients, HOST_OUTPUT, seed + clients)
        return Timed(arm.name, 1, lambda sample: arm.serve(requests, make_clock(clock, arm.plan.device), clients).laps)

    sizes = [sorted({1, max(1, most // 2), most}) for most in (arm.spec.config.max_running for arm in arms)]
    cells = [(number, clients) for number, each in enumerate(sizes) for clients in each]
    laps: list[list[StepLap]] = [[] for _ in arms]
    for (number, _), (found,) in zip(
        cells, take_turns([timed(arms[number], clients) for number, clients in cells], seed), strict=True
    ):
        laps[number] += found
    return laps


def deviation(values: np.ndarray) -> float:
    """Return the standard deviation by the median absolute one, on which outliers weigh little."""
    return TO_NORMAL * float(np.median(np.abs(values - np.median(values))))


def priced_ns(lap: StepLap, cost: StepCost) -> int:
    """Return what the grids say of a served step on the device."""
    total, prefill, decode = 0, lap.step.prefill, lap.step.decode
    if decode is not None and lap.result.decode is not None:
        contexts = decode.seq_lens
        context = contexts.max() if cost.padded else contexts.mean()
        longest = lap.result.decode.accept_lens.max(axis=1)
        total += int(cost.rounds_ns(len(decode.rows), decode.shape, np.full(len(longest), context), longest).sum())
    if prefill is None:
        return total
    chunks = list(zip(prefill.lens.tolist(), prefill.starts.tolist(), strict=True))
    return cost.prefill_ns(chunks) if decode is None else cost.both_ns(chunks, total)


def _fit(times: Sequence[int], *columns: np.ndarray) -> list[int]:
    """Return base and slopes ≥ 0 of times by least squares, the largest two in a hundred left out."""
    ns = np.array(times, float)
    kept = ns <= np.quantile(ns, 0.98)
    names = list(range(1 + len(columns)))
    matrix = np.stack([np.ones(len(ns)), *columns], axis=1)[kept]
    found = np.zeros(len(names))
    while names:
        found[:] = 0.0
        found[names] = np.linalg.lstsq(matrix[:, names], ns[kept], rcond=None)[0]
        if (found >= 0).all():
            break
        names.remove(int(found.argmin()))
    return [round(value) for value in found]


def short_requests(arm: TwinArm, count: int, output_len: int, seed: int) -> list[TimedOrder]:
    """Return requests of real text for a closed loop, prompts of different lengths up to a quarter of the context."""
    longest = max(2, min(64, arm.spec.config.context_len // 4))
    texts = bench_prompts(tokenizer_of(arm), arm.plan.target.vocab_size, count, longest, seed)
    room = max(1, min(output_len, arm.plan.spec.config.context_len - longest))
    return [
        TimedOrder(Request(f"host{i}", Prompt.of_tokens(text[: longest - (i * 7) % (longest // 2)]), room), None)
        for i, text in enumerate(texts)
    ]


def tokenizer_of(arm: TwinArm) -> Tokenizer | None:
    """Return the model's tokenizer, None if it has none."""
    directory = Path(arm.plan.options.model)
    return Tokenizer.load(directory) if (directory / "tokenizer.json").is_file() else None
