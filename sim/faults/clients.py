"""Clients that leave, send impossible requests, use an id twice, or come ten at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ...core.contract.request import Request, SamplingParams
from ...core.prompt import Prompt
from ..actors.clock import Environment, call_at
from ..actors.device import Truth
from ..workload.workload import TimedRequest
from .injector import FaultInjector
from .plan import Ledger

HUGE = 1 << 40
NAN: Any = float("nan")  # Any: clients send it where a whole number belongs
FRACTION: Any = 1.5

BAD_REQUESTS: tuple[Callable[[str, int], Request], ...] = (
    lambda name, limit: Request(name, Prompt.of_length(0), 5),
    lambda name, limit: Request(name, Prompt.of_length(limit), 5),
    lambda name, limit: Request(name, Prompt.of_length(limit + 10**6), 5),
    lambda name, limit: Request(name, Prompt.of_length(-1), 5),
    lambda name, limit: Request(name, Prompt.of_length(5), 0),
    lambda name, limit: Request(name, Prompt.of_length(5), -7),
    lambda name, limit: Request(name, Prompt.of_length(5), NAN),
    lambda name, limit: Request(name, Prompt.of_length(5), FRACTION),
    lambda name, limit: Request(name, Prompt.of_length(5), 5, sampling=SamplingParams(temperature=NAN)),
    lambda name, limit: Request(name, Prompt.of_length(5), 5, sampling=SamplingParams(temperature=-1.0)),
    lambda name, limit: Request(name, Prompt.of_length(5), 5, sampling=SamplingParams(top_p=NAN)),
    lambda name, limit: Request(name, Prompt.of_length(5), 5, sampling=SamplingParams(top_k=-2)),
    lambda name, limit: Request(name, Prompt.of_length(5), 5, sampling=SamplingParams(top_k=NAN)),
    lambda name, limit: Request(name, Prompt.of_length(5), 5, priority=NAN),
)
"""(id, a prompt length that no context holds) -> a request that must be refused, where it is made or at the door."""


class FaultyClients:
    """Shapes requests before they are sent, and sends bad ones beside them."""

    def __init__(self, env: Environment, ledger: Ledger, injectors: list[FaultInjector], context_len: int) -> None:
        """Take the `injectors` of the replicas; the list may be filled later."""
        self._env = env
        self._ledger = ledger
        self._injectors = injectors
        self._context_len = context_len
        self._kinds: dict[int, tuple[str, ...]] = {}

    def copies(self, arrival: TimedRequest, now_ns: int) -> int:
        """Return how many requests come for this arrival: one, or a burst."""
        kinds = self._ledger.kinds_at("request", 0, arrival.row, now_ns)
        self._kinds = {arrival.row: kinds}
        if "load.burst" not in kinds:
            return 1
        self._ledger.note("load.burst", now_ns)
        return self._ledger.plan.load.burst.factor

    def shape(self, arrival: TimedRequest, request: Request, truth: Truth, now_ns: int) -> Request:
        """Return the request as this client sends it."""
        kinds, ledger = self._kinds[arrival.row], self._ledger
        self._poison(request.request_id, kinds)
        if "client.stop_edge" in kinds:
            ledger.note("client.stop_edge", now_ns)
            past = int(3 * ledger.draws.amount("client.stop_edge", 0, arrival.row)) - 1
            return replace(request, max_tokens=max(1, truth.output_len - past))
        if "client.token_limits" in kinds:
            ledger.note("client.token_limits", now_ns)
            huge = ledger.draws.amount("client.token_limits", 0, arrival.row) < 0.5
            return replace(request, max_tokens=HUGE if huge else 1)
        return request

    def take(self, row: int, request_id: str, now_ns: int) -> None:
        """Take a request of a client that is no part of the run; it may only be one that the device cannot bear."""
        self._poison(request_id, self._ledger.kinds_at("request", 0, row, now_ns))

    def _poison(self, request_id: str, kinds: tuple[str, ...]) -> None:
        if "device.poison" in kinds:
            for injector in self._injectors:
                injector.poisoned.add(request_id)

    def after(self, arrival: TimedRequest, request: Request, replica: int, now_ns: int) -> None:
        """Let this client do what it does after it has sent its request to `replica`."""
        ledger, env, injector = self._ledger, self._env, self._injectors[replica]
        for kind in self._kinds[arrival.row]:
            share = ledger.draws.amount(kind, 0, arrival.row, 1)
            name = request.request_id
            if kind == "client.cancels":
                wait_ns = int(-math.log1p(-share) * ledger.plan.client.cancels.mean_s * 1e9)
                call_at(env, now_ns + wait_ns, injector.leave, name, kind)
                call_at(env, now_ns + 2 * wait_ns, injector.actor.cancel, name)
            elif kind == "client.gone":
                notice_ns = round(ledger.plan.client.gone.notice_s * 1e9)
                call_at(env, now_ns + notice_ns, injector.leave, name, kind)
            elif kind == "client.duplicate_id":
                again = Request(name, Prompt.of_length(3), 4)
                call_at(env, now_ns + int(share * 3e9), injector.try_duplicate, again)
            elif kind == "client.bad_request":
                make = BAD_REQUESTS[int(share * len(BAD_REQUESTS))]
                injector.try_bad(partial(make, f"{name}!", self._context_len))
