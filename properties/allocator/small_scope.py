"""The small scope of the allocator contract: the smallest pools, each with a few operations."""

from __future__ import annotations

from collections.abc import Iterable

from ..harness.operation import Operation
from .contract import AllocatorCapabilities, AllocatorConfig
from .trial import AllocatorTrial as Do


def small_scope(
    has: AllocatorCapabilities, max_pages: int, max_page_size: int
) -> Iterable[tuple[AllocatorConfig, list[Operation]]]:
    """Yield every smallest pool."""
    for pages in range(1, max_pages + 1):
        for size in range(1, max_page_size + 1) if has.paged else (1,):
            config = AllocatorConfig(pages, size, *((2, pages * size) if has.table else (0, 0)))
            yield config, alphabet(config, has)


def alphabet(config: AllocatorConfig, has: AllocatorCapabilities) -> list[Operation]:
    """Return operations of two holders and two requests, with every amount that fits and one that does not."""
    size, pages = config.page_size, config.num_pages
    first = 1 if has.padding_page else 0
    found: list[Operation] = [Do.alloc("a", n * size) for n in range(pages + 2)]
    found += [Do.alloc("b", n * size) for n in range(1, pages + 2)]
    found += [Do.free(holder, n) for holder in "ab" for n in (1, pages)]
    found += [Do.free_stray((page,)) for page in range(first, first + pages)] + [Do.free_twice("a")]
    if has.sharing:
        found += [Do.fork("a", "b", pages)]
    if has.eviction:
        found += [Do.retire("a", 1), Do.reuse("b", 1), Do.evict(1)]
    if has.deferred_free or has.deferred_close:
        found += [Do.launch(), Do.complete()]
    if has.deferred_free:
        found += [Do.free_after("a")]
    if has.table:
        found += [Do.open("r"), Do.open("q"), Do.grow("q", 1), Do.trim("r", 0), Do.close("r")]
        found += [Do.commit("r", size), *(Do.grow("r", n) for n in range(1, 2 * size + 1))]
    if has.snapshots:
        found += [Do.snapshot("s"), Do.restore("s")]
    return list(dict.fromkeys(found))
