"""Rows that grow, and rows of a transfer: held after their request leaves, not announced until it joins."""

import numpy as np
import pytest
from foredraft.core.errors import InvariantViolation
from foredraft.core.kv.fence import Departure
from foredraft.core.kv.groups import StoreSizes
from foredraft.core.kv.radix import RadixCache
from foredraft.core.kv.store import KVStore


def make(num_pages=8, page_size=2, cached=True):
    return KVStore(StoreSizes(3, 8, num_pages, page_size), RadixCache(page_size) if cached else None)


def leave(store, row, tokens=None, num_valid=0, last_committed=0, fence=0):
    store.close_row(Departure(fence, row, tokens, num_valid, ""), last_committed)


def test_a_held_row_keeps_its_slots_after_its_request_has_left():
    store = make()
    row = store.open_row(None)
    assert store.grow_row(row, 6)
    slots = store.table.gather(row, 0, 6).tolist()
    store.hold_row(row)
    leave(store, row, np.arange(6), 6)
    store.check()
    assert store.allocator.num_held_slots == 6 and store.num_held_rows == 1
    assert store.table.gather(row, 0, 6).tolist() == slots
    before = store.revision
    store.release_hold(row, 0)
    store.check()
    assert store.num_held_rows == 0 and store.cache.evictable_slots == 6 and store.revision > before


def test_a_hold_that_ends_behind_a_fence_waits_for_it():
    store = make(cached=False)
    row = store.open_row(None)
    store.grow_row(row, 4)
    store.hold_row(row)
    leave(store, row, fence=5, last_committed=4)
    store.release_hold(row, 4)
    assert store.allocator.num_held_slots == 4
    store.pass_fence(5)
    assert store.allocator.num_held_slots == 0
    store.check()


def test_the_recount_notices_a_held_row_that_was_given_away():
    store = make()
    row = store.open_row(None)
    store.hold_row(row)
    store.table.release(row)
    with pytest.raises(InvariantViolation, match="HANDOFF-02"):
        store.check()


def test_the_executor_gets_the_writes_of_a_row_when_it_is_announced_and_not_before():
    store = make()
    row = store.reserve_row(None, "", 6)
    assert not len(store.take_writes().slots)
    leave(store, row)
    assert store.take_released() == () and store.allocator.num_held_slots == 0
    row = store.reserve_row(None, "", 6)
    store.share_prefix(row, np.arange(4), 4, "", 0)
    assert not len(store.take_writes().slots)
    store.announce_row(row)
    writes = store.take_writes()
    assert writes.rows.tolist() == [row] * 6 and writes.columns.tolist() == list(range(6))
    assert writes.slots.tolist() == store.table.gather(row, 0, 6).tolist()
    leave(store, row)
    assert store.take_released() == ((row, 2),)


def test_a_reservation_takes_the_cached_prefix_or_nothing_at_all():
    store = make(num_pages=4)
    row = store.open_row(None)
    store.grow_row(row, 4)
    leave(store, row, np.arange(4), 4)
    row = store.reserve_row(np.arange(7), "", 8)
    assert store.num_shared(row) == 4 and store.allocated[row] == 8
    store.check()
    free, rows = store.allocator.free_pages.tolist(), store.table.num_free_rows
    assert store.reserve_row(np.arange(7), "", 2) is None
    assert store.allocator.free_pages.tolist() == free and store.table.num_free_rows == rows
    store.check()


def test_a_target_below_what_a_row_has_is_no_need():
    store = make(cached=False)
    rows = np.array([store.open_row(None) for _ in range(2)])
    assert store.grow(rows, np.array([4, 2]))
    assert store.grow(rows, np.array([2, 6]))
    assert store.allocated[rows].tolist() == [4, 6]
    assert store.allocator.num_held_slots == 10
    store.check()
