"""Simulates all published serving points (silicon.py, and the plain rows of rounds.csv) and writes
published/serving.csv, which deployments.py reads.

    python benchmarks/serving_runs.py [--workers N]    (needs the extra measured; half an hour on one core)

What was simulated before is kept in the cache folder until the sources change. Disaggregated runs are not simulated
step by step: their time per output token is that of a decode pass, and their time to the first token is not fitted.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from accuracy_runs import MEASURED, ROOFLINE, AccuracyJob, outcomes
from foredraft.core.contract.step import PLAIN_ROUND
from foredraft.core.errors import ForedraftError
from foredraft.observe.distribution.install_hint import install_command
from foredraft.sim.assembly import assemble
from foredraft.sim.cost.deployments.evidence import Place, place_of
from foredraft.sim.cost.hardware import Parallelism
from foredraft.sim.cost.round import RoundCost
from foredraft.sim.scenario_file import scenario_from_dict
from points import Point, profile_with, round_points
from silicon import Layout, ServedPoint, served_points, silicon_file

SERVING = Path(__file__).parent / "published" / "serving.csv"
SAMPLED_CLIENTS, SAMPLED_OUTPUT = 128, 1024
"""The most clients and output tokens of points that are also simulated with the roofline."""
STEADY_ROUNDS = 20
"""Rounds in which the rows of a decode engine settle."""


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
    found = outcomes([AccuracyJob(item.point, MEASURED) for item in whole], workers)
    failed = [item for item in whole if "failure" in found[AccuracyJob(item.point, MEASURED)]]
    sample = roofline_sample([item for item in whole if item not in failed])
    found |= outcomes([AccuracyJob(item.point, ROOFLINE) for item in [*failed, *sample]], workers)
    for kernels, items in ((MEASURED, whole), (ROOFLINE, [*failed, *sample])):
        for item in items:
            result = found[AccuracyJob(item.point, kernels)]
            if "failure" not in result:
                yield item, kernels, result["ttft_ms"], result["ms"]
    for item in points:
        for kernels in (MEASURED, ROOFLINE) if item.engines else ():
            try:
                yield item, kernels, *split_times(item, kernels)
                break
            except ForedraftError:
                continue


def place(item: ServedPoint) -> Place:
    """Return what a point's deployment shares with others."""
    run = assemble(scenario_from_dict(item.point.scenario(ROOFLINE), item.point.dataset))
    parallel = Parallelism(item.layout.tensor, item.layout.data, item.layout.expert)
    words = f"{item.version} {item.date}".strip()
    return place_of(run.target, item.point.gpu, item.point.server, parallel, words)


def write(points: Sequence[ServedPoint], workers: int) -> None:
    """Simulate the points and write serving.csv."""
    names = ("kernels", "source", "engines", "clients", "prompt", "output", "ttft_ms", "tpot_ms")
    found = list(simulated(points, workers))
    with SERVING.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*Place._fields[:-1], "run", *names, "simulated_ttft_ms", "simulated_tpot_ms"])
        for item, kernels, ttft_ms, tpot_ms in found:
            point, source = item.point, "InferenceX" if item.is_inferencex else "aiconfigurator"
            source = "SpecBundle" if point.tokens_per_s else source
            first = "" if item.engines or point.ttft_ms is None else f"{point.ttft_ms:.5g}"
            loads = (item.engines or 1, point.concurrency, point.prompt, point.output)
            times = (first, f"{point.published_ms:.5g}", f"{ttft_ms:.5g}", f"{tpot_ms:.5g}")
            writer.writerow([*place(item), kernels, source, *loads, *times])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes; default: one per CPU")
    arguments = parser.parse_args()
    path = silicon_file()
    if path is None:
        raise SystemExit(f"needs measured kernels: {install_command('measured')}")
    write([*served_points(path)[0], *specbundle_points()], arguments.workers)


if __name__ == "__main__":
    main()
