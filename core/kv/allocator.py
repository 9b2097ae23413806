"""KV slots: one allocator for token slots (page size 1) and for pages.

A slot is one token's place in the KV pool, a page is `page_size` neighbouring slots: `slot = page * page_size +
offset`.

    page 0               page 1               …        page num_pages
    ├ dummy: padding ┤   ├────────────── handed out and taken back, whole pages ──────────────┤

Page 0 is the padding dummy: padding lanes read and write it, so it is never handed out.

Ownership is single. A page is free, or it is held by exactly one holder: a request, or the prefix cache. Requests share
a cached prefix by locking the nodes of the cache's tree, never by holding the page twice. So a page has no reference
count, and "referenced" is one bit.

`PAGE_TRANSITIONS` is the life of a page. A page that a request computes is HELD until the request gives it to the
prefix cache or back. If a launched step may still touch it when its request is done with it, it is FENCED until that
step is committed. A cached page that requests read is SHARED. The allocator tells free pages from the others;
`KVStore.page_states` finds each page's state from all owners.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from ..errors import ForedraftError, InvalidFree, InvariantViolation, KVPoolExhausted

Slots = NDArray[np.int32]

MAX_SLOTS = 2**31 - 1
"""Slot ids are int32, on the device as well."""

_ONE = np.int32(1)


class PageState(IntEnum):
    FREE = 0
    HELD = 1  # a request's own, which steps may write
    FENCED = 2  # its request is done with it, but a step in flight or a transfer may still touch it
    CACHED = 3  # the prefix cache's; no request reads it, so it may be evicted
    SHARED = 4  # the prefix cache's, locked by the requests that read it


class PageEvent(IntEnum):
    ALLOCATE = 0  # a request takes it
    FENCE = 1  # its request leaves, or reads a page of the cache in its place
    INSERT = 2  # the prefix cache takes it over
    RELEASE = 3  # it is given back
    LOCK = 4  # a first request reads it
    UNLOCK = 5  # the last request that read it leaves
    EVICT = 6  # the cache gives it up


S, E = PageState, PageEvent
PAGE_TRANSITIONS: dict[PageState, dict[PageEvent, PageState]] = {
    S.FREE: {E.ALLOCATE: S.HELD},
    S.HELD: {E.FENCE: S.FENCED, E.INSERT: S.CACHED, E.RELEASE: S.FREE},
    S.FENCED: {E.INSERT: S.CACHED, E.RELEASE: S.FREE},
    S.CACHED: {E.LOCK: S.SHARED, E.EVICT: S.FREE},
    S.SHARED: {E.UNLOCK: S.CACHED},
}


class InvalidAllocation(ForedraftError):
    """An allocation of a negative number of slots, or of a part of a page. The allocator's state is unchanged."""


