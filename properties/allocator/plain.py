"""An allocator with every capability of the contract, as plain as can be: the suite's own positive control.

It keeps one dictionary of references and one list of free pages, and does everything page by page. It is what the
mutants are made from where no allocator of ours has the capability, and a model for an adapter.
"""

from __future__ import annotations

from dataclasses import replace

from ...core.errors import InvalidFree, KVPoolExhausted
from .contract import AllocatorCapabilities, AllocatorConfig

EVERYTHING = AllocatorCapabilities.all()


class PlainAllocator:
    """`config` as in the contract. Everything is O(pages)."""

    def __init__(self, config: AllocatorConfig, first_page: int = 1) -> None:
        self.page_size = config.page_size
        self.num_pages = config.num_pages
        pages = range(first_page, first_page + config.num_pages)
        self.free_list = list(reversed(pages))
        self.count = dict.fromkeys(pages, 0)
        self.cache: list[int] = []  # oldest first
        self.fenced: list[tuple[int, list[int], bool]] = []  # (step, pages, whether a row goes with them)
        self.rows: dict[str, list[int]] = {}  # request -> pages
        self.num_rows = config.num_rows
        self.row_width = config.row_width

    # -- pages and slots ----------------------------------------------------------------------------------------------

    def slots(self, pages: list[int]) -> list[int]:
        return [page * self.page_size + offset for page in pages for offset in range(self.page_size)]

    def pages(self, slots: list[int]) -> list[int]:
        return list(dict.fromkeys(slot // self.page_size for slot in slots))

    def take(self, num_pages: int) -> list[int]:
        """Take so many free pages, evicting the oldest cached ones if need be."""
        if num_pages > len(self.free_list) + len(self.cache):
            raise KVPoolExhausted(f"{num_pages} pages asked for, {len(self.free_list)} free, {len(self.cache)} cached")
        self.evict(num_pages - len(self.free_list))
        pages = [self.free_list.pop() for _ in range(num_pages)]
        for page in pages:
            self.count[page] = 1
        return pages

    def drop(self, pages: list[int], keep: bool = False) -> None:
        """Drop one reference of each page; the last one frees it, or leaves it in the cache."""
        for page in pages:
            self.count[page] -= 1
            if self.count[page] == 0:
                (self.cache if keep else self.free_list).append(page)

    # -- the contract -------------------------------------------------------------------------------------------------

    def alloc(self, num_slots: int) -> list[int]:
        if num_slots < 0 or num_slots % self.page_size:
            raise ValueError(f"{num_slots} slots are not whole pages of {self.page_size}")
        return self.slots(self.take(num_slots // self.page_size))

    def alloc_extend(self, prefix_lens: list[int], seq_lens: list[int], last_slots: list[int]) -> list[int] | None:
        size = self.page_size
        counts = [-(-stop // size) + -start // size for start, stop in zip(prefix_lens, seq_lens, strict=True)]
        if sum(counts) > len(self.free_list) + len(self.cache):
            return None
        pages, slots = iter(self.take(sum(counts))), []
        for start, stop, slot in zip(prefix_lens, seq_lens, last_slots, strict=True):
            for position in range(start, stop):
                slot = slot + 1 if position % size else next(pages) * size
                slots.append(slot)
        return slots

    def alloc_decode(self, seq_lens: list[int], last_slots: list[int]) -> list[int] | None:
        return self.alloc_extend([length - 1 for length in seq_lens], seq_lens, last_slots)

    def can_allocate(self, num_slots: int) -> bool:
        available = (len(self.free_list) + len(self.cache)) * self.page_size
        return 0 <= num_slots <= available and num_slots % self.page_size == 0

    def num_free(self) -> int:
        return len(self.free_list) * self.page_size

    def free(self, slots: list[int]) -> None:
        pages = self.pages(slots)
        for page in pages:
            if not self.count.get(page):
                raise InvalidFree(f"page {page} is not held")
        self.drop(pages)

    def free_pages(self) -> list[int]:
        return list(self.free_list)

    def share(self, slots: list[int]) -> None:
        for page in self.pages(slots):
            self.count[page] += 1

    def references(self, page: int) -> int:
        return self.count[page]

    def retire(self, slots: list[int]) -> None:
        self.drop(self.pages(slots), keep=True)

    def reuse(self, slots: list[int]) -> None:
        for page in self.pages(slots):
            self.cache.remove(page)
            self.count[page] = 1

    def evict(self, num_pages: int) -> None:
        while num_pages > 0 and self.cache:
            self.free_list.append(self.cache.pop(0))
            num_pages -= 1

    def cached_pages(self) -> list[int]:
        return list(self.cache)

    def free_after(self, slots: list[int], step: int) -> None:
        self.fenced.append((step, self.pages(slots), False))

    def complete(self, step: int) -> None:
        due = [pages for fence, pages, _ in self.fenced if fence <= step]
        self.fenced = [item for item in self.fenced if item[0] > step]
        for pages in due:
            self.drop(pages)

    def num_deferred(self) -> int:
        return sum(len(pages) for _, pages, _ in self.fenced)

    def open(self, request: str) -> bool:
        if len(self.rows) + sum(with_row for _, _, with_row in self.fenced) >= self.num_rows:
            return False
        self.rows[request] = []
        return True

    def grow(self, request: str, num_tokens: int) -> bool:
        row = self.rows[request]
        missing = -(-num_tokens // self.page_size) - len(row)
        if num_tokens > self.row_width or missing > len(self.free_list) + len(self.cache):
            return False
        if missing > 0:
            row += self.take(missing)
        return True

    def trim(self, request: str, num_tokens: int) -> None:
        keep = -(-num_tokens // self.page_size)
        self.drop(self.rows[request][keep:])
        del self.rows[request][keep:]

    def close(self, request: str, step: int | None = None) -> None:
        pages = self.rows.pop(request)
        if step is None:
            self.drop(pages)
        else:
            self.fenced.append((step, pages, True))

    def slots_of(self, request: str) -> list[int]:
        return self.slots(self.rows[request])


def make(config: AllocatorConfig) -> PlainAllocator:
    return PlainAllocator(config)


def make_unpadded(config: AllocatorConfig) -> PlainAllocator:
    """Make an allocator that hands out page 0 as well."""
    return PlainAllocator(config, first_page=0)


make.capabilities = EVERYTHING
make_unpadded.capabilities = replace(EVERYTHING, padding_page=False)
