"""A server on a free port of this machine, on a thread of the test's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from socket import socket
from types import ModuleType

import httpx
from foredraft.core.contract.events import EventSink
from foredraft.core.contract.request import FinishedRequest
from foredraft.serve.answers.frontend import Frontend
from foredraft.serve.app import make_app
from foredraft.serve.base.connections import bind
from foredraft.serve.base.limits import Limits
from foredraft.serve.base.port import Body, TextCodec
from foredraft.serve.bodies.filler import FillerTokenizer
from foredraft.serve.bodies.simulated import SimulatedBody
from foredraft.serve.metrics import ServerMetrics
from foredraft.serve.metrics.counts import Life
from foredraft.serve.server import HttpServer
from foredraft.sim.faults.plan import FaultPlan
from foredraft.sim.scenario_file import load_scenario

DEADLINE_S = 60.0
SMALL_SERVICE = (
    "engine.max_running=16",
    "engine.kv_slots=40000",
    "hardware.graph_sizes=[1,2,4,8,16]",
    "workload.output={kind='fixed',value=40}",
)


@dataclass
class Served:
    """A running server, and what tests ask of it."""

    url: str
    frontend: Frontend
    server: HttpServer

    @cached_property
    def http(self) -> httpx.Client:
        """One client, since to make one takes longer than to ask."""
        return httpx.Client(base_url=self.url, verify=False, timeout=DEADLINE_S)

    @cached_property
    def openai(self) -> ModuleType:
        """OpenAI's package, which takes a second to import: every worker imports this file, and one of them asks."""
        return import_module("openai")

    @cached_property
    def client(self):
        return self.openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    @property
    def async_client(self):
        return self.openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.http.post(path, json=body)

    def wait_until_idle(self) -> None:
        """Wait until the engines have no request, and check that nothing of them is left."""
        wait_until(lambda: self.frontend.num_live == 0 and all(engine.is_idle for engine in self.frontend.body.engines))
        done = self.frontend.scheduler.call(self._check)
        done.result(DEADLINE_S)

    def _check(self) -> None:
        for engine in self.frontend.body.engines:
            engine.check()
            assert engine.store.available_slots == engine.store.allocator.num_total_slots, "free == total"
        assert not self.frontend.metrics._open


def wait_until(condition, seconds: float = DEADLINE_S) -> None:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, "waited in vain"
        time.sleep(0.002)


@contextmanager
def serving(
    body: Body,
    limits: Limits | None = None,
    metrics: ServerMetrics | None = None,
    *,
    start_s: float = 0.0,
    after_turn: Callable[[], None] = lambda: None,
    on_end: Callable[[FinishedRequest, int, Life], None] | None = None,
    listeners: Sequence[socket] = (),
    certificate: tuple[Path, Path] | None = None,
    **settings,
) -> Iterator[Served]:
    """Serve `body` until the end of the block; `settings` are those of `make_app`."""
    frontend = Frontend(
        body, limits or Limits(), metrics or ServerMetrics(), start_s=start_s, after_turn=after_turn, on_end=on_end
    )
    app = make_app(frontend, **settings)
    listeners = list(listeners) or [bind("127.0.0.1", 0)]
    server = HttpServer(app, frontend, listeners=listeners, drain_s=5, certificate=certificate)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.address or not thread.is_alive())
        yield Served(server.address, frontend, server)
    finally:
        server.should_exit = True
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def sum_of_times(metrics: ServerMetrics) -> float:
    """Return the sum of the times of whole requests, in seconds."""
    every = (of for engine in metrics.counts.values() for (name, _), of in engine.histograms.items() if name == "e2e")
    return sum(histogram.total for histogram in every)


def simulated_body(
    *settings: str,
    speed: float = 10.0,
    metrics: ServerMetrics | None = None,
    sinks: Callable[[int], Sequence[EventSink]] = lambda engine: (),
    clock: Callable[[], float] = time.monotonic,
    faults: FaultPlan | None = None,
    make_codec: Callable[[], TextCodec] = FillerTokenizer,
) -> SimulatedBody:
    """Return a small service, ten times as fast unless told otherwise; its drafts are counted by `metrics`."""
    scenario, _ = load_scenario(None, [*SMALL_SERVICE, *settings])

    def all_sinks(engine: int) -> list[EventSink]:
        return [*([] if metrics is None else [metrics.sink(engine)]), *sinks(engine)]

    return SimulatedBody(scenario, speed=speed, sinks=all_sinks, clock=clock, faults=faults, make_codec=make_codec)
