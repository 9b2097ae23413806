"""What a prefix cache is asked in a random run: a small pool, and texts that have everything, a part, or nothing in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

from ..harness.letters import Letter, Vocabulary
from ..harness.operation import Operation
from . import operations as ops
from .contract import PrefixCacheCapabilities, PrefixCacheConfig
from .texts import HUGE_KIND

PAGE_SIZES = (1, 1, 2, 2, 3, 4, 8, 16)
POLICIES = ("lru", "lru", "fifo", "lfu")
NAMES = ("m", "n", "o")
REQUESTS = ("r1", "r2", "r3")
NAMESPACES = ("", "lora-1", "1")
# Texts of two kinds of pages that branch everywhere; the other kinds differ from the first by one token only.
_SHORT = [(), (0,), (0,), (1,), (2,), (3,)]
_TEXTS = [*_SHORT, *product((0, 1), repeat=2), (0, 2), (0, 3), *product((0, 1), repeat=3), (0, 0, 0, 0), (0, 1, 0, 1)]
_HUGE = [(HUGE_KIND,), (0, HUGE_KIND)]


def draw_config(bits: int, capabilities: PrefixCacheCapabilities) -> PrefixCacheConfig:
    """A pool of a few pages, from 32 random bits."""
    return PrefixCacheConfig(
        num_pages=2 + (bits >> 3) % 9,
        page_size=PAGE_SIZES[bits & 7] if capabilities.paged else 1,
        bigram=capabilities.bigrams and (bits >> 7) % 3 == 2,
        policy=POLICIES[(bits >> 9) & 3] if capabilities.policies else "lru",
        hash_values=(0, 1, 2)[(bits >> 11) % 3] if capabilities.collisions else 0,
    )


def simpler_configs(config: PrefixCacheConfig) -> Iterator[PrefixCacheConfig]:
    """Configurations like this one, but smaller."""
    for size in sorted({1, 2, config.page_size // 2, config.page_size - 1}):
        if 1 <= size < config.page_size:
            yield replace(config, page_size=size)
    for pages in sorted({1, 2, config.num_pages - 1}):
        if 1 <= pages < config.num_pages:
            yield replace(config, num_pages=pages)
    if config.bigram:
        yield replace(config, bigram=False)
    if config.policy != "lru":
        yield replace(config, policy="lru")
    if config.hash_values:
        yield replace(config, hash_values=0)


def vocabulary(config: PrefixCacheConfig, capabilities: PrefixCacheCapabilities) -> Vocabulary:
    """The letters of one configuration."""
    size, pages = config.page_size, config.num_pages
    # A bigram's last page needs the token behind it.
    extras = sorted({-1, 0, 1, size - 1}) + [int(config.bigram)] * 3
    texts = [*_TEXTS, *_HUGE] if capabilities.wide_ids else _TEXTS
    spaces = ("", "", *NAMESPACES) if capabilities.namespaces else ("",)
    edges = sorted({n * size + d for n in (1, 2, 3) for d in (-1, 0, 1)})
    letters = {
        "": (
            Letter(ops.Match, 8, NAMES, texts, extras, spaces),
            Letter(ops.Lock, 5, NAMES),
            Letter(ops.Unlock, 4, NAMES),
            Letter(ops.Evict, 4, (0, -1, 1, 1, size, size, 2 * size, size + 1, pages * size, pages * size + 1)),
            Letter(ops.Admit, 8, REQUESTS, texts, extras, spaces),
            Letter(ops.Share, 4, REQUESTS, edges),
            Letter(ops.Finish, 5, REQUESTS),
            Letter(ops.Abort, 2, REQUESTS),
            # Where the subject has a pool, nobody else's pages come in.
            *((Letter(ops.Complete, 2),) if capabilities.table else (Letter(ops.Insert, 5, texts, extras, spaces),)),
        ),
        "hostile": (Letter(ops.UnlockStray, 2, NAMES),),
        "peek": (Letter(ops.Peek, 2, texts, extras, spaces),),
        "namespaces": (Letter(ops.Compare, 3, texts, extras, NAMESPACES, NAMESPACES),),
    }
    return {name: found for name, found in letters.items() if name in ("", "hostile", *capabilities.declared)}


def small_scope(
    capabilities: PrefixCacheCapabilities, max_pages: int, max_page_size: int
) -> Iterable[tuple[PrefixCacheConfig, list[Operation]]]:
    """Every smallest pool, with two texts that have a page in common and one that is the whole of it."""
    for pages in range(1, max_pages + 1):
        for size in range(1, max_page_size + 1) if capabilities.paged else (1,):
            yield PrefixCacheConfig(pages, size), alphabet(PrefixCacheConfig(pages, size), capabilities)


def alphabet(config: PrefixCacheConfig, capabilities: PrefixCacheCapabilities) -> list[Operation]:
    """The operations of the small scope: one remembered match, one request, texts of up to two pages."""
    texts = [(0,), (0, 0), (0, 1)]
    letters: list[Operation] = [ops.Match("m", text, 0, "") for text in texts]
    letters += [ops.Lock("m"), ops.Unlock("m"), ops.UnlockStray("m")]
    letters += [ops.Evict(config.page_size), ops.Evict(config.num_pages * config.page_size)]
    letters += [ops.Admit("r", text, 0, "") for text in texts[1:]]
    letters += [ops.Share("r", config.page_size), ops.Finish("r"), ops.Abort("r")]
    if capabilities.table:
        letters += [ops.Complete()]
    else:
        letters += [ops.Insert(text, 0, "") for text in texts]
    return letters
