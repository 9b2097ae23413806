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
    that were fitted without this point's model or draft shape."""

    point: Point
    kernels: str
    left_out: bool = False

    @property
    def key(self) -> str:
        profile = repr(PROFILES[self.point.server])
        text = json.dumps([asdict(self.point), self.kernels, self.times(), profile], sort_keys=True)
        return hashlib.sha256((_sources() + text).encode()).hexdigest()[:24]

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
        with profile_with(job.point.server, **job.times()):
            measured = job.point.measured(run_scenario(job.point.scenario(job.kernels), {}))
    except ForedraftError as error:
        return {"failure": str(error).splitlines()[-1].strip().split(";")[0]}
    return {"ms": measured.token_ms, "ttft_ms": measured.first_token_ms}


def outcomes(jobs: Sequence[PointJob], workers: int) -> dict[PointJob, dict[str, Any]]:
    """Return the result of every job, from the cache or simulated by `workers` processes."""
    folder = cache_folder("accuracy")
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[PointJob, dict[str, Any]] = {}
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


def split_times(served: ServedPoint, kernels: str) -> tuple[float, float]:
    """Return the times to the first token and per output token of a disaggregated run, in ms.

    The engines that decode have no prompts. Requests are a closed network of prompts, which the prefill engines compute
    one after another, and decoding, whose time depends on the rows of an engine.
    """
    point, prefill = served.point, served.prefill
    assert prefill is not None, f"{served.id} is not disaggregated"
    rows = math.ceil(point.concurrency / served.engines)
    prompt, output = round(point.mean(point.prompt)), point.mean(point.output)
    decoding = _cost(replace(point, concurrency=rows), kernels)
    own = replace(
        point,
        tensor_parallel=prefill.tensor,
        attention_data_parallel=prefill.data,
        expert_parallel=prefill.expert,
        concurrency=prefill.data,
    )
    prompt_ns = _cost(own, kernels).step_ns([(prompt, 0)] * prefill.data) / prefill.data
    token_ns, first_ns = 0.0, float(prompt_ns)
    for _ in range(STEADY_ROUNDS):
        token_ns = decoding.decode_ns(max(rows, 1), PLAIN_ROUND, round(rows * (prompt + output / 2)))
        rate = min(served.prefill_engines / prompt_ns, point.concurrency / (prompt_ns + output * token_ns))
        rows = max(1, round(rate * output * token_ns / served.engines))
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
    whole = [item for item in points if not item.engines]
    found = outcomes([PointJob(item.point, MEASURED) for item in whole], workers)
    failed = [item for item in whole if "failure" in found[PointJob(item.point, MEASURED)]]
    sample = roofline_sample([item for item in whole if item not in failed])
    found |= outcomes([PointJob(item.point, ROOFLINE) for item in [*failed, *sample]], workers)
    for kernels, items in ((MEASURED, whole), (ROOFLINE, [*failed, *sample])):
        for item in items:
            result = found[PointJob(item.point, kernels)]
            if "failure" not in result:
                yield item, kernels, result["ttft_ms"], result["ms"]
    for item in points:
        for kernels in KERNELS if item.engines else ():
            try:
                yield item, kernels, *split_times(item, kernels)
                break
            except ForedraftError:
                continue


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
    jobs = [(kernels, _with_drafts(point, kernels)) for kernels in KERNELS for point in points]
    found, rows = outcomes([job for _, job in jobs], workers), []
    for kernels, job in jobs:
        point, result = job.point, found[job]
        if "failure" not in result:
            cells = (point.dataset, point.text, point.algorithm, point.draft, point.shape)
            where = place(point, Layout(point.tensor_parallel, 1, 1))
            rows.append([*where, kernels, *cells, f"{point.published_ms:.5g}", f"{result['ms']:.5g}"])
    names = ("kernels", "dataset", "text", "algorithm", "draft", "shape", "published_ms", "simulated_ms")
    _write("drafted.csv", [*PLACE, "run", *names], rows)


def _with_drafts(point: Point, kernels: str) -> PointJob:
    """Return the job of a point of rounds.csv or unseen.csv. Where the database has no kernels of a draft, the roofline
    prices it."""
    return PointJob(point, "auto" if point.is_pinned and kernels == MEASURED else kernels, left_out=True)


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
        (point, kernels): PointJob(point, source) for point in unseen_points() for kernels, source in sources.items()
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
