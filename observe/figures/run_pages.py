"""The pages of a run and of a twin, and what all pages have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import plotly.graph_objects as go

from ...core.errors import ForedraftError, count_of
from ..measuring.summary import SHORT_NAMES
from ..rates import rate_of
from ..tables import LATENCIES, about_steady, format_number, format_share, intervals_rest_on
from . import run as of_run
from . import twin as of_twin
from .devices import gpus_by_name, value_of
from .page import Folded, Picture, ReportPage, TextTable
from .rounds import round_waterfall
from .run import StoredRun
from .twin import Twin

STATISTICS = ("mean", "median", "p90", "p95", "p99")


def deployment(scenario: Mapping[str, Any]) -> str:
    """Return model, hardware and algorithm of a scenario's tables in one line."""
    model, speculation = (scenario.get(name, {}) for name in ("model", "speculation"))
    gpus = gpus_by_name(partial(value_of, scenario)).items()
    place = (
        f"{model.get('target', 'A deployment')} on {' and '.join(f'{n} × {gpu}' if n > 1 else gpu for gpu, n in gpus)}"
    )
    algorithm = speculation.get("algorithm", "NONE")
    return place if algorithm == "NONE" else f"{place}, {algorithm}"


def draw(page: ReportPage, name: str, caption: str, figure_of: Callable[..., go.Figure], *arguments: object) -> None:
    """Add the figure that `figure_of` makes of `arguments`; if it cannot be drawn, add a note with the reason."""
    try:
        page.pictures.append(Picture(name, figure_of(*arguments), caption))
    except ForedraftError as error:
        page.source(f"no figure {name}", str(error))


def made_by(page: ReportPage, written_by: object) -> None:
    page.source(
        "versions", f"run by foredraft {written_by or '(not recorded)'}, drawn by foredraft {version('foredraft')}"
    )


def ends_in_words(ends: Sequence[float | None] | None) -> str:
    """Return an interval in words; an end that is not known is a dash."""
    return "–" if ends is None else " to ".join(map(format_number, ends))


# -- a run ------------------------------------------------------------------------------------------------------------


def run_page(run: StoredRun) -> ReportPage:
    summary = run.summary
    page = ReportPage(
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
        "round": (round_waterfall, "Where the time of a round goes that has the mean batch and context of the run."),
        "steps-by-batch": (of_run.steps_by_batch, "How many tokens were drafted ahead, by how many requests shared the round."),
        "acceptance": (of_run.acceptance_by_position, "How far drafts are right: a position counts where all before it were accepted."),
        "steps": (of_run.steps_over_time, "Draft steps of a round as the run went on."),
        "kv": (of_run.kv_over_time, "Slots that requests, the prefix cache and the reserve of multi-steps hold after each plan."),
    }  # fmt: skip
    for name, (figure_of, caption) in figures.items():
        draw(page, name, caption, figure_of, run)
    rows = [
        [
            f"{short}, {meaning}",
            *(format_number(summary.get(f"{part}_{key}_ms")) for part in STATISTICS),
            ends_in_words(summary.get(f"mean_{key}_ms_interval")),
        ]
        for key, (short, meaning) in LATENCIES.items()
    ]
    caption = "Of completed requests, from summary.json; ITL within 0.1 %. The last column: 80 % interval of the mean."
    page.tables.append(TextTable("Latencies, ms", ["", *STATISTICS, "mean, 80 %"], rows, caption))
    if run.scenario_text is not None:
        page.folded.append(Folded("The scenario, with the source of every number (scenario.toml)", run.scenario_text))
    page.source("timing", summary.get("timing") or "not recorded: the run was made by an earlier version")
    requests = f"requests.parquet, all {summary['completed']:,} completed requests"
    page.source("latencies", f"{requests}; ITL: summary.json, counted during the run")
    if points := summary.get("intervals_rest_on"):
        are_known = any(f"{key}_interval" in summary for key in of_run.INTERVALS)
        page.source("intervals", intervals_rest_on(summary.get("overload") or points, are_known=are_known))
    rounds = "rounds.parquet, every decode round"
    page.source("over time, acceptance", f"summary.json; draft steps by batch size: {rounds}")
    made_by(page, summary.get("version"))
    return page


