"""The host-memory tier of the prefix cache.

What enters the prefix cache on the device is also copied to host memory, beside the device's work (write-through:
SGLang's `--hicache-write-policy write_through`, vLLM's KV offloading). There it stays when the device evicts it. A
request whose prefix the device no longer has takes the rest of it from here: its row gets slots, and the KV is copied
into them before they are read. When the tier is full, the prefixes that were unused for longest go first.

The tier keeps which tokens it has, not their KV. It is an allocator and a radix tree of its own, over host slots.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from ..contract.arrays import Int64Array
from .allocator import KVAllocator
from .radix import RadixCache


class HostTier:
    """Host memory for `num_pages` pages of prefixes, see the module's description. With 0 pages it holds none.

    `num_stored`: tokens copied to host memory so far.
    """

    def __init__(self, num_pages: int, page_size: int, key_kind: Literal["token", "bigram"] = "token") -> None:
        self.num_stored: int = 0
        self._page_size = page_size
        self._allocator = KVAllocator(num_pages, page_size)
        self._cache = RadixCache(page_size, key_kind)

    def store(self, tokens: Int64Array, num_keys: int, namespace: str) -> int:
        """Copy the first `num_keys` positions of a prefix, whole pages of them. Returns how many tokens were not here.

        If the tier is too small for all of them, the end of the prefix is left out.
        """
        cache, allocator = self._cache, self._allocator
        if not allocator.num_pages:
            return 0
        wanted = num_keys // self._page_size * self._page_size
        known = cache.match(tokens, namespace, wanted, count=False)
        if known.length == wanted:
            return 0
        cache.lock(known.node)
        missing = min(wanted - known.length, allocator.num_free_slots + cache.evictable_slots)
        if missing > allocator.num_free_slots:
            allocator.free(cache.evict(missing - allocator.num_free_slots))
        if missing:
            cache.insert(tokens, np.concatenate((known.slots, allocator.allocate(missing))), namespace)
        cache.unlock(known.node)
        self.num_stored += missing
        return missing

    def find(self, tokens: Int64Array, namespace: str, max_length: int) -> int:
        """Return how many tokens at the front of `tokens` are here, at most `max_length`. They become the most recently
        used."""
        if not self._allocator.num_pages:
            return 0
        return self._cache.match(tokens, namespace, max_length, count=False).length

    @property
    def num_held(self) -> int:
        """Tokens that the tier holds."""
        return self._cache.evictable_slots + self._cache.protected_slots

    def forget(self) -> None:
        """Empty the tier: the process that held it is gone."""
        self._allocator.free(self._cache.clear())

    def check(self) -> None:
        """Recount every slot; raises InvariantViolation with the id of what is broken."""
        self._cache.check([])
        self._allocator.check([self._cache.cached_slots()])
