"""The reference model: a tree of single pages, each under the one before it, and who has locked which path.

A radix tree joins pages to nodes and cuts nodes apart; nothing of that can be seen from outside, so there is none of it here. A page
is found by the cell of its last position, which says everything about its prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .texts import Text


class CachedPage:
    """One page of the tree. Pages that come and go under one prefix are different objects."""

    __slots__ = ("cell", "created", "hits", "namespace", "page", "parent", "used")

    def __init__(self, cell: int, namespace: str, page: int, parent: CachedPage | None, now: int) -> None:
        self.cell = cell
        self.namespace = namespace
        self.page = page
        self.parent = parent
        self.created = now
        self.used = now
        self.hits = 0


Path = tuple[CachedPage, ...]


class Remembered:
    """A match that somebody remembers, and how often it is locked."""

    __slots__ = ("handle", "locks", "path")

    def __init__(self, handle: object, path: Path) -> None:
        self.handle = handle
        self.path = path
        self.locks = 0


class Running:
    """A running request: its text, the page of each of its pages of positions, and what it has locked."""

    __slots__ = ("handle", "path", "table", "text")

    def __init__(self, text: Text, handle: object, path: Path, table: list[int]) -> None:
        self.text = text
        self.handle = handle
        self.path = path
        self.table = table


class PrefixCacheModel:
    """The world around a prefix cache: what is cached, who has locked what, which pages are whose."""

    def __init__(self, page_size: int, policy: str) -> None:
        self.page_size = page_size
        self.policy = policy
        self.tree: dict[int, CachedPage] = {}
        self.matches: dict[str, Remembered] = {}
        self.running: dict[str, Running] = {}
        self.ever_evicted: set[int] = set()  # cells of pages that were cached once and then evicted
        self.clock = 0

    def path_of(self, text: Text, num_positions: int | None = None) -> Path:
        """The longest cached prefix of a text, of its first positions if that is said."""
        cells, size = text.cells, self.page_size
        limit = len(cells) if num_positions is None else min(num_positions, len(cells))
        path = []
        for end in range(size - 1, limit, size):
            page = self.tree.get(cells[end])
            if page is None:
                break
            path.append(page)
        return tuple(path)

    def use(self, path: Path, hit: bool) -> None:
        """A match (`hit`) or an insertion passes through a path."""
        self.clock += 1
        for page in path:
            page.used = self.clock
            page.hits += hit

    def add(self, text: Text, path: Path, pages: Sequence[int]) -> Path:
        """Cache more pages of a text, behind `path`."""
        grown = list(path)
        for page in pages:
            cell = text.cells[(len(grown) + 1) * self.page_size - 1]
            grown.append(CachedPage(cell, text.namespace, page, grown[-1] if grown else None, self.clock))
            self.tree[cell] = grown[-1]
        return tuple(grown)

    def remove(self, pages: Iterable[int]) -> None:
        """These pages have been evicted."""
        gone = set(pages)
        for cached in [cached for cached in self.tree.values() if cached.page in gone]:
            del self.tree[cached.cell]
            self.ever_evicted.add(cached.cell)

    def is_stale(self, path: Path) -> bool:
        """Whether a page of the path has been evicted since."""
        return bool(path) and self.tree.get(path[-1].cell) is not path[-1]

    def is_back(self, path: Path) -> bool:
        """Whether all of the path is cached, in the same pages; if it was evicted, it has come back by chance."""
        found = [self.tree.get(cached.cell) for cached in path]
        return all(now is not None and now.page == then.page for now, then in zip(found, path, strict=True))

    def locks(self) -> dict[int, int]:
        """Page -> how many holders protect it, recounted; pages that nobody protects are not in it."""
        count: dict[int, int] = {}
        for match in self.matches.values():
            if match.locks:
                for cached in match.path:
                    count[cached.page] = count.get(cached.page, 0) + match.locks
        for request in self.running.values():
            for cached in request.path:
                count[cached.page] = count.get(cached.page, 0) + 1
        return count

    def evicted_next(self, num_pages: int) -> list[int]:
        """The pages that go first, one after the other: each time the leaf that comes first by the policy and is not locked."""
        locked = self.locks()
        children: dict[int, int] = {}
        for cached in self.tree.values():
            if cached.parent is not None:
                children[cached.parent.cell] = children.get(cached.parent.cell, 0) + 1
        leaves = [c for c in self.tree.values() if c.cell not in children and c.page not in locked]
        order = []
        while leaves and len(order) < num_pages:
            first = min(leaves, key=self._priority)
            order.append(first.page)
            leaves.remove(first)
            parent = first.parent
            if parent is not None:
                children[parent.cell] -= 1
                if not children[parent.cell] and parent.page not in locked:
                    leaves.append(parent)
        return order

    def _priority(self, cached: CachedPage) -> tuple[int, ...]:
        if self.policy == "lru":
            return (cached.used,)
        return (cached.created,) if self.policy == "fifo" else (cached.hits, cached.used)

    def known(self) -> object:
        """The state as a value; of times and hits only the order matters."""
        ranks = {time: rank for rank, time in enumerate(sorted({c.used for c in self.tree.values()}))}
        born = {time: rank for rank, time in enumerate(sorted({c.created for c in self.tree.values()}))}
        return (
            tuple(sorted((c.cell, c.page, ranks[c.used], born[c.created], c.hits) for c in self.tree.values())),
            tuple(
                (name, tuple(c.cell for c in match.path), self.is_stale(match.path), match.locks)
                for name, match in sorted(self.matches.items())
            ),
            tuple(
                (name, request.text.cells, tuple(request.table), tuple(c.cell for c in request.path))
                for name, request in sorted(self.running.items())
            ),
        )
