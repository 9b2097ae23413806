"""Planted defects of allocators: each is a subclass of a part of a good one, done wrong in a way that has been
done wrong before."""

import numpy as np

from ...core.kv.allocator import InvalidAllocation, KVAllocator
from ...core.kv.store import KVStore
from ...properties.allocator.contract import AllocatorCapabilities
from ...properties.allocator.plain import PlainAllocator
from ...properties.allocator.plain import make as make_plain
from ..adapters.kv_allocator import make as make_allocator
from ..adapters.kv_store import KVStoreAdapter
from ..adapters.kv_store import make as make_store
from .kv_groups import STORE_WITH_GROUPS
from .planting import Defects

ALLOCATOR = Defects("allocator", make_allocator)


@ALLOCATOR.breaks("ALLOC-01")
class LosesTheLastPage(KVAllocator):
    """A free of several pages forgets the last one."""

    def free(self, slots):
        return super().free(slots[: -self.page_size] if len(slots) > self.page_size else slots)


@ALLOCATOR.breaks("ALLOC-03", "ALLOC-06")
class HandsOutTheSamePageAgain(KVAllocator):
    """The top of the stack moves one page too little."""

    def allocate(self, num_slots):
        slots = super().allocate(num_slots)
        self._num_free_pages += len(slots) > self.page_size
        return slots


@ALLOCATOR.breaks("ALLOC-09")
class TakesWhatThereIs(KVAllocator):
    """An allocation that does not fit has emptied the pool when it finds out."""

    def allocate(self, num_slots):
        if num_slots > self.num_free_slots > 0 and num_slots % self.page_size == 0:
            super().allocate(self.num_free_slots)
        return super().allocate(num_slots)


