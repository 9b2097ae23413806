"""What the allocator is asked in a random run: a small configuration, and operations whose sizes lie at the edges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from ..core.draws import Purpose, hash64
from . import operations as ops
from .contracts import AllocatorCapabilities, AllocatorConfig
from .operations import Operation

PAGE_SIZES = (1, 1, 2, 2, 3, 4, 8, 16)
HOLDERS = ("a", "b", "c", "d")
REQUESTS = ("r1", "r2", "r3")

# Capability -> its operations with their weights. "" is what every allocator can do, "hostile" what no caller should.
WEIGHTS: dict[str, tuple[tuple[type[Operation], int], ...]] = {
    "": ((ops.Alloc, 10), (ops.Free, 7)),
    "hostile": ((ops.FreeStray, 2), (ops.FreeTwice, 1)),
    "snapshots": ((ops.Snapshot, 1), (ops.Restore, 1)),
    "sharing": ((ops.Fork, 3),),
    "eviction": ((ops.Retire, 4), (ops.Reuse, 2), (ops.Evict, 1)),
    "deferred_free": ((ops.Launch, 2), (ops.Complete, 2), (ops.FreeAfter, 3)),
    "table": ((ops.Open, 3), (ops.Grow, 7), (ops.Commit, 4), (ops.Trim, 2), (ops.Close, 2)),
    "deferred_close": ((ops.Launch, 2), (ops.Complete, 2)),
}

Drawer = Callable[["AllocatorDraws", int], Operation]


def draw_config(bits: int, capabilities: AllocatorCapabilities) -> AllocatorConfig:
    """A pool of a few pages, from 64 random bits."""
    page_size = PAGE_SIZES[bits & 7] if capabilities.paged else 1
    num_pages = 1 + (bits >> 3) % 8
    if not capabilities.table:
        return AllocatorConfig(num_pages, page_size)
    row_pages = 1 + (bits >> 6) % (num_pages + 1)
    return AllocatorConfig(num_pages, page_size, 1 + (bits >> 10) % 3, row_pages * page_size)


def draw_features(bits: int, capabilities: AllocatorCapabilities) -> tuple[str, ...]:
    """Which operations a run has: each optional kind is left out in a quarter of the runs."""
    optional = ["hostile", *(name for name in capabilities.declared if name in WEIGHTS)]
    return ("", *(name for number, name in enumerate(optional) if (bits >> (2 * number)) & 3))


class AllocatorDraws:
    """The operations of one configuration. Equal operations are one object: drawing makes no new ones for long."""

    def __init__(self, config: AllocatorConfig, capabilities: AllocatorCapabilities) -> None:
        self.config = config
        size, pages = config.page_size, config.num_pages
        self._amounts = (0, 1, 1, 1, 1, 1, 2, 2, 2, 3, pages - 1, pages, pages + 1)
        self._odd = (-size, -1, 1, size + 1, size * pages + 1, size * (pages + 1))
        # At a page's edge, one before and one behind it; over several pages; at the row's width and past it.
        edges = [n * size + d for n in range(4) for d in (-1, 0, 1)]
        self._tokens = tuple(sorted({n for n in (*edges, config.row_width, config.row_width + 1) if n >= 0}))
        first = 1 if capabilities.padding_page else 0
        self._first_page = first
        self._strays = (*range(-1, pages + 2),)
        self._known: dict[tuple, Operation] = {}

    def draw(
        self, seed: int, run: int, count: int, features: Sequence[str], without: Sequence[type] = ()
    ) -> list[Operation]:
        """`count` operations of run number `run`, from the draws keyed by (seed, run)."""
        table: list[Drawer] = []
        for feature in features:
            for kind, weight in WEIGHTS[feature]:
                if kind not in without:
                    table += [self._drawers[kind]] * weight
        bits = hash64(seed, Purpose.SWARM, run, np.arange(count), lane=1).tolist()
        size = len(table)
        return [table[b % size](self, b >> 16) for b in bits]

    def _make(self, kind: type[Operation], *arguments: object) -> Operation:
        key = (kind, arguments)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = kind(*arguments)
        return found

    def _alloc(self, b: int) -> Operation:
        if b & 15 == 0:
            return self._make(ops.Alloc, HOLDERS[(b >> 4) & 3], self._odd[(b >> 6) % len(self._odd)])
        amount = self._amounts[(b >> 6) % len(self._amounts)] * self.config.page_size
        return self._make(ops.Alloc, HOLDERS[(b >> 4) & 3], amount)

    def _free(self, b: int) -> Operation:
        return self._make(ops.Free, HOLDERS[b & 3], (1, 1, 2, self.config.num_pages)[(b >> 2) & 3])

    def _free_stray(self, b: int) -> Operation:
        strays = self._strays
        pages = (strays[(b >> 2) % len(strays)], strays[(b >> 10) % len(strays)])
        return self._make(ops.FreeStray, pages[: 1 + (b & 1)])

    def _free_twice(self, b: int) -> Operation:
        return self._make(ops.FreeTwice, HOLDERS[b & 3])

    def _fork(self, b: int) -> Operation:
        return self._make(ops.Fork, HOLDERS[b & 3], HOLDERS[(b >> 2) & 3], 1 + (b >> 4) % 3)

    def _retire(self, b: int) -> Operation:
        return self._make(ops.Retire, HOLDERS[b & 3], 1 + (b >> 2) % 3)

    def _reuse(self, b: int) -> Operation:
        return self._make(ops.Reuse, HOLDERS[b & 3], 1 + (b >> 2) % 2)

    def _evict(self, b: int) -> Operation:
        return self._make(ops.Evict, (0, 1, 2, self.config.num_pages)[b & 3])

    def _launch(self, b: int) -> Operation:
        return self._make(ops.Launch)

    def _complete(self, b: int) -> Operation:
        return self._make(ops.Complete)

    def _free_after(self, b: int) -> Operation:
        return self._make(ops.FreeAfter, HOLDERS[b & 3])

    def _snapshot(self, b: int) -> Operation:
        return self._make(ops.Snapshot, "s" if b & 1 else "t")

    def _restore(self, b: int) -> Operation:
        return self._make(ops.Restore, "s" if b & 1 else "t")

    def _open(self, b: int) -> Operation:
        return self._make(ops.Open, REQUESTS[b % 3])

    def _grow(self, b: int) -> Operation:
        return self._make(ops.Grow, REQUESTS[b % 3], self._tokens[(b >> 8) % len(self._tokens)])

    def _commit(self, b: int) -> Operation:
        size = self.config.page_size
        return self._make(ops.Commit, REQUESTS[b % 3], (1, 2, size, size + 1)[(b >> 8) & 3])

    def _trim(self, b: int) -> Operation:
        size = self.config.page_size
        return self._make(ops.Trim, REQUESTS[b % 3], (0, 0, 1, size)[(b >> 8) & 3])

    def _close(self, b: int) -> Operation:
        return self._make(ops.Close, REQUESTS[b % 3])

    _drawers: ClassVar = {
        ops.Alloc: _alloc,
        ops.Free: _free,
        ops.FreeStray: _free_stray,
        ops.FreeTwice: _free_twice,
        ops.Fork: _fork,
        ops.Retire: _retire,
        ops.Reuse: _reuse,
        ops.Evict: _evict,
        ops.Launch: _launch,
        ops.Complete: _complete,
        ops.FreeAfter: _free_after,
        ops.Snapshot: _snapshot,
        ops.Restore: _restore,
        ops.Open: _open,
        ops.Grow: _grow,
        ops.Commit: _commit,
        ops.Trim: _trim,
        ops.Close: _close,
    }
