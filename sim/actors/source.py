"""The source of an open loop: requests come at their own times, whether or not the service keeps up."""

from __future__ import annotations

from collections.abc import Generator, Iterable

import simpy

from ..workload.arrival import Arrival
from .client import Cancel, Patience, Send, impatient_client


def open_loop_source(
    env: simpy.Environment, arrivals: Iterable[Arrival], send: Send, cancel: Cancel, patience: Patience
) -> Generator[simpy.Event, None, None]:
    """Send every arrival at its time; a client with limited patience becomes a process of its own."""
    for arrival in arrivals:
        if arrival.time_ns > env.now:
            yield env.timeout(arrival.time_ns - env.now)
        patience_ns = None if patience.is_endless else patience.of(arrival.row)
        if patience_ns is None:
            send(arrival)
        else:
            env.process(impatient_client(env, arrival, send, cancel, patience_ns))
