"""Figures of many runs: a sweep's points, and the candidates of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from ...core.parsing import ParseError, parse_json
from ..distribution.former_name import is_former_form, made_by_former
from ..input_files import read_lines
from ..tables import LATENCIES
from .style import COLOURS, FAINT, figure, limit_line, missing, names_beside, read_object, tall_enough, wrapped

LOADS = ("workload.rate", "workload.rate_scale", "workload.concurrency")
TITLES = {
    "output_throughput": "output tokens/s",
    "request_throughput": "requests/s",
    "p99_ttft_ms": "p99 TTFT, ms",
    "p99_tpot_ms": "p99 TPOT, ms",
    "mean_tpot_ms": "mean TPOT, ms",
    "p99_itl_ms": "p99 ITL, ms",
    "p99_e2el_ms": "p99 E2EL, ms",
    "accept_length": "accept length",
    "slo_attainment": "share within the SLO",
}
MOST_LINES = 12


@dataclass(frozen=True, slots=True)
class Point:
    """One combination: its settings without the seed, and the summaries of its runs."""

    settings: Mapping[str, Any]
    summaries: list[Mapping[str, Any]] = field(default_factory=list)

    def values(self, key: str) -> list[float]:
        return [float(value) for one in self.summaries if (value := one.get(key)) is not None]

    @property
    def is_overloaded(self) -> bool:
        return any(one.get("overloaded") for one in self.summaries)


class Trials:
    """A directory of runs that `sweep`, `plan` or `tune` keeps: the question, and the runs that have ended.

    Raises ConfigError for a directory that holds none, and for files that cannot be read.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path: Path = Path(path)
        self.question: Mapping[str, Any] = read_object(self.path / "question.json")
        if is_former_form(self.question.get("format")):
            raise missing(self.path / "question.json", made_by_former("make the runs again"))
        if not isinstance(self.question.get("scenario"), dict) or not isinstance(self.question.get("kind"), str):
            raise missing(self.path / "question.json", "is no question of a sweep or a plan (no kind, no scenario)")
        found: dict[str, Point] = {}
        for settings, summary in self._runs():
            settings = {key: value for key, value in settings.items() if key != "seed"}
            found.setdefault(repr(sorted(settings.items())), Point(settings)).summaries.append(summary)
        self.points: list[Point] = list(found.values())  # in the order in which they have ended
        self.points.sort(key=lambda point: [_order(point.settings.get(key)) for key in self.varied])
        self.num_runs: int = sum(len(point.summaries) for point in self.points)

    def _runs(self) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        place = self.path / "trials.jsonl"
        if not place.exists():
            return
        for number, line in enumerate(read_lines(place), 1):
            if not line.endswith("\n"):
                return  # cut off: the run is made again
            try:
                entry = parse_json(line)
                yield {**entry["settings"]}, {**entry["summary"]}
            except (ParseError, KeyError, TypeError):
                raise missing(f"{place}, line {number}", "is no run") from None

    @cached_property
    def answer(self) -> Mapping[str, Any] | None:
        """What the command answered; None if it has not ended."""
        place = self.path / "answer.json"
        return read_object(place) if place.exists() else None

    @cached_property
    def tuned(self) -> Mapping[str, Any]:
        """What `tune` found. Raises ConfigError if it has not ended."""
        place = self.path / "result.json"
        if not place.exists():
            raise missing(self.path, "has no result.json: the search has not ended; the same `foredraft tune` goes on")
        return read_object(place)

    @property
    def varied(self) -> list[str]:
        """The keys that differ between the points, the load last."""
        keys = dict.fromkeys(key for point in self.points for key in point.settings)
        varied = [key for key in keys if len({repr(point.settings.get(key)) for point in self.points}) > 1]
        return sorted(varied, key=LOADS.__contains__)

    def lines(self, along: str) -> dict[str, list[Point]]:
        """Return the points by their settings other than `along`, each list in order of `along`."""
        found: dict[str, list[Point]] = {}
        for point in self.points:
            found.setdefault(label({k: point.settings.get(k) for k in self.varied if k != along}), []).append(point)
        for points in found.values():
            points.sort(key=lambda point: _order(point.settings.get(along)))
        return found


def _order(value: Any) -> tuple[int, Any]:
    return (0, value) if isinstance(value, int | float) else (1, str(value))


def as_trials(trials: Trials | str | PathLike[str]) -> Trials:
    return trials if isinstance(trials, Trials) else Trials(trials)


def label(settings: Mapping[str, Any]) -> str:
    """Return settings in words, the tables of their keys left out."""
    return ", ".join(f"{key.rpartition('.')[2]} {'–' if value is None else value}" for key, value in settings.items())


