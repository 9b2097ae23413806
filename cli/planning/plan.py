"""`foredraft plan`: which configuration, how many GPUs, how sure."""

from __future__ import annotations

import json
import math
import re
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...core.errors import count_of
from ..options import Quiet, ScenarioFile, Seed, Settings, TraceFile, option
from ..simulation.launch import FromSglang, FromTrtllm, FromVllm, launched
from ..simulation.simulate import given_by_options
from .options import Cluster, NumWorkers, OutDirectory, kept_runs

if TYPE_CHECKING:
    from ...planning.candidates import Candidate
    from ...planning.plan import Plan, Question
    from ...planning.store import TrialStore
    from ...planning.trial import Trial
    from ...planning.workers import Workers
    from ...sim.scenario import Scenario

WIDTH = 80
MOST_SHARED = 64  # GPUs, if none are given
REQUESTS = 600  # of a run, where no trace has its own


# fmt: off
Slo = Annotated[str | None, option("--slo",
    "Limits, with commas between them: ttft_p99<1s (mean, p50, p90, p95 or p99 of ttft, tpot, itl or e2el), or "
    "attainment>95%,ttft<1s. Default: [slo] of the scenario, else ttft_p99<1s,tpot_p99<50ms.", "LIMITS")]
Rate = Annotated[float | None, option("--rate",
    "Requests/s to serve; with a trace, how many times as fast to replay it.", min=1e-6, max=1e6)]
Gpus = Annotated[int | None, option("--gpus",
    "GPUs to divide into engines. Default: those of one engine, or as many as all candidates divide.", min=1, max=4096)]
Tried = Annotated[list[str] | None, option("--try",
    "Values of a key to compare, as for --grid of sweep; repeatable.", "KEY=VALUES")]
Price = Annotated[list[str] | None, option("--price", "Price of a GPU hour: H100=2.5; repeatable.", "GPU=N")]
Power = Annotated[list[str] | None, option("--power", "Watts of a GPU under load: H100=600; adds the energy; repeatable.", "GPU=N")]
ByHour = Annotated[bool, option("--by-hour", "Of a trace: plan its busiest hour, and print the replicas of each hour.")]
Headroom = Annotated[float, option("--headroom", "With --by-hour: percent to add to the rate of an hour.", min=0, max=1000)]
WarmUp = Annotated[float, option("--warm-up", "With --by-hour: seconds for which a replica starts, which are paid.", min=0, max=86400)]
Seeds = Annotated[int, option("--seeds", "Most runs of the best candidate at a load; each has its own seed.", min=2, max=100)]
Requests = Annotated[int | None, option("--requests", "Requests per run. Default: 600, or as many as a trace has.", min=100)]
ModelError = Annotated[float | None, option("--model-error",
    "Error of the cost model in comparisons, in percent. Default: by published points.", min=0, max=100)]
AsJson = Annotated[bool, option("--json", "Print one JSON object instead of text tables.")]
# fmt: on


