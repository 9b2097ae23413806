"""The network between engines: every engine has a port, which sends and receives at the same time.

```
engine 0 ══out══╗                 ╔══in══ engine 2         a transfer has the sender's way out and the receiver's way in
engine 1 ══out══╩═══ switch ══════╩══in══ engine 3         to itself; the next one on either waits until it has passed
```

The switch is never the bottleneck. Short messages (offers, answers) take the latency alone: they go beside the pages, as they do where
KV is written from memory to memory and words go over another connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import simpy

from ..actors.clock import call_at


class Layers(NamedTuple):
    """KV that appears layer by layer: when its first layer was there and when its last one is, and how many there are."""

    first_ns: int
    last_ns: int
    count: int


class Network:
    """Ports are numbered like the engines that they belong to."""

    def __init__(self, env: simpy.Environment, num_ports: int, latency_ns: int, bytes_per_s: float) -> None:
        self.env = env
        self.latency_ns = latency_ns
        self.bytes_per_s = bytes_per_s
        self.out_busy_ns = [0] * num_ports
        self.in_busy_ns = [0] * num_ports
        self.num_bytes = 0
        self.slowdown = 1.0  # of all ways, for a while
        self._out_free_ns = [0] * num_ports
        self._in_free_ns = [0] * num_ports

    def say(self, source: int, target: int, num_bytes: int, deliver: Callable[..., None], *arguments) -> None:
        """A short message; `num_bytes` of it are more than words. It waits for nobody and nobody for it."""
        takes_ns = self._count(source, target, num_bytes)
        call_at(self.env, self.env.now + takes_ns + self.latency_ns, deliver, *arguments)

    def send(
        self,
        source: int,
        target: int,
        num_bytes: int,
        deliver: Callable[..., None],
        *arguments,
        layers: Layers | None = None,
    ) -> tuple[int, int]:
        """Move `num_bytes` and call `deliver(*arguments)` when they have arrived. Returns when the first byte left, and when the last.

        With `layers` the bytes began to leave when the first layer was there, if the ports were free then: what is asked for at the
        end of a step was under way during it.
        """
        now_ns = self.env.now
        takes_ns = self._count(source, target, num_bytes)
        earliest_ns = now_ns if layers is None else layers.first_ns
        started_ns = max(earliest_ns, self._out_free_ns[source], self._in_free_ns[target])
        ended_ns = started_ns + takes_ns
        if layers is not None:
            ended_ns = max(ended_ns, layers.last_ns + takes_ns // layers.count)
        ended_ns = max(ended_ns, now_ns)
        self._out_free_ns[source] = self._in_free_ns[target] = ended_ns
        call_at(self.env, ended_ns + self.latency_ns, deliver, *arguments)
        return started_ns, ended_ns

    def _count(self, source: int, target: int, num_bytes: int) -> int:
        """Note bytes that pass, and return how long they take."""
        takes_ns = int(num_bytes / self.bytes_per_s * self.slowdown * 1e9)
        self.out_busy_ns[source] += takes_ns
        self.in_busy_ns[target] += takes_ns
        self.num_bytes += num_bytes
        return takes_ns
