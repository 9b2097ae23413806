"""Processes of this machine or of a Ray cluster that simulate one run after another. A run that kills its process does
not affect other runs.

A scenario, the settings of a run and its outcome travel as JSON text.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import IO, Any, Protocol

from ..core.errors import ForedraftError
from ..core.parsing import parse_json
from .trial import Trial, run_trial

ATTEMPTS = 2
"""How often a run is given to a process, because a process may die for a reason outside the run."""

ANY_CLUSTER = "ray"
"""Stands for the Ray cluster of this machine, instead of an address."""
CLIENT_SCHEME = "ray://"
_LOOK_EVERY_S = 2.0  # whether the cluster still answers, while no run ends
_OBJECT_STORE_BYTES = 100_000_000  # of a cluster started here; its objects are short texts


class ClusterGone(ForedraftError):
    """The cluster cannot be reached, or no longer."""


@dataclass(frozen=True, slots=True)
class Job:
    """A run to make. `ticket` is the caller's own number for it;
    `settings` are the keys of the scenario that it replaces."""

    ticket: int
    settings: Mapping[str, Any]


class Workers(Protocol):
    """Runs jobs, several at a time. Closing it stops the jobs that are running."""

    count: int
    """How many jobs run at a time."""

    def submit(self, job: Job) -> None:
        """Run this job when a process is free."""

    def next_ended(self) -> tuple[Job, Trial]:
        """Wait for any of the submitted jobs to end, and return it with its outcome."""
        ...

    def close(self) -> None: ...


class LocalWorkers:
    """Processes on this machine, `count` of them, which simulate the scenario `tables`.
    They start with the first jobs."""

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
        """Run the waiting jobs until a None comes in place of a job."""
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
            assert process.stdin is not None and process.stdout is not None, "both are pipes"
            try:
                process.stdin.write(json.dumps(dict(job.settings)) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except BrokenPipeError:
                pass
            if line and line.endswith("\n"):  # else it died before or while it wrote its outcome
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
                command = [sys.executable, "-P", "-m", __name__]  # -P: not what stands in the working directory
                pipe = subprocess.PIPE
                self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
                assert self._process.stdin is not None, "it is a pipe"
                with suppress(BrokenPipeError):  # it died at once, which the first job finds out
                    self._process.stdin.write(json.dumps(self._tables) + "\n")
            return self._process


class RayWorkers:
    """Workers of a Ray cluster that simulate the scenario `tables`, `count` at a time; None: one per core of the
    cluster.

    `address`: "ray" joins the cluster of this machine, or starts one that ends with `close`; "ray://HOST:PORT" joins
    another. Needs the extra `cluster`. Raises ClusterGone if there is no cluster, or when the cluster goes away later.
    """

    def __init__(self, tables: Mapping[str, Any], count: int | None, address: str) -> None:
        import ray

        self._ray = ray
        self._address = address
        self._is_client = address.startswith(CLIENT_SCHEME)
        with _own_signals():
            self._connect(count)
        self.count: int = count or max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._place = _host_and_port(address if self._is_client else ray.get_runtime_context().gcs_address)
        self._tables = json.dumps(dict(tables))
        # Ray itself gives a run to another process, on any node, when its process or node dies.
        self._remote = ray.remote(num_cpus=1, max_retries=ATTEMPTS - 1)(run_job_text)
        self._waiting: deque[Job] = deque()
        self._running: dict[Any, Job] = {}

    def submit(self, job: Job) -> None:
        """See `Workers.submit`."""
        self._waiting.append(job)
        self._launch()

    def next_ended(self) -> tuple[Job, Trial]:
        """See `Workers.next_ended`."""
        while True:
            with self._errors_named():
                ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=_LOOK_EVERY_S)
            if ready:
                break
            self._check_answers()
        job = self._running.pop(ready[0])
        trial = self._outcome(ready[0])
        self._launch()
        return job, trial

    def close(self) -> None:
        """Cancel the runs that are left, and leave the cluster."""
        with suppress(Exception):
            self._check_answers()
            for reference in self._running:
                self._ray.cancel(reference, force=True)
        self._running.clear()
        with _own_signals():
            self._ray.shutdown()

    def _connect(self, count: int | None) -> None:
        options = {"log_to_driver": False, "logging_level": "ERROR"}
        if self._is_client:
            with self._errors_named(), warnings.catch_warnings(action="ignore"):  # of what is then an error
                self._ray.init(self._address, **options)
            return
        try:
            self._ray.init("auto", **options)
        except ConnectionError:  # none runs
            os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
            options |= {"num_cpus": count or os.cpu_count() or 1, "object_store_memory": _OBJECT_STORE_BYTES}
            self._ray.init("local", include_dashboard=False, _node_ip_address="127.0.0.1", **options)

    def _launch(self) -> None:
        """Keep the cluster busy: it has as many runs as it makes at a time, and as many more that wait there."""
        while self._waiting and len(self._running) < 2 * self.count:
            job = self._waiting.popleft()
            with self._errors_named():
                reference = self._remote.remote(self._tables, json.dumps(dict(job.settings)), version("foredraft"))
            self._running[reference] = job

    def _outcome(self, reference: Any) -> Trial:
        errors = self._ray.exceptions
        try:
            with self._errors_named():
                return Trial(**parse_json(self._ray.get(reference)))
        except errors.RayTaskError as error:
            raise self._unfit(error.cause) from None
        except (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError) as error:
            self._check_answers()  # it may have died with the whole cluster
            return Trial("failed", f"the process of the run died, {ATTEMPTS} times: {_first_line(error)}")

    def _check_answers(self) -> None:
        try:
            socket.create_connection(self._place, timeout=_LOOK_EVERY_S).close()
        except OSError as error:
            raise ClusterGone(f"the Ray cluster {self._address} has gone away: {error.strerror or error}") from None

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        """Raise ClusterGone in place of Ray's errors about a cluster that does not answer."""
        try:
            yield
        except (ConnectionError, TimeoutError, self._ray.exceptions.RaySystemError) as error:
            raise ClusterGone(f"the Ray cluster {self._address} does not answer: {_first_line(error)}") from None
        except (ImportError, AttributeError) as error:  # a client's function is looked for where the cluster's head is
            raise self._unfit(error) from None

    def _unfit(self, error: object) -> ForedraftError:
        needed = f"install foredraft {version('foredraft')} on its nodes"
        return ForedraftError(f"the Ray cluster {self._address} cannot run foredraft: {error}; {needed}")


def run_job_text(tables: str, settings: str, asked_version: str) -> str:
    """Simulate on a node of a cluster. Takes the scenario and the settings as JSON texts, and returns the `Trial` as
    one."""
    if version("foredraft") != asked_version:
        raise ForedraftError(f"a node has foredraft {version('foredraft')}, this machine {asked_version}")
    return json.dumps(asdict(run_trial(parse_json(tables), parse_json(settings))))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix(CLIENT_SCHEME).partition("/")[0].rpartition(":")
    return host.strip("[]"), int(port)


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the handlers of signals, which Ray replaces."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _ending(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def serve_jobs(jobs: IO[str], outcomes: IO[str]) -> None:
    """Read the scenario from the first line and settings from each further line, and write a line with the `Trial` of
    each."""
    tables = parse_json(jobs.readline())
    for line in jobs:
        outcomes.write(json.dumps(asdict(run_trial(tables, parse_json(line)))) + "\n")
        outcomes.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent takes Ctrl-C, and ends its workers
    serve_jobs(sys.stdin, sys.stdout)
