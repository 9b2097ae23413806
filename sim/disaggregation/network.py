"""The network between engines: every engine has a port, which sends and receives at the same time.

```
engine 0 ══out══╗                 ╔══in══ engine 2         a transfer has the sender's way out and the receiver's way in
engine 1 ══out══╩═══ switch ══════╩══in══ engine 3         to itself; the next one on either waits until it has passed
```

The switch is never the bottleneck. Where two ports have unlike rates, pages move at the slower one. The faster port is
taken only for as long as it needs for these bytes by itself, so that it can serve other engines beside. Short messages
(offers, answers) take the latency alone: they go beside the pages, as they do where KV is written from memory to memory
and messages go over another connection.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...core.handoff import Message, PageFormat, PageSeal, TransferState
from ...core.handoff.messages import Manifest, Page
from ...observe.measuring.summary import share
from ..actors.clock import Arguments, Environment, call_at
from ..actors.device import Truth

ArrivedPages = list[tuple[Page, PageSeal]]
"""Pages, each with the seal of what has really arrived."""


class Layers(NamedTuple):
    """KV that appears layer by layer: when its first layer was there and when its last one is, and
    how many there are."""

    first_ns: int
    last_ns: int
    num_layers: int


class Network:
    """Ports are numbered like the engines that they belong to; `bytes_per_s` has the rate of each. Pages keep them
    busy; short messages go beside."""

    def __init__(self, env: Environment, latency_ns: int, bytes_per_s: Sequence[float]) -> None:
        num_ports = len(bytes_per_s)
        self.env = env
        self.latency_ns = latency_ns
        self.bytes_per_s = bytes_per_s
        self.out_busy_ns: list[int] = [0] * num_ports
        self.in_busy_ns: list[int] = [0] * num_ports
        self.num_bytes: int = 0
        self.slowdown: float = 1.0  # multiplies the time of all bytes
        self._out_free_ns = [0] * num_ports
        self._in_free_ns = [0] * num_ports

    def say(
        self, source: int, target: int, num_bytes: int, deliver: Callable[[*Arguments], None], *arguments: *Arguments
    ) -> None:
        """Send a short message with an attachment of `num_bytes`. Messages do not wait for each other."""
        takes_ns = max(self._count(num_bytes, source, target))
        call_at(self.env, self.env.now + takes_ns + self.latency_ns, deliver, *arguments)

    def send(
        self,
        source: int,
        target: int,
        num_bytes: int,
        deliver: Callable[[*Arguments], None],
        *arguments: *Arguments,
        layers: Layers | None = None,
    ) -> tuple[int, int]:
        """Move `num_bytes` and call `deliver(*arguments)` when they have arrived. Returns when the first byte left, and
        when the last.

        This is asked for at the end of a step. With `layers` the bytes have been leaving during it, since its first
        layer was there and the ports were free.
        """
        now_ns = self.env.now
        out_ns, in_ns = self._count(num_bytes, source, target)
        takes_ns = max(out_ns, in_ns)
        self.out_busy_ns[source] += out_ns
        self.in_busy_ns[target] += in_ns
        earliest_ns = now_ns if layers is None else layers.first_ns
        started_ns = max(earliest_ns, self._out_free_ns[source], self._in_free_ns[target])
        ended_ns = started_ns + takes_ns
        if layers is not None:
            ended_ns = max(ended_ns, layers.last_ns + takes_ns // layers.num_layers)
        ended_ns = max(ended_ns, now_ns)
        self._out_free_ns[source] = ended_ns - (takes_ns - out_ns)
        self._in_free_ns[target] = ended_ns - (takes_ns - in_ns)
        call_at(self.env, ended_ns + self.latency_ns, deliver, *arguments)
        return started_ns, ended_ns

    @property
    def last_busy_ns(self) -> int:
        """The time at which the last page so far has left its port."""
        return max(*self._out_free_ns, *self._in_free_ns)

    def _count(self, num_bytes: int, source: int, target: int) -> tuple[int, int]:
        """Count bytes that pass; returns how long the port of the sender takes for them, and that of the receiver."""
        self.num_bytes += num_bytes
        rates = self.bytes_per_s[source], self.bytes_per_s[target]
        out_ns, in_ns = (int(num_bytes / rate * self.slowdown * 1e9) for rate in rates)
        return out_ns, in_ns


class Station(Protocol):
    """The receiver of the network's deliveries: an engine's `HandoffEndpoint`. While not `is_alive` it neither sends
    nor receives."""

    name: str
    replica: int
    is_alive: bool

    def receive(self, peer: str, message: Message, truth: Truth | None) -> None: ...
    def receive_pages(self, peer: str, pages: ArrivedPages) -> None: ...
    def withdraw(self, request_id: str) -> None: ...


class PacketHooks:
    """Hooks on packets between engines that change nothing; subclasses override what they need."""

    def on_message(self, source: Station, target: Station, message: Message, truth: Truth | None) -> bool:
        """Take a message that is being sent: return whether to send it on."""
        return True

    def on_pages(self, source: Station, target: Station, pages: ArrivedPages) -> tuple[ArrivedPages, int | None]:
        """Take pages that are being sent: return the pages that will arrive, and their delay beyond the network's time
        if they are late."""
        return pages, None

    def on_arrival(self, source: Station, pages: ArrivedPages) -> None:
        """Note that pages have arrived at an engine that is alive."""


class HandoffNetwork:
    """Carries the packets of handoffs between the engines of a cluster."""

    def __init__(
        self,
        network: Network,
        page_format: PageFormat,
        sent_page_bytes: int,
        draft_input_bytes: int,
        stations: Sequence[Station],
        hooks: PacketHooks,
    ) -> None:
        """Take `stations`, numbered as the network's ports; the list may be filled later. `sent_page_bytes`: of a page
        on the network."""
        self.network = network
        self.page_format = page_format
        self._sent_page_bytes = sent_page_bytes
        self.stations = stations
        self._draft_input_bytes = draft_input_bytes
        self._hooks = hooks

    def send(self, source: Station, peer: str, message: Message, truth: Truth | None) -> None:
        """Send a message of the handoff; a manifest brings the draft input along."""
        target = self._station(peer)
        if not source.is_alive or not self._hooks.on_message(source, target, message, truth):
            return
        size = self._draft_input_bytes if type(message) is Manifest else 0
        self.network.say(source.replica, target.replica, size, self.deliver, source, target, message, truth)

    def send_pages(self, source: Station, peer: str, pages: list[Page], layers: Layers | None) -> tuple[int, int]:
        """Send the pages of one action; returns when the first byte left and when the last one does."""
        if not source.is_alive:
            now_ns = self.network.env.now
            return now_ns, now_ns
        target = self._station(peer)
        arrived, delay_ns = self._hooks.on_pages(source, target, [(page, page.seal) for page in pages])
        deliver = partial(self.deliver_pages, source, target, arrived)
        if delay_ns is not None:
            deliver = partial(self._deliver_later, delay_ns, deliver)
        num_bytes = len(pages) * self._sent_page_bytes
        return self.network.send(source.replica, target.replica, num_bytes, deliver, layers=layers)

    def withdraw(self, source: Station, target: int, request_id: str) -> None:
        """Tell engine `target` that a request's client has left."""
        self.network.say(source.replica, target, 0, self.stations[target].withdraw, request_id)

    def deliver(self, source: Station, target: Station, message: Message, truth: Truth | None) -> None:
        """Take a message that arrives."""
        if target.is_alive:
            target.receive(source.name, message, truth)

    def deliver_pages(self, source: Station, target: Station, pages: ArrivedPages) -> None:
        """Take pages that arrive."""
        if target.is_alive:
            self._hooks.on_arrival(source, pages)
            target.receive_pages(source.name, pages)

    def _deliver_later(self, delay_ns: int, deliver: Callable[[], None]) -> None:
        call_at(self.network.env, self.network.env.now + delay_ns, deliver)

    def _station(self, peer: str) -> Station:
        return self.stations[int(peer.removeprefix("engine "))]


