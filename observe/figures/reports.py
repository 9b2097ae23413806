"""The report of a run, a sweep, a plan, a tune or a twin: the content of its page, from the files that the command has
written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from ...core.errors import ForedraftError, count_of
from ..summary import SHORT_NAMES
from ..tables import LATENCIES, format_number, format_share, intervals_rest_on, outside_of_intervals, times_rest_on
from . import run as of_run
from . import trials as of_trials
from . import twin as of_twin
from .page import Folded, Page, Picture, Table
from .run import Run
from .style import missing
from .trials import Point, Trials, label
from .twin import Twin

MOST_ROWS = 100
STATISTICS = ("mean", "median", "p90", "p95", "p99")


def page_of(path: Path) -> Page:
    """Return the report of the directory or file at `path`. Raises ConfigError if that is nothing that a command has
    written, or unreadable."""
    if path.is_dir():
        if (path / "question.json").exists():
            return _trials_page(Trials(path))
        if (path / "summary.json").exists():
            return _run_page(Run(path))
        message = "has neither summary.json (a run of simulate --out) nor question.json (a sweep, a plan, a tune)"
        raise missing(path, message)
    return _twin_page(Twin(path))


def deployment(scenario: Mapping[str, Any]) -> str:
    """Return model, hardware and algorithm of a scenario's tables in one line."""
    model, hardware, speculation = (scenario.get(name, {}) for name in ("model", "hardware", "speculation"))
    number = (
        hardware.get("tensor_parallel", 1) * hardware.get("attention_data_parallel", 1) * hardware.get("replicas", 1)
    )
    devices = f"{number} × " if number > 1 else ""
    place = f"{model.get('target', 'A deployment')} on {devices}{hardware.get('gpu', 'unknown hardware')}"
    algorithm = speculation.get("algorithm", "NONE")
    return place if algorithm == "NONE" else f"{place}, {algorithm}"


def _drawn(page: Page, name: str, caption: str, draw: Callable[..., go.Figure], *arguments: object) -> None:
    """Add the figure that `draw` makes of `arguments`; if it cannot be drawn, add a note with the reason."""
    try:
        page.pictures.append(Picture(name, draw(*arguments), caption))
    except ForedraftError as error:
        page.source(f"no figure {name}", str(error))


def _made_by(page: Page, written_by: object) -> None:
    page.source(
        "versions", f"run by foredraft {written_by or '(not recorded)'}, drawn by foredraft {version('foredraft')}"
    )


# -- a run ------------------------------------------------------------------------------------------------------------


def _run_page(run: Run) -> Page:
    summary = run.summary
    page = Page(
        deployment(run.scenario),
        f"A simulated run: {summary.get('name', '')}, seed {summary.get('seed', '–')}; {run.path}",
    )
    page.answer += _run_answer(run)
    page.notices += [f"Note: {notice}." for notice in summary.get("notices") or ()]
    page.tiles += _run_tiles(summary)
    figures = {
        "latencies": (of_run.latencies, "The wait for the first token, for each further one, between emissions, and in all."),
        "intervals": (of_run.intervals, "How far published points of serving were from such simulations."),
        "load": (of_run.load_over_time, "Requests that are decoded together, and those that wait for a place."),
        "steps-by-batch": (of_run.steps_by_batch, "How many tokens were drafted ahead, by how many requests shared the round."),
        "acceptance": (of_run.acceptance_by_position, "How far drafts are right: a position counts where all before it were accepted."),
        "steps": (of_run.steps_over_time, "Draft steps of a round as the run went on."),
        "kv": (of_run.kv_over_time, "Slots that requests, the prefix cache and the reserve of blocks hold after each plan."),
    }  # fmt: skip
    for name, (draw, caption) in figures.items():
        _drawn(page, name, caption, draw, run)
    rows = [
        [
            f"{short}, {meaning}",
            *(format_number(summary.get(f"{part}_{key}_ms")) for part in STATISTICS),
            _ends(summary.get(f"mean_{key}_ms_interval")),
        ]
        for key, (short, meaning) in LATENCIES.items()
    ]
    caption = "Of completed requests, from summary.json; ITL within 0.1 %. The last column: 80 % interval of the mean."
    page.tables.append(Table("Latencies, ms", ["", *STATISTICS, "mean, 80 %"], rows, caption))
    if run.scenario_text is not None:
        page.folded.append(Folded("The scenario, with the source of every number (scenario.toml)", run.scenario_text))
    page.source("timing", summary.get("timing") or "not recorded: the run was made by an earlier version")
    requests = f"requests.parquet, all {summary['completed']:,} completed requests"
    page.source("latencies", f"{requests}; ITL: summary.json, counted during the run")
    if points := summary.get("intervals_rest_on"):
        names = {key: name for key, name in of_run.INTERVALS.items() if f"{key}_interval" in summary}
        outside = outside_of_intervals(
            {name: (summary[key], summary[f"{key}_interval"]) for key, name in names.items()}
        )
        page.source("intervals", f"{intervals_rest_on(points, are_known=bool(names))} {outside}".rstrip())
    rounds = "rounds.parquet, every decode round"
    page.source("over time, acceptance", f"summary.json; draft steps by batch size: {rounds}")
    _made_by(page, summary.get("version"))
    return page


