"""Fits what the device waits for under each server to published measurements, as `sim/cost/server.py` has it, and
prints the errors.

    python benchmarks/fit_servers.py [--write]          (needs the extra measured; some minutes)

    python benchmarks/fit_servers.py --spread

`--spread` prints how well spreads of the lengths meet the published times to the first token, from which plain.csv has
its own. `--write` keeps the times that were fitted without a model or a draft shape in
`benchmarks/published/left_out.csv`, for accuracy.py.

First the waits of serving without speculation: per pass, per request of a step, per collective, and, but for vLLM, per
kernel of a pass that is not captured. Least squares on the logarithm of the time per output token (of a whole request
where clients keep step), with a loss that outliers do not draw; simulations of published points correct an estimate,
which gives the slopes. Each server is fitted by itself, and then once more around the mean of the servers, in units of
their deviation, so that what its points do not tell is as the others have it. What a database's kernels of a model are
off by is no wait: each model has a factor on its kernels, which is fitted with the waits and then forgotten. Errors are
of points whose model was left out of all servers, and without any factor.

Then speculative rounds, of 1 and of 8 requests. A published row gives the time of one round: accept length × time per
output token. What kernels and the first fit do not explain of it is

    draft step · steps + more for an EAGLE-3 step · steps + tree · (1 if topk > 1) + gap · captured passes

of which each server has those that ROUNDS names. Least squares on relative errors, parameters not below 0. Where there
are several models, each has a factor on its rounds, plain ones included, which is forgotten like those of the first
fit. The error is that of rows whose model was left out of the fit, or whose draft shape was, if there is one model.
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from foredraft import simulate
from foredraft.sim.cost.draft import EAGLE3
from foredraft.sim.cost.host import FULL_GRAPH
from foredraft.sim.cost.server import PROFILES
from points import (
    DEVICE,
    Point,
    PointEstimate,
    SpeedUp,
    estimate,
    model_of,
    plain_points,
    profile_with,
    read_csv,
    round_points,
    rounds_of,
    speedup_points,
)
from scipy.optimize import least_squares

WAITS: dict[str, tuple[str, ...]] = {
    "sglang-0.5": ("graph_gap_ns", "row_gap_ns", "collective_gap_ns", "eager_kernel_ns"),
    "vllm-0.18": ("graph_gap_ns", "row_gap_ns", "collective_gap_ns"),
    "trtllm-1.x": ("graph_gap_ns", "row_gap_ns", "collective_gap_ns", "eager_kernel_ns"),
}
"""The servers of plain.csv, and what is fitted of each."""
SCALES = {"graph_gap_ns": 300e3, "row_gap_ns": 10e3, "collective_gap_ns": 3e3, "eager_kernel_ns": 60e3}
"""How large each is about: where a search starts, and its steps."""
KERNELS = 0.015
"""How far the kernels of a model are from the database's, as a deviation: of 0.015, 0.02 and 0.03 that with the least
error of models that are left out."""
TOLD = 1e-6  # slope of the errors over SCALES below which points say nothing of a wait
OUTLIER = 0.05
"""Errors beyond it count as their size, not as its square: some published times are twice those beside them."""
MOST_CLIENTS, LONGEST_TTFT_MS = 352, 5_000
"""Fitted are the points of plain.csv whose requests do not queue for memory (which takes many seconds)."""
SHORT_PROMPT = 1024
"""The most prompt tokens of gpt-oss: the servers of its points took Marlin's experts, which compute long prompts at
half of the pace of the database's (docs/evidence/accuracy.md, "What is wrong")."""

SPREADS, SPREAD_POINTS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2), 15
"""What `spread` of plain.csv is chosen from, by this many points of a data set."""

LEFT_OUT = Path(__file__).parent / "published" / "left_out.csv"

SHARES = ("draft_step_ns", "tree_ns")
ROUNDS = {"sglang-0.5": SHARES, "vllm-0.9": ("graph_gap_ns", "draft_step_ns", "eagle3_step_ns")}
"""The servers of rounds.csv, and what is fitted of each. sglang-0.5 has its gap from the first fit."""
SHORT_ANSWERS = "gsm8k"
"""The text whose rows are not fitted: its answers are so short that prompts, which are not modelled as well, take up to
a third of the time."""
PRIOR = 0.4
"""A model's rounds are off by 5 %, as a deviation, where its rows are off by 2 % beside that (assumption)."""
UNIT_NS = 1e5
VERIFY_TIMES = {"verify_base_ns": 1_000_000, "verify_row_ns": 100_000}
"""Times of a synchronous engine's rounds with drafts, and as how much they are simulated, each alone."""


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
    return usable + [point for point in round_points() if point.server == server and not point.steps]


