"""The clients of a run: what they send, who waits for its end, and what has come and ended so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import simpy

from ...core.acceptance.process import DayCurve
from ...core.contract.request import FinishedRequest, FinishReason, Request
from ...core.draws import request_key
from ...core.scheduler.config import EngineConfig
from ..actors.client import Patience, closed_loop_client, open_loop_source
from ..actors.clock import Environment, call_at
from ..actors.device import Truth
from ..assembly import Assembly
from ..faults.service import SoundService
from ..scenario import Clients
from ..workload.workload import TimedRequest
from .building import RunService


class RunClients:
    """The clients of a scenario. They send the requests of its workload, and may leave."""

    REQUESTS_FORESEEN = 64

    def __init__(self, env: Environment, assembly: Assembly, faults: SoundService) -> None:
        self.num_submitted = 0
        self.num_ended = 0
        self.last_arrival_ns = 0
        self.last_request_ns = 0  # when a request was last sent, or ended
        self.refusals: dict[str, int] = {}
        self._env = env
        self._assembly = assembly
        self._faults = faults
        scenario, config = assembly.scenario, assembly.spec.config
        day, asked = scenario.acceptance.day_amplitude, scenario.workload.max_tokens
        self._day = DayCurve(day) if day else None
        self._max_tokens = _max_tokens_of(asked, config)
        # Without a guarantee no decision depends on it.
        self._has_fixed_lengths = asked == "output" and config.rules.guarantee_output > 0
        clients_may_leave = scenario.clients != Clients()
        self._has_listeners = scenario.workload.concurrency is not None or clients_may_leave
        self._waiting: dict[str, simpy.Event] = {}
        self._foreseen = 0  # requests below this number are announced to the device

    def connect(self, service: RunService) -> None:
        """Send to this service from now on."""
        self._service = service

    def begin(self, arrivals: Iterator[TimedRequest]) -> None:
        """Begin to send the requests of a workload."""
        env, cancel, scenario = self._env, self._service.router.cancel, self._assembly.scenario
        leaving, concurrency = scenario.clients, scenario.workload.concurrency
        patience = Patience(scenario.seed, leaving.deadline_s, leaving.cancel_share, leaving.cancel_mean_s)
        if concurrency is None:
            env.process(open_loop_source(env, arrivals, self.send, cancel, patience))
            return
        for _ in range(concurrency):
            env.process(closed_loop_client(env, arrivals, self.send, cancel, patience))

    def send(self, arrival: TimedRequest) -> tuple[str, simpy.Event | None]:
        """Send a client's request to its replica, in a burst together with similar requests."""
        copies = self._faults.copies(arrival)
        sent = self.send_one(arrival, f"r{arrival.row}")
        for copy in range(1, copies):
            self.send_one(arrival, f"r{arrival.row}.{copy}")
        return sent

    def send_one(self, arrival: TimedRequest, request_id: str) -> tuple[str, simpy.Event | None]:
        """Send one request. Returns its id, and the event of its end where a client waits for it."""
        request = Request(
            request_id,
            arrival.prompt,
            self._max_tokens or arrival.output_len,
            arrival.priority,
            fixed_length=self._has_fixed_lengths,
        )
        truth = self.truth(request_id, arrival.output_len, self._env.now)
        self.num_submitted += 1
        self.last_arrival_ns = self.last_request_ns = self._env.now
        if arrival.row >= self._foreseen and self._assembly.pools.num_engines == 1 and self._day is None:
            self._foresee(arrival.row)
        ended = None
        if self._has_listeners:
            ended = self._waiting[request_id] = self._env.event()
        asked, request = request, self._faults.shape(arrival, request, truth)
        if request.max_tokens != asked.max_tokens:  # a client that asks for fewer or more than the model emits
            truth = replace(truth, stops_at_limit=True)
        self._faults.sent(arrival, request, self._service.router.submit(request, truth))
        return request_id, ended

    def truth(self, request_id: str, output_len: int, at_ns: int) -> Truth:
        """Return what the device knows of a request that comes at `at_ns`, and the engine does not."""
        shift = self._day.shift(at_ns) if self._day is not None else 0.0
        return Truth(output_len, request_key(request_id), shift)

    def _foresee(self, first: int) -> None:
        """Announce the next requests to the device:
        their ids, and so the keys of all draws, are known before they arrive."""
        self._foreseen = first + self.REQUESTS_FORESEEN
        device = self._service.replicas[0].device
        if device.draws_ahead:
            keys = [request_key(f"r{row}") for row in range(first, self._foreseen)]
            device.foresee(np.array(keys, dtype=np.uint64))

    def ended(self, replica: int, finished: FinishedRequest) -> None:
        """Take a replica's report that a request has ended, or was refused."""
        self._faults.ended(finished.request_id)
        streamer = self._service.streamers.get(replica)
        end_ns = None if streamer is None else streamer.take_end(finished.request_id)
        if end_ns is not None and end_ns > self._env.now:
            call_at(self._env, end_ns, self._answered, replica, finished)
        else:
            self._answered(replica, finished)

    def _answered(self, replica: int, finished: FinishedRequest) -> None:
        """Take the end of a request as its client sees it."""
        self.num_ended += 1
        self.last_request_ns = self._env.now
        self._service.router.ended(replica, finished.request_id)
        if finished.reason is FinishReason.ERROR and finished.message:
            self.refusals[finished.message] = self.refusals.get(finished.message, 0) + 1
        ended = self._waiting.pop(finished.request_id, None)
        if ended is not None:
            ended.succeed()

    def given_up(self, deliver: Callable[..., None], *arguments: Any) -> None:
        """End a request if every delivery of it was lost and no copy has arrived. A lost cancel changes nothing."""
        request = arguments[0]
        if not isinstance(request, Request) or not self._faults.is_waiting_for(request.request_id):
            return
        home = self._service.router.home_of_lost(deliver, *arguments)
        if home is not None:
            message = "unreachable: every attempt to send it was lost"
            self._service.on_finished(home, FinishedRequest(request.request_id, FinishReason.ERROR, 0, message=message))


def _max_tokens_of(asked: int | str | None, config: EngineConfig) -> int | None:
    """Return how many tokens each request asks for. None: as many as it emits; else a guaranteed output would be a
    whole context."""
    if isinstance(asked, str) or (asked is None and config.rules.guarantee_output):
        return None
    return asked or config.context_len
