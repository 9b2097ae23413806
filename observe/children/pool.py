"""Processes of this machine that do one job after another. A job that kills its process does not affect other jobs.

What all jobs share, a job and its answer are one message of the wire each.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

from .child import ONE_THREAD, Child, incoming, run_child
from .wire import Wire

ATTEMPTS = 2
"""How often a job is given to a process, because a process may die for a reason outside the job."""

Job = TypeVar("Job")
Message = dict[str, Any]
Tell = Callable[[Any], None]
"""Tells the process that has asked for a job how far it is."""

_NEWS, _ANSWER = "news", "answer"  # the only key of a message of a child


@dataclass(frozen=True, slots=True)
class Died:
    """Stands for the answer to a job whose process has died at each attempt."""

    reason: str


class ChildPool(Generic[Job]):
    """`count` processes, each of which runs `python -m module`, whose main calls `serve_jobs`. `shared` is passed to
    each; `on_news` takes what a job tells before its answer. They start with the first jobs. `environment` is added to
    that of this process. `attempts`: how often a job is given to a process that dies."""

    def __init__(
        self,
        module: str,
        shared: Mapping[str, Any],
        count: int,
        on_news: Callable[[Job, Any], None] | None = None,
        environment: Mapping[str, str] = ONE_THREAD,
        attempts: int = ATTEMPTS,
    ) -> None:
        self.count = count
        self._make_child = partial(Child, module, environment=environment)
        self._shared = dict(shared)
        self._attempts = attempts
        self._on_news = on_news
        self._waiting: queue.SimpleQueue[tuple[Job, Message] | None] = queue.SimpleQueue()
        self._heard: queue.SimpleQueue[tuple[Job, Message | Died] | BaseException] = queue.SimpleQueue()
        self._workers: list[_Worker[Job]] = []

    def submit(self, job: Job, line: Mapping[str, Any]) -> None:
        """Pass `line` to a process when one is free."""
        self._waiting.put((job, dict(line)))
        if len(self._workers) < self.count:
            worker = _Worker[Job](self._make_child, self._shared, self._attempts)
            self._workers.append(worker)
            threading.Thread(target=worker.serve, args=(self._waiting, self._heard), daemon=True).start()

    def next_ended(self) -> tuple[Job, Message | Died]:
        """Wait for any of the submitted jobs to end, and return it with its answer."""
        while True:
            heard = self._heard.get()
            if isinstance(heard, BaseException):
                raise heard
            job, message = heard
            if isinstance(message, Died):
                return job, message
            if _ANSWER in message:
                return job, message[_ANSWER]
            if self._on_news is not None:
                self._on_news(job, message[_NEWS])

    def close(self) -> None:
        """End all processes, those in the middle of a job, too."""
        for worker in self._workers:
            worker.stop()
            self._waiting.put(None)


class _Worker(Generic[Job]):
    """A child and the thread that feeds it."""

    def __init__(self, make_child: Callable[[], Child], shared: Mapping[str, Any], attempts: int) -> None:
        self._make_child = make_child
        self._shared = shared
        self._attempts = attempts
        self._child: Child | None = None
        self._stopped = False
        self._lock = threading.Lock()  # no child is started after `stop`

    def serve(
        self,
        waiting: queue.SimpleQueue[tuple[Job, Message] | None],
        heard: queue.SimpleQueue[tuple[Job, Message | Died] | BaseException],
    ) -> None:
        """Run the waiting jobs until a None comes in place of a job."""
        try:
            while (entry := waiting.get()) is not None and not self._stopped:
                job, line = entry

                def take_news(news: Message, job: Job = job) -> None:
                    heard.put((job, news))

                heard.put((job, self._run(line, take_news)))
        except BaseException as error:  # handed to the thread that waits for answers, which raises it
            heard.put(error)
        finally:
            if self._child is not None:
                self._child.close()

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            if self._child is not None:
                self._child.kill()  # its thread, which may be reading the wire, closes it
                self._child.wait()

    def _run(self, line: Message, on_news: Callable[[Message], None]) -> Message | Died:
        reason = ""
        for attempt in range(1, self._attempts + 1):
            child = self._ready()
            if child is None:
                break
            child.say(line)
            while (messages := child.wire.receive()) is not None:
                for message in messages:
                    if _ANSWER in message:
                        return message
                    on_news(message)
            with self._lock:
                reason = f"died{f', {attempt} times' if attempt > 1 else ''}: {child.close()}"
                self._child = None
        return Died(reason)

    def _ready(self) -> Child | None:
        """Return the child, started if there is none; None once stopped."""
        with self._lock:
            if self._stopped:
                return None
            if self._child is None:
                self._child = self._make_child()
                self._child.say(self._shared)
            return self._child


def serve_jobs(run: Callable[[dict[str, Any], dict[str, Any], Tell], Mapping[str, Any]]) -> NoReturn:
    """Do one job after another, in a process that `ChildPool` has started: `run(shared, line, tell)` returns the answer
    to a line."""

    def serve(wire: Wire) -> None:
        messages = incoming(wire)
        shared = messages.get()
        while True:
            answer = run(shared, messages.get(), lambda news: wire.send({_NEWS: news}))
            wire.send({_ANSWER: answer})

    run_child(serve)
