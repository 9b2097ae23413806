"""A profile of measured steps whose every time is a round number."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from foredraft.sim.cost.executor_steps import AXES, AlgorithmSteps, ExecutorSteps, Grid, RoundGrids
from foredraft.sim.cost.host import FOREDRAFT

AXIS = {
    "rows": (1, 2, 4, 8),
    "context": (1, 64, 256),
    "steps": (0, 1, 3, 7),
    "nodes": (1, 2, 4, 8),
    "accepted": (1, 4, 8),
    "chunks": (1, 4),
    "tokens": (8, 64),
}
WEIGHT = {
    "rows": 50_000,
    "context": 900,
    "steps": 400_000,
    "nodes": 70_000,
    "accepted": 30_000,
    "chunks": 20_000,
    "tokens": 15_000,
}


def made_grid(name: str, axes: Mapping[str, tuple[int, ...]] = AXIS) -> Grid:
    """A grid whose times are linear in every axis."""
    own = {axis: axes[axis] for axis in AXES[name]}
    ns = np.full(tuple(map(len, own.values())), 100_000.0)
    for number, (axis, points) in enumerate(own.items()):
        shape = [1] * len(own)
        shape[number] = len(points)
        ns = ns + WEIGHT[axis] * np.array(points, float).reshape(shape)
    return Grid(own, ns)


def made_steps(*algorithms: str, topk: int = 1) -> ExecutorSteps:
    """A profile of `algorithms`, chains and trees of top-`topk`."""
    rounds = {k: RoundGrids(*(made_grid(name) for name in ("draft", "verify", "kv_move", "extend"))) for k in {1, topk}}
    tables = AlgorithmSteps(made_grid("prefill"), made_grid("rest"), rounds, shared_ns=40_000)
    host = replace(FOREDRAFT, name="made")
    return ExecutorSteps("a device", 1, True, {"hidden": 32}, host, dict.fromkeys(algorithms, tables), {"decode": 0.05})
