"""Simulated time: integer nanoseconds on a SimPy environment."""

from __future__ import annotations

import simpy
from simpy.events import Event

AFTER_ARRIVALS = 2  # SimPy's priorities: 0 urgent, 1 normal


def until(env: simpy.Environment, at_ns: int) -> Event:
    """Return an event at `at_ns` that comes after all others at that time, so that a scheduler sees what has arrived by then."""
    event = Event(env)
    event._ok, event._value = True, None
    env.schedule(event, priority=AFTER_ARRIVALS, delay=at_ns - env.now)
    return event


def call_at(env: simpy.Environment, at_ns: int, function, *arguments) -> None:
    """Deliver a message: call `function(*arguments)` at `at_ns`."""
    event = Event(env)
    event._ok, event._value = True, None
    event.callbacks.append(lambda _: function(*arguments))
    env.schedule(event, delay=at_ns - env.now)
