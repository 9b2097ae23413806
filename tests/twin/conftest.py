"""Ways to serve small models that are made in a moment, and a profile for them whose every time is a round number."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from foretoken.gpu.session.plan import SessionOptions
from foretoken.sim.cost.executor_steps import AXES, AlgorithmSteps, ExecutorSteps, Grid, RoundGrids
from foretoken.sim.cost.host import FORETOKEN
from foretoken.twin.arms import Arm, open_arms
from small_checkpoint import write_head, write_standalone, write_target

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
    host = replace(FORETOKEN, name="made")
    return ExecutorSteps("a device", 1, True, {"hidden": 32}, host, dict.fromkeys(algorithms, tables), {"decode": 0.05})


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "target": write_target(root / "target"),
        "STANDALONE": write_standalone(root / "standalone"),
        "EAGLE3": write_head(root / "eagle3", "EAGLE3"),
    }


@pytest.fixture(scope="session")
def make_arms(checkpoints: dict[str, Path]):
    def make(**ways: dict) -> list[Arm]:
        options = {}
        for name, given in ways.items():
            draft = given.pop("draft", None)
            options[name] = SessionOptions(
                model=checkpoints["target"], draft=checkpoints.get(draft), device="cpu", threads=1, **given
            )
        return open_arms(options)

    return make
