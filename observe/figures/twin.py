"""Figures of the twin: predictions of the simulator against measurements of the real executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from ..measuring.summary import LEAST_PROCESSOR_SHARE, SHORT_NAMES
from .style import COLOURS, FAINT, figure, missing, read_object

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")


class Twin:
    """What `foredraft bench --twin --json` has written. Raises ConfigError for another file."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path: Path = Path(path)
        found = read_object(path)
        comparisons = found.get("comparisons")
        if not isinstance(comparisons, list) or not all(
            isinstance(one, dict) and "metrics" in one for one in comparisons
        ):
            raise missing(path, "is no record of foredraft bench --twin --json (no comparisons with metrics)")
        self.version: Any | None = found.get("foredraft")
        self.device: str = str(found.get("device"))
        self.clock: str = str(found.get("clock"))
        self.comparisons: Sequence[Mapping[str, Any]] = comparisons
        self.measured: Sequence[Mapping[str, Any]] = [
            one
            for one in comparisons
            if self.clock != "wall" or one.get("processor_share", 1.0) >= LEAST_PROCESSOR_SHARE
        ]
        self.loads: list[str] = list(dict.fromkeys(one["load"] for one in comparisons))
        self.arms: list[str] = list(dict.fromkeys(one["arm"] for one in comparisons))


def as_twin(twin: Twin | str | PathLike[str]) -> Twin:
    return twin if isinstance(twin, Twin) else Twin(twin)


def _check_measured(twin: Twin) -> None:
    if not twin.measured:
        raise missing(twin.path, "has nothing that counts as measured: other work ran on the machine")


def predicted_against_measured(twin: Twin | str | PathLike[str]) -> go.Figure:
    """Draw every latency of every way and load: predicted above measured, and the line on which both are equal."""
    twin = as_twin(twin)
    note = "on the line both are equal; whiskers: half the range of repeated runs"
    made = figure("Predicted against measured latencies", "measured, ms", "predicted, ms", note, 460)
    _check_measured(twin)
    points = [
        (one, key, found)
        for one in twin.measured
        for key, found in one["metrics"].items()
        if key.endswith("_ms") and found["measured"] and found["predicted"]
    ]
    if points:
        ends = [
            scale * value for scale, of in ((0.8, min), (1.25, max)) for value in [of(p[2]["measured"] for p in points)]
        ]
        made.add_scatter(
            x=ends, y=ends, mode="lines", line={"color": FAINT, "dash": "dot"}, hoverinfo="skip", showlegend=False
        )
    for load, colour in zip(twin.loads, COLOURS, strict=False):
        shown = [point for point in points if point[0]["load"] == load]
        made.add_scatter(
            x=[found["measured"] for *_, found in shown], y=[found["predicted"] for *_, found in shown], mode="markers", name=load,
            error_x=_whiskers([(found["noise"] or 0) * found["measured"] for *_, found in shown]),
            marker={"color": colour, "size": 8, "symbol": [SYMBOLS[twin.arms.index(one["arm"]) % len(SYMBOLS)] for one, *_ in shown]},
            customdata=[f"{one['arm']}, {SHORT_NAMES.get(key, key)}: {found['error']:+.1%}" for one, key, found in shown],
            hovertemplate=f"{load}, %{{customdata}}<br>measured %{{x:.4~g}} ms, predicted %{{y:.4~g}} ms<extra></extra>", showlegend=True,
        )  # fmt: skip
    made.update_xaxes(type="log", dtick=1, minor={"ticks": "outside", "ticklen": 3})
    made.update_yaxes(type="log", dtick=1, minor={"ticks": "outside", "ticklen": 3})
    return made


def _whiskers(widths: Sequence[float]) -> Mapping[str, Any]:
    return {"type": "data", "array": list(widths), "thickness": 1, "width": 2}


def errors(twin: Twin | str | PathLike[str]) -> go.Figure:
    """Draw the error of every prediction, and as whiskers the noise of the measurement."""
    twin = as_twin(twin)
    note = "a point per way to decode; whiskers: half the range of repeated runs; right: predicted too much"
    _check_measured(twin)
    made = figure("Error of the prediction", "error", "", note, 480)
    for load, colour in zip(twin.loads, COLOURS, strict=False):
        shown = [
            (one, key, one["metrics"][key])
            for key in SHORT_NAMES
            for one in twin.measured
            if one["load"] == load and key in one["metrics"] and one["metrics"][key]["error"] is not None
        ]
        made.add_scatter(
            x=[found["error"] for *_, found in shown],
            y=[SHORT_NAMES[key] for _, key, _ in shown], mode="markers", name=load, showlegend=True,
            error_x=_whiskers([found["noise"] or 0 for *_, found in shown]),
            marker={"color": colour, "size": 8, "symbol": [SYMBOLS[twin.arms.index(one["arm"]) % len(SYMBOLS)] for one, *_ in shown]},
            customdata=[one["arm"] for one, *_ in shown],
            hovertemplate=f"{load}, %{{customdata}}, %{{y}}: %{{x:+.1%}}<extra></extra>",
        )  # fmt: skip
    made.add_vline(x=0, line={"color": FAINT, "width": 1})
    made.update_xaxes(tickformat="+.0%")
    made.update_yaxes(categoryorder="array", categoryarray=list(reversed(SHORT_NAMES.values())))
    return made


def batch_over_time(twin: Twin | str | PathLike[str], load: str | None = None) -> go.Figure:
    """Draw the mean batch in tenths of the runs at one load (default: the last), predicted dotted, measured solid."""
    twin = as_twin(twin)
    load = twin.loads[-1] if load is None and twin.loads else load
    if load not in twin.loads:
        raise missing(twin.path, f"has no load {load!r}; it has {', '.join(twin.loads) or 'none'}")
    shown = [one for one in twin.measured if one["load"] == load]
    if not shown:
        raise missing(twin.path, f"has no measurement at the load {load}: other work ran on the machine")
    made = figure(
        f"Batch over time, {load}",
        "tenth of the run",
        "requests decoded together",
        "solid: measured; dotted: predicted",
    )
    for one, colour in zip(shown, COLOURS * 4, strict=False):
        for side, dash in (("measured", "solid"), ("predicted", "dot")):
            values = one["batch"][side]
            made.add_scatter(
                x=list(range(1, len(values) + 1)), y=[float(f"{value:.4g}") for value in values], name=one["arm"], legendgroup=one["arm"],
                mode="lines", line={"color": colour, "dash": dash, "width": 2}, showlegend=side == "measured",
                hovertemplate=f"{one['arm']}, {side}: %{{y:.3~g}}<extra></extra>",
            )  # fmt: skip
    made.update_yaxes(rangemode="tozero")
    return made
