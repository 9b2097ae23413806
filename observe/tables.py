"""The summary of a run for the terminal: tables and a small timeline, at most 80 columns wide.

Below 80 columns tables stand under each other and the percentiles of latencies are rows, so that no number is cut off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..core.errors import count_of
from .rates import rate_of

WIDTH = 80
SPARK_WIDTH = 44
_BESIDE_SPARKS = WIDTH - SPARK_WIDTH
_LEAST_SPARK_WIDTH = 8
_LEAST_LATENCY_WIDTH = 46  # of the table with four columns of numbers
LATENCIES = {
    "ttft": ("TTFT", "to first token"),
    "tpot": ("TPOT", "per output token"),
    "itl": ("ITL", "between emissions"),
    "e2el": ("E2EL", "end to end"),
}
"""The latencies by their names in `summary.json`: the name in a report, and the measured interval."""
_STATISTICS = ("mean", "median", "p90", "p95", "p99")
_BARS = "▁▂▃▄▅▆▇█"
_NOTHING = "–"

Row = tuple[str, str]


def report_tables(summary: Mapping[str, Any], title: str | None = None, *, width: int = WIDTH) -> list[RenderableType]:
    """Return the parts to print, in order. `summary` as `RunMetrics.summary` returns it; keys `timeline_*` (from
    `RunMetrics.timeline`) add a timeline, and without `title` a `name` and a `seed` make one; `notices` are sentences
    below the tables. `width` is that of the terminal, in columns.
    """
    width = min(width, WIDTH)
    tables: list[RenderableType] = [
        _heading(summary, title),
        *_pair_of_tables(width, "Throughput", _throughput(summary), "Requests", _requests(summary)),
        _latencies(summary, width),
        *_pair_of_tables(width, "Speculation", _speculation(summary), "Memory and device", _resources(summary)),
    ]
    if "prefill_engines" in summary:
        tables += _pair_of_tables(width, "Engines", _pools(summary), "Transfers", _transfers(summary))
    timeline = {key.removeprefix("timeline_"): summary[key] for key in summary if key.startswith("timeline_")}
    if timeline.get("running"):
        tables.append(_timeline(timeline, summary["duration"], width))
    if "steady_from" in summary:
        tables.append(Text(about_steady(summary)))
    if "intervals_rest_on" in summary:
        tables.append(Text(_intervals(summary)))
    if summary.get("notices"):
        tables.append(Text("\n".join(f"Note: {notice}." for notice in summary["notices"])))
    return [tables[0], *(Padding(table, (1, 0, 0, 0)) for table in tables[1:])]


def intervals_rest_on(*points: str, are_known: bool = True) -> str:
    """Say what intervals of simulated times rest on, or why there are none. `points`: of each row of a table."""
    basis = _of_rows(points)
    return f"The 80 % intervals rest on {basis}." if are_known else f"No intervals of these times: {basis}."


def times_rest_on(*points: str, summaries: Sequence[Mapping[str, Any]] = ()) -> str:
    """Say what simulated times rest on, and how far they may be off: the widest 80 % intervals of the means in
    `summaries`, as factors. `points`: of each row of a table."""
    parts = []
    for name in ("ttft", "tpot"):
        mean, interval = f"mean_{name}_ms", f"mean_{name}_ms_interval"
        if ends := [end / one[mean] for one in summaries for end in one.get(interval) or ()]:
            low, high = min(ends), max(ends)
            parts.append(f"mean {LATENCIES[name][0]} {low:.2f} to {high:.2f} ×")
    if not parts:
        return f"Simulated times rest on {_of_rows(points)}."
    return f"80 % intervals: {', '.join(parts)} the simulated time; they rest on {_of_rows(points)}."


def _of_rows(points: Sequence[str]) -> str:
    return "; of other rows: ".join(dict.fromkeys(points))


def _intervals(summary: Mapping[str, Any]) -> str:
    if summary.get("overload"):
        return f"No intervals of these times: {summary['overload']}."
    words = {"mean_ttft_ms": "mean TTFT {} ms", "mean_tpot_ms": "TPOT {} ms", "output_throughput": "{} output tokens/s"}
    parts = [
        text.format(" to ".join(map(format_number, ends)))
        for name, text in words.items()
        if (ends := rate_of(summary, f"{name}_interval")) is not None
    ]
    if not parts:
        return intervals_rest_on(summary["intervals_rest_on"], are_known=False)
    return f"80 % intervals: {', '.join(parts)}; they rest on {summary['intervals_rest_on']}."


def about_steady(summary: Mapping[str, Any]) -> str:
    """Say which part of a run its rates and means are of."""
    begin, end = (format_number(summary[f"steady_{side}"]) for side in ("from", "until"))
    whole = format_number(summary["output_throughput"])
    return (
        f"Rates, queue, running and KV in the mean: of the time from {begin} to {end} s, without the ramp and what came after "
        f"the last arrival ({whole} output tokens/s over the whole run). Latencies: of all requests."
    )


def format_number(value: Any, unit: str = "") -> str:
    """Format a number: three significant digits for fractions, thousands separated, a dash for None."""
    if value is None:
        return _NOTHING
    if isinstance(value, int):
        text = f"{value:,}"
    elif abs(value) >= 100:
        text = f"{value:,.0f}"
    elif abs(value) >= 10:
        text = f"{value:.1f}"
    elif abs(value) >= 1 or value == 0:
        text = f"{value:.2f}"
    else:
        text = f"{value:.3g}"
    return f"{text} {unit}" if unit else text


def format_share(value: float | None) -> str:
    return _NOTHING if value is None else f"{100 * value:.1f} %"


def sparkline(values: Sequence[float | None], width: int = SPARK_WIDTH, top: float | None = None) -> str:
    """Draw one bar per value, or per group of values if there are more than `width`: as high as its mean relative to
    the greatest.

    A blank is a place without a value. `top` is the value of the highest bar.
    """
    count = min(width, len(values))
    bounds = [len(values) * i // count for i in range(count + 1)] if count else [0]
    means: list[float | None] = []
    for begin, end in pairwise(bounds):
        known = [value for value in values[begin:end] if value is not None]
        means.append(sum(known) / len(known) if known else None)
    highest = top if top is not None else max((mean for mean in means if mean is not None), default=0.0)
    bars = []
    for mean in means:
        if mean is None:
            bars.append(" ")
            continue
        level = mean / highest * (len(_BARS) - 1) if highest > 0 else 0.0
        bars.append(_BARS[max(0, min(len(_BARS) - 1, round(level)))])
    return "".join(bars)


def _heading(summary: Mapping[str, Any], title: str | None) -> Text:
    if title is None:
        name = summary.get("name") or "run"
        title = f"{name}, seed {summary['seed']}" if "seed" in summary else str(name)
    heading = Text(title, style="bold")
    heading.append(f"   {format_number(summary['duration'])} s simulated", style="dim")
    if summary["incomplete"]:
        heading.append("   incomplete", style="bold yellow")
    if summary.get("overloaded"):
        heading.append("   overloaded", style="bold yellow")
    return heading


def _throughput(summary: Mapping[str, Any]) -> list[Row]:
    rows = [
        ("requests", format_number(rate_of(summary, "request_throughput"), "/s")),
        ("output tokens", format_number(rate_of(summary, "output_throughput"), "/s")),
        ("all tokens", format_number(rate_of(summary, "total_token_throughput"), "/s")),
        ("concurrency, mean", format_number(rate_of(summary, "mean_concurrency"))),
        ("queue, mean / max", _pair(rate_of(summary, "mean_queue_length"), summary["max_queue_length"])),
    ]
    if summary["request_goodput"] is not None:
        rows.insert(1, ("good requests", format_number(summary["request_goodput"], "/s")))
        rows.insert(2, ("within the SLO", format_share(summary["slo_attainment"])))
    return rows


def _requests(summary: Mapping[str, Any]) -> list[Row]:
    rows = [
        ("completed", format_number(summary["completed"])),
        ("input tokens", format_number(summary["total_input_tokens"])),
        ("output tokens", format_number(summary["total_output_tokens"])),
        *_lengths(summary),
        ("retractions", format_number(summary["retractions"])),
    ]
    odd = ("truncated", "refused", "failed", "aborted", "unfinished")
    rows.extend((name, format_number(summary[name])) for name in odd if summary[name])
    return rows


def _lengths(summary: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the mean lengths of completed requests, beside those that a synthetic workload asked for."""
    for kind, name in (("input", "prompt"), ("output", "output")):
        mean, asked = summary[f"mean_{kind}_tokens"], summary.get(f"asked_mean_{kind}_tokens")
        if asked is None:
            yield f"{name}, mean tokens", format_number(mean)
        else:
            yield f"{name}, mean / asked", f"{format_number(mean)} / {format_number(asked)}"


