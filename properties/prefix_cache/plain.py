"""A prefix cache with every capability of the contract but a table, written plainly: the suite must find nothing wrong
with it.

A dictionary of blocks, found by a hash of (the block before it, the keys in it), and compared key by key, as different
blocks may have one hash. Mutants are made from it where our cache has no such part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from zlib import crc32

from .contract import PrefixCacheCapabilities, PrefixCacheConfig
from .events import CacheEvent

EVERYTHING = replace(PrefixCacheCapabilities.all(), table=False, host=False, groups=False)

Path = tuple["Block", ...]


@dataclass(slots=True, eq=False)
class Block:
    """One page of keys behind its parent, in `slots`."""

    id: int
    parent: Block | None
    namespace: str
    keys: tuple[Any, ...]
    slots: list[int]
    created: int
    used: int
    hits: int = 0
    locks: int = 0


class PlainPrefixCache:
    """`config` as in the contract. Everything is O(blocks)."""

    capabilities = EVERYTHING

    def __init__(self, config: PrefixCacheConfig) -> None:
        self.config = config
        self.page_size = config.page_size
        self.buckets: dict[int, list[Block]] = {}
        self.pending: list[CacheEvent] = []
        self.num_made = 0
        self.clock = 0

    # -- blocks --------------------------------------------------------------------------------------------------------

    def blocks(self) -> list[Block]:
        return [block for bucket in self.buckets.values() for block in bucket]

    def children(self, block: Block) -> list[Block]:
        return [child for child in self.blocks() if child.parent is block]

    def keys_of(self, tokens: Sequence[int]) -> list[Any]:
        return list(pairwise(tokens)) if self.config.bigram else list(tokens)

    def bucket(self, parent: Block | None, namespace: str, keys: tuple[Any, ...]) -> int:
        number = crc32(repr((parent.id if parent else 0, namespace, keys)).encode())
        return number % self.config.hash_values if self.config.hash_values else number

    def is_child(self, block: Block, parent: Block | None, namespace: str, keys: tuple[Any, ...]) -> bool:
        return block.parent is parent and block.namespace == namespace and block.keys == keys

    def child(self, parent: Block | None, namespace: str, keys: tuple[Any, ...]) -> Block | None:
        for block in self.buckets.get(self.bucket(parent, namespace, keys), ()):
            if self.is_child(block, parent, namespace, keys):
                return block
        return None

    def find(self, keys: Sequence[Any], namespace: str) -> Path:
        """Return the longest cached path along these keys."""
        path: Path = ()
        for start in range(0, len(keys) - self.page_size + 1, self.page_size):
            page = tuple(keys[start : start + self.page_size])
            block = self.child(path[-1] if path else None, namespace, page)
            if block is None:
                break
            path = (*path, block)
        return path

    def use(self, path: Path) -> None:
        self.clock += 1
        for block in path:
            block.used = self.clock

    def slots(self, path: Path) -> list[int]:
        return [slot for block in path for slot in block.slots]

    # -- the contract --------------------------------------------------------------------------------------------------

    def match(self, tokens: Sequence[int], namespace: str) -> tuple[Path, list[int]]:
        path = self.find(self.keys_of(tokens), namespace)
        self.use(path)
        for block in path:
            block.hits += 1
        return path, self.slots(path)

    def peek(self, tokens: Sequence[int], namespace: str) -> int:
        return len(self.slots(self.find(self.keys_of(tokens), namespace)))

    def insert(self, tokens: Sequence[int], slots: Sequence[int], namespace: str) -> tuple[Path, list[int], list[int]]:
        size = self.page_size
        keys = self.keys_of(tokens)[: len(slots) // size * size]
        path = self.find(keys, namespace)
        self.use(path)
        copies = []
        for number, block in enumerate(path):
            own = list(slots[number * size : (number + 1) * size])
            if own != block.slots:
                copies += own
        for start in range(len(path) * size, len(keys), size):
            path = (*path, self.add(path, namespace, tuple(keys[start : start + size]), slots[start : start + size]))
        return path, self.slots(path), copies

    def add(self, path: Path, namespace: str, keys: tuple[Any, ...], slots: Sequence[int]) -> Block:
        self.num_made += 1
        parent = path[-1] if path else None
        block = Block(self.num_made, parent, namespace, keys, list(slots), self.clock, self.clock)
        before = parent.slots[0] if parent else None
        self.pending.append(CacheEvent(True, block.slots[:1], parent=before, tokens=keys, namespace=namespace))
        self.buckets.setdefault(self.bucket(parent, namespace, keys), []).append(block)
        return block

    def is_cached(self, block: Block) -> bool:
        return block in self.buckets.get(self.bucket(block.parent, block.namespace, block.keys), ())

    def lock(self, path: Path) -> bool:
        if path and not self.is_cached(path[-1]):
            return False
        for block in path:
            block.locks += 1
        return True

    def unlock(self, path: Path) -> bool:
        if any(block.locks == 0 for block in path):
            return False
        for block in path:
            block.locks -= 1
        return True

    def priority(self, block: Block) -> tuple[int, ...]:
        if self.config.policy == "lru":
            return (block.used,)
        return (block.created,) if self.config.policy == "fifo" else (block.hits, block.used)

    def may_go(self, block: Block) -> bool:
        return not block.locks and not self.children(block)

    def evict(self, num_slots: int) -> list[int]:
        freed: list[int] = []
        while len(freed) < num_slots:
            leaves = [block for block in self.blocks() if self.may_go(block)]
            if not leaves:
                break
            first = min(leaves, key=self.priority)
            self.remove(first)
            self.pending.append(CacheEvent(False, first.slots[:1]))
            freed += first.slots
        return freed

    def remove(self, block: Block) -> None:
        self.buckets[self.bucket(block.parent, block.namespace, block.keys)].remove(block)

    def num_evictable(self) -> int:
        return sum(len(block.slots) for block in self.blocks() if not block.locks)

    def num_protected(self) -> int:
        return sum(len(block.slots) for block in self.blocks() if block.locks)

    def events(self) -> list[CacheEvent]:
        events, self.pending = self.pending, []
        return events

    def nodes(self) -> list[tuple[int, int, int, list[int], list[int]]]:
        blocks = self.blocks()
        roots = [block for block in blocks if block.parent is None]
        found = [(0, -1, sum(block.locks for block in roots), [], [block.id for block in roots])]
        for block in blocks:
            children = [child.id for child in self.children(block)]
            found.append((block.id, block.parent.id if block.parent else 0, block.locks, block.slots, children))
        return found


make = PlainPrefixCache
