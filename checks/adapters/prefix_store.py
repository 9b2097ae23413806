"""Our request table over the prefix cache, `core.kv.store`, behind the prefix cache contract:
admission, publication, departure, and what requests and the cache keep of other groups of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...core.kv.fence import Departure
from ...core.kv.groups import StoreSizes
from ...core.kv.host_tier import HostTier
from ...core.kv.radix_node import nodes_below
from ...core.kv.request_table import ceil_to_page
from ...core.kv.store import KVStore
from ...core.kv.units import WindowUnits
from ...properties.prefix_cache.contract import PrefixCacheConfig
from .kv_store import group_sizes, pages_of_units
from .radix_cache import RadixCacheAdapter

MAX_REQUESTS = 4
MAX_TOKENS = 128


class PrefixStoreAdapter(RadixCacheAdapter):
    """A fresh `KVStore` with a prefix cache: requests by name over rows by number.

    One step is always in flight: the one after those that were completed.
    """

    capabilities = replace(RadixCacheAdapter.capabilities, table=True, host=True)

    def __init__(self, config: PrefixCacheConfig) -> None:
        super().__init__(config)
        width = ceil_to_page(MAX_TOKENS, config.page_size)
        self.host = HostTier(config.host_pages, config.page_size, self.cache.key_kind) if config.host_pages else None
        groups = group_sizes(config.unit_groups, config.page_size)
        sizes = StoreSizes(MAX_REQUESTS, width, config.num_pages, config.page_size, groups)
        self.store = KVStore(sizes, self.cache, self.host)
        self.requests: dict[str, tuple[int, np.ndarray, str]] = {}
        self.completed = 0

    def evict(self, num_slots: int) -> np.ndarray:
        slots = self.cache.evict(num_slots)
        self.store.allocator.free(slots)
        return slots

    def admit(self, request: str, tokens: Sequence[int], namespace: str) -> int | None:
        known = np.array(tokens, dtype=np.int64)
        prefix = self.store.match(known, namespace)
        row = self.store.open_row(prefix)
        num_keys = len(known) - (self.cache.key_kind == "bigram")
        if not self.store.grow_row(row, ceil_to_page(num_keys, self.store.page_size)):
            self.store.close_row(Departure(self.completed, row, None, 0, namespace), self.completed)
            return None
        self.requests[request] = row, known, namespace
        return prefix.length

    def in_host(self, tokens: Sequence[int], namespace: str) -> int:
        assert self.host is not None, "the configuration has host memory"
        return self.host.find(np.array(tokens, dtype=np.int64), namespace, len(tokens))

    def slots_of(self, request: str) -> np.ndarray:
        row = self.requests[request][0]
        return self.store.table.gather(row, 0, int(self.store.allocated[row]))

    def publish(self, request: str, num_tokens: int) -> None:
        row, tokens, namespace = self.requests[request]
        self.store.share_prefix(row, tokens, num_tokens, namespace, fence=self.completed + 1)

    def leave(self, request: str, num_tokens: int) -> None:
        row, tokens, namespace = self.requests.pop(request)
        known = tokens if num_tokens else None
        self.store.close_row(Departure(self.completed, row, known, num_tokens, namespace), self.completed)

    def complete(self) -> None:
        self.completed += 1
        self.store.pass_fence(self.completed)

    def free_slots(self) -> np.ndarray:
        pages = self.store.allocator.free_pages
        return (pages[:, None] * self.store.page_size + np.arange(self.store.page_size)).ravel()


class PrefixStoreWithGroups(PrefixStoreAdapter):
    """Requests and a cache that keep units of other groups of layers, too. A request enters if all of it fits."""

    capabilities = replace(PrefixStoreAdapter.capabilities, groups=True, host=False)  # one or the other

    def admit(self, request: str, tokens: Sequence[int], namespace: str) -> int | None:
        known = np.array(tokens, dtype=np.int64)
        store, prefix = self.store, self.store.match(known, namespace)
        num_slots = ceil_to_page(len(known) - (self.cache.key_kind == "bigram"), store.page_size)
        with store.locked(prefix):
            needed = num_slots - prefix.length + store.groups.sizes.of(num_slots, num_slots, prefix.length)
            own_room = store.groups.has_own_room(num_slots, num_slots, prefix.length)
            if needed > store.available_slots or not own_room:
                return None
            row = store.open_row(prefix)
        fits = store.grow_row(row, num_slots)
        assert fits, "what was found to fit does not"
        self.requests[request] = row, known, namespace
        return prefix.length

    def publish(self, request: str, num_tokens: int) -> None:
        super().publish(request, num_tokens)
        self.store.groups.move(np.array([self.requests[request][0]]), np.array([num_tokens]))

    def units_of(self, request: str) -> list[tuple[int, list[int]]]:
        row, tables = self.requests[request][0], []
        for held in self.store.groups.all:
            units = held.units_of(row).tolist()
            if isinstance(held, WindowUnits):
                tables.append((int(held.first[row]), units))
            else:
                own = held.num_own(row)
                tables.append((0, [*(units[own:] or [-1]), *units[:own]]))
        return tables

    def cached_units(self) -> list[list[tuple[int, int]]]:
        size, found = self.store.page_size, [[] for _ in self.store.groups.all]
        for node in nodes_below(self.cache.root):
            for pairs, held, tags in zip(found, self.store.groups.all, node.units, strict=True):
                is_there = held.is_cached(tags)
                pairs += zip(node.slots[::size][is_there].tolist(), held.units_in(tags).tolist(), strict=True)
        return found

    def used_units(self) -> list[int]:
        return [held.pool.num_used for held in self.store.groups.all]

    def unit_pages(self) -> list[list[int]]:
        return pages_of_units(self.store)


make = PrefixStoreAdapter
make_with_groups = PrefixStoreWithGroups