PERCENTILES = {"median": 50, "p90": 90, "p95": 95, "p99": 99}


class TransferTimes:
    """Times of every transfer, in nanoseconds."""

    def __init__(self) -> None:
        self.counts: dict[TransferState, int] = dict.fromkeys(
            (TransferState.COMPLETED, TransferState.FAILED, TransferState.CANCELLED), 0
        )
        self._started: dict[str, int] = {}
        self._computed: dict[str, int] = {}
        self._durations: array[int] = array("q")
        self._waits: array[int] = array("q")

    def started(self, request_id: str, now_ns: int) -> None:
        """Note when the first byte of a request's KV leaves. A retry does not change the time, because the client has
        waited since then."""
        self._started.setdefault(request_id, now_ns)

    def computed(self, request_id: str, now_ns: int) -> None:
        """Note when a prompt is computed and its first token known."""
        self._computed.setdefault(request_id, now_ns)

    def joined(self, request_id: str, now_ns: int) -> None:
        """Note that all of it has arrived and is verified:
        the request takes part in the next round of its decode engine."""
        computed_ns = self._computed.get(request_id)
        if computed_ns is None:
            return  # given up by the prefill engine meanwhile
        # Where the decode engine has every page in its prefix cache, none is sent.
        self._durations.append(now_ns - self._started.get(request_id, computed_ns))
        self._waits.append(now_ns - computed_ns)

    def ended(self, request_id: str, state: TransferState) -> None:
        """Count a transfer that the prefill engine has ended."""
        self.counts[state] += 1
        self._started.pop(request_id, None)
        self._computed.pop(request_id, None)

    def to_json(self) -> dict[str, Any]:
        summary: dict[str, Any] = {
            "transfers_completed": self.counts[TransferState.COMPLETED],
            "transfers_failed": self.counts[TransferState.FAILED],
            "transfers_cancelled": self.counts[TransferState.CANCELLED],
        }
        summary |= _statistics("transfer", self._durations)
        return summary | _statistics("transfer_wait", self._waits)


