"""Measure how fast the simulator is, and what it says of closed loops: tables of docs/evidence/benchmarks.md.

    python -m benchmarks.timing.simulator AzureLLMInferenceTrace_conv.csv [hour many loops algorithms sweep]
        [--repeat 2] [--write]
    python -m benchmarks.timing.simulator mooncake_conversation_trace.jsonl routers [--write]

hour    the Azure conversation hour (19,366 requests), the best of `--repeat` whole processes
many    10,000 and 1,000,000 synthetic requests: memory and rate must not depend on the length of a run
loops   output tokens per second of simulated time, in both modes, with every policy; exact for a seed
algorithms  the hour with every kind of draft, in both modes; exact for a seed
sweep   1,000 short runs on all cores: how busy they are
routers the first 800 requests of the Mooncake hour (12,000 prompt tokens on average) on two and four H100, routed by
requests and by
        tokens; exact for a seed

--write puts the tables into docs/evidence/benchmarks.md. Nothing else should run meanwhile; all of it takes
about ten minutes of two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from foredraft import simulate

from ..pages import write_block

NONE = ("speculation.algorithm=NONE",)
CHAIN = ("speculation.policy=fixed", "speculation.steps=3")
SYNCHRONOUS = "engine.mode=synchronous"
HOUR = {  # run -> its settings, and what it should take
    "single rounds, synchronous": ((*NONE, SYNCHRONOUS, "engine.multi_step_rounds=1"), "≤ 25 s, 300 MB"),
    "multi-steps, synchronous": ((*NONE, SYNCHRONOUS), "≤ 6 s"),
    "single rounds, overlap": ((*NONE, "engine.multi_step_rounds=1"), "≤ 25 s"),
    "multi-steps, overlap": (NONE, "≤ 12 s"),
    "chain of 3, multi-steps, synchronous": ((*CHAIN, SYNCHRONOUS), "≤ 10 s"),
    "chain of 3, multi-steps, overlap": (CHAIN, ""),
}
SHORT_REQUESTS = (
    "workload.rate=150",
    "workload.prompt={kind='lognormal',mean=200.0,sigma=0.8,low=8,high=2048}",
    "workload.output={kind='lognormal',mean=24.0,sigma=0.6,low=1,high=256}",
    *CHAIN,
)
SWEEP = ("--grid", "speculation.steps=0..7", "--set", "workload.num_requests=100", "--seeds", "125")
CONCURRENCIES = (1, 8, 32, 64, 128, 256)
STEPS = list(range(8))
POLICIES = {
    **{f"{steps}": {"policy": "fixed", "steps": steps} for steps in STEPS},
    "ema": {"policy": "ema"},
    "ema 0": {"policy": "ema", "adaptive": "with-zero"},
    "goodput": {"policy": "goodput", "adaptive": {"1": {"candidate_steps": STEPS}}},
}
ALGORITHMS = {
    "NONE": {"algorithm": "NONE"},
    "STANDALONE": {"algorithm": "STANDALONE", **POLICIES["3"]},
    "EAGLE3 adaptive": {"algorithm": "EAGLE3"},
    "EAGLE3 top-k 4": {"algorithm": "EAGLE3", "topk": 4, **POLICIES["3"]},
}
ACCEPTANCE = {"preset": "eagle-llama-chat"}  # the same for every draft, so that rows differ by cost alone


def run_process(*arguments: str) -> tuple[float, float, float]:
    """Run `foredraft` and return its wall seconds, its CPU seconds, those of its processes included,
    and its peak MiB."""
    command = [sys.executable, "-m", "foredraft.cli", *arguments, "--quiet"]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - started
    if os.waitstatus_to_exitcode(status):
        sys.exit(f"{' '.join(command)}: exit code {os.waitstatus_to_exitcode(status)}")
    return wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def simulate_process(settings: tuple[str, ...], *arguments: str) -> tuple[float, float, float]:
    return run_process("simulate", *arguments, *[part for setting in settings for part in ("--set", setting)])


def hour(trace: Path, repeat: int) -> Iterator[str]:
    """Yield the rows of the hour's table."""
    yield from ("| run | CPU s | peak MiB | goal |", "| --- | --- | --- | --- |")
    for name, (settings, goal) in HOUR.items():
        runs = [simulate_process((*settings, "hardware.gpu=A100"), "--trace", str(trace)) for _ in range(repeat)]
        yield f"| {name} | {min(run[1] for run in runs):.1f} | {max(run[2] for run in runs):.0f} | {goal} |"


def many(trace: Path, repeat: int) -> Iterator[str]:
    """Yield the rows of the table of many requests."""
    start_s = min(simulate_process(("workload.num_requests=1",))[0] for _ in range(3))
    yield from (
        "| requests | wall s | decode rounds | rounds per second | peak MiB |",
        "| --- | --- | --- | --- | --- |",
    )
    for number in (10_000, 1_000_000):
        with TemporaryDirectory() as out:
            settings = (f"workload.num_requests={number}", *SHORT_REQUESTS)
            wall_s, _, peak = simulate_process(settings, "--out", out, "--no-events", "--no-perfetto")
            rounds = json.loads(Path(out, "summary.json").read_text())["decode_rounds"]
        rate = rounds / (wall_s - start_s)
        yield f"| {number:,} | {wall_s:.1f} | {rounds:,} | {rate:,.0f} (start-up of {start_s:.1f} s left out) | {peak:.0f} |"


