"""The real body whose prompts and outputs are computed by workers, in processes of their own.

A worker that dies takes no stream with it while another one of its role lives (docs/disaggregation.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ...core.contract.text import PromptScores
from ...core.scheduler.config import EngineRole
from ...gpu.disaggregation.loop import LISTEN_S
from ...gpu.disaggregation.session import DisaggregatedSession
from ...gpu.parallel.processes import WorkerProcess
from ..base.port import Outlet, RemoteEngine
from ..metrics import ServerMetrics
from .real import ModelBody, pieces_of

if TYPE_CHECKING:
    import numpy as np

GAUGES_S = 0.5
"""How often workers are asked how full they are."""


class WorkersBody(ModelBody):
    """Decodes with the workers of `session`. `tell` gets a sentence when one is lost; `metrics` count what workers
    say of requests."""

    def __init__(
        self, session: DisaggregatedSession, name: str, metrics: ServerMetrics, tell: Callable[[str], None]
    ) -> None:
        plan, loop = session.plan, session.loop
        config = plan.spec.config
        self._of_worker = {
            worker.name: RemoteEngine(worker.name, plan.spec.with_role(worker.place.role).config)
            for worker in loop.workers.all.values()
        }
        longest = min(config.context_len, plan.sizes.pool_limit(config))
        super().__init__(session, name, tuple(self._of_worker.values()), longest)
        self._number = {engine_name: number for number, engine_name in enumerate(self._of_worker)}
        self._loop = loop
        self._controller = plan.spec.make_controller()  # checks tables before workers get them
        self._metrics = metrics
        self._tell = tell
        self._asked_s = 0.0
        self.failure: str = ""
        for number in self._number.values():
            metrics.counts[number].hear_no_events()
        loop.on_admit = lambda worker, *news: metrics.admitted(self._number[worker.name], *news)
        loop.on_join = lambda worker, request_id: metrics.moved(self._number[worker.name], request_id)
        loop.on_gauges, loop.on_loss = self._take_gauges, self._lose

    def wait_s(self) -> float | None:
        return 0.0  # a turn itself waits, for workers and for orders

    def wake(self) -> None:
        self._loop.workers.wake()

    def turn(self, outlet: Outlet) -> None:
        if (now_s := time.monotonic()) >= self._asked_s + GAUGES_S:
            self._asked_s = now_s
            self._loop.ask_gauges()
        outlet.deliver(pieces_of(self._loop.turn(LISTEN_S), time.monotonic_ns()))

    def score(self, prompt: np.ndarray, num_top: int) -> Future[PromptScores]:
        return self._loop.score(prompt, num_top)

    def reload(self, table: str, source: str) -> None:
        self._controller.reload(table, source)
        self._loop.tell_decoders({"do": "reload", "table": table, "source": source})

    def _take_gauges(self, worker: WorkerProcess, said: Mapping[str, Any]) -> None:
        self._of_worker[worker.name].gauges = said["gauges"]
        for key, label, number in said["totals"]:
            self._metrics.counts[self._number[worker.name]].totals[key, label] = number

    def _lose(self, worker: WorkerProcess) -> None:
        engine = self._of_worker[worker.name]
        engine.loss, engine.gauges = worker.death, {}
        lives = {other.place.role for other in self._loop.workers.living()}
        missing = [role.value for role in (EngineRole.PREFILL, EngineRole.DECODE) if role not in lives]
        if missing:
            self.failure = f"no {' and no '.join(missing)} worker is left: {worker.name} {worker.death}"
        tail = f"no {' and no '.join(missing)} worker is left" if missing else "its requests go on elsewhere"
        self._tell(f"worker {worker.name} {worker.report}; {tail}")
