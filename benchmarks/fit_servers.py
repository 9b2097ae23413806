"""Fits the launch costs of server profiles to published rounds, and prints them with their errors, as `sim/cost/server.py` has them.

    python benchmarks/fit_servers.py          (needs the extra measured)

A published row gives the time of one round: accept length × time per output token. What measured kernels do not explain of it is

    gap · (captured passes: 1 without speculation, else verify and catch-up) + draft step · steps + tree · (1 if topk > 1)

Least squares on relative errors, parameters not below 0. The error is that of rows whose draft shape was left out of the fit.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from foretoken.core.model_shape import lookup_model
from foretoken.sim.cost.draft import DraftShape, eagle3_head, eagle_head
from foretoken.sim.cost.hardware import lookup_gpu
from foretoken.sim.cost.launch import LaunchCost
from foretoken.sim.cost.measured import measured_tables
from foretoken.sim.cost.round import GREEDY, RoundCost
from foretoken.sim.cost.server import PROFILES
from scipy.optimize import nnls

PUBLISHED = Path(__file__).parent / "published" / "rounds.csv"
PARAMETERS = ("graph_gap_ns", "draft_step_ns", "tree_ns")
CONTEXT = 600  # tokens behind a round on average; 1,000 more or fewer change a round of one row by 1 %
_NO_LAUNCH = LaunchCost("none", 0.0, 0.0, 0.0, source="kernels alone")


class Row(NamedTuple):
    """One published row: its draft shape, the round's time, and what measured kernels take of it, in ns."""

    algorithm: str
    steps: int
    topk: int
    round_ns: float
    kernels_ns: float

    @property
    def features(self) -> tuple[float, float, float]:
        return (2.0 if self.steps else 1.0, float(self.steps), float(self.topk > 1))


def published_rows(server: str) -> list[Row]:
    """Return the rows of `server`, with the kernels' share of each round."""
    costs: dict[tuple[str, str, str], RoundCost] = {}
    rows = []
    with PUBLISHED.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["server"] != server:
                continue
            key = row["model"], row["gpu"], row["algorithm"]
            if key not in costs:
                costs[key] = _cost(*key, PROFILES[server].kernels_of)
            batch, steps, topk, nodes = (int(row[name]) for name in ("batch_size", "steps", "topk", "num_draft_tokens"))
            per_token_ms = float(row["tpot_ms"] or 1e3 * batch / float(row["tokens_per_s"]))
            kernels = costs[key].decode_ns(batch, steps, topk, nodes, batch * CONTEXT)
            rows.append(Row(row["algorithm"], steps, topk, per_token_ms * float(row["accept_length"]) * 1e6, kernels))
    return rows


def _cost(model: str, gpu: str, algorithm: str, kernels_of: str) -> RoundCost:
    target = lookup_model(model)
    heads = {"EAGLE": eagle_head, "EAGLE3": eagle3_head}
    draft: DraftShape | None = heads[algorithm](target) if algorithm in heads else None
    return RoundCost(
        target,
        lookup_gpu(gpu),
        1,
        draft,
        launch=_NO_LAUNCH,
        tables=measured_tables(target, gpu, kernels_of, 1),
        draft_tables=None if draft is None else measured_tables(draft.body, gpu, kernels_of, 1),
        sampling=GREEDY,
    )


def fit(rows: Sequence[Row]) -> np.ndarray:
    """Return PARAMETERS, ns [3]."""
    weights = np.array([1 / row.round_ns for row in rows])
    features = np.array([row.features for row in rows]) * weights[:, None]
    rest = np.array([row.round_ns - row.kernels_ns for row in rows]) * weights
    return nnls(features, rest)[0]


def errors(rows: Sequence[Row], parameters: np.ndarray) -> np.ndarray:
    """Return predicted / published − 1 of each row."""
    return np.array([(row.kernels_ns + float(np.dot(row.features, parameters))) / row.round_ns - 1 for row in rows])


def left_out_errors(rows: Sequence[Row]) -> np.ndarray:
    """Return the error of each row with parameters from the rows of other draft shapes."""
    shapes = [(row.algorithm, row.steps, row.topk) for row in rows]
    found = np.empty(len(rows))
    for shape in set(shapes):
        inside = [i for i, other in enumerate(shapes) if other == shape]
        outside = [row for row, other in zip(rows, shapes, strict=True) if other != shape]
        found[inside] = errors([rows[i] for i in inside], fit(outside))
    return found


def main() -> None:
    servers = dict.fromkeys(row["server"] for row in csv.DictReader(PUBLISHED.open(newline="", encoding="utf-8")))
    for server in servers:
        rows = published_rows(server)
        parameters, left_out = fit(rows), left_out_errors(rows)
        print(server, f"({len(rows)} rows)")
        for name, value in zip(PARAMETERS, parameters, strict=True):
            print(f"    {name:15} {value / 1e3:8.0f} us")
        print(
            f"    mean error of shapes left out {100 * np.abs(left_out).mean():.1f} %, largest {100 * np.abs(left_out).max():.1f} %"
        )


if __name__ == "__main__":
    main()
