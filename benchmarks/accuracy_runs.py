"""Simulates published points, from a cache or anew, and calibrates them with each other: what accuracy.py makes its
tables of. The tables of speculation are here, since some are made of simulations of their own."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from foredraft.core.errors import ForedraftError
from foredraft.sim.calibration.fit import NOISE, SPREADS, LinearFit
from foredraft.sim.cost.calibration import DRAFTS_FACTOR, DRAFTS_SLOPE, ROUND_FACTOR, ROUND_SLOPE, MeasuredClients
from foredraft.sim.cost.measured.tables import cache_folder
from foredraft.sim.cost.server import PROFILES
from foredraft.simulation import run_scenario  # imported before worker processes are forked, so that they have it
from points import Point, model_of, profile_with, read_csv, read_rows, rounds_of, speedup_points

ROOT = Path(__file__).parents[1]
LEFT_OUT = Path(__file__).parent / "published" / "left_out.csv"
ROOFLINE, MEASURED, OTHERS, CALIBRATED = "roofline", "measured", "left out", "calibrated"
ROOFLINE_OTHERS = "roofline, left out"
LEAST_TO_CALIBRATE = 4  # points of a data set
SMALL = 0.02  # speed-ups nearer to 1 have no sign that a benchmark could tell
SUMMARY = "speculation: tokens per second", "speculation: speed-up over plain", "regret of the chosen setting"
"""The lines of the page's summary that are about speculation."""
TAIL_STEPS = 3
"""Draft steps of acceptance_tails.csv. Assumption: as in other benchmarks of its author."""
RESTING = {"1": {"candidate_steps": [0]}, "1000": {"candidate_steps": [3]}}
"""A schedule of steps that never drafts for fewer than 1,000 requests, whose draft is loaded nevertheless."""


def failure_text(error: ForedraftError) -> str:
    """Return the part of a message that says why a point cannot be simulated."""
    return str(error).splitlines()[-1].strip().split(";")[0]


def percent(values: Iterable[float], of: Callable[[Iterable[float]], float]) -> str:
    """Return a statistic of `values` in percent for a table; empty without values."""
    values = list(values)
    return f"{100 * of(values):.1f}" if values else ""


def mean_size(values: Iterable[float]) -> float:
    return statistics.fmean(map(abs, values))


@dataclass(frozen=True, slots=True)
class AccuracyJob:
    """A simulation to make: a point, and the times of passes."""

    point: Point
    column: str

    @property
    def key(self) -> str:
        profile = repr(PROFILES[self.point.server])
        text = json.dumps([asdict(self.point), self.column, self.times(), profile], sort_keys=True)
        return hashlib.sha256((_sources() + text).encode()).hexdigest()[:24]

    def times(self) -> dict[str, float]:
        """Return the times of the launch that were fitted without this point's model and shape."""
        return left_out_times(self.point) if self.column in (OTHERS, ROOFLINE_OTHERS) else {}


@dataclass(frozen=True, slots=True)
class PointOutcome:
    """A point's published and simulated time per output token of a client, and time to first token, in ms;
    or why there is none."""

    point: Point
    published_ms: float
    ms: float | None = None
    ttft_ms: float | None = None
    failure: str = ""

    @property
    def error(self) -> float:
        """Simulated / published − 1."""
        return self.ms / self.published_ms - 1


def run(job: AccuracyJob) -> dict[str, Any]:
    """Simulate a job. Returns its times, or the message of what cannot be simulated."""
    kernels = ROOFLINE if job.column in (ROOFLINE, ROOFLINE_OTHERS) else MEASURED
    try:
        with profile_with(job.point.server, **job.times()):
            measured = job.point.measured(run_scenario(job.point.scenario(kernels), {}))
    except ForedraftError as error:
        return {"failure": failure_text(error)}
    return {"ms": measured.token_ms, "ttft_ms": measured.first_token_ms}


@cache
def _sources() -> str:
    """Return a digest of the code that a simulation depends on, but for the profiles, of which it depends on one."""
    folders = (ROOT / name for name in ("core", "sim", "observe"))
    files = sorted(path for folder in folders for path in folder.rglob("*.py") if path.name != "server.py")
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def outcomes(jobs: Sequence[AccuracyJob], workers: int) -> dict[AccuracyJob, dict[str, Any]]:
    """Return the result of every job, from the cache or simulated by `workers` processes."""
    folder = cache_folder("accuracy")
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[AccuracyJob, dict[str, Any]] = {}
    for job in jobs:
        path = folder / f"{job.key}.json"
        if path.is_file():
            found[job] = json.loads(path.read_text(encoding="utf-8"))
    missing = [job for job in jobs if job not in found]
    with ProcessPoolExecutor(workers) as pool:
        pending = {pool.submit(run, job): job for job in missing}
        for count, future in enumerate(as_completed(pending), 1):
            job = pending[future]
            found[job] = future.result()
            partial = folder / f".{job.key}.{os.getpid()}"
            partial.write_text(json.dumps(found[job]), encoding="utf-8")
            partial.replace(folder / f"{job.key}.json")
            if count % 25 == 0 or count == len(missing):
                print(f"{count:,} of {len(missing):,} simulations", file=sys.stderr, flush=True)
    return found


