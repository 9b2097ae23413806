"""Fits what the device waits for under each server to published measurements, as `sim/cost/server.py` has it, and prints the errors.

    python benchmarks/fit_servers.py [SERVER …] [--write]          (needs the extra measured; some minutes)

`--write` keeps the times that were fitted without a model or a draft shape in `benchmarks/left_out.csv`, for accuracy.py.

First the waits of serving without speculation: per pass, per request of a step, per collective, and, but for vLLM, per kernel of a
pass that is not captured. Least squares on the logarithm of the time per output token (of a whole request where clients keep step), with
a loss that outliers do not draw; simulations of published points correct an estimate, which gives the slopes. Errors are of
points whose model was left out of the fit where there are two models, else whose tensor parallelism was.

Then speculative rounds of one request. A published row gives the time of one round: accept length × time per output token. What kernels and
the first fit do not explain of it is

    draft step · steps + more for an EAGLE-3 step · steps + tree · (1 if topk > 1) + gap · captured passes

of which each server has those that ROUNDS names.

Least squares on relative errors, parameters not below 0. The error is that of rows whose draft shape was left out of the fit.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from foretoken import simulate
from foretoken.core.model_shape import lookup_model
from foretoken.sim.cost.draft import EAGLE3, DraftShape, eagle3_head, eagle_head
from foretoken.sim.cost.hardware import lookup_gpu
from foretoken.sim.cost.launch import FULL_GRAPH, LaunchCost
from foretoken.sim.cost.measured import measured_tables
from foretoken.sim.cost.round import GREEDY, RoundCost
from foretoken.sim.cost.server import PROFILES
from points import Estimate, Point, estimate, plain_points, profile_with, round_points
from scipy.optimize import least_squares, nnls

WAITS: dict[str, tuple[str, ...]] = {
    "sglang-0.5": ("graph_gap_ns", "row_gap_ns", "collective_gap_ns", "eager_kernel_ns"),
    "vllm-0.18": ("graph_gap_ns", "row_gap_ns", "collective_gap_ns"),
    "trtllm-1.x": ("graph_gap_ns", "row_gap_ns", "collective_gap_ns", "eager_kernel_ns"),
}
"""The servers of plain.csv, and what is fitted of each."""
SCALES = {
    "graph_gap_ns": 300e3,
    "row_gap_ns": 10e3,
    "collective_gap_ns": 3e3,
    "eager_kernel_ns": 20e3,
}
"""How large each is about: where a fit starts from 0, and its steps."""
OUTLIER = 0.05
"""Errors beyond it count as their size, not as its square: some published times are twice those beside them."""
ROUNDS_OF_FIT = 2
USUAL_COLLECTIVE_NS = 2e3, 0.5e3
"""What collectives wait, with a deviation, before a server's points are seen. Assumption: it is the ranks' skew, not the server's, and
few points tell it from a gap per pass. Without it SGLang's points say 2.0 … 2.6 us, vLLM's 1.4 … 2.0, and TensorRT-LLM's 0."""
EVERY = {"sglang-0.5": 1, "vllm-0.18": 3, "trtllm-1.x": 5}
MOST_CLIENTS, LONGEST_TTFT_MS = 352, 5_000
"""Each third point, say, of plain.csv is fitted (1: all), of those whose requests do not queue for memory (which takes many
seconds)."""
SHORT_PROMPT = 1024
"""The most prompt tokens of gpt-oss: prompts of 8,192 take twice what the database's kernels take, and no wait explains that."""

LEFT_OUT = Path(__file__).parent / "left_out.csv"

SHARES = ("draft_step_ns", "tree_ns")
ROUNDS = {"sglang-0.5": SHARES, "vllm-0.9": ("graph_gap_ns", "draft_step_ns", "eagle3_step_ns")}
"""The servers of rounds.csv, and what is fitted of each. sglang-0.5 has its gap from the first fit."""
CONTEXT = 600  # tokens behind a round on average; 1,000 more or fewer change a round of one row by 1 %


# -- without speculation ----------------------------------------------------------------------------------------------


def fitted_points(server: str) -> list[Point]:
    """Return the points to which the waits of `server` are fitted: those whose kernels are measured, each once."""
    usable = [
        point
        for point in dict.fromkeys(plain_points())
        if point.server == server
        and point.concurrency <= MOST_CLIENTS
        and point.ttft_ms < LONGEST_TTFT_MS
        and not ("gpt-oss" in point.model and (server == "trtllm-1.x" or point.prompt > SHORT_PROMPT))
    ]
    alone = [point for point in round_points() if point.server == server and not point.steps]
    return usable[:: EVERY[server]] + alone


def fitted_ms(point: Point, token_ms: float, first_token_ms: float | None) -> float:
    """Return the time per output token that is fitted: where clients keep step, that of a whole request.

    How much of a request is its first token and how much the others depends on how long clients that began together stay so: where
    published times to the first token fall with longer outputs, those per token rise by as much. Their sum does not depend on it.
    """
    together = not point.spread and first_token_ms is not None
    return token_ms + (first_token_ms / point.output if together else 0.0)


