"""Simulated time: integer nanoseconds on a SimPy environment.

What happens at the same time has an order: clients first, then lane after lane, and in each lane arrivals before the
scheduler's turn. Where no engine's decisions depend on another engine, each engine has the lane of its number. So the
order of all events follows from those of the engines, whichever process simulates an engine. Elsewhere lane 0 is all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVarTuple

import simpy
from simpy.events import Event, EventPriority

Arguments = TypeVarTuple("Arguments")
"""The arguments with which a message is delivered."""


def arrival_priority(lane: int) -> EventPriority:
    """Return SimPy's priority of what arrives at an engine: 1, which is normal, in the first lane."""
    return EventPriority(1 + 2 * lane)


def turn_priority(lane: int) -> EventPriority:
    """Return SimPy's priority of a scheduler's turn."""
    return EventPriority(2 + 2 * lane)


class Environment(simpy.Environment):
    """SimPy's environment with a clock that a process may set forward itself, up to `passes_left` times before the next
    event is taken."""

    passes_left: int = 0
    _now: int  # SimPy's own clock: all delays are integers, so it stays one

    @property
    def now(self) -> int:
        """Return the simulated time, in nanoseconds."""
        return self._now

    def passed(self, at_ns: int) -> bool:
        """Set the clock to `at_ns` if no event comes by then, and return True. Otherwise return False; the caller then
        waits for `until`."""
        if not self.passes_left or (self._queue and self._queue[0][0] <= at_ns):
            return False
        self.passes_left -= 1
        self._now = at_ns
        return True


def until(env: Environment, at_ns: int, lane: int = 0) -> Event:
    """Return an event at `at_ns` that comes after all others of its lane at that time, so that a scheduler sees what
    has arrived by then."""
    event = Event(env)
    event._ok, event._value = True, None
    env.schedule(event, priority=turn_priority(lane), delay=at_ns - env.now)
    return event


def call_at(
    env: Environment, at_ns: int, function: Callable[[*Arguments], None], *arguments: *Arguments, lane: int = 0
) -> None:
    """Deliver a message: call `function(*arguments)` at `at_ns`."""
    event = Event(env)
    event._ok, event._value = True, None
    event.callbacks.append(lambda _: function(*arguments))
    env.schedule(event, priority=arrival_priority(lane), delay=at_ns - env.now)
