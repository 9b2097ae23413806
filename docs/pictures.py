"""Draws the pictures of README.md, docs/tutorial.md and docs/serve.md: `python docs/pictures.py`. A test finds them
stale.

    docs/pictures/numbers.json      what is drawn: made again here, of the tutorial only if runs/tutorial has what its
                                    commands write, of the autoscaler only if runs/autoscaler has its turns
    docs/pictures/speculation.svg   throughput of a GPU against the speed that each user sees, with and without drafts,
                                    as the page of `foredraft ui` shows it
    docs/pictures/autoscaler.svg    requests and servers of examples/serving/autoscaler.py
    docs/pictures/*.svg             figures of `foredraft report`, from the tutorial's plan and tune

The same numbers give the same bytes. Text stays text, in the reader's own font; dark surroundings change the colours.
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from foredraft.observe import figures
from foredraft.planning.candidates.rounds import RoundModel
from foredraft.planning.rounds.doctor import asked_means
from foredraft.sim.assembly import assemble
from foredraft.sim.scenario_file import load_scenario
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
NUMBERS = FOLDER / "numbers.json"
TUTORIAL = ROOT / "runs" / "tutorial"
AUTOSCALER = ROOT / "runs" / "autoscaler" / "turns.json"
PER_SERVER = 16  # requests at once, as the autoscaler has it

CHAT = ROOT / "examples" / "chat_on_h100.toml"
ALGORITHMS = ("NONE", "EAGLE3")
USERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # each sends its next request when the one before has ended
COMPARED_SPEED = 100  # tokens/s for each user, at which the two are compared

REPORTED: dict[
    str, tuple[str, Callable[[str], Any]]
] = {  # picture -> the tutorial's runs, and the report's figure of them
    "plan-candidates": ("plan", figures.frontier),
    "plan-latency": ("plan", lambda runs: figures.latency_against_load(runs, _limit_of(runs, "tpot_p99"))),
    "tune-steps": ("tune", figures.tuned_steps),
}

INK, FAINT, GRID, PAPER, BLUE, ORANGE, GREEN, RED = (
    *("#1e293b", "#64748b", "#e2e8f0", "#ffffff"),
    *("#2563eb", "#b45309", "#047857", "#dc2626"),
)
DARK = {INK: "#e2e8f0", FAINT: "#94a3b8", GRID: "#334155", PAPER: "#0f172a"}
DARK |= {BLUE: "#60a5fa", ORANGE: "#fbbf24", GREEN: "#34d399", RED: "#f87171"}
LINES = (BLUE, ORANGE, GREEN, "#7c3aed", "#db2777", "#0e7490")
DARK |= {"#7c3aed": "#a78bfa", "#0e7490": "#22d3ee", "#db2777": "#f472b6"}
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "foredraft", "font.family": "DejaVu Sans", "font.size": 16, "text.color": INK,
    "axes.edgecolor": GRID, "axes.labelcolor": FAINT, "axes.facecolor": PAPER, "figure.facecolor": PAPER,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": GRID,
    "xtick.color": GRID, "ytick.color": GRID, "xtick.labelcolor": FAINT, "ytick.labelcolor": FAINT,
    "lines.linewidth": 2.2, "lines.markersize": 6, "figure.dpi": 72,
}  # fmt: skip
FONTS = ("'DejaVu Sans'", "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif")  # measured, shown
NAME_STEP = 0.075  # of the height of the axes: the distance of two names
SIZE = (560, 420)  # points: letters of 16 stay legible on a phone, at three fifths of this width


# -- numbers ----------------------------------------------------------------------------------------------------------


def speculation_numbers(numbers_of_users: Sequence[int] = USERS) -> dict[str, Any]:
    """Return the curves of the chat service by algorithm: what each user and all together get, prompts included."""
    scenario, _ = load_scenario(CHAT, ["hardware.kernels=roofline"])
    prompt, output = asked_means(assemble(scenario))
    speeds = RoundModel(scenario, output).speeds(round(prompt + output / 2), numbers_of_users, speculates=True)
    tokens = {"NONE": [one.plain for one in speeds], "EAGLE3": [one.drafted or 0.0 for one in speeds]}
    return {
        algorithm: {
            "users": list(numbers_of_users),
            "speed": [round(rate / users, 1) for rate, users in zip(rates, numbers_of_users, strict=True)],
            "throughput": [round(rate, 1) for rate in rates],
        }
        for algorithm, rates in tokens.items()
    }


def tutorial_numbers(folder: Path) -> dict[str, Any]:
    """Return what the report's figures show of the runs that the tutorial's commands have written to `folder`."""
    return {name: _drawn(draw(str(folder / runs))) for name, (runs, draw) in REPORTED.items()}


def autoscaler_numbers(file: Path) -> dict[str, list[float]]:
    """Return what the turns of the autoscaler have seen, by column."""
    turns = json.loads(file.read_text(encoding="utf-8"))
    return {key: [turn[key] for turn in turns] for key in turns[0]}


def _limit_of(runs: str, name: str) -> Mapping[str, Any]:
    limits = json.loads((Path(runs) / "answer.json").read_text(encoding="utf-8"))["limits"]
    return next(limit for limit in limits if limit["name"] == name)


def _drawn(figure: Any) -> dict[str, Any]:
    """Return the points of a plotly figure and the titles of its axes."""
    plain = json.loads(figure.to_json())
    layout = plain["layout"]
    traces = []
    for trace in plain["data"]:
        kept = {key: trace[key] for key in ("name", "mode", "x", "y", "base", "fill") if key in trace}
        for key, inner in (("error_x", "array"), ("line", "dash"), ("line", "shape")):
            if inner in trace.get(key, {}):
                kept[inner] = trace[key][inner]
        traces.append(_rounded(kept))
    axes = {axis: layout[f"{axis}axis"]["title"].get("text", "").partition("<br>")[0] for axis in "xy"}
    limits = {key: layout[f"{key[0]}axis"].get(key[2:]) for key in ("x_range", "y_range", "x_type", "x_tickvals")}
    limits["limit"] = next((one["y0"] for one in layout.get("shapes", ()) if one["line"].get("dash") == "dash"), None)
    return {"title": layout["title"]["text"], **axes, **_rounded(limits), "traces": traces}


def _rounded(value: Any) -> Any:
    """Return numbers with five digits: a last bit that differs between machines changes no picture."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return {key: _rounded(one) for key, one in value.items()} if isinstance(value, dict) else value


