"""Simulates published points, from a cache or anew, and calibrates them with each other:
what accuracy.py makes its tables of."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from foredraft.core.errors import ForedraftError
from foredraft.sim.calibration.fit import spreads
from foredraft.sim.calibration.least_squares import Parameter, fit_parameters, left_out_errors
from foredraft.sim.cost.calibration import LAUNCH_TIMES
from foredraft.sim.cost.measured.tables import cache_folder
from foredraft.sim.cost.server import PROFILES
from foredraft.simulation import run_scenario  # imported before worker processes are forked, so that they have it
from points import DEVICE, Estimate, Point, estimate, model_of, profile_with, read_csv, rounds_of

ROOT = Path(__file__).parents[1]
LEFT_OUT = Path(__file__).parent / "published" / "left_out.csv"
ROOFLINE, MEASURED, OTHERS, CALIBRATED = "roofline", "measured", "left out", "calibrated"
LEAST_TO_CALIBRATE = 4  # points of a data set


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
class Job:
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
        return left_out_times(self.point) if self.column == OTHERS else {}


@dataclass(frozen=True, slots=True)
class Outcome:
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


def run(job: Job) -> dict[str, Any]:
    """Simulate a job. Returns its times, or the message of what cannot be simulated."""
    kernels = ROOFLINE if job.column == ROOFLINE else MEASURED
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


def outcomes(jobs: Sequence[Job], workers: int) -> dict[Job, dict[str, Any]]:
    """Return the result of every job, from the cache or simulated by `workers` processes."""
    folder = cache_folder("accuracy")
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[Job, dict[str, Any]] = {}
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


def simulate_all(points: Sequence[Point], columns: Sequence[str], workers: int) -> dict[str, list[Outcome]]:
    """Return the outcomes of all points by column, and those of calibrations."""
    jobs = [[Job(point, column) for point in points] for column in columns]
    found = outcomes([job for row in jobs for job in row], workers)
    table = {
        column: [Outcome(job.point, job.point.published_ms, **found[job]) for job in row]
        for column, row in zip(columns, jobs, strict=True)
    }
    kernels = MEASURED if MEASURED in table else ROOFLINE
    return table | {CALIBRATED: calibrated(table[kernels], kernels)}


def calibrated(rows: Sequence[Outcome], kernels: str) -> list[Outcome]:
    """Return the outcomes with a calibration by the other points of each data set, as `sim/calibration` fits it: around
    the profile, with its priors. Simulations are those of `rows`; the estimate has the slopes. The time to the first
    token is not fitted."""
    found: dict[Point, Outcome] = {}
    names = (DEVICE, *LAUNCH_TIMES)
    for dataset in dict.fromkeys(row.point.dataset for row in rows):
        own = [row for row in rows if row.point.dataset == dataset and row.ms is not None]
        if len(own) < LEAST_TO_CALIBRATE:
            continue
        estimates = [estimate(row.point, kernels) for row in own]
        ratios = np.array([row.ms * 1e6 / item.token_ns({}) for row, item in zip(own, estimates, strict=True)])
        launch, wide = PROFILES[own[0].point.server].launch, spreads()
        parameters = [
            Parameter(name, "", getattr(launch, name, 1.0), wide[name], 0.2 if name == DEVICE else 0.0)
            for name in names
        ]

        def predict(
            x: np.ndarray, estimates: Sequence[Estimate] = estimates, ratios: np.ndarray = ratios
        ) -> np.ndarray:
            waits = dict(zip(names, map(float, x), strict=True))
            return ratios * np.array([item.token_ns(waits) for item in estimates]) / 1e6

        fit = fit_parameters(parameters, predict, np.array([row.published_ms for row in own]))
        errors, _ = left_out_errors(fit, range(len(own)), linearised=True)
        for row, error in zip(own, errors, strict=True):
            found[row.point] = replace(row, ms=row.published_ms * (1 + float(error)), ttft_ms=None)
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