def plan(
    scenario: ScenarioFile = None, from_sglang: FromSglang = None, from_vllm: FromVllm = None, from_trtllm: FromTrtllm = None,
    slo: Slo = None, rate: Rate = None, gpus: Gpus = None, tried: Tried = None, price: Price = None,
    power: Power = None, by_hour: ByHour = False, headroom: Headroom = 20, warm_up: WarmUp = 300,
    settings: Settings = None, trace: TraceFile = None, seeds: Seeds = 48, requests: Requests = None, model_error: ModelError = None,
    seed: Seed = None, as_json: AsJson = False, out: OutDirectory = None, workers: NumWorkers = None, cluster: Cluster = None,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Find the configuration that serves the most load within latency limits, or a given load with the fewest GPUs.

    Without --rate the command finds the greatest load that --gpus serve within
    the limits. With --rate it finds the smallest number of GPUs for this load.
    With a trace, --rate 1 is the trace as it is. The candidates are plain
    decoding, chains of 1, 2, 3, 5 and 7 drafts, a tree and adaptive steps, with
    --gpus at each tensor parallelism; --try replaces this list. A rough first
    round drops candidates that are far behind. The command ranks the others by the
    load that 95 % of runs hold, with 80 % intervals for the errors of the cost
    model; = marks candidates that are as good as the best one within the error. It
    keeps every run: after Ctrl-C the same command continues. Exit code 1: no candidate
    meets the limits; 2: bad input, or no candidate can run.

        foredraft plan --slo 'ttft_p99<500ms,tpot_p99<20ms'
        foredraft plan chat.toml --rate 40 --price H100=2.5
        foredraft plan --gpus 8 --set model.target=llama-3.1-70b \\
            --try speculation.steps=0..4
        foredraft plan --trace requests.csv --rate 1 --try hardware.gpu=H100,L40S
        foredraft plan --trace day.csv --by-hour --price H100=2.5
    """
    from ...planning.answer import answer_of, write_answer
    from ...planning.confidence.ranking import rank_candidates
    from ...planning.plan import Question
    from ...planning.slo import objectives_of
    from ...sim.scenario_file import load_scenario
    from .plan_day import Day, hours_of
    from .plan_report import report_of

    prices, watts = _by_gpu("--price", price or ()), _by_gpu("--power", power or ())
    day = Day(headroom / 100, warm_up) if by_hour else None
    launch = launched(scenario, settings or (), from_sglang, from_vllm, from_trtllm)
    resolved, _ = load_scenario(scenario, [*(settings or ()), *given_by_options(trace, seed)], launch)
    objectives, resolved = objectives_of(slo, resolved)
    if day is not None:
        resolved = day.busiest_hour_of(resolved, rate)
    if requests is None and resolved.workload.trace is None:
        requests = REQUESTS
    decisive = range(resolved.seed, resolved.seed + seeds)
    error = None if model_error is None else model_error / 100
    whole = _plan(resolved, Question(objectives, rate, gpus, decisive, requests, error, prices), tried or ())
    place = _search(whole, out, workers, cluster, quiet)
    ranked = rank_candidates(whole)
    lines, sentences = report_of(whole, ranked, prices, watts)
    hours = day.answer(whole, ranked, prices) if day is not None else None
    if hours is not None:
        lines += hours_of(hours)
    answer = answer_of(whole, ranked, prices, sentences, watts, hours)
    write_answer(place, answer)
    typer.echo(json.dumps(answer, indent=1) if as_json else "\n".join(lines))
    if not ranked:
        raise typer.Exit(2)
    if not ranked[0].holds:
        raise typer.Exit(1)


def _plan(scenario: Scenario, asked: Question, tried: Sequence[str]) -> Plan:
    """Return the plan, whose trace has been read."""
    from ...core.errors import ConfigError
    from ...planning.candidates import make_candidates
    from ...planning.grid import parse_grid
    from ...planning.plan import Plan

    if scenario.workload.concurrency is not None:
        message = "a closed loop has no request rate to plan for; give workload.rate or a trace"
        raise ConfigError.of("workload", "concurrency", message)
    candidates = make_candidates(scenario, parse_grid(tried, "--try"), asked.gpus)
    whole = Plan(scenario, candidates, replace(asked, gpus=asked.gpus or _shared_gpus(candidates, asked)))
    if whole.trace_part is not None:  # a trace that cannot be read is refused now
        for notice in [*whole.trace_part.notices(_contexts(whole)), *whole.trace_part.warnings(asked.load)]:
            print(textwrap.fill(f"foredraft: {notice}", WIDTH, break_on_hyphens=False), file=sys.stderr)
    return whole


def _shared_gpus(candidates: Sequence[Candidate], asked: Question) -> int | None:
    """Return the least number of GPUs that every candidate divides into whole deployments, if these differ in size: so
    that loads can be compared. None where they are alike, or the number is beyond MOST_SHARED."""
    sizes = {one.gpus_per_unit for one in candidates}
    shared = math.lcm(*sizes)
    return shared if asked.load is None and len(sizes) > 1 and shared <= MOST_SHARED else None


def _contexts(whole: Plan) -> list[tuple[str, int]]:
    """Return the models of the candidates that can be assembled, with the lengths of their contexts."""
    from ...core.errors import ForedraftError

    contexts = dict[tuple[str, int], None]()
    for candidate in whole.candidates:
        with suppress(ForedraftError):
            run = whole.errors.assembly(candidate, candidate.unit)
            contexts[run.target.name, run.spec.config.context_len] = None
    return list(contexts)


def _search(whole: Plan, out: Path | None, workers: int | None, cluster: str | None, quiet: bool) -> Path:
    """Search all candidates, keep every run in the directory of the plan, and return it."""
    from ...planning.candidates import base_tables

    described = {**asdict(replace(whole.question, prices={})), "seeds": list(whole.question.seeds)}
    candidates = [one.settings for one in whole.candidates]
    tables = base_tables(whole.scenario)
    with kept_runs("plan", tables, out, workers, cluster, asked=described, candidates=candidates) as (pool, store):
        _watch(whole, pool, store, quiet)
    return store.path


def _by_gpu(name: str, texts: Sequence[str]) -> dict[str, float]:
    """Return the numbers of an option `GPU=N` by the GPU's name."""
    from ...core.errors import ConfigError
    from ...sim.cost.hardware import lookup_gpu

    found = {}
    for text in texts:
        gpu, equals, number = text.partition("=")
        if not equals or not re.fullmatch(r"\d+(\.\d+)?", number.strip()) or not float(number):
            expected = "GPU=PRICE per hour, such as H100=2.5" if name == "--price" else "GPU=WATTS, such as H100=600"
            raise ConfigError.of(name, text, f"expected {expected}")
        found[lookup_gpu(gpu.strip()).name] = float(number)
    return found


def _watch(whole: Plan, pool: Workers, store: TrialStore, quiet: bool) -> None:
    """Search all candidates. Each that ends is a line on standard error; so is how far the search is, now and then."""
    from ...planning.answer import load_unit
    from ...planning.search.pace import WatchedWorkers
    from ..progress import LINE_EVERY_S, StatusLine

    line = StatusLine(quiet)
    now_and_then = StatusLine(quiet, redraw_every_s=0.2, line_every_s=LINE_EVERY_S)
    unit, pace = load_unit(whole), whole.pace

    def on_run(trial: Trial) -> None:
        pace.note(trial)
        left_s = pace.left_s(pool.count)
        if left_s is not None and now_and_then.due_s() is not None:
            done = f"{pace.ended[pace.round]} of {count_of(pace.searches[pace.round], 'candidate')}"
            now_and_then.show(
                f"{pace.round} round, {done}, {count_of(sum(pace.runs.values()), 'run')}, {_in_words(left_s)} left"
            )

    try:
        for which, index, found in whole.run(WatchedWorkers(pool, on_run)):
            if found.reason:  # told below the table
                continue
            is_load = which != "second" or whole.question.load is None
            value = f"{found.value:.3g} {unit}" if is_load else count_of(round(found.value), "engine")
            result = (
                value if found.value else f"holds {'no load' if is_load else 'with no number of engines that may be'}"
            )
            line.show(f"{which} round, {whole.candidates[index].name}: {result} ({count_of(len(store), 'run')})")
    finally:
        line.clear()
        now_and_then.clear()


def _in_words(seconds: float) -> str:
    return f"about {seconds / 60:.0f} min" if seconds >= 90 else f"about {max(seconds, 1):.0f} s"