def _speculation(summary: Mapping[str, Any]) -> list[Row]:
    rows = [
        ("accept length", format_number(summary["accept_length"])),
        ("accept rate", format_share(summary["accept_rate"])),
        ("drafts wasted", format_share(summary["wasted_draft_share"])),
        ("decode rounds", format_number(summary["decode_rounds"])),
        ("switches of steps", format_number(summary["switches"])),
    ]
    prefix = "rounds_at_steps_"
    ema = "ema_accept_len_from_"
    averages = [(int(key.removeprefix(ema)), value) for key, value in summary.items() if key.startswith(ema)]
    for bound, values in sorted(averages):
        known = [value for value in values if value is not None]
        mean = sum(known) / len(known) if known else None
        rows.append((f"EMA from batch size {bound}", format_number(mean)))
    shares = [(int(key.removeprefix(prefix)), value) for key, value in summary.items() if key.startswith(prefix)]
    rows.extend((f"rounds at {count_of(steps, 'step')}", format_share(share)) for steps, share in sorted(shares))
    return rows


def _resources(summary: Mapping[str, Any]) -> list[Row]:
    occupancy = (format_share(rate_of(summary, "kv_occupancy_mean")), format_share(summary["kv_occupancy_max"]))
    return [
        ("KV slots", format_number(summary["kv_capacity_slots"])),
        ("KV used, mean / max", " / ".join(occupancy)),
        ("prefix cache hits", _cache_hits(summary)),
        ("running, mean / max", _pair(rate_of(summary, "mean_running"), summary["max_running"])),
        ("saturation", format_share(summary.get("saturation"))),
        ("device busy", format_share(summary["device_busy_share"])),
        ("replicas", format_number(summary["replicas"])),
    ]


