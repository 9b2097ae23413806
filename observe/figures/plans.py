"""Figures of a plan: what each candidate holds, latencies and cost against the load."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import plotly.graph_objects as go

from .curves import SHOWN, LoadCurve, curves, gpus_of, rising, setting
from .labels import TITLE_PX, LineEnd, distinct_parts, label_ends, mark_limit, names_in_note
from .style import COLOURS, FAINT, figure, missing, names_beside, note_of, short, wrapped
from .trials import MOST_LINES, SweepPoint, Trials, answer_of, as_trials, limit_title

Answer = Mapping[str, Any]

MOST_GPUS_TICKED = 12
OF_LIMIT = 2.0
"""A latency is drawn up to this multiple of its limit."""
STATISTICS = {"p50": "median"}
"""Statistics of limits that have another name in a summary."""
DEPLOYMENTS = 3
"""The cost is drawn up to the load of so many deployments of the best candidate."""
MOST_STEPS = 1 << 10  # of a line of costs


def colours_of(answer: Answer) -> dict[str, str]:
    """Return the colour of each candidate by its name, the same in every figure; candidates without a line are pale."""
    shown = [one["name"] for one in answer["candidates"] if one["status"] in SHOWN]
    return {one["name"]: FAINT for one in answer["candidates"]} | dict(zip(shown, COLOURS, strict=False))


def frontier(trials: Trials | str | PathLike[str]) -> go.Figure:
    """Draw the result of each candidate of a plan: the load that nearly all runs hold, with a whisker to the load that
    half of them hold, or the GPUs that a load needs. Bars are the 80 % intervals of the cost model."""
    answer = answer_of(as_trials(trials))
    found = [one for one in answer["candidates"] if one["status"] != "hopeless"]
    if not found:
        raise missing(as_trials(trials).path, "has no candidate that holds a load")
    greatest, colours = answer["load"] is None, colours_of(answer)
    value, interval = ("load", "load_interval") if greatest else ("gpus", "gpus_interval")
    x = f"greatest load, {answer['load_unit']}" if greatest else f"GPUs for {answer['load']:g} {answer['load_unit']}"
    names, common = distinct_parts([one["name"] for one in found])
    bars = [(one["name"], ends) for one in found if (ends := one.get(interval)) and None not in ends]
    made = figure("What each candidate holds" if greatest else "GPUs that each candidate needs", x, "")
    if bars:
        made.add_bar(
            x=[high - low for _, (low, high) in bars], base=[low for _, (low, _) in bars], y=[name for name, _ in bars],
            orientation="h", width=0.5, marker={"color": FAINT, "opacity": 0.3}, showlegend=False,
            customdata=[f"{low:.4g} to {high:.4g}" for _, (low, high) in bars],
            hovertemplate="%{y}: %{customdata} (80 %)<extra></extra>",
        )  # fmt: skip
    for one in found:
        colour, width = colours[one["name"]], _to_half(one) if greatest else 0.0
        is_behind = one["status"] in ("behind", "dropped")
        taken = f"{one['tightest']} at {one['taken']:.0%} of its limit" if one["taken"] else ""
        made.add_scatter(
            x=[one[value]], y=[one["name"]], mode="markers", showlegend=False, customdata=[taken],
            error_x={"array": [width], "arrayminus": [0], "thickness": 2, "width": 5} if width else None,
            marker={"color": colour, "size": 11, "symbol": "circle-open" if is_behind else "circle", "line": {"width": 2, "color": colour}},
            hovertemplate="%{y}: %{x:.4~g}<br>%{customdata}<extra></extra>",
        )  # fmt: skip
    texts = [
        f"{wrapped(f'{_mark(one, place)} {name}')}<br><b>{_value(one, value)}</b>"
        for place, (one, name) in enumerate(zip(found, names, strict=True), 1)
    ]
    names_beside(made, [one["name"] for one in found], texts)
    made.update_layout(margin={"t": TITLE_PX})
    note_of(made, _notes_of_rows(found, common, greatest, bool(bars)))
    made.update_xaxes(rangemode="tozero")
    if not greatest and max((one["gpus"] or 0 for one in found), default=0) <= MOST_GPUS_TICKED:
        made.update_xaxes(dtick=1)
    return made


def _mark(one: Mapping[str, Any], place: int) -> str:
    """Return the mark of the table that `plan` prints."""
    return {"equal": "=", "dropped": "·"}.get(one["status"], f"{place}.")


def _value(one: Mapping[str, Any], key: str) -> str:
    return f"{'≈ ' if one['status'] == 'dropped' else ''}{one[key]:.3g}"


def _to_half(one: Mapping[str, Any]) -> float:
    """Return how much more load half of the runs hold than nearly all of them."""
    half, load = one.get("half_load"), one["load"]
    return max(0.0, float(half) - float(load)) if half else 0.0


def _notes_of_rows(found: Sequence[Mapping[str, Any]], common: str, greatest: bool, has_bars: bool) -> list[str]:
    statuses = {one["status"] for one in found}
    lines = {
        **dict.fromkeys(names_in_note([one["name"] for one in found], common), len(found) > 1),
        "= no clear difference from the best": "equal" in statuses,
        "open: behind the best": "behind" in statuses,
        "·, pale: dropped after the rough first round": "dropped" in statuses,
        "whiskers: to the load that half of the runs hold": greatest and any(map(_to_half, found)),
        "bars: 80 % interval if times are not as simulated": has_bars,
    }
    return [text for text, is_shown in lines.items() if is_shown]


# -- against the load -------------------------------------------------------------------------------------------------


def latency_limits(answer: Answer) -> list[Mapping[str, Any]]:
    """Return the limits of a plan that are times."""
    return [one for one in answer["limits"] if one.get("limit_ms") is not None]


def attainment_limit(answer: Answer) -> float | None:
    """Return the share of requests that a plan wants within the limits of each; None if it limits no share."""
    return next((one["share"] for one in answer["limits"] if one.get("share") is not None), None)


def latency_against_load(trials: Trials | str | PathLike[str], limit: Mapping[str, Any] | None = None) -> go.Figure:
    """Draw a limited latency of a plan's candidates against the load, and the limit. The best candidate has a band, the
    80 % interval of the latency that limits it. limit: one of the answer's; default: the first."""
    trials = as_trials(trials)
    limits = latency_limits(answer_of(trials)) if limit is None else [limit]
    if not limits:
        raise missing(trials.path, "limits no latency")
    limited = limits[0]
    shown = curves(trials)
    what, most = limit_title(limited["name"]), OF_LIMIT * limited["limit_ms"]
    made = figure(f"{what} against load", f"load, {shown.unit}", f"{what}, ms")
    ends: list[LineEnd] = []
    notes = shown.notes()
    for line in shown:
        found = {load: point.values(limited["key"]) for load, point in zip(line.loads, line.points, strict=True)}
        known = {load: values for load, values in found.items() if values}
        if not known:
            continue
        loads, values = list(known), rising([*known.values()])
        factors = taken_factors(line, limited["key"])
        if factors is not None:
            low, high = ([short(value * factor) for value in values] for factor in factors)
            add_band(made, [*loads, *loads[::-1]], [*low, *high[::-1]], line.colour)
            notes.append("band: 80 % interval of the best")
        line.draw(made, values, known, "%{y:.4~g} ms at %{x:.4~g}")
        inside = [(load, value) for load, value in zip(loads, values, strict=True) if value <= most]
        ends.append(LineEnd(line.name, line.colour, *(inside[-1] if inside else (loads[0], most))))
    if not ends:
        raise missing(trials.path, f"has no run with {limited['key']}")
    first, last = min(line.loads[0] for line in shown), max(end.x for end in ends)
    highest = max(limited["limit_ms"], *(end.y for end in ends))
    margin = 0.03 * (last - first) or 0.05 * last
    label_ends(made, ends, (first - margin, last + margin), (0, 1.08 * highest))
    mark_limit(made, f"limit {limited['limit_ms']:g} ms", limited["limit_ms"])
    note_of(made, ["a point for each load that was tried; the line never falls", *notes])
    return made