def summary_of(scenario: dict) -> dict:
    return simulate(scenario).summary


def of_a_loop(concurrency: int, mode: str, policy: str) -> dict:
    """Return the scenario of a closed loop of so many clients."""
    return {
        "speculation": {"algorithm": "EAGLE3", **POLICIES[policy]},
        "acceptance": ACCEPTANCE,
        "engine": {"mode": mode},
        "workload": {
            "concurrency": concurrency,
            "num_requests": max(64, 10 * concurrency),
            "prompt": {"kind": "lognormal", "mean": 512.0, "sigma": 0.8, "high": 8192},
            "output": {"kind": "lognormal", "mean": 256.0, "sigma": 0.6, "high": 2048},
        },
    }


def loops(trace: Path, repeat: int) -> Iterator[str]:
    """Yield the lines of the table of closed loops."""
    yield from ("```text", " ".join(["tokens/s".rjust(26), *(name.rjust(8) for name in POLICIES), "goodput/best"]))
    cases = [(number, mode) for number in CONCURRENCIES for mode in ("synchronous", "overlap")]
    with ProcessPoolExecutor() as pool:
        runs = pool.map(summary_of, [of_a_loop(*case, policy) for case in cases for policy in POLICIES])
        found = (summary["output_throughput"] for summary in runs)
        for number, mode in cases:
            row = {name: next(found) for name in POLICIES}
            share = row["goodput"] / max(row[str(steps)] for steps in STEPS)
            yield " ".join([f"{number:12d} {mode:>13s}", *(f"{value:8.0f}" for value in row.values()), f"{share:8.3f}"])
    yield "```"


def algorithms(trace: Path, repeat: int) -> Iterator[str]:
    """Yield the rows of the table of algorithms on the hour."""
    yield from _summaries(
        ("algorithm", "mode"),
        {
            (name, mode): {
                "speculation": speculation,
                "acceptance": ACCEPTANCE,
                "engine": {"mode": mode},
                "workload": {"trace": str(trace)},
            }
            for name, speculation in ALGORITHMS.items()
            for mode in ("synchronous", "overlap")
        },
        (
            *("completed", "output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms"),
            *("accept_length", "retractions", "device_busy_share"),
        ),
    )


def routers(trace: Path, repeat: int) -> Iterator[str]:
    """Yield the rows of the table of routers, of a trace with prefix hashes."""
    yield from _summaries(
        ("replicas", "rate_scale", "policy"),
        {
            (replicas, rate_scale, f"`{policy}`"): {
                "speculation": POLICIES["3"],
                "acceptance": ACCEPTANCE,
                "engine": {"page_size": 64},
                "hardware": {"replicas": replicas},
                "router": {"policy": policy},
                "workload": {"trace": str(trace), "rate_scale": rate_scale, "num_requests": 800},
            }
            for replicas, rate_scale in ((2, 0.2), (2, 0.4), (4, 0.5), (4, 0.8))
            for policy in ("least_loaded", "prefix_aware")
        },
        ("mean_ttft_ms", "p90_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "prefix_cache_hit_rate", "device_busy_share"),
    )


def _summaries(names: tuple[str, ...], scenarios: dict[tuple, dict], columns: tuple[str, ...]) -> Iterator[str]:
    yield f"| {' | '.join((*names, *columns))} |"
    yield "| --- " * (len(names) + len(columns)) + "|"
    with ProcessPoolExecutor() as pool:
        for row, summary in zip(scenarios, pool.map(summary_of, scenarios.values()), strict=True):
            yield f"| {' | '.join(map(str, row))} | {' | '.join(_cell(summary[column]) for column in columns)} |"


def _cell(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}" if value < 100 else f"{value:,.0f}"


def sweep(trace: Path, repeat: int) -> Iterator[str]:
    """Yield the table of the sweep."""
    with TemporaryDirectory() as out:
        wall_s, cpu_s, _ = run_process("sweep", *SWEEP, "--out", out)
    cores = os.cpu_count() or 1
    yield from ("| runs | wall s | CPU s | cores | busy |", "| --- | --- | --- | --- | --- |")
    yield f"| 1,000 | {wall_s:.0f} | {cpu_s:.0f} | {cores} | {cpu_s / wall_s / cores:.0%} |"


PARTS: dict[str, Callable[[Path, int], Iterator[str]]] = {
    part.__name__: part for part in (hour, many, loops, algorithms, sweep, routers)
}
OF_AZURE = [name for name in PARTS if name != routers.__name__]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="the Azure conversation trace; for `routers` that of Mooncake")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="what to measure; default: all but `routers`")
    parser.add_argument("--repeat", type=int, default=2, help="runs of each row of the hour")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/evidence/benchmarks.md")
    given = parser.parse_args()
    for name in given.parts or OF_AZURE:
        lines = []
        for line in PARTS[name](given.trace, given.repeat):
            lines.append(line)
            print(line, flush=True)
        print()
        if given.write:
            write_block("evidence/benchmarks.md", f"measured {name}", lines)


if __name__ == "__main__":
    main()
