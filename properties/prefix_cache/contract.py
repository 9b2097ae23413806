"""The contract of a prefix cache: match, insert, lock, evict, and, where declared, namespaces, an order, its nodes,
a request table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from ..allocator.groups import UnitGroup, UnitTable, draw_unit_groups, unit_groups
from ..harness.contract import Capabilities, needs
from ..harness.letters import Choices
from .events import CacheEvent


@dataclass(frozen=True, slots=True)
class PrefixCacheConfig:
    """What `make(config)` builds. Sizes are small on purpose: a defect shows at the edges.

    `num_pages` pages of `page_size` slots can be in use at once; their slots are
    `page_size … (num_pages + 1) · page_size − 1`, page 0 is not used. `bigram`: the key of a position is its token and
    the next one, so n tokens have n − 1 keys. `policy`: what is evicted first, "lru", "fifo" or "lfu". `hash_values`:
    how many different values the cache's hash may take, 0 if as many as it likes.
    """

    num_pages: int
    page_size: int = 1
    bigram: bool = False
    policy: str = "lru"
    hash_values: int = 0
    host_pages: int = 0  # pages of host memory, to which what requests hand over is copied; 0: there is none
    groups: tuple[int, ...] = ()  # of layers that keep less of a request than all tokens, four numbers each

    def __post_init__(self) -> None:
        assert self.num_pages >= 1 and self.page_size >= 1 and self.hash_values >= 0
        assert self.policy in ("lru", "fifo", "lfu")

    @classmethod
    def draw(cls, choose: Choices, has: PrefixCacheCapabilities) -> PrefixCacheConfig:
        """Choose a pool of a few pages."""
        config = cls(
            num_pages=choose(range(2, 11)),
            page_size=choose((1, 1, 2, 2, 3, 4, 8, 16)) if has.paged else 1,
            bigram=has.bigrams and choose((False, False, True)),
            policy=choose(("lru", "lru", "fifo", "lfu")) if has.policies else "lru",
            hash_values=choose((0, 1, 2)) if has.collisions else 0,
            host_pages=choose((0, 2, 3, 5, 12)) if has.host else 0,
        )
        groups = draw_unit_groups(choose, config.page_size, 5) if has.groups and not config.host_pages else ()
        more = choose((16, 8, 32)) if groups else 0
        return replace(config, groups=groups, num_pages=config.num_pages + more)

    @property
    def unit_groups(self) -> tuple[UnitGroup, ...]:
        return unit_groups(self.groups)


@dataclass(frozen=True, slots=True)
class PrefixCacheCapabilities(Capabilities):
    """What a prefix cache declares. Each flag adds configurations, methods of `PrefixCache`, operations that call
    them, and invariants."""

    paged: bool = False  # pages of more than one slot: only whole pages are cached
    bigrams: bool = False  # `config.bigram` is followed
    wide_ids: bool = False  # token ids of 2³¹ and more
    namespaces: bool = False  # namespaces other than "" are kept apart
    lru: bool = False  # what was matched or inserted longest ago is evicted first
    # `config.policy` is followed: "fifo" evicts what was inserted first, "lfu" what was matched least often, then
    # longest ago
    policies: bool = False
    collisions: bool = False  # the cache hashes; `config.hash_values` makes hashes collide
    peek: bool = False  # `peek(tokens, namespace)`
    inspection: bool = False  # `nodes()`
    # `admit`, `slots_of`, `publish`, `leave`, `complete` and `free_slots`: requests that start from the cache, and a
    # pool
    table: bool = False
    host: bool = False  # `config.host_pages` and `in_host`; needs `table`
    # `config.groups` may be set: `units_of`, `cached_units`, `used_units` and `unit_pages`; a match is as long as what
    # the groups have allows
    groups: bool = False
    events: bool = False  # `events()`
    # It refuses what no caller should do: to unlock what is not locked, to evict less than nothing
    misuse: bool = False
    unchecked_locks: bool = (
        False  # it does not look whether a page was evicted: a caller locks what it has just matched
    )

    RELAXES: ClassVar[tuple[str, ...]] = ("unchecked_locks",)
    FOUNDATIONS: ClassVar = {"policies": ("lru",), "table": ("inspection",), "host": ("table",), "groups": ("table",)}


class PrefixCache(Protocol):
    """A cache of KV. A slot is one token's place, a page is `page_size` neighbouring slots from a multiple of it.

    A handle stands for a path from the root, that of a match or an insertion; it may be any object. To refuse is to
    return False (or None), or to raise one of `REFUSALS`; nothing may have changed then.
    """

    def match(self, tokens: Sequence[int], namespace: str) -> tuple[object, Sequence[int]]:
        """Return a handle of the longest cached prefix, in whole pages, and its slots."""

    def insert(
        self, tokens: Sequence[int], slots: Sequence[int], namespace: str
    ) -> tuple[object, Sequence[int], Sequence[int]]:
        """Cache the whole pages of `tokens`, of which position i is computed in `slots[i]`; there are at most as many
        slots as keys.

        What is cached already keeps its slots; the cache takes the caller's slots of the other whole pages, and no
        more. Returns a handle of the path, the slots of all its positions, and the caller's copies, in other slots than
        the cached ones, to be freed.
        """

    def lock(self, handle: object) -> object:
        """Protect the handle's whole path from eviction, once more. Refuses a handle of which a page has been evicted;
        if all of it has come back into the same slots, it may do either."""

    def unlock(self, handle: object) -> object:
        """Take one `lock` of this handle back. Refuses where there is none."""

    def evict(self, num_slots: int) -> Sequence[int]:
        """Free at least `min(num_slots, num_evictable())` slots, leaves first, and return them."""

    def num_evictable(self) -> int:
        """Count the cached slots that no lock covers."""

    def num_protected(self) -> int:
        """Count the cached slots that a lock covers."""

    @needs("peek")
    def peek(self, tokens: Sequence[int], namespace: str) -> int:
        """Return the length that `match` would find; change nothing, not even the order of eviction."""

    @needs("inspection")
    def nodes(self) -> Sequence[tuple[int, int, int, Sequence[int], Sequence[int]]]:
        """Return (id, id of the parent, locks, slots, ids of the children) of every node, the root first;
        its parent is −1."""

    @needs("events")
    def events(self) -> Sequence[CacheEvent]:
        """Return what entered and left since the last call, in this order. The name of a page is its first slot; its
        tokens are its keys, each a token, or a pair of tokens."""

    @needs("host")
    def in_host(self, tokens: Sequence[int], namespace: str) -> int:
        """Return how many positions at the front of a text have copies in host memory, in whole pages. When it is full,
        what was used last goes last."""

    @needs("table")
    def admit(self, request: str, tokens: Sequence[int], namespace: str) -> int:
        """Start a request, with slots for all its keys, evicting if needed; refuse what does not fit. The cached
        positions, all but the last token's at most, are locked; return how many."""

    @needs("table")
    def slots_of(self, request: str) -> Sequence[int]:
        """Return the slots of a running request's positions, in whole pages."""

    @needs("table")
    def publish(self, request: str, num_tokens: int) -> None:
        """Cache the first `num_tokens` positions of a running request, which are computed, and lock them for it."""

    @needs("table")
    def leave(self, request: str, num_tokens: int) -> None:
        """End a request: cache its first `num_tokens` positions, which are computed and verified, and free the others.
        If all of them are cached already, the order of eviction does not change."""

    @needs("table")
    def complete(self) -> None:
        """Free what was given up during the step in flight, which has been processed."""

    @needs("table")
    def free_slots(self) -> Sequence[int]:
        """Return the slots that `admit` may hand out."""

    @needs("groups")
    def units_of(self, request: str) -> Sequence[UnitTable]:
        """Return what a running request holds of each group, from the page on that the window before its last
        published position sees. The first unit of a table of states is the cached one from which it starts, −1 without
        one."""

    @needs("groups")
    def cached_units(self) -> Sequence[Sequence[tuple[int, int]]]:
        """Return for each group (first slot of a cached page, its unit); a state is that behind the page."""

    @needs("groups")
    def used_units(self) -> Sequence[int]:
        """Count the units of each group that are in use."""

    @needs("groups")
    def unit_pages(self) -> Sequence[Sequence[int]]:
        """Return the pages of the pool of slots that the units of each group take."""
