"""Simulates requests on the scheduler of an arm, with times from a profile: the same engine, actor and device as `foretoken simulate`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..core.acceptance.process import AcceptanceProcess
from ..core.contract.events import Event
from ..core.contract.request import FinishedRequest
from ..core.draws import Purpose, request_key
from ..core.errors import ForetokenError
from ..core.scheduler.spec import EngineSpec
from ..sim.actors.clock import Environment, call_at
from ..sim.actors.device import Device, HostJitter, Jitter, Truth
from ..sim.actors.engine import EngineActor
from ..sim.cost.executor_steps import StepCost
from ..sim.cost.host import HostCost
from .served import Asked


def simulate(
    spec: EngineSpec,
    cost: StepCost,
    host: HostCost,
    acceptance: AcceptanceProcess,
    asked: Sequence[Asked],
    concurrency: int | None = None,
    *,
    device_spread: float = 0.0,
    host_spread: float = 0.0,
    seed: int = 0,
) -> list[Event]:
    """Return the events of a run in which every request emits its `max_tokens`. `acceptance` holds for trees as it is.

    `device_spread` and `host_spread` let the times of steps fluctuate, drawn by `seed`. Arrivals and `concurrency` as in `serve`.
    Raises ForetokenError if a request is refused.
    """
    env = Environment()
    events: list[Event] = []
    waiting = deque(asked)

    def send() -> None:
        if waiting:
            request = waiting.popleft().request
            actor.receive(request, Truth(request.max_tokens, request_key(request.request_id)))

    def ended(_: int, finished: FinishedRequest) -> None:
        if finished.message:
            raise ForetokenError(f"request {finished.request_id!r} of the workload was refused: {finished.message}")
        if concurrency is not None:
            send()

    jitter = Jitter(device_spread, seed, Purpose.DEVICE_TIME, 0) if device_spread else None
    host_jitter = HostJitter(host_spread, seed, 0) if host_spread else None
    device = Device(cost, spec.config.max_running, acceptance, lambda *shape: acceptance, jitter)
    engine = spec.make_engine(events.append)
    actor = EngineActor(env, 0, engine, device, host, ended, jitter=host_jitter)
    for one in asked if concurrency is None else asked[:concurrency]:
        call_at(env, one.arrival_ns if concurrency is None else 0, send)
    env.run()
    return events
