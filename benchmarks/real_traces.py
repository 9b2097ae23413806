"""Two real traces end to end: algorithms in both modes, and routers.

    python benchmarks/real_traces.py azure AzureLLMInferenceTrace_conv.csv
    python benchmarks/real_traces.py routers mooncake_conversation_trace.jsonl

`azure`: the hour on one H100. `routers`: the first 800 requests of the Mooncake hour, whose prompts are 12,000 tokens long on average,
on two and on four H100 at two loads each, routed by requests and by tokens.
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
ACCEPTANCE = {"preset": "eagle-llama-chat"}  # the same for every draft, so that the rows differ by cost alone
COLUMNS = (
    "completed",
    "refused",
    "output_throughput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_tpot_ms",
    "accept_length",
)
COLUMNS += ("retractions", "device_busy_share")
ROUTER_COLUMNS = (
    "mean_ttft_ms",
    "p90_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "prefix_cache_hit_rate",
    "device_busy_share",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("azure", "routers"))
    parser.add_argument("trace")
    arguments = parser.parse_args()
    if arguments.what == "azure":
        columns = ("algorithm", "mode", *COLUMNS)
        scenarios = (
            (
                (name, mode),
                {"speculation": speculation, "engine": {"mode": mode}, "workload": {"trace": arguments.trace}},
            )
            for name, speculation in ALGORITHMS.items()
            for mode in ("synchronous", "overlap")
        )
    else:
        columns = ("replicas", "rate_scale", "policy", *ROUTER_COLUMNS)
        scenarios = (
            (
                (replicas, rate_scale, policy),
                {
                    "speculation": {"policy": "fixed", "steps": 3},
                    "acceptance": ACCEPTANCE,
                    "engine": {"page_size": 64},
                    "hardware": {"replicas": replicas},
                    "router": {"policy": policy},
                    "workload": {"trace": arguments.trace, "rate_scale": rate_scale, "num_requests": 800},
                },
            )
            for replicas, rate_scale in ((2, 0.2), (2, 0.4), (4, 0.5), (4, 0.8))
            for policy in ("least_loaded", "prefix_aware")
        )
    print("|", " | ".join(columns), "| wall s |")
    print("| --- " * (len(columns) + 1) + "|")
    for names, scenario in scenarios:
        started = time.perf_counter()
        summary = measured(scenario)
        cells = [str(name) for name in names] + [format_cell(summary[column]) for column in columns[len(names) :]]
        print("|", " | ".join(cells), f"| {time.perf_counter() - started:.0f} |", flush=True)


def measured(scenario: dict) -> dict:
    """Run a scenario, check its engines, and return the summary."""
    metrics = RunMetrics()
    simulation = Simulation(scenario_from_dict(scenario, "trace"), sinks=lambda replica: [metrics.sink(replica)])
    report = simulation.run()
    for replica, busy_ns in enumerate(report.device_busy_ns):
        metrics.observe_device(replica, busy_ns)
    for replica in simulation.replicas:
        replica.engine.check()
    return metrics.summary(report.duration_ns)


def format_cell(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}" if value < 100 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