# -- pictures ---------------------------------------------------------------------------------------------------------


def pictures(numbers: Mapping[str, Any]) -> dict[str, str]:
    """Return every picture as SVG text, by the name of its file."""
    with matplotlib.rc_context(STYLE):
        drawn = {"speculation.svg": _svg(_speculation(numbers["speculation"]))}
        drawn["autoscaler.svg"] = _svg(_autoscaler(numbers["autoscaler"]))
        for name, figure in numbers["tutorial"].items():
            drawn[f"{name}.svg"] = _svg(_reported(figure))
    return drawn


def _canvas(
    title: str, subtitle: str, height: int = SIZE[1], left: float = 80, right: float = 28
) -> tuple[Figure, Axes]:
    """Return an empty figure with a title and a subtitle above the axes. left, right: room for names."""
    width, below = SIZE[0], 60
    above = 92 if subtitle else 56
    figure = Figure(figsize=(width / 72, height / 72))
    place = (left / width, below / height, (width - left - right) / width, (height - below - above) / height)
    axes = figure.add_axes(place)
    for text, top, size, weight, colour in ((title, 12, 18, "bold", INK), (subtitle, 62, 14, "normal", FAINT)):
        figure.text(
            16 / width, 1 - top / height, text, size=size, weight=weight, color=colour, va="top", linespacing=1.25
        )
    axes.tick_params(length=0)
    axes.set_axisbelow(True)
    return figure, axes


