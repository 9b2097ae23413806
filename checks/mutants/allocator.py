"""Planted defects of allocators: each is one method of a good one, done wrong in a way that has been
done wrong before."""

from ...core.kv.allocator import KVAllocator
from ...core.kv.store import KVStore
from ...properties.allocator.contract import AllocatorCapabilities
from ...properties.allocator.plain import PlainAllocator
from ...properties.allocator.plain import make as make_plain
from ..adapters.kv_allocator import make as make_allocator
from ..adapters.kv_store import KVStoreAdapter
from ..adapters.kv_store import make as make_store
from .planting import defects, lookup

ALLOCATOR = """
LosesTheLastPage (ALLOC-01): A free of several pages forgets the last one.
    KVAllocator.free = good(self, slots[: -self.page_size] if len(slots) > self.page_size else slots)

HandsOutTheSamePageAgain (ALLOC-03, ALLOC-06): The top of the stack moves one page too little.
    KVAllocator.allocate
        - self._num_free_pages = bottom
        + self._num_free_pages = bottom + (num_pages > 1)

TakesWhatThereIs (ALLOC-09): An allocation that does not fit has emptied the pool when it finds out.
    KVAllocator.allocate:
        if num_slots > self.num_free_slots > 0 and num_slots % self.page_size == 0:
            good(self, self.num_free_slots)
        return good(self, num_slots)

FreesAnything (ALLOC-10): A free does not check that what it frees is held.
    KVAllocator.free:
        pages = [page for page in dict.fromkeys((slots // self.page_size).tolist()) if 0 < page <= self.num_pages]
        count = min(len(pages), self.num_pages - self._num_free_pages)
        self._held[pages[:count]] = 0
        self._stack[self._num_free_pages : self._num_free_pages + count] = pages[:count]
        self._num_free_pages += count

FreesBeforeItLooks (ALLOC-10): Pages are given back one by one until one is not held.
    KVAllocator.free:
        for start in range(0, len(slots), self.page_size):
            good(self, slots[start : start + self.page_size])

ServesThePadding (ALLOC-12): The free list begins with page 0.
    KVAllocator.__init__
        - np.arange(num_pages, 0, -1, dtype=np.int32)
        + np.arange(num_pages - 1, -1, -1, dtype=np.int32)

PromisesOnePageMore (ALLOC-14): An off-by-one in can_allocate.
    KVAllocator.can_allocate
        - self._num_free_pages
        + (self._num_free_pages + 1)

PromisesTooLittle (ALLOC-14): The last page is never promised.
    KVAllocator.can_allocate = good(self, num_slots) and num_slots != self.num_free_slots

RefusesNothing (ALLOC-16): alloc(0) is an error.
    KVAllocator.allocate
        - num_slots < 0
        + num_slots <= 0

RoundsUp (ALLOC-08, ALLOC-16): A part of a page gets a whole one.
    KVAllocator.allocate = good(self, -(-num_slots // self.page_size) * self.page_size)

RunsFromOneState (ALLOC-13): The order of pages depends on how many allocators there were before: state of the class, as a clock or an
address would be.
    KVAllocator.__init__:
        good(self, num_pages, page_size)
        memory["made"] = memory.get("made", 0) + 1
        self._stack = np.roll(self._stack, memory["made"])

SpeaksOfPages (ALLOC-11): With pages of several slots, the neighbours are spaced by the pool, not by the page.
    KVAllocator._slots_of = good(self, pages).reshape(-1, self.page_size)[:, ::-1].ravel()
"""

STORE = """
FreesUnderAStep (ALLOC-03): A row is released at once, though a step in flight may still write to it.
    KVStore.close_row = self._release(departure)

ForgetsADeparture (ALLOC-01, ALLOC-05): A committed step releases one of the rows that wait for it.
    KVStore.pass_fence
        - for departure in due:
        + for departure in due[:1]:

TrimsIntoTheCommitted (ALLOC-07, ALLOC-08): Trimming rounds down to a page instead of up.
    KVStoreAdapter.trim
        - ceil_to_page(num_tokens, self.store.page_size)
        + num_tokens // self.store.page_size * self.store.page_size

GrowsByWholePagesOnly (ALLOC-08): A row that needs one slot of a new page does not get it.
    KVStoreAdapter.grow
        - ceil_to_page(num_tokens, self.store.page_size)
        + num_tokens // self.store.page_size * self.store.page_size
"""

