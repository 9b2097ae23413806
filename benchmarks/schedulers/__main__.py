"""How far our engine decides as other servers do: their own schedulers, step by step on random workloads.

    pip download --no-deps vllm==0.33.0
    python -m benchmarks.schedulers vllm vllm-0.33.0-….whl [--workloads 1000] [--server vllm-0.18] [--write]
    python -m benchmarks.schedulers vllm vllm-0.34.0-….whl --changes      which rules differ from our profile's
    python -m benchmarks.schedulers vllm vllm-0.33.0-….whl --record       the records that a test compares with

    python -m benchmarks.schedulers sglang sglang-0.5.23-….whl [--write]  single decisions

The wheel is read as it is, or as a folder into which it was unpacked. Neither a GPU nor the server's other packages are
needed; torch is. --write puts the tables into docs/servers.md. A thousand workloads take about five minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from foredraft.core.errors import ForedraftError

from ..pages import write_block
from .comparison import compare_all, infer_rules
from .records import RECORDED, share_of_steps, store, stored
from .sglang_adaptive import compare_steps
from .sglang_admission import compare_admissions
from .sglang_decisions import SGLang, compare_rules
from .vllm_scheduler import VLLM
from .workloads import draw_workload

SEEDS_TO_INFER = 12
"""Recorded workloads on which other rules are tried: each takes a second per rule."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison. Returns the exit code: 2 for a file that is no wheel of that server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=["vllm", "sglang"])
    parser.add_argument("wheel", type=Path, help="the wheel, or a folder into which it was unpacked")
    parser.add_argument("--workloads", type=int, default=1000)
    parser.add_argument("--server", default="vllm-0.18", help="our profile (hardware.server)")
    parser.add_argument("--changes", action="store_true", help="find which rules of this release differ")
    parser.add_argument("--record", action="store_true", help="store what this release decides")
    parser.add_argument("--write", action="store_true", help="put the table into docs/servers.md")
    given = parser.parse_args(arguments)
    try:
        return _sglang(given) if given.package == "sglang" else _vllm(given)
    except ForedraftError as error:
        print(error, file=sys.stderr)
        return 2


def _sglang(given: argparse.Namespace) -> int:
    release = SGLang(given.wheel)
    found = [*compare_rules(release, given.workloads), compare_steps(release, given.workloads)]
    found += compare_admissions(release, map(draw_workload, range(given.workloads // 4)))
    table = ["| decision | method of SGLang | states | equal |", "| --- | --- | --- | --- |"]
    table += [f"| {decision} | {method} | {n:,} | {equal / n:.1%} |" for decision, method, n, equal in found]
    print("\n".join([f"SGLang {release.version}", *table]))
    if given.write:
        write_block("servers.md", "sglang", table)
    return 0


def _vllm(given: argparse.Namespace) -> int:
    release = VLLM(given.wheel)
    if given.record:
        print(f"{store(release.start, release.version)} records")
        return 0
    print(f"vLLM {release.version}, {given.workloads:,} workloads, against {given.server}")
    print(f"{share_of_steps(stored(), release.start):.1%} of the recorded steps as recorded")
    totals = compare_all(release.start, map(draw_workload, range(given.workloads)), given.server)
    print("\n".join([*totals.table(), *totals.causes()]))
    if given.changes and totals.share < 1.0:
        some = [draw_workload(seed) for seed in RECORDED[-SEEDS_TO_INFER:]]
        changed, share = infer_rules(release.start, some, given.server)
        print(f"with other rules {share:.1%} of steps are equal:")
        print("\n".join(f"    {name} = {value!r}" for name, value in changed.items()) or "    none found")
    if given.write:
        write_block("servers.md", "vllm", totals.table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
