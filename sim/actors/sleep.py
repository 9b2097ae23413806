"""The sleep of an engine: it plans nothing, and its KV is gone.

```
asked ── steps in flight end ──► KV is dropped ── weights leave ──► asleep ── woken, weights come ──► plans again
```
"""

from __future__ import annotations

from collections.abc import Generator

import simpy

from .clock import Environment, until


class Sleep:
    """One sleep, from the time that it is asked for. `level` 1: the weights go to host memory, 2: they are dropped.
    `leave_ns` and `come_ns`: how long the weights take to leave and to come back."""

    def __init__(self, env: Environment, level: int, leave_ns: int, come_ns: int) -> None:
        self.level = level
        self.is_begun: bool = False  # the engine sleeps
        self.is_over: bool = False  # it plans again
        self._env = env
        self._leave_ns = leave_ns
        self._come_ns = come_ns
        self._woken = simpy.Event(env)

    def wake(self) -> None:
        """End the sleep, as soon as it has begun."""
        if not self._woken.triggered:
            self._woken.succeed()

    def pass_time(self, lane: int) -> Generator[simpy.Event, None, None]:
        """Pass the time from the drop of the KV until the weights are back."""
        yield until(self._env, self._env.now + self._leave_ns, lane)
        self.is_begun = True
        yield self._woken
        yield until(self._env, self._env.now + self._come_ns, lane)
        self.is_over = True
