"""The radix prefix cache: KV of prompts and outputs that a later request may start from.

A radix tree over pages of keys. A node holds a run of keys and the slot of each; a path from the root spells a prefix:

    root ─┬─ [system prompt …] ─┬─ [question A … answer A]
          │                     └─ [question B …]
          └─ (namespace "lora-7") [system prompt …]

* A key is one token, or for draft heads that look one token ahead a bigram (t_j, t_j+1): the draft KV at position j
  depends on both, so n tokens have n − 1 keys. The tree finds children by the exact bytes of their first page of keys
  and compares them key by key. So results do not depend on a hash.
* A slot belongs to the tree or to one request, never to both. A user of a cached prefix locks its last node, which
  protects all ancestors too. After a split the lower half keeps the identity (and the handles) of the node, and the
  upper half gets the same locks.
* Unlocked leaves wait for their eviction in a lazy heap (eviction.py); no call but `check` scans the tree.

A request's round trip: `match`, `lock` the node, compute the rest; `insert` what is committed; point the request table
at `canonical`, free `duplicates`; `lock` the new node, then `unlock` the old one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, ForedraftError, InvariantViolation, Problem
from .eviction import EvictionQueue, unknown_policy
from .radix_check import check_locks, check_tree, check_waiting
from .radix_node import ChildKey, Keys, RadixNode, Slots, joined_slots, nodes_below

Tokens = NDArray[np.integer[Any]] | Sequence[int]

MAX_TOKENS_IN_VOCABULARY = 2**32
"""A bigram is two token ids in one int64 key."""

_GENERATION = "\1"  # before the number of a generation, in the name of a namespace

_NO_SLOTS: Slots = np.empty(0, dtype=np.int32)


class InvalidTokens(ForedraftError):
    """Tokens that are not token ids: negative (a placeholder), too large, or not integers. The cache is unchanged."""


class StaleNode(ForedraftError):
    """A node was locked that has been evicted since it was matched. The cache is unchanged; match again."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest cached prefix: its last node (the root if nothing matched), `slots` int32 [length], the tree's
    own."""

    node: RadixNode
    slots: Slots
    length: int
    known: int = 0  # the length for which there are slots, although a group of layers may lack what it needs there


@dataclass(frozen=True, slots=True)
class Insertion:
    """The result of an insertion."""

    node: RadixNode  # the last one of the inserted path; lock it to keep the prefix
    # int32 [aligned length]: the slots of all positions now in the tree; the caller's table must hold these
    canonical: Slots
    duplicates: Slots  # int32: the caller's slots of positions that were cached in other slots; the caller frees them


class CacheListener(Protocol):
    """Hears what enters and leaves a cache. A page is known by its first slot."""

    def stored(self, keys: Keys, slots: Slots, before: int | None, namespace: str) -> None:
        """Note that whole pages entered. `before`: the first slot of the page before them, None at a prefix's begin."""

    def removed(self, slots: Slots) -> None:
        """Note that whole pages left."""

    def cleared(self) -> None:
        """Note that every page left."""


class UnitsInCache(Protocol):
    """What a cache needs of other groups of layers than those whose KV its slots hold (held_groups.py)."""

    def usable(self, path: Sequence[RadixNode], child: RadixNode | None, part: int) -> int:
        """Return how many tokens of a path and of `part` tokens of the next node a request may start from."""

    def no_units(self, num_keys: int) -> list[NDArray[np.int64]]:
        """Return the tags of a new node."""

    def forget(self, node: RadixNode) -> None:
        """Free the units of a node that leaves the tree."""