def fit_to(estimates: Sequence[Estimate], ratios: np.ndarray, names: Sequence[str], start: np.ndarray) -> np.ndarray:
    """Return the waits called `names` [p] that meet the published times best, if simulations are `ratios` times the estimates.

    What the points do not tell stays as a launch without a fit has it, wherever the search starts.
    """
    published = np.array([fitted_ms(item.point, item.point.published_ms, item.point.ttft_ms) for item in estimates])
    sizes = np.array([SCALES[name] for name in names])

    def errors(x: np.ndarray) -> np.ndarray:
        waits = dict(zip(names, x * sizes, strict=True))
        usual, deviation = USUAL_COLLECTIVE_NS
        prior = OUTLIER * (waits["collective_gap_ns"] - usual) / deviation
        return np.append(
            np.log(ratios * np.array([item.token_ns(waits) for item in estimates]) / 1e6 / published), prior
        )

    unknown = np.array([getattr(FULL_GRAPH, name) for name in names])
    found = [
        least_squares(errors, x / sizes, bounds=(0.0, np.inf), loss="soft_l1", f_scale=OUTLIER)
        for x in (unknown, start, sizes)
    ]
    return min(found, key=lambda fit: round(fit.cost, 6)).x * sizes


def fit_waits(server: str) -> tuple[dict[str, np.ndarray], list[Point], np.ndarray, np.ndarray]:
    """Fit WAITS of `server`. Returns the values by what was left out ("": nothing), the points, and the errors with and without.

    Simulations say how far the estimates are from them, at the solution so far; then the estimates are fitted, and simulated again.
    """
    names, estimates = WAITS[server], [estimate(point) for point in fitted_points(server)]
    points = [item.point for item in estimates]
    published = np.array([fitted_ms(point, point.published_ms, point.ttft_ms) for point in points])
    x = np.array([getattr(PROFILES[server].launch, name) for name in names])
    for _ in range(ROUNDS_OF_FIT):
        waits = dict(zip(names, map(float, x), strict=True))
        with profile_with(server, **waits):
            measured = [point.measured(simulate(point.scenario("measured"))) for point in points]
        simulated = np.array([fitted_ms(point, *item) for point, item in zip(points, measured, strict=True)])
        print(f"    {server}: {len(points)} simulations with {waits}", file=sys.stderr)
        ratios = simulated * 1e6 / [item.token_ns(waits) for item in estimates]
        x = fit_to(estimates, ratios, names, x)
    groups = groups_of(points)
    values, left_out = {"": x}, np.empty(len(points))
    for group in dict.fromkeys(groups):
        kept = [i for i, other in enumerate(groups) if other != group]
        values[group] = fit_to([estimates[i] for i in kept], ratios[kept], names, x)
        without = dict(zip(names, values[group], strict=True))
        for i, other in enumerate(groups):
            if other == group:
                left_out[i] = ratios[i] * estimates[i].token_ns(without) / 1e6 / published[i] - 1
    with_all = dict(zip(names, x, strict=True))
    errors = ratios * [item.token_ns(with_all) for item in estimates] / 1e6 / published - 1
    return values, points, errors, left_out


def groups_of(points: Sequence[Point]) -> list[str]:
    """Return what is left out of the fit at a time, for each point: its model, or its tensor parallelism where there is one model."""
    models = [point.model.split("/")[-1].lower() for point in points]
    return models if len(set(models)) > 1 else [f"tensor parallel {point.tensor_parallel}" for point in points]


def print_waits(server: str) -> dict[str, dict[str, float]]:
    """Print the fit. Returns the times that were fitted without each group."""
    values, points, errors, left_out = fit_waits(server)
    print(f"{server} without speculation ({len(points)} points)")
    for group, found in values.items():
        words = ", ".join(f"{name} {value:.4g}" for name, value in zip(WAITS[server], found, strict=True))
        print(f"    without {group}: {words}" if group else f"    {words}")
    for words, each in (("mean error", errors), ("of what was left out", left_out)):
        print(
            f"    {words} {100 * np.abs(each).mean():.1f} %, bias {100 * each.mean():+.1f} %, largest {100 * np.abs(each).max():.1f} %"
        )
    return {group: dict(zip(WAITS[server], map(float, found), strict=True)) for group, found in values.items()}


# -- speculative rounds -----------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One published row: its draft shape, the round's time, and what kernels and known waits take of it, in ns."""

    shape: str  # algorithm and draft shape
    steps: int
    topk: int
    round_ns: float
    known_ns: float

    @property
    def features(self) -> dict[str, float]:
        passes = 2.0 if self.steps else 1.0
        return {
            "graph_gap_ns": passes,
            "draft_step_ns": float(self.steps),
            "eagle3_step_ns": float(self.steps) if self.shape.startswith(EAGLE3) else 0.0,
            "tree_ns": float(self.topk > 1),
        }


