"""The lines of a sweep or a plan along the load: what was simulated of each deployment, and how far seeds differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import plotly.graph_objects as go

from .devices import gpus_by_name, value_of
from .labels import distinct_parts, names_in_note
from .style import COLOURS, missing, short, whiskers
from .trials import LOADS, MOST_LINES, SweepPoint, Trials, answer_of

LONGER = 1.5
"""A run of so many times the requests of another at no more load tells more: the other is left out."""
UNITS = {
    "workload.rate": "requests/s",
    "workload.rate_scale": "× the trace",
    "workload.concurrency": "requests at once",
}
SHOWN = ("best", "equal", "behind")
Found = tuple[str, list[float], list[SweepPoint], Mapping[str, Any]]  # name, loads, points, the candidate of a plan


@dataclass(frozen=True)
class LoadCurve:
    """A deployment at rising loads.

    Attributes:
        name: What distinguishes it from the other curves of the figure.
        full_name: With the parts that all curves have.
        colour: Its own in every figure of the page.
        points: One for each load, by the load.
        candidate: What the answer of a plan says of it; empty of a sweep.
    """

    name: str
    full_name: str
    colour: str
    loads: Sequence[float]
    points: Sequence[SweepPoint]
    candidate: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def seeds(self) -> set[Any]:
        """The seeds that every load has. Lines are drawn through these, so that seeds do not bend them."""
        return set.intersection(*(set(point.seeds) for point in self.points)) if self.points else set()

    def draw(
        self, made: go.Figure, values: Sequence[float], found: Mapping[float, Sequence[float]], hover: str
    ) -> None:
        """Draw the fitted `values` as a line, and behind it pale means of the seeds that were `found` at each load."""
        means, hover = [float(np.mean(each)) for each in found.values()], f"{self.full_name}: {hover}<extra></extra>"
        made.add_scatter(
            x=[*found], y=[*map(short, means)], mode="markers", name=f"{self.full_name}, means", showlegend=False,
            marker={"size": 5, "color": self.colour, "opacity": 0.5}, error_y=whiskers(means, [*found.values()]),
            hovertemplate=hover,
        )  # fmt: skip
        made.add_scatter(
            x=[*found], y=[*map(short, values)], mode="lines", name=self.full_name, showlegend=False, hovertemplate=hover,
            line={"color": self.colour, "width": 3 if self.candidate.get("status") == "best" else 1.8},
        )  # fmt: skip

    def mean(self, point: SweepPoint, key: str) -> float | None:
        values = point.values(key, self.seeds or None)
        return float(np.mean(values)) if values else None


@dataclass(frozen=True)
class Curves:
    """The curves of a figure. common: the parts of names that all have; left_out: how many there are beyond
    `MOST_LINES`; unit: of the load."""

    lines: Sequence[LoadCurve]
    common: str
    left_out: int
    unit: str

    def __iter__(self) -> Iterator[LoadCurve]:
        return iter(self.lines)

    def notes(self) -> list[str]:
        """Return what the note of every such figure says."""
        found = names_in_note([line.name for line in self.lines], self.common)
        if self.left_out:
            found.append(f"{self.left_out} more have no line")
        if any(len(point.seeds) > 1 for line in self.lines for point in line.points):
            found.append("whiskers: from the least to the greatest seed")
        return found


def curves(trials: Trials) -> Curves:
    """Return the curves of a plan's candidates, or of a sweep that varies the load.
    Raises ConfigError where no load is varied."""
    found = _of_plan(trials) if trials.question["kind"] == "plan" else _of_sweep(trials)
    shown = found[:MOST_LINES]
    if not shown:
        raise missing(trials.path, "has no deployment at several loads")
    names, common = distinct_parts([name for name, *_ in shown])
    lines = [
        LoadCurve(short or "all", name, colour, loads, points, candidate)
        for short, colour, (name, loads, points, candidate) in zip(names, COLOURS, shown, strict=False)
    ]
    return Curves(lines, common, len(found) - len(shown), load_unit(trials))


def load_key(trials: Trials) -> str:
    """Return the key of the load. Raises ConfigError if it does not vary."""
    if trials.question["kind"] == "plan":
        return str(answer_of(trials)["load_key"])
    key = next((key for key in trials.varied if key in LOADS), None)
    if key is None:
        raise missing(trials.path, f"does not vary a load ({', '.join(LOADS)})")
    return key


def load_unit(trials: Trials) -> str:
    """Return what the loads of the figures are counted in. A plan of a given load tries numbers of engines: its loads
    are those of one engine."""
    unit = UNITS[load_key(trials)]
    return f"{unit} per engine" if _is_per_engine(trials) else unit


def _is_per_engine(trials: Trials) -> bool:
    return trials.question["kind"] == "plan" and answer_of(trials)["load"] is not None


def setting(trials: Trials, point: SweepPoint, key: str, default: Any) -> Any:
    """Return the value that a combination has of a key of the scenario."""
    if key in point.settings:
        return point.settings[key]
    found = value_of(trials.question["scenario"], key)
    return default if found is None else found


def gpus_of(trials: Trials, point: SweepPoint) -> int:
    """Return the devices of all engines of a combination."""
    return sum(gpus_by_name(lambda key: setting(trials, point, key, None)).values())


def _of_sweep(trials: Trials) -> list[Found]:
    key, found = load_key(trials), list[Found]()
    for name, points in trials.lines(key).items():
        known = [point for point in points if key in point.settings]
        if known:
            found.append((name, [float(point.settings[key]) for point in known], known, {}))
    return found


def _of_plan(trials: Trials) -> list[Found]:
    key, found = load_key(trials), list[Found]()
    for one in answer_of(trials)["candidates"]:
        if one["status"] not in SHOWN:
            continue
        by_load: dict[float, list[SweepPoint]] = {}
        for point in trials.points:
            if key in point.settings and all(point.settings.get(name) == is_ for name, is_ in one["settings"].items()):
                engines = setting(trials, point, "hardware.replicas", 1) if _is_per_engine(trials) else 1
                by_load.setdefault(point.settings[key] / engines, []).append(point)
        longest = {load: max(points, key=requests_of) for load, points in sorted(by_load.items())}
        most, kept = 0.0, {}
        for load, point in longest.items():
            if LONGER * requests_of(point) >= most:
                kept[load] = point
            most = max(most, requests_of(point))
        if kept:
            found.append((one["name"], list(kept), list(kept.values()), one))
    return found


def rising(groups: Sequence[Sequence[float]]) -> list[float]:
    """Return the line that never falls and is nearest to the values of each load, by least squares: loads at which the
    mean falls share one (pool adjacent violators). It meets a limit once; means of few seeds cross it again and again.
    """
    pools: list[tuple[float, int, int]] = []  # mean, values, loads
    for values in groups:
        mean, count, loads = float(np.mean(values)), len(values), 1
        while pools and pools[-1][0] > mean:
            before, others, more = pools.pop()
            mean = (before * others + mean * count) / (others + count)
            count, loads = count + others, loads + more
        pools.append((mean, count, loads))
    return [mean for mean, _, loads in pools for _ in range(loads)]


def requests_of(point: SweepPoint) -> float:
    """Return how many requests the longest run of a combination had."""
    return max(point.values("submitted"), default=0.0)
