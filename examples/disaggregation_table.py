"""Compare pools of prefill and decode GPUs with as many GPUs that do both: p99 TTFT, p99 TPOT and goodput.

    python examples/disaggregation_table.py [--requests N] [--trace FILE]

Each run serves the first N requests of the Mooncake conversation trace, at three rates per GPU. If the trace is
missing, the script uses synthetic requests with the same rate, lengths and shared prefixes, and the table says so. It
prints progress to standard error and the table, in Markdown, to standard output.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from foredraft import simulate

TRACE = Path(__file__).resolve().parents[2] / "shared" / "traces" / "mooncake_conversation_trace.jsonl"
TRACE_RATE = 12_031 / 3536.0  # requests per second of the whole trace
RATES = (0.25, 0.5, 1.0)  # requests per second and GPU
RATIOS = ("1:1", "2:1", "1:2", "3:1")
SLO = {"ttft_ms": 5000.0, "tpot_ms": 20.0}
COLUMNS = (
    "GPUs",
    "requests/s per GPU",
    "pools",
    "p99 TTFT, s",
    "p99 TPOT, ms",
    "goodput, requests/s",
    "within the SLO",
    "busy",
)


def workload(trace: Path | None, rate: float, num_requests: int) -> dict[str, Any]:
    """Return the trace's first requests at `rate`, or synthetic ones with the means and spread of its 12,031 rows."""
    if trace is not None:
        return {"trace": str(trace), "rate_scale": rate / TRACE_RATE, "num_requests": num_requests}
    return {
        "rate": rate,
        "num_requests": num_requests,
        "prompt": {"kind": "lognormal", "mean": 12_000.0, "sigma": 1.0, "low": 900, "high": 120_000},
        "output": {"kind": "lognormal", "mean": 343.0, "sigma": 0.9, "low": 1, "high": 2000},
        "prefixes": {"groups": 20, "length": 512, "zipf": 1.0},
    }


def scenario(trace: Path | None, num_gpus: int, ratio: str | None, rate: float, num_requests: int) -> dict[str, Any]:
    """Return a scenario: one replica per GPU, Llama-3.1-8B with an EAGLE-3 draft on H100, chunks of 2048 tokens."""
    tables: dict[str, Any] = {
        "hardware": {"replicas": num_gpus},
        "engine": {"page_size": 64, "chunk_size": 2048},
        "router": {"policy": "prefix_aware"},
        "workload": workload(trace, rate * num_gpus, num_requests),
        "slo": SLO,
    }
    if ratio is not None:
        tables["disaggregation"] = {"ratio": ratio, "prefill_policy": "prefix_aware"}
    return tables


def row(num_gpus: int, rate: float, ratio: str | None, summary: dict[str, Any]) -> str:
    busy = f"{summary['device_busy_share']:.0%}"
    if ratio is not None:
        busy = f"{summary['prefill_busy_share']:.0%} : {summary['decode_busy_share']:.0%}"
    cells = (
        str(num_gpus),
        f"{rate:g}",
        ratio or "together",
        f"{summary['p99_ttft_ms'] / 1000:.1f}",
        f"{summary['p99_tpot_ms']:.1f}",
        f"{summary['request_goodput']:.2f}",
        f"{summary['slo_attainment']:.0%}",
        busy,
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=400, metavar="N", help="requests of each run")
    parser.add_argument("--trace", type=Path, default=TRACE, metavar="FILE", help="the Mooncake conversation trace")
    asked = parser.parse_args()
    trace = asked.trace if asked.trace.exists() else None
    runs = [(sum(map(int, ratio.split(":"))), ratio) for ratio in RATIOS]
    sizes = sorted({num_gpus for num_gpus, _ in runs})
    plan = [(n, rate, r) for n in sizes for rate in RATES for r in (None, *(r for m, r in runs if m == n))]
    named = (
        "the Mooncake conversation trace" if trace else "a synthetic stand-in for the Mooncake trace, which is not here"
    )
    print(f"{asked.requests} requests of {named}; SLO: TTFT {SLO['ttft_ms'] / 1000:g} s, TPOT {SLO['tpot_ms']:g} ms\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    began = time.monotonic()
    for done, (num_gpus, rate, ratio) in enumerate(plan, 1):
        summary = simulate(scenario(trace, num_gpus, ratio, rate, asked.requests)).summary
        print(row(num_gpus, rate, ratio, summary), flush=True)
        progress = f"{done} of {len(plan)}, {time.monotonic() - began:.0f} s"
        print(f"{progress}: {num_gpus} GPUs, {ratio or 'together'}, {rate:g}/s", file=sys.stderr)


if __name__ == "__main__":
    main()
