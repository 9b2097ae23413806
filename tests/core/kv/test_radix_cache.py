"""The radix cache against a store of single pages that knows no tree, no split and no heap."""

from dataclasses import dataclass
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from foretoken.core.errors import ConfigError, InvariantViolation
from foretoken.core.kv.allocator import KVAllocator
from foretoken.core.kv.eviction import EVICTION_POLICIES, register_eviction_policy
from foretoken.core.kv.radix import InvalidTokens, RadixCache, StaleNode
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule


@dataclass
class Page:
    slots: list[int]
    last_access: int
    created: int
    num_hits: int = 0
    alive: bool = True


class PageStore:
    """Every cached page under the whole prefix that it ends: (namespace, keys up to the page's end) → Page."""

    def __init__(self, page_size, key_kind, policy):
        self.page_size, self.key_kind, self.policy = page_size, key_kind, policy
        self.pages = {}
        self.clock = 0
        self.locked = []  # the last prefix of each live lock, as often as it is locked

    def keys(self, tokens):
        return tuple(tokens) if self.key_kind == "token" else tuple(pairwise(tokens))

    def cached(self, keys, namespace, limit):
        """The prefixes of `keys[:limit]` that are cached without a gap, shortest first."""
        found = []
        for end in range(self.page_size, min(limit, len(keys)) + 1, self.page_size):
            if (namespace, keys[:end]) not in self.pages:
                break
            found.append((namespace, keys[:end]))
        return found

    def touch(self, prefixes, hit):
        self.clock += 1
        for prefix in prefixes:
            self.pages[prefix].last_access = self.clock
            self.pages[prefix].num_hits += hit

    def slots(self, prefixes):
        return [slot for prefix in prefixes for slot in self.pages[prefix].slots]

    def add(self, keys, namespace, slots):
        """Cache the aligned part; return (positions known before, canonical slots, duplicates, prefixes)."""
        aligned = len(slots) // self.page_size * self.page_size
        known = self.cached(keys, namespace, aligned)
        self.touch(known, hit=0)
        num_known = len(known) * self.page_size
        duplicates = [mine for mine, theirs in zip(slots, self.slots(known), strict=False) if mine != theirs]
        for end in range(num_known + self.page_size, aligned + 1, self.page_size):
            self.pages[namespace, keys[:end]] = Page(slots[end - self.page_size : end], self.clock, self.clock)
        prefixes = self.cached(keys, namespace, aligned)
        return num_known, self.slots(prefixes), duplicates, prefixes

    def is_protected(self, prefix):
        namespace, keys = prefix
        return any(name == namespace and held[: len(keys)] == keys for name, held in self.locked)

    def is_leaf(self, prefix):
        namespace, keys = prefix
        longer = len(keys) + self.page_size
        return not any(n == namespace and len(k) == longer and k[: len(keys)] == keys for n, k in self.pages)

    def evict(self, num_slots):
        """One page at a time: the unlocked leaf page that the policy puts first."""
        freed = []
        while len(freed) < num_slots:
            leaves = [p for p in self.pages if self.is_leaf(p) and not self.is_protected(p)]
            if not leaves:
                break
            first = min(leaves, key=lambda prefix: self.priority(self.pages[prefix]))
            page = self.pages.pop(first)
            page.alive = False
            freed += page.slots
        return freed

    def priority(self, page):
        by_policy = {"lru": page.last_access, "fifo": page.created, "lfu": (page.num_hits, page.last_access)}
        return by_policy[self.policy]


