"""Simulates the published points, from a cache or anew, and writes their times beside the published ones into
`published/`, which accuracy.py reads:

    serving.csv   points without drafts (silicon.py, and the plain rows of rounds.csv), with the profiles as shipped
    drafted.csv   points of rounds.csv with and without drafts, with profiles that were fitted without their models and
                  draft shapes
    speedups.csv  speed-ups of an older server with up to 48 clients; its columns `roofline` and `measured`
    unseen.csv    points with drafts of which no fit knows; the same columns

Results are kept in the cache folder until the sources change, so a run that was stopped goes on. Disaggregated runs are
not simulated step by step: their time per output token is that of a decode pass, and their time to the first token is
not fitted.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from foredraft.core.contract.step import PLAIN_ROUND
from foredraft.core.errors import ForedraftError
from foredraft.sim.assembly import assemble
from foredraft.sim.cost.deployments.evidence import Place, place_of
from foredraft.sim.cost.hardware import Parallelism
from foredraft.sim.cost.measured.tables import cache_folder
from foredraft.sim.cost.round import RoundCost
from foredraft.sim.cost.server import PROFILES
from foredraft.sim.scenario_file import scenario_from_dict
from foredraft.simulation import run_scenario  # imported before worker processes are forked, so that they have it
from points import (
    PUBLISHED,
    Point,
    model_of,
    profile_with,
    read_rows,
    round_points,
    rounds_of,
    speedup_points,
    unseen_points,
)
from silicon import Layout, ServedPoint

ROOT = Path(__file__).parents[1]
MEASURED, ROOFLINE = KERNELS = "measured", "roofline"
SAMPLED_CLIENTS, SAMPLED_OUTPUT = 128, 1024
"""The most clients and output tokens of points that are also simulated with the roofline."""
STEADY_ROUNDS = 20
"""Rounds in which the rows of a decode engine settle."""
PLACE = Place._fields[:-1]


@dataclass(frozen=True, slots=True)
class PointJob:
    """A simulation to make: a point, the source of the times of passes, and whether the times of the launch are those
    that were fitted without this point's model or draft shape. Of a disaggregated run its engines, else 0 and None."""

    point: Point
    kernels: str
    left_out: bool = False
    engines: int = 0
    prefill: Layout | None = None
    prefill_engines: int = 0

    @classmethod
    def of(cls, point: Point, kernels: str, left_out: bool = False) -> PointJob:
        """Return the job of a point. Points that differ by what was measured, or by names alone, have one job."""
        kind = {name: getattr(point, name) and 1.0 for name in ("tokens_per_s", "tpot_ms")}
        return cls(replace(point, dataset="", text="", draft="", ttft_ms=None, **kind), kernels, left_out)

    @classmethod
    def served(cls, served: ServedPoint, kernels: str) -> PointJob:
        """Return the job of a point without drafts."""
        own = cls.of(served.point, kernels)
        return replace(own, engines=served.engines, prefill=served.prefill, prefill_engines=served.prefill_engines)

    @property
    def key(self) -> str:
        profile = repr(PROFILES[self.point.server])
        text = json.dumps([asdict(self), self.times(), profile], sort_keys=True)
        return hashlib.sha256((_sources() + text).encode()).hexdigest()[:24]

    @property
    def tables(self) -> tuple[str, ...]:
        """What the tables of kernels of a job are of, so that one process makes them: jobs of one value follow one
        another."""
        point = self.point
        parallel = (point.tensor_parallel, point.attention_data_parallel, point.expert_parallel, self.prefill)
        names = (point.gpu, point.server, point.model, point.weight_dtype, point.kv_dtype, self.kernels, *parallel)
        return tuple(map(str, names))

    def times(self) -> dict[str, float]:
        """Return the times of the launch that fit_servers.py found without this point's model or draft shape."""
        groups = [model_of(self.point), "NONE plain"]
        if self.point.steps:
            groups = [rounds_of(model_of(self.point)), f"{self.point.algorithm} {self.point.shape}"]
        known = _left_out_times() if self.left_out else {}
        return next((known[self.point.server, name] for name in groups if (self.point.server, name) in known), {})


@cache
def _left_out_times() -> dict[tuple[str, str], dict[str, float]]:
    return {
        (row.pop("server"), row.pop("left_out")): {name: float(text) for name, text in row.items() if text}
        for row in read_rows("left_out.csv")
    }


@cache
def _sources() -> str:
    """Return a digest of the code that a simulation depends on, but for the profiles, of which it depends on one."""
    folders = (ROOT / name for name in ("core", "sim", "observe"))
    files = sorted(path for folder in folders for path in folder.rglob("*.py") if path.name != "server.py")
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def run(job: PointJob) -> dict[str, Any]:
    """Simulate a job. Returns its times, or the message of what cannot be simulated."""
    try:
        if job.engines:
            first_ms, token_ms = split_times(job)
            return {"ms": token_ms, "ttft_ms": first_ms}
        with profile_with(job.point.server, **job.times()):
            measured = job.point.measured(run_scenario(job.point.scenario(job.kernels), {}))
    except ForedraftError as error:
        return {"failure": str(error).splitlines()[-1].strip().split(";")[0]}
    return {"ms": measured.token_ms, "ttft_ms": measured.first_token_ms}


