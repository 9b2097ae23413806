"""Checks the load that `plan` states, with runs that no search has seen.

    python -m benchmarks.timing.stated_load [NAME …] [--workers N] [--write]    (needs the extra planning; 20 minutes)

A plan of each case states a load that 95 % of runs hold, for one or more candidates. Then 100 runs with other seeds (of
a trace: with other windows) are made at the load of each candidate, of which at least 90 should hold. Runs at 1.05, 1.1
and 1.2 times the load of the best candidate say how much more it could be.

All runs are kept in `runs/stated-…`: after Ctrl-C, the same command continues. Remove these directories after a change
of the simulator. `--write` puts the table into docs/planning-reference.md.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from foredraft.planning.answers.ranking import rank_candidates
from foredraft.planning.candidates.candidate import base_tables, make_candidates
from foredraft.planning.confidence.ranked import Ranked
from foredraft.planning.demand.question import PlanQuestion
from foredraft.planning.plan import Plan
from foredraft.planning.slo import excess, objectives_of
from foredraft.planning.store import default_place, kept_runs, question
from foredraft.planning.workers import Job, JobWorkers
from foredraft.sim.scenario_file import load_scenario

from ..pages import write_block

ROOT = Path(__file__).resolve().parents[2]
FRESH = range(1_000_000, 1_000_100)
"""Seeds of the check, which no plan uses."""
FACTORS = (1.0, 1.05, 1.1, 1.2)
"""Multiples of the stated load that are checked."""


class StatedCase(NamedTuple):
    """A question to check: a scenario with settings, its objectives, the candidates, the requests of a run, and the
    most seeds of the plan."""

    name: str
    scenario: str
    slo: str
    tried: Mapping[str, Sequence[Any]]
    requests: int
    settings: Sequence[str] = ()
    seeds: int = 48  # as by default


_BURSTY = StatedCase(
    "70B on 4 H100, bursty arrivals",
    "examples/tutorial/service.toml",
    "ttft_p90<500ms,tpot_p90<15ms",
    {"speculation.steps": [3]},
    150,
    ("workload.trace=none", "workload.arrivals=gamma", "workload.burstiness=2", "workload.rate=2"),
)
CASES = (
    StatedCase(
        "70B on 4 H100, windows of a trace",
        "examples/tutorial/service.toml",
        "ttft_p95<1s,tpot_p95<40ms",
        {"speculation.steps": [2, 3]},
        400,
        ("workload.resample_s=10",),
    ),
    _BURSTY,
    _BURSTY._replace(name=f"{_BURSTY.name}, --seeds 100", seeds=100),
    StatedCase(
        "8B on one H100, unlike drafts",
        "examples/chat_on_h100.toml",
        "ttft_p90<500ms,tpot_p90<15ms",
        {"speculation.algorithm": ["EAGLE3", "NGRAM", "NONE"], "speculation.steps": [0, 3]},
        150,
        ("workload.rate=4",),
    ),
    StatedCase(
        "8B in FP8 on one L4, chats",
        "examples/chat_on_h100.toml",
        "attainment>90%",
        {"speculation.steps": [3]},
        150,
        ("hardware.gpu=L4", "model.weight_dtype=fp8", "slo.ttft_ms=2000", "slo.tpot_ms=60", "workload.rate=1"),
    ),
)


class Checked(NamedTuple):
    """A candidate of a case, and how many fresh runs hold each multiple of its stated load."""

    case: StatedCase
    unit: str
    ranked: Ranked
    held: Mapping[float, int]


def check(case: StatedCase, num_workers: int) -> Iterator[Checked]:
    """Plan, and count the fresh runs that hold the stated load of each candidate, and more than that of the best."""
    scenario, _ = load_scenario(ROOT / case.scenario, case.settings)
    objectives, scenario = objectives_of(case.slo, scenario)
    candidates = make_candidates(scenario, case.tried, None)
    whole = Plan(scenario, candidates, PlanQuestion(objectives, None, None, range(case.seeds), case.requests))
    tables = base_tables(scenario)
    place = default_place(question("stated", tables, **whole.asked))
    with kept_runs("stated", tables, place, num_workers, None, **whole.asked) as (workers, store):
        for name, index, finding in whole.run(workers):
            print(f"  {name} round, {candidates[index].name}: {finding.value:.4g} ({len(store)} runs)", flush=True)
        for place, item in enumerate(rank_candidates(whole)):
            factors = FACTORS[:1] if place else FACTORS
            yield Checked(
                case, whole.load_unit, item, {one: _held(whole, item, one * item.load, workers) for one in factors}
            )


def _held(whole: Plan, item: Ranked, load: float, workers: JobWorkers) -> int:
    """Return how many of the fresh runs at a load keep every limit."""
    for seed in FRESH:
        workers.submit(Job(seed, whole.settings_at(item.candidate, load, seed)))
    trials = [workers.next_ended()[1] for _ in FRESH]
    held = sum(trial.status == "done" and excess(whole.question.objectives, trial.summary)[0] <= 1 for trial in trials)
    print(f"  {item.candidate.name} at {load:.4g}: {held} of {len(FRESH)} hold", flush=True)
    return held


def table(found: Sequence[Checked]) -> Iterator[str]:
    """Yield a Markdown table."""
    yield "| service, limits | a run | half of runs | spread | stated, seeds | fresh runs that hold it | 1.05 × | 1.1 × | 1.2 × |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for case, unit, item, held in found:
        finding = item.finding
        assert finding.interval is not None and finding.level is not None, "a load that was found has a level"
        name = f"{case.name}, {item.candidate.name}" if max(map(len, case.tried.values())) > 1 else case.name
        run = f"{finding.summary['submitted']:,} requests, {finding.summary['duration']:.0f} s"
        cells = [f"{name}: `{case.slo.replace(',', ', ')}`", run, f"{finding.interval.mean:.3g}"]
        cells += [f"{finding.level.spread.deviation:.1%}", f"{item.load:.3g} {unit}, {finding.seeds}"]
        yield f"| {' | '.join([*cells, *(str(held.get(factor, '')) for factor in FACTORS)])} |"


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
            found += check(case, asked.workers)
    lines = list(table(found))
    print("\n".join(lines))
    if asked.write:
        write_block("planning-reference.md", "stated loads", lines)


if __name__ == "__main__":
    main()
