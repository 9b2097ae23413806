"""Figures of one run, from its directory: latencies, load, KV, draft steps, acceptance."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from ...core.errors import count_of
from ..input_files import read_text, read_toml
from ..measuring.summary import CURVE_SHARES
from ..tables import LATENCIES, format_number
from .style import COLOURS, FAINT, LIMIT, RAMP, figure, limit_line, missing, names_beside, read_object

MARKED = (0.5, 0.9, 0.99, 0.999)
"""Percentiles that are marked on the curves of latencies."""
COMPLETED = ("stop", "length")


class StoredRun:
    """A directory that `foredraft simulate --out` has written; tables are read when a figure needs them.

    Raises ConfigError for a directory that holds no run, or files that cannot be read.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path: Path = Path(path)
        self.summary: Mapping[str, Any] = read_object(self.path / "summary.json")
        if "completed" not in self.summary or "p99_ttft_ms" not in self.summary:
            raise missing(self.path / "summary.json", "is no summary of a run (no completed, no p99_ttft_ms)")

    @cached_property
    def scenario_text(self) -> str | None:
        place = self.path / "scenario.toml"
        return read_text(place) if place.exists() else None

    @cached_property
    def scenario(self) -> Mapping[str, Any]:
        """The tables of scenario.toml; empty without it."""
        return {} if self.scenario_text is None else read_toml(self.path / "scenario.toml")

    @property
    def limits_ms(self) -> dict[str, float]:
        """The limits of the scenario's SLO by latency, such as {"ttft": 200.0}."""
        slo = self.scenario.get("slo", {})
        return {key.removesuffix("_ms"): float(limit) for key, limit in slo.items() if key.endswith("_ms")}

    @cached_property
    def quantiles_ms(self) -> dict[str, np.ndarray]:
        """Per latency its quantiles at `CURVE_SHARES`, in ms:
        of all completed requests, those of itl as the run has counted them."""
        arrival, first, finish, outputs = self._completed()
        found: dict[str, np.ndarray] = {}
        if len(arrival):
            several = outputs > 1
            last = np.maximum(finish, first)
            found["ttft"] = np.quantile(first - arrival, CURVE_SHARES) / 1e6
            if several.any():
                found["tpot"] = np.quantile(((last - first) / np.maximum(outputs - 1, 1))[several], CURVE_SHARES) / 1e6
            found["e2el"] = np.quantile(last - arrival, CURVE_SHARES) / 1e6
        if len(self.summary.get("itl_quantiles_ms") or ()) == len(CURVE_SHARES):
            found["itl"] = np.array(self.summary["itl_quantiles_ms"], float)
        return found

    def _completed(self) -> tuple[np.ndarray, ...]:
        """Return arrival, first token, finish (int64 ns) and output tokens of the completed requests."""
        import pyarrow.compute as pc
        from pyarrow import ArrowInvalid, array, parquet

        place = self.path / "requests.parquet"
        columns = ["arrival_ns", "first_token_ns", "finish_ns", "num_output"]
        if not place.exists():
            raise missing(place, "is missing: a run of simulate --out has it")
        try:
            table = parquet.read_table(place, columns=[*columns, "reason"], read_dictionary=["reason"])
            table = table.filter(pc.is_in(table["reason"].cast("string"), value_set=array(COMPLETED)))
            return tuple(table[name].to_numpy() for name in columns)
        except (ArrowInvalid, KeyError) as error:
            raise missing(place, f"is no table of requests: {str(error).splitlines()[0]}") from None

    def rounds_by_batch(self) -> np.ndarray:
        """Return how many decode rounds had which batch and draft steps: int64 [batch, steps]."""
        from pyarrow import ArrowInvalid, parquet

        place = self.path / "rounds.parquet"
        if not place.exists():
            raise missing(place, "is missing: a run of simulate --out has it")
        counts = np.zeros((1, 1), np.int64)
        try:
            for part in parquet.ParquetFile(place).iter_batches(1 << 18, columns=["decode_rows", "steps"]):
                rows, steps = (part.column(i).fill_null(-1).to_numpy().astype(np.int64) for i in range(2))
                rows, steps = rows[steps >= 0], steps[steps >= 0]
                if not len(rows):
                    continue
                shape = max(counts.shape[0], int(rows.max()) + 1), max(counts.shape[1], int(steps.max()) + 1)
                found = np.bincount(rows * shape[1] + steps, minlength=shape[0] * shape[1]).reshape(shape)
                found[: counts.shape[0], : counts.shape[1]] += counts
                counts = found
        except (ArrowInvalid, KeyError) as error:
            raise missing(place, f"is no table of rounds: {str(error).splitlines()[0]}") from None
        return counts

    def timeline(self, name: str) -> tuple[np.ndarray, list[float | None], str]:
        """Return the starts of the buckets, the values in them, and the unit of the time."""
        values, width = self.summary.get(f"timeline_{name}"), self.summary.get("timeline_bucket_s")
        if not values or not width:
            raise missing(self.path / "summary.json", f"has no timeline_{name}")
        scale, unit = (60.0, "minutes") if width * len(values) > 1200 else (1.0, "seconds")
        return np.arange(len(values)) * width / scale, values, unit


