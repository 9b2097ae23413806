"""Prompts whose tokens prefill workers judge: which worker has which, and what they have found."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from ...core.contract.text import PromptScores
from ...core.scheduler.config import EngineRole
from ..parallel.processes import WorkerFailed, WorkerProcess
from .workers import Workers


class PromptsToScore:
    """The prompts that workers have and have not answered yet."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[str, dict[str, Any], Future[PromptScores]]] = {}  # by number, with the worker

    def begin(self, prompt: np.ndarray, num_top: int) -> Future[PromptScores]:
        """Give a prompt to the worker that has the fewest. The result is WorkerFailed if none is left."""
        done: Future[PromptScores] = Future()
        self._give({"number": next(self._numbers), "prompt": prompt.tolist(), "num_top": num_top}, done)
        return done

    def end(self, number: int, scores: Sequence[Any] | None, message: str) -> None:
        """Take a worker's answer; without scores the `message` says why."""
        if number not in self._waiting:
            return
        name, _, done = self._waiting.pop(number)
        if scores is None:
            done.set_exception(WorkerFailed(f"worker {name} cannot judge the prompt: {message}"))
        else:
            done.set_result(PromptScores.from_json(scores))

    def lose(self, worker: WorkerProcess) -> None:
        """Give the prompts of a dead worker to others."""
        lost = [entry for entry in self._waiting.values() if entry[0] == worker.name]
        for _, message, done in lost:
            self._give(message, done)

    def _give(self, message: dict[str, Any], done: Future[PromptScores]) -> None:
        names = [worker.name for worker in self._workers.living() if worker.place.role is EngineRole.PREFILL]
        if not names:
            self._waiting.pop(message["number"], None)
            done.set_exception(WorkerFailed("no prefill worker is left, which could judge the prompt"))
            return
        busy = [name for name, _, _ in self._waiting.values()]
        name = min(names, key=busy.count)
        self._waiting[message["number"]] = (name, message, done)
        self._workers[name].say({"do": "score", **message})
