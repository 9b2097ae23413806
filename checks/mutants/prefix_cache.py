"""Planted defects of prefix caches: each is a subclass of a part of a good one, done wrong in a way that has been
done wrong before."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from ...core.kv.eviction import EvictionQueue
from ...core.kv.host_tier import HostTier
from ...core.kv.radix import PrefixMatch, RadixCache, nodes_below
from ...core.kv.store import KVStore
from ...properties.prefix_cache.plain import PlainPrefixCache
from ..adapters.prefix_store import PrefixStoreAdapter
from ..adapters.radix_cache import RadixCacheAdapter
from .kv_groups import CACHE_WITH_GROUPS
from .planting import Defects


@contextmanager
def _without_parent(node):
    """Hide a node's parent, for what walks up from it."""
    parent, node.parent = node.parent, None
    yield
    node.parent = parent


RADIX = Defects("prefix-cache", RadixCacheAdapter)


@RADIX.breaks("RADIX-01")
class ComparesFirstPages(RadixCache):
    """Once the first page of a node is found, the rest of its keys is taken for equal."""

    def _descend(self, keys, namespace, limit):
        path, length, child, part = super()._descend(keys, namespace, limit)
        return path, length, child, part and (min(child.keys.size - self.page_size, limit - length) or part)


@RADIX.breaks("RADIX-01")
class MatchesPartsOfPages(RadixCache):
    """What follows the last whole page is matched token by token."""

    def match(self, tokens, namespace="", max_length=None, *, count=True):
        found = super().match(tokens, namespace, max_length, count=count)
        length = found.length - (self.page_size > 1 and found.length > self.page_size)
        return PrefixMatch(found.node, found.slots[:length], length)


@RADIX.breaks("RADIX-01", "RADIX-05")
class CutsTokensTo31Bits(RadixCache):
    """Token ids are kept in 31 bits."""

    def _keys_of(self, tokens):
        return super()._keys_of([token & 0x7FFFFFFF for token in tokens])


@RADIX.breaks("RADIX-01", "RADIX-05", "RADIX-10")
class PacksBigramsInto32Bits(RadixCache):
    """The two tokens of a bigram have 16 bits each."""

    def _keys_of(self, tokens):
        keys = super()._keys_of(tokens)
        return keys if self.key_kind == "token" else (keys >> 32 & 0xFFFF) << 16 | keys & 0xFFFF


@RADIX.breaks("RADIX-01", "RADIX-05", "RADIX-10")
class KeysBigramsByTheFirst(RadixCache):
    """A draft head's KV is filed under its own token alone, though the next one went into it."""

    def _keys_of(self, tokens):
        keys = super()._keys_of(tokens)
        return keys if self.key_kind == "token" else keys >> 32


@RADIX.breaks("RADIX-02", "RADIX-03", "RADIX-06")
class LocksTheNodeAlone(RadixCache):
    """A lock stops at the node, its ancestors are not covered."""

    def lock(self, node):
        with _without_parent(node):
            super().lock(node)

    def unlock(self, node, *, was_used=True):
        with _without_parent(node):
            super().unlock(node, was_used=was_used)


@RADIX.breaks("RADIX-03")
class LocksTheEvicted(RadixCache):
    """A lock does not check that its node is still there."""

    def lock(self, node):
        is_there, node.alive = node.alive, True
        super().lock(node)
        node.alive = is_there


@RADIX.breaks("RADIX-02")
class UnlocksWhatIsFree(RadixCache):
    """An unlock does not check that its node was locked."""

    def unlock(self, node, *, was_used=True):
        if node.locks > 0:
            return super().unlock(node)
        while node is not None and node is not self._root:
            node.locks -= 1
            node = node.parent
        return None


@RADIX.breaks("RADIX-02", "RADIX-04", "RADIX-06")
class SplitsWithoutTheLock(RadixCache):
    """Of a locked node that is split, the upper half is not locked."""

    def _split(self, lower, num_upper):
        upper = super()._split(lower, num_upper)
        upper.locks = 0
        return upper


@RADIX.breaks("RADIX-05")
class SplitsTheCounterToo(RadixCache):
    """A split of a locked node counts the upper half as protected once more."""

    def _split(self, lower, num_upper):
        upper = super()._split(lower, num_upper)
        self._num_protected += upper.slots.size if upper.locks else 0
        return upper


@RADIX.breaks("RADIX-08")
class SplitsFreshenBoth(RadixCache):
    """A split marks both halves as used now."""

    def _split(self, lower, num_upper):
        upper = super()._split(lower, num_upper)
        lower.last_access = self._clock + 1
        return upper


