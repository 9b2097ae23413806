"""The owners of KV slots: rows of running requests, the prefix cache, and rows behind a fence.

```
row   [0, shared) the cache's, locked · [shared, allocated) this row's own · [allocated, width) unused
```

A request that leaves while a launched step may still touch its row is *fenced*: row, slots and locks stay as they are
until that step is committed. If the cache already had part of a request's prefix, the request's own slots for that part
are fenced too.

A row may be *held* for a transfer between workers. It stays as it is until the hold is released, even if its request
leaves. A row may be *silent*: it is reserved for KV that is still to arrive, and the executor learns of it only when
its request joins. Layers that keep less of a request than all its tokens have units beside these slots (`groups.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from ..contract.arrays import Int64Array, total_of
from ..contract.step import NO_WRITES, TableWrites, WrittenRanges
from ..errors import InvariantViolation
from .allocator import KVAllocator
from .fence import Departure, Fence
from .groups import StoreSizes
from .held_groups import HeldGroups
from .host_tier import HostTier
from .radix import Insertion, NoCache, PrefixMatch, RadixCache
from .radix_check import page_states
from .radix_node import RadixNode, num_locked_by
from .request_table import RequestTable

_NO_ROWS = np.empty(0, dtype=np.intp)


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
        self.allocator: KVAllocator = self._new_allocator(sizes.num_pages, sizes.page_size)
        self.table: RequestTable = self._new_table(num_rows, sizes.row_width)
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
        self._shared = [0] * (num_rows + 1)
        self.groups: HeldGroups = HeldGroups(sizes, self.allocator, self.cache, self._new_allocator, self._new_table)
        self._locked: list[RadixNode | None] = [None] * (num_rows + 1)
        self._fence: Fence = Fence()
        self._held: dict[int, Departure | None] = {}  # row -> how its request left, None while it is there
        self._silent = [False] * (num_rows + 1)
        self._writes: list[WrittenRanges] = []
        self._released: list[tuple[int, int]] = []

    def _new_allocator(self, num_pages: int, page_size: int) -> KVAllocator:
        return KVAllocator(num_pages, page_size)

    def _new_table(self, num_rows: int, width: int) -> RequestTable:
        return RequestTable(num_rows, width)

    @property
    def available_slots(self) -> int:
        """Slots that `grow` could get: free slots, and slots that the cache could evict."""
        available = self.allocator.num_free_slots + self.cache.evictable_slots
        return available + self.groups.evictable_slots if self.groups else available

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
        held = self.allocator.num_held_slots - self.cache.evictable_slots - self.cache.protected_slots
        return held - self.groups.evictable_slots

    # -- a row's life ---------------------------------------------------------------------------------------------

    def match(self, tokens: np.ndarray, namespace: str) -> PrefixMatch:
        """Find the cached prefix of a request's context, one token short of a full hit at most."""
        return self.cache.match(tokens, self.cache.named(namespace), max_length=len(tokens) - 1, count=False)

    def num_in_host(self, tokens: np.ndarray, namespace: str, num_cached: int) -> int:
        """Return how many tokens of a request's context behind its `num_cached` cached ones can be copied from host
        memory."""
        return max(0, self.host.find(tokens, self.cache.named(namespace), len(tokens) - 1) - num_cached)

    @contextmanager
    def locked(self, prefix: PrefixMatch | None) -> Iterator[None]:
        """Keep a cached prefix from being evicted, and its slots out of `available_slots`, within the context."""
        if prefix is None or not prefix.length:
            yield
            return
        self.cache.lock(prefix.node)
        self.groups.spare(prefix)
        try:
            yield
        finally:
            self.cache.unlock(prefix.node, was_used=False)
            self.groups.spare(None)

    def count_hit(self, num_tokens: int, num_cached: int) -> None:
        """Count a request of `num_tokens` that entered with `num_cached` of them from the cache."""
        self.cache.queries += num_tokens
        self.cache.hits += num_cached

    def open_row(self, prefix: PrefixMatch | None, silent: bool = False) -> int:
        """Give a row to a request; the slots of its cached prefix are written and locked. What it takes of other groups
        of layers fits."""
        row = self.table.acquire()
        self._silent[row] = silent
        if prefix is not None and prefix.length:
            self.cache.lock(prefix.node)
            self._locked[row] = prefix.node
            self._shared[row] = prefix.length
            self.allocated[row] = prefix.length
            self._write(row, 0, prefix.slots)
        if self.groups:
            self.groups.open(row, prefix)
        return row

    def reserve_row(
        self, tokens: np.ndarray | None, namespace: str, num_slots: int, num_arriving: int = 0
    ) -> int | None:
        """Open a silent row with `num_slots` slots (page aligned), the cached prefix of `tokens` among them; None, and
        nothing changed, if so many and what other groups take are not available. `num_slots` counts the cached prefix,
        too, so that locking it cannot leave too few slots for the rest. `num_arriving`: the tokens whose KV arrives.
        """
        ahead = num_slots - num_arriving
        needed = self.groups.sizes.total(num_slots, ahead)
        if not self.table.num_free_rows or needed > self.available_slots:
            return None
        if self.groups and not self.groups.has_own_room(num_slots, ahead):
            return None
        while self.take_denial():
            pass  # a denied attempt is repeated at once, because no later call would repeat it
        prefix = None if tokens is None else self.match(tokens, namespace)
        row = self.open_row(prefix, silent=True)
        if self.groups:
            self.groups.skip(row, num_arriving)
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
        if len(rows) == 1 and not self.groups:
            return self.grow_row(int(rows[0]), int(targets[0]))
        return self._grow(rows, targets)

    def _grow(self, rows: np.ndarray, targets: np.ndarray) -> bool:
        before = self.allocated[rows]
        after = np.maximum(targets, before)
        needs = after - before
        total = total_of(needs)
        if total == 0:
            return True
        if not self._make_room(total, rows, after):
            return False
        if self.groups:
            self.groups.grow(rows, after)
        slots = self.allocator.allocate(total)
        self.table.write(rows, before, needs, slots)
        if not self._silent[rows[0]]:  # silent rows grow one by one
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
        if self.groups:
            return self._grow(np.array([row]), np.array([target]))
        if not self._make_room(target - before, _NO_ROWS, _NO_ROWS):
            return False
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

    def _make_room(self, num_slots: int, rows: np.ndarray, targets: np.ndarray) -> bool:
        """Let the cache evict until `num_slots` slots are free, and what else the rows take up to `targets`. Returns
        whether that is free."""
        if self._denials and self.take_denial():
            return False
        if self.groups:
            return self.groups.make_room_to_grow(num_slots, rows, targets)
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
        if self.groups:
            self.groups.trim(rows, kept)
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
        if self.groups:
            self.groups.cache_row(row, insertion.node, len(insertion.canonical), goes_on=True)
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
                if self.groups:
                    self.groups.cache_row(row, insertion.node, len(insertion.canonical), False, departure.has_states)
                own = np.concatenate([insertion.duplicates, own[len(insertion.canonical) - own_from :]])
        locked = self._locked[row]
        if locked is not None:
            self.cache.unlock(locked)
            self._locked[row] = None
        self.allocator.free(own)
        if self.groups:
            self.groups.close(row)
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
        rows = list(rows)
        gained = self.groups.slots_gained_without(rows) if self.groups else 0
        gained += sum(int(self.allocated[row]) - self._shared[row] for row in rows)
        return gained + num_locked_by(node for row in rows if (node := self._locked[row]) is not None)

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
        free, those that other groups of layers take as held. The store names its slots."""
        left = [departure for departure in self._held.values() if departure is not None]
        fenced = [self.own_slots(departure.row) for departure in (*self._fence.rows, *left)]
        return page_states(self.allocator, [*fenced, *(slots for _, slots in self._fence.slots)], self.cache.root)

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
            held = allocated + sum(units.size for units in self.groups.units_of(row))
            if held and not self.table.is_taken(row):
                raise InvariantViolation("ALLOC-15", f"row {row} is free but has {held} slots and units")
        self.cache.check([node for node in self._locked if node is not None])
        self.host.check()
        if self.groups:
            self.groups.check(self.table.num_rows)

    def _holders(self) -> Iterator[np.ndarray]:
        for row in range(1, self.table.num_rows + 1):
            if self.allocated[row]:
                yield self.own_slots(row)
        yield from self.groups.holders()
        yield from (slots for _, slots in self._fence.slots)
        yield self.cache.cached_slots()

    def _write(self, row: int, start: int, slots: np.ndarray) -> None:
        self.table.write_row(row, start, slots)
        if not self._silent[row]:
            self._writes.append(WrittenRanges(row, start, slots.size, slots))
