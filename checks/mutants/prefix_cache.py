"""Planted defects of prefix caches: each is one method of a good one, done wrong in a way that has been done wrong before."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import numpy as np

from ...core.kv.eviction import EvictionQueue
from ...core.kv.radix import Insertion, PrefixMatch, RadixCache
from ...core.kv.store import KVStore
from ...properties.harness.mutants import Mutant
from ...properties.prefix_cache.plain import PlainPrefixCache
from ..adapters.prefix_store import PrefixStoreAdapter
from ..adapters.radix_cache import RadixCacheAdapter

# -- of core.kv.radix -------------------------------------------------------------------------------------------------


class ComparesFirstPages(RadixCache):
    """Once the first page of a node is found, the rest of its keys is taken for equal."""

    def _descend(self, keys, namespace, limit):
        path, length, child, part = super()._descend(keys, namespace, limit)
        if child is not None and part:
            return path, length, child, min(child.keys.size - self.page_size, limit - length) or part
        return path, length, child, part


class MatchesPartsOfPages(RadixCache):
    """What follows the last whole page is matched token by token."""

    def match(self, tokens, namespace="", max_length=None, *, count=True):
        found = super().match(tokens, namespace, max_length, count=count)
        part = found.length - 1 if self.page_size > 1 and found.length > self.page_size else found.length
        return PrefixMatch(found.node, found.slots[:part], part)


class CutsTokensTo31Bits(RadixCache):
    """Token ids are kept in 31 bits."""

    def _keys_of(self, tokens):
        return super()._keys_of([token & 0x7FFFFFFF for token in tokens])


class PacksBigramsInto32Bits(RadixCache):
    """The two tokens of a bigram have 16 bits each."""

    def _keys_of(self, tokens):
        keys = super()._keys_of(tokens)
        return (keys >> 32 & 0xFFFF) << 16 | keys & 0xFFFF if self.key_kind == "bigram" else keys


class KeysBigramsByTheFirst(RadixCache):
    """A draft head's KV is filed under its own token alone, though the next one went into it."""

    def _keys_of(self, tokens):
        keys = super()._keys_of(tokens)
        return keys >> 32 if self.key_kind == "bigram" else keys


@contextmanager
def _without_parent(node):
    parent, node.parent = node.parent, None
    try:
        yield
    finally:
        node.parent = parent


class LocksTheNodeAlone(RadixCache):
    """A lock stops at the node, its ancestors are not covered."""

    def lock(self, node):
        with _without_parent(node):
            super().lock(node)

    def unlock(self, node):
        with _without_parent(node):
            super().unlock(node)


class LocksTheEvicted(RadixCache):
    """A lock does not check that its node is still there."""

    def lock(self, node):
        alive, node.alive = node.alive, True
        super().lock(node)
        node.alive = alive


class UnlocksWhatIsFree(RadixCache):
    """An unlock does not check that its node was locked."""

    def unlock(self, node):
        if node.locks > 0:
            return super().unlock(node)
        while node is not None and node is not self.root:
            node.locks -= 1
            node = node.parent
        return None


class ForgetsTheAncestors(RadixCache):
    """An unlock stops below the root's children."""

    def unlock(self, node):
        if node.parent in (None, self.root) or node.locks <= 0:
            return super().unlock(node)
        with _without_parent(node):
            return super().unlock(node)


class SplitsWithoutTheLock(RadixCache):
    """Of a locked node that is split, the upper half is not locked."""

    def _split(self, lower, num_upper):
        upper = super()._split(lower, num_upper)
        upper.locks = 0
        return upper


class SplitsTheCounterToo(RadixCache):
    """A split of a locked node counts the upper half as protected once more."""

    def _split(self, lower, num_upper):
        upper = super()._split(lower, num_upper)
        if upper.locks:
            self._num_protected += upper.slots.size
        return upper


class SplitsFreshenBoth(RadixCache):
    """A split marks both halves as used now."""

    def _split(self, lower, num_upper):
        upper = super()._split(lower, num_upper)
        lower.last_access = self._clock + 1
        return upper


class SplitsOneWay(RadixCache):
    """Of a locked node that is split, the lower half still names its old parent."""

    def _split(self, lower, num_upper):
        parent = lower.parent
        upper = super()._split(lower, num_upper)
        if lower.locks:  # an eviction splits nodes without locks, and would raise
            lower.parent = parent
        return upper


class EvictsTheLocked(RadixCache):
    """What waits for its eviction is not looked at again when it is locked."""

    def evict(self, num_slots):
        freed = super().evict(num_slots)
        leaf = next((node for node in self._nodes() if node.locks == 1 and not node.children), None)
        if freed.size >= num_slots or leaf is None:
            return freed
        del leaf.parent.children[leaf.child_key]
        leaf.alive = False
        self._num_protected -= leaf.slots.size
        return np.concatenate((freed, leaf.slots))


