"""A run in several processes: the result of one process, bit for bit, and what happens when a process dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from foredraft import simulate
from foredraft.core.errors import ConfigError, ForedraftError
from foredraft.observe.children import child
from foredraft.observe.log import EventLog
from foredraft.observe.measuring.metrics import RunMetrics
from foredraft.sim.running.coupling import coupling
from foredraft.sim.running.parts import NO_REPLICAS, run_parts
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario_file import scenario_from_dict
from foredraft.simulation import summarize_run
from pyarrow import parquet

CHAT = {
    "hardware": {"replicas": 3},
    "router": {"policy": "round_robin"},
    "workload": {"num_requests": 150, "rate": 60.0, "output": {"value": 60}, "prompt": {"value": 300}},
}
RESTLESS = {
    "hardware": {"replicas": 4, "server": "sglang-0.5"},
    "router": {"policy": "random"},
    "clients": {"cancel_share": 0.4, "cancel_mean_s": 0.3},
    "engine": {"max_running": 4, "max_queue": 6},
    "workload": {"num_requests": 200, "rate": 150.0, "output": {"value": 60}, "prompt": {"value": 300}},
}
AT_ONCE = {  # every replica does the same at the same nanosecond
    "hardware": {"replicas": 3},
    "router": {"policy": "round_robin", "latency_us": 0.0, "bandwidth_gbps": 1e9},
    "speculation": {"algorithm": "NONE"},
}


def one_run(tables: dict[str, Any], workers: int, folder: Path) -> tuple[Any, ...]:
    """Return summary, log, and the tables of requests and rounds."""
    scenario = scenario_from_dict(tables, "test")
    folder.mkdir()
    with EventLog(folder / "events.jsonl", {}) as log, closing(RunMetrics(folder)) as metrics:
        if workers == 1:
            simulation = Simulation(scenario, sinks=lambda replica: [metrics.sink(replica), log.sink(replica)])
            report = simulation.run()
        else:
            report = run_parts(Simulation(scenario, own=NO_REPLICAS), workers, {}, metrics, log)
        summary = summarize_run(scenario, report, metrics)
    files = [parquet.read_table(folder / name) for name in ("requests.parquet", "rounds.parquet")]
    return summary, (folder / "events.jsonl").read_bytes(), *files


@pytest.mark.fast("at_once", ci="chat")
@pytest.mark.parametrize(
    ("tables", "workers"),
    [
        pytest.param(CHAT, 2, id="chat"),
        pytest.param(CHAT, 3, id="chat-3"),
        pytest.param(RESTLESS, 2, id="restless"),
        pytest.param(AT_ONCE, 2, id="at_once"),
    ],
)
def test_several_processes_give_the_result_of_one(tables, workers, tmp_path):
    if tables is AT_ONCE:
        trace = tmp_path / "trace.csv"
        row = "2023-11-16 18:17:03.0000000,100,40\n"
        trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{30 * row}")
        tables = {**tables, "workload": {"trace": str(trace)}}
    one, several = (one_run(tables, number, tmp_path / str(number)) for number in (1, workers))
    assert one[0]["completed"] and several[0] == one[0]
    assert several[1] == one[1], "the logs differ"
    assert several[2] == one[2] and several[3] == one[3]
    if tables.get("clients"):
        assert one[0]["aborted"] and one[0]["refused"]


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        ({}, "router.policy = least_loaded looks at all replicas; round_robin and random do not"),
        ({"router": {"policy": "prefix_aware"}}, "router.policy = prefix_aware looks at all replicas"),
        ({"router": {"policy": "random"}, "workload": {"concurrency": 4}}, "each client of a closed loop waits"),
        ({"disaggregation": {"ratio": "1:1"}}, "prefill and decode engines hand requests over"),
    ],
)
def test_coupled_replicas_are_refused_with_the_reason(tables, reason):
    with pytest.raises(ConfigError) as refused:
        simulate({"hardware": {"replicas": 2}, **tables}, workers=2)
    assert f"workers: one process has to simulate this run: {reason}" in str(refused.value)
    assert coupling(scenario_from_dict(CHAT, "test"), has_faults=True)
    with pytest.raises(ConfigError, match=r"4 processes for hardware\.replicas = 3"):
        simulate(CHAT, workers=4)


def deadly(monkeypatch: pytest.MonkeyPatch, program: Path, lives: int) -> None:
    """Let the first processes that are started, so many, be killed by their job."""
    program.write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        "from foredraft.observe.children import pool\n"
        "from foredraft.sim.running import parts\n"
        "def run(shared, line, tell):\n"
        "    marks = Path(__file__).parent\n"
        f"    for number in range({lives}):\n"
        "        try:\n"
        "            (marks / f'killed-{number}').touch(exist_ok=False)\n"
        "        except FileExistsError:\n"
        "            continue\n"
        "        os.kill(os.getpid(), 9)\n"
        "    return parts.simulate_part(shared, line, tell)\n"
        "pool.serve_jobs(run)\n"
    )
    start = subprocess.Popen
    monkeypatch.setattr(
        child.subprocess,
        "Popen",
        lambda command, **options: start([sys.executable, str(program), *command[4:]], **options),
    )


@pytest.mark.slow
def test_a_process_that_dies_is_replaced(tmp_path, monkeypatch):
    deadly(monkeypatch, tmp_path / "part.py", 1)
    one, several = (one_run(CHAT, number, tmp_path / str(number)) for number in (1, 2))
    assert (tmp_path / "killed-0").exists() and several[:2] == one[:2]


@pytest.mark.slow
def test_a_part_that_kills_its_processes_is_one_error(tmp_path, monkeypatch):
    deadly(monkeypatch, tmp_path / "part.py", 99)
    before = _children(os.getpid())  # those that other tests of this process have left, such as a resource tracker
    with pytest.raises(
        ForedraftError, match=r"the process of part \d of 2 of the run died, 2 times: killed by SIGKILL"
    ):
        one_run(CHAT, 2, tmp_path / "run")
    assert set(_children(os.getpid())) <= set(before)


@pytest.mark.slow
def test_ctrl_c_leaves_no_process_and_says_that_nothing_is_kept(tmp_path):
    settings = ["router.policy=round_robin", "hardware.replicas=2", "workload.num_requests=1000000"]
    command = [sys.executable, "-m", "foredraft.cli", "simulate", "--workers", "2", "--out", str(tmp_path / "run")]
    process = subprocess.Popen(
        [*command, *(f"--set={text}" for text in settings)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    while process.poll() is None and len(_children(process.pid)) < 2:
        time.sleep(0.05)
    time.sleep(1)
    children = _children(process.pid)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate()
    assert process.returncode == 130 and out == ""
    assert errors.splitlines()[-1] == (
        "foredraft: interrupted; a run in several processes has no results before its end"
    )
    assert children and not any(os.path.exists(f"/proc/{child}") for child in children)
    assert not (tmp_path / "run" / "summary.json").exists()
    assert '"complete":false' in (tmp_path / "run" / "events.jsonl").read_text()


def _children(pid: int) -> list[str]:
    """Return the processes that any thread of `pid` has started."""
    return [child for place in Path(f"/proc/{pid}/task").glob("*/children") for child in place.read_text().split()]


@pytest.mark.ci
def test_parts_are_put_together_without_pandas():
    """It would take longer to load than they take."""
    asked = [
        "simulate",
        "--workers",
        "2",
        "--quiet",
        "--set",
        "hardware.replicas=2",
        "--set",
        "router.policy=round_robin",
    ]
    asked += ["--set", "workload.num_requests=20"]
    program = f"import sys\nfrom foredraft.cli.__main__ import main\nsys.argv[1:] = {asked}\ntry:\n    main()\n"
    program += "except SystemExit as end:\n    assert not end.code\nassert 'pandas' not in sys.modules"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
