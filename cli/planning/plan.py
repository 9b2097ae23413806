"""`foredraft plan`: which configuration, how many GPUs, how sure."""

from __future__ import annotations

import math
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ..options import AsJson, Quiet, ScenarioFile, Seed, Settings, TraceFile, option, print_document
from ..simulation.launch import FromSglang, FromTrtllm, FromVllm, launched
from ..simulation.simulate import given_by_options
from .options import Cluster, NumWorkers, OutDirectory, Requests, kept_runs

if TYPE_CHECKING:
    from ...planning.answer import PlanAnswer
    from ...planning.confidence.ranked import Ranked
    from ...planning.plan import Plan

WIDTH = 80


# fmt: off
Slo = Annotated[str, option("--slo",
    "Limits, separated by commas: ttft, tpot, itl or e2el, each as mean, p50, p90, p95 or p99.", "LIMITS")]
Rate = Annotated[float | None, option("--rate",
    "Requests/s to serve; with a trace, how many times as fast to replay it.", min=1e-6, max=1e6)]
Gpus = Annotated[int | None, option("--gpus",
    "GPUs to divide into engines. Default: the GPUs of one engine.", min=1, max=4096)]
Tried = Annotated[list[str] | None, option("--try",
    "Values of a key to compare, as for --grid of sweep; repeatable.", "KEY=VALUES")]
Price = Annotated[list[str] | None, option("--price", "Price of a GPU hour: H100=2.5; repeatable.", "GPU=N")]
Seeds = Annotated[int, option("--seeds", "Most runs per load; each run has its own seed.", min=2, max=100)]
ModelError = Annotated[float | None, option("--model-error",
    "Error of the cost model in comparisons, in percent. Default: by published points.", min=0, max=100)]
# fmt: on


