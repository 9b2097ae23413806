"""The small scope of the prefix cache contract: the smallest pools, each with a few operations."""

from __future__ import annotations

from collections.abc import Iterable

from ..harness.operation import Operation
from .contract import PrefixCacheCapabilities, PrefixCacheConfig
from .trial import PrefixCacheTrial as Do


def small_scope(
    has: PrefixCacheCapabilities, max_pages: int, max_page_size: int
) -> Iterable[tuple[PrefixCacheConfig, list[Operation]]]:
    """Yield every smallest pool, with one remembered match, one request, and texts of up to two pages."""
    texts = [(0,), (0, 0), (0, 1)]
    for pages in range(1, max_pages + 1):
        for size in range(1, max_page_size + 1) if has.paged else (1,):
            found: list[Operation] = [Do.match("m", text, 0, "") for text in texts]
            found += [Do.lock("m"), Do.unlock("m"), Do.unlock_stray("m"), Do.evict(size), Do.evict(pages * size)]
            found += [Do.admit("r", text, 0, "") for text in texts[1:]]
            found += [Do.share("r", size), Do.finish("r"), Do.abort("r")]
            found += [Do.complete()] if has.table else [Do.insert(text, 0, "") for text in texts]
            yield PrefixCacheConfig(pages, size), found