def throughput_against_latency(
    trials: Trials | str | PathLike[str], latency: str = "p99_tpot_ms", throughput: str = "output_throughput"
) -> go.Figure:
    """Draw each combination of a sweep: throughput above latency; a line per deployment where the load varies."""
    trials = as_trials(trials)
    along = next((key for key in trials.varied if key in LOADS), None)
    lines = trials.lines(along) if along is not None else {"": trials.points}
    made = figure(
        f"{heading(throughput)} against {heading(latency)}", _title(latency), _title(throughput), _note(trials), 420
    )
    for (name, points), colour in zip(_fewest(lines), _colours()):  # noqa: B905  (colours repeat)
        shown = [point for point in points if point.values(latency) and point.values(throughput)]
        _add_points(made, shown, name, colour, latency, throughput, "lines+markers" if along else "markers+text")
        if along is None:
            made.data[-1].text = [label({key: point.settings.get(key) for key in trials.varied}) for point in shown]
            made.data[-1].textposition = "top center"
    made.update_layout(showlegend=along is not None and len(lines) > 1)
    return made


def against(trials: Trials | str | PathLike[str], key: str, metric: str) -> go.Figure:
    """Draw a number of the summaries against a key that a sweep varies;
    a line for each combination of the other keys."""
    trials = as_trials(trials)
    if key not in trials.varied:
        raise missing(trials.path, f"does not vary {key}; varied: {', '.join(trials.varied) or 'nothing'}")
    made = figure(f"{heading(metric)} by {key}", key, _title(metric), _note(trials))
    lines = trials.lines(key)
    for (name, points), colour in zip(_fewest(lines), _colours()):  # noqa: B905
        _add_points(
            made, [point for point in points if point.values(metric)], name, colour, key, metric, "lines+markers"
        )
    settings = [point.settings.get(key) for point in trials.points]
    numbers = [setting for setting in settings if isinstance(setting, int | float)]
    if len(numbers) == len(settings):
        values = sorted(set(numbers))
        if key in LOADS and values[0] > 0 and values[-1] >= 10 * values[0]:
            made.update_xaxes(type="log")
        if len(values) <= MOST_LINES:
            made.update_xaxes(tickvals=values, ticktext=[f"{value:g}" for value in values])
    else:
        made.update_xaxes(type="category")
    made.update_layout(showlegend=len(lines) > 1)
    return made


def _add_points(made: go.Figure, points: Sequence[Point], name: str, colour: str, x: str, y: str, mode: str) -> None:
    def mean(point: Point, key: str) -> Any:
        values = point.values(key)
        return float(f"{np.mean(values):.5g}") if values else point.settings.get(key)

    def whiskers(key: str) -> dict[str, Any] | None:
        if not all(point.values(key) for point in points) or all(len(point.summaries) < 2 for point in points):
            return None
        spans = [(max(found), np.mean(found), min(found)) for found in (point.values(key) for point in points)]
        up, down = [high - middle for high, middle, _ in spans], [middle - low for _, middle, low in spans]
        return {"type": "data", "array": up, "arrayminus": down, "symmetric": False, "width": 2, "thickness": 1}

    made.add_scatter(
        x=[mean(point, x) for point in points], y=[mean(point, y) for point in points], name=wrapped(name or "all"), mode=mode,
        error_x=whiskers(x), error_y=whiskers(y), line={"color": colour, "width": 2},
        marker={"color": colour, "size": 8, "symbol": ["circle-open" if point.is_overloaded else "circle" for point in points]},
        customdata=[label(point.settings) for point in points], textfont={"size": 10},
        hovertemplate="%{customdata}<br>%{x:.4~g}, %{y:.4~g}<extra></extra>",
    )  # fmt: skip


def _fewest(lines: Mapping[str, list[Point]]) -> list[tuple[str, list[Point]]]:
    return list(lines.items())[:MOST_LINES]


def _colours() -> Iterator[str]:
    while True:
        yield from COLOURS


def _note(trials: Trials) -> str:
    runs = max((len(point.summaries) for point in trials.points), default=0)
    text = "one run each" if runs < 2 else f"means of {runs} seeds, whiskers from least to greatest"
    return text + ("<br>open circles: overloaded" if any(point.is_overloaded for point in trials.points) else "")


def _title(key: str) -> str:
    return TITLES.get(key, key)


def heading(key: str) -> str:
    """Return a number in words, without its unit."""
    return _title(key).removesuffix(", ms")