class LeavesTheEvictedInTheTree(RadixCache):
    """The slots of an evicted leaf are handed on, the leaf stays where it is found."""

    def _remove_leaf(self, leaf):
        parent, key = leaf.parent, leaf.child_key
        super()._remove_leaf(leaf)
        parent.children[key] = leaf


class EvictsWholeLeavesThatFit(RadixCache):
    """A leaf that is larger than what is still needed is left alone."""

    def evict(self, num_slots):
        smallest = min((n.slots.size for n in self._nodes() if not n.children and not n.locks), default=0)
        return super().evict(num_slots if num_slots >= smallest else 0)


class ReportsTheWholeLeaf(RadixCache):
    """Of a leaf that is evicted in part, all slots are handed on."""

    def evict(self, num_slots):
        before = {slot: node.slots for node in self._nodes() for slot in node.slots.tolist()}
        freed = super().evict(num_slots)
        return before[int(freed[-1])] if freed.size else freed


class EvictsForNothing(RadixCache):
    """An eviction of no slots evicts a page."""

    def evict(self, num_slots):
        return super().evict(max(num_slots, 1))


class EvictsByUseAlways(RadixCache):
    """Whatever the policy is called, the least recently used goes first."""

    def __init__(self, page_size=1, key_kind="token", policy="lru"):
        super().__init__(page_size, key_kind, policy)
        self._queue = EvictionQueue("lru")


class PeekIsAUse(RadixCache):
    """A look that should change nothing makes the path the most recently used."""

    def peek(self, tokens, namespace="", max_length=None):
        return self.match(tokens, namespace, max_length, count=False).length


class ForgetsTheNamespace(RadixCache):
    """The namespace is no part of the key."""

    def _descend(self, keys, namespace, limit):
        return super()._descend(keys, "", limit)

    def _add_leaf(self, parent, keys, slots, namespace):
        return super()._add_leaf(parent, keys, slots, "")


class RepeatsItself(RadixCache):
    """The last answer is kept for the next look-up of the same tokens, in whatever namespace."""

    last = None

    def match(self, tokens, namespace="", max_length=None, *, count=True):
        if self.last is None or self.last[0] != list(tokens):
            self.last = list(tokens), super().match(tokens, namespace, max_length, count=count)
        return self.last[1]

    def insert(self, tokens, slots, namespace=""):
        self.last = None
        return super().insert(tokens, slots, namespace)

    def evict(self, num_slots):
        self.last = None
        return super().evict(num_slots)


class KeepsTheCallersPages(RadixCache):
    """After an insertion the caller is told to go on with its own pages, and to free them."""

    def insert(self, tokens, slots, namespace=""):
        done = super().insert(tokens, slots, namespace)
        own = np.asarray(slots, dtype=np.int32)[: len(done.canonical)]
        return Insertion(done.node, done.num_already_cached, own, done.duplicates)


class FreesTheCanonical(RadixCache):
    """What an insertion finds cached is freed, and not the caller's copy."""

    def insert(self, tokens, slots, namespace=""):
        done = super().insert(tokens, slots, namespace)
        cached = done.canonical[: done.num_already_cached]
        return Insertion(done.node, done.num_already_cached, done.canonical, cached[: len(done.duplicates)])


# -- of core.kv.store -------------------------------------------------------------------------------------------------


class LeavesTheTableAlone(KVStore):
    """The copies of a prefix that was cached already are freed, and the request table still points to them."""

    def share_prefix(self, row, tokens, num_valid, namespace, fence):
        write, self._write = self._write, lambda row, start, slots: None
        try:
            super().share_prefix(row, tokens, num_valid, namespace, fence)
        finally:
            self._write = write


class AbortsWithoutUnlocking(KVStore):
    """A request that leaves with nothing to hand over, aborted or never admitted, keeps its lock."""

    def _release(self, departure):
        if departure.tokens is None:
            self._locked[departure.row] = None
        super()._release(departure)


class LocksOncePerPublication(KVStore):
    """A request that publishes again keeps the lock of its shorter prefix, too."""

    def share_prefix(self, row, tokens, num_valid, namespace, fence):
        before = self._locked[row]
        super().share_prefix(row, tokens, num_valid, namespace, fence)
        if before is not None and self._locked[row] is not before:
            self.cache.lock(before)


# -- of the plain cache: what ours does not have ------------------------------------------------------------------------


class TrustsTheHash(PlainPrefixCache):
    """Blocks of one hash are taken for equal."""

    def is_child(self, block, parent, namespace, keys):
        return True


class HashesWithoutTheParent(PlainPrefixCache):
    """A block is found by its own tokens, whatever stands before it."""

    def bucket(self, parent, namespace, keys):
        return super().bucket(None, namespace, keys)

    def is_child(self, block, parent, namespace, keys):
        return block.namespace == namespace and block.keys == keys


