"""Print the best number of draft steps for each load, and how much an adaptive policy gains over it.

The script reads two sweeps, one over fixed numbers of steps and one over policies:

    foredraft sweep SCENARIO.toml --trace FILE --grid speculation.steps=0..7 \
        --grid workload.rate_scale=0.5..4:log --out STEPS
    foredraft sweep SCENARIO.toml --trace FILE --grid speculation.policy=goodput \
        --grid workload.rate_scale=0.5..4:log --out POLICIES
    python examples/best_steps.py STEPS [POLICIES]

It prints a row for each load: the mean end-to-end latency with each number of steps, the best number, and how many
times longer the latency is without drafts. For each policy the row then shows how many times longer the latency is with
the best number than with the policy. Both ratios have their 95 % interval over the seeds. Each ratio compares runs with
the same seed, because these runs see the same requests.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
from scipy import stats

STEPS, POLICY, LATENCY = "speculation.steps", "speculation.policy", "mean_e2el_ms"
LOADS = ("workload.rate_scale", "workload.rate", "workload.concurrency")


def latencies(place: str, varied: str) -> tuple[str, dict[tuple[float, Any], np.ndarray]]:
    """Return the key of the load, and the mean latency of each seed, float64 [seeds], by (load, value of `varied`)."""
    table = parquet.read_table(Path(place) / "trials.parquet").to_pydict()
    load_key = next(key for key in LOADS if key in table)
    runs = sorted(
        (table[load_key][i], table[varied][i], table["seed"][i], table[LATENCY][i])
        for i, status in enumerate(table["status"])
        if status == "done"
    )
    found: dict[tuple[float, Any], list[float]] = {}
    for load, value, _, latency in runs:
        found.setdefault((load, value), []).append(latency)
    return load_key, {key: np.array(values) for key, values in found.items()}


def compared(slower: np.ndarray, faster: np.ndarray) -> str:
    """Return the mean ratio of two arrays of latencies, float64 [seeds], with its 95 % interval, as text."""
    ratios = slower / faster
    half = stats.sem(ratios) * stats.t.ppf(0.975, len(ratios) - 1) if len(ratios) > 1 and np.ptp(ratios) else 0.0
    return f"{ratios.mean():.2f} × ± {half:.2f}"


def main() -> None:
    load_key, fixed = latencies(sys.argv[1], STEPS)
    chosen = latencies(sys.argv[2], POLICY)[1] if len(sys.argv) > 2 else {}
    loads, steps = (sorted({key[axis] for key in fixed}) for axis in range(2))
    policies = sorted({policy for _, policy in chosen})
    print("mean end-to-end latency, ms, by draft steps")
    head = (
        f"{load_key.rpartition('.')[2]:>12}" + "".join(f"{count:>8}" for count in steps) + "   best   against 0 steps"
    )
    print(head + "".join(f"   {policy} against best" for policy in policies))
    for load in loads:
        best = min(steps, key=lambda count, load=load: fixed[load, count].mean())
        cells = "".join(f"{fixed[load, count].mean():>8,.0f}" for count in steps)
        row = f"{load:>12g}{cells}{best:>7}   {compared(fixed[load, steps[0]], fixed[load, best]):<15}"
        gains = (f"   {compared(fixed[load, best], chosen[load, policy])}" for policy in policies)
        print((row + "".join(gains)).rstrip())


if __name__ == "__main__":
    main()
