"""A benchmark in several processes, one after another.

Where memory lies and which core a process gets differ from process to process. Turns within one process do not show
that noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import replace
from statistics import mean, median

from ...core.errors import ForedraftError
from ..spawned import spawning
from .plan import BenchOptions, plan_bench
from .run import ArmResult, Bench, Machine

OVER_PROCESSES = ("tokens_per_s", "tokens_per_s_request", "round_ms", "prefill_tokens_per_s", "floor_share")


def run_process(options: BenchOptions) -> tuple[Machine, list[ArmResult]]:
    """Run the whole benchmark in a fresh process. Raises ForedraftError if it fails."""
    with spawning() as context, ProcessPoolExecutor(1, context) as pool:
        try:
            found = pool.submit(_measure, options).result()
        except BrokenProcessPool as error:
            raise ForedraftError(f"a process of the benchmark has died: {error}") from error
    if isinstance(found, str):
        raise ForedraftError(f"a process of the benchmark: {found}")
    return found


def _measure(options: BenchOptions) -> tuple[Machine, list[ArmResult]] | str:
    """Return the measurements, or the reason why there are none."""
    try:
        with closing(Bench(plan_bench(options))) as bench:
            return bench.machine, [result for cell in bench.cells() for result in cell]
    except ForedraftError as error:
        return str(error)


def summarised(runs: Sequence[Sequence[ArmResult]]) -> list[ArmResult]:
    """Return every arm's medians over the processes; `speedups` are those of the processes."""
    return [_median_of(results) for results in zip(*runs, strict=True)]


def _median_of(results: Sequence[ArmResult]) -> ArmResult:
    speedups = tuple(result.speedup for result in results)
    return replace(
        results[0],
        **{name: median(getattr(result, name) for result in results) for name in OVER_PROCESSES},
        speedup=median(speedups),
        speedups=speedups,
        shares={name: mean(result.shares.get(name, 0.0) for result in results) for name in results[0].shares},
    )
