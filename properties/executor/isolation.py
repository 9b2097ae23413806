"""A request gets beside others what it gets alone, on an executor that has served nothing before.

An executor whose coins are keyed draws the same ones for a request wherever it runs. So what a row keeps of its former
request, or takes from its neighbour, shows as another token, even one that the request's own distribution allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...core.contract.outcomes import CommitOutcome
from ...core.contract.request import FinishReason, Request
from ...core.contract.step import Step
from .contract import ExecutorConfig, InspectedExecutor

MOST_ALONE = 3
"""Requests of a run that run again alone: those that ended last."""


class IsolatedRuns:
    """Keep which requests have ended with which tokens, and run them again."""

    def __init__(self, config: ExecutorConfig) -> None:
        self._config = config
        self._running: dict[str, Request] = {}
        self._rows: dict[int, str] = {}  # the request that each row had last
        self._ended: list[tuple[Request, list[int]]] = []

    def submit(self, request: Request) -> None:
        if not request.sampling.is_greedy:  # greedy ones are compared with plain passes already
            self._running[request.request_id] = request

    def launch(self, step: Step) -> None:
        """Leave out requests that begin again behind tokens that they have, or that verify fewer nodes than others:
        other coins draw what follows."""
        for join in step.joins:
            self._rows[join.row] = join.request.request_id
            if join.num_emitted:
                self._running.pop(join.request.request_id, None)
        if step.decode is not None and (step.decode.row_nodes is not None or step.decode.budget is not None):
            for row in step.decode.rows.tolist():
                self._running.pop(self._rows[row], None)

    def commit(self, outcome: CommitOutcome | None) -> None:
        for end in () if outcome is None else outcome.finished:
            request = self._running.pop(end.request_id, None)
            if request is not None and end.reason in (FinishReason.STOP, FinishReason.LENGTH):
                self._ended.append((request, end.tokens.tolist()))

    def difference(self, make: Callable[[Any], InspectedExecutor]) -> tuple[str, str] | None:
        """Run the last requests again, each on a fresh executor. Returns what one got beside others, and alone, if that
        differs."""
        if self._config.adaptive or self._config.has_look_ups:
            return None  # what a round drafts depends on the others
        for request, tokens in self._ended[-MOST_ALONE:]:
            alone = self._serve_alone(make(self._config), request)
            if alone != tokens:
                return f"request {request.request_id} got {tokens}", f"{alone}, as alone on a fresh executor"
        return None

    def _serve_alone(self, executor: InspectedExecutor, request: Request) -> list[int]:
        engine = self._config.make_engine()
        engine.submit(request, 0)
        while True:
            while (step := engine.plan(0)) is not None:
                executor.launch(step)
            outcome = engine.commit(executor.collect(), 0)
            if outcome.finished:
                return outcome.finished[0].tokens.tolist()
