"""Processes that simulate: each takes one run after another, as lines of JSON, so that a run that kills its process costs no other."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import IO, Any, Protocol

from ..core.parsing import parse_json
from .trial import Trial, run_trial

ATTEMPTS = 2
"""How often a run is given to a process: a process may die of something else than this run."""


@dataclass(frozen=True, slots=True)
class Job:
    """A run to make: a number by which who asked for it knows it again, and the keys of the scenario that it replaces."""

    ticket: int
    settings: Mapping[str, Any]


class Workers(Protocol):
    """What runs jobs, several at a time. Closing it stops the jobs that are running."""

    count: int
    """How many jobs run at a time."""

    def submit(self, job: Job) -> None:
        """Run this job when a process is free."""

    def next_ended(self) -> tuple[Job, Trial]:
        """Wait for any of the submitted jobs to end, and return it with its outcome."""
        ...

    def close(self) -> None: ...


class LocalWorkers:
    """Processes on this machine, `count` of them, which simulate the scenario `tables`. They start with the first jobs."""

    def __init__(self, tables: Mapping[str, Any], count: int) -> None:
        self.count = count
        self._tables = tables
        self._waiting: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[Job, Trial] | BaseException] = queue.SimpleQueue()
        self._workers: list[_Worker] = []

    def submit(self, job: Job) -> None:
        """See `Workers.submit`."""
        self._waiting.put(job)
        if len(self._workers) < self.count:
            worker = _Worker(self._tables)
            self._workers.append(worker)
            threading.Thread(target=worker.serve, args=(self._waiting, self._ended), daemon=True).start()

    def next_ended(self) -> tuple[Job, Trial]:
        """See `Workers.next_ended`."""
        outcome = self._ended.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def close(self) -> None:
        """End all processes, those in the middle of a run, too."""
        for worker in self._workers:
            worker.stop()
            self._waiting.put(None)


class _Worker:
    """A process and the thread that feeds it."""

    def __init__(self, tables: Mapping[str, Any]) -> None:
        self._tables = tables
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False
        self._lock = threading.Lock()  # a process is not started after `stop`

    def serve(
        self,
        waiting: queue.SimpleQueue[Job | None],
        ended: queue.SimpleQueue[tuple[Job, Trial] | BaseException],
    ) -> None:
        """Run the jobs that wait, until there is None instead of one."""
        try:
            while (job := waiting.get()) is not None and not self._stopped:
                ended.put((job, self._run(job)))
        except BaseException as error:  # handed to the thread that waits for outcomes, which raises it
            ended.put(error)

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def _run(self, job: Job) -> Trial:
        died = ""
        for _ in range(ATTEMPTS):
            process = self._ready()
            if process is None:
                break
            line = None
            try:
                process.stdin.write(json.dumps(dict(job.settings)) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except BrokenPipeError:
                pass
            if line:
                return Trial(**parse_json(line))
            code = process.wait()
            died = f"the process of the run died, {ATTEMPTS} times: {_ending(code)}"
        return Trial("failed", died)

    def _ready(self) -> subprocess.Popen[str] | None:
        """Return the process, started anew if there is none or it has died; None once stopped."""
        with self._lock:
            if self._stopped:
                return None
            if self._process is None or self._process.poll() is not None:
                environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
                command = [sys.executable, "-m", __name__]
                pipe = subprocess.PIPE
                self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
                with suppress(BrokenPipeError):  # it died at once, which the first job finds out
                    self._process.stdin.write(json.dumps(self._tables) + "\n")
            return self._process


def _ending(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def serve_jobs(jobs: IO[str], outcomes: IO[str]) -> None:
    """Read the scenario from the first line and settings from each other, and write a line with the `Trial` of each."""
    tables = parse_json(jobs.readline())
    for line in jobs:
        outcomes.write(json.dumps(asdict(run_trial(tables, parse_json(line)))) + "\n")
        outcomes.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent takes Ctrl-C, and ends its workers
    serve_jobs(sys.stdin, sys.stdout)
