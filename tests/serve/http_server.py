"""A server on a free port of this machine, on a thread of the test's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
from foretoken.serve.app import make_app
from foretoken.serve.bodies.port import Body
from foretoken.serve.bodies.simulated import SimulatedBody
from foretoken.serve.frontend import Frontend
from foretoken.serve.limits import Limits
from foretoken.serve.metrics import ServerMetrics
from foretoken.serve.server import Server
from foretoken.sim.scenario_file import load_scenario

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
    server: Server

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    @property
    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def post(self, path: str, **body: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=DEADLINE_S)

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
    body: Body, limits: Limits | None = None, metrics: ServerMetrics | None = None, **settings
) -> Iterator[Served]:
    """Serve `body` until the end of the block; `settings` are those of `make_app`."""
    frontend = Frontend(body, limits or Limits(), metrics or ServerMetrics())
    app = make_app(frontend, **settings)
    addresses: list[str] = []
    server = Server(app, frontend, host="127.0.0.1", port=0, drain_s=5, on_start=addresses.append)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_until(lambda: addresses or not thread.is_alive())
        yield Served(addresses[0], frontend, server)
    finally:
        server.should_exit = True
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def simulated_body(
    *settings: str, speed: float = 10.0, scenario: Path | None = None, metrics: ServerMetrics | None = None, sinks=None
):
    """A small service on one H100, ten times as fast, unless told otherwise; its drafts are counted by `metrics`."""
    resolved, _ = load_scenario(scenario, [*(() if scenario else SMALL_SERVICE), *settings])
    own = sinks or (lambda engine: ())
    return SimulatedBody(
        resolved, speed=speed, sinks=lambda i: [*([] if metrics is None else [metrics.sink(i)]), *own(i)]
    )