@RADIX.breaks("RADIX-07")
class SplitsOneWay(RadixCache):
    """Of a locked node that is split, the lower half still names its old parent."""

    def _split(self, lower, num_upper):
        parent = lower.parent
        upper = super()._split(lower, num_upper)
        if lower.locks:  # an eviction splits nodes without locks, and would raise
            lower.parent = parent
        return upper


@RADIX.breaks("RADIX-04")
class EvictsTheLocked(RadixCache):
    """What waits for its eviction is not looked at again when it is locked."""

    def evict(self, num_slots):
        freed = super().evict(num_slots)
        leaf = next((node for node in nodes_below(self._root) if node.locks == 1 and not node.children), None)
        if freed.size >= num_slots or leaf is None:
            return freed
        del leaf.parent.children[leaf.child_key]
        leaf.alive = False
        self._num_protected -= leaf.slots.size
        return np.concatenate((freed, leaf.slots))


@RADIX.breaks("RADIX-07", "RADIX-15")
class LeavesTheEvictedInTheTree(RadixCache):
    """The slots of an evicted leaf are handed on, the leaf stays where it is found."""

    def _remove_leaf(self, leaf):
        super()._remove_leaf(leaf)
        leaf.parent.children[leaf.child_key] = leaf


@RADIX.breaks("RADIX-14")
class EvictsWholeLeavesThatFit(RadixCache):
    """A leaf that is larger than what is still needed is left alone."""

    def evict(self, num_slots):
        smallest = min((n.slots.size for n in nodes_below(self._root) if not n.children and not n.locks), default=0)
        return super().evict(num_slots if num_slots >= smallest else 0)


@RADIX.breaks("RADIX-07", "RADIX-14")
class ReportsTheWholeLeaf(RadixCache):
    """Of a leaf that is evicted in part, all slots are handed on."""

    def evict(self, num_slots):
        before = {slot: node.slots for node in nodes_below(self._root) for slot in node.slots.tolist()}
        freed = super().evict(num_slots)
        return before[int(freed[-1])] if freed.size else freed


@RADIX.breaks("RADIX-14")
class EvictsAPageForNothing(RadixCache):
    """An eviction of no slots evicts a page."""

    def evict(self, num_slots):
        return super().evict(max(num_slots, 1))


@RADIX.breaks("RADIX-08")
class EvictsByUseAlways(RadixCache):
    """Whatever the policy is called, the least recently used goes first."""

    def __init__(self, page_size=1, key_kind="token", policy="lru"):
        super().__init__(page_size, key_kind, policy)
        self._queue = EvictionQueue("lru")


@RADIX.breaks("RADIX-08")
class PeekIsAUse(RadixCache):
    """A look that should change nothing makes the path the most recently used."""

    def peek(self, tokens, namespace="", max_length=None):
        return self.match(tokens, namespace, max_length, count=False).length


@RADIX.breaks("RADIX-01", "RADIX-11")
class ForgetsTheNamespace(RadixCache):
    """The namespace is no part of the key."""

    def _descend(self, keys, namespace, limit):
        return super()._descend(keys, "", limit)

    def _add_leaf(self, parent, keys, slots, namespace):
        return super()._add_leaf(parent, keys, slots, "")


@RADIX.breaks("RADIX-01", "RADIX-11")
class RepeatsItself(RadixCache):
    """The last answer is kept for the next look-up of the same tokens, in whatever namespace."""

    def match(self, tokens, namespace="", max_length=None, *, count=True):
        if getattr(self, "last", (None,))[0] != list(tokens):
            self.last = list(tokens), super().match(tokens, namespace, max_length, count=count)
        return self.last[1]

    def insert(self, tokens, slots, namespace=""):
        self.last = (None,)
        return super().insert(tokens, slots, namespace)

    def evict(self, num_slots):
        self.last = (None,)
        return super().evict(num_slots)


@RADIX.breaks("RADIX-10")
class KeepsTheCallersPages(RadixCache):
    """After an insertion the answer tells the caller to go on with its own pages, and to free them."""

    def insert(self, tokens, slots, namespace=""):
        done = super().insert(tokens, slots, namespace)
        return replace(done, canonical=np.asarray(slots, np.int32)[: len(done.canonical)])


STORE = Defects("prefix-cache", PrefixStoreAdapter)


