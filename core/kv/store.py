"""The owners of KV slots: rows of running requests, the prefix cache, and rows behind a fence.

```
row   [0, shared) the cache's, locked · [shared, allocated) this row's own · [allocated, width) unused
```

A request that leaves while a launched step may still touch its row is *fenced*: row, slots and locks stay as they are
until that step is committed. If the cache already had part of a request's prefix, the request's own slots for that part
are fenced too.

A row may be *held* for a transfer between workers. It stays as it is until the hold is released, even if its request
leaves. A row may be *silent*: it is reserved for KV that is still to arrive, and the executor learns of it only when
its request joins. A row may have slots *beside* those of its tokens (`beside.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ..contract.arrays import Int64Array
from ..contract.step import NO_WRITES, TableWrites, WrittenRanges
from ..errors import InvariantViolation
from .allocator import KVAllocator, PageState
from .beside import NOTHING_BESIDE, BesideSlots, HeldBeside
from .fence import Departure, Fence
from .host_tier import HostTier
from .radix import Insertion, NoCache, PrefixMatch, RadixCache
from .radix_node import RadixNode, nodes_below
from .request_table import RequestTable


@dataclass(frozen=True, slots=True)
class StoreSizes:
    """The sizes of a KV store: the rows of its table, the pages of its pool, the slots beside those of tokens."""

    num_rows: int
    row_width: int  # in slots: whole pages
    num_pages: int
    page_size: int
    beside: BesideSlots = NOTHING_BESIDE

    def __post_init__(self) -> None:
        assert self.row_width % self.page_size == 0, (
            f"a row of {self.row_width} slots is no multiple of {self.page_size}"
        )


class KVStore:
    """Allocator, request table and prefix cache behind one set of moves, so that no slot is ever between two owners.

    `revision` increases when a row is released or everything may have changed, `cache_revision` when the cache takes
    slots over or gives duplicates back: after each of them a request that did not fit might fit. With `at_once` the
    slots of a row that leaves are free again at once, also while a step in flight may touch them. The row itself stays
    fenced. `host`: memory behind the prefix cache. `counting.py` has a store that only counts slots.
    """

    def __init__(
        self,
        sizes: StoreSizes,
        cache: RadixCache | None = None,
        host: HostTier | None = None,
        at_once: bool = False,
    ) -> None:
        num_rows = sizes.num_rows
        self.allocator: KVAllocator = self._new_allocator(sizes)
        self.table: RequestTable = self._new_table(sizes)
        self.cache: RadixCache = cache if cache is not None else NoCache(sizes.page_size)
        self.host: HostTier = host if host is not None else HostTier(0, sizes.page_size)
        assert host is None or self.cache.keeps_prefixes, "host memory is a tier behind a prefix cache"
        self.at_once = at_once
        self.page_size = sizes.page_size
        self.row_width = sizes.row_width
        self.allocated: Int64Array = np.zeros(num_rows + 1, dtype=np.int64)
        self.revision: int = 0
        self.cache_revision: int = 0
        self.num_denied: int = 0  # attempts to allocate that were denied since the caller last set this to 0
        self._denials = 0
        self._ones = np.ones(num_rows + 1, dtype=np.int64)
        self._shared = [0] * (num_rows + 1)
        self.beside: HeldBeside = HeldBeside(sizes.beside, self.allocator)
        self._locked: list[RadixNode | None] = [None] * (num_rows + 1)
        self._fence: Fence = Fence()
        self._held: dict[int, Departure | None] = {}  # row -> how its request left, None while it is there
        self._silent = [False] * (num_rows + 1)
        self._writes: list[WrittenRanges] = []
        self._released: list[tuple[int, int]] = []

    def _new_allocator(self, sizes: StoreSizes) -> KVAllocator:
        return KVAllocator(sizes.num_pages, sizes.page_size)

    def _new_table(self, sizes: StoreSizes) -> RequestTable:
        return RequestTable(sizes.num_rows, sizes.row_width)

    @property
    def available_slots(self) -> int:
        """Slots that `grow` could get: free slots, and slots that the cache could evict."""
        return self.allocator.num_free_slots + self.cache.evictable_slots

    @property
    def has_fenced(self) -> bool:
        """Whether some slots come back when steps in flight are committed."""
        return bool(self._fence.slots or (self._fence.rows and not self.at_once))

    @property
    def num_held_rows(self) -> int:
        """Rows that a transfer needs, whether or not their request is still there."""
        return len(self._held)

    @property
    def num_request_slots(self) -> int:
        """Slots held by rows, without those that the cache holds."""
        return self.allocator.num_held_slots - self.cache.evictable_slots - self.cache.protected_slots

    # -- a row's life ---------------------------------------------------------------------------------------------

    def match(self, tokens: np.ndarray, namespace: str) -> PrefixMatch:
        """Find the cached prefix of a request's context, one token short of a full hit at most."""
        return self.cache.match(tokens, namespace, max_length=len(tokens) - 1, count=False)

    def num_in_host(self, tokens: np.ndarray, namespace: str, num_cached: int) -> int:
        """Return how many tokens of a request's context behind its `num_cached` cached ones can be copied from host
        memory."""
        return max(0, self.host.find(tokens, namespace, len(tokens) - 1) - num_cached)

    @contextmanager
    def locked(self, prefix: PrefixMatch | None) -> Iterator[None]:
        """Keep a cached prefix from being evicted, and its slots out of `available_slots`, within the context."""
        if prefix is None or not prefix.length:
            yield
            return
        self.cache.lock(prefix.node)
        try:
            yield
        finally:
            self.cache.unlock(prefix.node, was_used=False)

    def count_hit(self, num_tokens: int, num_cached: int) -> None:
        """Count a request of `num_tokens` that entered with `num_cached` of them from the cache."""
        self.cache.queries += num_tokens
        self.cache.hits += num_cached

    def open_row(self, prefix: PrefixMatch | None, silent: bool = False) -> int:
        """Give a row to a request; the slots of its cached prefix are written and locked. Those beside them fit."""
        row = self.table.acquire()
        self._silent[row] = silent
        if prefix is not None and prefix.length:
            self.cache.lock(prefix.node)
            self._locked[row] = prefix.node
            self._shared[row] = prefix.length
            self.allocated[row] = prefix.length
            self._write(row, 0, prefix.slots)
        if self.beside.rule:
            length = int(self.allocated[row])
            fits = self._evict_for(self.beside.rule.of(length))
            assert fits, "what was found to fit does not"
            self.beside.open(row, length)
        return row

    def reserve_row(self, tokens: np.ndarray | None, namespace: str, num_slots: int) -> int | None:
        """Open a silent row with `num_slots` slots (page aligned), the cached prefix of `tokens` among them; None, and
        nothing changed, if so many and those beside them are not available. `num_slots` counts the cached prefix, too,
        so that locking it cannot leave too few slots for the rest.
        """
        if not self.table.num_free_rows or num_slots + self.beside.rule.of(num_slots) > self.available_slots:
            return None
        while self.take_denial():
            pass  # a denied attempt is repeated at once, because no later call would repeat it
        prefix = None if tokens is None else self.match(tokens, namespace)
        row = self.open_row(prefix, silent=True)
        fits = self.grow_row(row, num_slots)
        assert fits, "what was found to fit does not"
        return row

    def announce_row(self, row: int) -> None:
        """Announce a silent row with all its slots to the executor in the next step."""
        self._silent[row] = False
        slots = self.table.gather(row, 0, int(self.allocated[row]))
        self._writes.append(WrittenRanges(row, 0, slots.size, slots))

    def num_shared(self, row: int) -> int:
        """Return how many positions at the front of a row have slots that the prefix cache owns."""
        return self._shared[row]

    def hold_row(self, row: int) -> None:
        """Keep row, slots and locks as they are until `release_hold`, even if the request leaves."""
        assert self.table.is_taken(row), f"row {row} has no request"
        assert row not in self._held, f"row {row} is held already"
        self._held[row] = None

    def release_hold(self, row: int, last_committed: int) -> None:
        """Release the slots of `row` if its request has left: no transfer touches them any more."""
        departure = self._held.pop(row)
        if departure is not None:
            self.close_row(departure, last_committed)

    def is_held_row(self, row: int) -> bool:
        return row in self._held

    def grow(self, rows: np.ndarray, targets: np.ndarray) -> bool:
        """Extend the rows, intp [n], to `targets` int64 [n] slots (page aligned), or change nothing and return False.

        A row that has its target already needs nothing. The cache evicts slots if the free ones do not suffice.
        """
        if len(rows) == 1:
            return self.grow_row(int(rows[0]), int(targets[0]))
        before = self.allocated[rows]
        after = np.maximum(targets, before)
        needs = after - before
        total = int(needs.dot(self._ones[: len(needs)]))
        if total == 0:
            return True
        beside = self.beside.growth(before, after)
        if not self._make_room(total + sum(beside)):
            return False
        if beside:
            self.beside.grow(rows.tolist(), beside)
        slots = self.allocator.allocate(total)
        self.table.write(rows, before, needs, slots)
        self._writes.append(WrittenRanges(rows, before, needs, slots))
        self.allocated[rows] = after
        return True

    def grow_some(self, rows: np.ndarray, targets: np.ndarray) -> None:
        """Extend the rows as `grow` does, one after the other, until one does not fit."""
        for row, target in zip(rows.tolist(), targets.tolist(), strict=True):
            if not self.grow_row(row, target):
                return

    def grow_row(self, row: int, target: int) -> bool:
        """Extend a single row as `grow` does."""
        before = int(self.allocated[row])
        if target <= before:
            return True
        beside = self.beside.rule.of(target) - self.beside.num_of(row) if self.beside.rule.window_slots else 0
        if not self._make_room(target - before + beside):
            return False
        self.beside.grow([row], [beside])
        self._write(row, before, self.allocator.allocate(target - before))
        self.allocated[row] = target
        return True

    def deny(self, count: int) -> None:
        """Let the next `count` attempts to allocate fail, as if the pool were exhausted."""
        self._denials += count

    def take_denial(self) -> bool:
        """Return whether an attempt made now is denied although there may be room. The call counts as that attempt."""
        if not self._denials:
            return False
        self._denials -= 1
        self.num_denied += 1
        return True

    def forget(self) -> None:
        """Empty the cache: the KV is gone, with the worker that held it. No row is held any more."""
        if self.cache.evictable_slots:
            self.allocator.free(self.cache.clear())
        self.host.forget()
        self._writes.clear()
        self._released.clear()
        self.revision += 1
        if self.num_request_slots or self.cache.protected_slots:
            raise InvariantViolation("ALLOC-15", f"{self.num_request_slots} slots are held of KV that is gone")

    def _make_room(self, num_slots: int) -> bool:
        """Let the cache evict slots until `num_slots` are free. Returns whether so many are free."""
        if self._denials and self.take_denial():
            return False
        return self._evict_for(num_slots)

    def _evict_for(self, num_slots: int) -> bool:
        missing = num_slots - self.allocator.num_free_slots
        if missing <= 0:
            return True
        if missing > self.cache.evictable_slots:
            return False
        self.allocator.free(self.cache.evict(missing))
        return True

    def trim(self, rows: np.ndarray, targets: np.ndarray) -> None:
        """Give back the slots that the rows, intp [n], hold past `targets` int64 [n] (page aligned, never inside the
        shared prefix).
        """
        held = self.allocated[rows]
        kept = np.minimum(held, targets)
        excess = held - kept
        if not np.count_nonzero(excess):
            return
        self.allocator.free(self.table.gather_ragged(rows, kept, excess))
        self.beside.trim(rows.tolist(), self.beside.growth(kept, held))
        self.allocated[rows] = kept

    def share_prefix(self, row: int, tokens: np.ndarray, num_valid: int, namespace: str, fence: int) -> None:
        """Hand the first `num_valid` computed positions of a running row over to the cache, which locks them for the
        row.

        Slots that the cache had already under other ids are replaced in the table, and freed once step `fence` is
        committed. With `at_once` the row keeps its own slots until it leaves.
        """
        count = self.cache.num_keys(tokens, num_valid)
        old_shared = self._shared[row]
        if count // self.page_size * self.page_size <= old_shared:
            return
        if self.at_once and self.cache.peek(tokens, namespace, count) > old_shared:
            return
        insertion = self._cache_row(row, tokens, count, namespace)
        self.cache.lock(insertion.node)
        locked = self._locked[row]
        if locked is not None:
            self.cache.unlock(locked)
        self._locked[row] = insertion.node
        self._shared[row] = len(insertion.canonical)
        if len(insertion.duplicates):
            self._write(row, old_shared, insertion.canonical[old_shared:])
            self._fence.slots.append((fence, insertion.duplicates))
        self.cache_revision += 1

    def close_row(self, departure: Departure, last_committed: int) -> None:
        """Release a row now, or once the departure's fence is committed and no transfer holds it."""
        if departure.row in self._held:
            self._held[departure.row] = departure
        elif departure.fence <= last_committed:
            self._release(departure)
        elif self.at_once:
            self._release_slots(departure)
            self._fence.rows.append(departure._replace(tokens=None))
        else:
            self._fence.rows.append(departure)

    def pass_fence(self, committed: int) -> None:
        """Release all rows that waited for step `committed`, in the order in which they left."""
        for slots in self._fence.slots_due(committed):
            self.allocator.free(slots)
            self.cache_revision += 1
        for departure in self._fence.rows_due(committed):
            self._release(departure)

    def _release(self, departure: Departure) -> None:
        row = departure.row
        self._release_slots(departure)
        if not self._silent[row]:
            self._released.append((row, int(self.table.epochs[row])))
        self.table.release(row)

    def _release_slots(self, departure: Departure) -> None:
        row, tokens = departure.row, departure.tokens
        allocated, own_from = int(self.allocated[row]), self._shared[row]
        own = self.table.gather(row, own_from, allocated)
        if tokens is not None:
            count = self.cache.num_keys(tokens, departure.num_valid)
            if count // self.page_size * self.page_size > own_from:
                insertion = self._cache_row(row, tokens, count, departure.namespace)
                own = np.concatenate([insertion.duplicates, own[len(insertion.canonical) - own_from :]])
        locked = self._locked[row]
        if locked is not None:
            self.cache.unlock(locked)
            self._locked[row] = None
        self.allocator.free(own)
        self.beside.close(row)
        self.allocated[row] = 0
        self._shared[row] = 0
        self.revision += 1

    def _cache_row(self, row: int, tokens: np.ndarray, count: int, namespace: str) -> Insertion:
        """Hand the first `count` positions of a row over to the cache, and copy them to host memory."""
        insertion = self.cache.insert(tokens, self.table.gather(row, 0, count), namespace)
        self.host.store(tokens, count, namespace)
        return insertion

    def slots_gained_without(self, rows: Iterable[int]) -> int:
        """Count the slots that are free, or that the cache could evict, once these rows have left."""
        gained = 0
        locks: dict[int, tuple[RadixNode, int]] = {}  # by node: itself, and how many of the rows lock it
        for row in rows:
            gained += int(self.allocated[row]) - self._shared[row] + self.beside.num_of(row)
            node = self._locked[row]
            while node is not None:
                locks[node.serial] = (node, locks.get(node.serial, (node, 0))[1] + 1)
                node = node.parent
        return gained + sum(node.slots.size for node, count in locks.values() if count == node.locks)

    # -- what the next step tells the executor ----------------------------------------------------------------------

    def take_writes(self) -> TableWrites:
        """Return the entries of the request table that changed since the last call, in order."""
        if not self._writes:
            return NO_WRITES
        writes, self._writes = self._writes, []
        return TableWrites(writes)

    def take_released(self) -> tuple[tuple[int, int], ...]:
        """Return (row, epoch) of the rows released since the last call."""
        if not self._released:
            return ()
        released, self._released = self._released, []
        return tuple(released)

    # -- checks -----------------------------------------------------------------------------------------------------

    def own_slots(self, row: int) -> np.ndarray:
        """Return the slots that this row holds itself, int32: [shared, allocated)."""
        return self.table.gather(row, self._shared[row], int(self.allocated[row]))

    def page_states(self) -> np.ndarray:
        """Return the `PageState` of each page, uint8 [num_pages + 1], found from all owners. The dummy page counts as
        free. The store names its slots."""
        states = np.full(self.allocator.num_pages + 1, PageState.HELD, np.uint8)
        states[0] = states[self.allocator.free_pages] = PageState.FREE
        fenced = [slots for _, slots in self._fence.slots]
        left = [departure for departure in self._held.values() if departure is not None]
        for departure in (*self._fence.rows, *left):
            fenced += [self.own_slots(departure.row), self.beside.slots_of(departure.row)]
        for slots in fenced:
            states[slots // self.page_size] = PageState.FENCED
        for node in nodes_below(self.cache.root):
            states[node.slots // self.page_size] = PageState.SHARED if node.locks else PageState.CACHED
        return states

    def check(self) -> None:
        """Recount every owner from scratch; raises InvariantViolation with the id of what is broken."""
        self.allocator.check(self._holders())
        self.table.check()
        for row in range(self.table.num_rows + 1):
            allocated = int(self.allocated[row])
            if allocated % self.page_size or not 0 <= self._shared[row] <= allocated <= self.row_width:
                raise InvariantViolation("ALLOC-07", f"row {row}: {self._shared[row]} shared, {allocated} allocated")
            if row in self._held and not self.table.is_taken(row):
                raise InvariantViolation("HANDOFF-02", f"row {row} was given away while a transfer holds it")
            held = allocated + self.beside.num_of(row)
            if held and not self.table.is_taken(row):
                raise InvariantViolation("ALLOC-15", f"row {row} is free but has {held} slots")
        self.cache.check([node for node in self._locked if node is not None])
        self.host.check()

    def _holders(self) -> Iterator[np.ndarray]:
        for row in range(1, self.table.num_rows + 1):
            if self.allocated[row]:
                yield self.own_slots(row)
        yield from self.beside.holders()
        yield from (slots for _, slots in self._fence.slots)
        yield self.cache.cached_slots()

    def _write(self, row: int, start: int, slots: np.ndarray) -> None:
        self.table.write_row(row, start, slots)
        if not self._silent[row]:
            self._writes.append(WrittenRanges(row, start, slots.size, slots))
