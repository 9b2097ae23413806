"""A link: each message takes a latency and the time of its bytes, one after the other."""

from __future__ import annotations

from collections.abc import Callable

import simpy

from .clock import call_at


class Link:
    """Delivers in order; a message waits until the ones before it have passed."""

    def __init__(self, env: simpy.Environment, latency_ns: int, bytes_per_s: float) -> None:
        self.env = env
        self.latency_ns = latency_ns
        self.bytes_per_s = bytes_per_s
        self._free_ns = 0

    def send(self, num_bytes: int, deliver: Callable[..., None], *arguments) -> None:
        """Call `deliver(*arguments)` when the message has arrived."""
        self._free_ns = max(self._free_ns, self.env.now) + int(num_bytes / self.bytes_per_s * 1e9)
        call_at(self.env, self._free_ns + self.latency_ns, deliver, *arguments)