def _run_and_keep(jobs: Sequence[PointJob]) -> list[dict[str, Any]]:
    """Simulate jobs one after another, and keep each result at once."""
    found = []
    for job in jobs:
        path = _kept(job)
        found.append(run(job))
        partial = path.with_name(f".{job.key}.{os.getpid()}")
        partial.write_text(json.dumps(found[-1]), encoding="utf-8")
        partial.replace(path)
    return found


def _kept(job: PointJob) -> Path:
    return cache_folder("accuracy") / f"{job.key}.json"


def outcomes(jobs: Iterable[PointJob], workers: int) -> dict[PointJob, dict[str, Any]]:
    """Return the result of every job, from the cache or simulated by `workers` processes."""
    cache_folder("accuracy").mkdir(parents=True, exist_ok=True)
    found: dict[PointJob, dict[str, Any]] = {}
    missing: dict[tuple[str, ...], list[PointJob]] = {}
    for job in dict.fromkeys(jobs):
        if _kept(job).is_file():
            found[job] = json.loads(_kept(job).read_text(encoding="utf-8"))
        else:
            missing.setdefault(job.tables, []).append(job)
    count, began = sum(map(len, missing.values())), time.monotonic()
    with ProcessPoolExecutor(workers) as pool:
        pending = {pool.submit(_run_and_keep, own): own for own in sorted(missing.values(), key=len, reverse=True)}
        for future in as_completed(pending):
            own = pending.pop(future)
            found |= zip(own, future.result(), strict=True)
            left = sum(map(len, pending.values()))
            words = f"{count - left:,} of {count:,} simulations in {time.monotonic() - began:,.0f} s"
            print(words, file=sys.stderr, flush=True)
    return found


# -- without drafts ----------------------------------------------------------------------------------------------------


def specbundle_points() -> list[ServedPoint]:
    """Return the plain rows of SpecBundle, whose time per token has the prompt in it."""
    return [
        ServedPoint(
            id=f"{point.dataset} {point.text}",
            family=point.model,
            precision=point.weight_dtype,
            version="",
            date="",
            is_inferencex=False,
            layout=Layout(point.tensor_parallel, 1, 1),
            point=point,
        )
        for point in round_points()
        if not point.steps and point.server == "sglang-0.5"
    ]


def split_times(job: PointJob) -> tuple[float, float]:
    """Return the times to the first token and per output token of a disaggregated run, in ms.

    The engines that decode have no prompts. Requests are a closed network of prompts, which the prefill engines compute
    one after another, and decoding, whose time depends on the rows of an engine.
    """
    point, prefill = job.point, job.prefill
    assert prefill is not None, f"{point.model} is not disaggregated"
    rows = math.ceil(point.concurrency / job.engines)
    prompt, output = round(point.mean(point.prompt)), point.mean(point.output)
    decoding = _cost(replace(point, concurrency=rows), job.kernels)
    own = replace(
        point,
        tensor_parallel=prefill.tensor,
        attention_data_parallel=prefill.data,
        expert_parallel=prefill.expert,
        concurrency=prefill.data,
    )
    prompt_ns = _cost(own, job.kernels).step_ns([(prompt, 0)] * prefill.data) / prefill.data
    token_ns, first_ns = 0.0, float(prompt_ns)
    for _ in range(STEADY_ROUNDS):
        token_ns = decoding.decode_ns(max(rows, 1), PLAIN_ROUND, round(rows * (prompt + output / 2)))
        rate = min(job.prefill_engines / prompt_ns, point.concurrency / (prompt_ns + output * token_ns))
        rows = max(1, round(rate * output * token_ns / job.engines))
        first_ns = point.concurrency / rate - output * token_ns
    return max(first_ns, prompt_ns) / 1e6, token_ns / 1e6


def _cost(point: Point, kernels: str) -> RoundCost:
    with profile_with(point.server):
        cost = assemble(scenario_from_dict(point.scenario(kernels), point.dataset)).cost
    assert isinstance(cost, RoundCost), "a point's scenario has no profile"
    return cost


