"""Our request table over the allocator, `core.kv.store`, behind the allocator contract:
rows, and rows behind a fence."""

from __future__ import annotations

import numpy as np

from ...core.kv.fence import Departure
from ...core.kv.groups import StoreSizes
from ...core.kv.request_table import RequestTableFull, ceil_to_page
from ...core.kv.store import KVStore
from ...properties.allocator.contract import AllocatorCapabilities, AllocatorConfig
from .kv_allocator import KVAllocatorAdapter


class KVStoreAdapter(KVAllocatorAdapter):
    """Requests by name over rows by number. Targets are aligned as the engine aligns them."""

    def __init__(self, store: KVStore) -> None:
        super().__init__(store.allocator)
        self.store = store
        self.row_of: dict[str, int] = {}
        self.completed = 0
        self.departed: list[tuple[int, int]] = []  # (step, pages)

    def open(self, request: str) -> bool:
        try:
            self.row_of[request] = self.store.open_row(None)
        except RequestTableFull:
            return False
        return True

    def grow(self, request: str, num_tokens: int) -> bool:
        target = ceil_to_page(num_tokens, self.store.page_size)
        if target > self.store.row_width:
            return False
        rows = np.array([self.row_of[request]], dtype=np.intp)
        return self.store.grow(rows, np.array([target], dtype=np.int64))

    def trim(self, request: str, num_tokens: int) -> None:
        target = ceil_to_page(num_tokens, self.store.page_size)
        self.store.trim(np.array([self.row_of[request]], dtype=np.intp), np.array([target], dtype=np.int64))

    def close(self, request: str, step: int | None = None) -> None:
        row = self.row_of.pop(request)
        fence = self.completed if step is None else step
        pages = int(self.store.allocated[row]) // self.store.page_size
        self.store.close_row(Departure(fence, row, None, 0, ""), self.completed)
        if fence > self.completed:
            self.departed.append((fence, pages))

    def complete(self, step: int) -> None:
        self.completed = step
        self.store.pass_fence(step)
        self.departed = [item for item in self.departed if item[0] > step]

    def num_deferred(self) -> int:
        return sum(pages for _, pages in self.departed)

    def slots_of(self, request: str) -> np.ndarray:
        return self.store.own_slots(self.row_of[request])


def make(config: AllocatorConfig) -> KVStoreAdapter:
    """Make a fresh `KVStore` without a prefix cache."""
    return KVStoreAdapter(KVStore(StoreSizes(config.num_rows, config.row_width, config.num_pages, config.page_size)))


make.capabilities = AllocatorCapabilities(
    paged=True, padding_page=True, inspection=True, table=True, deferred_close=True, misuse=True
)