def limit_title(name: str) -> str:
    """Return a limit of a service level, such as ttft_p99, in words."""
    latency, _, statistic = name.rpartition("_")
    return f"{statistic} {LATENCIES[latency][0]}" if latency in LATENCIES else name


def limit_unit(limit: Mapping[str, Any]) -> str:
    """Return the unit of a limit: a share of requests within limits is counted in these (`slo_taken`)."""
    return "× its limits" if limit["key"] == "slo_taken" else "ms"


# -- plans ------------------------------------------------------------------------------------------------------------


def answer_of(trials: Trials) -> Mapping[str, Any]:
    """Return the answer of a plan. Raises ConfigError if it has none."""
    if trials.answer is None:
        raise missing(trials.path, "has no answer.json: the plan has not ended; the same `foredraft plan` goes on")
    return trials.answer


def frontier(trials: Trials | str | PathLike[str]) -> go.Figure:
    """Draw the result of each candidate of a plan: the load that nearly all runs hold, with a whisker to the load that
    half of them hold, or the GPUs that a load needs. Bars are the 80 % intervals of the cost model."""
    trials = as_trials(trials)
    answer = answer_of(trials)
    found = [one for one in answer["candidates"] if one["status"] != "hopeless"]
    greatest = answer["load"] is None
    x = f"greatest load, {answer['load_unit']}" if greatest else f"GPUs for {answer['load']:g} {answer['load_unit']}"
    notes = ["whiskers: to the load that half of the runs hold"] if greatest else []
    bars = [(one["name"], ends) for one in found if (ends := one.get("load_interval" if greatest else "gpus_interval"))]
    bars = [(name, ends) for name, ends in bars if None not in ends]
    if bars:
        notes.append("bars: 80 % interval if times are not as simulated")
    if any(one["status"] == "dropped" for one in found):
        notes.append("pale: dropped after the rough first round")
    note = "; ".join(notes)
    made = figure("Candidates", x, "", note)
    if bars:
        made.add_bar(
            x=[high - low for _, (low, high) in bars], base=[low for _, (low, _) in bars], y=[name for name, _ in bars],
            orientation="h", width=0.5, marker={"color": FAINT, "opacity": 0.35}, showlegend=False,
            customdata=[f"{low:.4g} to {high:.4g}" for _, (low, high) in bars],
            hovertemplate="%{y}: %{customdata} (80 %)<extra></extra>",
        )  # fmt: skip
    kinds = {"best": COLOURS[2], "equal": COLOURS[0], "behind": COLOURS[1], "dropped": FAINT}
    names = {"best": "best", "equal": "cannot be told from the best", "behind": "behind", "dropped": "dropped"}
    for kind, colour in kinds.items():
        shown = [one for one in found if one["status"] == kind]
        if not shown:
            continue
        widths = [max(0.0, (one.get("half_load") or one["load"]) - one["load"]) for one in shown] if greatest else []
        made.add_scatter(
            x=[one["load"] if greatest else one["gpus"] for one in shown], y=[one["name"] for one in shown], mode="markers",
            error_x={"array": widths, "arrayminus": [0] * len(widths), "thickness": 2, "width": 5} if any(widths) else None,
            marker={"color": colour, "size": 11}, name=names[kind], showlegend=True,
            customdata=[f"{one['tightest']} at {one['taken']:.0%} of its limit" if one["taken"] else "" for one in shown],
            hovertemplate="%{y}: %{x:.4~g}<br>%{customdata}<extra></extra>",
        )  # fmt: skip
    names_beside(made, [one["name"] for one in found])
    made.update_xaxes(rangemode="tozero")
    if not greatest and max((one["gpus"] or 0 for one in found), default=0) <= MOST_LINES:
        made.update_xaxes(dtick=1)
    return made


