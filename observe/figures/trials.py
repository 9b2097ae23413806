"""Figures of many runs: a sweep's points, and the candidates of a plan."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from ...core.parsing import ParseError, parse_json
from ..input_files import read_lines
from ..rates import rate_of
from ..tables import LATENCIES
from .labels import LineEnd, distinct_parts, label_ends, names_in_note
from .style import COLOURS, FAINT, figure, missing, names_beside, note_of, read_object, short, whiskers

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
MOST_LINES = len(COLOURS)


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One combination: its settings without the seed, and the summaries of its runs."""

    settings: Mapping[str, Any]
    summaries: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def seeds(self) -> list[Any]:
        return [one.get("seed", place) for place, one in enumerate(self.summaries)]

    def values(self, key: str, seeds: Container[Any] | None = None) -> list[float]:
        """Return a number of the runs that have it (`rate_of`); `seeds`: of these seeds alone."""
        shown = zip(self.seeds, self.summaries, strict=True)
        found = (rate_of(one, key) for seed, one in shown if seeds is None or seed in seeds)
        return [float(value) for value in found if value is not None]

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
        if not isinstance(self.question.get("scenario"), dict) or not isinstance(self.question.get("kind"), str):
            raise missing(self.path / "question.json", "is no question of a sweep or a plan (no kind, no scenario)")
        found: dict[str, SweepPoint] = {}
        for settings, summary in self._runs():
            settings = {key: value for key, value in settings.items() if key != "seed"}
            found.setdefault(repr(sorted(settings.items())), SweepPoint(settings)).summaries.append(summary)
        self.points: list[SweepPoint] = list(found.values())  # in the order in which they have ended
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

    def lines(self, along: str) -> dict[str, list[SweepPoint]]:
        """Return the points by their settings other than `along`, each list in order of `along`."""
        found: dict[str, list[SweepPoint]] = {}
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
    """Return settings in words, each key without its first table: "prefill gpu H200"."""
    names = {key: key.partition(".")[2].replace(".", " ") or key for key in settings}
    return ", ".join(f"{names[key]} {'–' if value is None else value}" for key, value in settings.items())


def throughput_against_latency(
    trials: Trials | str | PathLike[str], latency: str = "p99_tpot_ms", throughput: str = "output_throughput"
) -> go.Figure:
    """Draw each combination of a sweep: throughput above latency; a line per deployment where the load varies."""
    trials = as_trials(trials)
    along = next((key for key in trials.varied if key in LOADS), None)
    title = f"{heading(throughput)} against {heading(latency)}"
    made = figure(title, _title(latency), _title(throughput), height=420)
    if along is None:
        shown = [point for point in trials.points if point.values(latency) and point.values(throughput)]
        _add_points(made, shown, "all", COLOURS[0], latency, throughput, "markers+text")
        made.data[-1].text = [label({key: point.settings.get(key) for key in trials.varied}) for point in shown]
        made.data[-1].textposition = "top center"
        note_of(made, _notes(trials))
        return made
    _add_lines(made, trials, trials.lines(along), latency, throughput)
    return made


def against(trials: Trials | str | PathLike[str], key: str, metric: str) -> go.Figure:
    """Draw a number of the summaries against a key that a sweep varies;
    a line for each combination of the other keys."""
    trials = as_trials(trials)
    if key not in trials.varied:
        raise missing(trials.path, f"does not vary {key}; varied: {', '.join(trials.varied) or 'nothing'}")
    made = figure(f"{heading(metric)} by {key}", key, _title(metric))
    settings = [point.settings.get(key) for point in trials.points]
    numbers = [setting for setting in settings if isinstance(setting, int | float)]
    categories: list[Any] = []
    if len(numbers) < len(settings):  # they stand side by side, at 0, 1, 2, …
        categories = sorted(dict.fromkeys(settings), key=_order)
        made.update_xaxes(tickvals=[*range(len(categories))], ticktext=[str(one) for one in categories])
    else:
        values = sorted(set(numbers))
        if key in LOADS and values[0] > 0 and values[-1] >= 10 * values[0]:
            made.update_xaxes(type="log")
        if len(values) <= MOST_LINES:
            made.update_xaxes(tickvals=values, ticktext=[f"{value:g}" for value in values])
    _add_lines(made, trials, trials.lines(key), key, metric, categories)
    return made