def _cache_hits(summary: Mapping[str, Any]) -> str:
    hits, from_host = format_share(summary["prefix_cache_hit_rate"]), summary.get("host_cache_hit_rate")
    return hits if from_host is None else f"{hits} ({format_share(from_host)} from host memory)"


def _pools(summary: Mapping[str, Any]) -> list[Row]:
    rows = [
        ("prefill : decode", f"{summary['prefill_engines']} : {summary['decode_engines']}"),
        ("prefill busy", format_share(summary["prefill_busy_share"])),
        ("decode busy", format_share(summary["decode_busy_share"])),
        ("links busy, mean / max", _shares(summary["link_busy_share"], summary["link_busy_share_max"])),
    ]
    if summary["role_changes"]:
        rows.append(("changes of roles", format_number(summary["role_changes"])))
    return rows


def _shares(mean: float | None, greatest: float | None) -> str:
    return f"{format_share(mean)} / {format_share(greatest)}"


def _transfers(summary: Mapping[str, Any]) -> list[Row]:
    ended = [f"{format_number(summary[f'transfers_{end}'])}" for end in ("completed", "failed", "cancelled")]
    return [
        ("completed", ended[0]),
        ("failed / cancelled", f"{ended[1]} / {ended[2]}"),
        ("ms, median / p99", _times(summary, "transfer")),
        ("waited, median / p99", _times(summary, "transfer_wait")),
        ("retries", format_number(summary["transfer_retries"])),
    ]


