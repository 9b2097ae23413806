"""Groups of layers with a window or with states: what rows hold, what a prefix offers, and who owns each unit."""

from __future__ import annotations

import numpy as np
import pytest
from foredraft.core.kv.counting import CountingStore
from foredraft.core.kv.fence import Departure
from foredraft.core.kv.groups import GroupSizes, KVGroup, StoreSizes
from foredraft.core.kv.radix import RadixCache
from foredraft.core.kv.store import KVStore
from hypothesis import given, settings
from hypothesis import strategies as st

PAGE = 4
WINDOW, STATE = KVGroup(window=9, pages=1.0), KVGroup(pages=2.0, states=2)


def store_of(*groups: KVGroup, pages: int = 64, has_cache: bool = True, rows: int = 4) -> KVStore:
    sizes = StoreSizes(rows, 20 * PAGE, pages, PAGE, GroupSizes(groups, PAGE))
    return KVStore(sizes, RadixCache(PAGE)) if has_cache else CountingStore(sizes)


def start(store: KVStore, tokens: np.ndarray) -> tuple[int, int]:
    """Open a row for a text, with slots for all of it. Returns the row and the length found in the cache."""
    prefix = store.match(tokens, "") if store.cache.keeps_prefixes else None
    row = store.open_row(prefix)
    assert store.grow_row(row, -(-len(tokens) // PAGE) * PAGE)
    return row, 0 if prefix is None else prefix.length


def move(store: KVStore, row: int, length: int) -> None:
    store.groups.move(np.array([row]), np.array([length]))


def leave(store: KVStore, row: int, tokens: np.ndarray | None, length: int = 0) -> None:
    store.close_row(Departure(0, row, tokens, length, ""), 0)
    store.check()


def text(*parts: int) -> np.ndarray:
    """Return a text of pages: part n is a page that begins with n."""
    return np.array([100 * part + at for part in parts for at in range(PAGE)])


# -- what a row holds --------------------------------------------------------------------------------------------------


def test_a_window_moves_on_and_gives_back_what_no_step_reads():
    store = store_of(WINDOW, has_cache=False)
    row, _ = start(store, np.arange(10 * PAGE))
    (units,) = store.groups.windows
    assert store.allocator.num_held_slots == 2 * 10 * PAGE
    for length, first in ((8, 0), (11, 0), (12, 1), (13, 1), (16, 2), (40, 8)):
        move(store, row, length)
        assert units.first[row] == first, "position n reads from n − 8"
        store.check()
    move(store, row, 12)
    assert units.first[row] == 8, "it moves in one direction only"
    assert store.allocator.num_held_slots == (10 + 2) * PAGE
    leave(store, row, None)
    assert store.allocator.num_held_slots == 0


def test_units_take_as_many_whole_pages_as_they_fill_together():
    store = store_of(KVGroup(window=1000, pages=0.25), has_cache=False)
    rows = [start(store, np.arange(2 * PAGE))[0] for _ in range(3)]
    assert store.allocator.num_held_slots == (6 + 2) * PAGE, "six units of a quarter of a page"
    for row in rows:
        leave(store, row, None)
    assert store.allocator.num_held_slots == 0


def test_a_group_with_a_pool_of_its_own_takes_nothing_of_the_other():
    store = store_of(KVGroup(window=9, capacity=5), KVGroup(states=2, capacity=3), has_cache=False)
    row, _ = start(store, np.arange(5 * PAGE))
    assert store.allocator.num_held_slots == 5 * PAGE
    assert not store.grow_row(row, 6 * PAGE), "there are five units"
    move(store, row, 5 * PAGE)
    assert store.grow_row(row, 6 * PAGE)
    assert store.groups.has_own_room(PAGE, 0) is False, "one state is left, a request takes two"
    leave(store, row, None)


def test_a_row_whose_kv_arrives_takes_no_unit_behind_the_window():
    store = store_of(WINDOW, STATE)
    row = store.reserve_row(None, "", 10 * PAGE, 9 * PAGE)
    assert row is not None and store.groups.windows[0].units_of(row).size == 10 - (36 - 8) // 4
    assert store.groups.states[0].units_of(row).size == 2
    leave(store, row, None)


# -- what a prefix offers ----------------------------------------------------------------------------------------------


def test_a_hit_ends_where_every_group_has_what_the_next_position_reads():
    store = store_of(WINDOW)
    first = text(1, 2, 3, 4, 5, 6)
    row, _ = start(store, first)
    leave(store, row, first, 24)
    assert store.match(np.append(first, 0), "").length == 24
    # The first two pages' units are gone: a start behind them needs the two pages before it.
    for _ in range(2):
        store.groups.windows[0].evict()
    store.check()
    assert store.cache.peek(np.append(first, 0)) == 24
    assert store.cache.peek(text(1, 2, 3, 9)) == 0, "page 3 is there, page 2 is not"
    assert store.cache.peek(text(1, 2, 3, 4, 9)) == 16
    found = store.match(text(1, 2, 3, 9), "")
    assert (found.length, found.known) == (0, 12)


def test_a_cached_page_that_has_lost_its_unit_gets_that_of_another_request():
    store = store_of(WINDOW)
    tokens = text(1, 2, 3)
    (first, _), (second, _) = start(store, tokens), start(store, tokens)
    leave(store, first, tokens[:8], 8)
    store.share_prefix(second, tokens, 4, "", 0)
    store.groups.windows[0].evict()
    assert store.cache.peek(text(1, 2, 9)) == 0, "the unit of the first page is gone"
    leave(store, second, tokens, 12)
    assert store.cache.peek(text(1, 2, 9)) == 8


def test_a_state_is_found_where_one_was_saved_and_nowhere_else():
    store = store_of(STATE)
    shared = text(1, 2, 3)
    one, two, three = (np.concatenate((shared, text(own, own + 1))) for own in (11, 21, 31))
    row, _ = start(store, one)
    leave(store, row, one, len(one))
    assert store.cache.peek(np.append(one, 0)) == 20
    row, found = start(store, two)
    assert found == 0, "the pages are there, the state at their end is not"
    leave(store, row, two, len(two))
    row, found = start(store, three)
    assert found == 12, "the second request has left the state at the end of what both have"
    assert store.groups.states[0].units_of(row).size == 3, "its own, and the one it starts from"
    move(store, row, 13)
    assert store.groups.states[0].units_of(row).size == 2, "its first step is committed"
    leave(store, row, None)


def test_a_running_prompt_leaves_a_state_at_the_end_of_each_chunk():
    store = store_of(STATE)
    tokens = text(1, 2, 3, 4)
    row, _ = start(store, tokens)
    store.share_prefix(row, tokens, 9, "", 0)
    store.check()
    assert store.cache.peek(tokens) == 8, "the last whole page of what is computed"
    assert store.groups.states[0].units_of(row).size == 2
    store.share_prefix(row, tokens, 16, "", 0)
    assert store.cache.peek(np.append(tokens, 0)) == 16
    leave(store, row, tokens, 16)


def test_the_state_that_a_request_starts_from_leaves_the_cache_where_no_other_is_free():
    store = store_of(KVGroup(states=1, capacity=1))
    tokens = text(1, 2)
    row, _ = start(store, tokens)
    leave(store, row, tokens, 8)
    again = np.append(tokens, 7)
    row, found = start(store, again)
    assert found == 8 and store.groups.states[0].units_of(row).size == 1
    store.check()
    assert store.cache.peek(again) == 0
    leave(store, row, None)


def test_units_are_evicted_one_by_one_and_pages_with_all_their_units():
    store = store_of(WINDOW, pages=20)
    tokens = text(1, 2, 3, 4, 5)
    row, _ = start(store, tokens)
    move(store, row, 20)
    leave(store, row, tokens, 20)
    assert store.available_slots == 20 * PAGE and store.cache.peek(np.append(tokens, 0)) == 20
    row = store.open_row(None)
    assert store.grow_row(row, 6 * PAGE), "12 pages, of which 10 are free"
    assert store.cache.peek(np.append(tokens, 0)) == 20, "two units before the window went first"
    assert store.cache.evictable_slots == 20
    assert store.grow_row(row, 9 * PAGE)
    store.check()
    assert store.cache.evictable_slots > 0 and store.cache.peek(np.append(tokens, 0)) < 20
    assert store.grow_row(row, 10 * PAGE) and not store.grow_row(row, 11 * PAGE)
    leave(store, row, None)
    assert store.available_slots == 20 * PAGE


def test_the_window_of_a_prefix_that_a_request_reads_is_not_evicted():
    store = store_of(WINDOW, pages=16)
    tokens = text(1, 2, 3, 4)
    row, _ = start(store, tokens)
    leave(store, row, tokens, 16)
    row, found = start(store, np.append(tokens, 0))
    assert found == 16
    other = store.open_row(None)
    pages = 1
    while store.grow_row(other, pages * PAGE):
        pages += 1
    assert store.groups.windows[0].units_of(row).size == 3 and store.cache.peek(np.append(tokens, 0)) == 16
    store.check()
    leave(store, other, None)
    leave(store, row, None)


# -- sizes -------------------------------------------------------------------------------------------------------------

window_groups = st.builds(KVGroup, st.integers(2, 40), st.sampled_from([0.25, 1.0, 10.0]))
state_groups = st.builds(KVGroup, st.just(0), st.sampled_from([0.3, 2.0, 7.5]), st.integers(1, 4))
group_sets = st.lists(st.one_of(window_groups, state_groups), max_size=2).map(tuple)


@given(group_sets, st.sampled_from([1, 4]), st.integers(0, 3000), st.integers(0, 60))
def test_the_longest_request_fits_and_a_longer_one_does_not(groups, page_size, num_pages, ahead):
    sizes, pool = GroupSizes(groups, page_size), num_pages * page_size
    longest = sizes.longest_in(pool, ahead)
    assert longest % page_size == 0 and longest <= pool
    assert longest == 0 or sizes.total(longest, ahead) <= pool
    assert sizes.total(longest + page_size, ahead) > pool


@settings(max_examples=80)
@given(
    group_sets,
    st.sampled_from([1, 4]),
    st.booleans(),
    st.lists(st.tuples(st.sampled_from("oogggtmsc"), st.integers(0, 7), st.integers(0, 20)), max_size=50),
)
def test_every_unit_has_one_owner_after_each_move(groups, size, has_cache, moves):
    """Rows open, grow, are cut, move on, share their prefix and close."""
    sizes = GroupSizes(groups, size)
    cache = RadixCache(size) if has_cache else None
    store = KVStore(StoreSizes(8, 32 * size, 120, size, sizes), cache)
    rows: dict[int, np.ndarray] = {}
    committed: dict[int, int] = {}
    for move_, which, pages in moves:
        if move_ == "o":
            tokens = np.arange(32 * size) + 1000 * (np.arange(32 * size) >= which * size)
            prefix = None if cache is None else store.match(tokens, "")
            length = 0 if prefix is None else prefix.length
            with store.locked(prefix):
                if store.table.num_free_rows and sizes.of(length, 0, length) <= store.available_slots:
                    row = store.open_row(prefix)
                    rows[row], committed[row] = tokens, length
        elif rows:
            row = list(rows)[which % len(rows)]
            target = pages * size
            if move_ == "g":
                before = store.allocator.num_held_slots
                if not store.grow(np.array([row]), np.array([target])):
                    assert store.allocator.num_held_slots <= before
            elif move_ == "t":
                store.trim(np.array([row]), np.array([max(target, committed[row], store.num_shared(row))]))
            elif move_ == "m":
                committed[row] = max(committed[row], min(target, int(store.allocated[row])))
                store.groups.move(np.array([row]), np.array([committed[row]]))
            elif move_ == "s" and cache is not None:
                store.share_prefix(row, rows[row], committed[row], "", 0)
                store.pass_fence(0)
            else:
                gained, before = store.slots_gained_without([row]), store.available_slots
                tokens = rows.pop(row)
                store.close_row(Departure(0, row, None if cache is None else tokens, committed[row], ""), 0)
                assert store.available_slots == before + gained
        store.check()
    for row in list(rows):
        store.close_row(Departure(0, row, None, 0, ""), 0)
    assert store.num_request_slots == 0
    if cache is not None:
        store.forget()
    assert store.allocator.num_held_slots == 0


@pytest.mark.parametrize(
    "group, key",
    [
        (KVGroup(window=1), "window"),
        (KVGroup(window=-2), "window"),
        (KVGroup(pages=0.0), "pages"),
        (KVGroup(states=0), "states"),
        (KVGroup(capacity=0), "capacity"),
    ],
)
def test_a_group_that_cannot_be_is_refused_by_its_key(group, key):
    assert [problem.key for problem in group.problems("groups[0]")] == [f"groups[0].{key}"]