class EvictsInnerBlocks(PlainPrefixCache):
    """A block may go before those that come after it."""

    def may_go(self, block):
        return not block.locks


class ReplacesOnDuplicate(PlainPrefixCache):
    """A page that is computed again takes the cached one's place."""

    def insert(self, tokens, slots, namespace):
        path, canonical, copies = super().insert(tokens, slots, namespace)
        for number, block in enumerate(path):
            block.slots = list(slots[number * self.page_size : (number + 1) * self.page_size])
        return path, canonical, copies


class WaitsForRoom(PlainPrefixCache):
    """The eviction loop goes on until there is room, though nothing can be evicted."""

    def evict(self, num_slots):
        freed = super().evict(num_slots)
        while len(freed) < num_slots:
            freed += super().evict(num_slots - len(freed))
        return freed


class ForgetsTheLastLock(PlainPrefixCache):
    """Blocks that two requests have locked are given up by the first of them."""

    def unlock(self, path):
        done = super().unlock(path)
        for block in path if done else ():
            block.locks = 0
        return done


class RemembersTheEvicted(PlainPrefixCache):
    """An evicted block can be found until its hash is needed again."""

    def remove(self, block):
        super().remove(block)
        self.last_evicted = block

    def child(self, parent, namespace, keys):
        last = getattr(self, "last_evicted", None)
        if last is not None and self.is_child(last, parent, namespace, keys):
            return last
        return super().child(parent, namespace, keys)


# -- how they are made ------------------------------------------------------------------------------------------------


def _maker(kind: type) -> object:
    """Return what makes a prefix cache with `kind` in the place of the part that it derives from."""
    if issubclass(kind, PlainPrefixCache):
        return kind
    adapter, part = (PrefixStoreAdapter, "store") if issubclass(kind, KVStore) else (RadixCacheAdapter, "cache")
    make = partial(adapter, **{part: kind})
    make.capabilities = adapter.capabilities
    return make


_DEFECTS = (
    (ComparesFirstPages, ("RADIX-01",)),
    (MatchesPartsOfPages, ("RADIX-01",)),
    (CutsTokensTo31Bits, ("RADIX-01",)),
    (PacksBigramsInto32Bits, ("RADIX-01", "RADIX-10")),
    (KeysBigramsByTheFirst, ("RADIX-01", "RADIX-10")),
    (LocksTheNodeAlone, ("RADIX-02", "RADIX-03", "RADIX-06")),
    (LocksTheEvicted, ("RADIX-03",)),
    (UnlocksWhatIsFree, ("RADIX-02",)),
    (ForgetsTheAncestors, ("RADIX-06",)),
    (SplitsWithoutTheLock, ("RADIX-02", "RADIX-04", "RADIX-06")),
    (SplitsTheCounterToo, ("RADIX-05",)),
    (SplitsFreshenBoth, ("RADIX-08",)),
    (SplitsOneWay, ("RADIX-07",)),
    (EvictsTheLocked, ("RADIX-04",)),
    (LeavesTheEvictedInTheTree, ("RADIX-07", "RADIX-15")),
    (EvictsWholeLeavesThatFit, ("RADIX-14",)),
    (ReportsTheWholeLeaf, ("RADIX-07", "RADIX-14")),
    (EvictsForNothing, ("RADIX-14",)),
    (EvictsByUseAlways, ("RADIX-08",)),
    (PeekIsAUse, ("RADIX-08",)),
    (ForgetsTheNamespace, ("RADIX-01", "RADIX-11")),
    (RepeatsItself, ("RADIX-01", "RADIX-11")),
    (KeepsTheCallersPages, ("RADIX-10",)),
    (FreesTheCanonical, ("RADIX-10",)),
    (LeavesTheTableAlone, ("RADIX-10",)),
    (AbortsWithoutUnlocking, ("RADIX-06",)),
    (LocksOncePerPublication, ("RADIX-06",)),
    (TrustsTheHash, ("RADIX-01", "RADIX-10")),
    (HashesWithoutTheParent, ("RADIX-01", "RADIX-10")),
    (EvictsInnerBlocks, ("RADIX-08",)),
    (ReplacesOnDuplicate, ("RADIX-01", "RADIX-07")),
    (WaitsForRoom, ("HANGS",)),
    (ForgetsTheLastLock, ("RADIX-06", "RADIX-08")),
    (RemembersTheEvicted, ("RADIX-15",)),
)
"""(class, the invariants of which one must catch it)."""

MUTANTS = tuple(
    Mutant(kind.__name__, kind.__doc__, "prefix-cache", _maker(kind), caught_by) for kind, caught_by in _DEFECTS
)
