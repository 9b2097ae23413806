"""A block manager as plain as can be: a dictionary of references, and every page's whole prefix as its key."""

from __future__ import annotations

from collections.abc import Sequence

from ..prefix_cache.events import CacheEvent
from .contract import STATE, BlockManagerCapabilities, BlockManagerConfig

Key = tuple[int, str, tuple[int, ...]]

GONE = 0
"""In a table: a page that no later position sees. Page 0 is never handed out."""


class PlainBlockManager:
    """`free`: pages that no request holds, the one to be handed out next first; `keys`:
    page -> group, namespace and text up to its end; `tables`: request -> pages by group."""

    capabilities: BlockManagerCapabilities = BlockManagerCapabilities.all()

    def __init__(self, config: BlockManagerConfig) -> None:
        self.config: BlockManagerConfig = config
        self.size: int = config.page_size
        self.windows: tuple[int, ...] = config.windows
        self.lookahead: int = config.lookahead
        self.free = list(range(1, config.num_pages + 1))
        self.count = dict.fromkeys(self.free, 0)
        self.keys: dict[int, Key] = {}
        self.tables: dict[str, list[list[int]]] = {}
        self.names: dict[str, str] = {}  # request -> namespace
        self.lengths: dict[str, int] = {}
        self.published: list[CacheEvent] = []

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
        return max(length - max(window - 1, 1), 0) // self.size if window else 0

    def lacks(self, request: str, tables: list[list[int]], length: int) -> list[int]:
        """Return how many pages each table takes for so many positions: of states one, and once those of drafts."""
        most = 1 if request in self.lengths else 1 + self.lookahead
        missing = [max(self.config.pages_to(group, length) - len(pages), 0) for group, pages in enumerate(tables)]
        return [min(n, most) if window == STATE else n for n, window in zip(missing, self.windows, strict=True)]

    def admit(self, request: str, tokens: Sequence[int], namespace: str, num_tokens: int) -> int | None:
        if request in self.tables:
            raise ValueError(f"{request} is there already")
        found = self.lookup(tokens, namespace)
        length = len(found[0]) * self.size
        num_tokens = min(num_tokens, len(tokens) - length)
        cached = [page for pages in found for page in pages if page != GONE]
        room = len(self.free) - sum(self.count[page] == 0 for page in cached)
        if sum(self.lacks(request, found, length + num_tokens)) > room:
            return None
        for page in cached:
            self.hold(page)
        self.tables[request], self.names[request] = found, namespace
        self.extend(request, tokens, length + num_tokens)
        return length

    def grow(self, request: str, tokens: Sequence[int], num_tokens: int) -> bool:
        if request not in self.tables:
            raise ValueError(f"there is no {request}")
        length = self.lengths[request] + num_tokens
        if sum(self.lacks(request, self.tables[request], length)) > len(self.free):
            return False
        self.forget(request)
        self.extend(request, tokens, length)
        return True

    def forget(self, request: str) -> None:
        """Give back the pages that the next position does not see."""
        for window, pages in zip(self.windows, self.tables[request], strict=True):
            for number in range(self.first_seen(self.lengths[request], window)):
                self.give_back(pages[number])
                pages[number] = GONE

    def extend(self, request: str, tokens: Sequence[int], length: int) -> None:
        """Take the pages that are missing, and cache those that are full. Pages of states that are passed over are not
        taken; the pages for drafts stay at the end of a table."""
        tables = self.tables[request]
        for group, (pages, lacks) in enumerate(zip(tables, self.lacks(request, tables, length), strict=True)):
            passed = max(self.config.pages_to(group, length) - len(pages) - lacks, 0)
            has_drafts = self.windows[group] == STATE and request in self.lengths
            at = len(pages) - self.lookahead * has_drafts
            pages[at:at] = [GONE] * passed + [self.take() for _ in range(lacks)]
            for number, page in enumerate(pages[: length // self.size], 1):
                if page != GONE and page not in self.keys:
                    self.cache(page, group, tokens, self.names[request], number * self.size)
        self.lengths[request] = length

    def cache(self, page: int, group: int, tokens: Sequence[int], namespace: str, end: int) -> None:
        """Let a page be found that is full now."""
        start = end - self.size if self.windows[group] != STATE else 0
        self.keys[page] = self.key(group, tokens, namespace, end)
        parent = self.key(group, tokens, namespace, start) if start else None
        self.published.append(CacheEvent(True, [self.keys[page]], group, parent, tokens[start:end], namespace))

    def uncache(self, page: int) -> None:
        """Let a page not be found any more that is handed out."""
        if key := self.keys.pop(page, None):
            self.published.append(CacheEvent(False, [key], key[0]))

    def take(self) -> int:
        """Hand out a free page."""
        page = self.free[0]
        self.uncache(page)
        self.hold(page)
        return page

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
        del self.lengths[request]
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
        published, self.published = self.published, []
        return published

    def num_free(self) -> int:
        return len(self.free)


make = PlainBlockManager
