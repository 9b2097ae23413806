"""The expected state of a block manager's requests, and the effects of one operation."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..prefix_cache.events import CacheAccount
from .contract import STATE, BlockManagerConfig

Text = tuple[str, tuple[int, ...]]
"""A namespace and tokens."""

Cell = tuple[int, Text]
"""What stands in a slot: the group of layers, and the text up to the slot's token.

All slots of a page with a state hold the text that the state has seen."""

Tables = tuple[tuple[int, ...], ...]
"""The slots of a request's positions, for each group of layers."""


@dataclass(slots=True, eq=False)
class ManagedRequest:
    """A request that the manager knows: positions below `computed` stand in `tables`; `start` is the first position of
    the step that runs, or of the next one."""

    namespace: str
    tokens: list[int]
    prompt_len: int
    computed: int = 0
    start: int = 0
    tables: Tables = ()

    def cell(self, group: int, position: int) -> Cell:
        return group, (self.namespace, tuple(self.tokens[: position + 1]))

    def seen_from(self, window: int) -> int:
        """Return the first position that the attention of this step sees, or of the next one."""
        return max(self.start - window + 1, 0) if window else 0

    def missing(self, config: BlockManagerConfig, group: int, num_tokens: int) -> int:
        """Return the pages that a table lacks for so many positions more."""
        have = len(self.tables[group]) // config.page_size
        missing = max(config.pages_to(group, self.computed + num_tokens) - have, 0)
        return min(missing, 1) if config.windows[group] == STATE else missing


def account_of(config: BlockManagerConfig) -> CacheAccount:
    """Return an empty account of the pages of all groups, whose names stand for texts."""
    states = [group for group, window in enumerate(config.windows) if window == STATE]
    return CacheAccount(config.page_size, lambda namespace: (namespace, ()), _extended, states, len(config.windows))


def _extended(text: Text, tokens: Sequence[int]) -> Text:
    return text[0], (*text[1], *tokens)


def longest_start(
    config: BlockManagerConfig, tokens: Sequence[int], namespace: str, cached: Container[Cell], dropped: int
) -> int:
    """Return the positions that a manager must find: the most of which every group has what it sees. `cached` has the
    last cells of pages; of a match `dropped` positions are left out."""
    size = config.page_size

    def is_seen(group: int, window: int, length: int) -> bool:
        if window == STATE:
            return length == dropped or (group, (namespace, tuple(tokens[: length - dropped]))) in cached
        first = max(length - (window - 1 + dropped), 0) // size * size if window else 0
        ends = range(first + size, length + 1, size)
        return all((group, (namespace, tuple(tokens[:end]))) in cached for end in ends)

    lengths = range((len(tokens) - 1) // size * size, 0, -size)
    return next((n for n in lengths if all(is_seen(group, w, n) for group, w in enumerate(config.windows))), 0)


class PassedOver(NamedTuple):
    """A cached page that went though another one, cached too, was in use longer ago. Numbers of operations."""

    page: int
    found_at: int  # when a match had it last
    went_at: int
    other_used_at: int


class PageUses:
    """When each page was in use last, and which pages that were older than one that went may still be cached."""

    def __init__(self) -> None:
        self._used: dict[int, int] = {}  # page -> the last operation at which a request had it
        self._found: dict[int, int] = {}  # page -> the last operation at which a match had it: then it was cached
        self._passed: dict[int, PassedOver] = {}

    def hold(self, pages: set[int], now: int) -> None:
        """Note that requests have these pages."""
        self._used |= dict.fromkeys(pages, now)

    def find(self, pages: set[int], now: int) -> tuple[int, PassedOver] | None:
        """Note that a match has these pages. Returns one that had to go before another one, and that one."""
        wrong = next(((page, self._passed[page]) for page in sorted(pages) if page in self._passed), None)
        self._found |= dict.fromkeys(pages, now)
        self.hold(pages, now)
        return wrong

    def hand_out(self, pages: set[int], now: int) -> None:
        """Note that these pages get another content."""
        gone = {page: self._found.pop(page) for page in pages if page in self._found}
        for page in pages:
            self._used.pop(page, None)
            self._passed.pop(page, None)
        for page, found_at in gone.items():
            for other, used_at in self._used.items():
                if used_at < found_at:
                    self._passed.setdefault(other, PassedOver(page, found_at, now, used_at))


@dataclass(slots=True)
class BlockManagerMoment:
    """One operation and its effects, as the checkers see them."""

    config: BlockManagerConfig
    account: CacheAccount
    operation: object = "make"
    running: dict[str, ManagedRequest] = field(default_factory=dict)
    memory: dict[int, Cell | None] = field(default_factory=dict)  # None: a draft
    request: str = ""
    match: tuple[int, Tables] | None = None  # the length found, and the slots
    expected: int | None = None  # the length that must be found at least
    fits: bool | None = None  # whether what was asked for fits into the free pages
    refusal: str | None = None
    written: frozenset[int] = frozenset()  # slots that the operation's request writes
    before: tuple[int, dict[str, Tables]] = (0, {})  # free pages, tables by request
    after: tuple[int, dict[str, Tables]] = (0, {})
    wrong_event: str = ""
    announced: int = 0  # the length that can be found according to the events before this operation
    unannounced: Cell | None = None  # the end of a page that was found, and was not cached according to them
    outlived: tuple[int, PassedOver] | None = None  # a page that was found, and one that went before it
    drained: bool = False

    def pages_of(self, tables: Tables) -> set[int]:
        """Return the pages that a request has."""
        return {slot // self.config.page_size for slots in tables for slot in slots if slot >= 0}

    def must_have(self, running: ManagedRequest, group: int, position: int) -> bool:
        """Return whether a step reads or writes the slot of a position, so that it must be in the table."""
        size, window = self.config.page_size, self.config.windows[group]
        if window != STATE:
            return position >= running.seen_from(window)
        page = position // size
        return page >= (running.computed - 1) // size or page == (running.start - 1) // size

    def read_at(self, running: ManagedRequest, group: int) -> Sequence[int]:
        """Return the computed positions whose cells a step or the next one reads."""
        window, slots = self.config.windows[group], running.tables[group]
        stop = min(running.computed, len(slots))
        if window != STATE:
            return range(running.seen_from(window), stop)
        # By page: a state may be updated in place.
        lasts = {
            slots[last] // self.config.page_size: last for last in (running.start - 1, stop - 1) if 0 <= last < stop
        }
        return list(lasts.values())

    def num_pages_with(self, end: Cell) -> int:
        """Count the pages whose slots hold the text up to `end`, each its part of it."""
        size, (group, (namespace, text)) = self.config.page_size, end
        has_states = self.config.windows[group] == STATE
        cells = [(group, (namespace, text[: len(text) - back * (not has_states)])) for back in range(size)]
        lasts = (slot for slot, cell in self.memory.items() if cell == end)
        return sum(all(self.memory.get(slot - back) == cell for back, cell in enumerate(cells)) for slot in lasts)

    def first_unannounced(self, running: ManagedRequest, length: int) -> Cell | None:
        """Return the end of the first page in a match that is not cached by the events; None if all are."""
        ends = range(self.config.page_size, length + 1, self.config.page_size)
        for group, slots in enumerate(running.tables):
            for end in ends:
                cell = running.cell(group, end - 1)
                if slots[end - 1] >= 0 and not self.account.copies[cell]:
                    return cell
        return None
