"""`foredraft simulate` with prefill and decode engines: report, files, replay, and the example's table."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = (
    "disaggregation.ratio=2:1",
    "hardware.replicas=3",
    "engine.page_size=16",
    "workload.num_requests=30",
    "workload.rate=20",
)
POOLS = ("simulate", "--quiet", *(word for setting in SETTINGS for word in ("--set", setting)))
FEW = ("simulate", "--quiet", "--set", "workload.num_requests=5")


@pytest.fixture
def run(command):
    """`run(…)` is what the command prints; it must succeed."""

    def printed(*arguments) -> str:
        outcome = command(*arguments)
        assert outcome.code == 0, outcome.err
        return outcome.out

    return printed


def summary_of(directory: Path) -> dict:
    return json.loads((directory / "summary.json").read_text())


def test_a_run_with_pools_is_reported_kept_and_replayed(run, tmp_path):
    output = run(*POOLS, "--out", tmp_path)
    assert "llama-3.1-8b on 3 × H100" in output and re.search(r"prefill : decode +2 : 1", output)
    summary = summary_of(tmp_path)
    assert summary["completed"] == summary["transfers_completed"] == 30
    assert 0 < summary["mean_transfer_wait_ms"] < summary["mean_transfer_ms"]
    assert 0 < summary["prefill_busy_share"] < summary["decode_busy_share"] <= 1
    assert "decisions identical (3 replicas" in run("audit", "--replay", tmp_path)
    again = tmp_path / "again"
    run("simulate", tmp_path / "scenario.toml", "--quiet", "--out", again)
    assert (again / "events.jsonl").read_bytes() == (tmp_path / "events.jsonl").read_bytes()


def test_every_number_of_pools_is_documented(run, tmp_path):
    run(*POOLS, "--out", tmp_path, "--no-events", "--no-perfetto")
    plain = tmp_path / "plain"
    run(*FEW, "--out", plain)
    keys = summary_of(tmp_path).keys()
    own = keys - summary_of(plain).keys()
    own = {
        re.sub(r"^(mean|median|p\d\d)_(\w+)_ms$", r"\2", key)
        for key in own
        if not key.startswith(("rounds_at", "ema_accept_len_from", "correct_drafts_at"))
    }
    text = (ROOT / "docs" / "disaggregation.md").read_text(encoding="utf-8")
    assert own and {key for key in own if f"`{key}`" not in text} == set()


def test_faults_of_transfers_are_in_the_swarm_of_pools_alone(run, tmp_path):
    of_transfers = []
    for number, words in enumerate((POOLS, FEW)):
        run(*words, "--faults", "swarm", "--seed", 7, "--out", tmp_path / str(number))
        kinds = summary_of(tmp_path / str(number))["faults_injected"]
        assert kinds
        of_transfers.append(any(kind.startswith("transfer.") for kind in kinds))
    assert of_transfers == [True, False]


@pytest.mark.parametrize("setting", ["disaggregation.prefill=1", "disaggregation.ratio=2:1"])
def test_pools_that_cannot_be_are_one_message(setting, command):
    outcome = command("simulate", "--quiet", "--set", setting)
    assert outcome.code == 2 and "disaggregation." in outcome.err


@pytest.mark.ci
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
