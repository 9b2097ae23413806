"""The radix cache at its edges, and its `check` against planted defects;
histories are the prefix cache contract's part."""

import numpy as np
import pytest
from foredraft.core.errors import ConfigError, InvariantViolation
from foredraft.core.kv.radix import InvalidTokens, RadixCache, StaleNode


def cache_of(*prompts, page_size=1, **options):
    """A cache with the given prompts, in slots from `page_size` upwards."""
    cache, next_slot = RadixCache(page_size, **options), page_size
    for prompt in prompts:
        num_slots = len(prompt) if cache.key_kind == "token" else max(len(prompt) - 1, 0)
        pages = -(-num_slots // page_size)
        cache.insert(prompt, np.arange(next_slot, next_slot + num_slots))
        next_slot += pages * page_size
    return cache


@pytest.mark.parametrize(
    ("tokens", "named"),
    [
        ([0, 1, -1], "token id -1 "),
        ([0, 2**31 - 1, 2**32], "token id 4294967296 "),
        ([1.5], "float64 "),
        ([[1, 2]], r"\(1, 2\)"),
        (np.array([2**64 - 1], dtype=np.uint64), "token id "),
    ],
)
@pytest.mark.parametrize("key_kind", ["token", "bigram"])
def test_what_is_no_token_id_is_refused_and_named(tokens, named, key_kind):
    cache = RadixCache(key_kind=key_kind)
    with pytest.raises(InvalidTokens, match=named):
        cache.insert(tokens, np.array([], dtype=np.int32))
    with pytest.raises(InvalidTokens, match=named):
        cache.match(tokens)
    assert cache.queries == 0


def test_a_page_that_shares_a_part_of_its_slots_is_a_contradiction():
    cache = cache_of([1, 2], page_size=2)
    with pytest.raises(InvariantViolation, match="RADIX-10"):
        cache.insert([1, 2], np.array([2, 9]))


def test_a_long_leaf_gives_only_what_is_needed_from_its_end():
    cache = cache_of(range(12), page_size=4)
    assert cache.evict(5).tolist() == [8, 9, 10, 11, 12, 13, 14, 15]
    assert cache.match(range(12)).slots.tolist() == [4, 5, 6, 7]
    cache.check()


def test_a_peek_does_not_rejuvenate():
    cache = cache_of([1], [2])
    cache.match([2])
    assert cache.peek([1]) == 1
    assert (cache.hits, cache.queries) == (1, 1)
    assert cache.evict(1).tolist() == [1]


def test_an_unknown_policy_names_the_nearest():
    with pytest.raises(ConfigError, match=r"policy: unknown eviction policy 'lruu'.*did you mean 'lru'"):
        RadixCache(policy="lruu")
    with pytest.raises(ConfigError, match="neither 'token' nor 'bigram'"):
        RadixCache(key_kind="trigram")


def test_clear_spares_what_is_locked_and_stales_the_rest():
    cache = cache_of([1, 2], [3])
    kept, gone = cache.match([1], count=False).node, cache.match([3], count=False).node
    cache.lock(kept)
    assert sorted(cache.clear().tolist()) == [2, 3] and cache.evictable_slots == 0
    with pytest.raises(StaleNode):
        cache.lock(gone)
    assert (cache.queries, cache.hits) == (0, 0) and cache.cached_slots().tolist() == [1]
    cache.check([kept])


def test_more_slots_than_keys_is_a_mistake():
    with pytest.raises(AssertionError, match="3 slots for 2 keys"):
        RadixCache(key_kind="bigram").insert([1, 2, 3], np.array([1, 2, 3]))


def test_long_prompts_stay_vector_operations():
    """A match of 100,000 tokens compares arrays: it must not make an object for each token."""
    import sys

    tokens = np.arange(100_000) % 997
    cache = cache_of(tokens, page_size=16)
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        match = cache.match(tokens)
    finally:
        sys.setprofile(None)
    assert match.length == 100_000
    assert calls < 200


def lock_too_few(cache):
    cache.match([1, 2]).node.parent.locks -= 1


def lock_too_many(cache):
    node = cache.match([1]).node
    cache.lock(node)


def count_wrong(cache):
    cache._num_evictable += 1


def cut_link(cache):
    node = cache.match([1, 2]).node
    node.parent = cache.root


def change_key(cache):
    cache.match([3]).node.keys[0] = 9


def share_slot(cache):
    cache.match([3]).node.slots[0] = 1


def take_dummy(cache):
    cache.match([3]).node.slots[0] = 0


def empty_node(cache):
    node = cache.match([3]).node
    node.keys, node.slots = node.keys[:0], node.slots[:0]


def forget_leaf(cache):
    cache._queue._heap.clear()


def priority_falls(cache):
    cache.match([3]).node.last_access = -1


@pytest.mark.parametrize(
    ("defect", "invariant"),
    [
        (lock_too_few, "RADIX-02"),
        (lock_too_many, "RADIX-06"),
        (count_wrong, "RADIX-05"),
        (cut_link, "RADIX-07"),
        (change_key, "RADIX-07"),
        (share_slot, "ALLOC-06"),
        (take_dummy, "ALLOC-12"),
        (empty_node, "RADIX-07"),
        (forget_leaf, "RADIX-08"),
        (priority_falls, "RADIX-08"),
    ],
)
def test_check_finds_a_planted_defect(defect, invariant):
    cache = cache_of([1], [1, 2], [3])
    handle = cache.match([1, 2]).node
    cache.lock(handle)
    cache.check([handle])
    defect(cache)
    with pytest.raises(InvariantViolation) as caught:
        cache.check([handle])
    assert caught.value.invariant == invariant


def test_check_finds_a_lock_whose_node_is_gone():
    cache = cache_of([1])
    handle = cache.match([1]).node
    cache.evict(1)
    with pytest.raises(InvariantViolation, match="RADIX-04"):
        cache.check([handle])
