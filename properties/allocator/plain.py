"""An allocator with every capability of the contract, as plain as can be: the suite's own positive control.

It keeps one dictionary of references and one list of free pages, and does everything page by page. It is what the
mutants are made from where no allocator of ours has the capability, and a model for an adapter.
"""

from __future__ import annotations

from dataclasses import replace

from ...core.errors import InvalidFree, KVPoolExhausted
from .contract import AllocatorCapabilities, AllocatorConfig
from .groups import UnitGroup, UnitTable

EVERYTHING = AllocatorCapabilities.all()


class PlainUnits:
    """The units of a group of layers: a list of free ids, and a table for each row."""

    def __init__(self, group: UnitGroup, allocator: PlainAllocator) -> None:
        self.group = group
        self.allocator = allocator
        self.free_list = list(range(group.capacity or allocator.num_pages * 4 // group.quarters))
        self.pages: list[int] = []  # of the pool, those that the units take
        self.used = 0
        self.rows: dict[str, UnitTable] = {}
        self.fenced: list[tuple[int, tuple[int, ...]]] = []

    def missing_pages(self, num_units: int) -> int | None:
        """Return the pages that so many units more need, None if there are not so many units."""
        if self.group.capacity and num_units > len(self.free_list):
            return None
        return self.group.pages_of(self.used + num_units) - len(self.pages)

    def change(self, num_units: int) -> None:
        """Take or give back the pages for so many units more, or fewer."""
        self.used += num_units
        missing = self.missing_pages(0)
        if missing > 0:
            self.pages += self.allocator.take(missing)
        elif missing < 0:
            self.allocator.drop(self.pages[missing:])
            del self.pages[missing:]

    def extend(self, request: str, num_units: int) -> None:
        self.change(num_units)
        first, units = self.rows[request]
        self.rows[request] = first, units + tuple([self.free_list.pop() for _ in range(num_units)])

    def cut(self, request: str, begin: int, end: int) -> None:
        """Let a row keep the units of the pages `begin … end − 1`."""
        first, units = self.rows[request]
        begin, end = max(begin, first), min(max(end, first), first + len(units))
        self.give_back(units[: begin - first] + units[end - first :])
        self.rows[request] = begin, units[begin - first : end - first]

    def give_back(self, units: tuple[int, ...]) -> None:
        self.free_list += units
        self.change(-len(units))


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
        self.groups = [PlainUnits(group, self) for group in config.unit_groups]
        self.windows = [each for each in self.groups if each.group.window]
        self.states = [each for each in self.groups if not each.group.window]

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
        for each in self.groups:
            for units in [units for fence, units in each.fenced if fence <= step]:
                each.give_back(units)
            each.fenced = [item for item in each.fenced if item[0] > step]

    def num_deferred(self) -> int:
        return sum(len(pages) for _, pages, _ in self.fenced)

    def open(self, request: str) -> bool:
        if len(self.rows) + sum(with_row for _, _, with_row in self.fenced) >= self.num_rows:
            return False
        if not self.has_room(0, [(each, each.group.states) for each in self.states]):
            return False
        self.rows[request] = []
        for each in self.groups:
            each.rows[request] = 0, ()
            each.extend(request, 0 if each.group.window else each.group.states)
        return True

    def has_room(self, num_pages: int, wanted: list[tuple[PlainUnits, int]]) -> bool:
        """Return whether so many pages, and so many units more of groups, can be had."""
        missing = [each.missing_pages(num_units) for each, num_units in wanted]
        return None not in missing and num_pages + sum(missing) <= len(self.free_list) + len(self.cache)

    def grow(self, request: str, num_tokens: int) -> bool:
        row = self.rows[request]
        missing = max(-(-num_tokens // self.page_size) - len(row), 0)
        if num_tokens > self.row_width or not self.has_room(missing, [(each, missing) for each in self.windows]):
            return False
        if missing:
            row += self.take(missing)
            for each in self.windows:
                each.extend(request, missing)
        return True

    def advance(self, request: str, num_tokens: int) -> None:
        for each in self.windows:
            each.cut(request, each.group.first_page(num_tokens, self.page_size), len(self.rows[request]))

    def trim(self, request: str, num_tokens: int) -> None:
        keep = -(-num_tokens // self.page_size)
        self.drop(self.rows[request][keep:])
        del self.rows[request][keep:]
        for each in self.windows:
            each.cut(request, 0, keep)

    def close(self, request: str, step: int | None = None) -> None:
        pages = self.rows.pop(request)
        if step is None:
            self.drop(pages)
        else:
            self.fenced.append((step, pages, True))
        for each in self.groups:
            _, units = each.rows.pop(request)
            if step is None:
                each.give_back(units)
            else:
                each.fenced.append((step, units))

    def units_of(self, request: str) -> list[UnitTable]:
        return [each.rows[request] for each in self.groups]

    def used_units(self) -> list[int]:
        return [each.used for each in self.groups]

    def unit_pages(self) -> list[list[int]]:
        return [each.pages for each in self.groups]

    def slots_of(self, request: str) -> list[int]:
        return self.slots(self.rows[request])


def make(config: AllocatorConfig) -> PlainAllocator:
    return PlainAllocator(config)


def make_unpadded(config: AllocatorConfig) -> PlainAllocator:
    """Make an allocator that hands out page 0 as well."""
    return PlainAllocator(config, first_page=0)


make.capabilities = EVERYTHING
make_unpadded.capabilities = replace(EVERYTHING, padding_page=False)
