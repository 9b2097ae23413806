"""Clients: they send requests, wait, and may leave."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator

import simpy

from ...core.draws import Purpose, uniform
from ..workload.workload import TimedRequest
from .clock import Environment


def open_loop_source(
    env: Environment, arrivals: Iterable[TimedRequest], send: Send, cancel: Cancel, patience: Patience
) -> Generator[simpy.Event, None, None]:
    """Send every arrival at its time, in their order; a client with limited patience waits in a process of its own."""
    for arrival in arrivals:
        time_ns = arrival.time_ns
        assert time_ns is not None, "a request of an open loop has a time"
        if time_ns > env.now:
            yield env.timeout(time_ns - env.now)
        patience_ns = None if patience.is_endless else patience.of(arrival.row)
        request_id, ended = send(arrival)
        if patience_ns is not None:
            assert ended is not None
            env.process(impatient_client(env, request_id, ended, cancel, patience_ns))


Send = Callable[[TimedRequest], tuple[str, simpy.Event | None]]
"""Sends a request: returns its id and the event of its end, None in a run whose clients never wait."""

Cancel = Callable[[str], None]


class Patience:
    """The patience of clients: a deadline for all, and a share of clients that leaves at a random moment. Draws are
    keyed by the request."""

    def __init__(self, seed: int, deadline_s: float | None, cancel_share: float, cancel_mean_s: float) -> None:
        self.is_endless: bool = deadline_s is None and cancel_share == 0.0
        self._seed = seed
        self._deadline_s = deadline_s
        self._cancel_share = cancel_share
        self._cancel_mean_s = cancel_mean_s

    def of(self, row: int) -> int | None:
        """Return the nanoseconds after which the client of request `row` leaves; None if it stays."""
        patience_s = math.inf if self._deadline_s is None else self._deadline_s
        if self._cancel_share and uniform(self._seed, Purpose.CLIENT, row, 0) < self._cancel_share:
            coin = float(uniform(self._seed, Purpose.CLIENT, row, 1))
            patience_s = min(patience_s, -math.log1p(-coin) * self._cancel_mean_s)
        return None if math.isinf(patience_s) else round(patience_s * 1e9)


def impatient_client(
    env: Environment, request_id: str, ended: simpy.Event, cancel: Cancel, patience_ns: int
) -> Generator[simpy.Event, None, None]:
    """Wait for the end of a request, or leave."""
    yield ended | env.timeout(patience_ns)
    if not ended.triggered:
        cancel(request_id)


def closed_loop_client(
    env: Environment, arrivals: Iterator[TimedRequest], send: Send, cancel: Cancel, patience: Patience
) -> Generator[simpy.Event, None, None]:
    """Send the next request whenever the last one has ended or was given up, until there are none."""
    for arrival in arrivals:
        request_id, ended = send(arrival)
        assert ended is not None
        patience_ns = None if patience.is_endless else patience.of(arrival.row)
        if patience_ns is None:
            yield ended
            continue
        yield ended | env.timeout(patience_ns)
        if not ended.triggered:
            cancel(request_id)