def published_rows(server: str) -> list[Row]:
    """Return the rows of one request under `server`, with what is known of each round."""
    costs: dict[tuple[str, str, str], RoundCost] = {}
    rows = []
    for point in round_points():
        if point.server != server or point.concurrency != 1:
            continue
        key = point.model, point.gpu, point.algorithm
        if key not in costs:
            costs[key] = _cost(*key, server)
        known = costs[key].decode_ns(1, point.steps, point.topk, point.num_draft_tokens, CONTEXT)
        rows.append(
            Row(
                f"{point.algorithm} {point.shape}",
                point.steps,
                point.topk,
                point.published_ms * point.accept_length * 1e6,
                float(known),
            )
        )
    return rows


def _cost(model: str, gpu: str, algorithm: str, server: str) -> RoundCost:
    target, kernels_of = lookup_model(model), PROFILES[server].kernels_of
    heads = {"EAGLE": eagle_head, "EAGLE3": eagle3_head}
    draft: DraftShape | None = heads[algorithm](target) if algorithm in heads else None
    known: LaunchCost = replace(PROFILES[server].launch, **dict.fromkeys(ROUNDS[server], 0.0))
    return RoundCost(
        target,
        lookup_gpu(gpu),
        1,
        draft,
        launch=known,
        tables=measured_tables(target, gpu, kernels_of, 1),
        draft_tables=None if draft is None else measured_tables(draft.body, gpu, kernels_of, 1),
        sampling=GREEDY,
    )


def fit_rounds(rows: Sequence[Row], names: Sequence[str]) -> np.ndarray:
    """Return the times called `names`, ns [len(names)]."""
    weights = np.array([1 / row.round_ns for row in rows])
    features = np.array([[row.features[name] for name in names] for row in rows]) * weights[:, None]
    rest = np.array([row.round_ns - row.known_ns for row in rows]) * weights
    return nnls(features, rest)[0]


def errors(rows: Sequence[Row], names: Sequence[str], values: np.ndarray) -> np.ndarray:
    """Return predicted / published − 1 of each row."""
    return np.array(
        [(row.known_ns + sum(row.features[n] * x for n, x in zip(names, values, strict=True))) / row.round_ns - 1 for row in rows]
    )  # fmt: skip


def rounds_without(rows: Sequence[Row], names: Sequence[str]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the times fitted without each draft shape, and the error of each row by those without its own."""
    left_out, values = np.empty(len(rows)), {}
    for shape in dict.fromkeys(row.shape for row in rows):
        inside = [i for i, row in enumerate(rows) if row.shape == shape]
        values[shape] = fit_rounds([row for row in rows if row.shape != shape], names)
        left_out[inside] = errors([rows[i] for i in inside], names, values[shape])
    return values, left_out


def print_rounds(server: str) -> dict[str, dict[str, float]]:
    """Print the fit. Returns the times that were fitted without each draft shape."""
    rows, names = published_rows(server), ROUNDS[server]
    values = fit_rounds(rows, names)
    without, left_out = rounds_without(rows, names)
    print(f"{server}, rounds of one request ({len(rows)} rows)")
    for name, value in zip(names, values, strict=True):
        print(f"    {name:16} {value / 1e3:8.0f} us")
    print(
        f"    mean error of shapes left out {100 * np.abs(left_out).mean():.1f} %, largest {100 * np.abs(left_out).max():.1f} %"
    )
    return {shape: dict(zip(names, found, strict=True)) for shape, found in without.items()}


def write_left_out(found: dict[str, dict[str, dict[str, float]]]) -> None:
    """Write the times that were fitted without each group of a server; rows of other servers stay."""
    names = ("server", "left_out", *WAITS["trtllm-1.x"], *SHARES, "eagle3_step_ns")
    with LEFT_OUT.open(newline="", encoding="utf-8") as file:
        rows = [{name: row.get(name) for name in names} for row in csv.DictReader(file) if row["server"] not in found]
    for server, groups in found.items():
        for group, times in groups.items():
            rows.append(
                {"server": server, "left_out": group, **{name: f"{value:.6g}" for name, value in times.items()}}
            )
    with LEFT_OUT.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: (row["server"], row["left_out"])))


def main() -> None:
    servers = [name for name in sys.argv[1:] if name != "--write"] or list(dict.fromkeys([*WAITS, *ROUNDS]))
    found = {server: {} for server in servers}
    for server in servers:
        fitted: dict[str, float] = {}
        if server in WAITS:
            found[server] |= print_waits(server)
            fitted = found[server].pop("")
        if server in ROUNDS:
            with profile_with(server, **fitted):
                found[server] |= print_rounds(server)
    if "--write" in sys.argv:
        write_left_out(found)


if __name__ == "__main__":
    main()