def as_run(run: StoredRun | str | PathLike[str]) -> StoredRun:
    return run if isinstance(run, StoredRun) else StoredRun(run)


def latencies(run: StoredRun | str | PathLike[str]) -> go.Figure:
    """Draw how TTFT, TPOT, ITL and E2E latencies are distributed: the share of requests (of ITL: of gaps) that is
    faster.

    The vertical axis is stretched towards the tail, each nine as high as the one before.
    """
    run = as_run(run)
    requests = int(run.summary["completed"])
    note = f"each curve: {len(CURVE_SHARES)} exact percentiles of {count_of(requests, 'request')}, straight lines between; ITL within 0.1 %"
    made = figure("Latency distributions", "milliseconds", "percentile", note, 420)
    deepest = 1.0
    for (name, (short, meaning)), colour in zip(LATENCIES.items(), COLOURS, strict=False):
        deepest = max(deepest, add_distribution(made, run, name, f"{short}, {meaning}", colour))
    for name, limit in run.limits_ms.items():
        colour = next((line.line.color for line in made.data if line.legendgroup == name), LIMIT)
        limit_line(made, (limit, limit), (0.0, deepest), f"{LATENCIES[name][0]} limit {limit:g} ms", colour)
    percentile_axes(made, deepest)
    return made


def add_distribution(made: go.Figure, run: StoredRun, name: str, title: str, colour: str) -> float:
    """Draw a latency's distribution, with points at some percentiles, and return the height of its curve; 1 without a
    value."""
    values, shares = run.quantiles_ms.get(name), np.array(CURVE_SHARES)
    if values is None or not values.max():
        return 1.0
    known = (1 - shares) * int(run.summary["completed"]) >= 1  # beyond it single requests, which tell no share
    known &= values > 0
    heights = -np.log10(1 - np.minimum(shares, 1 - 1e-9))
    hover = f"{title.partition(',')[0]} p%{{customdata:.6~g}}: %{{x:,.4~g}} ms<extra></extra>"
    made.add_scatter(
        x=_short(values[known]), y=_short(heights[known]), customdata=_short(100 * shares[known], 7), name=title,
        mode="lines", line={"color": colour, "width": 2}, hovertemplate=hover, legendgroup=name,
    )  # fmt: skip
    marked = np.isin(shares, MARKED) & known
    made.add_scatter(
        x=_short(values[marked]), y=_short(heights[marked]), customdata=_short(100 * shares[marked]), mode="markers",
        marker={"color": colour, "size": 7}, hovertemplate=hover, legendgroup=name, showlegend=False,
    )  # fmt: skip
    return float(heights[known].max(initial=1.0))


