"""The texts of the trial, and the cells by which two texts are told apart.

A text is written as kinds of pages and what stands behind them: `pages` (0, 1) with `extra` 2 are a page of kind 0, one
of kind 1 and two more tokens. A negative `extra` takes tokens off the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise, product
from typing import NamedTuple

from .contract import PrefixCacheCapabilities, PrefixCacheConfig

LARGE_TOKEN = 2**16 + 1
HUGE_TOKEN = 2**31 + 1
"""Token ids that become 1 if an implementation cuts them to 16, or to 31 bits."""

NUM_KINDS = 5
HUGE_KIND = 4


# Texts of two kinds of pages that branch everywhere; the other kinds differ from the first by one token only.
TEXTS = (
    *((), (0,), (0,), (1,), (2,), (3,)),
    *(*product((0, 1), repeat=2), (0, 2), (0, 3), *product((0, 1), repeat=3), (0, 0, 0, 0), (0, 1, 0, 1)),
)
HUGE_TEXTS = ((HUGE_KIND,), (0, HUGE_KIND))


def texts_of(config: PrefixCacheConfig, has: PrefixCacheCapabilities) -> tuple[tuple[int, ...], ...]:
    """Return the kinds of pages of the texts that a trial draws."""
    return TEXTS + HUGE_TEXTS if has.wide_ids else TEXTS


def extras_of(config: PrefixCacheConfig, has: PrefixCacheCapabilities) -> list[int]:
    """Return how many tokens may stand behind the pages. A bigram's last page needs the token behind it."""
    return sorted({-1, 0, 1, config.page_size - 1}) + [int(config.bigram)] * 3


def page_of(kind: int, page_size: int) -> tuple[int, ...]:
    """Return the tokens of a page of this kind, ones but for one token: none is different in kind 0, the last in kind
    1, the first in kind 2. In kinds 3 and 4 the last is a number that becomes 1 when it is cut to 16 or 31 bits."""
    ones = (1,) * (page_size - 1)
    return ((*ones, 1), (*ones, 2), (3, *ones), (*ones, LARGE_TOKEN), (*ones, HUGE_TOKEN))[kind % NUM_KINDS]


class Text(NamedTuple):
    """Token ids, and a cell for each position that has a key:
    two cells are equal if and only if namespace and all keys up to there are."""

    tokens: tuple[int, ...]
    namespace: str
    cells: tuple[int, ...]


_CELLS: dict[tuple[int, object], int] = {}
_TEXTS: dict[tuple[object, ...], Text] = {}
_KEPT_TEXTS = 20_000


def text_of(pages: tuple[int, ...], extra: int, namespace: str, page_size: int, bigram: bool) -> Text:
    """Return the text that an operation describes."""
    known = (pages, extra, namespace, page_size, bigram)
    text = _TEXTS.get(known)
    if text is None:
        tokens = [token for kind in pages for token in page_of(kind, page_size)]
        tokens = (*tokens, *[1] * extra) if extra >= 0 else tuple(tokens[:extra])
        keys = pairwise(tokens) if bigram else tokens
        end, cells = cell(0, namespace), []
        for key in keys:
            end = cell(end, key)
            cells.append(end)
        if len(_TEXTS) >= _KEPT_TEXTS:
            _TEXTS.clear()
        text = _TEXTS[known] = Text(tokens, namespace, tuple(cells))
    return text


def cell(before: int, key: object) -> int:
    """Return the number that stands for a key behind others."""
    return _CELLS.setdefault((before, key), len(_CELLS) + 1)


def extended(end: int, keys: Sequence[object]) -> int:
    """Return the cell of the last of these keys behind `end`."""
    return reduce(cell, keys, end)
