"""The reference model of a prefix cache: a tree of single pages, who has locked which path, and the moment that
checkers look at.

A radix tree joins pages to nodes and splits nodes; that cannot be seen from outside, so the model has no nodes. A page
is found by the cell of its last position: a number for the namespace and all keys up to there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..allocator.groups import UnitGroup
from .contract import PrefixCacheCapabilities, PrefixCacheConfig
from .events import CacheAccount
from .texts import Text, cell, extended
from .units import CachedUnits


@dataclass(slots=True, eq=False)
class CachedPage:
    """One page of the tree. Pages that come and go under one prefix are different objects."""

    cell: int
    namespace: str
    page: int
    parent: CachedPage | None
    created: int
    used: int
    hits: int = 0


Path = tuple[CachedPage, ...]


@dataclass(slots=True, eq=False)
class Remembered:
    """A match that a caller remembers, and how often it is locked."""

    handle: object
    path: Path
    locks: int = 0


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A running request: its text, what it has locked, and the page of each of its pages of positions.

    With groups of layers: the positions that it began behind, those that it has handed over since, and the cached pages
    behind which it found no state.
    """

    text: Text
    handle: object
    path: Path
    table: list[int]
    begun: int = 0
    committed: int = 0
    branch: int = 0


def slots_of(pages: Sequence[int], size: int) -> tuple[int, ...]:
    return tuple([page * size + offset for page in pages for offset in range(size)])


