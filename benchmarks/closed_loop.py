"""Closed loops: overlap against synchronous, and the goodput policy against every fixed step count.

    python benchmarks/closed_loop.py [--concurrency 1 8 32 64 128 256] [--algorithm EAGLE3] [--json FILE]

For each concurrency: output tokens per second with 0 … 7 fixed steps, with the `ema` tables and with the `goodput` policy (0 allowed).
Every row runs the same requests; only the policy differs. Simulated time, so the numbers are exact for a seed.
"""

from __future__ import annotations

import argparse
import json

from foretoken.core.contract.events import Committed
from foretoken.sim.run import Simulation
from foretoken.sim.scenario_file import scenario_from_dict

ALL_STEPS = list(range(8))


class OutputTokens:
    """Counts delivered tokens from what engines commit."""

    def __init__(self) -> None:
        self.total = 0

    def __call__(self, event) -> None:
        if type(event) is Committed:
            self.total += len(event.first_tokens) + (int(event.kept.sum()) if event.kept is not None else 0)


def throughput(concurrency: int, mode: str, algorithm: str, speculation: dict, rounds_of_requests: int) -> float:
    """Output tokens per second of simulated time."""
    scenario = {
        "speculation": {"algorithm": algorithm, **speculation},
        "acceptance": {"preset": "eagle-llama-chat"},
        "engine": {"mode": mode},
        "workload": {
            "concurrency": concurrency,
            "num_requests": max(64, rounds_of_requests * concurrency),
            "prompt": {"kind": "lognormal", "mean": 512.0, "sigma": 0.8, "high": 8192},
            "output": {"kind": "lognormal", "mean": 256.0, "sigma": 0.6, "high": 2048},
        },
    }
    tokens = OutputTokens()
    report = Simulation(scenario_from_dict(scenario, "closed loop"), sinks=lambda replica: [tokens]).run()
    return tokens.total / report.duration_ns * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--algorithm", default="EAGLE3")
    parser.add_argument("--rounds", type=int, default=10, help="requests per client")
    parser.add_argument("--json", help="write the table here as well")
    arguments = parser.parse_args()
    policies = {f"{steps}": {"policy": "fixed", "steps": steps} for steps in ALL_STEPS}
    policies["ema"] = {"policy": "ema"}
    policies["ema 0"] = {"policy": "ema", "adaptive": "with-zero"}
    policies["goodput"] = {"policy": "goodput", "adaptive": {"1": {"candidate_steps": ALL_STEPS}}}
    print("tokens/s".rjust(26), *(name.rjust(8) for name in policies), "goodput/best")
    table = []
    for concurrency in arguments.concurrency:
        by_mode = {}
        for mode in ("synchronous", "overlap"):
            row = {
                name: throughput(concurrency, mode, arguments.algorithm, speculation, arguments.rounds)
                for name, speculation in policies.items()
            }
            by_mode[mode] = row
            best = max(row[str(steps)] for steps in ALL_STEPS)
            share = row["goodput"] / best
            print(
                f"{concurrency:12d} {mode:>13s}",
                *(f"{value:8.0f}" for value in row.values()),
                f"{share:8.3f}",
                flush=True,
            )
            table.append({"concurrency": concurrency, "mode": mode, **row, "goodput_share_of_best": share})
        slower = [name for name in policies if by_mode["overlap"][name] < by_mode["synchronous"][name]]
        if slower:
            print(f"{concurrency:12d} overlap is slower than synchronous for: {', '.join(slower)}", flush=True)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(table, file, indent=1)


if __name__ == "__main__":
    main()
