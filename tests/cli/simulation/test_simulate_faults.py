"""`foredraft simulate --faults`: what it prints and keeps, and how a broken promise ends."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from foredraft.core.adaptive import AdaptiveController
from foredraft.sim.faults.plan import load_fault_plan
from foredraft.sim.faults.promises import OF_KIND

ROOT = Path(__file__).resolve().parents[3]
SMALL = ("--set", "workload.num_requests=60", "--set", "workload.rate=20", "--quiet")
PLAN = """
[device.raises]
probability = 0.03
[config.half_written]
probability = 0.05
[device.hangs]
probability = 0.000000001
"""


@pytest.fixture
def plan(tmp_path) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    return path


def test_what_was_injected_and_promised(command, plan, tmp_path):
    run = tmp_path / "run"
    outcome = command("simulate", *SMALL, "--faults", plan, "--out", run)
    assert outcome.code == 0 and not outcome.err
    for words in ("Faults", "device.raises", "no token of it is delivered", "never", "Every promise was kept."):
        assert words in outcome.out
    assert "Enabled, but never injected, so not tested: device.hangs" in outcome.out.replace("\n", " ")
    summary = json.loads((run / "summary.json").read_text())
    assert set(summary["faults_injected"]) == {"device.raises", "device.hangs", "config.half_written"}
    assert summary["faults_injected"]["device.raises"] > 0 and summary["lost_steps"] > 0
    assert summary["faults_never_fired"] == ["device.hangs"] and summary["promises_broken"] == []
    assert summary["promises_checked"]["config.half_written"] == summary["faults_injected"]["config.half_written"]
    assert load_fault_plan(run / "faults.toml", 0) == load_fault_plan(plan, 0)
    assert command("audit", "--replay", run).code == 0


def test_without_faults_nothing_is_said_of_them(command, tmp_path):
    outcome = command("simulate", *SMALL, "--out", tmp_path / "run")
    assert outcome.code == 0 and "Faults" not in outcome.out
    assert not (tmp_path / "run" / "faults.toml").exists()
    assert "faults_injected" not in json.loads((tmp_path / "run" / "summary.json").read_text())


def test_a_broken_promise_is_exit_code_1_with_the_seed_and_the_command(command, plan, monkeypatch):
    monkeypatch.setattr(AdaptiveController, "reload", lambda self, text, source: None)
    words = ["simulate", *SMALL, "--set", "seed=5", "--faults", str(plan)]
    outcome = command(*words)
    assert outcome.code == 1
    first, *_, last = outcome.err.splitlines()
    assert first.startswith("foredraft: broken promise: last_good_config at ") and "half a table was taken" in first
    assert last == f"foredraft: seed 5; again: {shlex.join(['foredraft', *words, '--seed', '5'])}"
    assert "Every promise was kept" not in outcome.out
    again = command(*shlex.split(last.partition("again: ")[2])[1:])
    assert again.code == 1 and again.err.splitlines()[0] == first


def test_a_service_that_raises_is_a_broken_promise(command, plan, monkeypatch, tmp_path):
    def broken(self, *arguments):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("foredraft.core.scheduler.engine.Engine.lose_steps", broken)
    outcome = command("simulate", *SMALL, "--faults", plan, "--out", tmp_path / "run")
    assert outcome.code == 1
    assert (
        "no_crash" in outcome.err
        and "ZeroDivisionError: planted" in outcome.err
        and "_lose_steps (engine.py:" in outcome.err
    )
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["incomplete"]


def test_the_swarm_follows_from_the_seed(command, tmp_path):
    plans = []
    for number, seed in enumerate((3, 3, 4)):
        run = tmp_path / str(number)
        assert command("simulate", *SMALL, "--faults", "swarm", "--seed", seed, "--out", run).code == 0
        plans.append((run / "faults.toml").read_text())
    assert plans[0] == plans[1] != plans[2]


def test_a_bad_plan_is_exit_code_2_with_every_problem(command, tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text("[device.hang]\nprobability = 2\n[link.lost]\nprobability = -1\n")
    outcome = command("simulate", "--faults", path)
    assert outcome.code == 2 and not outcome.out
    assert f"{path}: device.hang: unknown key (did you mean 'hangs'?)" in outcome.err
    assert f"{path}: link.lost.probability" in outcome.err
    assert command("simulate", "--faults", "swrm").err.strip().endswith("(did you mean 'swarm'?)")


def test_the_example_plan_runs(command):
    path = ROOT / "examples" / "faults" / "bad_day.toml"
    outcome = command("simulate", *SMALL, "--faults", path)
    assert outcome.code == 0 and "Every promise was kept." in outcome.out
    assert set(load_fault_plan(path, 0).enabled) < set(OF_KIND)
