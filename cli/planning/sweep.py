"""`foredraft sweep`: simulate every combination of some settings with several seeds."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...core.errors import count_of
from ..names import complete_setting
from ..options import (
    AsJson,
    Quiet,
    ScenarioFile,
    Seed,
    Settings,
    TraceFile,
    option,
    print_document,
    refuse_without_effect,
)
from ..simulation.launch import FromSglang, FromTrtllm, FromVllm, launched
from ..simulation.simulate import given_by_options
from .options import Cluster, NumWorkers, OutDirectory, Requests, kept_runs

if TYPE_CHECKING:
    from pathlib import Path

    from ...planning.sweep import Sweep
    from ...planning.workers import JobWorkers
    from ..documents.simulation import SweepDocument

COLUMNS = {  # key of the summary -> its title in two lines and the digits behind the point
    "request_throughput": ("requests\nper s", 2),
    "output_throughput": ("output\ntokens/s", 0),
    "p99_ttft_ms": ("TTFT\np99 ms", 0),
    "p99_tpot_ms": ("TPOT\np99 ms", 1),
    "accept_length": ("accept\nlength", 2),
    "slo_attainment": ("in SLO\n%", 1),
}
REQUESTS_KEY = "workload.num_requests"
GAP = 2  # spaces between two columns
MOST_ROWS = 60  # of the table that is printed; the Parquet file has all

Grid = Annotated[
    list[str],
    option(
        "--grid",
        "Values of one key: 0..7, 1..64:log, a,b,c; repeatable.",
        "KEY=VALUES",
        autocompletion=complete_setting,
    ),
]


Seeds = Annotated[int, option("--seeds", "Runs of each combination; each run has its own seed.", min=1, max=10_000)]


def sweep(
    scenario: ScenarioFile = None, from_sglang: FromSglang = None, from_vllm: FromVllm = None, from_trtllm: FromTrtllm = None,
    grid: Grid = [], settings: Settings = None, trace: TraceFile = None, seeds: Seeds = 3, requests: Requests = None,  # noqa: B006
    seed: Seed = None, out: OutDirectory = None, workers: NumWorkers = None, cluster: Cluster = None, as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Simulate every combination of some settings, each with several seeds.

    Values: 0..7 is every integer from 0 to 7; 0.5..2:4 is four evenly spaced
    numbers; 1..64:log is 1, 2, 4, …, 64; 1..64:log4 is four numbers with a
    constant ratio; a,b,c and [1, 2] are lists of values. If speculation.steps
    varies and no policy is given, the policy is fixed.

        foredraft sweep --grid speculation.steps=0..7
        foredraft sweep chat.toml --grid speculation.steps=0..7 \\
            --grid workload.rate=1..64:log --seeds 5
        foredraft sweep --grid hardware.gpu=H100,H200 \\
            --grid hardware.tensor_parallel=1,2 --out runs/gpus

    Prints the mean of each combination over its seeds with a 95 % interval, and
    what the simulated times rest on.
    Writes trials.parquet, with a row per run that has every number of its
    summary. All combinations see the same arrivals and lengths. The command keeps
    every finished run: after Ctrl-C or a crash the same command continues. It
    lists combinations that cannot run, with the reason.
    """
    from ...core.errors import ConfigError
    from ...planning.grid import combinations, parse_grid
    from ...planning.store import TABLE
    from ...planning.sweep import Sweep
    from ...sim.scenario_file import SETTINGS, load_scenario

    values = parse_grid(grid)
    if not values:
        raise ConfigError.of("--grid", "", "give at least one key with its values: speculation.steps=0..7")
    if "seed" in values:
        message = f"every combination has the same seeds: give --seeds {len(values['seed'])} (and --seed for the first)"
        raise ConfigError.of("--grid", "seed", message)
    given = [*(settings or ()), *given_by_options(trace, seed)]
    if requests is not None:
        refuse_without_effect(("--requests", REQUESTS_KEY in values, f"--grid varies {REQUESTS_KEY}"))
        given.append(f"{REQUESTS_KEY}={requests}")
    launch = launched(scenario, settings or (), from_sglang, from_vllm, from_trtllm)
    resolved, origins = load_scenario(scenario, given, launch)
    notices = []
    asked = {key for key, origin in origins.items() if origin == SETTINGS} | {*values}
    chooses = {"speculation.policy", "speculation.adaptive"}
    if "speculation.steps" in values and not chooses & asked and "speculation.adaptive" not in origins:
        resolved, _ = load_scenario(scenario, [*given, "speculation.policy=fixed"], launch)
        notices.append("speculation.policy is fixed, as speculation.steps varies")
    points = combinations(values, resolved.speculation.algorithm)
    tables = resolved.model_dump(mode="json")
    check_keys(tables, points)
    whole = Sweep(points, range(resolved.seed, resolved.seed + seeds))
    with kept_runs("sweep", tables, out, workers, cluster, points=points, seeds=list(whole.seeds)) as (pool, store):
        _run_all(whole, pool, len(store), quiet)
    notices += whole.overloads(list(values))
    if as_json:
        print_document(_document(whole, resolved.name, notices, store.path / TABLE))
    else:
        _print_report(whole, resolved.name, list(values), notices)
        typer.echo(f"\nWritten to {store.path / TABLE}.")
    if all(trial.status != "done" for trial in whole.trials.values()):
        raise typer.Exit(2)