def latency_against_load(trials: Trials | str | PathLike[str], limit: Mapping[str, Any] | None = None) -> go.Figure:
    """Draw a limited latency of a plan's candidates against the load, and the limit. The best candidate has a band, the
    80 % interval of the latency that limits it. limit: one of the answer's; default: the first."""
    trials = as_trials(trials)
    answer = answer_of(trials)
    limited: Mapping[str, Any] = answer["limits"][0] if limit is None else limit
    key = answer["load_key"]
    what, unit = limit_title(limited["name"]), limit_unit(limited)
    made = figure(
        f"{what} against load",
        f"load, {answer['load_unit']}",
        f"{what}, {unit}",
        "a point per load that was tried, the mean over its seeds",
    )
    shown = [one for one in answer["candidates"] if one["status"] in ("best", "equal", "behind")]
    for one, colour in zip(shown[:MOST_LINES], _colours()):  # noqa: B905
        by_load: dict[float, list[float]] = {}
        for point in trials.points:
            if (
                all(point.settings.get(name) == value for name, value in one["settings"].items())
                and key in point.settings
            ):
                by_load.setdefault(float(point.settings[key]), []).extend(point.values(limited["key"]))
        loads = sorted(load for load, values in by_load.items() if values)
        means = [float(np.mean(by_load[load])) for load in loads]
        if one["status"] == "best" and one["tightest"] == limited["name"] and one.get("taken_interval") is not None:
            _add_band(made, loads, means, [end / one["taken"] for end in one["taken_interval"]], colour)
        made.add_scatter(
            x=loads, y=[float(f"{mean:.5g}") for mean in means], mode="lines+markers", name=wrapped(one["name"]),
            line={"color": colour, "width": 2}, marker={"size": 6}, showlegend=True,
            hovertemplate=f"{one['name']}: %{{y:.4~g}} {unit} at %{{x:.4~g}}<extra></extra>",
        )  # fmt: skip
    loads = [load for line in made.data for load in line.x]
    if loads:
        highest = max(value for line in made.data for value in line.y)
        limit_line(made, (min(loads), max(loads)), (limited["limit_ms"],) * 2, f"limit {limited['limit_ms']:g} {unit}")
        made.update_yaxes(range=[0, min(1.1 * max(highest, limited["limit_ms"]), 4 * limited["limit_ms"])])
    tall_enough(made)
    return made


def _add_band(
    made: go.Figure, loads: Sequence[float], means: Sequence[float], ends: Sequence[float], colour: str
) -> None:
    """Draw the 80 % interval of a latency by load; `ends` are factors on the simulated latency."""
    low, high = ([float(f"{mean * end:.5g}") for mean in means] for end in ends)
    made.add_scatter(
        x=[*loads, *loads[::-1]], y=[*low, *high[::-1]], mode="none", fill="toself", fillcolor=colour, opacity=0.2,
        name="80 % interval of the best", showlegend=True, hoverinfo="skip",
    )  # fmt: skip


# -- tuned tables -----------------------------------------------------------------------------------------------------


def tuned_gains(trials: Trials | str | PathLike[str]) -> go.Figure:
    """Draw how much faster requests are with the table that `tune` found than with each alternative, by phase,
    with 95 % intervals."""
    trials = as_trials(trials)
    found = trials.tuned
    names = list(found["gain_over"])
    note = f"whiskers: 95 % interval over {len(found['seeds'])} seeds that the search has not seen; right: the table is faster"
    made = figure("Gain of the tuned table", "faster by", "", note)
    for phase, colour in zip(found["phases"], COLOURS * 4, strict=False):
        shown = [(name, row[phase]) for name, row in found["gain_over"].items() if row[phase] is not None]
        made.add_scatter(
            x=[mean for _, (mean, _) in shown], y=[name for name, _ in shown], mode="markers", name=phase, showlegend=True,
            error_x={"type": "data", "array": [width for _, (_, width) in shown], "thickness": 1, "width": 3},
            marker={"color": colour, "size": 9}, hovertemplate=f"{phase}, against %{{y}}: %{{x:+.1%}}<extra></extra>",
        )  # fmt: skip
    made.add_vline(x=0, line={"color": FAINT, "width": 1})
    made.update_xaxes(tickformat="+.0%")
    names_beside(made, names)
    return made


def tuned_steps(trials: Trials | str | PathLike[str]) -> go.Figure:
    """Draw the draft steps of the table that `tune` found against the batch size;
    with several candidates their fewest and most."""
    table = as_trials(trials).tuned["table"]
    bounds = [int(bound) for bound in table]
    candidates = [slot["candidate_steps"] for slot in table.values()]
    note = "the controller chooses between the lines" if any(len(set(one)) > 1 for one in candidates) else ""
    made = figure("Draft steps of the tuned table", "requests decoded together", "draft steps", note)
    sides = {"most": max, "fewest": min} if note else {"steps": max}
    for (name, side), colour in zip(sides.items(), COLOURS, strict=False):
        steps = [side(one) for one in candidates]
        made.add_scatter(
            x=[*bounds, 2 * bounds[-1]], y=[*steps, steps[-1]], mode="lines", name=name, showlegend=bool(note),
            line={"color": colour, "width": 2, "shape": "hv"}, hovertemplate="from %{x}: %{y} steps<extra></extra>",
        )  # fmt: skip
    made.update_xaxes(type="log", tickvals=bounds)
    made.update_yaxes(rangemode="tozero", dtick=1)
    return made
