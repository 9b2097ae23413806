"""Runs on a Ray cluster of this machine: the same outcomes, whatever process or node dies, and a cluster that goes away
keeps what has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
from foredraft import Scenario
from foredraft.core.errors import ConfigError
from foredraft.planning.store import make_workers
from foredraft.planning.sweep import Sweep
from foredraft.planning.trial import run_trial
from foredraft.planning.workers import ClusterGone, Job, RayWorkers, run_job_text

TABLES = Scenario.model_validate({"workload": {"num_requests": 400, "rate": 20.0}}).model_dump(mode="json")
POINTS = ({"speculation.algorithm": "NONE"}, {"speculation.algorithm": "EAGLE3"})


def test_the_address_of_a_cluster_is_checked():
    for text in ("rai", "ray://", "ray://head", "localhost:10001"):
        with pytest.raises(ConfigError, match=r"neither ray nor ray://HOST:PORT"):
            make_workers(TABLES, 1, text)


def test_a_node_with_another_version_is_refused():
    with pytest.raises(Exception, match="a node has foredraft"):
        run_job_text("{}", "{}", "0.0.0")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch):
    ray = pytest.importorskip("ray", reason="needs the extra cluster")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield ray
    ray.shutdown()


def processes(name: str, ancestor: int | None = None) -> list[int]:
    """Return the processes that this one or `ancestor` has started, directly or not, with `name` in their command
    line."""
    found, parents = [], [ancestor or os.getpid()]
    while parents:
        for place in Path(f"/proc/{parents.pop()}/task").glob("*/children"):
            with suppress(OSError):  # it has ended
                for child in map(int, place.read_text().split()):
                    parents.append(child)
                    if name in Path(f"/proc/{child}/cmdline").read_text():
                        found.append(child)
    return found


@pytest.mark.slow
def test_a_process_that_dies_has_its_run_made_again(ray):
    sweep = Sweep(POINTS, range(4))
    with closing(RayWorkers(TABLES, 2, "ray")) as pool:
        assert pool.count == 2
        runs = sweep.run(pool)
        next(runs)
        while not (victims := processes("ray::run_job_text")):
            time.sleep(0.01)
        os.kill(victims[0], signal.SIGKILL)
        for _ in runs:
            pass
    assert [trial.status for trial in sweep.trials.values()] == ["done"] * 8
    for (point, seed), trial in sweep.trials.items():
        assert trial.summary == run_trial(TABLES, {**POINTS[point], "seed": seed}).summary
    assert not processes("ray::") and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.slow
def test_a_run_that_kills_its_processes_fails_alone(ray, monkeypatch: pytest.MonkeyPatch):
    with closing(RayWorkers(TABLES, 2, "ray")) as pool:
        deadly = ray.remote(max_retries=1)(lambda *texts: os._exit(7) if "EAGLE3" in texts[1] else run_job_text(*texts))
        monkeypatch.setattr(pool, "_remote", deadly)
        for number, point in enumerate(POINTS):
            pool.submit(Job(number, point))
        outcomes = {job.ticket: trial for job, trial in (pool.next_ended(), pool.next_ended())}
    assert (outcomes[0].status, outcomes[1].status) == ("done", "failed")
    assert "died, 2 times" in outcomes[1].message


@pytest.mark.slow
def test_a_plan_goes_on_when_a_worker_dies(ray, tmp_path: Path):
    """The same command on this machine has nothing left to run then, and gives the same answer."""
    settings = [f"--set={text}" for text in ("workload.output.value=8", "workload.prompt.value=100")]
    command = [sys.executable, "-P", "-m", "foredraft.cli", "plan", "--slo", "e2el_p99<1s", "--json", *settings]
    command += ["--try", "speculation.steps=1,3", "--set=engine.max_running=2", "--requests", "100", "--seeds", "2"]
    command += ["--out", str(tmp_path / "plan"), "--workers", "2"]
    pipe = subprocess.PIPE
    planning = subprocess.Popen([*command, "--cluster", "ray"], stdout=pipe, stderr=pipe, text=True)
    journal = tmp_path / "plan" / "trials.jsonl"
    while planning.poll() is None and not (journal.exists() and journal.read_text()):
        time.sleep(0.05)
    while planning.poll() is None and not (victims := processes("ray::run_job_text", planning.pid)):
        time.sleep(0.01)
    os.kill(victims[0], signal.SIGKILL)
    out, errors = planning.communicate(timeout=600)
    assert planning.returncode == 0 and "Traceback" not in errors, errors
    kept = journal.read_text()
    here = subprocess.run([*command, "--quiet"], capture_output=True, text=True, timeout=600)
    assert (here.returncode, here.stdout) == (0, out), here.stderr
    assert journal.read_text() == kept


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["joined", "other"])
def test_a_node_that_dies_costs_no_run(ray, monkeypatch: pytest.MonkeyPatch, capfd, victim: str):
    """Also if it is the node through which the command has joined."""
    from ray.cluster_utils import Cluster

    size = {"num_cpus": 1, "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args=size)
    try:
        other = cluster.add_node(**size)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        sweep = Sweep(POINTS, range(6))
        with closing(RayWorkers(TABLES, None, "ray")) as pool:
            assert pool.count == 2
            for number, _ in enumerate(sweep.run(pool), 1):
                if number == 3:
                    node = cluster.head_node if victim == "joined" else other
                    os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
    finally:
        cluster.shutdown()
    assert [trial.status for trial in sweep.trials.values()] == ["done"] * 12
    for point, settings in enumerate(POINTS):
        assert sweep.trials[point, 5].summary == run_trial(TABLES, {**settings, "seed": 5}).summary
    assert "Raylet is terminated" not in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("victims", [("raylet/raylet",), ("gcs_server", "raylet/raylet")], ids=["node", "cluster"])
def test_a_cluster_that_goes_away_says_what_is_kept(tmp_path: Path, victims: tuple[str, ...]):
    pytest.importorskip("ray", reason="needs the extra cluster")
    program = tmp_path / "sweep.py"
    program.write_text(
        "import os, signal, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from test_cluster import *\n"
        "from foredraft.cli.planning.options import kept_runs\n"
        "with kept_runs('sweep', TABLES, Path(sys.argv[2]), 2, 'ray') as (pool, store):\n"
        "    runs = Sweep(POINTS, range(50)).run(pool)\n"
        "    for number, _ in enumerate(runs, 1):\n"
        "        if number == 3:\n"
        f"            for name in {victims}:\n"
        "                for process in processes(name):\n"
        "                    os.kill(process, signal.SIGKILL)\n"
    )
    here = str(Path(__file__).parent)
    run = subprocess.run(
        [sys.executable, str(program), here, str(tmp_path / "kept")], capture_output=True, text=True, timeout=300
    )
    assert ClusterGone.__name__ in run.stderr and "ray.exceptions" not in run.stderr, run.stderr
    assert "the same command continues from there, without --cluster" in run.stderr
    assert len((tmp_path / "kept" / "trials.jsonl").read_text().splitlines()) >= 3
