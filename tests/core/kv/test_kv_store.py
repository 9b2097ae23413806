"""Growing and giving back rows: never a negative need, and a failure changes nothing (D6)."""

import numpy as np
from foretoken.core.kv.store import Departure, KVStore


def store_with_rows(num_pages: int = 10, page_size: int = 4) -> tuple[KVStore, np.ndarray]:
    store = KVStore(3, 32, num_pages, page_size, None)
    return store, np.array([store.open_row(None) for _ in range(2)])


def test_a_target_below_what_a_row_has_is_no_need():
    store, rows = store_with_rows()
    assert store.grow(rows, np.array([8, 4]))
    assert store.grow(rows, np.array([4, 12]))
    assert store.allocated[rows].tolist() == [8, 12]
    assert store.allocator.num_held_slots == 20
    store.check()


def test_a_growth_that_fails_changes_nothing():
    store, rows = store_with_rows()
    assert store.grow(rows, np.array([8, 4]))
    before = store.table.slots.copy(), store.allocator.snapshot().free_pages.tolist()
    assert not store.grow(rows, np.array([28, 24]))
    assert not store.grow_row(int(rows[0]), 44)
    assert store.allocated[rows].tolist() == [8, 4]
    assert (store.table.slots == before[0]).all() and store.allocator.snapshot().free_pages.tolist() == before[1]
    store.check()


def test_what_is_given_back_is_free_and_what_is_kept_stays():
    store, rows = store_with_rows()
    assert store.grow(rows, np.array([16, 8]))
    kept = store.table.gather(int(rows[0]), 0, 8)
    store.trim(rows, np.array([8, 12]))
    assert store.allocated[rows].tolist() == [8, 8]
    assert store.table.gather(int(rows[0]), 0, 8).tolist() == kept.tolist()
    assert store.allocator.num_free_slots == 40 - 16
    store.check()


def test_a_fenced_row_comes_back_when_its_step_is_committed():
    store, rows = store_with_rows()
    assert store.grow(rows, np.array([16, 8]))
    store.close_row(Departure(fence=3, row=int(rows[0]), tokens=None, num_valid=0, namespace=""), last_committed=2)
    assert store.has_fenced and store.allocator.num_held_slots == 24
    store.pass_fence(2)
    assert store.has_fenced
    store.pass_fence(3)
    assert not store.has_fenced and store.allocator.num_held_slots == 8
    assert [row for row, _ in store.take_released()] == [int(rows[0])]
    store.check()
