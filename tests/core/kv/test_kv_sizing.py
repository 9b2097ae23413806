"""Reservations: worked examples, and a simulation of rounds that must never leave its reserve."""

import numpy as np
import pytest
from foredraft.core.contract.step import PLAIN_ROUND, RoundShape
from foredraft.core.kv.moves import draft_branch_layout
from foredraft.core.kv.request_table import (
    ceil_to_page,
    get_alloc_len_per_decode,
    recurrent_state_slots,
    request_table_width,
    reserve_per_decode,
    reserve_per_multi_step,
)
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(0, 2**40), st.integers(1, 130))
def test_ceil_to_page(x, page_size):
    up = ceil_to_page(x, page_size)
    assert up % page_size == 0 and x <= up < x + page_size
    array = ceil_to_page(np.array([x, x + 1]), page_size)
    assert array.dtype == np.int64
    assert array.tolist() == [up, ceil_to_page(x + 1, page_size)]


@pytest.mark.parametrize(
    ("shape", "page_size", "has_draft_kv", "expected"),
    [
        (PLAIN_ROUND, 16, True, 1),
        (RoundShape(3, 1, 4), 1, True, 4),
        (RoundShape(7, 1, 8), 16, True, 8),
        (RoundShape(3, 4, 8), 1, True, 12),
        (RoundShape(3, 4, 16), 1, True, 16),
        (RoundShape(3, 4, 8), 16, True, 128),
        (RoundShape(3, 4, 8), 2, True, 16),
        (RoundShape(3, 4, 8), 3, True, 24),
        (RoundShape(2, 2, 64), 4, True, 64),
        (RoundShape(3, 4, 8), 16, False, 12),
        (RoundShape(0, 1, 1), 1, True, 1),
    ],
)
def test_slots_of_a_round(shape, page_size, has_draft_kv, expected):
    assert get_alloc_len_per_decode(shape, page_size, has_draft_kv) == expected


def test_the_reserve_counts_the_rounds_in_flight():
    assert (reserve_per_decode(8, overlap=False), reserve_per_decode(8, overlap=True)) == (8, 16)
    assert reserve_per_multi_step(8, max_rounds=5, rounds_in_flight=1) == 48
    assert reserve_per_multi_step(8, max_rounds=1, rounds_in_flight=1) == reserve_per_decode(8, overlap=True)


def test_widths_and_states():
    assert request_table_width(1000, 24, 16) == 1024
    assert request_table_width(1000, 25, 16) == 1040
    assert recurrent_state_slots(10, 8) == 90
    assert recurrent_state_slots(10, None) == 10


@given(
    st.integers(0, 50),
    st.sampled_from([1, 2, 3, 16]),
    st.sampled_from([1, 2, 4]),
    st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True),
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 100)), max_size=12),
)
def test_no_round_writes_past_its_reserve(prompt_len, page_size, topk, candidates, tree_size, rounds):
    """Overlap mode, any candidate in any round: round k + 1 is reserved before round k's length is known."""
    ranges = [(steps, steps + 1 if topk == 1 else tree_size) for steps in candidates]
    max_nodes = max(nodes if steps else 1 for steps, nodes in ranges)
    alloc_len = get_alloc_len_per_decode(RoundShape(max(candidates), topk, max_nodes), page_size)
    reserve = reserve_per_decode(alloc_len, overlap=True)
    allocated, seen, actual = np.array([0]), prompt_len, prompt_len
    for choice, luck in rounds:
        steps, nodes = ranges[choice % len(ranges)]
        nodes = nodes if steps else 1
        allocated = np.maximum(allocated, ceil_to_page(np.array([seen]) + reserve, page_size))
        if steps and topk > 1:
            written = int(draft_branch_layout(np.array([actual]), page_size, topk, steps).branch_starts.max()) + steps
        else:
            written = actual + steps
        assert max(written, actual + nodes) <= allocated[0]
        assert allocated[0] % page_size == 0 and allocated[0] - seen < reserve + page_size
        seen, actual = actual, actual + 1 + luck % min(nodes, steps + 1)
