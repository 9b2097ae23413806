"""A benchmark in several processes, one after another: what differs from process to process (where memory lies, which core it gets) is a
part of the noise that turns within one process do not show."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, median

from ...core.errors import ForetokenError
from ...core.parsing import parse_json
from ..executor.graphs import CaptureReport, RoundKind
from .plan import BenchOptions, plan_bench
from .run import ArmResult, Bench, Machine

OVER_PROCESSES = ("tokens_per_s", "tokens_per_s_request", "round_ms", "prefill_tokens_per_s", "floor_share")


def run_process(options: BenchOptions) -> tuple[Machine, list[ArmResult]]:
    """Run the whole benchmark in a fresh process, options and results as JSON. Raises ForetokenError if it fails."""
    given = asdict(options) | {"model": None if options.model is None else str(options.model)}
    run = subprocess.run(
        [sys.executable, "-m", __name__], input=json.dumps(given), stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    if run.returncode:
        raise ForetokenError(f"a process of the benchmark ended with exit code {run.returncode}; its message is above")
    return _read(run.stdout)


def summarised(runs: Sequence[Sequence[ArmResult]]) -> list[ArmResult]:
    """Return every arm's medians over the processes; `speedups` are those of the processes."""
    return [_median_of(results) for results in zip(*runs, strict=True)]


def _text_of(machine: Machine, results: Sequence[ArmResult]) -> str:
    answer = {"machine": asdict(machine), "results": [asdict(result) for result in results]}
    return json.dumps(answer)


def _read(text: str) -> tuple[Machine, list[ArmResult]]:
    """Read what `_text_of` wrote."""
    answer = parse_json(text)
    return Machine(**answer["machine"]), [_result_of(value) for value in answer["results"]]


def _result_of(value: dict) -> ArmResult:
    captures = tuple(CaptureReport(**capture | {"kind": RoundKind(capture["kind"])}) for capture in value["captures"])
    return ArmResult(**value | {"speedups": tuple(value["speedups"]), "captures": captures})


def _median_of(results: Sequence[ArmResult]) -> ArmResult:
    speedups = tuple(result.speedup for result in results)
    return replace(
        results[0],
        **{name: median(getattr(result, name) for result in results) for name in OVER_PROCESSES},
        speedup=median(speedups),
        speedups=speedups,
        shares={name: mean(result.shares.get(name, 0.0) for result in results) for name in results[0].shares},
    )


def _main() -> None:
    """Measure what standard input asks for; the results go to standard output."""
    given = parse_json(sys.stdin.read())
    options = BenchOptions(**given | {"model": None if given["model"] is None else Path(given["model"])})
    try:
        bench = Bench(plan_bench(options))
        results = [result for cell in bench.cells() for result in cell]
    except ForetokenError as error:
        sys.exit(f"foretoken: {error}")
    print(_text_of(bench.machine, results))


if __name__ == "__main__":
    _main()
