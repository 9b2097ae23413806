"""The allocator's refusals, and its `check` against planted defects; histories are the allocator contract's part."""

import numpy as np
import pytest
from foredraft.core.errors import InvalidFree, InvariantViolation, KVPoolExhausted
from foredraft.core.kv.allocator import InvalidAllocation, KVAllocator


def test_the_dummy_page_is_never_handed_out():
    allocator = KVAllocator(num_pages=3, page_size=4)
    assert allocator.allocate(12).tolist() == list(range(4, 16))
    with pytest.raises(KVPoolExhausted, match="4 KV slots, 0 of 12"):
        allocator.allocate(4)
    for not_pages in (-4, 3):
        with pytest.raises(InvalidAllocation):
            allocator.allocate(not_pages)


def test_what_is_handed_out_does_not_follow_the_free_list():
    allocator = KVAllocator(num_pages=4)
    first, second = allocator.allocate(2), allocator.allocate(2)
    allocator.free(first)
    assert second.tolist() == [3, 4]


@pytest.mark.parametrize(
    ("slots", "why"),
    [
        ([0, 1, 2, 3], "dummy"),
        ([12, 13, 14, 15], "not held"),
        ([4, 5, 6, 7, 4, 5, 6, 7], "given twice"),
        ([4, 5, 6], "not whole pages"),
        ([5, 6, 7, 8], "one whole page"),
        ([7, 6, 5, 4], "one whole page"),
        ([400, 401, 402, 403], "outside 1..5"),
        ([2**32 + 4, 2**32 + 5, 2**32 + 6, 2**32 + 7], "outside"),
        ([-4, -3, -2, -1], "outside"),
    ],
)
def test_a_wrong_free_says_why(slots, why):
    allocator = KVAllocator(num_pages=5, page_size=4)
    held = allocator.allocate(8)
    with pytest.raises(InvalidFree, match=why):
        allocator.free(np.array(slots))
    allocator.check([held])


def push_page_twice(allocator):
    allocator._stack[0] = allocator._stack[1]


def push_dummy(allocator):
    allocator._stack[0] = 0


def forget_hold(allocator):
    allocator._held[1] = 0


def hold_free_page(allocator):
    allocator._held[6] = 1


def count_wrong(allocator):
    allocator._num_free_pages += 1


@pytest.mark.parametrize(
    ("defect", "invariants"),
    [
        (push_page_twice, {"ALLOC-02"}),
        (push_dummy, {"ALLOC-12"}),
        (forget_hold, {"ALLOC-05"}),
        (hold_free_page, {"ALLOC-05"}),
        (count_wrong, {"ALLOC-05"}),
    ],
)
def test_check_finds_a_planted_defect(defect, invariants):
    allocator = KVAllocator(num_pages=6)
    allocator.allocate(3)
    allocator.check()
    defect(allocator)
    with pytest.raises(InvariantViolation) as caught:
        allocator.check()
    assert caught.value.invariant in invariants


@pytest.mark.parametrize(
    ("holders", "invariant"),
    [
        ([[1, 2]], "ALLOC-01"),
        ([], "ALLOC-01"),
        ([[1, 2, 3], [4]], "ALLOC-03"),
        ([[1, 2, 3], [3]], "ALLOC-06"),
        ([[0, 1, 2, 3]], "ALLOC-12"),
        ([[1, 2, 3, 7]], "ALLOC-12"),
    ],
)
def test_check_finds_what_holders_get_wrong(holders, invariant):
    allocator = KVAllocator(num_pages=6)
    allocator.allocate(3)
    allocator.check([np.array([3]), np.array([1, 2])])
    with pytest.raises(InvariantViolation) as caught:
        allocator.check([np.array(slots, dtype=np.int32) for slots in holders])
    assert caught.value.invariant == invariant