PLAIN = """
GrowsPastTheRow (ALLOC-07): A target is not compared with the row's width.
    PlainAllocator.grow
        - num_tokens > self.row_width or

CountsFreePagesApart (ALLOC-02): The counter of free pages misses those that are evicted.
    PlainAllocator.evict:
        before = len(self.free_list)
        good(self, num_pages)
        self.missed = getattr(self, "missed", 0) + len(self.free_list) - before
    PlainAllocator.num_free = good(self) - getattr(self, "missed", 0) * self.page_size

ListsAPageTwice (ALLOC-02): A page that is freed by the last of several holders is put on the free list by each of them.
    PlainAllocator.share:
        good(self, slots)
        self.twice = getattr(self, "twice", set()) | set(self.pages(slots))
    PlainAllocator.drop:
        good(self, pages, keep)
        for page in pages:
            if self.count[page] == 0 and page in getattr(self, "twice", ()) and not keep:
                self.twice.discard(page)
                self.free_list.append(page)

SharesWithoutCounting (ALLOC-04): A second holder is not counted.
    PlainAllocator.share = None

FreesForEverybody (ALLOC-03, ALLOC-05): The first of several holders to leave frees the page.
    PlainAllocator.drop
        - self.count[page] -= 1
        + self.free_list += [page] * (self.count[page] > 1)
        + self.count[page] -= 1

DropsEachMention (ALLOC-10): A page that is named twice in a list loses two references.
    PlainAllocator.pages = [slot // self.page_size for slot in slots[:: self.page_size]]
    PlainAllocator.drop
        - self.count[page] -= 1
        + self.count[page] = max(self.count[page] - 1, 0)

BeginsAFreshPage (ALLOC-11, ALLOC-01): A request goes on in a new page, whether its last one is full or not.
    PlainAllocator.alloc_extend:
        lens = [stop - start for start, stop in zip(prefix_lens, seq_lens, strict=True)]
        return good(self, [0] * len(lens), lens, [-1] * len(lens))

GoesOnPastThePage (ALLOC-11, ALLOC-01): The token behind a full page goes into the next slot, whosever page that is.
    PlainAllocator.alloc_decode = [slot + 1 for slot in last_slots]

KeepsThePagesOfARefusedBatch (ALLOC-09): A batch takes pages request by request, and keeps them where a later one finds none.
    PlainAllocator.alloc_extend:
        slots = [good(self, [a], [b], [c]) for a, b, c in zip(prefix_lens, seq_lens, last_slots, strict=True)]
        return None if None in slots else [slot for part in slots for slot in part]

CountsAPageForEach (ALLOC-14): A batch is refused unless there is a free page for each request, needed or not.
    PlainAllocator.alloc_decode = good(self, seq_lens, last_slots) if len(seq_lens) <= len(self.free_list) else None

EvictsForNothing (ALLOC-09): The cache is flushed before it is known whether that is enough.
    PlainAllocator.take
        - if num_pages > len(self.free_list) + len(self.cache):
        + self.evict(num_pages if num_pages > len(self.free_list) else 0)
        + if num_pages > len(self.free_list) + len(self.cache):

EvictsTheReused (ALLOC-05): A cached page that has found a holder again stays on the list of what can be evicted.
    PlainAllocator.reuse
        - self.cache.remove(page)
    PlainAllocator.retire = self.drop([page for page in self.pages(slots) if page not in self.cache], keep=True)

EvictsIntoItself (ALLOC-11, ALLOC-05): What eviction hands on is the place in the cache, not the page.
    PlainAllocator.evict
        - self.cache.pop(0)
        + (self.cache.pop(0), len(self.cache) + self.num_pages + 1)[1]

EvictsForEver (HANGS): The eviction loop waits for room that cannot be made.
    PlainAllocator.take:
        while num_pages > len(self.free_list):
            self.evict(1)
        return good(self, num_pages)

KeepsOneCached (ALLOC-15): A flush leaves the youngest page in the cache.
    PlainAllocator.evict = good(self, len(self.cache) - 1 if num_pages >= self.num_pages > len(self.cache) else num_pages)

ReleasesTheFencedEarly (ALLOC-03): A step's completion frees what waits for the next one, too.
    PlainAllocator.complete = good(self, step + 1)

SortsTheRow (ALLOC-06): A row's pages are sorted when it grows, so that its tokens stand somewhere else than where they were written.
    PlainAllocator.grow
        - return True
        + row.sort()
        + return True
"""
"""What ours do not have."""

UNSEEN = """
DealsWithoutLooking (ALLOC-06): The last page of a larger allocation stays on the free list. Nothing but its answers can be seen.
    PlainAllocator.alloc:
        slots = good(self, num_slots)
        if num_slots > self.page_size:
            self.free_list.insert(0, slots[-1] // self.page_size)
        return slots
    PlainAllocator.num_free = (self.num_pages - sum(count > 0 for count in self.count.values())) * self.page_size
"""

_UNSEEN = AllocatorCapabilities(paged=True, padding_page=True, misuse=True)
"""With nothing to look at but the answers."""

MUTANTS = (
    *defects("allocator", make_allocator, [KVAllocator], ALLOCATOR),
    *defects("allocator", make_store, [KVStore, KVStoreAdapter], STORE),
    *defects("allocator", make_plain, [PlainAllocator], PLAIN),
    *defects("allocator", make_plain, [PlainAllocator], UNSEEN, _UNSEEN),
)
__getattr__ = lookup(MUTANTS)
