"""SGLang's allocators, of single slots and of pages, behind the allocator contract.

They trust their callers, so they do not declare `misuse`. Freed pages go back to the front of the free list, or with
`need_sort` to a list of their own, which is sorted in when the free list does not suffice.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from ...properties.allocator.contract import AllocatorConfig
from ...properties.harness.contract import Adapter
from .release import Recorded
from .sglang import module_of


class SGLangAllocator:
    """An allocator of the release. Page 0 is its padding page."""

    def __init__(self, config: AllocatorConfig, need_sort: bool) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.own_calls: list[str] | None = None
        size, page_size = config.num_pages * config.page_size, config.page_size
        device = {"dtype": self.torch.half, "device": "cpu", "kvcache": None, "need_sort": need_sort}
        if page_size == 1:
            pool = module_of("mem_cache.allocator.token").TokenToKVPoolAllocator(size, **device)
        else:
            pool = module_of("mem_cache.allocator.paged").PagedTokenToKVPoolAllocator(size, page_size, **device)
        sizes = f"{size}" if page_size == 1 else f"{size}, {page_size}"
        kind = type(pool).__name__
        self.made: str = f'pool = {kind}({sizes}, torch.half, "cpu", kvcache=None, need_sort={need_sort})'
        self.pool: Any = Recorded(pool, "pool", self, _told)

    def _slots(self, answer: Any) -> list[int] | None:
        return None if answer is None else answer.tolist()

    def alloc(self, num_slots: int) -> list[int] | None:
        return self._slots(self.pool.alloc(num_slots))

    def alloc_extend(
        self, prefix_lens: Sequence[int], seq_lens: Sequence[int], last_slots: Sequence[int]
    ) -> list[int] | None:
        prefix, seq, last = (self.torch.tensor(values) for values in (prefix_lens, seq_lens, last_slots))
        return self._slots(self.pool.alloc_extend(prefix, prefix, seq, seq, last, sum(seq_lens) - sum(prefix_lens)))

    def alloc_decode(self, seq_lens: Sequence[int], last_slots: Sequence[int]) -> list[int] | None:
        seq, last = self.torch.tensor(seq_lens), self.torch.tensor(last_slots)
        return self._slots(self.pool.alloc_decode(seq, seq, last))

    def free(self, slots: Sequence[int]) -> None:
        self.pool.free(self.torch.tensor(slots, dtype=self.torch.int64))

    def can_allocate(self, num_slots: int) -> bool:
        return bool(num_slots <= self.pool.available_size())

    def num_free(self) -> int:
        return int(self.pool.available_size())

    def free_pages(self) -> list[int]:
        return list(self.pool.get_all_free_pages().tolist())


def _told(value: Any) -> str:
    return f"torch.tensor({value.tolist()})" if hasattr(value, "tolist") else repr(value)


def _adapter(
    is_paged: bool, need_sort: bool, capabilities: tuple[str, ...]
) -> Callable[[AllocatorConfig], SGLangAllocator]:
    def make(config: AllocatorConfig) -> SGLangAllocator:
        return SGLangAllocator(config, need_sort)

    return Adapter(make, capabilities, lambda config: (config.page_size > 1) == is_paged)


TOKEN = ("padding_page", "inspection")
PAGED = ("paged", *TOKEN, "batches")
make_token: Callable[[AllocatorConfig], SGLangAllocator] = _adapter(False, False, TOKEN)
make_token_sorted: Callable[[AllocatorConfig], SGLangAllocator] = _adapter(False, True, TOKEN)
make_paged: Callable[[AllocatorConfig], SGLangAllocator] = _adapter(True, False, PAGED)
make_paged_sorted: Callable[[AllocatorConfig], SGLangAllocator] = _adapter(True, True, PAGED)
