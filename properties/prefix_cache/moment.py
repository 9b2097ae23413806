"""One moment of a prefix cache's trial: the operation, what the cache answered, and all that can be observed before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .contract import PrefixCacheCapabilities, PrefixCacheConfig
from .model import Path, PrefixCacheModel
from .texts import Text


class Node(NamedTuple):
    """A node of the tree, as the cache shows it."""

    id: int
    parent: int
    locks: int
    slots: tuple[int, ...]
    children: tuple[int, ...]


class Observation(NamedTuple):
    """All that a prefix cache shows; None where it declares no such capability. Equal if and only if nothing has changed."""

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
    """An eviction. `asked` is None where the cache decided how much; `order` are the pages that go first, as many as went."""

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


NOTHING = Observation(0, 0, None, None)


@dataclass(slots=True)
class Moment:
    """One operation and what came of it. `locks` is a recount: page -> number of holders that protect it."""

    config: PrefixCacheConfig
    capabilities: PrefixCacheCapabilities
    model: PrefixCacheModel
    operation: object = "make"
    drained: bool = False
    matches: list[Matched] = field(default_factory=list)
    evicted: Evicted | None = None
    inserted: Inserted | None = None
    locked: Path | None = None  # what was locked
    stale: bool = False  # whether a page of what was to be locked or unlocked is gone
    refusal: str | None = None
    must_refuse: bool = False
    wrong: tuple | None = (
        None  # (whose, position, slot, found, expected) of a slot that does not hold what its request wrote
    )
    tables: dict[str, tuple[int, ...]] = field(default_factory=dict)  # request -> slots of its table
    should_share: tuple[str, Path] | None = None  # a request whose table must begin with these cached pages
    before: Observation = NOTHING
    after: Observation = NOTHING
    locks_before: dict[int, int] = field(default_factory=dict)
    locks: dict[int, int] = field(default_factory=dict)

    def slots_of(self, pages: Sequence[int]) -> tuple[int, ...]:
        size = self.config.page_size
        return tuple([page * size + offset for page in pages for offset in range(size)])

    def cached_pages(self) -> list[int]:
        return [cached.page for cached in self.model.tree.values()]
