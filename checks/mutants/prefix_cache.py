"""Planted defects of prefix caches: each is one method of a good one, done wrong in a way that has been
done wrong before."""

from ...core.kv.radix import RadixCache
from ...core.kv.store import KVStore
from ...properties.prefix_cache.plain import PlainPrefixCache
from ..adapters.prefix_store import PrefixStoreAdapter
from ..adapters.radix_cache import RadixCacheAdapter
from .planting import defects, lookup

RADIX = """
ComparesFirstPages (RADIX-01): Once the first page of a node is found, the rest of its keys is taken for equal.
    RadixCache._descend:
        path, length, child, part = good(self, keys, namespace, limit)
        return path, length, child, part and (min(child.keys.size - self.page_size, limit - length) or part)

MatchesPartsOfPages (RADIX-01): What follows the last whole page is matched token by token.
    RadixCache.match
        - return
        + length -= self.page_size > 1 and length > self.page_size
        + return
        - joined_slots(path)
        + joined_slots(path)[:length]

CutsTokensTo31Bits (RADIX-01, RADIX-05): Token ids are kept in 31 bits.
    RadixCache._keys_of = good(self, [token & 0x7FFFFFFF for token in tokens])

PacksBigramsInto32Bits (RADIX-01, RADIX-05, RADIX-10): The two tokens of a bigram have 16 bits each.
    RadixCache._keys_of
        - (ids[:-1] << 32) | ids[1:]
        + (ids[:-1] & 0xFFFF) << 16 | ids[1:] & 0xFFFF

KeysBigramsByTheFirst (RADIX-01, RADIX-05, RADIX-10): A draft head's KV is filed under its own token alone, though the next one went
into it.
    RadixCache._keys_of
        - (ids[:-1] << 32) | ids[1:]
        + ids[:-1]

LocksTheNodeAlone (RADIX-02, RADIX-03, RADIX-06): A lock stops at the node, its ancestors are not covered.
    RadixCache.lock
        - above = above.parent
        + break
    RadixCache.unlock
        - above = above.parent
        + break

LocksTheEvicted (RADIX-03): A lock does not check that its node is still there.
    RadixCache.lock
        - if not node.alive:
        + if False:

UnlocksWhatIsFree (RADIX-02): An unlock does not check that its node was locked.
    RadixCache.unlock:
        if node.locks > 0:
            return good(self, node)
        while node is not None and node is not self._root:
            node.locks -= 1
            node = node.parent

SplitsWithoutTheLock (RADIX-02, RADIX-04, RADIX-06): Of a locked node that is split, the upper half is not locked.
    RadixCache._split
        - upper.locks = lower.locks
        + upper.locks = 0

SplitsTheCounterToo (RADIX-05): A split of a locked node counts the upper half as protected once more.
    RadixCache._split
        - return upper
        + self._num_protected += upper.slots.size if upper.locks else 0
        + return upper

SplitsFreshenBoth (RADIX-08): A split marks both halves as used now.
    RadixCache._split
        - return upper
        + lower.last_access = self._clock + 1
        + return upper

SplitsOneWay (RADIX-07): Of a locked node that is split, the lower half still names its old parent.
    RadixCache._split
        - lower.parent = upper
        + lower.parent = parent if lower.locks else upper  # an eviction splits nodes without locks, and would raise

EvictsTheLocked (RADIX-04): What waits for its eviction is not looked at again when it is locked.
    RadixCache.evict:
        freed = good(self, num_slots)
        leaf = next((node for node in nodes_below(self._root) if node.locks == 1 and not node.children), None)
        if freed.size >= num_slots or leaf is None:
            return freed
        del leaf.parent.children[leaf.child_key]
        leaf.alive = False
        self._num_protected -= leaf.slots.size
        return np.concatenate((freed, leaf.slots))

LeavesTheEvictedInTheTree (RADIX-07, RADIX-15): The slots of an evicted leaf are handed on, the leaf stays where it is found.
    RadixCache._remove_leaf:
        good(self, leaf)
        leaf.parent.children[leaf.child_key] = leaf

EvictsWholeLeavesThatFit (RADIX-14): A leaf that is larger than what is still needed is left alone.
    RadixCache.evict:
        smallest = min((n.slots.size for n in nodes_below(self._root) if not n.children and not n.locks), default=0)
        return good(self, num_slots if num_slots >= smallest else 0)

ReportsTheWholeLeaf (RADIX-07, RADIX-14): Of a leaf that is evicted in part, all slots are handed on.
    RadixCache.evict:
        before = {slot: node.slots for node in nodes_below(self._root) for slot in node.slots.tolist()}
        freed = good(self, num_slots)
        return before[int(freed[-1])] if freed.size else freed

EvictsForNothing (RADIX-14): An eviction of no slots evicts a page.
    RadixCache.evict = good(self, max(num_slots, 1))

EvictsByUseAlways (RADIX-08): Whatever the policy is called, the least recently used goes first.
    RadixCache.__init__
        - EvictionQueue(policy)
        + EvictionQueue("lru")

PeekIsAUse (RADIX-08): A look that should change nothing makes the path the most recently used.
    RadixCache.peek = self.match(tokens, namespace, max_length, count=False).length

ForgetsTheNamespace (RADIX-01, RADIX-11): The namespace is no part of the key.
    RadixCache._descend = good(self, keys, "", limit)
    RadixCache._add_leaf = good(self, parent, keys, slots, "")

RepeatsItself (RADIX-01, RADIX-11): The last answer is kept for the next look-up of the same tokens, in whatever namespace.
    RadixCache.match:
        if getattr(self, "last", (None,))[0] != list(tokens):
            self.last = list(tokens), good(self, tokens, namespace, max_length, count=count)
        return self.last[1]
    RadixCache.insert:
        self.last = (None,)
        return good(self, tokens, slots, namespace)
    RadixCache.evict:
        self.last = (None,)
        return good(self, num_slots)

KeepsTheCallersPages (RADIX-10): After an insertion the caller is told to go on with its own pages, and to free them.
    RadixCache.insert
        - canonical, duplicates)
        + slots[:aligned], duplicates)
"""