def taken_factors(line: LoadCurve, key: str) -> tuple[float, float] | None:
    """Return the ends of the best candidate's 80 % interval of the number `key`, as factors on it; None for other
    candidates, and if another limit is the tightest."""
    one = line.candidate
    latency, _, statistic = (one.get("tightest") or "").rpartition("_")
    is_limit = key == f"{STATISTICS.get(statistic, statistic)}_{latency}_ms"
    if one.get("status") != "best" or not is_limit or not one.get("taken_interval"):
        return None
    low, high = one["taken_interval"]
    return low / one["taken"], high / one["taken"]


def add_band(made: go.Figure, xs: Sequence[float], ys: Sequence[float], colour: str) -> None:
    """Shade an 80 % interval, given by the corners of its area."""
    made.add_scatter(
        x=xs, y=ys, mode="none", fill="toself", fillcolor=colour, opacity=0.2, name="80 % interval of the best",
        showlegend=False, hoverinfo="skip",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LargerDeployment:
    """The least that is added to serve more load: its cost per hour (or its GPUs), the load that it holds, and the
    80 % interval of this load if that is known."""

    cost: float
    load: float
    interval: tuple[float, float] | None

    @classmethod
    def of(cls, trials: Trials, one: Mapping[str, Any], is_priced: bool) -> LargerDeployment:
        """Return that of a candidate: the GPUs of its row; of a plan for a given load one engine."""
        price = one["bill"]["planned"] * one["tokens_per_s"] * 3600 / 1e6 / one["gpus"] if is_priced else 1.0
        asked = answer_of(trials)["load"]
        low, high = one.get("load_interval" if asked is None else "gpus_interval") or (None, None)
        known = (float(low), float(high)) if low and high else None
        if asked is None:
            return cls(price * one["gpus"], one["load"], known)
        gpus = _gpus_of_unit(trials, one)
        ends = None if known is None else (asked * gpus / known[1], asked * gpus / known[0])
        return cls(price * gpus, asked * gpus / one["gpus"], ends)

    def stairs(self, most: float, load: float | None = None) -> tuple[list[float], list[float]]:
        """Return the corners of the cost by load, up to `most`. load: the load of one, if it is not `self.load`."""
        load = load or self.load
        count = min(math.ceil(most / load - 1e-9), MOST_STEPS)
        corners = [(min(place * load, most), step) for step in range(1, count + 1) for place in (step - 1, step)]
        return [short(x) for x, _ in corners], [short(step * self.cost) for _, step in corners]


def _gpus_of_unit(trials: Trials, one: Mapping[str, Any]) -> int:
    """Return the GPUs of the smallest deployment of a candidate: of one engine, or of prefill and decode engines."""
    ratio = setting(trials, SweepPoint(one["settings"]), "disaggregation.ratio", None)
    unit = sum(map(int, ratio.split(":"))) if ratio else 1
    return gpus_of(trials, SweepPoint({**one["settings"], "hardware.replicas": unit}))


def cost_against_load(trials: Trials | str | PathLike[str]) -> go.Figure:
    """Draw what it costs to serve each load with whole deployments of each candidate: the price per hour, or the GPUs
    if not every candidate has a price.

    So many deployments are taken that each has at most the load that the plan has found for it. The band is the 80 %
    interval of the best candidate's load.
    """
    trials = as_trials(trials)
    answer = answer_of(trials)
    shown = [one for one in answer["candidates"] if one["status"] in SHOWN and one["load"]][:MOST_LINES]
    if not shown:
        raise missing(trials.path, "has no candidate that holds a load")
    colours, (names, common) = colours_of(answer), distinct_parts([one["name"] for one in shown])
    is_priced = all(one["bill"] is not None for one in shown)
    what, y = ("Cost", "price per hour") if is_priced else ("GPUs", "GPUs")
    made = figure(f"{what} against load", f"load, {answer['load_unit']}", y)
    parts = [LargerDeployment.of(trials, one, is_priced) for one in shown]
    most = max(DEPLOYMENTS * parts[0].load, 1.2 * (answer["load"] or 0.0))
    ends, notes = list[LineEnd](), names_in_note(names, common)
    if parts[0].interval is not None:
        (low_x, low_y), (high_x, high_y) = (parts[0].stairs(most, end) for end in parts[0].interval)
        add_band(made, [*low_x, *high_x[::-1]], [*low_y, *high_y[::-1]], COLOURS[0])
        notes.append("band: 80 % interval of the best")
    for one, part, name in zip(shown, parts, names, strict=True):
        xs, ys = part.stairs(most)
        made.add_scatter(
            x=xs, y=ys, mode="lines", name=one["name"], showlegend=False,
            line={"color": colours[one["name"]], "width": 1.8 if ends else 3},
            hovertemplate=f"{one['name']}: %{{y:.4~g}} at %{{x:.4~g}}<extra></extra>",
        )  # fmt: skip
        ends.append(LineEnd(name, colours[one["name"]], xs[-1], ys[-1]))
    label_ends(made, ends, (0, most), (0, 1.08 * max(end.y for end in ends)))
    note_of(made, ["as many deployments as hold the load in equal shares", *notes])
    return made