def _ends(ends: Sequence[float | None] | None) -> str:
    """Return an interval in words; an end that is not known is a dash."""
    return "–" if ends is None else " to ".join(map(format_number, ends))


def _run_answer(run: Run) -> Iterator[str]:
    summary = run.summary
    if summary.get("incomplete"):
        yield "The run was interrupted, or requests were left over: the numbers cover a part of it."
    first, then = (format_number(summary[f"p99_{key}_ms"], "ms") for key in ("ttft", "tpot"))
    yield (
        f"{summary['completed']:,} of {count_of(summary['submitted'], 'request')} completed in "
        f"{format_number(summary['duration'])} simulated seconds: {format_number(summary['output_throughput'])} output "
        f"tokens/s. 99 % of them had the first token within {first}, and 99 % then waited at most {then} per token."
    )
    if summary.get("slo_attainment") is not None:
        limits = ", ".join(f"{LATENCIES[key][0]} {limit:g} ms" for key, limit in run.limits_ms.items())
        yield f"{format_share(summary['slo_attainment'])} of the requests kept every limit ({limits})."
    full = summary.get("saturation")
    if summary.get("overloaded"):
        yield "The service was overloaded: the queue only grew, so latencies depend on how long the run is."
    elif full is not None:
        yield f"The load is {full:.0%} of what full batches would serve."


