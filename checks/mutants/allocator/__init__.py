"""Planted defects of allocators: each is one method of a good one, done wrong in a way that has been done wrong before."""

from __future__ import annotations

from collections import deque

import numpy as np

from ....core.errors import InvalidFree, KVPoolExhausted
from ....core.kv.allocator import KVAllocator
from ....core.kv.store import KVStore
from ....properties.allocator.contract import AllocatorCapabilities, AllocatorConfig
from ....properties.allocator.plain import EVERYTHING, PlainAllocator
from ....properties.harness.mutants import Mutant
from ...adapters.kv_allocator import KVAllocatorAdapter
from ...adapters.kv_allocator import make as make_allocator
from ...adapters.kv_store import KVStoreAdapter
from ...adapters.kv_store import make as make_store
from . import batches

# -- of core.kv.allocator ---------------------------------------------------------------------------------------------


class LosesTheLastPage(KVAllocator):
    """A free of several pages forgets the last one."""

    def free(self, slots):
        super().free(slots[: -self.page_size] if len(slots) > self.page_size else slots)


class HandsOutTheSamePageAgain(KVAllocator):
    """The top of the stack moves one page too little."""

    def allocate(self, num_slots):
        slots = super().allocate(num_slots)
        if slots.size > self.page_size:
            self._num_free_pages += 1
        return slots


class TakesWhatThereIs(KVAllocator):
    """An allocation that does not fit has emptied the pool when it finds out."""

    def allocate(self, num_slots):
        if num_slots > self.num_free_slots > 0 and num_slots % self.page_size == 0:
            super().allocate(self.num_free_slots)
        return super().allocate(num_slots)