def simulate_all(points: Sequence[Point], columns: Sequence[str], workers: int) -> dict[str, list[PointOutcome]]:
    """Return the outcomes of all points by column, and those of calibrations."""
    jobs = [[AccuracyJob(point, column) for point in points] for column in columns]
    found = outcomes([job for row in jobs for job in row], workers)
    table = {
        column: [PointOutcome(job.point, job.point.published_ms, **found[job]) for job in row]
        for column, row in zip(columns, jobs, strict=True)
    }
    kernels = MEASURED if MEASURED in table else ROOFLINE
    return table | {CALIBRATED: calibrated(table[kernels])}


SPREAD = np.array([SPREADS[name] for name in (ROUND_FACTOR, ROUND_SLOPE, DRAFTS_FACTOR, DRAFTS_SLOPE)])


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A calibration with simulated points of one data set, as `sim/calibration` fits rounds: a factor, and its slope in
    the logarithm of clients."""

    fit: LinearFit
    clients: MeasuredClients

    @classmethod
    def of(cls, rows: Sequence[PointOutcome]) -> Calibrated:
        logs = np.log([row.point.concurrency for row in rows])
        clients = MeasuredClients(*np.exp([logs.min(), logs.mean(), logs.max()]))
        rest = np.log([row.ms / row.published_ms for row in rows])
        columns, nothing = _columns(rows, clients), np.zeros(len(SPREAD))
        fit = LinearFit(rest, columns, np.full(len(rows), NOISE["mean_tpot_ms"]), nothing, SPREAD)
        return cls(fit, clients)

    def __call__(self, rows: Sequence[PointOutcome]) -> np.ndarray:
        """Return the times per output token of other simulated points, in ms [rows]."""
        return np.array([row.ms for row in rows]) * np.exp(_columns(rows, self.clients) @ self.fit.step())


def _columns(rows: Sequence[PointOutcome], clients: MeasuredClients) -> np.ndarray:
    inside = np.clip([row.point.concurrency for row in rows], clients.least, clients.most)
    power, drafts = np.log(inside / clients.usual), np.array([float(row.point.steps > 0) for row in rows])
    return np.c_[np.ones(len(rows)), power, drafts, drafts * power]


def calibrated(rows: Sequence[PointOutcome]) -> list[PointOutcome]:
    """Return the outcomes with a calibration by the other points of each data set. The time to the first token is not
    fitted."""
    found: dict[Point, PointOutcome] = {}
    for dataset in dict.fromkeys(row.point.dataset for row in rows):
        own = [row for row in rows if row.point.dataset == dataset and row.ms is not None]
        if len(own) < LEAST_TO_CALIBRATE:
            continue
        for row, rest in zip(own, Calibrated.of(own).fit.left_out(range(len(own))), strict=True):
            found[row.point] = replace(row, ms=row.published_ms * float(np.exp(rest)), ttft_ms=None)
    missing = f"fewer than {LEAST_TO_CALIBRATE} points that could be simulated"
    return [found.get(row.point, replace(row, ms=None, ttft_ms=None, failure=row.failure or missing)) for row in rows]


def left_out_times(point: Point) -> dict[str, float]:
    """Return the times of the launch that fit_servers.py found without the point's model, draft shape or
    tensor parallelism."""
    if point.steps:
        groups = [rounds_of(model_of(point)), f"{point.algorithm} {point.shape}"]
    else:
        groups = [model_of(point), f"tensor parallel {point.tensor_parallel}", "NONE plain"]
    known = _left_out()
    return next((known[point.server, group] for group in groups if (point.server, group) in known), {})


@cache
def _left_out() -> dict[tuple[str, str], dict[str, float]]:
    return {
        (row.pop("server"), row.pop("left_out")): {name: float(text) for name, text in row.items() if text}
        for row in read_csv(LEFT_OUT)
    }


# -- tables of speculation ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arms:
    """The settings of one text and one draft that were measured side by side:
    rates in tokens per second of a client."""

    name: str
    published: Mapping[str, float]  # shape -> rate
    simulated: Mapping[str, float]

    @property
    def speedup_errors(self) -> list[float]:
        """Of each speculative setting: simulated / published speed-up over plain − 1."""
        return [
            self._speedup(self.simulated, shape) / self._speedup(self.published, shape) - 1 for shape in self.shapes
        ]

    @property
    def signs_right(self) -> list[bool]:
        """Whether each setting that is clearly faster or slower than plain is so in the simulation."""
        found = [(self._speedup(self.published, shape), self._speedup(self.simulated, shape)) for shape in self.shapes]
        return [(real > 1) == (ours > 1) for real, ours in found if abs(real - 1) > SMALL]

    @property
    def regret(self) -> float:
        """How much slower the setting that is simulated as the fastest really is than the fastest."""
        chosen = max(self.simulated, key=self.simulated.__getitem__)
        return 1 - self.published[chosen] / max(self.published.values())

    @property
    def shapes(self) -> list[str]:
        return [shape for shape in self.published if shape != "plain"]

    @staticmethod
    def _speedup(rates: Mapping[str, float], shape: str) -> float:
        return rates[shape] / rates["plain"]


def arms(rows: Sequence[PointOutcome]) -> list[Arms]:
    """Group speculative rows by data set, text, algorithm and draft, each with the plain row of its text."""
    found = []
    keys = dict.fromkeys(
        (r.point.dataset, r.point.text, r.point.algorithm, r.point.draft) for r in rows if r.point.steps
    )
    for dataset, text, algorithm, draft in keys:
        ours = [
            row
            for row in rows
            if (row.point.dataset, row.point.text) == (dataset, text)
            and (not row.point.steps or (row.point.algorithm, row.point.draft) == (algorithm, draft))
        ]
        if all(row.ms for row in ours):
            name = f"{dataset}, {text}, {algorithm}, {draft}"
            found.append(
                Arms(name, *({r.point.shape: 1 / getattr(r, time) for r in ours} for time in ("published_ms", "ms")))
            )
    return found


def arms_table(table: Mapping[str, list[PointOutcome]]) -> Iterator[str]:
    """Yield a Markdown table of speed-ups and choices by data set and column."""
    yield "| data set | times of passes | arms | speed-up: mean error | bias | sign right | regret: mean | worst |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    by_column = {column: arms(rows) for column, rows in table.items()}
    datasets = dict.fromkeys(row.point.dataset for row in next(iter(table.values())))
    for dataset in [*datasets, ""]:
        for column, every in by_column.items():
            chosen = [item for item in every if item.name.startswith(dataset)]
            count = sum(len(item.shapes) for item in chosen)
            yield f"| {dataset or '**all**'} | {column} | {count} | {' | '.join(_arms_cells(chosen))} |"


def summary_lines(table: Mapping[str, list[PointOutcome]]) -> Iterator[str]:
    """Yield the lines of the page's summary that are about speculation."""
    errors: dict[str, list[str]] = {SUMMARY[0]: [], SUMMARY[1]: [], SUMMARY[2]: []}
    for every in table.values():
        rates = [row.published_ms / row.ms - 1 for row in every if row.point.steps and row.ms is not None]
        found = arms(every)
        errors[SUMMARY[0]].append(percent(rates, mean_size))
        errors[SUMMARY[1]].append(percent([error for item in found for error in item.speedup_errors], mean_size))
        errors[SUMMARY[2]].append(percent([item.regret for item in found], statistics.fmean))
    for name, cells in errors.items():
        yield f"| {name} | {' | '.join(cells)} |"


