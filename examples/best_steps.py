"""Which number of draft steps is best at which load? Reads a sweep of both.

    foretoken sweep SCENARIO.toml --trace FILE --grid speculation.steps=0..7 --grid workload.rate_scale=0.5..4:log --out DIR
    python examples/best_steps.py DIR

A row per load: the mean end-to-end latency of each number of steps, the best one, and how much shorter it is than without drafts, with the
95 % interval of that ratio over the seeds. Seeds are compared with themselves, as all runs of one seed see the same requests.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
from scipy import stats

STEPS, LATENCY = "speculation.steps", "mean_e2el_ms"
LOADS = ("workload.rate_scale", "workload.rate", "workload.concurrency")


def main() -> None:
    table = parquet.read_table(Path(sys.argv[1]) / "trials.parquet").to_pydict()
    load_key = next(key for key in LOADS if key in table)
    done = [i for i, status in enumerate(table["status"]) if status == "done"]
    latency = {(table[load_key][i], table[STEPS][i], table["seed"][i]): table[LATENCY][i] for i in done}
    loads, steps, seeds = (sorted({key[axis] for key in latency}) for axis in range(3))
    print("mean end-to-end latency, ms, by draft steps")
    print(
        f"{load_key.rpartition('.')[2]:>12}" + "".join(f"{count:>8}" for count in steps) + "   best   against 0 steps"
    )
    for load in loads:
        runs = np.array([[latency[load, count, seed] for seed in seeds] for count in steps])  # steps × seeds
        best = int(runs.mean(axis=1).argmin())
        ratios = runs[0] / runs[best]
        half = stats.sem(ratios) * stats.t.ppf(0.975, len(seeds) - 1) if best else 0.0
        cells = "".join(f"{mean:>8,.0f}" for mean in runs.mean(axis=1))
        print(f"{load:>12g}{cells}{steps[best]:>7}   {ratios.mean():.2f} × ± {half:.2f}")


if __name__ == "__main__":
    main()