def _statistics(name: str, values: array[int]) -> dict[str, float | None]:
    if not values:
        return {f"{statistic}_{name}_ms": None for statistic in ("mean", *PERCENTILES)}
    found = np.frombuffer(values, dtype=np.int64)
    quantiles = np.percentile(found, list(PERCENTILES.values())).tolist()
    named = dict(zip(("mean", *PERCENTILES), [float(found.mean()), *quantiles], strict=True))
    return {f"{statistic}_{name}_ms": value * 1e-6 for statistic, value in named.items()}


@dataclass(frozen=True, slots=True)
class DisaggregationReport:
    """The results of a run with two pools."""

    num_prefill: int  # in the end
    num_decode: int
    num_role_changes: int
    prefill_busy_share: float | None  # of the devices, while they had that role
    decode_busy_share: float | None
    out_busy_ns: tuple[int, ...]  # per engine: its port's way out
    in_busy_ns: tuple[int, ...]
    link_busy_share: float | None  # of the ways out of engines, while they computed prompts
    num_bytes: int
    num_retries: int
    num_ignored: int  # late, doubled or senseless messages
    num_moved: int  # requests that went on on another engine after their decode engine was lost
    transfers: dict[str, Any]

    def to_json(self, duration_ns: int) -> dict[str, Any]:
        """Return the numbers for summary.json."""
        ways = [*self.out_busy_ns, *self.in_busy_ns]
        return {
            "prefill_engines": self.num_prefill,
            "decode_engines": self.num_decode,
            "role_changes": self.num_role_changes,
            "prefill_busy_share": self.prefill_busy_share,
            "decode_busy_share": self.decode_busy_share,
            "link_busy_share": self.link_busy_share,
            "link_busy_share_max": share(max(ways, default=0), duration_ns),
            "transferred_bytes": self.num_bytes,
            "transfer_retries": self.num_retries,
            "transfer_messages_ignored": self.num_ignored,
            "requests_moved": self.num_moved,
            **self.transfers,
        }
