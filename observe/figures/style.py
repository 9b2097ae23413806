"""The look of figures: one template for light and one for dark surroundings, and the common parts of all figures."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from ...core.errors import ConfigError
from ...core.parsing import ParseError, parse_json
from ..input_files import MAX_FILE_BYTES, read_text

COLOURS = (
    *("#3b82f6", "#f59e0b", "#10b981", "#8b5cf6", "#db2777", "#b45309"),
    *("#06b6d4", "#e879f9", "#15803d", "#c026d3", "#78716c", "#84cc16"),
)
"""Twelve that differ from each other and from `LIMIT`, on light and on dark paper."""
LIMIT = "#ef4444"
FAINT = "#94a3b8"
RAMP = ("#94a3b8", "#bfdbfe", "#93c5fd", "#60a5fa", "#3b82f6", "#2563eb", "#1d4ed8", "#1e3a8a")
"""Of ordered things, such as draft steps."""
LIGHT = ("#1e293b", "#e2e8f0", "#ffffff")  # ink, grid, paper
DARK = ("#e2e8f0", "#334155", "#0f172a")
HEIGHT = 360
NOTE_WIDTH = 130  # characters of a line of a note below an axis, as pictures are wide; a page has notes elsewhere
NOTE_MARK = "<br><span"
# Characters of a line of names, so that at a phone's width (390 px) beside names there is room for points.
NAME_WIDTH = 22
MOST_NAME_LINES = 4


def template(ink: str, grid: str, paper: str) -> go.layout.Template:
    """Return the template of all figures in these colours."""
    axis = {
        "gridcolor": grid, "linecolor": grid, "zeroline": False, "automargin": True, "ticks": "outside", "tickcolor": grid,
        "title": {"font": {"size": 12}}, "tickfont": {"size": 11},
    }  # fmt: skip
    return go.layout.Template(
        layout={
            "font": {"family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", "size": 12, "color": ink},
            "paper_bgcolor": paper, "plot_bgcolor": paper, "colorway": COLOURS, "hovermode": "closest",
            "xaxis": axis, "yaxis": axis, "margin": {"l": 8, "r": 16, "t": 8, "b": 8},
            "legend": {"orientation": "h", "yanchor": "bottom", "y": 1.0, "xanchor": "left", "x": 0, "traceorder": "normal"},
            "title": {"font": {"size": 15}, "x": 0, "xref": "paper", "xanchor": "left"},
            "hoverlabel": {"font": {"size": 12}},
        }
    )  # fmt: skip


def figure(title: str, x: str, y: str, note: str = "", height: int = HEIGHT) -> go.Figure:
    """Return an empty figure. note: how its numbers were made, printed below the axis."""
    made = go.Figure(layout={"template": template(*LIGHT), "title": {"text": title}, "height": height})
    note = note.replace("<br>", " ")
    lines = "<br>".join(textwrap.wrap(note, NOTE_WIDTH))
    small = f"{NOTE_MARK} style='font-size:10px;color:{FAINT}'>{lines}</span>" if note else ""
    made.update_layout(
        meta={"note": note}, margin={"t": 80}, xaxis={"title": {"text": f"{x}{small}"}}, yaxis={"title": {"text": y}}
    )
    return made


def note_of(made: go.Figure, notes: Sequence[str]) -> None:
    """Replace the note of a figure, which may say only what is in it."""
    written = figure("", made.layout.xaxis.title.text or "", "", "; ".join(filter(None, notes)))
    made.update_layout(meta=written.layout.meta, xaxis={"title": {"text": written.layout.xaxis.title.text}})


def whiskers(means: Sequence[float], spans: Sequence[Sequence[float]]) -> dict[str, Any] | None:
    """Return error bars from the least to the greatest of each point's values; None if no point has several."""
    if all(len(values) < 2 for values in spans):
        return None
    up = [max(max(values) - mean, 0.0) for mean, values in zip(means, spans, strict=True)]
    down = [max(mean - min(values), 0.0) for mean, values in zip(means, spans, strict=True)]
    return {"type": "data", "array": up, "arrayminus": down, "symmetric": False, "width": 2, "thickness": 1}


def short(value: float) -> float:
    return float(f"{value:.5g}")


def wrapped(name: str) -> str:
    """Return a name in at most four lines of at most `NAME_WIDTH` characters; a longer name ends with an ellipsis."""
    return "<br>".join(textwrap.wrap(name, NAME_WIDTH, max_lines=MOST_NAME_LINES, placeholder=" …")) or name


def names_beside(made: go.Figure, names: Sequence[str], texts: Sequence[str] | None = None) -> None:
    """Write the names of rows, from the topmost down, beside the y axis in lines, and give each row the
    height that they take. texts: lines that are written in the place of the names."""
    lines = list(texts or [wrapped(name) for name in names])
    row_px = max([30, *(8 + 15 * (1 + text.count("<br>")) for text in lines)])
    made.update_yaxes(categoryorder="array", categoryarray=names[::-1], tickvals=names, ticktext=lines)
    legend = {"xanchor": "right", "x": 1}  # above names and points, not above the points alone
    made.update_layout(height=150 + row_px * max(len(names), 3), legend=legend)


def limit_line(made: go.Figure, xs: tuple[float, float], ys: tuple[float, float], name: str, colour: str) -> None:
    """Draw a dashed line between two points, named in the legend.
    As a curve, so that it is right on a logarithmic axis, too."""
    line = {"dash": "dash", "width": 1.5, "color": colour}
    made.add_scatter(x=xs, y=ys, mode="lines", name=name, line=line, hoverinfo="skip", showlegend=True)


def read_object(path: Any) -> Mapping[str, Any]:
    """Return the JSON object in a file. Raises ConfigError."""
    try:
        found = parse_json(read_text(path, MAX_FILE_BYTES))
    except ParseError as error:
        raise ConfigError.of(str(path), "", f"is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError.of(str(path), "", "is no JSON object")
    return found


def missing(path: Any, problem: str) -> ConfigError:
    """Return the error for a file that lacks data for a figure."""
    return ConfigError.of(str(path), "", problem)
