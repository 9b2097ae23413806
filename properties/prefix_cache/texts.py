"""Texts, their keys, and the cell that each position writes into its slot: one per prefix, so that equal cells are equal prefixes."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

LARGE_TOKEN = 2**16 + 1
HUGE_TOKEN = 2**31 + 1
"""Cut to 16, or to 31 bits, they are token 1."""

NUM_KINDS = 5
HUGE_KIND = 4


def page_of(kind: int, page_size: int) -> tuple[int, ...]:
    """Return the tokens of a kind of page: like kind 0 but for the last token (1), for the first (2), for a token that looks the same when
    it is cut to 16 bits (3), to 31 bits (4)."""
    ones = (1,) * (page_size - 1)
    match kind % NUM_KINDS:
        case 0:
            return (*ones, 1)
        case 1:
            return (*ones, 2)
        case 2:
            return (3, *ones)
        case 3:
            return (*ones, LARGE_TOKEN)
    return (*ones, HUGE_TOKEN)


class Text(NamedTuple):
    """Token ids, and the cell of every position that has a key: equal if and only if namespace and all keys up to it are."""

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
        cell, cells = _cell(0, namespace), []
        for key in keys:
            cell = _cell(cell, key)
            cells.append(cell)
        if len(_TEXTS) >= _KEPT_TEXTS:
            _TEXTS.clear()
        text = _TEXTS[known] = Text(tokens, namespace, tuple(cells))
    return text


def _cell(before: int, key: object) -> int:
    return _CELLS.setdefault((before, key), len(_CELLS) + 1)