def batches_table(table: Mapping[str, list[PointOutcome]]) -> Iterator[str]:
    """Yield a Markdown table of rates, speed-ups and choices by the number of clients and column."""
    head = "clients | times of passes | points | tokens/s: mean error | bias | speed-up: mean error | bias | sign right"
    yield f"| {head} | regret: mean | worst |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    rows = [row for row in next(iter(table.values())) if row.point.steps]
    for clients in sorted({row.point.concurrency for row in rows}):
        for column, every in table.items():
            own = [row for row in every if row.point.concurrency == clients and row.ms is not None]
            rates = [row.published_ms / row.ms - 1 for row in own if row.point.steps]
            cells = [percent(rates, mean_size), percent(rates, statistics.fmean), *_arms_cells(arms(own))]
            yield f"| {clients} | {column} | {len(rates)} | {' | '.join(cells)} |"


def _arms_cells(chosen: Sequence[Arms]) -> tuple[str, ...]:
    """Return the cells of a table: error and bias of speed-ups, signs that are right, and regret."""
    errors = [error for item in chosen for error in item.speedup_errors]
    signs = [sign for item in chosen for sign in item.signs_right]
    regrets = [item.regret for item in chosen]
    return (
        percent(errors, mean_size),
        percent(errors, statistics.fmean),
        f"{sum(signs)} of {len(signs)}",
        percent(regrets, statistics.fmean),
        percent(regrets, max),
    )


