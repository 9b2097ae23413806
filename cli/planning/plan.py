"""`foredraft plan`: which configuration, how many GPUs, how sure."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Annotated

import typer

from ..names import complete_setting
from ..options import (
    AsJson,
    Columns,
    Correct,
    Quiet,
    ScenarioFile,
    Seed,
    Settings,
    TraceFile,
    option,
    print_document,
    refuse_without_effect,
)
from ..simulation.launch import FromSglang, FromTrtllm, FromVllm, ServerLog, capacity_of_launch, launched
from ..simulation.simulate import given_by_options
from .options import Cluster, NumWorkers, OutDirectory, Requests, kept_runs

WIDTH = 80


# fmt: off
Slo = Annotated[str | None, option("--slo",
    "Limits, with commas between them: ttft_p99<1s (mean, p50, p90, p95 or p99 of ttft, tpot, itl or e2el), or "
    "attainment>95%,ttft<1s. Default: [slo] of the scenario, else ttft_p99<1s,tpot_p99<50ms.", "LIMITS")]
Rate = Annotated[float | None, option("--rate",
    "Requests/s to serve; with a trace, how many times as fast to replay it.", min=1e-6, max=1e6)]
Gpus = Annotated[int | None, option("--gpus",
    "GPUs to divide into engines. Default: those of one engine, or as many as all candidates divide.", min=1, max=4096)]
Tried = Annotated[list[str] | None, option("--try",
    "Values of a key to compare, as for --grid of sweep; repeatable.", "KEY=VALUES", autocompletion=complete_setting)]
Price = Annotated[list[str] | None, option("--price", "Price of a GPU hour: H100=2.5; repeatable.", "GPU=N")]
ByHour = Annotated[bool, option("--by-hour", "Of a trace: plan its busiest hour, and print the replicas of each hour.")]
Headroom = Annotated[float, option("--headroom", "With --by-hour: percent to add to the rate of an hour.", min=0, max=1000)]
WarmUp = Annotated[float, option("--warm-up", "With --by-hour: seconds for which a replica starts, which are paid.", min=0, max=86400)]
Seeds = Annotated[int, option("--seeds", "Most runs of the best candidate at a load; each has its own seed.", min=2, max=100)]
Details = Annotated[bool, option("--details",
    "Print also the limits, what the numbers and intervals rest on, all candidates, and bills.")]
# fmt: on


def plan(
    scenario: ScenarioFile = None, from_sglang: FromSglang = None, from_vllm: FromVllm = None, from_trtllm: FromTrtllm = None,
    server_log: ServerLog = None,
    slo: Slo = None, rate: Rate = None, gpus: Gpus = None, tried: Tried = None, price: Price = None,
    by_hour: ByHour = False, headroom: Headroom = 20, warm_up: WarmUp = 300,
    settings: Settings = None, trace: TraceFile = None, columns: Columns = None, seeds: Seeds = 48, requests: Requests = None,
    seed: Seed = None, details: Details = False, as_json: AsJson = False, out: OutDirectory = None, workers: NumWorkers = None,
    correct: Correct = False, cluster: Cluster = None, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Find the configuration that serves the most load within latency limits, or a given load with the fewest GPUs.

    Without --rate the command finds the greatest load that --gpus serve within
    the limits. With --rate it finds the smallest number of GPUs for this load.
    With a trace, --rate 1 is the trace as it is. The candidates are plain
    decoding, chains of 1, 2, 3, 5 and 7 drafts, a tree and adaptive steps, with
    --gpus at each tensor parallelism; --try replaces this list. A rough first
    round drops candidates that are far behind. The command ranks the others by the
    load that 95 % of runs hold, with 80 % intervals for the errors of the cost
    model; = marks candidates that are as good as the best one within the error.
    The answer is a sentence and a table; --details prints what they rest on. The
    command keeps every run: after Ctrl-C the same command continues. Exit code 1:
    no candidate meets the limits; 2: bad input, or no candidate can run.

        foredraft plan --slo 'ttft_p99<500ms,tpot_p99<20ms'
        foredraft plan chat.toml --rate 40 --price H100=2.5
        foredraft plan --gpus 8 --set model.target=llama-3.1-70b \\
            --try speculation.steps=0..4
        foredraft plan --trace requests.csv --rate 1 --try hardware.gpu=H100,L40S
        foredraft plan --trace day.csv --by-hour --price H100=2.5
    """
    from ...planning.answers.answer import search_plan
    from ...planning.candidates.candidate import base_tables
    from ...planning.demand.question import question_of
    from ...planning.grid import parse_grid
    from ...planning.plan import make_plan
    from ...planning.servers.started.measured import POOL_KEYS
    from ...sim.scenario_file import load_scenario
    from ..progress import StatusLine, text_progress
    from .plan_report import report_of

    refuse_without_effect(("--details", as_json and details, "the document of --json has them"))
    launch = launched(scenario, settings or (), from_sglang, from_vllm, from_trtllm, server_log)
    given = [*(settings or ()), *given_by_options(trace, seed, columns, correct)]
    resolved, origins = load_scenario(scenario, given, launch)
    measured = [key for key in POOL_KEYS if server_log and origins.get(key, "").startswith(f"{server_log}:")]
    asked, resolved = question_of(
        *(resolved, slo, rate, gpus, seeds, requests, _prices(price or ())),
        by_hour=by_hour, headroom=headroom / 100, warm_up_s=warm_up,
    )  # fmt: skip
    whole = make_plan(resolved, parse_grid(tried or (), "--try"), asked, measured)
    for notice in whole.notices():
        print(textwrap.fill(f"foredraft: {notice}", WIDTH, break_on_hyphens=False), file=sys.stderr)
    capacity = capacity_of_launch(resolved) if launch and not as_json else []
    line = StatusLine(quiet)
    with (
        kept_runs("plan", base_tables(resolved), out, workers, cluster, **whole.asked) as (pool, store),
        text_progress(quiet, less_often=True) as show_pace,
    ):
        try:
            ranked, answer = search_plan(whole, pool, store, line.show, show_pace)
        finally:
            line.clear()
    if as_json:
        print_document(answer)
    else:
        typer.echo("\n".join([*report_of(whole, ranked, answer, details), *([""] if capacity else []), *capacity]))
    if not ranked:
        raise typer.Exit(2)
    if not ranked[0].holds:
        raise typer.Exit(1)


def _prices(texts: Sequence[str]) -> dict[str, float]:
    """Return the prices of `--price` by the GPU's name as given."""
    from ...core.errors import ConfigError

    found = {}
    for text in texts:
        gpu, equals, number = text.partition("=")
        if not equals or not re.fullmatch(r"\d+(\.\d+)?", number.strip()) or not float(number):
            raise ConfigError.of("--price", text, "expected GPU=PRICE per hour, such as H100=2.5")
        found[gpu.strip()] = float(number)
    return found
