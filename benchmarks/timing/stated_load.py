"""Checks the load that `plan` states, with runs that no search has seen.

    python -m benchmarks.timing.stated_load [NAME …] [--workers N] [--write]    (needs the extra planning; half an hour)

A plan of each scenario states a load that 95 % of runs hold. Then 100 runs with other seeds (of a trace: with other
windows) are made at this load, of which at least 90 should hold, and at a load that is 5 % greater, of which fewer than
90 should. `--write` writes the table into docs/planning-reference.md.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from foredraft.planning.candidates import base_tables, make_candidates
from foredraft.planning.confidence.ranked import Ranked
from foredraft.planning.confidence.ranking import rank_candidates
from foredraft.planning.demand.question import Question
from foredraft.planning.plan import Plan
from foredraft.planning.slo import excess, objectives_of
from foredraft.planning.workers import Job, LocalWorkers
from foredraft.sim.scenario_file import load_scenario

from ..pages import write_block

ROOT = Path(__file__).resolve().parents[2]
FRESH = range(1_000_000, 1_000_100)
"""Seeds of the check, which no plan uses."""
SEEDS = 48  # of a plan, as by default
LEAST = 90
"""Of the fresh runs, those that must hold."""
MORE = 1.05
"""So many times the stated load should be held by fewer than LEAST: then the stated one is near the greatest."""


class Case(NamedTuple):
    """A question to check: a scenario with settings, its objectives, the candidates, the requests of a run."""

    name: str
    scenario: str
    slo: str
    tried: Mapping[str, Sequence[Any]]
    requests: int
    settings: Sequence[str] = ()


CASES = (
    Case(
        "70B on 4 H100, windows of a trace",
        "examples/tutorial/service.toml",
        "ttft_p95<1s,tpot_p95<40ms",
        {"speculation.steps": [2]},
        400,
        ("workload.resample_s=10",),
    ),
    Case(
        "70B on 4 H100, bursty arrivals",
        "examples/tutorial/service.toml",
        "ttft_p90<500ms,tpot_p90<15ms",
        {"speculation.steps": [3]},
        150,
        ("workload.trace=none", "workload.arrivals=gamma", "workload.burstiness=2", "workload.rate=2"),
    ),
    Case(
        "8B in FP8 on one L4, chats",
        "examples/chat_on_h100.toml",
        "attainment>90%",
        {"speculation.steps": [3]},
        150,
        ("hardware.gpu=L4", "model.weight_dtype=fp8", "slo.ttft_ms=2000", "slo.tpot_ms=60", "workload.rate=1"),
    ),
)


class Checked(NamedTuple):
    """The stated load of a case, by how many seeds, and how many fresh runs hold it and MORE times it."""

    case: Case
    unit: str
    length: str
    half: float
    stated: float
    seeds: int
    held: int
    held_more: int


def check(case: Case, num_workers: int) -> Checked:
    """Plan, and count the fresh runs that hold the stated load and greater ones."""
    scenario, _ = load_scenario(ROOT / case.scenario, case.settings)
    objectives, scenario = objectives_of(case.slo, scenario)
    candidates = make_candidates(scenario, case.tried, None)
    whole = Plan(scenario, candidates, Question(objectives, None, None, range(SEEDS), case.requests, None))
    with closing(LocalWorkers(base_tables(scenario), num_workers)) as workers:
        for name, index, finding in whole.run(workers):
            print(f"  {name} round, {candidates[index].name}: {finding.value:.4g}", flush=True)
        best = rank_candidates(whole)[0]
        assert best.finding.interval is not None, "a load that was found has an interval"
        held, held_more = (_held(whole, best, load, workers) for load in (best.load, MORE * best.load))
    unit = "requests/s" if whole.trace_part is None else "× the trace"
    summary, seeds = best.finding.summary, len(best.finding.crossings)
    length = f"{summary['submitted']:,} requests, {summary['duration']:.0f} s"
    return Checked(case, unit, length, best.finding.interval.mean, best.load, seeds, held, held_more)


def _held(whole: Plan, best: Ranked, load: float, workers: LocalWorkers) -> int:
    """Return how many of the fresh runs at a load keep every limit."""
    for seed in FRESH:
        workers.submit(Job(seed, whole.settings_at(best.candidate, load, seed)))
    trials = [workers.next_ended()[1] for _ in FRESH]
    held = sum(trial.status == "done" and excess(whole.question.objectives, trial.summary)[0] <= 1 for trial in trials)
    print(f"  {load:.4g}: {held} of {len(FRESH)} hold", flush=True)
    return held


def table(found: Sequence[Checked]) -> Iterator[str]:
    """Yield a Markdown table."""
    yield "| service | limits | a run | half of runs | stated, seeds | fresh runs that hold it | that hold 5 % more |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for one in found:
        cells = [one.case.name, f"`{one.case.slo.replace(',', ', ')}`", one.length, f"{one.half:.3g}"]
        cells += [f"{one.stated:.3g} {one.unit}, {one.seeds}", f"{one.held} of {len(FRESH)}"]
        yield f"| {' | '.join(cells)} | {one.held_more} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="words in the names of the cases; default: all")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", action="store_true", help="put the table into docs/planning-reference.md")
    asked = parser.parse_args()
    os.chdir(ROOT)
    found = []
    for case in CASES:
        if not asked.names or any(name in case.name for name in asked.names):
            print(case.name, flush=True)
            found.append(check(case, asked.workers))
    lines = list(table(found))
    print("\n".join(lines))
    if asked.write:
        write_block("planning-reference.md", "stated loads", lines)


if __name__ == "__main__":
    main()
