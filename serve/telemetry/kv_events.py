"""KV events: what enters and leaves the prefix caches, published over ZeroMQ as vLLM 0.33 publishes it.

```
RadixCache ── pages ─► PageEvents ── batch of a turn ─► KvPublisher, a thread ── PUB: topic, number, msgpack
                                                                               └ ROUTER: the last batches once more
```

Each engine has its own addresses: the port that was given, plus its number. A batch is an array of Unix time, events
and the engine's number; an event is a map with `type`. A block is a page of the cache, and its hash covers all tokens
up to its end and the cache salt. The hashes are not those of vLLM, which depend on its settings; equal prefixes have
equal hashes in every process.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import zmq

from ...core.errors import ConfigError
from ...core.kv.radix_node import Keys, Slots
from ...core.scheduler.engine import Engine
from ..base.port import adapter_and_salt

Event: TypeAlias = dict[str, Any]
MEDIUM = "GPU"
MOST_BATCHES = 10_000
"""Of an engine that can be asked for once more, and that may wait to be sent."""
IDLE_S = 0.05
"""How often the thread looks for requests for old batches while nothing new comes."""
LINGER_MS = 500
"""For the last batches to reach subscribers."""
LAST = (-1).to_bytes(8, "big", signed=True)
"""Stands for the number behind the last batch of a replay."""


class PageEvents:
    """Makes the events of one prefix cache, in the order in which its pages come and go."""

    def __init__(self, page_size: int, key_kind: str) -> None:
        self.pending: list[Event] = []
        self._page_size = page_size
        self._is_bigram = key_kind == "bigram"
        self._hashes: dict[int, int] = {}  # by the first slot of a page

    def stored(self, keys: Keys, slots: Slots, before: int | None, namespace: str) -> None:
        parent = last = None if before is None else self._hashes[before]
        pages, hashes = keys.reshape(-1, self._page_size), []
        for slot, page in zip(slots[:: self._page_size].tolist(), pages, strict=True):
            last = self._hashes[slot] = _hash(last, namespace, page)
            hashes.append(last)
        tokens = keys >> 32 if self._is_bigram else keys
        event: Event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent}
        event |= {"token_ids": tokens.tolist(), "block_size": self._page_size}
        adapter, salt = adapter_and_salt(namespace)
        event |= {"lora_id": None, "medium": MEDIUM, "lora_name": adapter or None, "group_idx": 0}
        if namespace:
            salts = [salt if before is None else "", *[""] * (len(hashes) - 1)]
            event["extra_keys"] = [tuple(filter(None, (adapter, one))) or None for one in salts]
        if self._is_bigram:  # the draft's KV depends on the next token, too
            event["lookahead_token_ids"] = [[int(key) & 0xFFFFFFFF] for key in pages[:, -1]]
        self.pending.append(event)

    def removed(self, slots: Slots) -> None:
        hashes = [self._hashes.pop(slot) for slot in slots[:: self._page_size].tolist()]
        self.pending.append({"type": "BlockRemoved", "block_hashes": hashes, "medium": MEDIUM, "group_idx": 0})

    def cleared(self) -> None:
        self._hashes.clear()
        self.pending.append({"type": "AllBlocksCleared"})

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        taken, self.pending = self.pending, []
        return taken


def _hash(before: int | None, namespace: str, page: np.ndarray) -> int:
    """Return 64 bits for a page of keys behind the page whose hash is `before`."""
    start = b"" if before is None else before.to_bytes(8, "big")
    found = hashlib.blake2b(start + page.astype("<i8").tobytes(), digest_size=8, salt=_salt(namespace))
    return int.from_bytes(found.digest(), "big")


def _salt(namespace: str) -> bytes:
    return hashlib.blake2b(namespace.encode(), digest_size=16).digest() if namespace else b""


class _Channel:
    """The sockets of one engine, and its last batches."""

    def __init__(self, context: zmq.Context[Any], number: int, endpoint: str, replay: str | None) -> None:
        self.batches: deque[tuple[bytes, bytes]] = deque(maxlen=MOST_BATCHES)
        self.next = 0
        self.publisher = _bound(context, zmq.PUB, endpoint, number, "--kv-events")
        self.replay = None if replay is None else _bound(context, zmq.ROUTER, replay, number, "--kv-events-replay")

    def publish(self, topic: bytes, batch: bytes) -> None:
        number = self.next.to_bytes(8, "big")
        self.next += 1
        self.batches.append((number, batch))
        self.publisher.send_multipart((topic, number, batch))

    def answer(self, topic: bytes) -> None:
        """Answer a request for the batches from a number on; one of another form gets none."""
        if self.replay is None or not self.replay.poll(0):
            return
        frames = self.replay.recv_multipart()
        if len(frames) != 3:
            return
        client, _, first = frames
        for number, batch in self.batches:
            if int.from_bytes(number, "big") >= int.from_bytes(first, "big"):
                self.replay.send_multipart((client, b"", topic, number, batch))
        self.replay.send_multipart((client, b"", b"", LAST, b""))


class KvPublisher:
    """Publishes the events of the caches of `engines` under `topic`, on a thread of its own, until `close`.

    `publish` is called on the thread that drives the engines. Raises ConfigError if an engine has no prefix cache, or
    an address cannot be had.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        endpoint: str,
        replay: str | None = None,
        topic: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._topic = topic.encode()
        self._clock = clock
        self._waiting: queue.Queue[tuple[int, float, list[Event]] | None] = queue.Queue(MOST_BATCHES)
        self._events: list[PageEvents] = []
        context: zmq.Context[Any] = zmq.Context.instance()
        for engine in engines:
            cache = engine.store.cache
            if not cache.keeps_prefixes:
                raise ConfigError.of(
                    "<arguments>", "--kv-events", "there is no prefix cache: engine.prefix_cache is off"
                )
            cache.listener = events = PageEvents(cache.page_size, cache.key_kind)
            self._events.append(events)
        self._channels = [_Channel(context, number, endpoint, replay) for number in range(len(engines))]
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    @property
    def addresses(self) -> list[str]:
        """Where the events of each engine are published."""
        return [channel.publisher.getsockopt_string(zmq.LAST_ENDPOINT) for channel in self._channels]

    def publish(self) -> None:
        """Hand over the events of the caches since the last call, a batch for each engine."""
        for number, events in enumerate(self._events):
            if events.pending:
                self._waiting.put((number, self._clock(), events.take()))

    def close(self) -> None:
        """Send what waits, and give the addresses up."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        encode = msgspec.msgpack.Encoder().encode
        while True:
            try:
                waiting = self._waiting.get(timeout=IDLE_S)
            except queue.Empty:
                pass
            else:
                if waiting is None:
                    break
                number, at_s, events = waiting
                self._channels[number].publish(self._topic, encode((at_s, events, number)))
            for channel in self._channels:
                channel.answer(self._topic)
        for channel in self._channels:
            channel.publisher.close(linger=LINGER_MS)
            if channel.replay is not None:
                channel.replay.close(linger=0)


def _bound(context: zmq.Context[Any], kind: int, endpoint: str, number: int, option: str) -> zmq.Socket[Any]:
    """Return a socket that is bound to `endpoint`, its port raised by `number`. Raises ConfigError."""
    head, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdigit():
        raise ConfigError.of("<arguments>", option, f"{endpoint!r} is no address such as tcp://*:5557")
    socket: zmq.Socket[Any] = context.socket(kind)
    if kind == zmq.PUB:
        socket.set_hwm(MOST_BATCHES)
    else:
        socket.setsockopt(zmq.SNDHWM, 2 * (MOST_BATCHES + 1))  # a whole replay fits also behind one that is being read
    address = f"{head}:{int(port) + number if int(port) else '*'}"
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ConfigError.of("<arguments>", option, f"cannot listen on {address}: {str(error).lower()}") from None
    return socket
