"""Print how many requests per second one GPU can serve: a chat service without and with a draft, at rising rates.

    python examples/capacity.py [SCENARIO.toml] [KEY=VALUE …]

The GPU can serve a rate if 95 % of the requests meet every limit of the scenario's SLO. A setting such as
`hardware.server=sglang-0.5` repeats the test with the timing of that server.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from foredraft import Result, simulate

CHAT = Path(__file__).parent / "chat_on_h100.toml"
RATES = (8.0, 10.0, 12.0, 14.0, 16.0, 18.0)  # requests per second
ALGORITHMS = ("NONE", "EAGLE3")
SHARE = 0.95


def cells(result: Result) -> str:
    summary = result.summary
    return f"{result.slo_attainment:>8.1%} {summary['p99_ttft_ms']:>7.0f} ms {summary['p99_tpot_ms']:>6.1f} ms"


def value_of(text: str) -> object:
    """Return a number, a truth value or a list as what it is, and all else as a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def main() -> None:
    given = [argument.split("=", 1) for argument in sys.argv[1:] if "=" in argument]
    settings = {key: value_of(text) for key, text in given}
    scenario = next((argument for argument in sys.argv[1:] if "=" not in argument), CHAT)
    held = dict.fromkeys(ALGORITHMS, 0.0)
    print(f"{'':12}" + "".join(f"{algorithm:^30}" for algorithm in ALGORITHMS))
    print("requests/s  " + "  in SLO   p99 TTFT  p99 TPOT " * len(ALGORITHMS))
    for rate in RATES:
        row = []
        for algorithm in ALGORITHMS:
            changes = {"speculation.algorithm": algorithm, "workload.rate": rate, "workload.num_requests": 1000}
            changes["hardware.kernels"] = "roofline"  # the same numbers with and without the extra `measured`
            result = simulate(scenario, changes | settings)
            row.append(cells(result))
            if result.meets_slo(SHARE):
                held[algorithm] = rate
        print(f"{rate:>10g}  {'  '.join(row)}", flush=True)
    answers = ", ".join(f"{algorithm} {rate:g}" for algorithm, rate in held.items())
    print(f"requests per second within the SLO for {SHARE:.0%} of them: {answers}")


if __name__ == "__main__":
    main()
