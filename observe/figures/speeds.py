"""Figures of a sweep or a plan against what users see: tokens per second of a GPU against those of a user, and the
share of requests within the SLO against the load."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import plotly.graph_objects as go

from .curves import LoadCurve, curves, gpus_of, load_key, requests_of, rising
from .labels import LineEnd, label_ends, mark_limit, mark_region
from .plans import add_band, attainment_limit, latency_limits, taken_factors
from .style import COLOURS, figure, missing, note_of, short, whiskers
from .trials import SweepPoint, Trials, answer_of, as_trials, limit_title

WITHIN = 0.99
"""Of a sweep with an SLO a point is within it if so many requests keep every limit, as for `Result.meets_slo`."""
MEAN_TPOT = "mean_tpot_ms"


@dataclass(frozen=True, slots=True)
class SpeedLimits:
    """What bounds the points of a figure. tpot_key: the statistic of TPOT that gives the speed of a user; tpot_ms: its
    limit, None if there is none; holds: whether a combination keeps every limit."""

    tpot_key: str
    tpot_ms: float | None
    holds: Callable[[SweepPoint], bool]

    @property
    def users(self) -> str:
        """The users whose speed the statistic gives, in words."""
        share = self.tpot_key.partition("_")[0]
        if share.startswith("p"):
            return f"the speed that {share.removeprefix('p')} % of users have at least"
        return "the speed that half of the users have at least" if share == "median" else "the mean over users"


def limits_of(trials: Trials) -> SpeedLimits:
    """Return the limits of a plan, or those of the scenario's SLO, which hold for each request."""
    if trials.question["kind"] == "plan":
        limited, share = latency_limits(answer_of(trials)), attainment_limit(answer_of(trials))
        tpot = next((one for one in limited if one["key"].endswith("_tpot_ms")), None)

        def keeps(point: SweepPoint) -> bool:
            attained = point.values("slo_attainment") or [0.0]
            is_short = share is not None and float(np.mean(attained)) < share
            return not (point.is_overloaded or is_short) and all(
                (values := point.values(one["key"])) and float(np.mean(values)) <= one["limit_ms"] for one in limited
            )

        return SpeedLimits(tpot["key"] if tpot else MEAN_TPOT, tpot["limit_ms"] if tpot else None, keeps)
    slo: Mapping[str, Any] = trials.question["scenario"].get("slo") or {}

    def attains(point: SweepPoint) -> bool:
        return not point.is_overloaded and all(share >= WITHIN for share in point.values("slo_attainment"))

    limit_ms = slo.get("tpot_ms")
    return SpeedLimits("p99_tpot_ms" if limit_ms else MEAN_TPOT, limit_ms, attains)


def throughput_per_gpu(trials: Trials | str | PathLike[str]) -> go.Figure:
    """Draw output tokens per second of each GPU against the tokens per second of a user, a line for each deployment
    along the load; with the region of the SLO if it limits TPOT.

    A user's speed is 1 / TPOT: of the statistic that is limited, else of the mean. Open circles keep not every limit.
    """
    trials = as_trials(trials)
    shown, limits = curves(trials), limits_of(trials)
    made = figure(
        "Throughput of a GPU against the speed of a user", "tokens/s per user", "output tokens/s per GPU", height=420
    )
    ends: list[LineEnd] = []
    notes = [limits.users, *shown.notes(), "to the left: more load"]
    if any(not limits.holds(point) for line in shown for point in line.points):
        notes.append(
            "open circles: a limit is exceeded" if limits.tpot_ms or trials.answer else "open circles: overloaded"
        )
    for line in shown:
        end = _add_speeds(made, trials, line, limits)
        ends += [end] if end is not None else []
    if not ends:
        raise missing(trials.path, f"has no run with {limits.tpot_key}")
    if any(one.fill for one in made.data):
        notes.append("band: 80 % interval of the best")
    fastest, most = (max(value for one in made.data for value in one[axis]) for axis in "xy")
    label_ends(made, ends, (0, 1.04 * fastest), (0, 1.08 * most))
    if limits.tpot_ms is not None and 1e3 / limits.tpot_ms < fastest:
        what = limit_title(f"tpot_{limits.tpot_key.partition('_')[0]}")
        mark_region(made, f"{what} below<br>{limits.tpot_ms:g} ms", 1e3 / limits.tpot_ms, COLOURS[2])
    note_of(made, notes)
    return made