def roofline_sample(points: Sequence[ServedPoint]) -> list[ServedPoint]:
    """Return two points of each deployment, of few and of more tokens, that are also simulated without measured
    kernels."""
    members: dict[tuple[str, ...], list[ServedPoint]] = {}
    for item in points:
        if not item.engines and item.point.concurrency <= SAMPLED_CLIENTS:
            members.setdefault(item.deployment, []).append(item)
    chosen = []
    for own in members.values():
        own.sort(key=lambda item: (item.point.output, item.point.prompt, item.point.concurrency))
        short = [item for item in own if item.point.output <= SAMPLED_OUTPUT] or own
        chosen += [short[i] for i in sorted({len(short) // 4, 3 * len(short) // 4})]
    return chosen


def simulated(points: Sequence[ServedPoint], workers: int) -> Iterator[tuple[ServedPoint, str, float, float]]:
    """Yield points with the source of kernels, and the simulated times to the first token and per output token in ms.

    What has no measured kernels is simulated with the roofline. Points that cannot be simulated are left out.
    """
    found = outcomes([PointJob.served(item, MEASURED) for item in points], workers)
    failed = [item for item in points if "failure" in found[PointJob.served(item, MEASURED)]]
    by_roofline = [*failed, *roofline_sample([item for item in points if item not in failed])]
    found |= outcomes([PointJob.served(item, ROOFLINE) for item in by_roofline], workers)
    for kernels, items in ((MEASURED, points), (ROOFLINE, by_roofline)):
        for item in items:
            result = found[PointJob.served(item, kernels)]
            if "failure" not in result:
                yield item, kernels, result["ttft_ms"], result["ms"]


def place(point: Point, layout: Layout, words: str = "") -> Place:
    """Return what a point's deployment shares with others."""
    run = assemble(scenario_from_dict(point.scenario(ROOFLINE), point.dataset))
    parallel = Parallelism(layout.tensor, layout.data, layout.expert)
    return place_of(run.target, point.gpu, point.server, parallel, words)


def write_serving(points: Sequence[ServedPoint], workers: int) -> None:
    """Simulate the points and write serving.csv."""
    rows = []
    for item, kernels, ttft_ms, tpot_ms in simulated(points, workers):
        point, source = item.point, "InferenceX" if item.is_inferencex else "aiconfigurator"
        source = "SpecBundle" if point.tokens_per_s else source
        first = "" if item.engines or point.ttft_ms is None else f"{point.ttft_ms:.5g}"
        loads = (item.engines or 1, point.concurrency, point.prompt, point.output)
        times = (first, f"{point.published_ms:.5g}", f"{ttft_ms:.5g}", f"{tpot_ms:.5g}")
        where = place(point, item.layout, f"{item.version} {item.date}".strip())
        rows.append([*where, kernels, source, *loads, *times])
    names = ("kernels", "source", "engines", "clients", "prompt", "output", "ttft_ms", "tpot_ms")
    _write("serving.csv", [*PLACE, "run", *names, "simulated_ttft_ms", "simulated_tpot_ms"], rows)


# -- with drafts -------------------------------------------------------------------------------------------------------


def write_drafted(workers: int) -> None:
    """Simulate the points of rounds.csv, and those of unseen.csv whose host is not slow, and write drafted.csv."""
    points = [*round_points(), *(point for point in unseen_points() if point.is_pinned)]
    jobs = [(kernels, point, _with_drafts(point, kernels)) for kernels in KERNELS for point in points]
    found, rows = outcomes([job for *_, job in jobs], workers), []
    for kernels, point, job in jobs:
        result = found[job]
        if "failure" not in result:
            cells = (point.dataset, point.text, point.algorithm, point.draft, point.shape)
            where = place(point, Layout(point.tensor_parallel, 1, 1))
            rows.append([*where, kernels, *cells, f"{point.published_ms:.5g}", f"{result['ms']:.5g}"])
    names = ("kernels", "dataset", "text", "algorithm", "draft", "shape", "published_ms", "simulated_ms")
    _write("drafted.csv", [*PLACE, "run", *names], rows)


def _with_drafts(point: Point, kernels: str) -> PointJob:
    """Return the job of a point of rounds.csv or unseen.csv. Where the database has no kernels of a draft, the roofline
    prices it."""
    return PointJob.of(point, "auto" if point.is_pinned and kernels == MEASURED else kernels, left_out=True)


def write_speedups() -> None:
    """Simulate the points of speedups.csv and write its columns of simulated speed-ups."""
    rows = read_rows("speedups.csv")
    for row, point in zip(rows, speedup_points(), strict=True):
        for kernels in KERNELS:
            row[kernels] = f"{point.simulated(lambda each: run_scenario(each.scenario(kernels), {})):.4g}"  # noqa: B023
    _write("speedups.csv", list(rows[0]), [list(row.values()) for row in rows])


def write_unseen(workers: int) -> None:
    """Simulate the points of unseen.csv and write its columns of simulated times per output token. Where the database
    has no kernels of a draft, the roofline prices it."""
    sources = {MEASURED: "auto", ROOFLINE: ROOFLINE}
    jobs = {
        (point, kernels): PointJob.of(point, source) for point in unseen_points() for kernels, source in sources.items()
    }
    found, rows = outcomes(list(jobs.values()), workers), read_rows("unseen.csv")
    for row, point in zip(rows, unseen_points(), strict=True):
        row |= {kernels: f"{found[jobs[point, kernels]]['ms']:.5g}" for kernels in KERNELS}
    _write("unseen.csv", list(rows[0]), [list(row.values()) for row in rows])


def _write(name: str, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with (PUBLISHED / name).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(rows)
