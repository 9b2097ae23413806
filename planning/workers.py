"""Processes of this machine or of a Ray cluster that simulate one run after another. A run that kills its process does
not affect other runs.

A scenario, the settings of a run and its outcome travel as JSON text.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from io import StringIO
from typing import Any, Protocol

from ..core.errors import ForedraftError
from ..core.parsing import parse_json
from ..observe.children.cores import usable_cores
from ..observe.children.pool import ATTEMPTS, ChildPool, Died, Tell, serve_jobs
from .trial import RunOutcome, run_trial

ANY_CLUSTER = "ray"
"""Stands for the Ray cluster of this machine, instead of an address."""
CLIENT_SCHEME = "ray://"
_JOIN_WITHIN_S = 40.0  # until the cluster has noticed that a node is dead
_LOOK_EVERY_S = 2.0  # whether the cluster still answers, while no run ends
_OBJECT_STORE_BYTES = 100_000_000  # of a cluster started here; its objects are short texts
_QUIETLY: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}


class ClusterGone(ForedraftError):
    """The cluster cannot be reached, or no longer."""


@dataclass(frozen=True, slots=True)
class Job:
    """A run to make. `ticket` is the caller's own number for it;
    `settings` are the keys of the scenario that it replaces."""

    ticket: int
    settings: Mapping[str, Any]


class JobWorkers(Protocol):
    """Runs jobs, several at a time. Closing it stops the jobs that are running."""

    count: int
    """How many jobs run at a time."""

    def submit(self, job: Job) -> None:
        """Run this job when a process is free."""

    def next_ended(self) -> tuple[Job, RunOutcome]:
        """Wait for any of the submitted jobs to end, and return it with its outcome."""
        ...

    def close(self) -> None: ...


class LocalWorkers:
    """Processes on this machine, `count` of them, which simulate the scenario `tables`."""

    def __init__(self, tables: Mapping[str, Any], count: int) -> None:
        self.count = count
        self._processes = ChildPool[Job](__name__, tables, count)

    def submit(self, job: Job) -> None:
        """See `Workers.submit`."""
        self._processes.submit(job, job.settings)

    def next_ended(self) -> tuple[Job, RunOutcome]:
        """See `Workers.next_ended`."""
        job, answer = self._processes.next_ended()
        if isinstance(answer, Died):
            return job, RunOutcome("failed", f"the process of the run {answer.reason}")
        return job, RunOutcome(**answer)

    def close(self) -> None:
        """End all processes, those in the middle of a run, too."""
        self._processes.close()


class RayWorkers:
    """Workers of a Ray cluster that simulate the scenario `tables`, `count` at a time; None: one per core of the
    cluster.

    `address`: "ray" joins the cluster of this machine, or starts one that ends with `close`; "ray://HOST:PORT" joins
    another. Needs the extra `cluster`. If the node dies through which this process has joined the cluster, it joins
    again through another node of that machine. Raises ClusterGone if there is no cluster, or when the cluster goes away
    later.
    """

    def __init__(self, tables: Mapping[str, Any], count: int | None, address: str) -> None:
        import ray

        self._ray = ray
        self._address = address
        self._is_client = address.startswith(CLIENT_SCHEME)
        self._is_own = False  # a cluster that was started here
        self._joins_left = ATTEMPTS
        self._tables = json.dumps(dict(tables))
        self._waiting: deque[Job] = deque()
        self._running: dict[Any, Job] = {}
        with _own_signals():
            try:
                self._join()
            except ConnectionError:
                self._start(count)
        self.count: int = count or max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._place = _host_and_port(address if self._is_client else ray.get_runtime_context().gcs_address)

    def submit(self, job: Job) -> None:
        """See `Workers.submit`."""
        self._waiting.append(job)
        self._launch()

    def next_ended(self) -> tuple[Job, RunOutcome]:
        """See `Workers.next_ended`."""
        while True:
            try:
                self._launch()
                with self._errors_named(), _no_logs_of_nodes():
                    ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=_LOOK_EVERY_S)
                    trial = self._outcome(ready[0]) if ready else None
            except self._ray.exceptions.LocalRayletDiedError:
                self._join_again()
                continue
            if trial is not None:
                return self._running.pop(ready[0]), trial
            self._check_answers()

    def close(self) -> None:
        """Cancel the runs that are left, and leave the cluster."""
        with suppress(Exception):
            self._check_answers()
            for reference in self._running:
                self._ray.cancel(reference, force=True)
        self._running.clear()
        with _own_signals(), _no_logs_of_nodes():
            self._ray.shutdown()

    def _join(self) -> None:
        """Join the cluster. Raises ConnectionError if none runs on this machine, ClusterGone if another does not
        answer."""
        if self._is_client:
            with self._errors_named(), warnings.catch_warnings(action="ignore"):  # of what is then an error
                self._ray.init(self._address, **_QUIETLY)
        else:
            self._ray.init("auto", **_QUIETLY)
        self._make_remote()

    def _start(self, count: int | None) -> None:
        """Start a cluster that ends with this process."""
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        sizes: dict[str, Any] = {"num_cpus": count or usable_cores(), "object_store_memory": _OBJECT_STORE_BYTES}
        self._ray.init("local", include_dashboard=False, _node_ip_address="127.0.0.1", **sizes, **_QUIETLY)
        self._is_own = True
        self._make_remote()

    def _make_remote(self) -> None:
        # Ray itself gives a run to another process, on any node, when its process or node dies.
        self._remote = self._ray.remote(num_cpus=1, max_retries=ATTEMPTS - 1)(run_job_text)

    def _join_again(self) -> None:
        """Join through another node, as the one through which the runs were submitted has died, and make these runs
        again. Raises ClusterGone if there is no other, or none is left after some attempts."""
        self._waiting.extendleft(reversed(self._running.values()))
        self._running.clear()
        until_s = time.monotonic() + (0.0 if self._is_own else _JOIN_WITHIN_S)
        self._joins_left -= 1
        with _own_signals():
            self._ray.shutdown()
            while self._joins_left >= 0 and time.monotonic() < until_s:
                with suppress(ConnectionError, ClusterGone, self._ray.exceptions.RayError, RuntimeError):
                    self._join()
                    return
                self._ray.shutdown()
                time.sleep(_LOOK_EVERY_S)
        raise ClusterGone(
            f"the node of the Ray cluster {self._address} that this command has joined has died, and no other can be joined"
        )

    def _launch(self) -> None:
        """Keep the cluster busy: it has as many runs as it makes at a time, and as many more that wait there."""
        while self._waiting and len(self._running) < 2 * self.count:
            settings = json.dumps(dict(self._waiting[0].settings))
            with self._errors_named():
                reference = self._remote.remote(self._tables, settings, version("foredraft"))
            self._running[reference] = self._waiting.popleft()

    def _outcome(self, reference: Any) -> RunOutcome:
        errors = self._ray.exceptions
        try:
            with self._errors_named():
                return RunOutcome(**parse_json(self._ray.get(reference)))
        except errors.RayTaskError as error:
            raise self._unfit(error.cause) from None
        except (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError) as error:
            self._check_answers()  # it may have died with the whole cluster
            return RunOutcome("failed", f"the process of the run died, {ATTEMPTS} times: {_first_line(error)}")

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
    """Simulate on a node of a cluster. Takes the scenario and the settings as JSON texts, and returns the `RunOutcome`
    as one."""
    if version("foredraft") != asked_version:
        raise ForedraftError(f"a node has foredraft {version('foredraft')}, this machine {asked_version}")
    return json.dumps(asdict(run_trial(parse_json(tables), parse_json(settings))))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix(CLIENT_SCHEME).partition("/")[0].rpartition(":")
    return host.strip("[]"), int(port)


def _no_logs_of_nodes() -> redirect_stdout[StringIO]:
    """Drop the log of a node that has died, which Ray writes to standard output whatever it was asked for."""
    return redirect_stdout(StringIO())


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the handlers of signals, which Ray replaces."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def answer_of(tables: Mapping[str, Any], settings: Mapping[str, Any], tell: Tell) -> Mapping[str, Any]:
    """Simulate in a process of `LocalWorkers`. Returns the fields of the `RunOutcome`."""
    return asdict(run_trial(tables, settings))


if __name__ == "__main__":
    serve_jobs(answer_of)