def _add_speeds(made: go.Figure, trials: Trials, line: LoadCurve, limits: SpeedLimits) -> LineEnd | None:
    """Draw the line of a deployment and return its end, at the least load; None if no run has a TPOT."""
    rows = [
        (load, point, line.mean(point, limits.tpot_key), _tokens_per_s(trials, line, point))
        for load, point in zip(line.loads, line.points, strict=True)
    ]
    known = [
        (load, point, 1e3 / tpot, tokens / gpus_of(trials, point))
        for load, point, tpot, tokens in rows
        if tpot and tokens
    ]
    if not known:
        return None
    loads, points, speeds, per_gpu = zip(*known, strict=True)
    spans = [[1e3 / value for value in point.values(limits.tpot_key)] for point in points]
    factors = taken_factors(line, limits.tpot_key) if limits.tpot_ms is not None else None
    if factors is not None:
        slow, fast = ([short(speed / factor) for speed in speeds] for factor in reversed(factors))
        add_band(made, [*slow, *fast[::-1]], [*per_gpu, *per_gpu[::-1]], line.colour)
    made.add_scatter(
        x=[*map(short, speeds)], y=[*map(short, per_gpu)], mode="lines+markers", name=line.full_name, showlegend=False,
        line={"color": line.colour, "width": 3 if line.candidate.get("status") == "best" else 1.8},
        marker={"size": 7, "symbol": ["circle" if limits.holds(point) else "circle-open" for point in points]},
        error_x=whiskers(speeds, spans), customdata=[f"load {load:.4g}" for load in loads],
        hovertemplate=f"{line.full_name}, %{{customdata}}<br>%{{x:.4~g}} tokens/s per user, %{{y:.4~g}} per GPU<extra></extra>",
    )  # fmt: skip
    fastest = int(np.argmax(speeds))
    return LineEnd(line.name, line.colour, speeds[fastest], per_gpu[fastest])


def _tokens_per_s(trials: Trials, line: LoadCurve, point: SweepPoint) -> float | None:
    """Return the output tokens per second of all engines.

    A load that is served gives the tokens of its arrivals: a run's own throughput counts its ramp and its drain, too.
    Those of a trace are in proportion to its speed, by the longest run; parts of it that other runs took are denser.
    """
    key, own = load_key(trials), line.mean(point, "output_throughput")
    outputs = line.mean(point, "mean_output_tokens")
    if key == "workload.rate" and outputs is not None and not point.is_overloaded:
        return float(point.settings[key]) * outputs
    if key == "workload.rate_scale":
        served = [one for one in line.points if not one.is_overloaded and line.mean(one, "output_throughput")]
        if served and not point.is_overloaded:
            longest = max(served, key=requests_of)
            of_trace = (line.mean(longest, "output_throughput") or 0.0) / float(longest.settings[key])
            return float(point.settings[key]) * of_trace
        return own if requests_of(point) == max(map(requests_of, line.points)) else None
    return own


def attainment_against_load(trials: Trials | str | PathLike[str]) -> go.Figure:
    """Draw the share of requests that keep every limit of the scenario's SLO against the load, with the share that a
    plan wants. Raises ConfigError where the runs have no SLO."""
    trials = as_trials(trials)
    shown = curves(trials)
    made = figure("Requests within the SLO against load", f"load, {shown.unit}", "share within the SLO")
    ends: list[LineEnd] = []
    for line in shown:
        points = [
            (load, point) for load, point in zip(line.loads, line.points, strict=True) if point.values("slo_attainment")
        ]
        if not points:
            continue
        loads, shares = [load for load, _ in points], [point.values("slo_attainment") for _, point in points]
        values = [-value for value in rising([[-share for share in each] for each in shares])]
        line.draw(made, values, dict(zip(loads, shares, strict=True)), "%{y:.2%} at %{x:.4~g}")
        ends.append(LineEnd(line.name, line.colour, loads[-1], values[-1]))
    if not ends:
        raise missing(trials.path, "has no share of requests within an SLO: the scenario sets none (slo.ttft_ms, …)")
    first, last = min(line.loads[0] for line in shown), max(end.x for end in ends)
    margin = 0.03 * (last - first) or 0.05 * last
    lowest = min(value for one in made.data for value in one.y)
    label_ends(made, ends, (first - margin, last + margin), (max(math.floor(10 * lowest - 1) / 10, 0), 1.01))
    wanted = attainment_limit(trials.answer or {"limits": ()})
    if wanted is not None:
        mark_limit(made, f"limit {wanted * 100:g} %", wanted)
    made.update_yaxes(tickformat=".0%")
    slo = {
        name.removesuffix("_ms").upper(): limit
        for name, limit in (trials.question["scenario"].get("slo") or {}).items()
        if limit and name.endswith("_ms")
    }
    note_of(
        made,
        [
            ", ".join(f"{name} below {limit:g} ms" for name, limit in slo.items() if isinstance(limit, int | float)),
            *shown.notes(),
        ],
    )
    return made
