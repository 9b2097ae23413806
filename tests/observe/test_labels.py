"""Names at the ends of lines: beside their lines, none over another, none outside of the figure."""

from __future__ import annotations

from itertools import pairwise

import pytest

pytest.importorskip("plotly", reason="the extra `report` is not installed")

import plotly.graph_objects as go
from foredraft.observe.figures.labels import AROUND_PX, LINE_PX, LineEnd, distinct_parts, label_ends

COLOUR = "#3b82f6"


def labelled(ys: list[float], names: list[str] | None = None) -> go.Figure:
    made = go.Figure(layout={"height": 360})
    names = names or [f"line {place}" for place in range(len(ys))]
    label_ends(made, [LineEnd(name, COLOUR, 10.0, y) for name, y in zip(names, ys, strict=True)], (0, 10), (0, 100))
    return made


@pytest.mark.parametrize("ys", [[50.0] * 12, [0.0] * 5, [100.0, 99.0, 98.0, 1.0], [10.0, 50.0, 90.0], [3.0, 2.0]])
def test_no_name_is_over_another_or_outside(ys):
    made = labelled(ys)
    px = (made.layout.height - AROUND_PX) / 100
    places = [one.y * px for one in made.layout.annotations]
    assert len(places) == len(ys) and places == sorted(places, reverse=True)
    assert all(above - below >= LINE_PX for above, below in pairwise(places))
    assert all(0 <= place <= made.layout.height - AROUND_PX for place in places)


def test_names_with_room_stand_at_their_lines():
    made = labelled([10.0, 50.0, 90.0])
    assert [(one.text, one.y) for one in made.layout.annotations] == [("line 2", 90), ("line 1", 50), ("line 0", 10)]
    assert [(one.y0, one.y1) for one in made.layout.shapes] == [(90, 90), (50, 50), (10, 10)]


def test_many_long_names_make_the_figure_higher():
    names = [f"EAGLE3, {place} steps, a draft of/some-long-name-of-a-model" for place in range(12)]
    made = labelled([50.0] * 12, names)
    assert made.layout.height > 360 and all(text.text.count("<br>") <= 3 for text in made.layout.annotations)


@pytest.mark.parametrize(
    ("names", "shorter", "common"),
    [
        (["EAGLE3, 1 step, TP 4", "EAGLE3, 2 steps, TP 4"], ["1 step", "2 steps"], "EAGLE3, TP 4"),
        (["plain, TP 4", "EAGLE3, TP 4"], ["plain", "EAGLE3"], "TP 4"),
        (["TP 4", "EAGLE3, TP 4"], ["TP 4", "EAGLE3, TP 4"], ""),  # the first would have no name
        (["alone, TP 4"], ["alone, TP 4"], ""),
    ],
)
def test_names_lose_the_parts_that_all_have(names, shorter, common):
    assert distinct_parts(names) == (shorter, common)