def speedups_table(columns: Sequence[str]) -> Iterator[str]:
    """Yield a Markdown table of speedups.csv: published and simulated speed-ups by the number of clients."""
    kernels = list(dict.fromkeys(_kernels(column) for column in columns))
    yield f"| data set, draft | clients | speed-up: published | {' | '.join(f'{name} (error)' for name in kernels)} |"
    yield f"| --- | --- | --- |{' --- |' * len(kernels)}"
    for point in speedup_points():
        cells = []
        for name in kernels:
            ours = point.simulated(lambda each, name=name: run_scenario(each.scenario(name), {}))
            cells.append(f"{ours:.2f} ({100 * (ours / point.published - 1):+.0f} %)")
        drafting = point.drafting
        place = f"{drafting.dataset}, {drafting.algorithm} {drafting.shape} | {drafting.concurrency}"
        yield f"| {place} | {point.published:.2f} | {' | '.join(cells)} |"


def _kernels(column: str) -> str:
    return ROOFLINE if column == ROOFLINE else "measured"


def resting_table() -> Iterator[str]:
    """Yield a Markdown table of what a draft costs that rests: more time per token with a schedule that never drafts.

    Lengths were not published: prompts of 400 tokens and outputs of 256 (assumption). The draft of the measurement is
    smaller than the EAGLE head that stands for it.
    """
    yield "| model, GPU | clients | published | simulated: draft's KV kept | and graphs in pieces |"
    yield "| --- | --- | --- | --- | --- |"
    for row in read_rows("resting_drafts.csv"):
        clients = int(row["clients"])
        hardware = {"gpu": row["gpu"], "server": row["server"], "correction": "off", "kernels": ROOFLINE}
        scenario: dict[str, Any] = {
            "model": {"target": row["model"], "weight_dtype": row["weight_dtype"], "context_len": 4096},
            "hardware": hardware,
            "speculation": {"algorithm": "NONE"},
            "workload": {
                "concurrency": clients,
                "num_requests": max(3 * clients, 12),
                "prompt": {"kind": "fixed", "value": 400},
                "output": {"kind": "fixed", "value": 256},
            },
        }
        resting = scenario | {"speculation": {"algorithm": "EAGLE", "adaptive": RESTING}}
        in_pieces = resting | {"hardware": hardware | {"piecewise_graphs": True}}
        name = f"{row['model'].split('/')[-1]} {row['weight_dtype']}, {row['gpu']}"
        published = float(row["resting_tpot_ms"]) / float(row["plain_tpot_ms"]) - 1
        try:
            plain, kept, pieces = (
                run_scenario(each, {}).summary["mean_tpot_ms"] for each in (scenario, resting, in_pieces)
            )
            cells = f"{100 * (kept / plain - 1):+.1f} % | {100 * (pieces / plain - 1):+.1f} %"
        except ForedraftError as error:
            cells = f"{failure_text(error)} | "
        yield f"| {name} | {clients} | {100 * published:+.1f} % | {cells} |"


def tails_table() -> Iterator[str]:
    """Yield a Markdown table of how far the slowest requests and gaps are from the mean, for acceptance as drafts have
    it and for independent draws.

    What was served where was not published: ours is Llama-3.1-8B on one H100, and the ratios are to be compared. The
    accept length of each run is its time between chunks over its time per token.
    """
    yield "| acceptance | latency | p90 / mean: published | simulated | p99 / mean: published | simulated |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for row, correlation in zip(
        read_rows("acceptance_tails.csv"), ({}, {"request_share": 0.0, "field_share": 0.0}), strict=True
    ):
        clients, requests = int(row["clients"]), int(row["requests"])
        prompt, output = (round(int(row[name]) / requests) for name in ("prompt_tokens", "output_tokens"))
        length = float(row["mean_itl_ms"]) / float(row["mean_tpot_ms"])
        scenario = {
            "hardware": {"server": "vllm-0.18", "kernels": ROOFLINE},
            "speculation": {"algorithm": "EAGLE3", "policy": "fixed", "steps": TAIL_STEPS},
            "acceptance": {"mean_length": round(length, 2), **correlation},
            "workload": {
                "concurrency": clients,
                "num_requests": requests,
                "prompt": {"kind": "uniform", "low": 1, "high": 2 * prompt},
                "output": {"kind": "fixed", "value": output},
            },
        }
        summary = run_scenario(scenario, {}).summary
        for name in ("tpot", "itl", "ttft"):
            cells = [row["acceptance"], name.upper()]
            for quantile in ("p90", "p99"):
                published = row[f"{quantile}_{name}_ms"]
                mean = float(row[f"mean_{name}_ms"])
                cells.append(f"{float(published) / mean:.2f}" if published else "")
                cells.append(f"{summary[f'{quantile}_{name}_ms'] / summary[f'mean_{name}_ms']:.2f}")
            yield f"| {' | '.join(cells)} |"