def fitted_ms(point: Point, token_ms: float, first_token_ms: float | None) -> float:
    """Return the time per output token that is fitted: where clients keep step, that of a whole request.

    How much of a request is its first token and how much the others depends on how long clients that began together
    stay so: where published times to the first token fall with longer outputs, those per token rise by as much. Their
    sum does not depend on it.
    """
    together = point.clients_keep_step and first_token_ms is not None
    return token_ms + (first_token_ms / point.output if together else 0.0)


@dataclass(frozen=True, eq=False)
class MeasuredServer:
    """The points of a server, the estimates of their times, and how many times the estimates the simulations are."""

    server: str
    estimates: tuple[PointEstimate, ...]
    ratios: np.ndarray

    def without(self, model: str) -> MeasuredServer:
        """Return the points of other models; self if there is none of this."""
        kept = [i for i, item in enumerate(self.estimates) if model_of(item.point) != model]
        if len(kept) == len(self.estimates):
            return self
        return MeasuredServer(self.server, tuple(self.estimates[i] for i in kept), self.ratios[kept])

    @cached_property
    def published(self) -> np.ndarray:
        points = [item.point for item in self.estimates]
        return np.array([fitted_ms(point, point.published_ms, point.ttft_ms) for point in points])

    @cached_property
    def fit_alone(self) -> dict[str, float]:
        return self.fit({})

    def errors(self, waits: Mapping[str, float], factors: Mapping[str, float] = MappingProxyType({})) -> np.ndarray:
        """Return predicted / published − 1 of each point. `factors`: on the kernels, by model."""
        times = [item.token_ns({**waits, DEVICE: factors.get(model_of(item.point), 1.0)}) for item in self.estimates]
        return self.ratios * times / 1e6 / self.published - 1

    def fit(self, usual: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """Return the waits that meet the published times best, but for those of which the points say nothing. `usual`:
        what they are under all servers, and the deviation of that."""
        names = WAITS[self.server]
        sizes, count = np.array([SCALES[name] for name in names]), len(names)
        models = list(dict.fromkeys(model_of(item.point) for item in self.estimates))

        def residuals(x: np.ndarray) -> np.ndarray:
            waits = dict(zip(names, x[:count] * sizes, strict=True))
            found = np.log1p(self.errors(waits, dict(zip(models, np.exp(x[count:]), strict=True))))
            priors = [(waits[name] - mean) / deviation for name, (mean, deviation) in usual.items() if name in waits]
            return np.concatenate([found, OUTLIER / KERNELS * x[count:], OUTLIER * np.array(priors)])

        unknown = np.array([getattr(FULL_GRAPH, name) for name in names]) / sizes
        least = np.repeat([0.0, -np.inf], [count, len(models)])
        found = [
            least_squares(residuals, [*x, *np.zeros(len(models))], bounds=(least, np.inf), loss="soft_l1", f_scale=OUTLIER)
            for x in (unknown, np.ones(count))
        ]  # fmt: skip
        best = min(found, key=lambda fit: round(fit.cost, 6))
        told = np.abs(best.jac[:, :count]).max(axis=0) > TOLD
        return {name: float(best.x[i] * sizes[i]) for i, name in enumerate(names) if told[i]}


def fit_all(every: Sequence[MeasuredServer]) -> dict[str, dict[str, float]]:
    """Return the waits of all servers: of each alone, and then around the mean of these."""
    alone = [item.fit_alone for item in every]
    usual = {}
    for name in SCALES:
        values = [waits[name] for waits in alone if name in waits]
        mean = statistics.fmean(values)
        usual[name] = mean, max(statistics.stdev(values) if len(values) > 1 else mean, SCALES[name] / 1000)
    return {item.server: item.fit(usual) for item in every}


def measured(server: str) -> MeasuredServer:
    """Simulate the points of a server, with its profile as it is: fit again when that has changed much."""
    estimates = tuple(estimate(point) for point in fitted_points(server))
    print(f"    {server}: {len(estimates)} simulations", file=sys.stderr, flush=True)
    times = [fitted_ms(item.point, *simulated(item.point)) for item in estimates]
    return MeasuredServer(server, estimates, np.array(times) * 1e6 / [item.token_ns({}) for item in estimates])


def simulated(point: Point) -> tuple[float, float]:
    """Return the times per token and to the first token, in ms."""
    with profile_with(point.server):
        return point.measured(simulate(point.scenario("measured")))


def print_waits() -> tuple[dict[str, dict[str, float]], dict[str, dict[str, dict[str, float]]]]:
    """Fit the waits of all servers, print them and their errors.
    Returns the values, and by server those without each of its models."""
    every = [measured(server) for server in WAITS]
    waits = fit_all(every)
    models = dict.fromkeys(model_of(estimate.point) for item in every for estimate in item.estimates)
    without = {model: fit_all([item.without(model) for item in every]) for model in models}
    groups: dict[str, dict[str, dict[str, float]]] = {}
    for item in every:
        names = [model_of(estimate.point) for estimate in item.estimates]
        own = groups[item.server] = {model: without[model][item.server] for model in dict.fromkeys(names)}
        by_model = {model: item.errors(times) for model, times in own.items()}
        left_out = np.array([by_model[name][i] for i, name in enumerate(names)])
        print(f"{item.server} without speculation ({len(names)} points)")
        for model, found in {"": waits[item.server], **own}.items():
            words = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
            print(f"    without {model}: {words}" if model else f"    {words}")
        for words, each in (("mean error", item.errors(waits[item.server])), ("of what was left out", left_out)):
            print(f"    {words} {abs(each).mean():.1%}, bias {each.mean():+.1%}, largest {abs(each).max():.1%}")
    return waits, groups


# -- speculative rounds -----------------------------------------------------------------------------------------------


class FittedRow(NamedTuple):
    """One published row: its group, the time of its round, and what kernels and known waits take of it, in ns."""

    model: str
    group: str  # what is left out with this row
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


def published_rows(server: str) -> list[FittedRow]:
    """Return the rows that are fitted under `server`, with what is known of each round: a simulation without the waits
    that are fitted. Rows are left out by their model, or by their draft shape if there is one model alone."""
    points = [point for point in round_points() if point.server == server and point.text != SHORT_ANSWERS]
    models = {model_of(point) for point in points}
    rows = []
    for point in points:
        with profile_with(server, **dict.fromkeys(ROUNDS[server], 0.0)):
            known = point.measured(simulate(point.scenario("measured"))).token_ms
        of_round, shape = point.accept_length * 1e6, f"{point.algorithm} {point.shape}"
        model = model_of(point)
        group = rounds_of(model) if len(models) > 1 else shape
        rows.append(
            FittedRow(model, group, shape, point.steps, point.topk, point.published_ms * of_round, known * of_round)
        )
    return rows


def fit_rounds(rows: Sequence[FittedRow], names: Sequence[str]) -> np.ndarray:
    """Return the times called `names`, ns [len(names)].

    Where there are several models, each has a factor on what is known of its rounds, plain ones included. It is fitted
    with the times and then forgotten, as those of WAITS are.
    """
    models = list(dict.fromkeys(row.model for row in rows))
    count = len(models) if len(models) > 1 else 0
    round_ns, known_ns = (np.array([getattr(row, name) for row in rows]) for name in ("round_ns", "known_ns"))
    features = np.array([[row.features[name] for name in names] for row in rows])
    owners = [models.index(row.model) for row in rows]

    def residuals(x: np.ndarray) -> np.ndarray:
        factors = np.exp(x[len(names) :])
        known = known_ns * (factors[owners] if count else 1.0)
        found = (known + features @ x[: len(names)] * UNIT_NS) / round_ns - 1
        return np.concatenate([found, PRIOR * x[len(names) :]])

    start = np.concatenate([np.ones(len(names)), np.zeros(count)])
    least = np.concatenate([np.zeros(len(names)), np.full(count, -np.inf)])
    found = least_squares(residuals, start, bounds=(least, np.inf), x_scale="jac", loss="soft_l1", f_scale=OUTLIER)
    return found.x[: len(names)] * UNIT_NS


def errors(rows: Sequence[FittedRow], names: Sequence[str], values: np.ndarray) -> np.ndarray:
    """Return predicted / published − 1 of each row."""
    return np.array(
        [(row.known_ns + sum(row.features[n] * x for n, x in zip(names, values, strict=True))) / row.round_ns - 1 for row in rows]
    )  # fmt: skip


def rounds_without(rows: Sequence[FittedRow], names: Sequence[str]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the times fitted without each group, and the error of each row by those without its own."""
    left_out, values = np.empty(len(rows)), {}
    for group in dict.fromkeys(row.group for row in rows):
        inside = [i for i, row in enumerate(rows) if row.group == group]
        values[group] = fit_rounds([row for row in rows if row.group != group], names)
        left_out[inside] = errors([rows[i] for i in inside], names, values[group])
    return values, left_out


def print_rounds(server: str) -> dict[str, dict[str, float]]:
    """Print the fit. Returns the times that were fitted without each group."""
    rows, names = published_rows(server), ROUNDS[server]
    values = fit_rounds(rows, names)
    without, left_out = rounds_without(rows, names)
    print(f"{server}, speculative rounds ({len(rows)} rows)")
    for name, value in zip(names, values, strict=True):
        print(f"    {name:16} {value / 1e3:8.0f} us")
    for group, found in without.items():
        print(f"    without {group}: {', '.join(f'{x / 1e3:.0f}' for x in found)}")
    print(
        f"    mean error of groups left out {100 * np.abs(left_out).mean():.1f} %, largest {100 * np.abs(left_out).max():.1f} %"
    )
    return {group: dict(zip(names, found, strict=True)) for group, found in without.items()}


# -- rounds of a synchronous engine -----------------------------------------------------------------------------------


def speedups_by_time(server: str) -> tuple[list[SpeedUp], np.ndarray]:
    """Return the points of speedups.csv, and published over simulated speed-ups without VERIFY_TIMES and with each of
    them alone, [1 + len(VERIFY_TIMES), points]. They are linear in these times, as rounds are."""
    points = [point for point in speedup_points() if point.drafting.server == server]
    profile, names = PROFILES[server], list(VERIFY_TIMES)
    plain = [point.plain.tokens_per_s_of(simulate(point.plain.scenario("measured"))) for point in points]
    found = np.empty((1 + len(names), len(points)))
    try:
        for i in range(len(found)):
            times = {name: VERIFY_TIMES[name] if i == 1 + j else 0 for j, name in enumerate(names)}
            PROFILES[server] = replace(profile, host=replace(profile.host, **times))
            for j, point in enumerate(points):
                rate = point.drafting.tokens_per_s_of(simulate(point.drafting.scenario("measured")))
                found[i, j] = point.published * plain[j] / rate
    finally:
        PROFILES[server] = profile
    return points, found


def verify_errors(inverse: np.ndarray, shares: Sequence[float]) -> np.ndarray:
    """Return the logarithms of published over simulated speed-ups with these shares of VERIFY_TIMES."""
    return np.log(inverse[0] + np.asarray(shares) @ (inverse[1:] - inverse[0]))


def fit_verify_times(inverse: np.ndarray) -> np.ndarray:
    """Return the shares of VERIFY_TIMES whose speed-ups are nearest to the published ones, by least squares."""
    start = np.full(len(VERIFY_TIMES), 0.5)
    return least_squares(lambda shares: verify_errors(inverse, shares), start, bounds=(0, np.inf)).x


def print_verify_times(server: str) -> None:
    """Print the times of a synchronous engine's rounds with drafts, and the errors of speed-ups by fits without
    them."""
    points, inverse = speedups_by_time(server)
    shares = fit_verify_times(inverse)
    print(f"{server}, rounds with drafts of a synchronous engine ({len(points)} speed-ups)")
    for name, share in zip(VERIFY_TIMES, shares, strict=True):
        print(f"    {name:16} {share * VERIFY_TIMES[name] / 1e3:8.0f} us")
    errors = -verify_errors(inverse, shares)
    for j, point in enumerate(points):
        without = -verify_errors(inverse, fit_verify_times(np.delete(inverse, j, axis=1)))[j]
        print(
            f"    {point.drafting.concurrency} clients: error {math.expm1(errors[j]):+.1%}; left out {math.expm1(without):+.1%}"
        )


def write_left_out(found: dict[str, dict[str, dict[str, float]]]) -> None:
    """Write the times that were fitted without each group of a server; rows of other servers stay."""
    names = ("server", "left_out", *SCALES, *SHARES, "eagle3_step_ns")
    rows = [{name: row.get(name) for name in names} for row in read_csv(LEFT_OUT) if row["server"] not in found]
    for server, groups in found.items():
        for group, times in groups.items():
            rows.append(
                {"server": server, "left_out": group, **{name: f"{value:.6g}" for name, value in times.items()}}
            )
    with LEFT_OUT.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: (row["server"], row["left_out"])))


def print_spreads() -> None:
    """Print, of some points of each data set, the mean error of the time to the first token by how far
    lengths are apart."""
    usable = [point for server in WAITS for point in fitted_points(server) if point.ttft_ms]
    for dataset in dict.fromkeys(point.dataset for point in usable):
        chosen = [point for point in usable if point.dataset == dataset]
        print(dataset)
        for spread in SPREADS:
            errors = []
            for point in chosen[:: math.ceil(len(chosen) / SPREAD_POINTS)]:
                point = replace(point, shortest=1 - spread, longest=1 + spread)
                errors.append(point.measured(simulate(point.scenario("measured"))).first_token_ms / point.ttft_ms - 1)
            print(f"    {spread:5.0%}  mean error {np.abs(errors).mean():.0%}, bias {np.mean(errors):+.0%}", flush=True)


def print_fits() -> None:
    """Print both fits of all servers."""
    waits, found = print_waits()
    for server in ROUNDS:
        with profile_with(server, **waits.get(server, {})):
            found[server] = found.get(server, {}) | print_rounds(server)
    print_verify_times("sglang-0.5")
    if "--write" in sys.argv:
        write_left_out(found)


if __name__ == "__main__":
    print_spreads() if "--spread" in sys.argv else print_fits()
