"""Our prefix cache, `core.kv.radix`, behind the prefix cache contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...core.kv.radix import RadixCache
from ...core.kv.radix_node import Keys, RadixNode, Slots
from ...properties.prefix_cache.contract import PrefixCacheCapabilities, PrefixCacheConfig
from ...properties.prefix_cache.events import CacheEvent


class PublishedPages:
    """Keeps what a cache says of its pages, as the contract has it."""

    def __init__(self, is_bigram: bool, page_size: int) -> None:
        self.events: list[CacheEvent] = []
        self.is_bigram, self.page_size = is_bigram, page_size

    def stored(self, keys: Keys, slots: Slots, before: int | None, namespace: str) -> None:
        own = [(key >> 32 & 0xFFFFFFFF, key & 0xFFFFFFFF) if self.is_bigram else key for key in keys.tolist()]
        names = slots[:: self.page_size].tolist()
        self.events.append(CacheEvent(True, names, parent=before, tokens=own, namespace=namespace))

    def removed(self, slots: Slots) -> None:
        self.events.append(CacheEvent(False, slots[:: self.page_size].tolist()))


class RadixCacheAdapter:
    """A fresh `RadixCache`; lists in and tuples out."""

    capabilities: PrefixCacheCapabilities = replace(
        PrefixCacheCapabilities.all(), collisions=False, table=False, host=False, groups=False
    )

    def __init__(self, config: PrefixCacheConfig) -> None:
        self.cache: RadixCache = RadixCache(config.page_size, "bigram" if config.bigram else "token", config.policy)
        self.published: PublishedPages = PublishedPages(config.bigram, config.page_size)
        self.cache.listener = self.published
        self.lock = self.cache.lock
        self.unlock = self.cache.unlock
        self.evict = self.cache.evict
        self.peek = self.cache.peek

    def match(self, tokens: Sequence[int], namespace: str) -> tuple[RadixNode, np.ndarray]:
        found = self.cache.match(tokens, namespace)
        return found.node, found.slots

    def insert(self, tokens: Sequence[int], slots: Sequence[int], namespace: str):
        done = self.cache.insert(tokens, np.array(slots, dtype=np.int32), namespace)
        return done.node, done.canonical, done.duplicates

    def events(self) -> list[CacheEvent]:
        events, self.published.events = self.published.events, []
        return events

    def num_evictable(self) -> int:
        return self.cache.evictable_slots

    def num_protected(self) -> int:
        return self.cache.protected_slots

    def nodes(self) -> list[tuple[int, int, int, list[int], list[int]]]:
        found, waiting = [], [(self.cache.root, -1)]
        while waiting:
            node, parent = waiting.pop()
            children = list(node.children.values())
            found.append((node.serial, parent, node.locks, node.slots.tolist(), [child.serial for child in children]))
            waiting += [(child, child.parent.serial) for child in children]
        return found


make = RadixCacheAdapter
