"""A block manager as plain as can be: a dictionary of references, and every page's whole prefix as its key."""

from __future__ import annotations

from collections.abc import Sequence

from .contract import ManagerCapabilities, ManagerConfig

Key = tuple[str, tuple[int, ...]]


class PlainManager:
    """`free`: pages that no request holds, the one to be handed out next first; `keys`:
    page -> namespace and text up to its end."""

    capabilities = ManagerCapabilities.all()

    def __init__(self, config: ManagerConfig) -> None:
        self.size = config.page_size
        self.free = list(range(1, config.num_pages + 1))
        self.count = dict.fromkeys(self.free, 0)
        self.keys: dict[int, Key] = {}
        self.tables: dict[str, list[int]] = {}
        self.names: dict[str, str] = {}  # request -> namespace
        self.lengths: dict[str, int] = {}

    def key(self, tokens: Sequence[int], namespace: str, end: int) -> Key:
        return namespace, tuple(tokens[:end])

    def lookup(self, tokens: Sequence[int], namespace: str) -> list[int]:
        pages, where = [], {key: page for page, key in self.keys.items()}
        for end in range(self.size, len(tokens), self.size):
            page = where.get(self.key(tokens, namespace, end))
            if page is None:
                break
            pages.append(page)
        return pages

    def admit(self, request: str, tokens: Sequence[int], namespace: str, num_tokens: int) -> int | None:
        if request in self.tables:
            raise ValueError(f"{request} is there already")
        found = self.lookup(tokens, namespace)
        length = len(found) * self.size
        num_tokens = min(num_tokens, len(tokens) - length)
        missing = -(-(length + num_tokens) // self.size) - len(found)
        if missing > len(self.free) - sum(self.count[page] == 0 for page in found):
            return None
        for page in found:
            self.hold(page)
        self.tables[request], self.names[request], self.lengths[request] = found, namespace, length
        self.extend(request, tokens, num_tokens)
        return length

    def grow(self, request: str, tokens: Sequence[int], num_tokens: int) -> bool:
        if request not in self.tables:
            raise ValueError(f"there is no {request}")
        missing = -(-(self.lengths[request] + num_tokens) // self.size) - len(self.tables[request])
        if missing > len(self.free):
            return False
        self.extend(request, tokens, num_tokens)
        return True

    def extend(self, request: str, tokens: Sequence[int], num_tokens: int) -> None:
        """Take the pages that are missing, and cache those that are full."""
        table = self.tables[request]
        self.lengths[request] += num_tokens
        while len(table) * self.size < self.lengths[request]:
            page = self.free[0]
            self.keys.pop(page, None)
            self.hold(page)
            table.append(page)
        for number, page in enumerate(table[: self.lengths[request] // self.size], 1):
            self.keys.setdefault(page, self.key(tokens, self.names[request], number * self.size))

    def hold(self, page: int) -> None:
        if not self.count[page]:
            self.free.remove(page)
        self.count[page] += 1

    def release(self, request: str) -> None:
        if request not in self.tables:
            raise ValueError(f"there is no {request}")
        for page in reversed(self.tables.pop(request)):
            self.count[page] -= 1
            if not self.count[page]:
                self.free.append(page)

    def slots_of(self, request: str) -> list[int]:
        return [page * self.size + offset for page in self.tables[request] for offset in range(self.size)]

    def num_free(self) -> int:
        return len(self.free)


make = PlainManager
