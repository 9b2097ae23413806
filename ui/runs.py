"""A simulation of a page's scenario, with speculation and without, as plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from ..observe.measuring.metrics import RunMetrics
from ..observe.rates import rate_of
from ..planning.candidates.rounds import without_speculation
from ..planning.grid import NO_SPECULATION
from ..sim.running.report import RunProgress
from ..sim.running.run import Simulation
from ..sim.scenario import Scenario
from ..sim.summary.summary import summarize_run

LATENCIES = ("ttft", "tpot", "itl", "e2el")
STATISTICS = ("mean", "median", "p90", "p95", "p99")
NUMBERS = (
    "completed", "refused", "retractions", "duration", "request_throughput", "output_throughput", "accept_length", "mean_running",
    "max_running", "mean_queue_length", "kv_occupancy_mean", "kv_occupancy_max", "slo_attainment", "saturation", "overloaded", "overload",
    "mean_input_tokens", "mean_output_tokens", "replicas", "notices", "intervals_rest_on", "steady_from", "steady_until",
)  # fmt: skip
INTERVALS = ("mean_ttft_ms_interval", "mean_tpot_ms_interval", "mean_e2el_ms_interval", "output_throughput_interval")
TIMELINE = ("bucket_s", "running", "waiting", "kv_occupancy", "steps")


def simulate(scenario: Scenario, origins: Mapping[str, str], tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Simulate the scenario as it is, tell the result, then simulate it without speculation. Returns both results.

    origins: the keys that the page gives.

    Raises a ForedraftError for a scenario that cannot run.
    """
    found = {"as_it_is": _run(scenario, origins, tell, "as it is")}
    if scenario.speculation.algorithm != NO_SPECULATION:
        tell(found)
        plain = Scenario.model_validate(without_speculation(scenario.model_dump(mode="json")))
        found["without"] = _run(plain, {}, tell, "without speculation")
    return found


def _run(
    scenario: Scenario, origins: Mapping[str, str], tell: Callable[[dict[str, Any]], None], name: str
) -> dict[str, Any]:
    def on_progress(progress: RunProgress) -> None:
        tell({"run": name, "ended": progress.num_ended, "expected": progress.num_expected})

    with closing(RunMetrics()) as metrics:
        report = Simulation(
            scenario,
            sinks=lambda replica: [metrics.sink(replica)],
            origins=origins,
            named_slots=False,
        ).run(on_progress)
        summary = summarize_run(scenario, report, metrics)
    return {
        **{name: rate_of(summary, name) for name in (*NUMBERS, *INTERVALS)},
        **{f"{one}_{key}_ms": summary.get(f"{one}_{key}_ms") for key in LATENCIES for one in STATISTICS},
        "rounds_at_steps": {
            int(key.rpartition("_")[2]): value for key, value in summary.items() if key.startswith("rounds_at_steps_")
        },
        "timeline": {key: summary[f"timeline_{key}"] for key in TIMELINE},
    }
