"""Our request table over the allocator, `core.kv.store`, behind the allocator contract:
rows, rows behind a fence, and their units of other groups of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...core.kv.fence import Departure
from ...core.kv.groups import GroupSizes, KVGroup, StoreSizes
from ...core.kv.request_table import RequestTableFull, ceil_to_page
from ...core.kv.store import KVStore
from ...core.kv.units import WindowUnits
from ...properties.allocator.contract import AllocatorCapabilities, AllocatorConfig
from ...properties.allocator.groups import UnitGroup
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


class KVStoreWithGroups(KVStoreAdapter):
    """Rows that hold units of other groups of layers, too."""

    def open(self, request: str) -> bool:
        groups = self.store.groups
        for_states = sum(each.pool.slots_for(each.group.states) for each in groups.states)
        if for_states > self.store.available_slots or not groups.has_own_room(0, 0):
            return False
        return super().open(request)

    def advance(self, request: str, num_tokens: int) -> None:
        self.store.groups.move(np.array([self.row_of[request]]), np.array([num_tokens]))

    def units_of(self, request: str) -> list[tuple[int, np.ndarray]]:
        row = self.row_of[request]
        return [
            (int(each.first[row]) if isinstance(each, WindowUnits) else 0, each.units_of(row))
            for each in self.store.groups.all
        ]

    def used_units(self) -> list[int]:
        return [each.pool.num_used for each in self.store.groups.all]

    def unit_pages(self) -> list[list[int]]:
        return pages_of_units(self.store)


def pages_of_units(store: KVStore) -> list[list[int]]:
    """Return the pages of the pool that the units of each group take."""
    size = store.page_size
    return [
        [slot // size for slots in held.pool.slots() for slot in slots[::size].tolist()] for held in store.groups.all
    ]


def group_sizes(groups: Sequence[UnitGroup], page_size: int) -> GroupSizes:
    """Return the sizes of a store for groups of a contract."""
    return GroupSizes(
        [KVGroup(each.window, each.quarters / 4, each.states, each.capacity or None) for each in groups], page_size
    )


def make(config: AllocatorConfig) -> KVStoreAdapter:
    """Make a fresh `KVStore` without a prefix cache."""
    return KVStoreAdapter(KVStore(StoreSizes(config.num_rows, config.row_width, config.num_pages, config.page_size)))


def make_with_groups(config: AllocatorConfig) -> KVStoreWithGroups:
    """Make a fresh `KVStore` without a prefix cache whose rows hold units of groups of layers."""
    groups = group_sizes(config.unit_groups, config.page_size)
    return KVStoreWithGroups(
        KVStore(StoreSizes(config.num_rows, config.row_width, config.num_pages, config.page_size, groups))
    )


make.capabilities = AllocatorCapabilities(
    paged=True, padding_page=True, inspection=True, table=True, deferred_close=True, misuse=True
)
make_with_groups.capabilities = replace(make.capabilities, groups=True)
