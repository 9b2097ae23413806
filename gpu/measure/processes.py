"""A benchmark in several processes, one after another.

Where memory lies and which core a process gets differ from process to process. Turns within one process do not show
that noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from statistics import mean, median
from typing import Any

from ...core.errors import ForedraftError
from ...observe.children.pool import ChildPool, Died, Tell, serve_jobs
from ..executor.graphs import CaptureReport, RoundKind
from ..executor.shaping import Changed
from .others import OtherResult
from .plan import BenchOptions, plan_bench
from .ranks import options_from_json, options_to_json
from .run import ArmResult, Bench, Machine

OVER_PROCESSES = (
    "tokens_per_s",
    "tokens_per_s_request",
    "tokens_per_cpu_s",
    "round_ms",
    "prefill_tokens_per_s",
    "floor_share",
)


def run_process(options: BenchOptions) -> tuple[Machine, list[ArmResult]]:
    """Run the whole benchmark in a fresh process. Raises ForedraftError if it fails, or if its process dies."""
    with closing(ChildPool[None](__name__, {}, 1, environment={}, attempts=1)) as processes:
        processes.submit(None, options_to_json(options))
        _, found = processes.next_ended()
    if isinstance(found, Died):
        raise ForedraftError(f"a process of the benchmark {found.reason}")
    if "error" in found:
        raise ForedraftError(f"a process of the benchmark: {found['error']}")
    return found_from_json(found)


def _measure(shared: Mapping[str, Any], options: Mapping[str, Any], tell: Tell) -> Mapping[str, Any]:
    """Return the measurements, or the reason why there are none."""
    try:
        with closing(Bench(plan_bench(options_from_json(options)))) as bench:
            return found_to_json(bench.machine, [result for cell in bench.cells() for result in cell])
    except ForedraftError as error:
        return {"error": str(error)}


def found_to_json(machine: Machine, results: Sequence[ArmResult]) -> dict[str, Any]:
    return {"machine": asdict(machine), "results": [asdict(result) for result in results]}


def found_from_json(value: Mapping[str, Any]) -> tuple[Machine, list[ArmResult]]:
    return Machine(**value["machine"]), [_result_from_json(result) for result in value["results"]]


def _result_from_json(value: Mapping[str, Any]) -> ArmResult:
    captures = tuple(
        CaptureReport(**{**one, "kind": RoundKind(one["kind"]), "changed": Changed(one["changed"])})
        for one in value["captures"]
    )
    others = tuple(OtherResult(**one) for one in value["others"])
    return ArmResult(**{**value, "speedups": tuple(value["speedups"]), "captures": captures, "others": others})


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
        others=tuple(_median_of_other(one) for one in zip(*(result.others for result in results), strict=True)),
        shares={name: mean(result.shares.get(name, 0.0) for result in results) for name in results[0].shares},
    )


def _median_of_other(results: Sequence[OtherResult]) -> OtherResult:
    names = ("tokens_per_s", "tokens_per_cpu_s", "ratio", "cpu_ratio")
    return replace(results[0], **{name: median(getattr(result, name) for result in results) for name in names})


if __name__ == "__main__":
    serve_jobs(_measure)
