"""Sweeps: each run as `simulate` makes it, kept as it ends;
what stops a sweep, or one of its processes, costs no other run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from foredraft import Scenario, simulate
from foredraft.core.errors import ForedraftError
from foredraft.observe.children import child
from foredraft.planning.store import JOURNAL, StoredWorkers, TrialStore, question
from foredraft.planning.sweep import Sweep
from foredraft.planning.trial import RunOutcome, run_trial
from foredraft.planning.workers import Job, JobWorkers, LocalWorkers

SMALL = {"workload": {"num_requests": 12, "rate": 20.0, "output": {"value": 20}, "prompt": {"value": 100}}}
POINTS = ({"speculation.algorithm": "NONE"}, {"speculation.algorithm": "EAGLE3"})


class HereWorkers:
    """Runs jobs in this process."""

    count = 1

    def __init__(self, tables: Mapping[str, Any]) -> None:
        self.tables = tables
        self.jobs: list[Job] = []
        self.ended = 0

    def submit(self, job: Job) -> None:
        self.jobs.append(job)

    def next_ended(self) -> tuple[Job, RunOutcome]:
        job = self.jobs[self.ended]
        self.ended += 1
        return job, run_trial(self.tables, job.settings)

    def close(self) -> None:
        pass


TABLES = Scenario.model_validate(SMALL).model_dump(mode="json")


def run_sweep(
    path: Path,
    points: Sequence[Mapping[str, Any]] = POINTS,
    seeds: Sequence[int] = (0, 1),
    workers: JobWorkers | None = None,
) -> Sweep:
    """Run a sweep to its end, and write its table."""
    sweep = Sweep(points, seeds)
    store = TrialStore(path, question("sweep", TABLES, points=points, seeds=seeds))
    with closing(StoredWorkers(workers or HereWorkers(TABLES), store)) as pool:
        for _ in sweep.run(pool):
            pass
        store.write_table()
    return sweep


def numbers(sweep: Sweep) -> dict[tuple[int, int], Mapping[str, Any]]:
    return {key: trial.summary for key, trial in sweep.trials.items()}


@pytest.mark.ci
def test_processes_give_the_numbers_of_simulate(tmp_path: Path):
    from pyarrow import parquet

    sweep = run_sweep(tmp_path, workers=LocalWorkers(TABLES, 2))
    rows = parquet.read_table(tmp_path / "trials.parquet").to_pylist()
    assert len(rows) == len(sweep.trials) == 4
    for row in rows:
        settings = {"speculation.algorithm": row["speculation.algorithm"], "seed": row["seed"]}
        expected = simulate(SMALL, settings).summary
        point = POINTS.index({"speculation.algorithm": row["speculation.algorithm"]})
        assert sweep.trials[point, row["seed"]].summary.items() <= expected.items()
        assert row["mean_e2el_ms"] == expected["mean_e2el_ms"] > 0


def test_a_stopped_sweep_goes_on_behind_its_last_whole_line(tmp_path: Path):
    whole = run_sweep(tmp_path / "whole")
    lines = (tmp_path / "whole" / JOURNAL).read_bytes().splitlines(keepends=True)
    run_sweep(tmp_path / "part")
    (tmp_path / "part" / JOURNAL).write_bytes(lines[0] + lines[1][: len(lines[1]) // 2])  # as a kill leaves it
    rest = HereWorkers(TABLES)
    again = run_sweep(tmp_path / "part", workers=rest)
    assert len(rest.jobs) == 3
    assert numbers(again) == numbers(whole)


def test_another_sweep_and_a_broken_journal_are_refused(tmp_path: Path):
    run_sweep(tmp_path)
    with pytest.raises(ForedraftError, match="holds runs of another seeds"):
        run_sweep(tmp_path, seeds=(0, 1, 2))
    journal = tmp_path / JOURNAL
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text(lines[0] + '{"settings": 1}\n' + lines[1])
    with pytest.raises(ForedraftError, match="line 2: is no run"):
        run_sweep(tmp_path)


def test_settings_that_cannot_run_are_refused_with_the_reason(tmp_path: Path):
    points = (*POINTS, {"hardware.gpu": "L4", "model.target": "llama-3.1-70b"}, {"router.policy": "random"})
    trials = run_sweep(tmp_path, points, seeds=(0,)).trials
    assert [trials[point, 0].status for point in range(4)] == ["done", "done", "refused", "refused"]
    assert "does not fit" in trials[2, 0].message and "has no effect" in trials[3, 0].message


@pytest.mark.slow
def test_a_process_that_dies_costs_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The second scenario kills every process that takes it; the others run, and the sweep ends."""
    program = tmp_path / "worker.py"
    program.write_text(
        "import os, sys\n"
        "from foredraft.observe.children import pool\n"
        "from foredraft.planning import workers\n"
        "run = workers.run_trial\n"
        "def deadly(tables, settings):\n"
        "    if settings.get('speculation.algorithm') == 'EAGLE3':\n"
        "        os.kill(os.getpid(), 9)\n"
        "    return run(tables, settings)\n"
        "workers.run_trial = deadly\n"
        "pool.serve_jobs(workers.answer_of)\n"
    )
    start = subprocess.Popen
    monkeypatch.setattr(
        child.subprocess,
        "Popen",
        lambda command, **options: start([sys.executable, str(program), *command[4:]], **options),
    )
    trials = run_sweep(tmp_path / "sweep", workers=LocalWorkers(TABLES, 2)).trials
    assert [trials[0, seed].status for seed in (0, 1)] == ["done", "done"]
    assert [trials[1, seed].status for seed in (0, 1)] == ["failed", "failed"]
    assert "2 times: killed by SIGKILL" in trials[1, 0].message


@pytest.mark.slow
def test_ctrl_c_keeps_what_has_ended_and_leaves_no_process(tmp_path: Path):
    settings = [f"--set={key}" for key in ("workload.num_requests=12", "workload.rate=20.0")]
    command = [sys.executable, "-m", "foredraft.cli", "sweep", "--grid", "speculation.steps=0..7", "--seeds", "40"]
    place = tmp_path / "sweep"
    process = subprocess.Popen(
        [*command, *settings, "--out", str(place), "--workers", "1"], stderr=subprocess.PIPE, text=True
    )
    journal = place / JOURNAL
    while process.poll() is None and not (journal.exists() and journal.read_bytes().count(b"\n") >= 2):
        time.sleep(0.05)
    children = _children(process.pid)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "the same command continues" in errors
    assert children and not any(os.path.exists(f"/proc/{child}") for child in children)
    lines = journal.read_text().splitlines()
    assert len(lines) >= 2 and all(json.loads(line)["status"] == "done" for line in lines)


def _children(pid: int) -> list[str]:
    """Return the processes that any thread of `pid` has started."""
    return [child for place in Path(f"/proc/{pid}/task").glob("*/children") for child in place.read_text().split()]