class PrefixCacheModel:
    """What is cached, who has locked what, which pages each request has, and the pool:
    its free pages, and what stands in each slot."""

    def __init__(self, num_pages: int, page_size: int, policy: str, groups: Sequence[UnitGroup] = ()) -> None:
        self.free = list(range(num_pages, 0, -1))
        self.memory: dict[int, int] = {}  # slot -> cell
        self.page_size = page_size
        self.policy = policy
        self.tree: dict[int, CachedPage] = {}  # cell -> page
        self.matches: dict[str, Remembered] = {}
        self.running: dict[str, RunningRequest] = {}
        self.account = CacheAccount(page_size, lambda namespace: cell(0, namespace), extended, names_are_pages=True)
        self.host = HostUses(0, page_size)
        self.ever_evicted: set[int] = set()  # cells of pages that were cached once and then evicted
        self.clock = 0
        self.units = CachedUnits(groups, page_size)

    def match_of(self, text: Text, num_positions: int | None = None) -> Path:
        """Return the longest cached prefix behind which a request may start."""
        path = self.path_of(text, num_positions)
        return self.units.usable(path) if self.units.groups else path

    def path_of(self, text: Text, num_positions: int | None = None) -> Path:
        """Return the longest cached prefix of a text, or of its first positions."""
        cells, size = text.cells, self.page_size
        limit = len(cells) if num_positions is None else min(num_positions, len(cells))
        path = []
        for end in range(size - 1, limit, size):
            page = self.tree.get(cells[end])
            if page is None:
                break
            path.append(page)
        return tuple(path)

    def use(self, path: Iterable[CachedPage], hit: bool) -> None:
        """Note that a match (`hit`) or an insertion passes through a path."""
        self.clock += 1
        for page in path:
            page.used = self.clock
            page.hits += hit

    def cache(self, text: Text, table: list[int], num_positions: int) -> Path:
        """Cache the first positions of a table, and let it begin with the pages of that path."""
        path = list(self.path_of(text, num_positions))
        self.use(path, hit=False)
        for page in table[len(path) : num_positions // self.page_size]:
            cell = text.cells[(len(path) + 1) * self.page_size - 1]
            parent = path[-1] if path else None
            path.append(CachedPage(cell, text.namespace, page, parent, self.clock, self.clock))
            self.tree[cell] = path[-1]
        table[: len(path)] = [cached.page for cached in path]
        return tuple(path)

    def remove(self, pages: Iterable[int]) -> None:
        gone = set(pages)
        for cached in [cached for cached in self.tree.values() if cached.page in gone]:
            del self.tree[cached.cell]
            self.ever_evicted.add(cached.cell)

    def compute(self, text: Text, table: Sequence[int], first: int) -> None:
        """Write the positions of a text from page number `first` on."""
        slots = slots_of(table[first:], self.page_size)
        self.memory.update(zip(slots, text.cells[first * self.page_size :], strict=False))

    def give_back(self, pages: Iterable[int]) -> None:
        """Free pages and clear their slots, so that reading one is noticed."""
        for page in pages:
            self.free.append(page)
            self.memory.update(dict.fromkeys(slots_of([page], self.page_size), 0))

    def is_stale(self, path: Path) -> bool:
        """Return whether a page of the path has been evicted since."""
        return bool(path) and self.tree.get(path[-1].cell) is not path[-1]

    def is_back(self, path: Path) -> bool:
        """Return whether all of the path is cached in the same pages, even if it was evicted in between."""
        found = [self.tree.get(cached.cell) for cached in path]
        return all(now is not None and now.page == then.page for now, then in zip(found, path, strict=True))

    def locks(self) -> dict[int, int]:
        """Return page -> how many holders protect it, recounted; pages without a holder are left out."""
        count: dict[int, int] = {}
        for holder in (*self.matches.values(), *self.running.values()):
            locks = holder.locks if isinstance(holder, Remembered) else 1
            for cached in holder.path if locks else ():
                count[cached.page] = count.get(cached.page, 0) + locks
        return count

    def evicted_next(self, num_pages: int) -> list[int]:
        """Return the pages that go first: each time the unlocked leaf that is first by the policy."""
        locked = self.locks()
        children = Counter(cached.parent.cell for cached in self.tree.values() if cached.parent is not None)
        leaves = [c for c in self.tree.values() if c.cell not in children and c.page not in locked]
        order: list[int] = []
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


# -- what the checkers look at ----------------------------------------------------------------------------------------


class Node(NamedTuple):
    """A node of the tree, as the cache shows it."""

    id: int
    parent: int
    locks: int
    slots: tuple[int, ...]
    children: tuple[int, ...]


class Hosted(NamedTuple):
    """What host memory has of a text: `length` positions at its front, of which it must have `least`."""

    text: Text
    length: int
    least: int


class HostUses:
    """Knows what host memory must have: of all pages that were handed over, those that were used last, as many as fit.

    A page is used when a request hands it over, and may be used when a text is looked up or leaves. Pages of one use
    are as old as each other, so that any of them may go first.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._num_pages, self._page_size = num_pages, page_size
        self._now: int = 0
        self._used: dict[int, int] = {}  # cell of a page -> when it was used for certain
        self._may_be_used: dict[int, int] = {}
        self.texts: dict[Text, None] = {}  # that were handed over, the oldest first

    def cells(self, text: Text, num_positions: int | None = None) -> tuple[int, ...]:
        """Return the cells that name the whole pages at the front of a text."""
        count = (len(text.cells) if num_positions is None else num_positions) // self._page_size
        return tuple(text.cells[self._page_size - 1 : count * self._page_size : self._page_size])

    def hand_over(self, text: Text, num_positions: int) -> None:
        """Note that the first positions of a text are copied, as far as they fit."""
        self._now += 1
        cells = self.cells(text, num_positions)[: self._num_pages]
        self._used.update(dict.fromkeys(cells, self._now))
        self._may_be_used.update(dict.fromkeys(cells, self._now))
        self.texts.pop(text, None)
        self.texts[text] = None

    def may_use(self, text: Text) -> None:
        self._now += 1
        self._may_be_used.update({cell: self._now for cell in self.cells(text) if cell in self._used})

    def least(self, text: Text) -> int:
        """Return how many pages at the front of a text must be there."""
        for number, end in enumerate(cells := self.cells(text)):
            used = self._used.get(end)
            if used is None or sum(at >= used for at in self._may_be_used.values()) > self._num_pages:
                return number
        return len(cells)

    def were_copied(self, cells: Sequence[int]) -> bool:
        return self._used.keys() >= set(cells)


class PrefixCacheObservation(NamedTuple):
    """All that a prefix cache shows; None where it declares no such capability.
    Equal if and only if nothing has changed."""

    num_evictable: int
    num_protected: int
    nodes: tuple[Node, ...] | None
    free_slots: tuple[int, ...] | None


class Matched(NamedTuple):
    """A look-up: what it gave, and what is cached. `slots` is None where only the length was asked for."""

    text: Text
    length: int
    slots: tuple[int, ...] | None
    path: Path
    found: Sequence[int | None]  # the cell of each slot


class Evicted(NamedTuple):
    """An eviction. `asked` is None where the cache decided how much;
    `order` are the pages that go first, as many as went."""

    asked: int | None
    num_evictable: int
    slots: tuple[int, ...]
    cached: frozenset[int]
    locked: frozenset[int]
    order: tuple[int, ...]


class Inserted(NamedTuple):
    """An insertion: what it gave back, and what it should have."""

    canonical: tuple[int, ...]
    duplicates: tuple[int, ...]
    should_canonical: tuple[int, ...]
    should_duplicates: tuple[int, ...]


NOTHING = PrefixCacheObservation(0, 0, None, None)


@dataclass(slots=True)
class PrefixCacheMoment:
    """One operation, what the cache answered, and all that it shows before and after."""

    config: PrefixCacheConfig
    capabilities: PrefixCacheCapabilities
    model: PrefixCacheModel
    operation: object = "make"
    before: PrefixCacheObservation = NOTHING
    after: PrefixCacheObservation = NOTHING
    locks: dict[int, int] = field(default_factory=dict)  # page -> holders that protect it, recounted
    matches: list[Matched] = field(default_factory=list)
    evicted: Evicted | None = None
    inserted: Inserted | None = None
    locked: Path | None = None  # what was locked
    stale: bool = False  # whether a page of what was to be locked is gone
    refusal: str | None = None
    wrong: tuple[str, int, int | None] | None = None  # (request, position, slot) of the first slot with other content
    tables: dict[str, tuple[int, ...]] = field(default_factory=dict)  # request -> slots of its table
    told_wrong: str = ""  # what the cache's events cannot say
    hosted: tuple[Hosted, ...] = ()
    # With groups of layers: the request that has just started or handed over pages, and the cells of these
    entered: RunningRequest | None = None
    giver: tuple[str, frozenset[int]] = ("", frozenset())
    to_be_found: tuple[Path, int] | None = None  # pages that were handed over, and behind how many there is a start
    should_share: tuple[str, Path] | None = None  # a request whose table must begin with these cached pages

    def slots_of(self, pages: Sequence[int]) -> tuple[int, ...]:
        return slots_of(pages, self.config.page_size)

    def cached_pages(self) -> list[int]:
        return [cached.page for cached in self.model.tree.values()]

    def note_match(self, text: Text, slots: tuple[int, ...], num_positions: int | None = None) -> Path:
        """Note what the cache has found, and return what is cached."""
        path = self.model.match_of(text, num_positions)
        self.model.use(path, hit=True)
        self.matches.append(Matched(text, len(slots), slots, path, tuple(map(self.model.memory.get, slots))))
        return path

    def note_eviction(self, asked: int | None, slots: tuple[int, ...], pages: list[int]) -> Evicted:
        """Note what was evicted, and what should have been; the model loses these pages."""
        model = self.model
        locked = frozenset(model.locks())
        cached = frozenset(self.cached_pages())
        evictable = (len(cached) - len(locked & cached)) * self.config.page_size
        order = tuple(model.evicted_next(len(pages))) if self.capabilities.lru else ()
        self.evicted = Evicted(asked, evictable, slots, cached, locked, order)
        model.remove(pages)
        return self.evicted