def plan(
    scenario: ScenarioFile = None, from_sglang: FromSglang = None, from_vllm: FromVllm = None, from_trtllm: FromTrtllm = None,
    slo: Slo = "ttft_p99<1s,tpot_p99<50ms", rate: Rate = None, gpus: Gpus = None, tried: Tried = None, price: Price = None,
    settings: Settings = None, trace: TraceFile = None, seeds: Seeds = 4, requests: Requests = None, model_error: ModelError = None,
    seed: Seed = None, as_json: AsJson = False, out: OutDirectory = None, workers: NumWorkers = None, cluster: Cluster = None,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Find the configuration that serves the most load within latency limits, or a given load with the fewest GPUs.

    Without --rate the command finds the greatest load that --gpus serve within
    the limits. With --rate it finds the smallest number of GPUs for this load.
    With a trace, --rate 1 is the trace as it is. The candidates are plain
    decoding, chains of 1, 2, 3, 5 and 7 drafts, a tree and adaptive steps, with
    --gpus at each tensor parallelism; --try replaces this list. A rough first
    round drops candidates that are far behind. The command ranks the others, with
    95 % intervals over seeds, and 80 % intervals for the errors of the cost model;
    = marks candidates that are as good as the best one within the error. It keeps
    every run: after Ctrl-C the same command continues. Exit code 1: no candidate
    meets the limits; 2: bad input, or no candidate can run.

        foredraft plan --slo 'ttft_p99<500ms,tpot_p99<20ms'
        foredraft plan chat.toml --rate 40 --price H100=2.5
        foredraft plan --gpus 8 --set model.target=llama-3.1-70b \\
            --try speculation.steps=0..4
        foredraft plan --trace requests.csv --rate 1 --try hardware.gpu=H100,L40S
    """
    from ...planning.answer import search_plan
    from ...planning.candidates import base_tables
    from ...planning.grid import parse_grid
    from ...planning.plan import make_plan, question_of
    from ...sim.scenario_file import load_scenario
    from ..progress import StatusLine

    prices = _prices(price or ())
    launch = launched(scenario, settings or (), from_sglang, from_vllm, from_trtllm)
    resolved, _ = load_scenario(scenario, [*(settings or ()), *given_by_options(trace, seed)], launch)
    error = None if model_error is None else model_error / 100
    asked = question_of(resolved, slo, rate, gpus, seeds, requests, error, prices)
    whole = make_plan(resolved, parse_grid(tried or (), "--try"), asked)
    for notice in whole.notices():
        print(textwrap.fill(f"foredraft: {notice}", WIDTH, break_on_hyphens=False), file=sys.stderr)
    line = StatusLine(quiet)
    with kept_runs("plan", base_tables(resolved), out, workers, cluster, **whole.asked) as (pool, store):
        try:
            ranked, answer = search_plan(whole, pool, store, line.show)
        finally:
            line.clear()
    if as_json:
        print_document(answer)
    else:
        typer.echo("\n".join(_report(whole, ranked, answer)))
    if not ranked:
        raise typer.Exit(2)
    if not ranked[0].holds:
        raise typer.Exit(1)


def _prices(texts: Sequence[str]) -> dict[str, float]:
    from ...core.errors import ConfigError
    from ...sim.cost.hardware import lookup_gpu

    prices = {}
    for text in texts:
        name, equals, number = text.partition("=")
        if not equals or not re.fullmatch(r"\d+(\.\d+)?", number.strip()) or not float(number):
            raise ConfigError.of("--price", text, "expected GPU=PRICE per hour, such as H100=2.5")
        prices[lookup_gpu(name.strip()).name] = float(number)
    return prices


def _report(whole: Plan, ranked: list[Ranked], answer: PlanAnswer) -> list[str]:
    lines = textwrap.wrap(answer.sentences[0], WIDTH)
    shown = [item for item in ranked if not item.dropped]
    if shown and shown[0].holds:
        lines += ["", *_table(whole, shown), *_model_table(whole, shown)]
        lines += [line for text in (*answer.sentences[2:], answer.timing) for line in textwrap.wrap(text, WIDTH)]
    elif ranked:
        lines += ["", *textwrap.wrap(answer.sentences[1], WIDTH)]
    left = "not searched on (in brackets: of the best load in the first round)"
    for is_equal, why in ((True, f"Equal within the error of comparisons, {left}"), (False, f"Behind, {left}")):
        dropped = [item for item in ranked if item.dropped and item.holds and item.equal == is_equal]
        if dropped:
            names = "; ".join(f"{item.candidate.name} ({item.first_share:.0%})" for item in dropped)
            lines += ["", *textwrap.wrap(f"{why}: {names}.", WIDTH)]
    hopeless = [item.candidate.name for item in ranked if not item.holds]
    if hopeless and shown and shown[0].holds:
        lines += ["", *textwrap.wrap(f"Within the limits at no load: {'; '.join(hopeless)}.", WIDTH)]
    by_reason: dict[str, list[str]] = {}
    reasons: dict[str, str] = {}  # the first in full of those that differ in the numbers in brackets alone
    for candidate, reason in whole.refused():
        what = reason.partition("(")[0]
        reasons.setdefault(what, reason)
        by_reason.setdefault(what, []).append(candidate.name)
    for what, refused in by_reason.items():
        lines += ["", *textwrap.wrap(f"Cannot run: {'; '.join(refused)}: {reasons[what]}", WIDTH)]
    return lines


def _table(whole: Plan, shown: list[Ranked]) -> list[str]:
    from ...planning.answer import cost_per_million_tokens, tightest_of, tokens_per_s

    prices = whole.question.prices
    greatest = whole.question.load is None
    priced = any(whole.gpu_of(item.candidate) in prices for item in shown)
    head = (f"{whole.load_unit:>14}" if greatest else "") + f"{'GPUs':>6}{'tokens/s':>10}"
    head += (f"{'per 1M tokens':>15}" if priced else "") + "  tightest"
    rows = []
    for item in shown:
        found = item.finding
        if not item.holds:
            rows.append("holds on no number of GPUs that was tried")
            continue
        cells = ""
        if greatest:
            interval = f" ± {found.interval.half_width:.2g}" if found.interval is not None else ""
            bound = "≥ " if found.is_bound else ""
            cells += f"{f'{bound}{item.load:.3g}{interval}':>14}"
        tokens = tokens_per_s(whole, item)
        cells += f"{item.gpus:>6}{tokens:>10,.0f}"
        if priced:
            per_hour = prices.get(whole.gpu_of(item.candidate))
            cost = None if per_hour is None else cost_per_million_tokens(item, tokens, per_hour)
            cells += f"{'–' if cost is None else f'{cost:.3g}':>15}"
        rows.append(f"{cells}  {tightest_of(found).name} {found.excess:.0%}")
    price = ", per 1M tokens their price" if priced else ""
    return [*_rows(shown, head, rows), "", f"tokens/s are the output tokens of all GPUs of a row{price}."]


def _model_table(whole: Plan, shown: list[Ranked]) -> list[str]:
    """Return a table of what holds if times are not as simulated, and what it rests on."""
    from ...observe.tables import intervals_rest_on, outside_of_intervals
    from ...planning.answer import tightest_of

    rests = [item.rests_on for item in shown if item.holds]
    if all(item.taken_range is None for item in shown):
        return textwrap.wrap(intervals_rest_on(*rests, are_known=False), WIDTH)
    is_load, rows = whole.question.load is None, []
    numbers: dict[str, tuple[float, Sequence[float]]] = {}
    for place, item in enumerate(shown, 1):
        ends = item.load_range if is_load else item.gpu_range
        cells = f"{_ends(ends):>18}"
        if ends is not None:
            low, high = ends
            span = (-math.inf if low is None else low, math.inf if high is None else high)
            numbers[f"{'requests/s' if is_load else 'GPUs'} of row {place}"] = (
                item.load if is_load else item.gpus,
                span,
            )
        if item.taken_range is not None:
            low, high = item.taken_range
            cells += f"  {tightest_of(item.finding).name} {low:.0%} to {high:.0%}"
        rows.append(cells)
    lines = ["", "If the times of passes and first tokens are not as simulated, 80 % intervals", ""]
    lines += [*_rows(shown, f"{whole.load_unit if is_load else 'GPUs':>18}  tightest", rows), ""]
    texts = (intervals_rest_on(*rests), outside_of_intervals(numbers))
    return lines + [line for text in texts for line in textwrap.wrap(text, WIDTH)]


def _ends(ends: Sequence[float | None] | None) -> str:
    """Return an interval of loads or numbers of GPUs in words; an end that is not known is a dash."""
    return "–" if ends is None else " to ".join("–" if end is None else f"{end:.3g}" for end in ends)


def _rows(shown: list[Ranked], head: str, rows: Sequence[str]) -> list[str]:
    """Return a table with a row for each candidate: its mark, its name, its cells. Names are wrapped where the table
    would be wider than 80 columns."""
    widest = max(map(len, (head, *rows)))
    width = min(max(len(item.candidate.name) for item in shown) + 2, max(WIDTH - 4 - widest, 16))
    lines = [f"{'':4}{'':{width}}{head}"]
    for place, (item, cells) in enumerate(zip(shown, rows, strict=True), 1):
        mark = "=" if item.equal and place > 1 else str(place)
        first, *more = textwrap.wrap(item.candidate.name, width - 1, break_on_hyphens=False)
        lines += [f"{mark:>3} {first:{width}}{cells}", *(f"{'':6}{line}" for line in more)]
    return lines