STORE = """
LeavesTheTableAlone (RADIX-10): The copies of a prefix that was cached already are freed, and the request table still points to them.
    KVStore.share_prefix
        - self._write(row, old_shared, insertion.canonical[old_shared:])
        + pass

AbortsWithoutUnlocking (RADIX-06): A request that leaves with nothing to hand over, aborted or never admitted, keeps its lock.
    KVStore._release:
        if departure.tokens is None:
            self._locked[departure.row] = None
        good(self, departure)

LocksOncePerPublication (RADIX-06): A request that publishes again keeps the lock of its shorter prefix, too.
    KVStore.share_prefix
        - locked is not None
        + locked is insertion.node
"""

PLAIN = """
TrustsTheHash (RADIX-01, RADIX-10): Blocks of one hash are taken for equal.
    PlainPrefixCache.is_child = True

HashesWithoutTheParent (RADIX-01, RADIX-10): A block is found by its own tokens, whatever stands before it.
    PlainPrefixCache.bucket = good(self, None, namespace, keys)
    PlainPrefixCache.is_child = block.namespace == namespace and block.keys == keys

EvictsInnerBlocks (RADIX-08): A block may go before those that come after it.
    PlainPrefixCache.may_go = not block.locks

ReplacesOnDuplicate (RADIX-01, RADIX-07): A page that is computed again takes the cached one's place.
    PlainPrefixCache.insert:
        path, canonical, copies = good(self, tokens, slots, namespace)
        for number, block in enumerate(path):
            block.slots = list(slots[number * self.page_size : (number + 1) * self.page_size])
        return path, canonical, copies

WaitsForRoom (HANGS): The eviction loop goes on until there is room, though nothing can be evicted.
    PlainPrefixCache.evict
        - break
        + continue

ForgetsTheLastLock (RADIX-06, RADIX-08): Blocks that two requests have locked are given up by the first of them.
    PlainPrefixCache.unlock
        - block.locks -= 1
        + block.locks = 0

RemembersTheEvicted (RADIX-15): An evicted block can be found until its hash is needed again.
    PlainPrefixCache.remove:
        good(self, block)
        self.last_evicted = block
    PlainPrefixCache.child:
        last = getattr(self, "last_evicted", None)
        is_last = last is not None and self.is_child(last, parent, namespace, keys)
        return last if is_last else good(self, parent, namespace, keys)
"""
"""What ours does not have."""

MUTANTS = (
    *defects("prefix-cache", RadixCacheAdapter, [RadixCache], RADIX),
    *defects("prefix-cache", PrefixStoreAdapter, [KVStore], STORE),
    *defects("prefix-cache", PlainPrefixCache, [PlainPrefixCache], PLAIN),
)
__getattr__ = lookup(MUTANTS)
