"""`foredraft tune`: the table of draft steps for a workload, compared with what it replaces, as the files
that servers take."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...core.errors import count_of
from ..options import AsJson, Quiet, ScenarioFile, Seed, Settings, TraceFile, mode_of, option, print_document
from ..simulation.launch import FromSglang, FromTrtllm, FromVllm, launched
from ..simulation.simulate import given_by_options
from .options import Cluster, NumWorkers, Requests, kept_runs
from .tables import print_table

if TYPE_CHECKING:
    from ...planning.search.intervals import Estimate
    from ...planning.tuning.result import TuneResult
    from ...planning.tuning.tune import Judged, Tune

WIDTH = 80
EXIT_BEHIND = 1
REQUESTS = 100  # of a run, about


Trials = Annotated[int, option("--trials", "Number of tables that the search tries.", min=1, max=10_000)]
SearchSeeds = Annotated[int, option("--search-seeds", "Runs of each table in the search.", min=1, max=100)]
Seeds = Annotated[
    int, option("--seeds", "Runs of each candidate in the final comparison, with other seeds.", min=2, max=1000)
]


OutDirectory = Annotated[
    Path | None,
    option("--out", "Directory of the runs, by default a new one in runs/; with --table a file.", "DIR|FILE"),
]
Table = Annotated[
    str | None,
    option(
        "--table",
        "Search nothing: print this table with every key, in our format. A preset (default, with-zero, zero-to-seven), or "
        "a file: ours, SGLang's, the JSON of vLLM's --speculative-config, TensorRT-LLM's YAML.",
        "PRESET|FILE",
    ),
]
MODES = {"--table": {"out"}}


def tune(
    ctx: typer.Context,
    scenario: ScenarioFile = None, from_sglang: FromSglang = None, from_vllm: FromVllm = None, from_trtllm: FromTrtllm = None,
    settings: Settings = None, trace: TraceFile = None, trials: Trials = 32, search_seeds: SearchSeeds = 3, seeds: Seeds = 5,
    requests: Requests = None, seed: Seed = None, as_json: AsJson = False, out: OutDirectory = None, workers: NumWorkers = None,
    cluster: Cluster = None, quiet: Quiet = False, table: Table = None,
) -> None:  # fmt: skip
    """Find the table of draft steps by batch size that serves a workload fastest.

    The command judges a table in phases: a light load, the knee, saturation and
    the scenario's own load. With a trace the phases are its quietest, middle and
    busiest windows. It measures the speed that requests see, from arrival to end.

        foredraft tune
        foredraft tune chat.toml --out runs/chat-steps
        foredraft tune --trace requests.csv --set hardware.gpu=L40S
        foredraft tune --table with-zero
        foredraft tune --table speculative-config.json --out steps.json

    Then it compares the best tables with every fixed number of steps, the default
    table, the policy goodput, and no speculation. This comparison uses seeds that
    the search did not use. The command rejects a table that is more than 1 %
    behind the best fixed number in any phase. The exit code is 1 if no table is
    left.

    --out holds adaptive.json and scenario.toml for `foredraft simulate`, the
    files for the server that was simulated (SGLang, vLLM or TensorRT-LLM),
    result.json, and every run. After Ctrl-C the same command continues.
    `foredraft export` writes a table, or the result of a tune, for a server.
    """
    if mode_of(ctx, MODES) and table is not None:
        print_table(table, out)
        return
    from ...planning.tuning.result import search_table
    from ...planning.tuning.tune import Tune, question_of_tune
    from ...sim.scenario_file import load_scenario

    launch = launched(scenario, settings or (), from_sglang, from_vllm, from_trtllm)
    resolved, _ = load_scenario(scenario, [*(settings or ()), *given_by_options(trace, seed)], launch)
    question = question_of_tune(resolved, trials, search_seeds, seeds, requests or REQUESTS)
    whole = Tune(resolved, question)
    with (
        kept_runs("tune", whole.tables, out, workers, cluster, asked=question.to_json()) as (pool, store),
        _progress(quiet) as show,
    ):
        result = search_table(whole, pool, store, show)
    if as_json:
        print_document(result)
    else:
        typer.echo("\n".join([*_report(whole), *_written(store.path, result)]))
    if not result.holds:
        raise typer.Exit(EXIT_BEHIND)


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show each table that is found, and every ten seconds how many runs have ended."""
    from ..progress import LINE_EVERY_S, StatusLine

    line = StatusLine(quiet, line_every_s=LINE_EVERY_S)
    found = ""

    def show(text: str) -> None:
        nonlocal found
        is_step = "table" in text
        found = text if is_step else found
        if line.due_s(always=is_step) is not None:
            line.show(found if is_step else "; ".join(filter(None, (found, text))))

    try:
        yield show
    finally:
        line.clear()