class KVAllocator:
    """Hands out and takes back slots in whole pages, in O(1) vector operations per call.

    The free pages are a stack: the page freed last is handed out first. So the result of a call depends only on the
    history of calls. The pool that it describes has `(num_pages + 1) * page_size` slots, the dummy page included.
    """

    def __init__(self, num_pages: int, page_size: int = 1) -> None:
        assert num_pages >= 0, f"num_pages is {num_pages}, expected at least 0"
        assert page_size >= 1, f"page_size is {page_size}, expected at least 1"
        assert (num_pages + 1) * page_size <= MAX_SLOTS, f"{num_pages} pages of {page_size} slots do not fit int32 ids"
        self.num_pages = num_pages
        self.page_size = page_size
        # Entries [0, _num_free_pages) of the stack are free pages, and the top is handed out first. The other entries
        # have no meaning.
        self._stack = np.arange(num_pages, 0, -1, dtype=np.int32)
        self._num_free_pages = num_pages
        # 1 for a held page. The dummy page stays 0, so freeing it is refused like any double free.
        self._held = np.zeros(num_pages + 1, dtype=np.int32)
        self._offsets = np.arange(page_size, dtype=np.int32)

    @property
    def num_total_slots(self) -> int:
        """Slots that can ever be held at once; the dummy page is not among them."""
        return self.num_pages * self.page_size

    @property
    def num_free_slots(self) -> int:
        """Slots that `allocate` could hand out now."""
        return self._num_free_pages * self.page_size

    @property
    def num_held_slots(self) -> int:
        return (self.num_pages - self._num_free_pages) * self.page_size

    @property
    def free_pages(self) -> Slots:
        """A copy of the free list, int32 [number of free pages]: the next page to be handed out last."""
        return self._stack[: self._num_free_pages].copy()

    def can_allocate(self, num_slots: int) -> bool:
        """Return whether `allocate(num_slots)` would succeed now."""
        return 0 <= num_slots <= self._num_free_pages * self.page_size and num_slots % self.page_size == 0

    def allocate(self, num_slots: int) -> Slots:
        """Take `num_slots` slots, a multiple of the page size: int32 [num_slots], page by page, ascending inside a
        page.

        Raises `KVPoolExhausted` if fewer are free and `InvalidAllocation` for a negative number or part of a page; both
        leave the state as it was.
        """
        page_size = self.page_size
        num_pages = num_slots if page_size == 1 else num_slots // page_size
        if num_slots < 0 or num_pages * page_size != num_slots:
            message = f"asked for {num_slots} slots, expected a multiple of {page_size} that is at least 0"
            raise InvalidAllocation(message)
        top = self._num_free_pages
        if num_pages > top:
            message = f"asked for {num_slots} KV slots, {self.num_free_slots} of {self.num_total_slots} are free"
            raise KVPoolExhausted(message)
        bottom = top - num_pages
        pages = self._stack[bottom:top][::-1].copy()
        self._held[pages.astype(np.intp)] = 1
        self._num_free_pages = bottom
        return pages if page_size == 1 else self._slots_of(pages)

    def free(self, slots: Slots) -> None:
        """Give back whole pages: `slots` int32 [n], as `allocate` returned them, in any order of pages.

        A page's slots stand together in ascending order. Raises `InvalidFree`, with the state unchanged, when a slot is
        the dummy's, out of range, not held, given twice, or when a page is not complete.
        """
        slots = self._as_slots(slots)
        pages = slots if self.page_size == 1 else self._pages_of(slots)
        num_pages = pages.size
        if num_pages == 0:
            return
        top = self._num_free_pages + num_pages
        # As an unsigned number a negative id is out of range; as a signed one it would count from the end. NumPy
        # indexes by intp several times faster than by any other integer.
        index = pages.view(np.uint32).astype(np.intp)
        if top > self.num_pages:
            raise self._refusal(pages)
        # Each page's count goes from one holder to none. It falls below if the page is not held, or is given twice.
        try:
            np.subtract.at(self._held, index, _ONE)
        except IndexError:
            raise self._refusal(pages) from None
        if np.count_nonzero(self._held[index]):
            np.add.at(self._held, index, _ONE)
            raise self._refusal(pages)
        self._stack[self._num_free_pages : top] = pages[::-1]
        self._num_free_pages = top

    def check(self, holders: Iterable[Slots] | None = None) -> None:
        """Recount everything from scratch; raise `InvariantViolation` with the id of what is broken.

        `holders`, if given, are the slots that each holder says it has (each request's own, each cached node's):
        together they must be the held slots, each slot once (ALLOC-01, ALLOC-03, ALLOC-06).
        """
        free = self._stack[: self._num_free_pages]
        if not 0 <= self._num_free_pages <= self.num_pages:
            message = f"{self._num_free_pages} of {self.num_pages} pages are counted as free"
            raise InvariantViolation("ALLOC-02", message)
        if self._held[0] or np.count_nonzero(free == 0):
            raise InvariantViolation("ALLOC-12", "the padding page 0 is in circulation")
        if free.size and (free.min() < 0 or free.max() > self.num_pages):
            raise InvariantViolation("ALLOC-02", f"the free list holds a page outside 1..{self.num_pages}")
        times_free = np.bincount(free, minlength=self.num_pages + 1)
        if times_free.max(initial=0) > 1:
            raise InvariantViolation("ALLOC-02", f"page {int(times_free.argmax())} stands twice in the free list")
        both = np.flatnonzero((self._held[1:] != 0) == times_free[1:]) + 1
        if both.size:
            state = "free and held" if self._held[both[0]] else "neither free nor held"
            raise InvariantViolation("ALLOC-05", f"page {both[0]} is {state}")
        if free.size + np.count_nonzero(self._held) != self.num_pages:
            raise InvariantViolation("ALLOC-01", f"free + held is not {self.num_pages} pages")
        if holders is not None:
            self._check_holders(holders)

    def _check_holders(self, holders: Iterable[Slots]) -> None:
        claims = [np.asarray(slots, dtype=np.int64).ravel() for slots in holders]
        claimed = np.concatenate(claims) if claims else np.empty(0, dtype=np.int64)
        num_pool_slots = (self.num_pages + 1) * self.page_size
        if claimed.size and (claimed.min() < self.page_size or claimed.max() >= num_pool_slots):
            wrong = claimed[(claimed < self.page_size) | (claimed >= num_pool_slots)][0]
            message = f"a holder has slot {wrong}, outside {self.page_size}..{num_pool_slots - 1}"
            raise InvariantViolation("ALLOC-12", message)
        times = np.bincount(claimed, minlength=num_pool_slots)
        held = np.repeat(self._held != 0, self.page_size)
        wrong = np.flatnonzero((times > 0) & ~held)
        if wrong.size:
            raise InvariantViolation("ALLOC-03", f"slot {wrong[0]} is in a holder's hands and on the free list")
        wrong = np.flatnonzero(times > 1)
        if wrong.size:
            raise InvariantViolation("ALLOC-06", f"slot {wrong[0]} has {times[wrong[0]]} holders")
        wrong = np.flatnonzero(held > times)
        if wrong.size:
            raise InvariantViolation("ALLOC-01", f"{wrong.size} slots have no holder (leaked), the first is {wrong[0]}")

    @staticmethod
    def _as_slots(slots: Slots) -> Slots:
        """Return `slots` as int32. Refuses a wider id that would wrap into a valid one."""
        slots = np.asarray(slots)
        if slots.dtype != np.int32:
            if slots.size and (slots.min() < 0 or slots.max() > MAX_SLOTS):
                raise InvalidFree(f"slots {slots.min()}..{slots.max()} are outside 0..{MAX_SLOTS}")
            slots = slots.astype(np.int32)
        return slots

    def _slots_of(self, pages: Slots) -> Slots:
        return (pages[:, None] * np.int32(self.page_size) + self._offsets).ravel()

    def _pages_of(self, slots: Slots) -> Slots:
        """Return the pages that `slots` fill completely, or raise `InvalidFree`."""
        page_size = self.page_size
        if slots.size % page_size:
            raise InvalidFree(f"{slots.size} slots are not whole pages of {page_size}")
        by_page = slots.reshape(-1, page_size)
        pages = by_page[:, 0] // page_size
        whole = by_page == pages[:, None] * page_size + self._offsets
        if np.count_nonzero(whole) != slots.size:
            wrong = by_page[np.flatnonzero(~whole.all(axis=1))[0]]
            raise InvalidFree(f"slots {wrong.tolist()} are not one whole page of {page_size} in ascending order")
        return pages

    def _refusal(self, pages: Slots) -> InvalidFree:
        """Say which of `pages` is wrong and why. It may be slow, because it runs once, before an error is raised."""
        seen: dict[int, None] = {}
        for page in pages.tolist():
            if page == 0:
                return InvalidFree("page 0 is the padding dummy and has no holder")
            if not 0 < page <= self.num_pages:
                return InvalidFree(f"page {page} is outside 1..{self.num_pages}")
            if not self._held[page]:
                return InvalidFree(f"page {page} is not held: freed twice, or never allocated")
            if page in seen:
                return InvalidFree(f"page {page} is given twice in one call")
            seen[page] = None
        raise InvariantViolation("ALLOC-10", f"a free of {pages.size} pages was refused without a reason")