def _run_tiles(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    def number(key: str, unit: str = "") -> str:
        return format_number(summary[key], unit)

    def with_interval(key: str, unit: str = "") -> str:
        ends = summary.get(f"{key}_interval")
        return number(key, unit) + (f" (80 %: {_ends(ends)})" if ends else "")

    rate = f"{number('request_throughput')} requests/s"
    if ends := summary.get("output_throughput_interval"):
        rate += f"; 80 %: {_ends(ends)}"
    yield "output tokens/s", number("output_throughput"), rate
    for key in ("ttft", "tpot"):
        mean = f"mean {with_interval(f'mean_{key}_ms', 'ms')}"
        yield f"p99 {LATENCIES[key][0]}", number(f"p99_{key}_ms", "ms"), mean
    if summary.get("accept_length") is not None:
        accepted = f"{format_share(summary['accept_rate'])} of the drafts accepted"
        yield "accept length", f"{summary['accept_length']:.2f}", accepted
    if summary.get("slo_attainment") is not None:
        goodput = f"goodput {number('request_goodput')} requests/s"
        yield "within the SLO", format_share(summary["slo_attainment"]), goodput
    yield "batch", number("mean_running"), f"at most {number('max_running')}; waiting {number('max_queue_length')}"
    mean = f"at most; mean {format_share(summary['kv_occupancy_mean'])}"
    yield "KV in use", format_share(summary["kv_occupancy_max"]), mean


# -- sweeps and plans -------------------------------------------------------------------------------------------------


def _trials_page(trials: Trials) -> Page:
    kind, scenario = trials.question["kind"], trials.question["scenario"]
    page = Page(deployment(scenario), f"A {kind}: {scenario.get('name', '')}; {trials.path}")
    if not trials.points:
        raise missing(trials.path, f"has no run that has ended; the same `foredraft {kind}` goes on")
    if kind == "plan":
        _add_plan(page, trials)
    elif kind == "tune":
        _add_tune(page, trials)
    else:
        _add_sweep(page, trials)
    page.folded.append(Folded("The scenario that is varied", "\n".join(_flat(scenario))))
    points = [text for point in trials.points for one in point.summaries if (text := one.get("intervals_rest_on"))]
    if points:
        page.source("times", times_rest_on(*points))
    timings = dict.fromkeys(one.get("timing") for point in trials.points for one in point.summaries)
    for timing in filter(None, timings):
        page.source("timing", timing)
    page.source(
        "runs",
        f"{count_of(trials.num_runs, 'simulated run')} of {count_of(len(trials.points), 'combination')}, in trials.jsonl",
    )
    mode, package = (*(trials.question.get("kernels") or ()), None, None)[:2]
    database = f"database aiconfigurator-core {package}" if package else "no database of measured kernels was installed"
    page.source("kernels", database)
    if mode:
        page.source("FOREDRAFT_KERNELS", str(mode))
    for name, digest in (trials.question.get("files") or {}).items():
        page.source(name, f"sha256 {digest}")
    _made_by(page, trials.question.get("version"))
    return page


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield a line for each key that has a value."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key} = {value}"


def _add_sweep(page: Page, trials: Trials) -> None:
    varied = trials.varied
    asked = trials.question.get("points")
    wanted = len(asked) * len(trials.question.get("seeds") or [0]) if isinstance(asked, list) else trials.num_runs
    page.answer += [*_best_points(trials)]
    if trials.num_runs < wanted:
        page.notices.append(
            f"{trials.num_runs:,} of {count_of(wanted, 'run')} ended; the others are still to come, or cannot run."
        )
    page.tiles += [
        ("combinations", f"{len(trials.points):,}", count_of(trials.num_runs, "run")),
        ("varied", str(len(varied)), ", ".join(key.rpartition(".")[2] for key in varied) or "nothing"),
    ]
    for latency in ("p99_tpot_ms", "p99_ttft_ms"):
        caption = "Up and to the left is better: more tokens per second at a lower latency."
        _drawn(page, f"throughput-{latency}", caption, of_trials.throughput_against_latency, trials, latency)
    for key in reversed(varied[-2:]):
        for metric in ("output_throughput", "p99_ttft_ms", "p99_tpot_ms", "accept_length"):
            if any(point.values(metric) for point in trials.points):
                caption = f"How {of_trials.heading(metric)} follows {key}, the other keys being equal along a line."
                _drawn(page, f"{metric}-{key.rpartition('.')[2]}", caption, of_trials.against, trials, key, metric)
    page.tables.append(_points_table(trials, varied))


def _best_points(trials: Trials) -> Iterator[str]:
    balanced = [point for point in trials.points if not point.is_overloaded]
    for what, key, is_most in (
        ("Most output tokens per second", "output_throughput", True),
        ("Lowest p99 TTFT", "p99_ttft_ms", False),
        ("Lowest p99 TPOT", "p99_tpot_ms", False),
    ):
        known = [(float(np.mean(values)), point) for point in balanced if (values := point.values(key))]
        if known:
            mean, point = (max if is_most else min)(known, key=itemgetter(0))
            unit = "ms" if key.endswith("_ms") else ""
            yield f"{what}: {_label(trials, point)} ({format_number(mean, unit)})."
    if len(balanced) < len(trials.points):
        count = count_of(len(trials.points), "combination")
        yield f"Overloaded, so not counted: {len(trials.points) - len(balanced)} of {count}."


def _label(trials: Trials, point: Point) -> str:
    return label({key: point.settings.get(key) for key in trials.varied}) or "the only combination"


def _points_table(trials: Trials, varied: Sequence[str]) -> Table:
    metrics = [key for key in of_trials.TITLES if any(point.values(key) for point in trials.points)]
    columns = [*(key.rpartition(".")[2] for key in varied), *(of_trials.TITLES[key] for key in metrics), "runs", ""]
    rows = []
    for point in trials.points[:MOST_ROWS]:
        means = (format_number(float(np.mean(values))) if (values := point.values(key)) else "–" for key in metrics)
        cells = (str(point.settings.get(key, "–")) for key in varied)
        rows.append([*cells, *means, str(len(point.summaries)), "overloaded" if point.is_overloaded else ""])
    more = len(trials.points) - len(rows)
    caption = "Means over the seeds." + (f" trials.parquet has {count_of(more, 'combination')} more." if more else "")
    return Table("Combinations", columns, rows, caption)


def _add_plan(page: Page, trials: Trials) -> None:
    answer = of_trials.answer_of(trials)
    page.answer += answer["sentences"]
    best = next((one for one in answer["candidates"] if one["status"] == "best"), None)
    if best is not None:
        half = best.get("half_load")
        below_load = [answer["load_unit"], *([f"half of the runs hold {half:.3g}"] if half else [])]
        below_gpus = [f"{format_number(best['tokens_per_s'])} output tokens/s"]
        below_limit = [f"{best['taken']:.0%} of it is taken"]
        forms = (below_load, "load", "{:.3g}"), (below_gpus, "gpus", "{}"), (below_limit, "taken", "{:.0%}")
        for below, key, form in forms:
            if (ends := best.get(f"{key}_interval")) is not None:
                below.append(f"80 %: {' to '.join('–' if end is None else form.format(end) for end in ends)}")
        page.tiles += [
            ("best candidate", best["name"], f"of {len(answer['candidates'])}"),
            ("load", f"{best['load']:.3g}", ", ".join(below_load)),
            ("GPUs", str(best["gpus"]), ", ".join(below_gpus)),
            ("tightest limit", of_trials.limit_title(best["tightest"]), ", ".join(below_limit)),
        ]
        if best["per_million"] is not None:
            page.tiles.append(("cost", f"{best['per_million']:.3g}", "per million output tokens"))
    _drawn(page, "frontier", "What each candidate holds within all limits, the best first.", of_trials.frontier, trials)
    for limit in answer["limits"]:
        caption = f"Where a line crosses the limit of {limit['limit_ms']:g} {of_trials.limit_unit(limit)}, the candidate holds no more."
        _drawn(page, limit["name"], caption, of_trials.latency_against_load, trials, limit)
    greatest = answer["load"] is None
    columns = [
        "candidate",
        "",
        *(["load", "half of runs"] if greatest else []),
        "GPUs",
        "tokens/s",
        "tightest limit",
        "taken",
    ]
    columns.insert(4 if greatest else 3, "80 %")
    rows = []
    for one in answer["candidates"]:
        gpus = str(one["gpus"] or "–")
        if greatest:
            cells = [
                format_number(one["load"]),
                format_number(one.get("half_load")),
                _ends(one.get("load_interval")),
                gpus,
            ]
        else:
            cells = [gpus, _ends(one.get("gpus_interval"))]
        taken = "–" if one["taken"] is None else f"{one['taken']:.0%}"
        tokens, tightest = format_number(one["tokens_per_s"]), of_trials.limit_title(one["tightest"] or "–")
        rows.append([one["name"], one["status"], *cells, tokens, tightest, taken])
    caption = (
        "± is half of the 95 % interval over seeds. 80 % is the interval if the times of passes and first tokens are not "
        "as simulated. tokens/s are the output tokens of all GPUs of a row; "
        "taken: of the limit, at the load found."
    )
    page.tables.append(Table("All candidates", columns, rows, caption))
    if answer["refused"]:
        reasons = [[one["name"], one["reason"]] for one in answer["refused"]]
        page.tables.append(Table("Cannot run", ["candidate", "reason"], reasons))
    given, source = answer["model_error"], answer.get("model_error_source") or "--model-error"
    size = "" if given is None else f"{given:.1%} of the cost model "
    page.source("error of comparisons", f"{size}({source}): within it candidates are called equal")


def _add_tune(page: Page, trials: Trials) -> None:
    found = trials.tuned
    behind, phase = max((share, name) for name, share in found["behind_best_fixed"].items())
    steps = "; ".join(
        f"{', '.join(map(str, slot['candidate_steps']))} from a batch of {bound} on"
        for bound, slot in found["table"].items()
    )
    how = f"{behind:.1%} behind" if behind > 0 else f"{-behind:.1%} ahead of"
    page.answer += [
        f"Draft steps: {steps}.",
        f"At worst, in the phase {phase}, it is {how} the best fixed number of steps.",
    ]
    if not found["holds"]:
        page.notices.append(
            "No table came within the limit in every phase: this one is the least behind, and was not written."
        )
    for name in ("no speculation", "default table"):
        if (gain := found["gain_over"].get(name, {}).get("all")) is not None:
            page.tiles.append((f"faster than {name}", f"{gain[0]:+.1%}", f"± {gain[1]:.1%}, all phases"))
    page.tiles.append(("worst phase", f"{-behind:+.1%}", "against the best fixed number of steps"))
    caption = "The speed that requests see, from arrival to end, with this table."
    _drawn(page, "gains", caption, of_trials.tuned_gains, trials)
    _drawn(
        page, "steps", "How many tokens are drafted ahead, by the requests of a round.", of_trials.tuned_steps, trials
    )
    phases = [*found["phases"], "all"]
    rows = [
        [name, *("cannot run" if row[one] is None else "{:+.1%} ± {:.1%}".format(*row[one]) for one in phases)]
        for name, row in found["gain_over"].items()
    ]
    about = "; ".join(f"{name}: {phase['about']}" for name, phase in found["phases"].items())
    caption = f"± is half of the 95 % interval over seeds, without the error of the cost model. {about}."
    page.tables.append(Table("How much faster the table is", ["faster than", *phases], rows, caption))


# -- the twin ---------------------------------------------------------------------------------------------------------


def _twin_page(twin: Twin) -> Page:
    page = Page(f"Predicted against measured on {twin.device}", str(twin.path))
    errors = {
        key: [one["metrics"][key]["error"] for one in twin.comparisons if key in one["metrics"]] for key in SHORT_NAMES
    }
    errors = {key: [value for value in values if value is not None] for key, values in errors.items()}
    told = {key: values for key, values in errors.items() if values}
    parts = [f"{SHORT_NAMES[key]} by {np.median(np.abs(values)):.1%}" for key, values in told.items()]
    page.answer.append(
        f"The simulator is off by this much, in the median of {len(twin.comparisons)} comparisons: {', '.join(parts)}."
    )
    share = min((one["processor_share"] for one in twin.comparisons), default=1.0)
    if share < 0.97 and twin.clock == "wall":
        page.notices.append(
            f"Note: the measuring process had a processor for only {share:.0%} of the time that it worked: other work ran on this machine."
        )
    page.tiles += [
        (SHORT_NAMES[key], f"{np.median(np.abs(values)):.1%}", f"at most {max(values, key=abs):+.1%}")
        for key, values in told.items()
    ]
    caption = "Every latency of every way to decode, at every load."
    _drawn(page, "predicted", caption, of_twin.predicted_against_measured, twin)
    caption = "How far each prediction is off, beside how much the measurement itself varies."
    _drawn(page, "errors", caption, of_twin.errors, twin)
    for load in twin.loads:
        caption = f"Whether the load built up as predicted, at the load {load}."
        _drawn(page, f"batch-{load}", caption, of_twin.batch_over_time, twin, load)
    columns = ["load", "way to decode", *SHORT_NAMES.values()]
    rows = [
        [one["load"], one["arm"], *(_error_cell(one["metrics"].get(key)) for key in SHORT_NAMES)]
        for one in twin.comparisons
    ]
    page.tables.append(Table("Measured, and the error of the prediction", columns, rows))
    repeats = ", ".join(map(str, sorted({one["repeats"] for one in twin.comparisons})))
    page.source("measured", f"by our own executor on {twin.device}, {twin.clock} time, {repeats} runs of each")
    page.source("predicted", "by the simulator, from single steps of that executor and the acceptance of other prompts")
    _made_by(page, twin.version)
    return page


def _error_cell(one: Mapping[str, Any] | None) -> str:
    if one is None or one["error"] is None:
        return "–"
    return f"{format_number(one['measured'])} ({one['error']:+.1%})"