class FreesAnything(KVAllocator):
    """A free does not check that what it frees is held."""

    def free(self, slots):
        pages = [page for page in dict.fromkeys((slots // self.page_size).tolist()) if 0 < page <= self.num_pages]
        count = min(len(pages), self.num_pages - self._num_free_pages)
        self._held[pages[:count]] = 0
        self._stack[self._num_free_pages : self._num_free_pages + count] = pages[:count]
        self._num_free_pages += count


class FreesBeforeItLooks(KVAllocator):
    """Pages are given back one by one until one is not held."""

    def free(self, slots):
        for start in range(0, len(slots), self.page_size):
            super().free(slots[start : start + self.page_size])


class ServesThePadding(KVAllocator):
    """The free list begins with page 0."""

    def __init__(self, num_pages, page_size=1):
        super().__init__(num_pages, page_size)
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)


class PromisesOnePageMore(KVAllocator):
    """An off-by-one in can_allocate."""

    def can_allocate(self, num_slots):
        return super().can_allocate(num_slots) or num_slots == self.num_free_slots + self.page_size


class PromisesTooLittle(KVAllocator):
    """The last page is never promised."""

    def can_allocate(self, num_slots):
        return super().can_allocate(num_slots) and num_slots != self.num_free_slots


class RefusesNothing(KVAllocator):
    """alloc(0) is an error."""

    def allocate(self, num_slots):
        if num_slots == 0:
            raise KVPoolExhausted("nothing was asked for")
        return super().allocate(num_slots)


class RoundsUp(KVAllocator):
    """A part of a page gets a whole one."""

    def allocate(self, num_slots):
        return super().allocate(-(-num_slots // self.page_size) * self.page_size)


class RunsFromOneState(KVAllocator):
    """The order of pages depends on how many allocators there were before: state of the class, as a clock or an address would be."""

    made = 0

    def __init__(self, num_pages, page_size=1):
        super().__init__(num_pages, page_size)
        RunsFromOneState.made += 1
        self._stack = np.roll(self._stack, RunsFromOneState.made)


class RestoresTheCounterAlone(KVAllocator):
    """A snapshot brings back how many pages are free, not which."""

    def restore(self, snapshot):
        self._num_free_pages = snapshot.free_pages.size


class SpeaksOfPages(KVAllocator):
    """With pages of several slots, the neighbours are spaced by the pool, not by the page."""

    def _slots_of(self, pages):
        return super()._slots_of(pages).reshape(-1, self.page_size)[:, ::-1].ravel()


# -- of core.kv.store -------------------------------------------------------------------------------------------------


class FreesUnderAStep(KVStore):
    """A row is released at once, though a step in flight may still write to it."""

    def close_row(self, departure, last_committed):
        self._release(departure)


class ForgetsADeparture(KVStore):
    """A committed step releases one of the rows that wait for it."""

    def pass_fence(self, committed):
        waiting = [departure for departure in self._departures if departure.fence <= committed]
        self._departures = deque(item for item in self._departures if item not in waiting[1:])
        super().pass_fence(committed)


class TrimsIntoTheCommitted(KVStoreAdapter):
    """Trimming rounds down to a page instead of up."""

    def trim(self, request, num_tokens):
        size = self.store.page_size
        super().trim(request, num_tokens // size * size)


class GrowsByWholePagesOnly(KVStoreAdapter):
    """A row that needs one slot of a new page does not get it."""

    def grow(self, request, num_tokens):
        size = self.store.page_size
        return super().grow(request, num_tokens // size * size)


class GrowsPastTheRow(PlainAllocator):
    """A target is not compared with the row's width."""

    def grow(self, request, num_tokens):
        width, self.row_width = self.row_width, num_tokens
        try:
            return super().grow(request, num_tokens)
        finally:
            self.row_width = width


class RecordsTheUnaligned(PlainAllocator):
    """The row says how many slots were asked for, not how many it has."""

    def __init__(self, config):
        super().__init__(config)
        self.asked: dict[str, int] = {}

    def grow(self, request, num_tokens):
        grown = super().grow(request, num_tokens)
        if grown:
            self.asked[request] = max(num_tokens, self.asked.get(request, 0))
        return grown

    def trim(self, request, num_tokens):
        super().trim(request, num_tokens)
        self.asked[request] = min(num_tokens, self.asked.get(request, 0))

    def close(self, request, step=None):
        self.asked.pop(request, None)
        super().close(request, step)

    def slots_of(self, request):
        return super().slots_of(request)[: self.asked.get(request, 0)]


# -- of the plain allocator: what ours do not have ----------------------------------------------------------------------


class CountsFreePagesApart(PlainAllocator):
    """The counter of free pages misses those that are evicted."""

    def __init__(self, config):
        super().__init__(config)
        self.counter = config.num_pages

    def take(self, num_pages):
        pages = super().take(num_pages)
        self.counter -= num_pages
        return pages

    def drop(self, pages, keep=False):
        before = len(self.free_list)
        super().drop(pages, keep)
        self.counter += len(self.free_list) - before

    def num_free(self):
        return self.counter * self.page_size


class ListsAPageTwice(PlainAllocator):
    """A page that is freed by the last of several holders is put on the free list by each of them."""

    def share(self, slots):
        super().share(slots)
        for page in self.pages(slots):
            self.twice = getattr(self, "twice", set()) | {page}

    def drop(self, pages, keep=False):
        super().drop(pages, keep)
        for page in pages:
            if self.count[page] == 0 and page in getattr(self, "twice", ()) and not keep:
                self.twice.discard(page)
                self.free_list.append(page)


class SharesWithoutCounting(PlainAllocator):
    """A second holder is not counted."""

    def share(self, slots):
        pass


class FreesForEverybody(PlainAllocator):
    """The first of several holders to leave frees the page."""

    def drop(self, pages, keep=False):
        for page in pages:
            if self.count[page] > 1:
                self.free_list.append(page)
        super().drop(pages, keep)


class DropsEachMention(PlainAllocator):
    """A page that is named twice in a list loses two references."""

    def pages(self, slots):
        return [slot // self.page_size for slot in slots[:: self.page_size]]

    def free(self, slots):
        for page in self.pages(slots):
            if not self.count.get(page):
                raise InvalidFree(f"page {page} is not held")
        for page in self.pages(slots):
            self.count[page] = max(self.count[page] - 1, 0)
            if self.count[page] == 0:
                self.free_list.append(page)


class EvictsForNothing(PlainAllocator):
    """The cache is flushed before it is known whether that is enough."""

    def take(self, num_pages):
        if num_pages > len(self.free_list):
            self.evict(num_pages)
        return super().take(num_pages)


class EvictsTheReused(PlainAllocator):
    """A cached page that has found a holder again stays on the list of what can be evicted."""

    def reuse(self, slots):
        for page in self.pages(slots):
            self.count[page] = 1

    def retire(self, slots):
        self.drop([page for page in self.pages(slots) if page not in self.cache], keep=True)


class EvictsIntoItself(PlainAllocator):
    """What eviction hands on is the place in the cache, not the page."""

    def evict(self, num_pages):
        while num_pages > 0 and self.cache:
            self.cache.pop(0)
            self.free_list.append(len(self.cache) + self.num_pages + 1)
            num_pages -= 1


class EvictsForEver(PlainAllocator):
    """The eviction loop waits for room that cannot be made."""

    def take(self, num_pages):
        while num_pages > len(self.free_list):
            self.evict(1)
        return super().take(num_pages)


class PromisesTheCache(PlainAllocator):
    """can_allocate counts what could be evicted, alloc does not evict."""

    def take(self, num_pages):
        if num_pages > len(self.free_list):
            raise KVPoolExhausted(f"{num_pages} pages asked for, {len(self.free_list)} free")
        return super().take(num_pages)


class KeepsOneCached(PlainAllocator):
    """A flush leaves the youngest page in the cache."""

    def evict(self, num_pages):
        is_flush = num_pages >= self.num_pages > len(self.cache)
        super().evict(len(self.cache) - 1 if is_flush else num_pages)


class ForgetsOneFence(PlainAllocator):
    """Of the pages that wait for one step, only the first lot comes back."""

    def complete(self, step):
        due = [item for item in self.fenced if item[0] <= step]
        super().complete(step)
        for _, pages, _ in due[1:]:
            for page in pages:
                if page in self.free_list:
                    self.free_list.remove(page)


class ReleasesTheFencedEarly(PlainAllocator):
    """A step's completion frees what waits for the next one, too."""

    def complete(self, step):
        super().complete(step + 1)


class DealsWithoutLooking(PlainAllocator):
    """The last page of a larger allocation stays on the free list. Nothing but its answers can be seen."""

    def alloc(self, num_slots):
        slots = super().alloc(num_slots)
        if num_slots > self.page_size:
            self.free_list.insert(0, slots[-1] // self.page_size)
        return slots

    def num_free(self):
        return (self.num_pages - sum(count > 0 for count in self.count.values())) * self.page_size


class SortsTheRow(PlainAllocator):
    """A row's pages are sorted when it grows, so that its tokens stand somewhere else than where they were written."""

    def grow(self, request, num_tokens):
        grown = super().grow(request, num_tokens)
        self.rows[request].sort()
        return grown


# -- how they are made ------------------------------------------------------------------------------------------------

_BLIND = AllocatorCapabilities(paged=True, padding_page=True, misuse=True)


def of_kv_allocator(kind: type[KVAllocator]):
    def make(config: AllocatorConfig) -> KVAllocatorAdapter:
        return KVAllocatorAdapter(kind(config.num_pages, config.page_size))

    make.capabilities = make_allocator.capabilities
    return make


def of_kv_store(kind: type[KVStore] = KVStore, adapter: type[KVStoreAdapter] = KVStoreAdapter):
    def make(config: AllocatorConfig) -> KVStoreAdapter:
        return adapter(kind(config.num_rows, config.row_width, config.num_pages, config.page_size, None))

    make.capabilities = make_store.capabilities
    return make


def of_plain(kind: type[PlainAllocator], capabilities: AllocatorCapabilities = EVERYTHING):
    def make(config: AllocatorConfig) -> PlainAllocator:
        return kind(config)

    make.capabilities = capabilities
    return make


def of_plain_unseen(kind: type[PlainAllocator]):
    """With nothing to look at but the answers."""
    return of_plain(kind, _BLIND)


_DEFECTS = (
    (LosesTheLastPage, of_kv_allocator, ("ALLOC-01",)),
    (HandsOutTheSamePageAgain, of_kv_allocator, ("ALLOC-03", "ALLOC-06")),
    (TakesWhatThereIs, of_kv_allocator, ("ALLOC-09",)),
    (FreesAnything, of_kv_allocator, ("ALLOC-10",)),
    (FreesBeforeItLooks, of_kv_allocator, ("ALLOC-10",)),
    (ServesThePadding, of_kv_allocator, ("ALLOC-12",)),
    (PromisesOnePageMore, of_kv_allocator, ("ALLOC-14",)),
    (PromisesTooLittle, of_kv_allocator, ("ALLOC-14",)),
    (RefusesNothing, of_kv_allocator, ("ALLOC-16",)),
    (RoundsUp, of_kv_allocator, ("ALLOC-08", "ALLOC-16")),
    (RunsFromOneState, of_kv_allocator, ("ALLOC-13",)),
    (RestoresTheCounterAlone, of_kv_allocator, ("ALLOC-03", "ALLOC-05", "RAISES")),
    (SpeaksOfPages, of_kv_allocator, ("ALLOC-11",)),
    (FreesUnderAStep, of_kv_store, ("ALLOC-03",)),
    (ForgetsADeparture, of_kv_store, ("ALLOC-01", "ALLOC-05")),
    (TrimsIntoTheCommitted, None, ("ALLOC-07", "ALLOC-08")),
    (GrowsByWholePagesOnly, None, ("ALLOC-08",)),
    (GrowsPastTheRow, of_plain, ("ALLOC-07",)),
    (RecordsTheUnaligned, of_plain, ("ALLOC-07", "ALLOC-08")),
    (CountsFreePagesApart, of_plain, ("ALLOC-02",)),
    (ListsAPageTwice, of_plain, ("ALLOC-02",)),
    (SharesWithoutCounting, of_plain, ("ALLOC-04",)),
    (FreesForEverybody, of_plain, ("ALLOC-03", "ALLOC-05")),
    (DropsEachMention, of_plain, ("ALLOC-10",)),
    *((kind, of_plain, caught_by) for kind, caught_by in batches.DEFECTS),
    (EvictsForNothing, of_plain, ("ALLOC-09",)),
    (EvictsTheReused, of_plain, ("ALLOC-05",)),
    (EvictsIntoItself, of_plain, ("ALLOC-11", "ALLOC-05")),
    (EvictsForEver, of_plain, ("HANGS",)),
    (PromisesTheCache, of_plain, ("ALLOC-14",)),
    (KeepsOneCached, of_plain, ("ALLOC-15",)),
    (ForgetsOneFence, of_plain, ("ALLOC-01", "ALLOC-05")),
    (ReleasesTheFencedEarly, of_plain, ("ALLOC-03",)),
    (DealsWithoutLooking, of_plain_unseen, ("ALLOC-06",)),
    (SortsTheRow, of_plain, ("ALLOC-06",)),
)
"""(class, how it is made: None for an adapter of the store, the invariants of which one must catch it)."""

MUTANTS = tuple(
    Mutant(kind.__name__, kind.__doc__, "allocator", of_kv_store(adapter=kind) if how is None else how(kind), caught_by)
    for kind, how, caught_by in _DEFECTS
)
