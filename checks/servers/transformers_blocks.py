"""A block manager that is not ours: the pool and the ledger of Hugging Face transformers' continuous batching.

The adapter drives its two parts as its own cache allocators do: `CachePool` (which blocks are free) and `BlockLedger`
(how many requests share a block, and what is kept for reuse). What the allocators add, attention types and tensors, is
left out. Needs transformers 5 with torch.

It trusts its callers, nothing looks whether a block that is freed is held: so it does not declare `misuse`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from ...core.errors import ForedraftError
from ...properties.allocator.contract import AllocatorCapabilities, AllocatorConfig

_MODULE = "transformers.generation.continuous_batching.cache_allocators"


try:
    _POOLS = importlib.import_module(f"{_MODULE}.cache_pool")
    _LEDGERS = importlib.import_module(f"{_MODULE}.cache_allocator")
    MISSING = ""
except ImportError as error:
    MISSING = str(error)
"""Why there is nothing to wrap, if there is not."""


class TransformersMissing(ForedraftError):
    """transformers, or the part of it that is wrapped here, is not installed."""


def require(missing: str) -> None:
    """Raise `TransformersMissing` if an import has failed, with its message."""
    if missing:
        message = f"transformers' continuous batching is needed ({missing}): pip install transformers torch"
        raise TransformersMissing(message)


class TransformersBlocks:
    """One block per sector: the pool's free sectors and free blocks together are the free pages, ids from 1."""

    def __init__(self, pool, ledger) -> None:
        self.pool = pool
        self.ledger = ledger
        self.num_retired = 0

    def alloc(self, num_slots: int) -> list[int]:
        if num_slots < 0:
            raise ValueError(f"{num_slots} blocks")
        if num_slots > self.num_free() and num_slots <= self.num_free() + len(self.ledger.cached_blocks):
            self.evict(num_slots)
        missing = num_slots - self.pool.count_free_blocks(0)
        if missing <= self.pool.num_free_sectors:
            for _ in range(missing):
                self.pool.allocate_sector(0)
        return self.pool.get_free_blocks(0, num_slots)

    def free(self, slots: Sequence[int]) -> None:
        self.pool.free_blocks(0, [block for block in slots if self.ledger.release(block, no_cache=True)])

    def can_allocate(self, num_slots: int) -> bool:
        return 0 <= num_slots <= self.num_free() + len(self.ledger.cached_blocks)

    def num_free(self) -> int:
        return self.pool.count_free_blocks(0) + self.pool.num_free_sectors

    def share(self, slots: Sequence[int]) -> None:
        for block in slots:
            self.ledger.acquire(block)

    def retire(self, slots: Sequence[int]) -> None:
        """Retire complete blocks: each gets a hash, and is cached when its last request has left."""
        for block in slots:
            if block not in self.ledger.block_to_hash:
                self.num_retired += 1
                self.ledger.register_new_hash(block, self.num_retired)
            if self.ledger.release(block):
                self.pool.free_blocks(0, [block])

    def reuse(self, slots: Sequence[int]) -> None:
        self.share(slots)

    def evict(self, num_pages: int) -> None:
        """Evict all or nothing: the ledger evicts every cached block at once."""
        if num_pages > 0:
            self.pool.free_blocks(0, self.ledger.evict_cached_blocks())

    def cached_pages(self) -> list[int]:
        return list(self.ledger.cached_blocks)

    def references(self, page: int) -> int:
        """Return the references; the ledger counts what two or more share, a block of one request is in none
        of its structures."""
        if page in self.ledger.cached_blocks or page in self._free():
            return 0
        return self.ledger.shared_ref_counts.get(page, 1)

    def free_pages(self) -> list[int]:
        return self._free()

    def _free(self) -> list[int]:
        trees = self.pool._free_blocks[0].trees
        return [*self.pool.free_sectors, *(block for blocks in trees.values() for block in blocks)]


def make(config: AllocatorConfig) -> TransformersBlocks:
    """Make a fresh pool of `num_pages` blocks. Raises `TransformersMissing`."""
    require(MISSING)
    pool = _POOLS.CachePool(config.num_pages, 1, num_reserved_sectors=1)
    pool.set_blocks_per_sector(0, 1)
    return TransformersBlocks(pool, _LEDGERS.BlockLedger())


make.capabilities = AllocatorCapabilities(padding_page=True, inspection=True, sharing=True, eviction=True)