def _speculation(curves: Mapping[str, Any]) -> Figure:
    plain, drafts = (curves[algorithm] for algorithm in ALGORITHMS)
    heights = [float(np.interp(COMPARED_SPEED, one["speed"][::-1], one["throughput"][::-1])) for one in (plain, drafts)]
    times = heights[1] / heights[0]
    title = f"With drafts one GPU serves {times:.1f} times the tokens\nat {COMPARED_SPEED} tokens/s for each user"
    figure, axes = _canvas(title, "Llama-3.1-8B, chat with its prompts, one H100, 1 to 256 users at once")
    for curve, colour in ((plain, ORANGE), (drafts, BLUE)):
        axes.plot(curve["speed"], curve["throughput"], marker="o", color=colour)
    arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.6, "shrinkA": 6, "shrinkB": 6}
    axes.annotate("", (COMPARED_SPEED, heights[1]), (COMPARED_SPEED, heights[0]), arrowprops=arrow)
    middle = (COMPARED_SPEED, float(np.mean(heights)))
    axes.annotate(f"{times:.1f} ×", middle, (8, 0), textcoords="offset points", va="center")
    _label(axes, drafts, 16, "with EAGLE-3 drafts", BLUE, (10, 8))
    _label(axes, plain, 16, "plain decoding", ORANGE, (12, 0))
    _label(axes, plain, 1, "1 user", ORANGE, (10, -2), weight="normal")
    _label(axes, drafts, 1, "1 user", BLUE, (-12, -6), ha="right", weight="normal")
    _label(axes, drafts, 256, "256 users", BLUE, (10, 4), weight="normal")
    axes.set_xlim(0, 50 * np.ceil(max(drafts["speed"]) / 50))
    axes.set_xticks(range(0, int(axes.get_xlim()[1]) + 1, 100))
    axes.set_ylim(0, 2000 * np.ceil(max(drafts["throughput"]) / 2000))
    axes.set_yticks(range(0, int(axes.get_ylim()[1]) + 1, 2000))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("speed that each user sees, tokens/s")
    axes.set_ylabel("tokens/s of one GPU")
    return figure


def _label(
    axes: Axes, curve: Mapping[str, Any], users: int, text: str, colour: str, offset: tuple[float, float], ha: str = "left",
    weight: str = "bold",
) -> None:  # fmt: skip
    at = curve["users"].index(users)
    point = (curve["speed"][at], curve["throughput"][at])
    axes.annotate(text, point, offset, textcoords="offset points", ha=ha, color=colour, fontweight=weight)


def _autoscaler(turns: Mapping[str, list[float]]) -> Figure:
    minutes = np.array(turns["at_s"]) / 60
    most, held = int(max(turns["running"])), turns["in_slo"][-1] / turns["ended"][-1]
    used = float(np.mean(turns["running"])) / most
    title = f"{held:.0%} of the requests meet the SLO,\nwith {used:.0%} of the time of {most} servers"
    figure, axes = _canvas(title, "Llama-3.1-8B on L4s, at least 10 tokens/s for each request, simulated")
    room = PER_SERVER * np.array(turns["ready"])
    axes.fill_between(minutes, room, step="post", color=ORANGE, alpha=0.12, linewidth=0)
    axes.plot(minutes, room, color=ORANGE, drawstyle="steps-post")
    axes.plot(minutes, turns["requests"], color=BLUE)
    full, late = np.flatnonzero(room == max(room)), np.flatnonzero(np.array(turns["requests"]) >= PER_SERVER)[-1]
    for point, text, colour, offset, ha in (
        ((minutes[full].mean(), max(room)), f"{PER_SERVER} for each ready server", ORANGE, (0, 8), "center"),
        ((minutes[late], turns["requests"][late]), "requests at once", BLUE, (-14, -26), "right"),
    ):
        axes.annotate(text, point, offset, textcoords="offset points", ha=ha, color=colour, fontweight="bold")
    axes.set_xlim(0, minutes[-1])
    axes.set_ylim(0, 1.2 * max(*room, *turns["requests"]))
    axes.set_xlabel("simulated minutes")
    axes.set_ylabel("requests")
    return figure


def _reported(drawn: Mapping[str, Any]) -> Figure:
    """Draw one of the report's figures: rows of names with a point each, or lines over numbers."""
    has_rows = any(isinstance(one, str) for trace in drawn["traces"] for one in trace["y"])
    return _rows(drawn) if has_rows else _lines(drawn)


def _rows(drawn: Mapping[str, Any]) -> Figure:
    bars = [trace for trace in drawn["traces"] if "base" in trace]
    points = [trace for trace in drawn["traces"] if "base" not in trace]
    names = [name for trace in points for name in trace["y"]]
    figure, axes = _canvas(drawn["title"], "", 140 + 34 * len(names), left=150)
    for trace in bars:
        places = [names.index(name) for name in trace["y"]]
        axes.barh(places, trace["x"], 0.4, trace["base"], color=FAINT, alpha=0.3)
    for trace, colour in zip(points, LINES * 4, strict=False):
        places = [names.index(name) for name in trace["y"]]
        axes.errorbar(trace["x"], places, xerr=trace.get("array"), fmt="o", color=colour, markersize=9, capsize=4)
        for value, place in zip(trace["x"], places, strict=True):
            axes.annotate(f"{value:.3g}", (value, place), (0, 9), textcoords="offset points", ha="center", color=colour)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.8)
    axes.set_xlim(0, None)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(drawn["x"])
    return figure


