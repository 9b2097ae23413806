"""Budgets of our policy `confidence` beside those of SGLang's adaptive verification, with the same files of times."""

from __future__ import annotations

import ast
import json
import os
import runpy
import types
import typing
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foredraft.core.adaptive.lengths.interchange import load_round_times, round_times_json

our_budget = runpy.run_path(str(Path(__file__).with_name("verification_of_wheel.py")))["our_budget"]
FOLDER = "sglang/srt/speculative/dspark_components"
CHOICE = ("compute_verify_token_budget", "_lookup_sps_tensor", "_additive_step_time_tensor")
CLASSES = ("VerifyBudgetDecision", "DSparkScheduleConfig")
FILES = 400


def release_of(wheel: Path) -> dict[str, Any]:
    """Return the tables of the wheel, and what chooses by them, which needs nothing else of it."""
    import msgspec
    import torch

    found = types.ModuleType("dspark_sps").__dict__
    found |= {
        "Optional": typing.Optional,
        "Union": typing.Union,
        "dataclass": dataclass,
        "torch": torch,
        "msgspec": msgspec,
    }
    with zipfile.ZipFile(wheel) as archive:
        exec(compile(archive.read(f"{FOLDER}/dspark_sps.py"), "dspark_sps.py", "exec"), found)
        planner = ast.parse(archive.read(f"{FOLDER}/dspark_planner.py"))
    parts = [node for node in planner.body if getattr(node, "name", None) in (*CHOICE, *CLASSES)]
    exec(compile(ast.Module(parts, []), "dspark_planner.py", "exec"), found)
    return found


def drawn_file(draw: np.random.Generator, is_sum: bool) -> dict[str, Any]:
    counts = draw.integers(1, 9, 2)
    probes = [np.sort(draw.choice(300, n, replace=False) + 1).tolist() for n in counts]
    if not is_sum:
        rates = np.sort(draw.uniform(20, 200, counts[0]))[::-1].tolist()
        return {"sample_batch_tokens": probes[0], "sample_steps_per_sec": rates, "max_batch_tokens": 400}
    alpha, theta = (np.sort(draw.uniform(0, 0.05, n)).tolist() for n in counts)
    found = {"bias_seconds": float(draw.uniform(0.002, 0.02)), "bs_probes": probes[0], "alpha_seconds": alpha}
    return found | {"m_probes": probes[1], "theta_seconds": theta}


@pytest.mark.slow
@pytest.mark.parametrize("is_sum", [False, True], ids=["rates", "sum"])
def test_budgets_are_sglangs(is_sum):
    """The wheel is in the folder that FOREDRAFT_WHEELS names. Files of ours are read there, too."""
    wheels = [*Path(os.environ.get("FOREDRAFT_WHEELS", ".")).glob("sglang-0.5.23-*.whl")]
    if not wheels:
        pytest.skip("no wheel of sglang 0.5.23 in FOREDRAFT_WHEELS")
    pytest.importorskip("msgspec")
    torch = pytest.importorskip("torch")
    release, draw = release_of(wheels[0]), np.random.default_rng(7)
    table_class = release["SpsAdditiveCostTable" if is_sum else "SpsCostTable"]
    budgets = []
    for _ in range(FILES):
        rows, steps = int(draw.integers(1, 33)), int(draw.integers(1, 8))
        text = json.dumps(drawn_file(draw, is_sum))
        costs = load_round_times(json.loads(text), steps, "a file")
        confidence = draw.uniform(0.2, 0.98, (rows, steps)).astype(np.float32)
        survival = torch.from_numpy(np.cumprod(confidence.astype(float), axis=1))
        ours = our_budget(costs, steps, confidence, np.full(rows, steps))
        written = release["SpsAdditiveCostTable"].from_json(round_times_json(costs, steps))
        for table in (table_class.from_json(text), written):
            config = release["DSparkScheduleConfig"](gamma=steps)
            theirs = release["compute_verify_token_budget"](
                history_survival_probs=survival, sps_table=table, cfg=config
            )
            assert ours == theirs.budget
        budgets.append(ours / (rows * steps))
    assert min(budgets) < 0.3 and max(budgets) == 1 and len({*budgets}) > 20
