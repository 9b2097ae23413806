"""Our page allocator, `core.kv.allocator`, behind the allocator contract."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...core.kv.allocator import KVAllocator
from ...properties.allocator.contract import AllocatorCapabilities, AllocatorConfig


class KVAllocatorAdapter:
    """Lists in and arrays out."""

    def __init__(self, allocator: KVAllocator) -> None:
        self.allocator = allocator
        self.alloc = allocator.allocate
        self.can_allocate = allocator.can_allocate

    def free(self, slots: Sequence[int]) -> None:
        self.allocator.free(np.array(slots, dtype=np.int64))

    def num_free(self) -> int:
        return self.allocator.num_free_slots

    def free_pages(self) -> np.ndarray:
        return self.allocator.free_pages


def make(config: AllocatorConfig) -> KVAllocatorAdapter:
    """Make a fresh `KVAllocator` of this size."""
    return KVAllocatorAdapter(KVAllocator(config.num_pages, config.page_size))


make.capabilities = AllocatorCapabilities(paged=True, padding_page=True, inspection=True, misuse=True)
