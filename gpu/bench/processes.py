"""A benchmark in several processes, one after another: what differs from process to process (where memory lies, which core it gets) is a
part of the noise that turns within one process do not show."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from statistics import mean, median

from .plan import BenchOptions, plan_bench
from .run import ArmResult, Bench, Machine

OVER_PROCESSES = ("tokens_per_s", "tokens_per_s_request", "round_ms", "prefill_tokens_per_s", "floor_share")


def run_process(options: BenchOptions) -> tuple[Machine, list[ArmResult]]:
    """Run the whole benchmark in a fresh process; raises what it raises."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure, options).result()


def summarised(runs: Sequence[Sequence[ArmResult]]) -> list[ArmResult]:
    """Return every arm's medians over the processes; `speedups` are those of the processes."""
    return [_median_of(results) for results in zip(*runs, strict=True)]


def _measure(options: BenchOptions) -> tuple[Machine, list[ArmResult]]:
    bench = Bench(plan_bench(options))
    return bench.machine, [result for cell in bench.cells() for result in cell]


def _median_of(results: Sequence[ArmResult]) -> ArmResult:
    speedups = tuple(result.speedup for result in results)
    return replace(
        results[0],
        **{name: median(getattr(result, name) for result in results) for name in OVER_PROCESSES},
        speedup=median(speedups),
        speedups=speedups,
        shares={name: mean(result.shares.get(name, 0.0) for result in results) for name in results[0].shares},
    )