def _lines(drawn: Mapping[str, Any]) -> Figure:
    lines = [trace for trace in drawn["traces"] if "lines" in trace["mode"]]
    names = [trace["name"] for trace in lines]
    figure, axes = _canvas(drawn["title"], "", right=28 if len(names) < 2 else 20 + 8 * max(map(len, names)))
    bands = [trace for trace in drawn["traces"] if "fill" in trace]
    for trace in bands:  # the best candidate's, whose line is the first
        axes.fill(trace["x"], trace["y"], color=LINES[0], alpha=0.15, linewidth=0)
    means = [trace for trace in drawn["traces"] if trace["mode"] == "markers"]  # those of each line, in their order
    for trace, colour in zip(means, LINES * 4, strict=False):
        axes.plot(trace["x"], trace["y"], "o", color=colour, markersize=4, alpha=0.4)
    low, high = drawn["y_range"] or (0, None)
    for trace, colour in zip(lines, LINES * 4, strict=False):
        style = "steps-post" if "hv" in trace.get("shape", "") else "default"
        marker = "o" if "markers" in trace["mode"] else ""
        axes.plot(trace["x"], trace["y"], marker=marker, color=colour, drawstyle=style)
    axes.set_ylim(low, high)
    if drawn["x_type"] == "log":
        axes.set_xscale("log")
        axes.set_xticks(drawn["x_tickvals"], [f"{value:g}" for value in drawn["x_tickvals"]], minor=False)
        axes.set_xticks([], minor=True)
    elif drawn["x_range"]:
        axes.set_xlim(*drawn["x_range"])
    if drawn["limit"] is not None:
        axes.axhline(drawn["limit"], color=RED, linestyle="--")
        left = axes.get_xlim()[0]
        axes.annotate(
            f"limit {drawn['limit']:g} ms", (left, drawn["limit"]), (6, 5), textcoords="offset points", color=RED
        )
    if len(lines) > 1:
        _names_at_ends(axes, lines)
    axes.set_xlabel(drawn["x"])
    axes.set_ylabel(drawn["y"])
    return figure


def _names_at_ends(axes: Axes, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write the names of lines right of the axes, from the highest end down, as the report does."""
    (low, high), (left, right) = axes.get_ylim(), axes.get_xlim()
    ends = []
    for trace, colour in zip(lines, LINES * 4, strict=False):
        inside = [(x, y) for x, y in zip(trace["x"], trace["y"], strict=True) if y <= high and x <= right]
        ends.append((*(inside[-1] if inside else (left, high)), trace["name"], colour))
    step, place = NAME_STEP * (high - low), math.inf
    for number, (x, y, name, colour) in enumerate(sorted(ends, key=lambda end: (-end[1], end[0]))):
        place = max(min(y, place - step), low + step * (len(ends) - number - 1))
        axes.annotate(
            name,
            (right, place),
            (8, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=13,
            annotation_clip=False,
        )
        axes.plot([x, right], [y, place], color=colour, linestyle=":", linewidth=1, alpha=0.6)


def _svg(figure: Figure) -> str:
    """Return the figure as SVG, with the style that changes its colours in dark surroundings."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    rules = "".join(
        f'[style*="{what}: {light}"]{{{what}:{dark}!important}}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    )
    start, defs, rest = file.getvalue().partition(" <defs>")
    style = f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>\n"
    lines = (start + style + defs + rest.replace(*FONTS)).splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


def main() -> None:
    numbers = json.loads(NUMBERS.read_text(encoding="utf-8")) if NUMBERS.exists() else {"tutorial": {}}
    numbers["speculation"] = speculation_numbers()
    if all((TUTORIAL / runs).is_dir() for runs, _ in REPORTED.values()):
        numbers["tutorial"] = tutorial_numbers(TUTORIAL)
    else:
        print("runs/tutorial has no runs: the pictures of the tutorial stay as they are", file=sys.stderr)
    if AUTOSCALER.exists():
        numbers["autoscaler"] = autoscaler_numbers(AUTOSCALER)
    else:
        print("runs/autoscaler has no turns: its picture stays as it is", file=sys.stderr)
    NUMBERS.write_text(json.dumps(numbers, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for name, text in pictures(numbers).items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
