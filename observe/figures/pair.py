"""Two runs side by side: their page, and its figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike, fspath
from typing import Any

import numpy as np
import plotly.graph_objects as go

from ...core.errors import count_of
from ..rates import rates_of
from ..tables import LATENCIES, format_number, format_share
from .labels import LineEnd, label_ends
from .page import Folded, ReportPage, TextTable
from .rounds import round_of, waterfall
from .run import StoredRun, add_distribution, as_run, percentile_axes
from .run_pages import deployment, draw, made_by
from .style import COLOURS, figure, missing, note_of, short

NUMBERS = {
    "output_throughput": ("output tokens/s", ""),
    "request_throughput": ("requests/s", ""),
    "slo_attainment": ("within the SLO", "share"),
    "accept_length": ("accept length", ""),
    "mean_running": ("batch", ""),
    "kv_occupancy_max": ("KV in use, at most", "share"),
    "device_busy_share": ("device busy", "share"),
}
LEAST_ROUNDS = 0.002  # of all: batches with fewer rounds tell no mean of their steps
Source = StoredRun | str | PathLike[str]


def names_of(one: StoredRun, other: StoredRun) -> tuple[str, str]:
    """Return what two runs are called: their directories, shortly where that tells them apart."""
    names = one.path.resolve().name, other.path.resolve().name
    return names if names[0] != names[1] else (fspath(one.path), fspath(other.path))


def latencies_of_two(one: Source, other: Source, latency: str = "ttft") -> go.Figure:
    """Draw how a latency is distributed in two runs: the share of requests (of ITL: of gaps) that is faster."""
    runs = as_run(one), as_run(other)
    title, meaning = LATENCIES[latency]
    made, deepest = figure(f"{title}, {meaning}", "milliseconds", "percentile"), 1.0
    for run, name, colour in zip(runs, names_of(*runs), COLOURS, strict=False):
        deepest = max(deepest, add_distribution(made, run, latency, name, colour))
    lines = [line for line in made.data if line.mode == "lines"]
    if len(lines) < 2:
        raise missing(runs[0].path, f"or {runs[1].path} has no {title}")
    ends = [LineEnd(line.name, line.line.color, line.x[-1], line.y[-1]) for line in lines]
    percentile_axes(made, deepest)
    values = [value for line in lines for value in line.x]
    label_ends(made, ends, (min(values) / 1.1, 1.1 * max(values)), (0, 1.05 * deepest))
    note_of(made, ["exact percentiles, straight lines between"])
    return made


def batch_of_two(one: Source, other: Source) -> go.Figure:
    """Draw the requests that run in two runs over simulated time."""
    runs = as_run(one), as_run(other)
    lines = [run.timeline("running") for run in runs]
    seconds = [60.0 if unit == "minutes" else 1.0 for *_, unit in lines]
    scale, unit = (60.0, "minutes") if max(seconds) > 1 else (1.0, "seconds")
    made, ends = figure("Batch over time", f"simulated {unit}", "requests that run"), []
    for (starts, values, _), own, name, colour in zip(lines, seconds, names_of(*runs), COLOURS, strict=False):
        xs = [short(start * own / scale) for start in starts.tolist()]
        ys = [None if value is None else short(value) for value in values]
        made.add_scatter(
            x=xs, y=ys, name=name, mode="lines", line={"color": colour, "width": 2, "shape": "hv"}, showlegend=False,
            hovertemplate=f"{name}: %{{y:.4~g}}<extra></extra>",
        )  # fmt: skip
        known = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None]
        ends += [LineEnd(name, colour, *known[-1])] if known else []
    last = max(x for line in made.data for x in line.x)
    label_ends(
        made, ends, (0, last or 1.0), (0, 1.08 * max((y for line in made.data for y in line.y if y), default=1.0))
    )
    return made


def steps_of_two(one: Source, other: Source) -> go.Figure:
    """Draw the mean draft steps in use against the batch size, of two runs."""
    runs = as_run(one), as_run(other)
    made, ends = figure("Draft steps by batch size", "batch size", "mean draft steps"), []
    for run, name, colour in zip(runs, names_of(*runs), COLOURS, strict=False):
        counts = run.rounds_by_batch()
        totals = counts.sum(axis=1)
        batches = np.flatnonzero(totals > LEAST_ROUNDS * totals.sum())
        means = counts[batches] @ np.arange(counts.shape[1]) / np.maximum(totals[batches], 1)
        if not len(batches):
            continue
        made.add_scatter(
            x=batches.tolist(), y=[short(mean) for mean in means.tolist()], name=name, mode="lines+markers",
            line={"color": colour, "width": 2}, marker={"size": 5}, showlegend=False,
            hovertemplate=f"{name}, batch %{{x}}: %{{y:.3~g}} steps<extra></extra>",
        )  # fmt: skip
        ends.append(LineEnd(name, colour, int(batches[-1]), float(means[-1])))
    if not ends:
        raise missing(runs[0].path, f"and {runs[1].path} have no decode round")
    largest, most = (max(value for line in made.data for value in line[axis]) for axis in "xy")
    label_ends(made, ends, (0, 1.03 * largest), (0, 1.1 * most or 1.0))
    return made


def pair_page(one: StoredRun, other: StoredRun) -> ReportPage:
    """Return the page that puts two runs side by side."""
    first, second = names_of(one, other)
    page = ReportPage(f"{first} and {second}", f"Two simulated runs: {one.path} and {other.path}")
    page.answer += [
        f"{first}: {deployment(one.scenario)}.",
        f"{second}: {deployment(other.scenario)}.",
        *_changes(one.summary, other.summary, first, second),
    ]
    if one.scenario.get("workload") != other.scenario.get("workload") or one.summary.get("seed") != other.summary.get(
        "seed"
    ):
        page.notices.append(
            "The two runs do not have the same workload and seed, so chance is a part of the differences."
        )
    page.tiles += _tiles(one.summary, other.summary)
    for latency, (short_name, _) in LATENCIES.items():
        caption = f"Left is better: {short_name} of both runs, up to the slowest requests."
        draw(page, f"latencies-{latency}", caption, latencies_of_two, one, other, latency)
    draw(page, "round", "Where the time of the mean round goes.", _rounds_of_two, one, other)
    draw(page, "batch", "Requests that are decoded together.", batch_of_two, one, other)
    draw(
        page,
        "steps-by-batch",
        "How many tokens were drafted ahead, by the requests of a round.",
        steps_of_two,
        one,
        other,
    )
    page.tables += [_numbers(one.summary, other.summary, first, second), _differences(one, other, first, second)]
    for run, name in ((one, first), (other, second)):
        if run.scenario_text is not None:
            page.folded.append(Folded(f"The scenario of {name} (scenario.toml)", run.scenario_text))
        page.source(f"timing of {name}", run.summary.get("timing") or "not recorded")
        made_by(page, run.summary.get("version"))
    return page


def _rounds_of_two(one: StoredRun, other: StoredRun) -> go.Figure:
    return waterfall(dict(zip(names_of(one, other), (round_of(one), round_of(other)), strict=True)))


def _change(was: Any, is_now: Any) -> str:
    return f"{is_now / was - 1:+.1%}" if was and is_now is not None else "–"


def _changes(was: Mapping[str, Any], is_now: Mapping[str, Any], first: str, second: str) -> Iterator[str]:
    shown = {"output_throughput": "output tokens/s", "mean_tpot_ms": "mean TPOT", "p99_ttft_ms": "p99 TTFT"}
    parts = [f"{name} {_change(*both)}" for key, name in shown.items() if all(both := rates_of(key, was, is_now))]
    if parts:
        yield f"From {first} to {second}: {', '.join(parts)}."


def _tiles(was: Mapping[str, Any], is_now: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    keys = {"output_throughput": "output tokens/s", "mean_tpot_ms": "mean TPOT, ms", "p99_tpot_ms": "p99 TPOT, ms"}
    for key, name in (keys | {"mean_ttft_ms": "mean TTFT, ms", "p99_ttft_ms": "p99 TTFT, ms"}).items():
        before, after = rates_of(key, was, is_now)
        if before is not None and after is not None:
            yield name, _change(before, after), f"{format_number(before)} → {format_number(after)}"


def _numbers(was: Mapping[str, Any], is_now: Mapping[str, Any], first: str, second: str) -> TextTable:
    latencies = {
        f"{part}_{key}_ms": (f"{part} {name}, ms", "")
        for key, (name, _) in LATENCIES.items()
        for part in ("mean", "p50", "p99")
    }
    rows = []
    for key, (name, kind) in (NUMBERS | latencies).items():
        key = key.replace("p50_", "median_")
        before, after = rates_of(key, was, is_now)
        if before is None and after is None:
            continue
        written = format_share if kind == "share" else format_number
        ends = " to ".join(map(format_number, rates_of(f"{key}_interval", was, is_now)[1] or ()))
        rows.append([name, written(before), written(after), _change(before, after), ends or "–"])
    caption = f"The last column: 80 % interval of {second}, if times are not as simulated."
    return TextTable("Numbers of both runs", ["", first, second, "change", "80 %"], rows, caption)


def _differences(one: StoredRun, other: StoredRun, first: str, second: str) -> TextTable:
    """Return the keys of the scenarios that differ."""
    before, after = (dict(_flat(run.scenario)) for run in (one, other))
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    rows = [[key, *("–" if key not in table else str(table[key]) for table in (before, after))] for key in keys]
    caption = f"{count_of(len(keys), 'key')} of the scenarios." if keys else "The scenarios are equal."
    return TextTable("What differs", ["", first, second], rows, caption)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