def _report(whole: Tune) -> list[str]:
    from ...planning.tuning.result import best_of, gains_of

    scenario, best = whole.scenario, best_of(whole)
    gpu = whole.model.plain.deployment.gpu.name
    title = f"{scenario.name}: draft steps of {scenario.speculation.algorithm} on {scenario.model.target}, {gpu}"
    lines = [*textwrap.wrap(title, WIDTH), *(f"  {phase.name:<10} {phase.about}" for phase in whole.phases), ""]
    lines += ["Table" if whole.best else "The table that is the least behind", *_table_lines(best.table)]
    schedule = whole.best_schedule
    if schedule is not None and schedule is not best:
        lines += ["", "Schedule, one number for each batch size", *_table_lines(schedule.table)]
    seeds = len(whole.question.seeds)
    lines += ["", f"How much faster the table is, in %, with half of the 95 % interval ({seeds} seeds)"]
    names = [*(phase.name for phase in whole.phases), "all"]
    lines.append(f"{'faster than':15}" + "".join(f"{name:>13}" for name in names))
    for name, row in gains_of(whole, best).items():
        lines.append(f"{name:15}" + "".join(f"{_percent(row[phase]):>13}" for phase in names))
    return [*lines, "", *_verdict(whole, best)]


def _percent(found: Estimate | None) -> str:
    if found is None:
        return "cannot run"
    digits = 1 if abs(found.mean) < 1 and found.half_width < 1 else 0
    return f"{100 * found.mean:+.{digits}f} ±{100 * found.half_width:.{digits}f}"


def _table_lines(table: Mapping[str, Any]) -> list[str]:
    bounds = [int(bound) for bound in table]
    lines = []
    for bound, end, slot in zip(bounds, [*bounds[1:], None], table.values(), strict=True):
        sizes = f"{bound} on" if end is None else f"{bound}" if end == bound + 1 else f"{bound} to {end - 1}"
        steps = ", ".join(map(str, slot["candidate_steps"]))
        lines.append(f"  batch {sizes:<12} {steps} {'step' if steps == '1' else 'steps'}")
    knobs = [f"{key} {value:g}" for key, value in next(iter(table.values())).items() if key != "candidate_steps"]
    return [*lines, *([f"  {', '.join(knobs)}"] if knobs else [])]


def _verdict(whole: Tune, best: Judged) -> list[str]:
    """Return whether the promise is kept, what was passed over for it, and what cannot run."""
    from ...observe.tables import times_rest_on
    from ...planning.confidence.comparison import about_speed_ups
    from ...planning.tuning.tune import MOST_BEHIND
    from ...sim.assembly.confidence import rests_on

    phase, most = max(best.shortfall.items(), key=lambda entry: entry[1])
    tenths = round(1000 * most)
    how = f"{most:.1%} behind" if tenths > 0 else f"{-most:.1%} ahead of" if tenths < 0 else "as fast as"
    texts = [f"Nearest to the best fixed number of steps is the phase {phase!r}: {how} it." if whole.best else ""]
    passed = [one for one in whole.judged if not one.holds]
    if whole.best is None:
        texts = [
            f"None of the {len(passed)} best tables is within {MOST_BEHIND:.0%} of the best fixed number of steps in every phase; this one "
            f"is {how} it in the phase {phase!r}. More --trials or --search-seeds may find one."
        ]
    elif passed:
        worst = max(max(one.shortfall.values()) for one in passed)
        texts.append(
            f"Passed over: {count_of(len(passed), 'table')}, up to {worst:.1%} behind a fixed number of steps in a phase."
        )
    if whole.best_schedule is None:
        texts.append("No schedule with one number of steps for each batch size holds in every phase.")
    texts += [f"Cannot run: {reason}" for reason in dict.fromkeys(whole.refused.values())]
    run = whole.model.with_steps(1)
    texts += [about_speed_ups(run), times_rest_on(rests_on(run))]
    return [line for text in filter(None, texts) for line in textwrap.wrap(text, WIDTH)]


def _written(directory: Path, result: TuneResult) -> list[str]:
    from ...planning.tuning.result import RESULT

    texts = [
        f"Written to {directory}: {', '.join((RESULT, *result.files))}.",
        *(f"Nothing for {name}: {reason}." for name, reason in result.not_written.items()),
    ]
    return ["", *(line for text in texts for line in textwrap.wrap(text, WIDTH, break_on_hyphens=False))]
