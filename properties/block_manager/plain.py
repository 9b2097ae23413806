"""A block manager as plain as can be: a dictionary of references, and every page's whole prefix as its key."""

from __future__ import annotations

from collections.abc import Sequence

from .contract import BlockManagerCapabilities, BlockManagerConfig, CacheEvent

Key = tuple[int, str, tuple[int, ...]]

GONE = 0
"""In a table: a page that no later position sees. Page 0 is never handed out."""


class PlainBlockManager:
    """`free`: pages that no request holds, the one to be handed out next first; `keys`:
    page -> group, namespace and text up to its end; `tables`: request -> pages by group."""

    capabilities = BlockManagerCapabilities.all()

    def __init__(self, config: BlockManagerConfig) -> None:
        self.size: int = config.page_size
        self.windows: tuple[int, ...] = config.windows
        self.lookahead: int = config.lookahead
        self.free = list(range(1, config.num_pages + 1))
        self.count = dict.fromkeys(self.free, 0)
        self.keys: dict[int, Key] = {}
        self.tables: dict[str, list[list[int]]] = {}
        self.names: dict[str, str] = {}  # request -> namespace
        self.lengths: dict[str, int] = {}
        self.told: list[CacheEvent] = []

    def key(self, group: int, tokens: Sequence[int], namespace: str, end: int) -> Key:
        return group, namespace, tuple(tokens[:end])

    def lookup(self, tokens: Sequence[int], namespace: str) -> list[list[int]]:
        """Return the pages of the longest prefix of which every group has what the next position sees."""
        where = {key: page for page, key in self.keys.items()}
        for length in range((len(tokens) - 1) // self.size * self.size, 0, -self.size):
            tables = []
            for group, window in enumerate(self.windows):
                first = self.first_seen(length, window)
                ends = range((first + 1) * self.size, length + 1, self.size)
                pages = [where.get(self.key(group, tokens, namespace, end), GONE) for end in ends]
                tables.append([GONE] * first + pages)
                if GONE in pages:
                    break
            else:
                return tables
        return [[] for _ in self.windows]

    def first_seen(self, length: int, window: int) -> int:
        """Return the first page of a table that the position `length` sees."""
        return min(max(length - window + 1, 0), length) // self.size if window else 0

    def needed(self, length: int) -> int:
        """Return the pages of a table with so many positions."""
        return -(-(length + self.lookahead) // self.size)

    def admit(self, request: str, tokens: Sequence[int], namespace: str, num_tokens: int) -> int | None:
        if request in self.tables:
            raise ValueError(f"{request} is there already")
        found = self.lookup(tokens, namespace)
        length = len(found[0]) * self.size
        num_tokens = min(num_tokens, len(tokens) - length)
        missing = sum(self.needed(length + num_tokens) - len(pages) for pages in found)
        cached = [page for pages in found for page in pages if page != GONE]
        if missing > len(self.free) - sum(self.count[page] == 0 for page in cached):
            return None
        for page in cached:
            self.hold(page)
        self.tables[request], self.names[request], self.lengths[request] = found, namespace, length
        self.extend(request, tokens, num_tokens)
        return length

    def grow(self, request: str, tokens: Sequence[int], num_tokens: int) -> bool:
        if request not in self.tables:
            raise ValueError(f"there is no {request}")
        needed = self.needed(self.lengths[request] + num_tokens)
        if sum(max(needed - len(pages), 0) for pages in self.tables[request]) > len(self.free):
            return False
        self.forget(request)
        self.extend(request, tokens, num_tokens)
        return True

    def forget(self, request: str) -> None:
        """Give back the pages that the next position does not see."""
        for window, pages in zip(self.windows, self.tables[request], strict=True):
            for number in range(self.first_seen(self.lengths[request], window)):
                self.give_back(pages[number])
                pages[number] = GONE

    def extend(self, request: str, tokens: Sequence[int], num_tokens: int) -> None:
        """Take the pages that are missing, and cache those that are full."""
        self.lengths[request] += num_tokens
        for group, pages in enumerate(self.tables[request]):
            while len(pages) < self.needed(self.lengths[request]):
                page = self.free[0]
                self.uncache(page)
                self.hold(page)
                pages.append(page)
            for number, page in enumerate(pages[: self.lengths[request] // self.size], 1):
                if page != GONE and page not in self.keys:
                    self.cache(page, group, tokens, self.names[request], number * self.size)

    def cache(self, page: int, group: int, tokens: Sequence[int], namespace: str, end: int) -> None:
        """Let a page be found that is full now."""
        start = end - self.size
        self.keys[page] = self.key(group, tokens, namespace, end)
        parent = self.key(group, tokens, namespace, start) if start else None
        self.told.append(CacheEvent(True, [self.keys[page]], group, parent, tokens[start:end], namespace))

    def uncache(self, page: int) -> None:
        """Let a page not be found any more that is handed out."""
        if key := self.keys.pop(page, None):
            self.told.append(CacheEvent(False, [key], key[0]))

    def hold(self, page: int) -> None:
        if not self.count[page]:
            self.free.remove(page)
        self.count[page] += 1

    def give_back(self, page: int) -> None:
        if page == GONE:
            return
        self.count[page] -= 1
        if not self.count[page]:
            self.free.append(page)

    def release(self, request: str) -> None:
        if request not in self.tables:
            raise ValueError(f"there is no {request}")
        for pages in self.tables.pop(request):
            for page in reversed(pages):
                self.give_back(page)

    def slots_of(self, request: str) -> list[int]:
        return self.tables_of(request)[0]

    def tables_of(self, request: str) -> list[list[int]]:
        return [
            [page * self.size + offset if page != GONE else -1 for page in pages for offset in range(self.size)]
            for pages in self.tables[request]
        ]

    def events(self) -> list[CacheEvent]:
        told, self.told = self.told, []
        return told

    def num_free(self) -> int:
        return len(self.free)


make = PlainBlockManager
