"""Fits what the device waits for under each server to published measurements, as `sim/cost/server.py` has it, and prints the errors.

    python benchmarks/fit_servers.py [SERVER …] [--write]          (needs the extra measured; some minutes)

`--write` keeps the times that were fitted without a model or a draft shape in `benchmarks/left_out.csv`, for accuracy.py.

First the waits of serving without speculation: per pass, per request of a step, more on several devices, and, for TensorRT-LLM, per
kernel of a pass that is not captured. Simulations of published points give the time per output token; least squares on its logarithm
(`sim/calibration`). Errors are of points whose model was left out of the fit where there are two models, else whose tensor parallelism was.

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
from foretoken.sim.calibration.least_squares import Fit, Parameter, fit_parameters
from foretoken.sim.cost.draft import EAGLE3, DraftShape, eagle3_head, eagle_head
from foretoken.sim.cost.hardware import lookup_gpu
from foretoken.sim.cost.launch import LaunchCost
from foretoken.sim.cost.measured import measured_tables
from foretoken.sim.cost.round import GREEDY, RoundCost
from foretoken.sim.cost.server import PROFILES
from points import Point, plain_points, profile_with, round_points
from scipy.optimize import nnls

GAP = Parameter("graph_gap_ns", "ns", 500e3, 1000e3)
ROW = Parameter("row_gap_ns", "ns", 20e3, 40e3)
RANKS = Parameter("ranks_gap_ns", "ns", 400e3, 800e3)
EAGER = Parameter("eager_kernel_ns", "ns", 40e3, 40e3)
WAITS = {"sglang-0.5": (GAP, ROW, RANKS), "vllm-0.18": (GAP, ROW, RANKS), "trtllm-1.x": (GAP, ROW, EAGER)}
"""The servers of plain.csv, and what is fitted of each. The priors are wide: tens of points say a hundred times more."""
EVERY = {"sglang-0.5": 4, "vllm-0.18": 2, "trtllm-1.x": 6}
MOST_CLIENTS, LONGEST_OUTPUT, LONGEST_TTFT_MS = 352, 1024, 5_000
"""Each second point, say, of plain.csv is fitted, of those that are short and whose requests do not queue for memory (which takes many
seconds)."""

LEFT_OUT = Path(__file__).parent / "left_out.csv"

SHARES = ("draft_step_ns", "tree_ns")
ROUNDS = {"sglang-0.5": SHARES, "vllm-0.9": ("graph_gap_ns", "draft_step_ns", "eagle3_step_ns")}
"""The servers of rounds.csv, and what is fitted of each. sglang-0.5 has its gap from the first fit."""
CONTEXT = 600  # tokens behind a round on average; 1,000 more or fewer change a round of one row by 1 %


# -- without speculation ----------------------------------------------------------------------------------------------


def fitted_points(server: str) -> list[Point]:
    """Return the points to which the waits of `server` are fitted."""
    usable = [
        point
        for point in plain_points()
        if point.server == server
        and point.concurrency <= MOST_CLIENTS
        and point.output <= LONGEST_OUTPUT
        and point.ttft_ms < LONGEST_TTFT_MS
        and "gpt-oss" not in point.model
    ]
    alone = [point for point in round_points() if point.server == server and not point.steps and point.concurrency == 1]
    return usable[:: EVERY[server]] + alone


def fit_waits(server: str) -> tuple[Fit, list[Point]]:
    """Fit WAITS of `server`; every prediction is a simulation."""
    parameters, points = WAITS[server], fitted_points(server)

    def predict(values: np.ndarray) -> np.ndarray:
        with profile_with(server, **{item.name: float(x) for item, x in zip(parameters, values, strict=True)}):
            times = [point.measured(simulate(point.scenario("measured")).summary)[1] for point in points]
        print(
            f"    {server}: {len(points)} simulations with", *(f"{x / 1e3:.1f}" for x in values), "us", file=sys.stderr
        )
        return np.array(times)

    published = [point.published_ms for point in points]
    start = np.array([getattr(PROFILES[server].launch, item.name) for item in parameters])
    return fit_parameters(parameters, predict, np.array(published), start=start), points


def groups_of(points: Sequence[Point]) -> list[str]:
    """Return what is left out of the fit at a time, for each point: its model, or its tensor parallelism where there is one model."""
    models = [point.model.split("/")[-1].lower() for point in points]
    return models if len(set(models)) > 1 else [f"tensor parallel {point.tensor_parallel}" for point in points]


def waits_without(fit: Fit, groups: Sequence[str]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the values fitted without each group, and the error of every point by those without its own.

    Predictions near the solution are taken from the fit's slopes, so that nothing is simulated again.
    """
    at_solution, left_out = np.log1p(fit.errors) + np.log(fit.measured), np.empty(len(groups))
    values = {}
    for group in dict.fromkeys(groups):
        kept = np.array([other != group for other in groups])

        def predict(x: np.ndarray, rows: np.ndarray = kept) -> np.ndarray:
            return np.exp(at_solution[rows] + fit.slopes[rows] @ (x - fit.values))

        values[group] = fit_parameters(fit.parameters, predict, fit.measured[kept], start=fit.values).values
        left_out[~kept] = predict(values[group], ~kept) / fit.measured[~kept] - 1
    return values, left_out


def print_waits(server: str) -> dict[str, dict[str, float]]:
    """Print the fit. Returns the times that were fitted without each group."""
    fit, points = fit_waits(server)
    groups = groups_of(points)
    values, left_out = waits_without(fit, groups)
    print(f"{server} without speculation ({len(points)} points)")
    for item, value, low, high in zip(fit.parameters, fit.values, fit.low, fit.high, strict=True):
        print(f"    {item.name:16} {value / 1e3:8.1f} us  ({low / 1e3:.1f} … {high / 1e3:.1f})")
    print(f"    mean error {100 * np.abs(fit.errors).mean():.1f} %; left out, by {', '.join(values)}:", end=" ")
    print(f"{100 * np.abs(left_out).mean():.1f} %, largest {100 * np.abs(left_out).max():.1f} %")
    names = [item.name for item in fit.parameters]
    return {group: dict(zip(names, found, strict=True)) for group, found in values.items()}


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
    with LEFT_OUT.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["server"] not in found]
    for server, groups in found.items():
        for group, times in groups.items():
            rows.append({"server": server, "left_out": group, **{name: f"{ns:.0f}" for name, ns in times.items()}})
    names = ("server", "left_out", GAP.name, ROW.name, RANKS.name, EAGER.name, *SHARES, "eagle3_step_ns")
    with LEFT_OUT.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: (row["server"], row["left_out"])))


def main() -> None:
    servers = [name for name in sys.argv[1:] if name != "--write"] or list(dict.fromkeys([*WAITS, *ROUNDS]))
    found = {server: {} for server in servers}
    for server in servers:
        if server in WAITS:
            found[server] |= print_waits(server)
        if server in ROUNDS:
            found[server] |= print_rounds(server)
    if "--write" in sys.argv:
        write_left_out(found)


if __name__ == "__main__":
    main()