class RadixCache:
    """A prefix cache over slots of pages of `page_size`, see the module's description.

    Counters in tokens, plain ints: `queries` asked for and `hits` found by `match`. `listener` hears of its pages.
    `groups`: other groups of layers, which may allow a shorter match than its slots do.
    """

    keeps_prefixes = True  # False: nothing enters it (`NoCache`), so no context needs to be known

    def __init__(self, page_size: int = 1, key_kind: Literal["token", "bigram"] = "token", policy: str = "lru") -> None:
        assert page_size >= 1, f"page_size is {page_size}, expected at least 1"
        problems = []
        if key_kind not in ("token", "bigram"):
            problems.append(Problem("key_kind", f"{key_kind!r} is neither 'token' nor 'bigram'"))
        if (problem := unknown_policy(policy)) is not None:
            problems.append(problem)
        if problems:
            raise ConfigError("<radix cache>", problems)
        self.page_size = page_size
        self.key_kind = key_kind
        self.policy = policy
        self.hits: int = 0
        self.queries: int = 0
        self.listener: CacheListener | None = None
        self.groups: UnitsInCache | None = None
        self._generation = 0
        self._num_evictable = 0
        self._num_protected = 0
        self._clock = 0
        self._next_serial = 1
        self._root = RadixNode(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32), None, b"", 0)
        self._queue: EvictionQueue[RadixNode] = EvictionQueue(policy)

    @property
    def root(self) -> RadixNode:
        """The node of the empty prefix; it holds no slots and is never evicted."""
        return self._root

    @property
    def evictable_slots(self) -> int:
        """Slots in nodes without a lock: `evict` can free all of them."""
        return self._num_evictable

    def begin_generation(self) -> None:
        """Let requests that enter from now on find nothing of what the running ones compute, or the cache has. It is
        evicted as what is used no more."""
        self._generation += 1

    def named(self, namespace: str) -> str:
        """Return the name by which a request that enters now finds and leaves the prefixes of its namespace."""
        return f"{namespace}{_GENERATION}{self._generation}" if self._generation else namespace

    def now(self) -> int:
        """Return the time of the last match, insertion or unlock."""
        return self._clock

    def oldest_leaf(self) -> RadixNode | None:
        """Return the node that `evict` begins with; None if it can free nothing."""
        leaf = self._queue.pop()
        if leaf is not None:
            self._queue.offer(leaf)
        return leaf

    @property
    def protected_slots(self) -> int:
        """Slots in locked nodes."""
        return self._num_protected

    def num_keys(self, tokens: Tokens, num_valid: int) -> int:
        """Return how many of the valid positions have a key: known tokens only, and a bigram needs the next one too."""
        return min(num_valid, len(tokens) if self.key_kind == "token" else len(tokens) - 1)

    def match(
        self, tokens: Tokens, namespace: str = "", max_length: int | None = None, *, count: bool = True
    ) -> PrefixMatch:
        """Find the longest cached, page-aligned prefix of `tokens` (token ids, [n]), at most `max_length` positions
        long.

        Pass `max_length = n − 1` to leave one token to compute after a full hit. The node found may be split, the path
        becomes the most recently used. `count=False` leaves `queries` and `hits` alone, for a request that asks again.
        The match holds until the next `evict` unless its node is locked. Raises `InvalidTokens`.
        """
        keys = self._keys_of(tokens)
        found = self._descend(keys, namespace, self._limit(keys.size, max_length))
        known = found[1] + found[3]
        if self.groups is not None and (usable := self.groups.usable(found[0], found[2], found[3])) < known:
            found = self._descend(keys, namespace, usable)
        path, length = self._enter(*found)
        for node in path:
            node.num_hits += 1
        if count:
            self.queries += len(tokens)
            self.hits += length
        return PrefixMatch(path[-1] if path else self._root, joined_slots(path), length, known)

    def peek(self, tokens: Tokens, namespace: str = "", max_length: int | None = None) -> int:
        """Return the length that `match` would find; changes nothing, the order of eviction included."""
        keys = self._keys_of(tokens)
        path, length, child, part = self._descend(keys, namespace, self._limit(keys.size, max_length))
        return length + part if self.groups is None else self.groups.usable(path, child, part)

    def insert(self, tokens: Tokens, slots: Slots, namespace: str = "") -> Insertion:
        """Hand the KV of a prefix over to the cache: `slots[i]` int32 holds position i of `tokens` (token ids, [n]).

        Only computed and verified positions may be given, at most as many as there are keys (n, or n − 1 for bigrams).
        The page-aligned part is cached. Positions that the tree already has keep the tree's slots; the slots of the
        others become the tree's. Slots past the aligned part still belong to the caller. Raises `InvalidTokens`.
        """
        keys = self._keys_of(tokens)
        slots = np.asarray(slots, dtype=np.int32)
        assert slots.size <= keys.size, f"{slots.size} slots for {keys.size} keys ({self.key_kind})"
        aligned = slots.size // self.page_size * self.page_size
        path, length = self._enter(*self._descend(keys, namespace, aligned))
        node = path[-1] if path else self._root
        cached = joined_slots(path)
        differs = (cached != slots[:length]).reshape(-1, self.page_size)
        if (differs.any(axis=1) != differs.all(axis=1)).any():
            raise InvariantViolation("RADIX-10", "a page of the caller shares a part of its slots with a cached page")
        duplicates = slots[:length][differs.ravel()]
        if length < aligned:
            above = node
            node = self._add_leaf(above, keys[length:aligned].copy(), slots[length:aligned].copy(), namespace)
            if self.listener is not None:
                before = int(above.slots[-self.page_size]) if above.slots.size else None
                self.listener.stored(node.keys, node.slots, before, namespace.partition(_GENERATION)[0])
        canonical = np.concatenate((cached, slots[length:aligned]))
        return Insertion(node, canonical, duplicates)

    def lock(self, node: RadixNode) -> None:
        """Protect `node` and all its ancestors from eviction, once more. Raises `StaleNode` if the node was evicted."""
        if not node.alive:
            raise StaleNode(f"{node!r} has been evicted since it was matched")
        above: RadixNode | None = node
        while above is not None:
            if above.locks == 0:
                self._num_evictable -= above.slots.size
                self._num_protected += above.slots.size
            above.locks += 1
            above = above.parent

    def unlock(self, node: RadixNode, *, was_used: bool = True) -> None:
        """Take back one `lock` of this node. Raises `InvariantViolation` (RADIX-02) if there is none.

        Without `was_used` the lock leaves no trace in the order of eviction.
        """
        if node.locks <= 0:
            raise InvariantViolation("RADIX-02", f"{node!r} is unlocked more often than locked")
        self._clock += 1
        above: RadixNode | None = node
        while above is not None:
            above.locks -= 1
            if above.locks == 0:
                if was_used:
                    above.released = self._clock
                self._num_evictable += above.slots.size
                self._num_protected -= above.slots.size
            above = above.parent
        if node is not self._root:
            self._queue.offer(node)

    def evict(self, num_slots: int) -> Slots:
        """Free at least min(`num_slots`, evictable) slots in the policy's order. Returns them, int32, in whole pages;
        they belong to the caller now.

        Leaves are evicted whole, except the last one: it loses only as many pages at its end as are still needed.
        """
        return self._evict(num_slots, self.listener)

    def _evict(self, num_slots: int, listener: CacheListener | None) -> Slots:
        evicted = []
        num_freed = 0
        while num_freed < num_slots and (leaf := self._queue.pop()) is not None:
            keep = max(leaf.slots.size - (num_slots - num_freed), 0) // self.page_size * self.page_size
            if keep:
                # The lower half goes under the old identity, so that a handle to the whole node is found to be stale.
                self._split(leaf, keep)
            self._remove_leaf(leaf)
            evicted.append(leaf.slots)
            num_freed += leaf.slots.size
            if listener is not None:
                listener.removed(leaf.slots)
        return np.concatenate(evicted) if evicted else np.empty(0, dtype=np.int32)

    def clear(self) -> Slots:
        """Evict all unlocked slots and return them, int32; they belong to the caller now."""
        if self._num_protected or self.listener is None:
            return self.evict(self._num_evictable)
        self.listener.cleared()
        return self._evict(self._num_evictable, None)

    def cached_slots(self) -> Slots:
        """Return the slots of the whole tree, int32 [evictable + protected]. Walks the tree: for checks."""
        return joined_slots(list(nodes_below(self._root)))

    def check(self, locked: Iterable[RadixNode] | None = None) -> None:
        """Recount everything from scratch; raise `InvariantViolation` with the id of what is broken.

        `locked`, if given, names the node of every lock that is held, as often as it is held (RADIX-06).
        """
        found = check_tree(self._root, self.page_size)
        if found != (self._num_evictable, self._num_protected):
            raise InvariantViolation(
                "RADIX-05",
                f"{found[0]} evictable + {found[1]} protected slots in the tree, "
                f"counted as {self._num_evictable} + {self._num_protected}",
            )
        slots = self.cached_slots()
        if np.unique(slots).size != slots.size:
            raise InvariantViolation("ALLOC-06", "a slot stands in the tree twice")
        check_waiting(self._root, self._queue.check())
        if locked is not None:
            check_locks(self._root, locked)

    def _keys_of(self, tokens: Tokens) -> Keys:
        ids = np.asarray(tokens)
        if ids.size == 0:
            return np.empty(0, dtype=np.int64)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise InvalidTokens(f"tokens are {ids.dtype} {ids.shape}, expected one row of integers")
        ids = ids.astype(np.int64)
        # Read as unsigned, a negative id is a huge one: a single pass finds both kinds.
        if ids.view(np.uint64).max() >= MAX_TOKENS_IN_VOCABULARY:
            wrong = ids[(ids < 0) | (ids >= MAX_TOKENS_IN_VOCABULARY)][0]
            raise InvalidTokens(f"token id {wrong} is outside 0..{MAX_TOKENS_IN_VOCABULARY - 1}")
        return ids if self.key_kind == "token" else (ids[:-1] << 32) | ids[1:]

    def _limit(self, num_keys: int, max_length: int | None) -> int:
        limit = num_keys if max_length is None else min(num_keys, max(max_length, 0))
        return limit // self.page_size * self.page_size

    def _descend(self, keys: Keys, namespace: str, limit: int) -> tuple[list[RadixNode], int, RadixNode | None, int]:
        """Walk down along `keys[:limit]` without a change: the nodes matched whole and their length in positions, then
        the node matched in part (or None) and the length of that part. Both lengths are page-aligned."""
        path: list[RadixNode] = []
        node, length, page = self._root, 0, self.page_size
        while length < limit:
            first_page = keys[length : length + page].tobytes()
            child = node.children.get(first_page if path else (namespace, first_page))
            if child is None:
                break
            num_compared = min(child.keys.size, limit - length)
            differs = child.keys[:num_compared] != keys[length : length + num_compared]
            first = int(differs.argmax())
            part = first // page * page if differs[first] else num_compared
            if part < child.keys.size:
                return path, length, child, part
            path.append(child)
            length += part
            node = child
        return path, length, None, 0

    def _enter(
        self, path: list[RadixNode], length: int, child: RadixNode | None, part: int
    ) -> tuple[list[RadixNode], int]:
        """Return the path that `_descend` has found, split to end with the part of `child` and marked as used now."""
        if child is not None:
            path.append(self._split(child, part))
            length += part
        self._clock += 1
        for node in path:
            node.last_access = self._clock
        return path, length

    def _split(self, lower: RadixNode, num_upper: int) -> RadixNode:
        """Cut a node in two: a new parent takes the first `num_upper` keys, the node itself keeps the rest.

        Both halves are copies, so neither keeps the other's memory alive.
        """
        assert 0 < num_upper < lower.keys.size and num_upper % self.page_size == 0, f"split of {lower!r} at {num_upper}"
        parent = lower.parent
        assert parent is not None, "the root is never split"
        upper = self._new_node(lower.keys[:num_upper].copy(), lower.slots[:num_upper].copy(), parent, lower.child_key)
        upper.locks = lower.locks
        upper.last_access = lower.last_access
        upper.created = lower.created
        upper.released = lower.released
        upper.num_hits = lower.num_hits
        parent.children[upper.child_key] = upper
        lower.keys = lower.keys[num_upper:].copy()
        lower.slots = lower.slots[num_upper:].copy()
        if lower.units:
            num_pages = num_upper // self.page_size
            upper.units = [tags[:num_pages].copy() for tags in lower.units]
            lower.units = [tags[num_pages:].copy() for tags in lower.units]
        lower.parent = upper
        lower.child_key = lower.keys[: self.page_size].tobytes()
        upper.children[lower.child_key] = lower
        return upper

    def _add_leaf(self, parent: RadixNode, keys: Keys, slots: Slots, namespace: str) -> RadixNode:
        first_page = keys[: self.page_size].tobytes()
        leaf = self._new_node(keys, slots, parent, (namespace, first_page) if parent is self._root else first_page)
        leaf.last_access = leaf.created = leaf.released = self._clock
        if self.groups is not None:
            leaf.units = self.groups.no_units(keys.size)
        parent.children[leaf.child_key] = leaf
        self._num_evictable += slots.size
        self._queue.offer(leaf)
        return leaf

    def _new_node(self, keys: Keys, slots: Slots, parent: RadixNode, child_key: ChildKey) -> RadixNode:
        node = RadixNode(keys, slots, parent, child_key, self._next_serial)
        self._next_serial += 1
        return node

    def _remove_leaf(self, leaf: RadixNode) -> None:
        parent = leaf.parent
        if leaf.locks or leaf.children or parent is None:
            raise InvariantViolation("RADIX-04", f"{leaf!r} is evicted although it is locked, or no leaf")
        del parent.children[leaf.child_key]
        leaf.alive = False
        if self.groups is not None:
            self.groups.forget(leaf)
        self._num_evictable -= leaf.slots.size
        if parent is not self._root:
            self._queue.offer(parent)


class NoCache(RadixCache):
    """A prefix cache that is switched off: it takes no prefix over, and finds none."""

    keeps_prefixes = False

    def match(
        self, tokens: Tokens, namespace: str = "", max_length: int | None = None, *, count: bool = True
    ) -> PrefixMatch:
        """Return the empty prefix."""
        return PrefixMatch(self._root, _NO_SLOTS, 0)

    def num_keys(self, tokens: Tokens, num_valid: int) -> int:
        """Return 0: none of the positions is taken over."""
        return 0