class CacheTwin:
    """A cache and its model, sharing one pool with a caller: who holds which slot is recounted after every operation."""

    def __init__(self, page_size, key_kind, policy, num_slots):
        self.page_size = page_size
        self.cache = RadixCache(page_size, key_kind, policy)
        self.model = PageStore(page_size, key_kind, policy)
        self.allocator = KVAllocator(num_slots // page_size, page_size)
        self.handles = []  # (node, prefix, its page) as matched or inserted, locked or not
        self.locks = []  # (node, prefix) of each lock that is held
        self.queries = self.hits = 0

    def match(self, tokens, namespace, cap, count):
        keys = self.model.keys(tokens)
        found = self.model.cached(keys, namespace, len(keys) if cap is None else cap)
        self.model.touch(found, hit=1)
        assert self.cache.peek(tokens, namespace, cap) == len(found) * self.page_size
        match = self.cache.match(np.array(tokens, dtype=np.int64), namespace, cap, count=count)
        assert match.length == len(found) * self.page_size
        assert match.slots.dtype == np.int32 and match.slots.tolist() == self.model.slots(found)
        self.keep_handle(match.node, found)
        self.queries += len(tokens) * count
        self.hits += match.length * count

    def insert(self, tokens, namespace, num_slots, start_cached):
        """What a request does at its end: its slots are a cached prefix, if it had one, and its own."""
        keys = self.model.keys(tokens)
        num_slots = min(num_slots, len(keys))
        shared = []
        if start_cached:
            prefixes = self.model.cached(keys, namespace, num_slots)
            shared = self.model.slots(prefixes[: len(prefixes) // 2 + 1])
        own_size = -(-(num_slots - len(shared)) // self.page_size) * self.page_size
        if not self.allocator.can_allocate(own_size):
            return
        own = self.allocator.allocate(own_size)
        slots = np.concatenate((np.array(shared, dtype=np.int32), own))[:num_slots]
        known, canonical, duplicates, prefixes = self.model.add(keys, namespace, slots.tolist())
        insertion = self.cache.insert(tokens, slots, namespace)
        slots[:] = 0  # The cache must not follow the caller's buffer.
        assert insertion.num_already_cached == known
        assert insertion.canonical.tolist() == canonical
        assert insertion.duplicates.tolist() == duplicates
        self.allocator.free(insertion.duplicates)
        self.allocator.free(own[(num_slots - len(shared)) // self.page_size * self.page_size :])
        self.keep_handle(insertion.node, prefixes)

    def keep_handle(self, node, prefixes):
        if prefixes:
            self.handles.append((node, prefixes[-1], self.model.pages[prefixes[-1]]))
        else:
            assert node is self.cache.root

    def lock(self, choice):
        if not self.handles:
            self.cache.lock(self.cache.root)
            self.cache.unlock(self.cache.root)
            return
        node, prefix, page = self.handles[-1 - choice % len(self.handles)]
        if page.alive:
            self.cache.lock(node)
            self.locks.append((node, prefix))
            self.model.locked.append(prefix)
        else:
            with pytest.raises(StaleNode):
                self.cache.lock(node)

    def unlock(self, choice):
        if self.locks:
            node, prefix = self.locks.pop(choice % len(self.locks))
            self.cache.unlock(node)
            self.model.locked.remove(prefix)

    def evict(self, num_slots):
        expected = self.model.evict(num_slots)
        evictable = self.cache.evictable_slots
        freed = self.cache.evict(num_slots)
        assert freed.size >= min(num_slots, evictable)
        assert sorted(freed.tolist()) == sorted(expected)
        self.allocator.free(freed)

    def clear(self):
        expected = self.model.evict(10**6)
        freed = self.cache.clear()
        assert sorted(freed.tolist()) == sorted(expected)
        assert self.cache.evictable_slots == 0
        self.allocator.free(freed)

    def recount(self):
        self.cache.check([node for node, _ in self.locks])
        self.allocator.check([self.cache.cached_slots()])
        protected = sum(self.model.is_protected(prefix) for prefix in self.model.pages) * self.page_size
        assert self.cache.protected_slots == protected
        assert self.cache.evictable_slots == len(self.model.pages) * self.page_size - protected
        assert (self.cache.queries, self.cache.hits) == (self.queries, self.hits)
        assert type(self.cache.queries) is type(self.cache.hits) is int

    def drain(self):
        """Drained and flushed, everything is free again (ALLOC-15)."""
        while self.locks:
            self.unlock(0)
        self.clear()
        self.cache.check([])
        assert self.allocator.num_free_slots == self.allocator.num_total_slots


# Prompts of a few shared segments, so that paths are long, branch, and end inside one another.
SEGMENTS = [[0], [2**32 - 1], [0, 1], [1, 1, 2**31], [0, 1, 1, 0, 1, 2**31]]
NAMESPACES = ["", "", "", "lora"]
POLICIES = ["lru", "fifo", "lfu"]


def joined(segments):
    return [token for segment in segments for token in segment]


class RadixMachine(RuleBasedStateMachine):
    """Short histories, shrunk to the smallest that fails."""

    tokens = st.lists(st.sampled_from(SEGMENTS), max_size=4).map(joined)
    namespaces = st.sampled_from(NAMESPACES)
    choices = st.integers(0, 9)

    @initialize(
        page_size=st.sampled_from([1, 2, 3]),
        key_kind=st.sampled_from(["token", "bigram"]),
        policy=st.sampled_from(POLICIES),
        num_slots=st.sampled_from([12, 30, 90]),
    )
    def make(self, page_size, key_kind, policy, num_slots):
        self.twin = CacheTwin(page_size, key_kind, policy, num_slots)

    @rule(tokens=tokens, namespace=namespaces, cap=st.none() | st.integers(-1, 16), count=st.booleans())
    def match(self, tokens, namespace, cap, count):
        self.twin.match(tokens, namespace, cap, count)

    @rule(tokens=tokens, namespace=namespaces, num_slots=st.integers(0, 24), start_cached=st.booleans())
    def insert(self, tokens, namespace, num_slots, start_cached):
        self.twin.insert(tokens, namespace, num_slots, start_cached)

    @rule(choice=choices)
    def lock(self, choice):
        self.twin.lock(choice)

    @rule(choice=choices)
    def unlock(self, choice):
        self.twin.unlock(choice)

    @rule(num_slots=st.integers(-1, 14))
    def evict(self, num_slots):
        self.twin.evict(num_slots)

    @rule()
    def clear(self):
        self.twin.clear()

    @invariant()
    def agrees(self):
        if hasattr(self, "twin"):
            self.twin.recount()

    def teardown(self):
        if hasattr(self, "twin"):
            self.twin.drain()


RadixMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestRadixMachine = RadixMachine.TestCase


@pytest.mark.parametrize("seed", range(24))
def test_a_long_history_agrees_with_the_model(seed):
    """Long seeded histories reach what short ones do not: deep paths, full pools, many splits under locks."""
    random = Random(seed)
    page_size = random.choice([1, 1, 2, 3])
    twin = CacheTwin(page_size, random.choice(["token", "bigram"]), POLICIES[seed % 3], random.choice([30, 90]))
    for _ in range(250):
        operation = random.choices(("match", "insert", "lock", "unlock", "evict", "clear"), (8, 10, 4, 5, 6, 0.1))[0]
        tokens = joined(random.choices(SEGMENTS, k=random.randint(0, 5)))
        namespace = random.choice(NAMESPACES)
        if operation == "match":
            twin.match(tokens, namespace, random.choice([None, random.randint(0, 16)]), random.random() < 0.5)
        elif operation == "insert":
            twin.insert(tokens, namespace, random.randint(0, 24), random.random() < 0.5)
        elif operation in ("lock", "unlock"):
            getattr(twin, operation)(random.randint(0, 9))
        elif operation == "evict":
            twin.evict(random.choice([1, 1, 2, 5, 14]))
        else:
            twin.clear()
        twin.recount()
    twin.drain()


def cache_of(*prompts, page_size=1, **options):
    """A cache with the given prompts, in slots from `page_size` upwards."""
    cache, next_slot = RadixCache(page_size, **options), page_size
    for prompt in prompts:
        num_slots = len(prompt) if cache.key_kind == "token" else max(len(prompt) - 1, 0)
        pages = -(-num_slots // page_size)
        cache.insert(prompt, np.arange(next_slot, next_slot + num_slots))
        next_slot += pages * page_size
    return cache


def test_a_match_is_page_aligned():
    cache = cache_of([1, 2, 3, 4, 5, 6, 7, 8], page_size=4)
    assert cache.match([1, 2, 3, 4, 5, 6, 7, 9]).slots.tolist() == [4, 5, 6, 7]
    assert cache.match([1, 2, 3]).length == 0
    cache.check()


def test_a_full_hit_can_leave_a_token_to_compute():
    cache = cache_of([1, 2, 3, 4], page_size=2)
    assert cache.match([1, 2, 3, 4]).length == 4
    assert cache.match([1, 2, 3, 4], max_length=3).length == 2


def test_bigrams_look_one_token_ahead():
    cache = cache_of([1, 2, 3, 4], key_kind="bigram")
    assert cache.match([1, 2, 3, 4]).length == 3
    # The draft KV of position 2 depends on token 3, which differs here.
    assert cache.match([1, 2, 3, 5]).length == 2
    assert cache_of([1, 2, 3, 4]).match([1, 2, 3, 5]).length == 3
    assert cache.match([1]).length == cache.match([]).length == 0


def test_great_token_ids_do_not_wrap_into_each_other():
    big = 2**32 - 1
    cache = cache_of([0, big, 0], key_kind="bigram")
    for other in ([1, big, 0], [0, 0, 0], [big, 0, big]):
        assert cache.match(other).length == 0
    assert cache.match([0, big, 0]).length == 2


@pytest.mark.parametrize("tokens", [[1, -1], [2**32], [1.5], [[1, 2]], np.array([2**64 - 1], dtype=np.uint64)])
@pytest.mark.parametrize("key_kind", ["token", "bigram"])
def test_what_is_no_token_id_is_refused(tokens, key_kind):
    cache = RadixCache(key_kind=key_kind)
    with pytest.raises(InvalidTokens):
        cache.insert(tokens, np.array([], dtype=np.int32))
    with pytest.raises(InvalidTokens):
        cache.match(tokens)
    assert cache.queries == 0


def test_namespaces_never_share_and_equal_ones_do():
    cache = RadixCache()
    cache.insert([1, 2, 3], np.array([1, 2, 3]), "tenant a")
    assert cache.match([1, 2, 3], "tenant b").length == cache.match([1, 2, 3]).length == 0
    assert cache.match([1, 2, 3], "tenant a").slots.tolist() == [1, 2, 3]
    own = cache.insert([1, 2, 3], np.array([4, 5, 6]), "tenant b")
    assert own.duplicates.size == 0 and own.canonical.tolist() == [4, 5, 6]
    cache.check()


def test_a_duplicate_points_to_the_canonical_slots():
    cache = cache_of([1, 2, 3, 4], page_size=2)
    insertion = cache.insert([1, 2, 3, 4, 5, 6, 7], np.array([2, 3, 8, 9, 10, 11, 12]))
    assert insertion.num_already_cached == 4
    assert insertion.canonical.tolist() == [2, 3, 4, 5, 10, 11]
    assert insertion.duplicates.tolist() == [8, 9]
    cache.check()


def test_a_page_that_shares_a_part_of_its_slots_is_a_contradiction():
    cache = cache_of([1, 2], page_size=2)
    with pytest.raises(InvariantViolation, match="RADIX-10"):
        cache.insert([1, 2], np.array([2, 9]))


def test_a_split_keeps_the_lock_on_both_halves():
    cache = cache_of([1, 2, 3, 4])
    handle = cache.match([1, 2, 3, 4]).node
    cache.lock(handle)
    upper = cache.match([1, 2]).node
    assert upper is not handle and upper.locks == handle.locks == 1
    assert cache.evict(4).size == 0
    cache.unlock(handle)
    assert sorted(cache.evict(4).tolist()) == [1, 2, 3, 4]


def test_a_lock_protects_the_ancestors_alone():
    cache = cache_of([1, 2, 3], [1, 2, 4], [5])
    cache.lock(cache.match([1, 2, 4]).node)
    assert cache.protected_slots == 3
    assert sorted(cache.evict(100).tolist()) == [3, 7]


def test_what_is_evicted_is_a_miss_also_with_other_content_in_its_slots():
    cache = cache_of([1, 2, 3])
    freed = cache.evict(3)
    assert cache.match([1, 2, 3]).length == 0
    cache.insert([7, 8, 9], freed)
    assert cache.match([1, 2, 3]).length == 0
    assert cache.match([7, 8, 9]).slots.tolist() == freed.tolist()


def test_a_long_leaf_gives_only_what_is_needed_from_its_end():
    cache = cache_of(range(12), page_size=4)
    assert cache.evict(5).tolist() == [8, 9, 10, 11, 12, 13, 14, 15]
    assert cache.match(range(12)).slots.tolist() == [4, 5, 6, 7]
    cache.check()


@pytest.mark.parametrize(
    ("policy", "order"),
    # Inserted a, b, c; then a is matched twice and b once, the last of all.
    [("lru", ["c", "a", "b"]), ("fifo", ["a", "b", "c"]), ("lfu", ["c", "b", "a"])],
)
def test_the_policy_decides_who_goes_first(policy, order):
    prompts = {"a": [1], "b": [2], "c": [3]}
    cache = cache_of(*prompts.values(), policy=policy)
    for prompt in ("a", "a", "b"):
        cache.match(prompts[prompt])
    slots = {1: "a", 2: "b", 3: "c"}
    assert [slots[int(cache.evict(1)[0])] for _ in range(3)] == order


def test_a_peek_does_not_rejuvenate():
    cache = cache_of([1], [2])
    cache.match([2])
    assert cache.peek([1]) == 1
    assert (cache.hits, cache.queries) == (1, 1)
    assert cache.evict(1).tolist() == [1]


def test_a_policy_can_be_registered_once():
    register_eviction_policy("longest first", lambda node: -node.slots.size)
    try:
        cache = cache_of([1], [2, 3, 4], policy="longest first")
        assert sorted(cache.evict(3).tolist()) == [2, 3, 4]
        with pytest.raises(ConfigError, match="taken"):
            register_eviction_policy("longest first", lambda node: 0)
    finally:
        del EVICTION_POLICIES["longest first"]


def test_an_unknown_policy_names_the_nearest():
    with pytest.raises(ConfigError, match=r"policy: unknown eviction policy 'lruu'.*did you mean 'lru'"):
        RadixCache(policy="lruu")
    with pytest.raises(ConfigError, match="neither 'token' nor 'bigram'"):
        RadixCache(key_kind="trigram")


def test_one_unlock_too_many_is_a_contradiction():
    cache = cache_of([1, 2])
    with pytest.raises(InvariantViolation, match="RADIX-02"):
        cache.unlock(cache.match([1]).node)
    cache.check([])


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
