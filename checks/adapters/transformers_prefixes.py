"""A prefix cache that is not ours: the block hashes of Hugging Face transformers' continuous batching.

A block is found in `BlockLedger` by the hash of (the hash before it, its tokens). `CacheAllocator` does the same for a prompt and for the
blocks that a forward pass has completed. Pools and tensors are left out. Needs transformers 5 with torch.

It trusts its callers, it does not check that a block that is given up is held: so it does not declare `misuse`. It takes blocks of
one hash for equal; the suite cannot make hashes of 64 bits collide, and does not say that they cannot.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import NamedTuple

from ...properties.prefix_cache.contract import PrefixCacheCapabilities, PrefixCacheConfig
from .transformers_blocks import require

_MODULE = "transformers.generation.continuous_batching.cache_allocators.cache_allocator"

try:
    _LEDGERS = importlib.import_module(_MODULE)
    MISSING = ""
except ImportError as error:
    MISSING = str(error)
"""Why transformers cannot be imported, "" if it can."""


class Path(NamedTuple):
    """Blocks, each found by its hash. Transformers has no handles: a match is taken at once or forgotten."""

    blocks: tuple[int, ...]
    hashes: tuple[int, ...]


class TransformersPrefixes:
    """What a cache allocator does with its ledger, for one request after the other."""

    def __init__(self, ledger, page_size: int) -> None:
        self.ledger = ledger
        self.page_size = page_size

    def hashes(self, tokens: Sequence[int], num_pages: int) -> list[int]:
        hashes: list[int] = []
        for start in range(0, num_pages * self.page_size, self.page_size):
            before = hashes[-1] if hashes else None
            hashes.append(_LEDGERS.compute_block_hash(before, list(tokens[start : start + self.page_size])))
        return hashes

    def slots(self, blocks: Sequence[int]) -> list[int]:
        return [block * self.page_size + offset for block in blocks for offset in range(self.page_size)]

    def match(self, tokens: Sequence[int], namespace: str) -> tuple[Path, list[int]]:
        blocks, hashes = [], self.hashes(tokens, len(tokens) // self.page_size)
        for block_hash in hashes:
            block = self.ledger.hash_to_block.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return Path(tuple(blocks), tuple(hashes[: len(blocks)])), self.slots(blocks)

    def insert(self, tokens: Sequence[int], slots: Sequence[int], namespace: str):
        size = self.page_size
        own = [slot // size for slot in slots[: len(slots) // size * size : size]]
        hashes = self.hashes(tokens, len(own))
        blocks, copies = [], []
        for block, block_hash in zip(own, hashes, strict=True):
            identical = self.ledger.hash_to_block.get(block_hash)
            if identical == block:
                blocks.append(block)
            elif (identical := self.ledger.register_new_hash(block, block_hash)) is not None:
                blocks.append(identical)
                copies.append(block)
            else:
                blocks.append(block)
                self.ledger.release(block)  # the cache's from now on; a request that needs it locks it
        return Path(tuple(blocks), tuple(hashes)), self.slots(blocks), self.slots(copies)

    def lock(self, path: Path) -> bool:
        if any(
            self.ledger.block_to_hash.get(block) != found for block, found in zip(path.blocks, path.hashes, strict=True)
        ):
            return False
        for block in path.blocks:
            self.ledger.acquire(block)
        return True

    def unlock(self, path: Path) -> None:
        for block in path.blocks:
            self.ledger.release(block)

    def evict(self, num_slots: int) -> list[int]:
        """Evict every cached block, or none: the ledger can do no less."""
        return self.slots(self.ledger.evict_cached_blocks()) if num_slots > 0 else []

    def num_evictable(self) -> int:
        return len(self.ledger.cached_blocks) * self.page_size

    def num_protected(self) -> int:
        return (len(self.ledger.block_to_hash) - len(self.ledger.cached_blocks)) * self.page_size


def make(config: PrefixCacheConfig) -> TransformersPrefixes:
    """Make a fresh ledger. Raises `TransformersMissing`."""
    require(MISSING)
    return TransformersPrefixes(_LEDGERS.BlockLedger(), config.page_size)


make.capabilities = PrefixCacheCapabilities(paged=True)
