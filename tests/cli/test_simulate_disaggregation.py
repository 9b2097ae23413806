"""`foretoken simulate` with prefill and decode engines: report, files, replay, and the example's table."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from foretoken.cli.app import app
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
POOLS = [
    "simulate",
    "--quiet",
    "--set",
    "disaggregation.ratio=2:1",
    "--set",
    "hardware.replicas=3",
    "--set",
    "engine.page_size=16",
    "--set",
    "workload.num_requests=30",
    "--set",
    "workload.rate=20",
]


def run(arguments: list[str], code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    return result.output


def test_a_run_with_pools_is_reported_kept_and_replayed(tmp_path):
    output = run([*POOLS, "--out", str(tmp_path)])
    assert "llama-3.1-8b on 3 × H100" in output and re.search(r"prefill : decode +2 : 1", output)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["completed"] == summary["transfers_completed"] == 30
    assert 0 < summary["mean_transfer_wait_ms"] < summary["mean_transfer_ms"]
    assert 0 < summary["prefill_busy_share"] < summary["decode_busy_share"] <= 1
    assert "decisions identical (3 replicas" in run(["replay", str(tmp_path)])
    again = tmp_path / "again"
    run(["simulate", str(tmp_path / "scenario.toml"), "--quiet", "--out", str(again)])
    assert (again / "events.jsonl").read_bytes() == (tmp_path / "events.jsonl").read_bytes()


def test_every_number_of_pools_is_documented(tmp_path):
    run([*POOLS, "--out", str(tmp_path), "--no-events", "--no-perfetto"])
    plain = tmp_path / "plain"
    run(["simulate", "--quiet", "--set", "workload.num_requests=5", "--out", str(plain)])
    keys = json.loads((tmp_path / "summary.json").read_text()).keys()
    own = keys - json.loads((plain / "summary.json").read_text()).keys()
    own = {re.sub(r"^(mean|median|p\d\d)_(\w+)_ms$", r"\2", key) for key in own if not key.startswith("rounds_at")}
    text = (ROOT / "docs" / "disaggregation.md").read_text(encoding="utf-8")
    assert own and {key for key in own if f"`{key}`" not in text} == set()


def test_faults_of_transfers_are_in_the_swarm_of_pools_alone(tmp_path):
    run([*POOLS, "--faults", "swarm", "--seed", "7", "--out", str(tmp_path)])
    assert any(
        kind.startswith("transfer.") for kind in json.loads((tmp_path / "summary.json").read_text())["faults_injected"]
    )
    plain = tmp_path / "plain"
    run(
        [
            "simulate",
            "--quiet",
            "--set",
            "workload.num_requests=5",
            "--faults",
            "swarm",
            "--seed",
            "7",
            "--out",
            str(plain),
        ]
    )
    kinds = json.loads((plain / "summary.json").read_text())["faults_injected"]
    assert kinds and not any(kind.startswith("transfer.") for kind in kinds)


@pytest.mark.parametrize("settings", [["disaggregation.prefill=1"], ["disaggregation.ratio=2:1"]])
def test_pools_that_cannot_be_are_one_message(settings):
    arguments = ["simulate", "--quiet"]
    for setting in settings:
        arguments += ["--set", setting]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code != 0 and "disaggregation." in f"{result.output}{result.exception}"


def test_the_example_makes_its_table_of_a_stand_in(capsys, monkeypatch):
    spec = importlib.util.spec_from_file_location("disaggregation_table", ROOT / "examples" / "disaggregation_table.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr("sys.argv", ["disaggregation_table.py", "--requests", "4", "--trace", "nowhere.jsonl"])
    example.main()
    output = capsys.readouterr()
    assert "a synthetic stand-in" in output.out.splitlines()[0]
    rows = [line for line in output.out.splitlines() if re.match(r"\| \d", line)]
    assert len(rows) == 3 * (4 + 3) and sum("together" in row for row in rows) == 9
    assert output.err.count("\n") == len(rows)