def _times(summary: Mapping[str, Any], name: str) -> str:
    return f"{format_number(summary[f'median_{name}_ms'])} / {format_number(summary[f'p99_{name}_ms'])}"


def _pair(mean: float | None, greatest: int) -> str:
    return f"{format_number(mean)} / {format_number(greatest)}"


def _latencies(summary: Mapping[str, Any], width: int) -> Table:
    """Return a row per latency, or on a narrow terminal a row per statistic, or a row per number."""
    shown = {key: [format_number(summary[f"{statistic}_{key}_ms"]) for statistic in _STATISTICS] for key in LATENCIES}
    if width < _LEAST_LATENCY_WIDTH:
        names = [f"{LATENCIES[key][0]}, {statistic}" for key in LATENCIES for statistic in _STATISTICS]
        numbers = [number for numbers in shown.values() for number in numbers]
        return _list(width, "Latency, ms", list(zip(names, numbers, strict=True)))
    table = Table(box=None, width=width, pad_edge=False, header_style="bold cyan")
    table.add_column("Latency, ms", style="dim", ratio=5, no_wrap=True)
    if width < WIDTH:
        for name, _ in LATENCIES.values():
            table.add_column(name, justify="right", ratio=4, no_wrap=True, header_style="dim")
        for statistic, *numbers in zip(_STATISTICS, *shown.values(), strict=True):
            table.add_row(statistic, *numbers)
        return table
    for statistic in _STATISTICS:
        table.add_column(statistic, justify="right", ratio=2, no_wrap=True, header_style="dim")
    for key, (name, meaning) in LATENCIES.items():
        table.add_row(f"{name}, {meaning}", *shown[key])
    return table


def _pair_of_tables(width: int, left_title: str, left: list[Row], right_title: str, right: list[Row]) -> list[Table]:
    """Return one table with both lists side by side, or two if the terminal is too narrow for that."""
    if width < WIDTH:
        return [_list(width, left_title, left), _list(width, right_title, right)]
    table = Table(box=None, width=width, pad_edge=False, header_style="bold cyan")
    table.add_column(left_title, style="dim", ratio=1, no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("", width=2)
    table.add_column(right_title, style="dim", ratio=1, no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    for i in range(max(len(left), len(right))):
        table.add_row(*(left[i] if i < len(left) else ("", "")), "", *(right[i] if i < len(right) else ("", "")))
    return [table]


def _list(width: int, title: str, rows: list[Row]) -> Table:
    """Return names with their values; a name wraps before a value is cut."""
    table = Table(box=None, width=width, pad_edge=False, header_style="bold cyan")
    table.add_column(title, style="dim", ratio=1)
    table.add_column("", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _timeline(timeline: Mapping[str, Any], seconds: float, width: int) -> RenderableType:
    spark_width = width - _BESIDE_SPARKS
    if spark_width < _LEAST_SPARK_WIDTH:
        return Text(f"Timeline: needs {_BESIDE_SPARKS + _LEAST_SPARK_WIDTH} columns", style="dim")
    table = Table(box=None, width=width, pad_edge=False, header_style="bold cyan")
    table.add_column("Timeline", style="dim", width=12)
    table.add_column(f"0 to {format_number(seconds)} s", width=spark_width, no_wrap=True, header_style="dim")
    table.add_column("greatest", justify="right", no_wrap=True, header_style="dim")
    names = (
        ("running", "running", format_number, None),
        ("waiting", "waiting", format_number, None),
        ("kv_occupancy", "KV in use", format_share, 1.0),
        ("steps", "draft steps", format_number, None),
        ("tokens_per_s", "tokens/s", format_number, None),
    )
    for key, name, form, top in names:
        known = [value for value in timeline[key] if value is not None]
        table.add_row(name, sparkline(timeline[key], spark_width, top), form(max(known, default=None)))
    return table
