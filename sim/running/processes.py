"""Processes of this machine that do one job after another. A job that kills its process does not affect other jobs.

What all jobs share, a job and its answer travel as one line of JSON each.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ...core.parsing import parse_json

ATTEMPTS = 2
"""How often a job is given to a process, because a process may die for a reason outside the job."""

Job = TypeVar("Job")
Answer = dict[str, Any]
Tell = Callable[[Any], None]
"""Tells the process that has asked for a job how far it is."""

_NEWS = "news"  # the only key of a line that is no answer


@dataclass(frozen=True, slots=True)
class Died:
    """Stands for the answer to a job whose process has died at each attempt."""

    reason: str


class Processes(Generic[Job]):
    """`count` processes, each of which runs `python -m module`, whose main calls `serve_jobs`. `shared` is passed to
    each; `on_news` takes what a job tells before its answer. They start with the first jobs."""

    def __init__(
        self,
        module: str,
        shared: Mapping[str, Any],
        count: int,
        on_news: Callable[[Job, Any], None] | None = None,
    ) -> None:
        self.count = count
        self._command = [sys.executable, "-P", "-m", module]  # -P: not what stands in the working directory
        self._shared = json.dumps(dict(shared)) + "\n"
        self._on_news = on_news
        self._waiting: queue.SimpleQueue[tuple[Job, str] | None] = queue.SimpleQueue()
        self._heard: queue.SimpleQueue[tuple[Job, Answer | Died] | BaseException] = queue.SimpleQueue()
        self._workers: list[_Worker[Job]] = []

    def submit(self, job: Job, line: Mapping[str, Any]) -> None:
        """Pass `line` to a process when one is free."""
        self._waiting.put((job, json.dumps(dict(line)) + "\n"))
        if len(self._workers) < self.count:
            worker = _Worker[Job](self._command, self._shared)
            self._workers.append(worker)
            threading.Thread(target=worker.serve, args=(self._waiting, self._heard), daemon=True).start()

    def next_ended(self) -> tuple[Job, Answer | Died]:
        """Wait for any of the submitted jobs to end, and return it with its answer."""
        while True:
            heard = self._heard.get()
            if isinstance(heard, BaseException):
                raise heard
            job, answer = heard
            if isinstance(answer, Died) or _NEWS not in answer:
                return job, answer
            if self._on_news is not None:
                self._on_news(job, answer[_NEWS])

    def close(self) -> None:
        """End all processes, those in the middle of a job, too."""
        for worker in self._workers:
            worker.stop()
            self._waiting.put(None)


class _Worker(Generic[Job]):
    """A process and the thread that feeds it."""

    def __init__(self, command: list[str], shared: str) -> None:
        self._command = command
        self._shared = shared
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False
        self._lock = threading.Lock()  # a process is not started after `stop`

    def serve(
        self,
        waiting: queue.SimpleQueue[tuple[Job, str] | None],
        heard: queue.SimpleQueue[tuple[Job, Answer | Died] | BaseException],
    ) -> None:
        """Run the waiting jobs until a None comes in place of a job."""
        try:
            while (entry := waiting.get()) is not None and not self._stopped:
                job, line = entry

                def take_news(news: Answer, job: Job = job) -> None:
                    heard.put((job, news))

                heard.put((job, self._run(line, take_news)))
        except BaseException as error:  # handed to the thread that waits for answers, which raises it
            heard.put(error)

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def _run(self, line: str, on_news: Callable[[Answer], None]) -> Answer | Died:
        reason = ""
        for _ in range(ATTEMPTS):
            process = self._ready()
            if process is None:
                break
            assert process.stdin is not None and process.stdout is not None, "both are pipes"
            with suppress(BrokenPipeError):
                process.stdin.write(line)
                process.stdin.flush()
                while (text := process.stdout.readline()).endswith("\n"):  # else it died
                    answer: Answer = parse_json(text)
                    if _NEWS not in answer:
                        return answer
                    on_news(answer)
            reason = f"died, {ATTEMPTS} times: {_ending(process.wait())}"
        return Died(reason)

    def _ready(self) -> subprocess.Popen[str] | None:
        """Return the process, started anew if there is none or it has died; None once stopped."""
        with self._lock:
            if self._stopped:
                return None
            if self._process is None or self._process.poll() is not None:
                environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
                pipe = subprocess.PIPE
                self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, text=True, env=environment)
                assert self._process.stdin is not None, "it is a pipe"
                with suppress(BrokenPipeError):  # it died at once, which the first job finds out
                    self._process.stdin.write(self._shared)
            return self._process


def _ending(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def serve_jobs(run: Callable[[dict[str, Any], dict[str, Any], Tell], Mapping[str, Any]]) -> None:
    """Do the jobs of standard input until its end, in a process that `Processes` has started: `run(shared, line, tell)`
    returns the answer to a line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent takes Ctrl-C, and ends its processes

    def say(line: Mapping[str, Any]) -> None:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    shared = parse_json(sys.stdin.readline())
    for line in sys.stdin:
        say(run(shared, parse_json(line), lambda news: say({_NEWS: news})))
