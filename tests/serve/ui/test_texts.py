"""The scenario file and the commands of a page say what is set on it."""

from __future__ import annotations

import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from foredraft.sim.scenario_file import load_scenario, scenario_with
from foredraft.ui.dropped import DROPPED
from foredraft.ui.texts import commands, scenario_toml

GIVEN = {
    "name": 'a "name"',
    "model.target": "llama-3.1-70b",
    "hardware.gpu": "RTX 4090",
    "hardware.tensor_parallel": 8,
    "hardware.server": "sglang-0.5",
    "speculation.policy": "fixed",
    "speculation.steps": 3,
    "speculation.topk": 4,
    "speculation.num_draft_tokens": {"3": 8},
    "acceptance.conditional": [0.8, 0.7, 0.6],
    "engine.prefix_cache": False,
    "workload.rate": 12.5,
    "workload.prompt.mean": 300,
    "workload.prefixes.groups": 2,
    "slo.ttft_ms": 1e3,
}


@pytest.mark.parametrize("given", [{}, GIVEN, {"name": "none"}, {"name": "12"}, {"name": " a"}, {"name": "a=b"}])
def test_file_and_command_say_the_same_as_the_page(tmp_path: Path, given):
    page = scenario_with({}, given)
    file = tmp_path / "scenario.toml"
    file.write_text(scenario_toml(given))
    assert load_scenario(file)[0] == page
    words = shlex.split(commands(given, {"plan": ["--gpus", "2"]})["plan"])
    assert words[:2] == ["foredraft", "plan"] and words[-2:] == ["--gpus", "2"]
    settings = [word for option, word in pairwise(words) if option == "--set"]
    assert load_scenario(None, settings)[0] == page


def test_a_dropped_trace_has_the_name_of_its_file():
    given = {"workload.trace": f"{DROPPED}0123/requests.csv", "hardware.gpu": "H200"}
    made = commands(given, {})
    assert made["doctor"] == "foredraft doctor --set hardware.gpu=H200 --trace requests.csv"
    assert made["doctor --round"] == "foredraft doctor --round --set hardware.gpu=H200"
    assert 'trace = "requests.csv"' in scenario_toml(given)