def check_keys(tables: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> None:
    """Refuse values that no scenario can have, all before the first run. Raises ConfigError."""
    from ...sim.scenario_file import scenario_with

    for point in points:
        scenario_with(tables, point)


def _run_all(sweep: Sweep, pool: JobWorkers, before: int, quiet: bool) -> None:
    """Make all runs, with progress and the time left on standard error; `before` of them are there already."""
    from ..progress import LINE_EVERY_S, StatusLine

    total = len(sweep)
    if before and not quiet:
        print(f"foredraft: {before:,} of {count_of(total, 'run')} are there already", file=sys.stderr)
    line = StatusLine(quiet, line_every_s=LINE_EVERY_S)
    started_s = time.monotonic()
    try:
        for number, _ in enumerate(sweep.run(pool), 1):
            if number <= before or line.due_s(always=number == total) is None:
                continue
            left_s = (time.monotonic() - started_s) / (number - before) * (total - number)
            line.show(f"{number:,} of {count_of(total, 'run')}, {_clock(left_s)} left")
    finally:
        line.clear()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _document(sweep: Sweep, name: str, notices: Sequence[str], table: Path) -> SweepDocument:
    """Return the means of every number of the summaries, by combination."""
    from ...planning.search.intervals import estimate
    from ..documents.simulation import Combination, SweepDocument, SweptResult

    found = []
    for point, settings in enumerate(sweep.points):
        trials = [trial for seed in sweep.seeds if (trial := sweep.trials.get((point, seed))) is not None]
        done = [trial.summary for trial in trials if trial.status == "done"]
        results = {}
        for key in dict.fromkeys(key for summary in done for key in summary if key not in ("seed", *settings)):
            values = sweep.values(point, key)
            if values and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
                mean = estimate(values)
                results[key] = SweptResult(mean.mean, mean.half_width if len(values) > 1 else None)
        problems = dict.fromkeys(trial.message for trial in trials if trial.status != "done")
        found.append(Combination(dict(settings), len(done), results, list(problems)))
    return SweepDocument(name, list(sweep.seeds), found, list(notices), str(table))


@dataclass(frozen=True)
class _Column:
    """A column of the report: its `title` has a line break where the table is to be narrow; `name` is for sentences."""

    title: str
    name: str
    cells: list[str]

    @property
    def width(self) -> int:
        return max(map(len, (*self.title.splitlines(), *self.cells)))

    @property
    def is_same(self) -> bool:
        """Whether all rows, of which there are several, have the same cell."""
        return len(self.cells) > 1 and len(set(self.cells)) == 1


def _print_report(sweep: Sweep, name: str, keys: Sequence[str], notices: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    from ...observe.tables import times_rest_on

    console = Console(highlight=False, markup=False, color_system=None)
    shown = [point for point in range(len(sweep.points)) if sweep.values(point, "request_throughput")]
    columns = _columns(sweep, shown, keys, half_widths=True)
    meaning = "mean ± half of the 95 % interval" if len(sweep.seeds) > 1 else "one run each"
    needed = sum(column.width + GAP for column in columns if not column.is_same) - GAP
    if needed > console.width and len(sweep.seeds) > 1:
        columns = _columns(sweep, shown, keys, half_widths=False)
        meaning = f"means; {needed} columns would show half of the 95 % intervals, too"
    count, seeds = count_of(len(sweep.points), "combination"), count_of(len(sweep.seeds), "seed")
    console.print(f"{name}: {count}, {seeds}; {meaning}")
    if same := [f"{column.name} {column.cells[0]}" for column in columns if column.is_same]:
        console.print(f"The same in every row: {', '.join(same)}")
    varied = [column for column in columns if not column.is_same]
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="")
    for column in varied:
        table.add_column(column.title, justify="right", overflow="fold", vertical="bottom")
    for row in list(zip(*(column.cells for column in varied), strict=True))[:MOST_ROWS]:
        table.add_row(*row)
    console.print()
    console.print(table)
    if len(shown) > MOST_ROWS:
        console.print(f"… and {count_of(len(shown) - MOST_ROWS, 'combination')} more in the table on disk")
    summaries = [trial.summary for _, trial in sorted(sweep.trials.items())]
    if points := [text for one in summaries if (text := one.get("intervals_rest_on"))]:
        console.print(f"\n{textwrap.fill(times_rest_on(*points, summaries=summaries), console.width)}")
    for notice in [*notices, *_left_out(sweep, keys)]:
        console.print(f"\n{notice}", soft_wrap=True)


def _columns(sweep: Sweep, shown: Sequence[int], keys: Sequence[str], half_widths: bool) -> list[_Column]:
    """Return the columns of the varied keys, then those of the results that any of these combinations has."""
    ends = [key.rpartition(".")[2] for key in keys]
    columns = [
        _Column(
            end if ends.count(end) == 1 else key.replace(".", ".\n"),
            key,
            [str(sweep.points[point].get(key, "–")) for point in shown],
        )
        for key, end in zip(keys, ends, strict=True)
    ]
    for key, (title, digits) in COLUMNS.items():
        values = [sweep.values(point, key) for point in shown]
        if any(values):
            cells = [_cell(of_point, key, digits, half_widths) for of_point in values]
            columns.append(_Column(title, title.replace("\n", " "), cells))
    return columns


def _cell(values: Sequence[float], key: str, digits: int, half_width: bool) -> str:
    from ...planning.search.intervals import estimate

    if not values:
        return "–"
    scale = 100 if key == "slo_attainment" else 1
    found = estimate([value * scale for value in values])
    text = f"{found.mean:,.{digits}f}"
    return f"{text}±{found.half_width:,.{digits}f}" if half_width and len(values) > 1 else text


def _left_out(sweep: Sweep, keys: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each reason for which combinations have not run."""
    by_reason: dict[tuple[str, str], list[int]] = {}
    for (point, _), trial in sorted(sweep.trials.items()):
        if trial.status != "done":
            points = by_reason.setdefault((trial.status, trial.message), [])
            points.extend([point] if point not in points else [])
    for (status, message), points in by_reason.items():
        settings = sweep.points[points[0]]
        first = ", ".join(f"{key}={settings[key]}" for key in keys if key in settings)
        more = f" and {len(points) - 1} more" if len(points) > 1 else ""
        yield f"{status}: {first}{more}: {message}"
