"""The host-memory tier of the prefix cache: against a plain model, and in an engine's store."""

from __future__ import annotations

import numpy as np
import pytest
from foredraft.core.errors import InvariantViolation
from foredraft.core.kv.host_tier import HostTier
from hypothesis import given
from hypothesis import strategies as st

TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
CALLS = st.lists(st.tuples(st.booleans(), TEXTS, st.sampled_from(["", "lora"])), max_size=40)


def array(tokens) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


@given(calls=CALLS, num_pages=st.integers(0, 6), page_size=st.sampled_from([1, 2, 3]))
def test_the_tier_has_only_what_was_stored_and_never_more_than_its_room(calls, num_pages, page_size):
    tier, stored = HostTier(num_pages, page_size), set()
    for is_store, text, namespace in calls:
        tokens = array(text)
        found = tier.find(tokens, namespace, len(text))
        assert found % page_size == 0 and (not found or (namespace, tuple(text[:found])) in stored)
        if is_store:
            whole = len(text) // page_size * page_size
            stored |= {(namespace, tuple(text[:end])) for end in range(page_size, whole + 1, page_size)}
            num_new = tier.store(tokens, len(text), namespace)
            kept = tier.find(tokens, namespace, len(text))
            assert kept == found + num_new
            # What is stored now is evicted last: only a prefix larger than the whole tier is cut.
            assert kept == min(whole, num_pages * page_size)
        assert tier.num_held <= num_pages * page_size
        tier.check()


def test_a_prefix_that_was_used_again_outlives_an_older_one():
    tier = HostTier(num_pages=4, page_size=1)
    tier.store(array([1, 2]), 2, "")
    tier.store(array([3, 4]), 2, "")
    assert tier.find(array([1, 2, 9]), "", 3) == 2
    tier.store(array([5, 6]), 2, "")
    assert [tier.find(array(text), "", 2) for text in ([1, 2], [3, 4], [5, 6])] == [2, 0, 2]


def test_a_bigram_key_needs_the_token_behind_it():
    tier = HostTier(num_pages=4, page_size=1, key_kind="bigram")
    assert tier.store(array([1, 2, 3]), 2, "") == 2
    assert tier.find(array([1, 2, 4]), "", 3) == 1


def test_what_a_lost_process_had_is_gone():
    tier = HostTier(num_pages=4, page_size=2)
    tier.store(array([1, 2, 3]), 3, "")
    assert tier.num_stored == 2
    tier.forget()
    assert tier.num_held == 0 and tier.find(array([1, 2, 3]), "", 3) == 0
    tier.check()


def test_a_slot_without_an_owner_is_found():
    tier = HostTier(num_pages=4, page_size=1)
    tier._allocator.allocate(1)
    with pytest.raises(InvariantViolation, match="ALLOC"):
        tier.check()
