"""Moves after verify at their edges, and the layout of draft branches against loops over single positions."""

import numpy as np
import pytest
from foredraft.core.contract.step import RoundShape
from foredraft.core.errors import InvariantViolation
from foredraft.core.kv.moves import KVMovePlan, draft_branch_layout
from foredraft.core.kv.request_table import ceil_to_page, get_alloc_len_per_decode
from hypothesis import given
from hypothesis import strategies as st


def int32(values, shape=None):
    array = np.array(values, dtype=np.int32)
    return array if shape is None else array.reshape(shape)


def test_a_tree_may_have_fewer_nodes_than_lanes():
    plan = KVMovePlan.from_accept_index(int32([[0, 1, -1, -1]]), int32([2]), int32([[5, 6]]))
    assert plan.src.size == 0
    with pytest.raises(InvariantViolation, match="ACCEPT-16"):
        KVMovePlan.from_accept_index(int32([[0, 1, 1, -1]]), int32([3]), int32([[5, 6]]))


def test_an_idle_batch_moves_nothing():
    plan = KVMovePlan.from_accept_index(int32([], (0, 3)), int32([]), int32([], (0, 5)))
    plan.check(10, int32([], (0, 5)))
    assert plan.src.shape == plan.dst.shape == (0,) and plan.src.dtype == plan.dst.dtype == np.int32


@pytest.mark.parametrize("accept_index", [[[0, -1]], [[0, 5]]])
def test_a_live_lane_that_points_at_no_node_is_a_contradiction(accept_index):
    with pytest.raises(InvariantViolation, match="ACCEPT-16"):
        KVMovePlan.from_accept_index(int32(accept_index), int32([2]), int32([[4, 5, 6, 7, 8]]))


WINDOWS = int32([[10, 11, 12], [20, 21, 22], [0, 0, 0]])


@pytest.mark.parametrize(
    ("src", "dst", "why"),
    [
        ([12, 12], [11, 11], "written twice"),
        ([12], [21], "row 0 is moved to slot 21 of row 1"),
        ([12], [13], "belongs to no row"),
        ([14], [11], "belongs to no row"),
        ([30], [11], "outside the pool"),
        ([11], [30], "outside the pool"),
        ([-1], [11], "outside the pool"),
        ([0], [11], "of the sink is moved"),
        ([11, 12], [10], "2,. sources for .1,. targets"),
    ],
)
def test_a_move_out_of_bounds_is_found(src, dst, why):
    with pytest.raises(InvariantViolation, match=why) as caught:
        KVMovePlan(int32(src), int32(dst)).check(30, WINDOWS)
    assert caught.value.invariant == "ACCEPT-16"


def test_padding_lanes_share_the_sink():
    KVMovePlan(int32([12, 0, 0, 21]), int32([11, 0, 0, 0])).check(30, WINDOWS)


@given(
    st.lists(st.integers(0, 40), max_size=4), st.sampled_from([1, 2, 3, 4, 16]), st.integers(1, 4), st.integers(0, 8)
)
def test_branches_fill_pages_of_their_own(seq_lens, page_size, topk, steps):
    layout = draft_branch_layout(np.array(seq_lens, dtype=np.int64), page_size, topk, steps)
    assert layout.branch_starts.shape == (len(seq_lens), topk)
    moves = list(zip(*(a.tolist() for a in (layout.tail_rows, layout.tail_src, layout.tail_dst)), strict=True))
    alloc_len = get_alloc_len_per_decode(RoundShape(steps, topk, 1), page_size)
    expected_moves = []
    for row, seq_len in enumerate(seq_lens):
        tail, base = seq_len % page_size, seq_len - seq_len % page_size
        num_pages = 0
        while num_pages * page_size < tail + steps:
            num_pages += 1
        assert layout.pages_per_branch[row] == num_pages
        written = []
        for branch in range(topk):
            start = base + branch * num_pages * page_size + tail
            assert layout.branch_starts[row, branch] == start
            pages = {position // page_size for position in range(start, start + steps)}
            assert all(pages.isdisjoint(others) for others in written)
            written.append(pages)
            # The reservation of the round is enough for the last branch.
            assert start + steps <= ceil_to_page(seq_len + alloc_len, page_size)
            if branch and steps:
                expected_moves += [(row, base + i, start - tail + i) for i in range(tail)]
    assert sorted(moves) == sorted(expected_moves)


def test_the_tail_of_the_prefix_is_duplicated_for_each_further_branch():
    """Page size 4, 6 tokens, 3 branches of 3 steps: two pages each, tails at 12 and 20."""
    layout = draft_branch_layout(np.array([6]), 4, 3, 3)
    assert layout.branch_starts.tolist() == [[6, 14, 22]]
    table = np.zeros((3, 28), dtype=np.int32)
    table[2] = np.arange(100, 128)
    plan = layout.tail_moves(table, int32([2]))
    assert (plan.src.tolist(), plan.dst.tolist()) == ([104, 105, 104, 105], [112, 113, 120, 121])
    plan.check(200, table[2:3])
