"""What the allocator is asked in a random run: a small configuration, and operations whose sizes lie at the edges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..operations import Operation
from ..vocabulary import Letter, Vocabulary
from . import operations as ops
from .contract import AllocatorCapabilities, AllocatorConfig

PAGE_SIZES = (1, 1, 2, 2, 3, 4, 8, 16)
HOLDERS = ("a", "b", "c", "d")
REQUESTS = ("r1", "r2", "r3")
NAMES = ("s", "t")


def draw_config(bits: int, capabilities: AllocatorCapabilities) -> AllocatorConfig:
    """A pool of a few pages, from 32 random bits."""
    page_size = PAGE_SIZES[bits & 7] if capabilities.paged else 1
    num_pages = 1 + (bits >> 3) % 8
    if not capabilities.table:
        return AllocatorConfig(num_pages, page_size)
    row_pages = 1 + (bits >> 6) % (num_pages + 1)
    return AllocatorConfig(num_pages, page_size, 1 + (bits >> 10) % 3, row_pages * page_size)


def simpler_configs(config: AllocatorConfig) -> Iterator[AllocatorConfig]:
    """Configurations like this one, but smaller."""
    for size in sorted({1, 2, config.page_size // 2, config.page_size - 1}):
        if 1 <= size < config.page_size:
            yield replace(config, page_size=size, row_width=config.row_width // config.page_size * size)
    for pages in sorted({1, 2, config.num_pages - 1}):
        if 1 <= pages < config.num_pages:
            yield replace(config, num_pages=pages)
    if config.num_rows > 1:
        yield replace(config, num_rows=config.num_rows - 1)
    if config.row_width > config.page_size:
        yield replace(config, row_width=config.row_width - config.page_size)


def vocabulary(config: AllocatorConfig, capabilities: AllocatorCapabilities) -> Vocabulary:
    """The letters of one configuration."""
    size, pages = config.page_size, config.num_pages
    amounts = [n * size for n in (1, 1, 1, 1, 1, 0, 2, 2, 2, 3, max(pages - 1, 0), pages, pages + 1)]
    odd = [1, size + 1, -1, -size, size * pages + 1, size * (pages + 1)]
    # At a page's edge, one before and one behind it; over several pages; at the row's width and past it.
    edges = [n * size + d for n in range(4) for d in (-1, 0, 1)]
    tokens = sorted({n for n in (*edges, config.row_width, config.row_width + 1) if n >= 0})
    strays = range(-1, pages + 2)
    in_flight = (Letter(ops.Launch, 2), Letter(ops.Complete, 2))
    letters = {
        "": (
            Letter(ops.Alloc, 10, HOLDERS, amounts * 7 + odd),
            Letter(ops.Free, 7, HOLDERS, (1, 1, 2, pages)),
        ),
        "hostile": (
            Letter(ops.FreeStray, 2, [(page,) for page in strays] + [(a, b) for a in strays for b in strays]),
            Letter(ops.FreeTwice, 1, HOLDERS),
        ),
        "snapshots": (Letter(ops.Snapshot, 1, NAMES), Letter(ops.Restore, 1, NAMES)),
        "sharing": (Letter(ops.Fork, 3, HOLDERS, HOLDERS, (1, 2, 3)),),
        "eviction": (
            Letter(ops.Retire, 4, HOLDERS, (1, 2, 3)),
            Letter(ops.Reuse, 2, HOLDERS, (1, 2)),
            Letter(ops.Evict, 1, (0, 1, 2, pages)),
        ),
        "deferred_free": (*in_flight, Letter(ops.FreeAfter, 3, HOLDERS)),
        "table": (
            Letter(ops.Open, 3, REQUESTS),
            Letter(ops.Grow, 7, REQUESTS, tokens),
            Letter(ops.Commit, 4, REQUESTS, (1, 2, size, size + 1)),
            Letter(ops.Trim, 2, REQUESTS, (0, 0, 1, size)),
            Letter(ops.Close, 2, REQUESTS),
        ),
        "deferred_close": in_flight,
    }
    return {name: found for name, found in letters.items() if name in ("", "hostile", *capabilities.declared)}


def small_scope(
    capabilities: AllocatorCapabilities, max_pages: int, max_page_size: int
) -> Iterable[tuple[AllocatorConfig, list[Operation]]]:
    """Every smallest pool, with two holders, two requests, every amount that fits and one that does not."""
    for pages in range(1, max_pages + 1):
        for size in range(1, max_page_size + 1) if capabilities.paged else (1,):
            config = AllocatorConfig(pages, size, *((2, pages * size) if capabilities.table else (0, 0)))
            yield config, alphabet(config, capabilities)


def alphabet(config: AllocatorConfig, capabilities: AllocatorCapabilities) -> list[Operation]:
    """The operations of the small scope: two holders, two requests, every amount that fits and one that does not."""
    size, pages = config.page_size, config.num_pages
    first = 1 if capabilities.padding_page else 0
    letters: list[Operation] = [
        ops.Alloc(who, n * size) for who in "ab" for n in range(1 if who == "b" else 0, pages + 2)
    ]
    letters += [ops.Free(who, n) for who in "ab" for n in (1, pages)]
    letters += [ops.FreeStray((page,)) for page in range(first, first + pages)] + [ops.FreeTwice("a")]
    if capabilities.sharing:
        letters += [ops.Fork("a", "b", pages)]
    if capabilities.eviction:
        letters += [ops.Retire("a", 1), ops.Reuse("b", 1), ops.Evict(1)]
    if capabilities.deferred_free or capabilities.deferred_close:
        letters += [ops.Launch(), ops.Complete()]
    if capabilities.deferred_free:
        letters += [ops.FreeAfter("a")]
    if capabilities.table:
        letters += [
            ops.Open("r"),
            ops.Open("q"),
            ops.Grow("q", 1),
            ops.Trim("r", 0),
            ops.Close("r"),
            ops.Commit("r", size),
        ]
        letters += [ops.Grow("r", n) for n in range(1, 2 * size + 1)]
    if capabilities.snapshots:
        letters += [ops.Snapshot("s"), ops.Restore("s")]
    return list(dict.fromkeys(letters))