@ALLOCATOR.breaks("ALLOC-10")
class FreesAnything(KVAllocator):
    """A free does not check that what it frees is held."""

    def free(self, slots):
        pages = [page for page in dict.fromkeys((slots // self.page_size).tolist()) if 0 < page <= self.num_pages]
        count = min(len(pages), self.num_pages - self._num_free_pages)
        self._held[pages[:count]] = 0
        self._stack[self._num_free_pages : self._num_free_pages + count] = pages[:count]
        self._num_free_pages += count


@ALLOCATOR.breaks("ALLOC-10")
class FreesBeforeItLooks(KVAllocator):
    """Pages are given back one by one until one is not held."""

    def free(self, slots):
        for start in range(0, len(slots), self.page_size):
            super().free(slots[start : start + self.page_size])


@ALLOCATOR.breaks("ALLOC-12")
class ServesThePadding(KVAllocator):
    """The free list begins with page 0."""

    def __init__(self, num_pages, page_size=1):
        super().__init__(num_pages, page_size)
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)


@ALLOCATOR.breaks("ALLOC-14")
class PromisesOnePageMore(KVAllocator):
    """An off-by-one in can_allocate."""

    def can_allocate(self, num_slots):
        return super().can_allocate(num_slots) or num_slots == self.num_free_slots + self.page_size


@ALLOCATOR.breaks("ALLOC-14")
class PromisesTooLittle(KVAllocator):
    """The last page is never promised."""

    def can_allocate(self, num_slots):
        return super().can_allocate(num_slots) and num_slots != self.num_free_slots


@ALLOCATOR.breaks("ALLOC-16")
class RefusesNothing(KVAllocator):
    """alloc(0) is an error."""

    def allocate(self, num_slots):
        if num_slots == 0:
            raise InvalidAllocation("asked for 0 slots")
        return super().allocate(num_slots)


@ALLOCATOR.breaks("ALLOC-08", "ALLOC-16")
class RoundsUp(KVAllocator):
    """A part of a page gets a whole one."""

    def allocate(self, num_slots):
        return super().allocate(-(-num_slots // self.page_size) * self.page_size)


@ALLOCATOR.breaks("ALLOC-13")
class RunsFromOneState(KVAllocator):
    """The order of pages depends on how many allocators there were before: state of the class, as a clock or an
    address would be."""

    made = 0

    def __init__(self, num_pages, page_size=1):
        super().__init__(num_pages, page_size)
        type(self).made += 1
        self._stack = np.roll(self._stack, self.made)


@ALLOCATOR.breaks("ALLOC-11")
class SpeaksOfPages(KVAllocator):
    """With pages of several slots, the neighbours are spaced by the pool, not by the page."""

    def _slots_of(self, pages):
        return super()._slots_of(pages).reshape(-1, self.page_size)[:, ::-1].ravel()


STORE = Defects("allocator", make_store)


@STORE.breaks("ALLOC-03")
class FreesUnderAStep(KVStore):
    """A row is released at once, though a step in flight may still write to it."""

    def close_row(self, departure, last_committed):
        return self._release(departure)


@STORE.breaks("ALLOC-01", "ALLOC-05")
class ForgetsADeparture(KVStore):
    """A committed step releases one of the rows that wait for it."""

    def pass_fence(self, committed):
        late = [departure for departure in self._fence.rows if departure.fence <= committed][1:]
        self._fence.rows = [departure for departure in self._fence.rows if departure not in late]
        super().pass_fence(committed)


@STORE.breaks("ALLOC-07", "ALLOC-08")
class TrimsIntoTheCommitted(KVStoreAdapter):
    """Trimming rounds down to a page instead of up."""

    def trim(self, request, num_tokens):
        super().trim(request, num_tokens // self.store.page_size * self.store.page_size)


@STORE.breaks("ALLOC-08")
class GrowsByWholePagesOnly(KVStoreAdapter):
    """A row that needs one slot of a new page does not get it."""

    def grow(self, request, num_tokens):
        return super().grow(request, num_tokens // self.store.page_size * self.store.page_size)


PLAIN = Defects("allocator", make_plain)
"""What ours do not have."""


@PLAIN.breaks("ALLOC-07")
class GrowsPastTheRow(PlainAllocator):
    """A target is not compared with the row's width."""

    def grow(self, request, num_tokens):
        width, self.row_width = self.row_width, max(self.row_width, num_tokens)
        grown = super().grow(request, num_tokens)
        self.row_width = width
        return grown


@PLAIN.breaks("ALLOC-02")
class CountsFreePagesApart(PlainAllocator):
    """The counter of free pages misses those that are evicted."""

    def evict(self, num_pages):
        before = len(self.free_list)
        super().evict(num_pages)
        self.missed = getattr(self, "missed", 0) + len(self.free_list) - before

    def num_free(self):
        return super().num_free() - getattr(self, "missed", 0) * self.page_size


@PLAIN.breaks("ALLOC-02")
class ListsAPageTwice(PlainAllocator):
    """A page that is freed by the last of several holders is put on the free list by each of them."""

    def share(self, slots):
        super().share(slots)
        self.twice = getattr(self, "twice", set()) | set(self.pages(slots))

    def drop(self, pages, keep=False):
        super().drop(pages, keep)
        for page in pages:
            if self.count[page] == 0 and page in getattr(self, "twice", ()) and not keep:
                self.twice.discard(page)
                self.free_list.append(page)


@PLAIN.breaks("ALLOC-04")
class SharesWithoutCounting(PlainAllocator):
    """A second holder is not counted."""

    def share(self, slots):
        pass


@PLAIN.breaks("ALLOC-03", "ALLOC-05")
class FreesForEverybody(PlainAllocator):
    """The first of several holders to leave frees the page."""

    def drop(self, pages, keep=False):
        self.free_list += [page for page in pages if self.count[page] > 1]
        super().drop(pages, keep)


@PLAIN.breaks("ALLOC-10")
class DropsEachMention(PlainAllocator):
    """A page that is named twice in a list loses two references."""

    def pages(self, slots):
        return [slot // self.page_size for slot in slots[:: self.page_size]]

    def drop(self, pages, keep=False):
        for page in pages:
            self.count[page] = max(self.count[page], 1)
            super().drop([page], keep)


@PLAIN.breaks("ALLOC-11", "ALLOC-01")
class BeginsAFreshPage(PlainAllocator):
    """A request goes on in a new page, whether its last one is full or not."""

    def alloc_extend(self, prefix_lens, seq_lens, last_slots):
        lens = [stop - start for start, stop in zip(prefix_lens, seq_lens, strict=True)]
        return super().alloc_extend([0] * len(lens), lens, [-1] * len(lens))


@PLAIN.breaks("ALLOC-11", "ALLOC-01")
class GoesOnPastThePage(PlainAllocator):
    """The token behind a full page goes into the next slot, whosever page that is."""

    def alloc_decode(self, seq_lens, last_slots):
        return [slot + 1 for slot in last_slots]


@PLAIN.breaks("ALLOC-09")
class KeepsThePagesOfARefusedBatch(PlainAllocator):
    """A batch takes pages request by request, and keeps them where a later one finds none."""

    def alloc_extend(self, prefix_lens, seq_lens, last_slots):
        slots = []
        for request in zip(prefix_lens, seq_lens, last_slots, strict=True):
            slots.append(super().alloc_extend(*([value] for value in request)))
        return None if None in slots else [slot for part in slots for slot in part]


@PLAIN.breaks("ALLOC-14")
class CountsAPageForEach(PlainAllocator):
    """A batch is refused unless there is a free page for each request, needed or not."""

    def alloc_decode(self, seq_lens, last_slots):
        return super().alloc_decode(seq_lens, last_slots) if len(seq_lens) <= len(self.free_list) else None


@PLAIN.breaks("ALLOC-09")
class EvictsForNothing(PlainAllocator):
    """The cache is flushed before it is known whether that is enough."""

    def take(self, num_pages):
        self.evict(num_pages if num_pages > len(self.free_list) else 0)
        return super().take(num_pages)


@PLAIN.breaks("ALLOC-05")
class EvictsTheReused(PlainAllocator):
    """A cached page that has found a holder again stays on the list of what can be evicted."""

    def reuse(self, slots):
        self.count.update((page, 1) for page in self.pages(slots))

    def retire(self, slots):
        self.drop([page for page in self.pages(slots) if page not in self.cache], keep=True)


@PLAIN.breaks("ALLOC-11", "ALLOC-05")
class EvictsIntoItself(PlainAllocator):
    """What eviction hands on is the place in the cache, not the page."""

    def evict(self, num_pages):
        before = len(self.free_list)
        super().evict(num_pages)
        places = range(len(self.cache) + len(self.free_list) - before, len(self.cache), -1)
        self.free_list[before:] = [self.num_pages + place for place in places]


@PLAIN.breaks("HANGS")
class EvictsForEver(PlainAllocator):
    """The eviction loop waits for room that cannot be made."""

    def take(self, num_pages):
        while num_pages > len(self.free_list):
            self.evict(1)
        return super().take(num_pages)


@PLAIN.breaks("ALLOC-15")
class KeepsOneCached(PlainAllocator):
    """A flush leaves the youngest page in the cache."""

    def evict(self, num_pages):
        return super().evict(len(self.cache) - 1 if num_pages >= self.num_pages > len(self.cache) else num_pages)


@PLAIN.breaks("ALLOC-03")
class ReleasesTheFencedEarly(PlainAllocator):
    """A step's completion frees what waits for the next one, too."""

    def complete(self, step):
        return super().complete(step + 1)


@PLAIN.breaks("ALLOC-06")
class SortsTheRow(PlainAllocator):
    """A row's pages are sorted when it grows, so that its tokens stand somewhere else than where they were written."""

    def grow(self, request, num_tokens):
        grown = super().grow(request, num_tokens)
        if grown:
            self.rows[request].sort()
        return grown


UNSEEN = Defects("allocator", make_plain, AllocatorCapabilities(paged=True, padding_page=True, misuse=True))
"""With nothing to look at but the answers."""


@UNSEEN.breaks("ALLOC-06")
class DealsWithoutLooking(PlainAllocator):
    """The last page of a larger allocation stays on the free list. Nothing but its answers can be seen."""

    def alloc(self, num_slots):
        slots = super().alloc(num_slots)
        if num_slots > self.page_size:
            self.free_list.insert(0, slots[-1] // self.page_size)
        return slots

    def num_free(self):
        return (self.num_pages - sum(count > 0 for count in self.count.values())) * self.page_size


MUTANTS = (*ALLOCATOR.mutants, *STORE.mutants, *STORE_WITH_GROUPS.mutants, *PLAIN.mutants, *UNSEEN.mutants)
