"""Names at the ends of lines, in the place of a legend: each beside its line, none over another."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from .style import HEIGHT, LIMIT, MOST_NAME_LINES

END_WIDTH = 20  # characters of a line of a name: at a phone's width (390 px) more than half is left for the lines
LETTER_PX, LINE_PX, GAP_PX = 6.4, 13, 4
TITLE_PX = 56
AROUND_PX = 150  # of a figure's height: title, axis and note
LEAST_SPAN = 1e-9
EQUAL = 0.03  # of the axis: ends that are nearer to each other count as equally high


@dataclass(frozen=True, slots=True)
class LineEnd:
    """The end of a line, in the numbers of its axes, and what is written beside it."""

    name: str
    colour: str
    x: float
    y: float


def distinct_parts(names: Sequence[str]) -> tuple[list[str], str]:
    """Return names without the parts, divided by commas, that all of them have; and these parts.

    A name that has no other part stays whole, and so do the others.
    """
    split = [name.split(", ") for name in names]
    common = [part for part in split[0] if all(part in parts for parts in split)] if len(split) > 1 else []
    shorter = [", ".join(part for part in parts if part not in common) for parts in split]
    return (shorter, ", ".join(common)) if all(shorter) else (list(names), "")


def names_in_note(names: Sequence[str], common: str) -> list[str]:
    """Return what the note says of the names of lines: that of a line that is alone, or what all names have."""
    if len(names) == 1:
        return [names[0]]
    return [f"all: {common}"] if common else []


def label_ends(made: go.Figure, ends: Sequence[LineEnd], xs: tuple[float, float], ys: tuple[float, float]) -> None:
    """Write the names of lines right of the axes, each at the height of its line's end, or as near to it as the others
    let it; a thin line leads there. A line that is alone needs no name. `xs` and `ys`: the ranges of the axes, which
    are set to them.

    The order from the top is that of the ends, and of equal heights the leftmost first, so that few leads cross. Makes
    the figure higher if the names need it.
    """
    is_log = [made.layout[f"{axis}axis"].type == "log" for axis in "xy"]
    made.update_xaxes(range=[_place(x, is_log[0]) for x in xs])
    low, high = (_place(y, is_log[1]) for y in ys)
    made.update_yaxes(range=[low, high])
    made.update_layout(showlegend=False, margin={"t": TITLE_PX})
    if len(ends) < 2:
        return
    order = _ordered(ends, lambda end: _place(end.y, is_log[1]), EQUAL * (high - low))
    texts = [textwrap.wrap(end.name, END_WIDTH, max_lines=MOST_NAME_LINES, placeholder=" …") for end in order]
    heights = [LINE_PX * len(lines) + GAP_PX for lines in texts]
    height = max(made.layout.height or HEIGHT, AROUND_PX + sum(heights))
    px = max(high - low, LEAST_SPAN) / (height - AROUND_PX)
    middles = _apart([_place(end.y, is_log[1]) for end in order], [one * px for one in heights], low, high)
    for end, lines, middle in zip(order, texts, middles, strict=True):
        made.add_annotation(
            text="<br>".join(lines), x=1, xref="x domain", xanchor="left", xshift=5, y=middle, yanchor="middle",
            align="left", showarrow=False, font={"size": 11, "color": end.colour},
        )  # fmt: skip
        made.add_shape(
            type="line", x0=end.x, y0=end.y, x1=xs[1], y1=10**middle if is_log[1] else middle, layer="below",
            line={"color": end.colour, "width": 1, "dash": "dot"}, opacity=0.5,
        )  # fmt: skip
    right = round(max(len(line) for lines in texts for line in lines) * LETTER_PX) + 12
    made.update_layout(height=height, margin={"r": right})


def _ordered(ends: Sequence[LineEnd], height: Callable[[LineEnd], float], equal: float) -> list[LineEnd]:
    """Return ends from the highest down; of those within `equal` below the highest of them the leftmost first."""
    left, found = sorted(ends, key=lambda end: -height(end)), []
    while left:
        alike = [end for end in left if height(end) >= height(left[0]) - equal]
        found += sorted(alike, key=lambda end: end.x)
        left = left[len(alike) :]
    return found


def mark_limit(made: go.Figure, text: str, y: float) -> None:
    """Draw a dashed line across the axes at the height `y`, with words above its left end."""
    place = _place(y, made.layout.yaxis.type == "log")
    made.add_hline(y=y, line={"dash": "dash", "width": 1.5, "color": LIMIT})
    made.add_annotation(
        text=text, x=0, xref="x domain", xanchor="left", xshift=4, y=place, yanchor="bottom", showarrow=False,
        font={"size": 11, "color": LIMIT},
    )  # fmt: skip


def mark_region(made: go.Figure, text: str, x: float, colour: str) -> None:
    """Shade what lies right of `x`, and write words at its bottom."""
    made.add_vrect(x0=x, x1=made.layout.xaxis.range[1], fillcolor=colour, opacity=0.1, line_width=0, layer="below")
    made.add_vline(x=x, line={"dash": "dash", "width": 1.5, "color": colour})
    made.add_annotation(
        text=text, x=x, xanchor="left", xshift=4, y=0, yref="y domain", yanchor="bottom", showarrow=False, align="left",
        font={"size": 11, "color": colour},
    )  # fmt: skip


def _place(value: float, is_log: bool) -> float:
    """Return where a value stands on its axis."""
    return math.log10(value) if is_log else value


def _apart(wanted: Sequence[float], heights: Sequence[float], low: float, high: float) -> list[float]:
    """Return places from the top down, as near as can be to the `wanted` ones, of which no two are nearer to each other
    than half of their heights. None reaches over an end where there is room.

    Neighbours that would overlap are one block, whose middle is the mean of what its members want.
    """
    blocks: list[tuple[float, float, int]] = []  # middle, height, members
    for middle, height in zip(wanted, heights, strict=True):
        block = (_inside(middle, height, low, high), height, 1)
        while blocks and blocks[-1][0] - blocks[-1][1] / 2 < block[0] + block[1] / 2:
            above = blocks.pop()
            members, both = above[2] + block[2], above[1] + block[1]
            mean = (above[0] * above[2] + block[0] * block[2]) / members
            block = (_inside(mean, both, low, high), both, members)
        blocks.append(block)
    found: list[float] = []
    for middle, height, members in blocks:
        top = middle + height / 2
        for own in heights[len(found) : len(found) + members]:
            found.append(top - own / 2)
            top -= own
    return found


def _inside(middle: float, height: float, low: float, high: float) -> float:
    return max(min(middle, high - height / 2), low + height / 2)