def _run_answer(run: StoredRun) -> Iterator[str]:
    summary = run.summary
    if summary.get("incomplete"):
        yield "The run was interrupted, or requests were left over: the numbers cover a part of it."
    first, then = (format_number(summary[f"p99_{key}_ms"], "ms") for key in ("ttft", "tpot"))
    yield (
        f"{summary['completed']:,} of {count_of(summary['submitted'], 'request')} completed in "
        f"{format_number(summary['duration'])} simulated seconds: {format_number(rate_of(summary, 'output_throughput'))} output "
        f"tokens/s. 99 % of them had the first token within {first}, and 99 % then waited at most {then} per token."
    )
    if summary.get("slo_attainment") is not None:
        limits = ", ".join(f"{LATENCIES[key][0]} {limit:g} ms" for key, limit in run.limits_ms.items())
        yield f"{format_share(summary['slo_attainment'])} of the requests kept every limit ({limits})."
    if "steady_from" in summary:
        yield about_steady(summary)
    full = summary.get("saturation")
    if summary.get("overloaded"):
        yield f"The service was overloaded: {summary.get('overload') or 'latencies depend on how long the run is'}."
    elif full is not None:
        yield f"The load is {full:.0%} of what full batches would serve."


def _run_tiles(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    def number(key: str, unit: str = "") -> str:
        return format_number(rate_of(summary, key), unit)

    def with_interval(key: str, unit: str = "") -> str:
        ends = summary.get(f"{key}_interval")
        return number(key, unit) + (f" (80 %: {ends_in_words(ends)})" if ends else "")

    rate = f"{number('request_throughput')} requests/s"
    if ends := rate_of(summary, "output_throughput_interval"):
        rate += f"; 80 %: {ends_in_words(ends)}"
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
    mean = f"at most; mean {format_share(rate_of(summary, 'kv_occupancy_mean'))}"
    yield "KV in use", format_share(summary["kv_occupancy_max"]), mean


# -- the twin ---------------------------------------------------------------------------------------------------------


def twin_page(twin: Twin) -> ReportPage:
    page = ReportPage(f"Predicted against measured on {twin.device}", str(twin.path))
    errors = {
        key: [one["metrics"][key]["error"] for one in twin.measured if key in one["metrics"]] for key in SHORT_NAMES
    }
    errors = {key: [value for value in values if value is not None] for key, values in errors.items()}
    found_errors = {key: values for key, values in errors.items() if values}
    parts = [f"{SHORT_NAMES[key]} by {np.median(np.abs(values)):.1%}" for key, values in found_errors.items()]
    if found_errors:
        page.answer.append(
            f"The simulator is off by this much, in the median of {count_of(len(twin.measured), 'comparison')}: {', '.join(parts)}."
        )
    else:
        page.answer.append("Not measured: other work ran on the machine.")
    share = min((one["processor_share"] for one in twin.comparisons), default=1.0)
    if share < 0.97 and twin.clock == "wall":
        page.notices.append(
            f"Note: the measuring process had a processor for only {share:.0%} of the time that it worked: other work ran on this machine. "
            f"{len(twin.comparisons) - len(twin.measured)} of {count_of(len(twin.comparisons), 'comparison')} count as not measured."
        )
    page.tiles += [
        (SHORT_NAMES[key], f"{np.median(np.abs(values)):.1%}", f"at most {max(values, key=abs):+.1%}")
        for key, values in found_errors.items()
    ]
    caption = "Every latency of every way to decode, at every load."
    draw(page, "predicted", caption, of_twin.predicted_against_measured, twin)
    caption = "How far each prediction is off, beside how much the measurement itself varies."
    draw(page, "errors", caption, of_twin.errors, twin)
    for load in twin.loads:
        caption = f"Whether the load built up as predicted, at the load {load}."
        draw(page, f"batch-{load}", caption, of_twin.batch_over_time, twin, load)
    columns = ["load", "way to decode", *SHORT_NAMES.values()]
    rows = [
        [
            one["load"],
            one["arm"],
            *(_error_cell(one["metrics"].get(key)) if one in twin.measured else "not measured" for key in SHORT_NAMES),
        ]
        for one in twin.comparisons
    ]
    page.tables.append(TextTable("Measured, and the error of the prediction", columns, rows))
    repeats = ", ".join(map(str, sorted({one["repeats"] for one in twin.comparisons})))
    page.source("measured", f"by our own executor on {twin.device}, {twin.clock} time, {repeats} runs of each")
    page.source("predicted", "by the simulator, from single steps of that executor and the acceptance of other prompts")
    made_by(page, twin.version)
    return page


def _error_cell(one: Mapping[str, Any] | None) -> str:
    if one is None or one["error"] is None:
        return "–"
    return f"{format_number(one['measured'])} ({one['error']:+.1%})"