def _add_lines(
    made: go.Figure,
    trials: Trials,
    lines: Mapping[str, list[SweepPoint]],
    x: str,
    y: str,
    categories: Sequence[Any] = (),
) -> None:
    """Draw a line through the points of each deployment that have both numbers, with its name at its end. categories:
    values of `x` that are no numbers, in their order."""
    names, common = distinct_parts(list(lines)[:MOST_LINES])
    ends: list[LineEnd] = []
    for name, short_name, colour in zip(lines, names, COLOURS, strict=False):
        shown = [point for point in lines[name] if point.values(y) and (point.values(x) or x in point.settings)]
        if shown:
            _add_points(made, shown, name, colour, x, y, "lines+markers")
            if categories:
                made.data[-1].x = [categories.index(value) for value in made.data[-1].x]
            last = max(zip(made.data[-1].x, made.data[-1].y, strict=True), key=lambda place: place[0])
            ends.append(LineEnd(short_name, colour, *last))
    left_out = len(lines) - MOST_LINES
    note_of(
        made, [*_notes(trials), *names_in_note(names, common), f"{left_out} more have no line" if left_out > 0 else ""]
    )
    if not ends:
        return
    xs, ys = ([value for one in made.data for value in one[axis]] for axis in "xy")
    is_log = made.layout.xaxis.type == "log"
    margin = 0.03 * (max(xs) - min(xs)) or 0.05 * abs(max(xs)) or 1.0
    low, high = (min(xs) / 1.05, max(xs) * 1.05) if is_log else (min(xs) - margin, max(xs) + margin)
    label_ends(made, ends, (low, high), (0, 1.08 * max(ys) or 1.0))


def _add_points(
    made: go.Figure, points: Sequence[SweepPoint], name: str, colour: str, x: str, y: str, mode: str
) -> None:
    def mean(point: SweepPoint, key: str) -> Any:
        values = point.values(key)
        return short(float(np.mean(values))) if values else point.settings.get(key)

    def spread(key: str) -> dict[str, Any] | None:
        spans = [point.values(key) for point in points]
        return whiskers([float(np.mean(found)) for found in spans], spans) if all(spans) else None

    made.add_scatter(
        x=[mean(point, x) for point in points], y=[mean(point, y) for point in points], name=name or "all", mode=mode,
        error_x=spread(x), error_y=spread(y), line={"color": colour, "width": 2},
        marker={"color": colour, "size": 8, "symbol": ["circle-open" if point.is_overloaded else "circle" for point in points]},
        customdata=[label(point.settings) for point in points], textfont={"size": 10},
        hovertemplate="%{customdata}<br>%{x:.4~g}, %{y:.4~g}<extra></extra>",
    )  # fmt: skip


def _notes(trials: Trials) -> list[str]:
    runs = max((len(point.summaries) for point in trials.points), default=0)
    text = "one run each" if runs < 2 else f"means of {runs} seeds, whiskers from least to greatest"
    return [text, "open circles: overloaded" if any(point.is_overloaded for point in trials.points) else ""]


def _title(key: str) -> str:
    return TITLES.get(key, key)


def heading(key: str) -> str:
    """Return a number in words, without its unit."""
    return _title(key).removesuffix(", ms")


def limit_title(name: str) -> str:
    """Return a limit of a service level, such as ttft_p99, in words."""
    latency, _, statistic = name.rpartition("_")
    return f"{statistic} {LATENCIES[latency][0]}" if latency in LATENCIES else name


# -- plans ------------------------------------------------------------------------------------------------------------


def answer_of(trials: Trials) -> Mapping[str, Any]:
    """Return the answer of a plan. Raises ConfigError if it has none."""
    if trials.answer is None:
        raise missing(trials.path, "has no answer.json: the plan has not ended; the same `foredraft plan` goes on")
    return trials.answer


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
