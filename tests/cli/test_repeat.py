"""Runs that are repeated, replayed, or interrupted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from damaged_inputs import execute

# Closed loop, two replicas, impatient clients, page size, shared prefixes: whatever could depend on the order of a
# hash.
VARIED = """
[hardware]
replicas = 2
[engine]
page_size = 4
kv_slots = 6000
[speculation]
policy = "goodput"
[workload]
num_requests = 60
rate = 60.0
prefixes = { groups = 5, length = 300 }
[clients]
cancel_share = 0.2
cancel_mean_s = 0.5
[router]
policy = "prefix_aware"
"""


def varied_run(directory: Path, *options: object) -> Path:
    scenario = directory / "scenario.toml"
    scenario.write_text(VARIED)
    words = ("simulate", scenario, "--out", directory / "run", "--quiet", *options)
    assert execute(tuple(map(str, words)))[0] == 0
    return directory / "run"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    return varied_run(tmp_path_factory.mktemp("finished"), "--seed", 3)


@pytest.mark.ci
def test_another_process_writes_the_same_bytes(finished, process, tmp_path):
    """Whose strings have other hashes."""
    env = {"PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}
    scenario = finished.parent / "scenario.toml"
    running = process("simulate", scenario, "--seed", 3, "--out", tmp_path / "same", "--quiet", env=env)
    _, err = running.communicate(timeout=120)
    assert running.returncode == 0, err
    for name in ("events.jsonl", "summary.json", "trace.json", "scenario.toml"):
        assert (finished / name).read_bytes() == (tmp_path / "same" / name).read_bytes(), name
    another = varied_run(tmp_path, "--seed", 4, "--no-perfetto")
    assert (another / "events.jsonl").read_bytes() != (finished / "events.jsonl").read_bytes()
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["aborted"] > 0 and summary["prefix_cache_hit_rate"] > 0, "the run must meet what it is to repeat"


# -- replay ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy of the finished run."""
    return shutil.copytree(finished, tmp_path / "run")


def records(log: Path) -> list[dict]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def rewrite(log: Path, lines: list[dict]) -> None:
    log.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def test_replay_finds_every_decision_identical(run, command):
    outcome = command("audit", "--replay", run / "events.jsonl")
    plans = sum(record["t"] == "plan" for record in records(run / "events.jsonl"))
    assert outcome.code == 0
    assert f"{plans:,} decisions identical" in outcome.out and "2 replicas" in outcome.out
    assert command("audit", "--replay", run) == outcome, "the directory of a run stands for its log"


def test_replay_names_other_times_by_which_steps_were_chosen(run, command):
    lines = records(run / "events.jsonl")
    assert lines[0]["kernels"] == {"target": "the roofline", "draft": "the roofline"}
    lines[0]["kernels"]["target"] = "aiconfigurator_core 0.11.0: llama-3.1-8b on h100_sxm, sglang, tensor parallel 1"
    rewrite(run / "events.jsonl", lines)
    code, _, errors = command("audit", "--replay", run)
    assert (
        code == 2 and "kernels.target" in errors and "aiconfigurator_core 0.11.0" in errors and "the roofline" in errors
    )
    assert "kernels.draft" not in errors
    lines[0]["scenario"]["speculation"]["policy"] = "ema"  # which asks for no times
    rewrite(run / "events.jsonl", lines)
    assert "kernels" not in command("audit", "--replay", run).err


# -- interruption ------------------------------------------------------------------------------------------------------


OFTEN_WRITTEN = """
from foredraft.cli.__main__ import main
from foredraft.observe import log
log._BUFFER_CHARACTERS = 1 << 16
main()
"""


@pytest.mark.ci
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_an_interrupted_run_leaves_what_it_had(number, code, process, command, tmp_path):
    run = tmp_path / "run"
    many = ("--set", "workload.num_requests=50000")
    running = process("simulate", *many, "--out", run, "--no-perfetto", code=OFTEN_WRITTEN)
    log = run / "events.jsonl"
    deadline = time.monotonic() + 60
    # The log is written in pieces; by the second one the run is well under way.
    while not (log.exists() and log.stat().st_size > 100_000):
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(number)
    out, err = running.communicate(timeout=60)
    assert running.returncode == code, err
    assert "incomplete" in out and "interrupted" in err and "Traceback" not in err

    summary = json.loads((run / "summary.json").read_text())
    assert summary["incomplete"] is True and 0 < summary["completed"] < 50_000
    assert summary["duration"] > 0 and summary["mean_ttft_ms"] > 0
    end = records(log)[-1]
    assert end["t"] == "end" and end["complete"] is False
    assert parquet.read_table(run / "requests.parquet").num_rows >= summary["completed"]
    outcome = command("audit", "--replay", run)
    assert outcome.code == 0 and "interrupted" in outcome.out
