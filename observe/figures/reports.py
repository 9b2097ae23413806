"""The report of a run, a sweep, a plan, a tune or a twin: the content of its page, from the files that the command has
written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import count_of
from ..tables import format_number, times_rest_on
from . import plans as of_plans
from . import speeds as of_speeds
from . import trials as of_trials
from .labels import distinct_parts
from .page import Folded, ReportPage, TextTable
from .pair import pair_page
from .rounds import round_waterfall
from .run import StoredRun
from .run_pages import deployment, draw, ends_in_words, made_by, run_page, twin_page
from .style import missing
from .trials import SweepPoint, Trials, label
from .twin import Twin

MOST_ROWS = 100


def page_of(path: Path, other: Path | None = None) -> ReportPage:
    """Return the report of the directory or file at `path`; with `other`, of two runs side by side. Raises ConfigError
    if that is nothing that a command has written, or unreadable."""
    if other is not None:
        for each in (path, other):
            if not (each / "summary.json").exists():
                raise missing(each, "is no run of simulate --out, which alone can stand beside another")
        return pair_page(StoredRun(path), StoredRun(other))
    if path.is_dir():
        if (path / "question.json").exists():
            return _trials_page(Trials(path))
        if (path / "summary.json").exists():
            return run_page(StoredRun(path))
        message = "has neither summary.json (a run of simulate --out) nor question.json (a sweep, a plan, a tune)"
        raise missing(path, message)
    return twin_page(Twin(path))


# -- sweeps and plans -------------------------------------------------------------------------------------------------


def _trials_page(trials: Trials) -> ReportPage:
    kind, scenario = trials.question["kind"], trials.question["scenario"]
    page = ReportPage(deployment(scenario), f"A {kind}: {scenario.get('name', '')}; {trials.path}")
    if not trials.points:
        raise missing(trials.path, f"has no run that has ended; the same `foredraft {kind}` goes on")
    if kind == "plan":
        _add_plan(page, trials)
    elif kind == "tune":
        _add_tune(page, trials)
    else:
        _add_sweep(page, trials)
    page.folded.append(Folded("The scenario that is varied", "\n".join(_flat(scenario))))
    summaries = [one for point in trials.points for one in point.summaries]
    if points := [text for one in summaries if (text := one.get("intervals_rest_on"))]:
        page.source("times", times_rest_on(*points, summaries=summaries))
    timings = dict.fromkeys(one.get("timing") for one in summaries)
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
    made_by(page, trials.question.get("version"))
    return page


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield a line for each key that has a value."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key} = {value}"


def _add_sweep(page: ReportPage, trials: Trials) -> None:
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
    if set(trials.varied) & set(of_trials.LOADS):
        _draw_speeds(page, trials)
    for latency in ("p99_tpot_ms", "p99_ttft_ms"):
        caption = "Up and to the left is better: more tokens per second at a lower latency."
        draw(page, f"throughput-{latency}", caption, of_trials.throughput_against_latency, trials, latency)
    for key in reversed(varied[-2:]):
        for metric in ("output_throughput", "p99_ttft_ms", "p99_tpot_ms", "accept_length"):
            if any(point.values(metric) for point in trials.points):
                caption = f"How {of_trials.heading(metric)} follows {key}, the other keys being equal along a line."
                draw(page, f"{metric}-{key.rpartition('.')[2]}", caption, of_trials.against, trials, key, metric)
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


def _label(trials: Trials, point: SweepPoint) -> str:
    return label({key: point.settings.get(key) for key in trials.varied}) or "the only combination"


def _points_table(trials: Trials, varied: Sequence[str]) -> TextTable:
    metrics = [key for key in of_trials.TITLES if any(point.values(key) for point in trials.points)]
    columns = [*(key.rpartition(".")[2] for key in varied), *(of_trials.TITLES[key] for key in metrics), "runs", ""]
    rows = []
    for point in trials.points[:MOST_ROWS]:
        means = (format_number(float(np.mean(values))) if (values := point.values(key)) else "–" for key in metrics)
        cells = (str(point.settings.get(key, "–")) for key in varied)
        rows.append([*cells, *means, str(len(point.summaries)), "overloaded" if point.is_overloaded else ""])
    more = len(trials.points) - len(rows)
    caption = "Means over the seeds." + (f" trials.parquet has {count_of(more, 'combination')} more." if more else "")
    return TextTable("Combinations", columns, rows, caption)


def _draw_speeds(page: ReportPage, trials: Trials) -> None:
    caption = "Up and to the right is better: more tokens for each GPU, and faster ones for each user."
    draw(page, "throughput-per-gpu", caption, of_speeds.throughput_per_gpu, trials)
    if any(point.values("slo_attainment") for point in trials.points):
        caption = "How many requests keep every limit as the load rises."
        draw(page, "attainment", caption, of_speeds.attainment_against_load, trials)


def _add_plan(page: ReportPage, trials: Trials) -> None:
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
            ("best candidate", _short_name(best, answer), f"of {len(answer['candidates'])}"),
            ("load", f"{best['load']:.3g}", ", ".join(below_load)),
            ("GPUs", str(best["gpus"]), ", ".join(below_gpus)),
            ("tightest limit", of_trials.limit_title(best["tightest"]), ", ".join(below_limit)),
        ]
        if best["bill"] is not None:
            page.tiles.append(("cost", f"{best['bill']['planned']:.3g}", "per million output tokens"))
    draw(page, "frontier", "What each candidate holds within all limits, the best first.", of_plans.frontier, trials)
    _draw_speeds(page, trials)
    for limit in of_plans.latency_limits(answer):
        caption = f"Where a line crosses the limit of {limit['limit_ms']:g} ms, the candidate holds no more."
        draw(page, limit["name"], caption, of_plans.latency_against_load, trials, limit)
    caption = "How the bill grows with the load: a step is one more deployment."
    draw(page, "cost", caption, of_plans.cost_against_load, trials)
    draw(page, "round", "Where the time of the best candidate's mean round goes.", round_waterfall, trials)
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
                ends_in_words(one.get("load_interval")),
                gpus,
            ]
        else:
            cells = [gpus, ends_in_words(one.get("gpus_interval"))]
        taken = "–" if one["taken"] is None else f"{one['taken']:.0%}"
        tokens, tightest = format_number(one["tokens_per_s"]), of_trials.limit_title(one["tightest"] or "–")
        rows.append([one["name"], one["status"], *cells, tokens, tightest, taken])
    caption = (
        "± is half of the 95 % interval over seeds. 80 % is the interval if the times of passes and first tokens are not "
        "as simulated. tokens/s are the output tokens of all GPUs of a row; "
        "taken: of the limit, at the load found."
    )
    page.tables.append(TextTable("All candidates", columns, rows, caption))
    if answer["refused"]:
        reasons = [[one["name"], one["reason"]] for one in answer["refused"]]
        page.tables.append(TextTable("Cannot run", ["candidate", "reason"], reasons))
    source = answer["model_error_source"]
    page.source("error of comparisons", f"{source}: within it candidates are called equal")


def _short_name(best: Mapping[str, Any], answer: Mapping[str, Any]) -> str:
    """Return the name of a candidate without the parts that all have which hold a load."""
    names = [one["name"] for one in answer["candidates"] if one["status"] != "hopeless"]
    return distinct_parts(names)[0][names.index(best["name"])]


def _add_tune(page: ReportPage, trials: Trials) -> None:
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
    draw(page, "gains", caption, of_trials.tuned_gains, trials)
    draw(page, "steps", "How many tokens are drafted ahead, by the requests of a round.", of_trials.tuned_steps, trials)
    phases = [*found["phases"], "all"]
    rows = [
        [name, *("cannot run" if row[one] is None else "{:+.1%} ± {:.1%}".format(*row[one]) for one in phases)]
        for name, row in found["gain_over"].items()
    ]
    about = "; ".join(f"{name}: {phase['about']}" for name, phase in found["phases"].items())
    caption = f"± is half of the 95 % interval over seeds, without the error of the cost model. {about}."
    page.tables.append(TextTable("How much faster the table is", ["faster than", *phases], rows, caption))
