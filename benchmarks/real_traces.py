"""Two real traces end to end, for four algorithms in both modes.

    python benchmarks/real_traces.py AzureLLMInferenceTrace_conv.csv mooncake_conversation_trace.jsonl

The Azure hour runs on one H100; the Mooncake hour, whose prompts are 12,000 tokens long on average, on eight behind a prefix-aware router.
"""

from __future__ import annotations

import argparse
import time

from foretoken.observe.metrics import RunMetrics
from foretoken.sim.run import Simulation
from foretoken.sim.scenario_file import scenario_from_dict

ALGORITHMS = {
    "NONE": {"algorithm": "NONE"},
    "STANDALONE": {"algorithm": "STANDALONE", "policy": "fixed", "steps": 3},
    "EAGLE3 adaptive": {"algorithm": "EAGLE3"},
    "EAGLE3 top-k 4": {"algorithm": "EAGLE3", "policy": "fixed", "steps": 3, "topk": 4},
}
COLUMNS = (
    "completed",
    "refused",
    "output_throughput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_tpot_ms",
    "accept_length",
)
COLUMNS += ("prefix_cache_hit_rate", "retractions", "device_busy_share")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("azure")
    parser.add_argument("mooncake")
    arguments = parser.parse_args()
    traces = {
        "Azure": (arguments.azure, {"hardware": {"gpu": "H100"}}),
        "Mooncake": (
            arguments.mooncake,
            {"hardware": {"gpu": "H100", "replicas": 8}, "router": {"policy": "prefix_aware"}},
        ),
    }
    print("| trace | algorithm | mode |", " | ".join(COLUMNS), "| wall s |")
    print("| --- |" * 1 + " --- |" * (len(COLUMNS) + 3))
    for trace, (path, tables) in traces.items():
        for algorithm, speculation in ALGORITHMS.items():
            for mode in ("synchronous", "overlap"):
                scenario = {**tables, "speculation": speculation, "engine": {"mode": mode}, "workload": {"trace": path}}
                started = time.perf_counter()
                metrics = RunMetrics()
                simulation = Simulation(scenario_from_dict(scenario, "trace"), sinks=lambda r, m=metrics: [m.sink(r)])
                report = simulation.run()
                for replica, busy_ns in enumerate(report.device_busy_ns):
                    metrics.observe_device(replica, busy_ns)
                for replica in simulation.replicas:
                    replica.engine.check()
                summary = metrics.summary(report.duration_ns)
                cells = [format_cell(summary[column]) for column in COLUMNS]
                wall_s = time.perf_counter() - started
                print(f"| {trace} | {algorithm} | {mode} |", " | ".join(cells), f"| {wall_s:.0f} |", flush=True)


def format_cell(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}" if value < 100 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
