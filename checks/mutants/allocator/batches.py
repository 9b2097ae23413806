"""Planted defects of allocators in batches, where the last pages of requests need not be full."""

from __future__ import annotations

from ....properties.allocator.plain import PlainAllocator


class BeginsAFreshPage(PlainAllocator):
    """A request goes on in a new page, whether its last one is full or not."""

    def alloc_extend(self, prefix_lens, seq_lens, last_slots):
        return super().alloc_extend(
            [0] * len(prefix_lens), [b - a for a, b in zip(prefix_lens, seq_lens, strict=True)], [-1] * len(last_slots)
        )


class GoesOnPastThePage(PlainAllocator):
    """The token behind a full page goes into the next slot, whosever page that is."""

    def alloc_decode(self, seq_lens, last_slots):
        return [slot + 1 for slot in last_slots]


class KeepsThePagesOfARefusedBatch(PlainAllocator):
    """A batch takes pages request by request, and keeps them where a later one finds none."""

    def alloc_extend(self, prefix_lens, seq_lens, last_slots):
        slots = [
            super(KeepsThePagesOfARefusedBatch, self).alloc_extend([a], [b], [c])
            for a, b, c in zip(prefix_lens, seq_lens, last_slots, strict=True)
        ]
        return None if None in slots else [slot for part in slots for slot in part]


class CountsAPageForEach(PlainAllocator):
    """A batch is refused unless there is a free page for each request, needed or not."""

    def alloc_decode(self, seq_lens, last_slots):
        return super().alloc_decode(seq_lens, last_slots) if len(seq_lens) <= len(self.free_list) else None


DEFECTS = (
    (BeginsAFreshPage, ("ALLOC-11", "ALLOC-01")),
    (GoesOnPastThePage, ("ALLOC-11", "ALLOC-01")),
    (KeepsThePagesOfARefusedBatch, ("ALLOC-09",)),
    (CountsAPageForEach, ("ALLOC-14",)),
)
"""(class, the invariants of which one must catch it)."""
