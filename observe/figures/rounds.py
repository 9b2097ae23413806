"""The waterfall of a decode round: what its time is made of."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

import plotly.graph_objects as go

from ...core.errors import count_of
from .run import StoredRun, as_run
from .style import COLOURS, FAINT, figure, missing, names_beside, note_of, short
from .trials import Trials, answer_of

Bar = tuple[str, float, float, str]  # name, start and length in microseconds, colour

DEVICE, HOST, WHOLE = COLOURS[0], COLOURS[1], FAINT
ROUND = "round"
TEXT_ROOM = 1.3  # times the longest round: what stands right of bars has room, at a phone's width, too
MS_FROM_US = 10_000


def round_waterfall(source: StoredRun | Trials | str | PathLike[str]) -> go.Figure:
    """Draw the parts of a run's mean round one after the other, the scheduler's time on the host, and the round with
    its 80 % interval. source: a run, or a plan, of which it is the best candidate's."""
    if isinstance(source, Trials):
        best = [one for one in answer_of(source)["candidates"] if one["status"] == "best"]
        if not best or "round_whole_us" not in (best[0].get("round") or {}):
            raise missing(source.path, "has no round of a best candidate: nothing holds, or an earlier version made it")
        return waterfall({best[0]["name"]: best[0]["round"]})
    run = as_run(source)
    return waterfall({run.path.name: round_of(run)})


def round_of(run: StoredRun) -> Mapping[str, Any]:
    """Return the mean round in the summary of a run. Raises ConfigError if there is none."""
    if "round_whole_us" not in run.summary:
        why = "an earlier version made the run, or no round decoded"
        raise missing(run.path / "summary.json", f"has no round_whole_us: {why}")
    return run.summary


def waterfall(rounds: Mapping[str, Mapping[str, Any]]) -> go.Figure:
    """Draw one round, or two beside each other, given by their names."""
    bars = {name: _bars(one) for name, one in rounds.items()}
    longest = max(start + length for rows in bars.values() for _, start, length, _ in rows)
    unit, scale = ("ms", 1e-3) if longest >= MS_FROM_US else ("µs", 1.0)
    made = figure("Where the time of a round goes", unit, "")
    most_parts_first = sorted(bars.values(), key=len, reverse=True)
    parts = dict.fromkeys(name for rows in most_parts_first for name, *_ in rows[:-1])
    names = [*parts, ROUND]
    for place, (name, rows) in reversed([*enumerate(bars.items())]):  # the first is the topmost
        for shown, whisker in ((rows[:-1], None), (rows[-1:], _whisker(rounds[name], scale))):
            made.add_bar(
                orientation="h", name=name, offsetgroup=place, legendgroup=name, y=[row for row, *_ in shown],
                base=[short(scale * start) for _, start, _, _ in shown],
                x=[short(scale * length) for _, _, length, _ in shown],
                marker={"color": [colour for *_, colour in shown] if len(bars) == 1 else COLOURS[place]},
                text=[_written(scale * length) for _, _, length, _ in shown], cliponaxis=False,
                textposition="inside" if whisker else "outside", insidetextanchor="start", error_x=whisker,
                hovertemplate=f"{name}, %{{y}}: %{{x:,.4~g}} {unit}<extra></extra>",
                showlegend=len(bars) > 1 and len(shown) > 1,
            )  # fmt: skip
    names_beside(made, names)
    made.update_xaxes(range=[0, TEXT_ROOM * scale * longest])
    made.update_layout(
        barmode="group",
        bargap=0.25,
        legend={"traceorder": "reversed"},
        height=150 + (24 if len(bars) == 1 else 38) * len(names),
    )
    notes = [f"{name}: {_about(one)}" if len(bars) > 1 else _about(one) for name, one in rounds.items()]
    if any(one.get("round_whole_us_interval") for one in rounds.values()):
        notes.append("whisker: 80 % interval of the round")
    note_of(made, notes)
    return made


def _bars(one: Mapping[str, Any]) -> list[Bar]:
    """Return the bars of a round, the topmost first."""
    at_us, found = 0.0, []
    for part, length_us in _parts_us(one).items():
        found.append((part, at_us, length_us, DEVICE))
        at_us += length_us
    host = ("host, beside it", 0.0) if one["round_overlapped"] else ("host, after it", at_us)
    return [*found, (*host, one["round_host_us"], HOST), (ROUND, 0.0, one["round_whole_us"], WHOLE)]


def _parts_us(one: Mapping[str, Any]) -> dict[str, float]:
    """Return the parts of a round on the device by their names."""
    named = {key: value for key, value in one.items() if key.startswith("round_part_")}
    return {key.removeprefix("round_part_").removesuffix("_us").replace("_", " "): us for key, us in named.items()}


def _whisker(one: Mapping[str, Any], scale: float) -> dict[str, Any] | None:
    """Return the error bar of a round: its 80 % interval; None if that is not known."""
    if not one.get("round_whole_us_interval"):
        return None
    low, high = one["round_whole_us_interval"]
    up, down = scale * (high - one["round_whole_us"]), scale * (one["round_whole_us"] - low)
    return {"type": "data", "array": [up], "arrayminus": [down], "symmetric": False, "width": 4}


def _written(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _about(one: Mapping[str, Any]) -> str:
    steps = f"{count_of(one['round_steps'], 'draft step')}, " if one["round_steps"] else ""
    return (
        f"{count_of(one['round_batch'], 'request')} with {one['round_context']:,} tokens of context, {steps}"
        f"{one.get('accept_length') or 1.0:.2f} tokens for each request"
    )