@STORE.breaks("RADIX-10")
class LeavesTheTableAlone(KVStore):
    """The copies of a prefix that was cached already are freed, and the request table still points to them."""

    def share_prefix(self, row, tokens, num_valid, namespace, fence):
        before = self.table.slots[row].copy()
        super().share_prefix(row, tokens, num_valid, namespace, fence)
        self.table.slots[row] = before


@STORE.breaks("RADIX-06")
class AbortsWithoutUnlocking(KVStore):
    """A request that leaves with nothing to hand over, aborted or never admitted, keeps its lock."""

    def _release(self, departure):
        if departure.tokens is None:
            self._locked[departure.row] = None
        super()._release(departure)


@STORE.breaks("RADIX-06")
class LocksOncePerPublication(KVStore):
    """A request that publishes again keeps the lock of its shorter prefix, too."""

    def share_prefix(self, row, tokens, num_valid, namespace, fence):
        locked, self._locked[row] = self._locked[row], None
        super().share_prefix(row, tokens, num_valid, namespace, fence)
        if self._locked[row] is None:  # nothing was published
            self._locked[row] = locked
        elif self._locked[row] is locked:
            self.cache.unlock(locked)


@STORE.breaks("RADIX-05")
class GivesUpTheFirstCopies(HostTier):
    """When host memory is full, what was copied first goes first, however lately it was used."""

    def __init__(self, num_pages, page_size, key_kind="token"):
        super().__init__(num_pages, page_size, key_kind)
        self._cache = RadixCache(page_size, key_kind, "fifo")


@STORE.breaks("RADIX-05")
class EmptiesWhatIsFull(HostTier):
    """When host memory is full, all of it is given up."""

    def store(self, tokens, num_keys, namespace):
        missing = num_keys // self._page_size * self._page_size - self.find(tokens, namespace, num_keys)
        if missing > self._allocator.num_free_slots:
            self.forget()
        return super().store(tokens, num_keys, namespace)


PLAIN = Defects("prefix-cache", PlainPrefixCache)
"""What ours does not have."""


@PLAIN.breaks("RADIX-01", "RADIX-10")
class TrustsTheHash(PlainPrefixCache):
    """Blocks of one hash are taken for equal."""

    def is_child(self, block, parent, namespace, keys):
        return True


@PLAIN.breaks("RADIX-01", "RADIX-10")
class HashesWithoutTheParent(PlainPrefixCache):
    """A block is found by its own tokens, whatever stands before it."""

    def bucket(self, parent, namespace, keys):
        return super().bucket(None, namespace, keys)

    def is_child(self, block, parent, namespace, keys):
        return block.namespace == namespace and block.keys == keys


@PLAIN.breaks("RADIX-08")
class EvictsInnerBlocks(PlainPrefixCache):
    """A block may go before those that come after it."""

    def may_go(self, block):
        return not block.locks


@PLAIN.breaks("RADIX-01", "RADIX-07")
class ReplacesOnDuplicate(PlainPrefixCache):
    """A page that is computed again takes the cached one's place."""

    def insert(self, tokens, slots, namespace):
        path, canonical, copies = super().insert(tokens, slots, namespace)
        for number, block in enumerate(path):
            block.slots = list(slots[number * self.page_size : (number + 1) * self.page_size])
        return path, canonical, copies


@PLAIN.breaks("HANGS")
class WaitsForRoom(PlainPrefixCache):
    """The eviction loop goes on until there is room, though nothing can be evicted."""

    def evict(self, num_slots):
        freed = super().evict(num_slots)
        while len(freed) < num_slots:
            freed += super().evict(num_slots - len(freed))
        return freed


@PLAIN.breaks("RADIX-06", "RADIX-08")
class ForgetsTheLastLock(PlainPrefixCache):
    """Blocks that two requests have locked are given up by the first of them."""

    def unlock(self, path):
        is_unlocked = super().unlock(path)
        if is_unlocked:
            for block in path:
                block.locks = 0
        return is_unlocked


@PLAIN.breaks("RADIX-15")
class RemembersTheEvicted(PlainPrefixCache):
    """An evicted block can be found until its hash is needed again."""

    def remove(self, block):
        super().remove(block)
        self.last_evicted = block

    def child(self, parent, namespace, keys):
        last = getattr(self, "last_evicted", None)
        is_last = last is not None and self.is_child(last, parent, namespace, keys)
        return last if is_last else super().child(parent, namespace, keys)


MUTANTS = (*RADIX.mutants, *STORE.mutants, *CACHE_WITH_GROUPS.mutants, *PLAIN.mutants)
