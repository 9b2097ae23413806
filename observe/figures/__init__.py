"""Figures of runs, sweeps, plans, tunes and twins, for notebooks and for `foredraft report`; needs the extra `report`
(plotly).

    from foredraft.observe import figures

    figures.latencies("runs/chat").show()
    figures.throughput_against_latency("runs/sweep-1f2e3d4c", latency="p99_ttft_ms").write_html("sweep.html")
    figures.frontier("runs/plan-5a6b7c8d")

Each function takes the directory or file that a command has written (or what `StoredRun`, `Trials` or `Twin` has read
of it) and returns a `plotly.graph_objects.Figure`. Raises ConfigError for a path that holds something else.
"""

from .pair import batch_of_two, latencies_of_two, steps_of_two
from .plans import cost_against_load, frontier, latency_against_load
from .rounds import round_waterfall
from .run import (
    StoredRun,
    acceptance_by_position,
    intervals,
    kv_over_time,
    latencies,
    load_over_time,
    steps_by_batch,
    steps_over_time,
)
from .speeds import attainment_against_load, throughput_per_gpu
from .trials import Trials, against, throughput_against_latency, tuned_gains, tuned_steps
from .twin import Twin, batch_over_time, errors, predicted_against_measured

__all__ = [
    "StoredRun", "Trials", "Twin", "acceptance_by_position", "against", "attainment_against_load", "batch_of_two",
    "batch_over_time", "cost_against_load", "errors", "frontier", "intervals", "kv_over_time", "latencies",
    "latencies_of_two", "latency_against_load", "load_over_time", "predicted_against_measured", "round_waterfall",
    "steps_by_batch", "steps_of_two", "steps_over_time", "throughput_against_latency", "throughput_per_gpu",
    "tuned_gains", "tuned_steps",
]  # fmt: skip
