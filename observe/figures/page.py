"""A report as one HTML file that needs no network:
answer, figures, tables, the scenario, and where its numbers come from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import plotly.graph_objects as go

from .style import DARK, LIGHT, NOTE_MARK, template

MARK = "<!-- made by foredraft report -->"
"""The second line of every report: such a file may be replaced by a later one."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure with a sentence that says what it shows. name: of its file, where pictures are written."""

    name: str
    figure: go.Figure
    caption: str

    @property
    def heading(self) -> str:
        text = self.figure.layout.title.text or self.name
        return text[0].upper() + text[1:] if text.split()[0].isalpha() else text


@dataclass(frozen=True, slots=True)
class TextTable:
    """Rows of text under headings; columns but the first are aligned right."""

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Folded:
    """A long text that is shown when it is asked for."""

    heading: str
    text: str


@dataclass(slots=True)
class ReportPage:
    """What a report says, in order.

    Attributes:
        title, subtitle: What was run.
        answer: Sentences that stand first.
        tiles: The numbers that matter most: name, value, and what is said below it.
        pictures, tables, folded: As they follow each other.
        notices: Sentences about what a user may not expect.
        provenance: What and from where: each a name and a text.
    """

    title: str
    subtitle: str = ""
    answer: list[str] = field(default_factory=list)
    tiles: list[tuple[str, str, str]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    tables: list[TextTable] = field(default_factory=list)
    folded: list[Folded] = field(default_factory=list)
    provenance: list[tuple[str, str]] = field(default_factory=list)

    def source(self, name: str, text: str) -> None:
        """Add a line to the provenance."""
        self.provenance.append((name, text))

    def html(self) -> str:
        """Return the whole page, plotly.js included."""
        from plotly.offline import get_plotlyjs

        templates = [template(*colours[:2], "rgba(0,0,0,0)").to_plotly_json() for colours in (LIGHT, DARK)]
        data = {"templates": templates, "figures": [_plain(picture.figure) for picture in self.pictures]}
        parts = [
            f"<header><h1>{escape(self.title)}</h1><p class=sub>{escape(self.subtitle)}</p></header>",
            "<section class=answer>" + "".join(f"<p>{escape(one)}</p>" for one in self.answer) + "</section>",
            "<section class=tiles>" + "".join(map(_tile, self.tiles)) + "</section>" if self.tiles else "",
            *(f"<p class=notice>{escape(one)}</p>" for one in self.notices),
            "<section class=pictures>" + "".join(map(_card, range(len(self.pictures)), self.pictures)) + "</section>",
            *map(_table, self.tables),
            *(f"<details><summary>{escape(one.heading)}</summary><pre>{escape(one.text)}</pre></details>" for one in self.folded),
            "<section><h2>Where the numbers come from</h2><dl>",
            *(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in self.provenance),
            "</dl></section>",
        ]  # fmt: skip
        safe = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
        return _DOCUMENT.format(
            mark=MARK, title=escape(self.title), style=_STYLE, body="\n".join(filter(None, parts)), data=safe,
            plotly=get_plotlyjs(), script=_SCRIPT,
        )  # fmt: skip


def _plain(figure: go.Figure) -> dict[str, Any]:
    """Return a figure as plain data, without the template, the title and the note, which the page has."""
    plain: dict[str, Any] = json.loads(figure.to_json())
    plain["layout"].pop("template", None)
    plain["layout"].pop("title", None)
    title = plain["layout"]["xaxis"]["title"]
    title["text"] = title["text"].partition(NOTE_MARK)[0]  # the page has room for the note below
    has_legend = plain["layout"].get("showlegend", any(one.get("showlegend", False) for one in plain["data"]))
    plain["layout"]["margin"]["t"] = 48 if has_legend else 16
    return plain


def _tile(tile: tuple[str, str, str]) -> str:
    name, value, below = map(escape, tile)
    return f"<div class=tile><span class=name>{name}</span><span class=value>{value}</span><span class=below>{below}</span></div>"


def _card(number: int, picture: Picture) -> str:
    height = picture.figure.layout.height
    note = escape((picture.figure.layout.meta or {}).get("note", ""))
    note = f"<p class=note>{note}</p>" if note else ""
    return (
        f"<figure><h2>{escape(picture.heading)}</h2><div class=plot id=plot{number} style='height:{height}px'></div>"
        f"<figcaption>{escape(picture.caption)}{note}</figcaption></figure>"
    )


def _table(table: TextTable) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    caption = f"<p class=sub>{escape(table.caption)}</p>" if table.caption else ""
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f"<section><h2>{escape(table.heading)}</h2>{caption}<div class=scroll tabindex=0>{body}</div></section>"


_DOCUMENT = """<!DOCTYPE html>
{mark}
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
<noscript><p class=notice>The figures are drawn by JavaScript, which is switched off here.</p></noscript>
</main>
<script type="application/json" id="data">{data}</script>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""

_STYLE = """
:root { --ink: #1e293b; --soft: #64748b; --line: #e2e8f0; --paper: #f8fafc; --card: #ffffff; --accent: #2563eb; --warn: #b45309; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e2e8f0; --soft: #94a3b8; --line: #334155; --paper: #0b1120; --card: #111a2e; --accent: #60a5fa; --warn: #fbbf24; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: clamp(22px, 3vw, 32px); line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 8px; }
.sub { color: var(--soft); margin: 0 0 16px; overflow-wrap: anywhere; }
.answer { border-left: 4px solid var(--accent); padding: 2px 0 2px 16px; margin: 0 0 24px; font-size: 18px; max-width: 80ch; }
.answer p { margin: 0 0 8px; }
.answer p:last-child { margin: 0; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 0 0 24px; }
.tile, figure, details, section > .scroll { background: var(--card); border: 1px solid var(--line); border-radius: 12px; }
.tile { padding: 12px 16px; display: flex; flex: 1 1 148px; flex-direction: column; }
.tile .name, .tile .below { color: var(--soft); font-size: 13px; }
.tile .value { font-size: 24px; font-weight: 650; font-variant-numeric: tabular-nums; }
.notice { color: var(--warn); margin: 0 0 16px; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); gap: 16px; margin: 0 0 32px; }
figure { margin: 0; padding: 16px; min-width: 0; }
figure:last-child:nth-child(odd) { grid-column: 1 / -1; }
.note { font-size: 12.5px; opacity: 0.85; margin: 4px 0 0; }
figcaption { color: var(--soft); font-size: 14px; margin-top: 8px; }
.plot { width: 100%; overflow: hidden; }
section { margin: 0 0 32px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 8px 14px; text-align: right; white-space: nowrap; border-top: 1px solid var(--line); }
thead th { border-top: 0; color: var(--soft); font-weight: 550; }
th:first-child, td:first-child { text-align: left; }
details { padding: 12px 16px; margin: 0 0 16px; }
summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, monospace; max-height: 70vh; }
dl { display: grid; grid-template-columns: minmax(120px, max-content) 1fr; gap: 6px 20px; margin: 0; font-size: 14px; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 640px) {
  main { padding: 20px 14px 40px; }
  .answer { font-size: 16px; }
  .tiles { gap: 8px; }
  .tile { padding: 10px 12px; flex-basis: calc(50% - 4px); }
  .tile .value { font-size: 20px; }
  figure { padding: 12px 10px; }
  dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: 8px; }
}
"""

_SCRIPT = """
(function () {
  const { templates, figures } = JSON.parse(document.getElementById("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)"), narrow = matchMedia("(max-width: 640px)");
  function draw() {
    figures.forEach(function (figure, number) {
      const layout = Object.assign({}, figure.layout, { template: templates[dark.matches ? 1 : 0], autosize: true });
      if (narrow.matches) layout.dragmode = false;
      const options = { responsive: true, displaylogo: false, displayModeBar: false };
      Plotly.react("plot" + number, figure.data, layout, options);
    });
    document.body.dataset.drawn = figures.length;
  }
  dark.addEventListener("change", draw);
  narrow.addEventListener("change", draw);
  draw();
})();
"""
