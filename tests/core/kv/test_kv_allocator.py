"""The allocator against a model of plain lists, and its `check` against planted defects."""

import numpy as np
import pytest
from foretoken.core.errors import InvalidFree, InvariantViolation, KVPoolExhausted
from foretoken.core.kv.allocator import InvalidAllocation, KVAllocator
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule


def slots_of(pages, page_size):
    return [page * page_size + offset for page in pages for offset in range(page_size)]


class AllocatorMachine(RuleBasedStateMachine):
    """Every call beside a model that knows one list of free pages and one set of held ones."""

    @initialize(num_pages=st.integers(0, 7), page_size=st.sampled_from([1, 2, 3, 4, 16]))
    def make(self, num_pages, page_size):
        self.allocator = KVAllocator(num_pages, page_size)
        self.page_size = page_size
        self.num_pages = num_pages
        self.free_pages = list(range(num_pages, 0, -1))
        self.held_pages = []
        self.snapshots = []

    @rule(num_pages=st.integers(-1, 8), extra=st.integers(0, 2))
    def allocate(self, num_pages, extra):
        num_slots = num_pages * self.page_size + extra
        before = self.allocator.snapshot()
        allowed = self.allocator.can_allocate(num_slots)
        assert allowed == (0 <= num_slots <= len(self.free_pages) * self.page_size and num_slots % self.page_size == 0)
        if not allowed:
            refused = InvalidAllocation if num_slots < 0 or num_slots % self.page_size else KVPoolExhausted
            with pytest.raises(refused):
                self.allocator.allocate(num_slots)
            self.assert_unchanged(before)
            return
        pages = [self.free_pages.pop() for _ in range(num_slots // self.page_size)]
        slots = self.allocator.allocate(num_slots)
        assert slots.dtype == np.int32
        assert slots.tolist() == slots_of(pages, self.page_size)
        self.held_pages += pages

    @rule(data=st.data())
    def free(self, data):
        pages = data.draw(st.lists(st.sampled_from(self.held_pages), unique=True)) if self.held_pages else []
        self.allocator.free(np.array(slots_of(pages, self.page_size), dtype=np.int32))
        self.free_pages += pages[::-1]
        self.held_pages = [page for page in self.held_pages if page not in pages]

    @rule(data=st.data(), dtype=st.sampled_from([np.int32, np.int64]))
    def free_anything(self, data, dtype):
        """Any pages at all: refused unless each is held and given once, and then nothing changes."""
        pages = data.draw(st.lists(st.integers(-1, self.num_pages + 2), min_size=1, max_size=4))
        slots = slots_of(pages, self.page_size)
        if data.draw(st.booleans()):
            slots = slots[1:]
        whole = len(slots) == len(pages) * self.page_size or (self.page_size == 1 and slots == slots_of(pages[1:], 1))
        pages = pages if len(slots) == len(pages) * self.page_size else pages[1:]
        if whole and len(set(pages)) == len(pages) and all(page in self.held_pages for page in pages):
            self.allocator.free(np.array(slots, dtype=dtype))
            self.free_pages += pages[::-1]
            self.held_pages = [page for page in self.held_pages if page not in pages]
            return
        before = self.allocator.snapshot()
        with pytest.raises(InvalidFree):
            self.allocator.free(np.array(slots, dtype=dtype))
        self.assert_unchanged(before)

    @rule()
    def take_snapshot(self):
        self.snapshots.append((self.allocator.snapshot(), list(self.free_pages), list(self.held_pages)))

    @rule(data=st.data())
    def restore(self, data):
        if self.snapshots:
            snapshot, free_pages, held_pages = data.draw(st.sampled_from(self.snapshots))
            self.allocator.restore(snapshot)
            self.free_pages, self.held_pages = list(free_pages), list(held_pages)

    @invariant()
    def agrees(self):
        if not hasattr(self, "allocator"):
            return
        held = np.array(slots_of(self.held_pages, self.page_size), dtype=np.int32)
        self.allocator.check([held])
        assert self.allocator.num_free_slots == len(self.free_pages) * self.page_size
        assert self.allocator.num_held_slots == held.size
        assert self.allocator.num_total_slots == self.num_pages * self.page_size

    def assert_unchanged(self, before):
        after = self.allocator.snapshot()
        assert before.free_pages.tobytes() == after.free_pages.tobytes()
        self.agrees()


AllocatorMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
TestAllocatorMachine = AllocatorMachine.TestCase


def test_the_dummy_page_is_never_handed_out():
    allocator = KVAllocator(num_pages=3, page_size=4)
    assert allocator.allocate(12).tolist() == list(range(4, 16))
    with pytest.raises(KVPoolExhausted, match="4 KV slots, 0 of 12"):
        allocator.allocate(4)


def test_nothing_is_something():
    allocator = KVAllocator(num_pages=2)
    empty = allocator.allocate(0)
    assert empty.shape == (0,) and empty.dtype == np.int32
    allocator.free(empty)
    assert allocator.num_free_slots == 2


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


def test_a_negative_slot_does_not_count_from_the_end():
    allocator = KVAllocator(num_pages=3)
    held = allocator.allocate(3)
    with pytest.raises(InvalidFree, match="page -1 is outside"):
        allocator.free(np.array([-1], dtype=np.int32))
    allocator.check([held])


def test_the_same_history_gives_the_same_ids():
    def history():
        allocator = KVAllocator(num_pages=50, page_size=2)
        ids, held = [], []
        for i in range(40):
            held.append(allocator.allocate(2 * (i % 4)))
            ids += held[-1].tolist()
            if i % 3 == 2:
                allocator.free(held.pop(i % len(held)))
        return ids

    assert history() == history()


def test_a_snapshot_of_another_pool_is_refused():
    with pytest.raises(AssertionError, match="the snapshot is of 3 pages"):
        KVAllocator(num_pages=4).restore(KVAllocator(num_pages=3).snapshot())


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