def percentile_axes(made: go.Figure, deepest: float) -> None:
    """Mark percentiles up to the height `deepest`, each nine as high as the one before, and decades of time."""
    ticks = [0, 0.5, *(1 - 10.0**-nines for nines in range(1, int(deepest) + 1))]
    made.update_yaxes(
        tickvals=[float(-np.log10(1 - share)) for share in ticks], ticktext=[f"{100 * share:.6g} %" for share in ticks]
    )
    made.update_xaxes(type="log", minor={"ticks": "outside", "ticklen": 3}, dtick=1)


INTERVALS = {
    "mean_ttft_ms": "mean TTFT",
    "mean_tpot_ms": "mean TPOT",
    "mean_e2el_ms": "mean E2EL",
    "output_throughput": "output tokens/s",
}
"""Numbers of a summary that have 80 % intervals of the cost model where something is published, and their names."""


def intervals(run: StoredRun | str | PathLike[str]) -> go.Figure:
    """Draw the 80 % intervals of a run's mean latencies and throughput, as shares of the simulated numbers."""
    run = as_run(run)
    summary = run.summary
    found = {key: ends for key in INTERVALS if (ends := summary.get(f"{key}_interval")) and summary.get(key)}
    if not found:
        why = summary.get("overload") or summary.get("intervals_rest_on") or "made by an earlier version"
        raise missing(run.path / "summary.json", f"has no intervals: {why}")
    made = figure("How sure these numbers are", "published / simulated", "", "bars: 80 % interval; 1 is as simulated")
    names = [f"{INTERVALS[key]} {format_number(summary[key])}" for key in found]
    low, high = ([ends[side] / summary[key] for key, ends in found.items()] for side in (0, 1))
    made.add_bar(
        x=_short([end - start for start, end in zip(low, high, strict=True)]), base=_short(low), y=names, orientation="h",
        customdata=[" to ".join(map(format_number, ends)) for ends in found.values()],
        marker={"color": COLOURS[0], "opacity": 0.5}, width=0.4, showlegend=False,
        hovertemplate="%{y}: %{customdata}<extra></extra>",
    )  # fmt: skip
    made.add_vline(x=1, line={"color": FAINT, "width": 1})
    names_beside(made, names)
    return made


def load_over_time(run: StoredRun | str | PathLike[str]) -> go.Figure:
    """Draw the requests that run and wait over simulated time."""
    return _over_time(run, "Batch and queue over time", {"running": "running", "waiting": "waiting"}, "requests")


def kv_over_time(run: StoredRun | str | PathLike[str]) -> go.Figure:
    """Draw the share of KV slots that is held over simulated time."""
    made = _over_time(run, "KV in use over time", {"kv_occupancy": "KV slots held"}, "share of the KV slots")
    made.update_yaxes(tickformat=".3~%", rangemode="tozero")  # a large pool is hardly used
    return made


def steps_over_time(run: StoredRun | str | PathLike[str]) -> go.Figure:
    """Draw the draft steps in use over simulated time, the mean over rounds."""
    return _over_time(run, "Draft steps over time", {"steps": "mean draft steps"}, "draft steps")


def _over_time(run: StoredRun | str | PathLike[str], title: str, names: Mapping[str, str], y: str) -> go.Figure:
    run = as_run(run)
    lines = {name: run.timeline(name) for name in names}
    starts, _, unit = next(iter(lines.values()))
    note = f"means of {len(starts)} buckets of {run.summary['timeline_bucket_s']:.3g} s each"
    made = figure(title, f"simulated {unit}", y, note)
    for (name, (starts, values, _)), colour in zip(lines.items(), COLOURS, strict=False):
        made.add_scatter(
            x=_short(starts), y=_short(values), name=names[name], mode="lines", line={"color": colour, "width": 2, "shape": "hv"},
            hovertemplate=f"{names[name]}: %{{y:.4~g}}<extra></extra>", showlegend=True,
        )  # fmt: skip
    made.update_yaxes(rangemode="tozero")
    return made


def steps_by_batch(run: StoredRun | str | PathLike[str]) -> go.Figure:
    """Draw which draft steps were used at which batch size, as shares of the rounds with such a batch."""
    run = as_run(run)
    counts = run.rounds_by_batch()
    made = figure("Draft steps by batch size", "batch size", "share of rounds", f"all {counts.sum():,} decode rounds")
    bounds = [0, 1, *(1 << power for power in range(1, counts.shape[0].bit_length() + 1))]
    classes = [(low + 1, high) for low, high in pairwise(bounds) if counts[low + 1 : high + 1].any()]
    names = [str(low) if low == high else f"{low}–{high}" for low, high in classes]
    totals = np.array([counts[low : high + 1].sum(axis=0) for low, high in classes]).reshape(len(classes), -1)
    used = np.flatnonzero(totals.any(axis=0)).tolist()
    for place, steps in enumerate(used):
        rounds = totals[:, steps]
        made.add_bar(
            x=names, y=_short(rounds / totals.sum(axis=1)), customdata=rounds.tolist(), name=count_of(steps, "step"),
            marker={"color": RAMP[place * (len(RAMP) - 1) // max(len(used) - 1, 1)] if len(used) > 1 else COLOURS[0]},
            hovertemplate=f"batch %{{x}}, steps {steps}: %{{y:.1%}} of its rounds (%{{customdata:,}})<extra></extra>", showlegend=True,
        )  # fmt: skip
    made.update_layout(barmode="stack", bargap=0.15)
    made.update_yaxes(tickformat=".0%", range=[0, 1])
    made.update_xaxes(type="category")
    return made


def acceptance_by_position(run: StoredRun | str | PathLike[str]) -> go.Figure:
    """Draw how often the draft at each position is accepted, where all drafts before it were."""
    run = as_run(run)
    tried, accepted = _positions(run)
    note = f"all {run.summary['verified_rows']:,} verified rows; whiskers: 95 % interval if rows were independent"
    made = figure("Acceptance by position", "position of the draft", "accepted, given all before it", note)
    share = accepted / tried
    width = 1.96 * np.sqrt(share * (1 - share) / tried)
    made.add_bar(
        x=np.arange(1, len(share) + 1).tolist(), y=_short(share), customdata=tried.tolist(), marker={"color": COLOURS[2]},
        error_y={
            "type": "data", "symmetric": False,
            "array": _short(np.minimum(width, 1 - share)), "arrayminus": _short(np.minimum(width, share)),
            "width": 3, "thickness": 1,
        },
        hovertemplate="position %{x}: %{y:.1%} of %{customdata:,} rows<extra></extra>", showlegend=False,
    )  # fmt: skip
    made.update_yaxes(tickformat=".0%", range=[0, 1])
    made.update_xaxes(dtick=1)
    return made


def _positions(run: StoredRun) -> tuple[np.ndarray, np.ndarray]:
    """Return per position the verified rows that came to it, and those in which it was accepted: int64 [positions]."""
    prefix = "correct_drafts_at_steps_"
    by_steps = {int(key.removeprefix(prefix)): counts for key, counts in run.summary.items() if key.startswith(prefix)}
    by_steps = {steps: counts for steps, counts in by_steps.items() if steps and sum(counts)}
    if not by_steps:
        raise missing(run.path / "summary.json", f"has no {prefix}N: nothing was drafted, or another version wrote it")
    deepest = max(by_steps)
    tried, accepted = np.zeros(deepest, np.int64), np.zeros(deepest, np.int64)
    for steps, counts in by_steps.items():
        at_least = np.zeros(steps + 2, np.int64)  # rows with so many correct drafts or more
        at_least[: len(counts)] = np.cumsum(counts[::-1])[::-1]
        tried[:steps] += at_least[:steps]
        accepted[:steps] += at_least[1 : steps + 1]
    come = tried > 0
    return tried[come], accepted[come]


def _short(values: Any, digits: int = 5) -> list[Any]:
    """Return numbers with so many significant digits, so that pages stay small."""
    return [None if value is None else float(f"{value:.{digits}g}") for value in np.asarray(values, object).tolist()]
