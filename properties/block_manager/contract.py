"""The contract of a block manager: it looks up the cached prefix of a text, allocates the rest, and takes everything
back at the end.

That is the shape of vLLM's `KVCacheManager` (get_computed_blocks with allocate_slots, free). Nothing is locked or
evicted from outside, and blocks of equal text may be kept twice. A block may be cached as soon as it is allocated: its
content is computed in the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from ..harness.contract import Capabilities, needs
from ..harness.letters import Choices
from ..prefix_cache.events import CacheEvent

STATE = 1
"""The window of a group whose layers keep a state (Mamba, linear attention): each sees the newest token, and a state of
all before it."""


@dataclass(frozen=True, slots=True)
class BlockManagerConfig:
    """What `make(config)` builds: `num_pages` pages of `page_size` slots, and a padding page of the manager's own
    where it has one.

    `windows`: for each group of layers, how many tokens its attention sees, the newest included (2 or more); 0: all;
    STATE: its layers keep a state. A request has a page table for each group. `lookahead`: how many slots a step needs
    behind its positions, for drafts; in a group with states so many pages, one for the state after each draft.
    """

    num_pages: int
    page_size: int = 1
    windows: tuple[int, ...] = (0,)
    lookahead: int = 0

    def __post_init__(self) -> None:
        assert self.num_pages >= 1 and self.page_size >= 1 and self.lookahead >= 0
        assert self.windows and min(self.windows) >= 0

    def pages_to(self, group: int, num_tokens: int) -> int:
        """Return the pages of a table with so many positions, and with those of drafts behind them."""
        if self.windows[group] == STATE:
            return -(-num_tokens // self.page_size) + self.lookahead
        return -(-(num_tokens + self.lookahead) // self.page_size)

    def pages_to_enter(self, group: int, num_tokens: int) -> int:
        """Return the most pages that a request of so many positions takes when it enters."""
        pages = self.pages_to(group, num_tokens)
        return min(pages, 2 + self.lookahead) if self.windows[group] == STATE else pages

    @classmethod
    def draw(cls, choose: Choices, has: BlockManagerCapabilities) -> BlockManagerConfig:
        """Choose a pool of a few pages."""
        num_pages, page_size = choose(range(1, 10)), choose((1, 2, 2, 3, 4, 4, 8, 16))
        near = (2, page_size + 1, 2 * page_size + 1)
        windows: tuple[int, ...] = (choose(near),) if has.windows and choose((False, True)) else (0,)
        if has.groups and choose((False, True)):
            num_pages *= 2
            windows = (0, choose((0, *near)) if has.windows else 0)
        if has.states and choose((False, True)):
            windows = (*windows[:-1], STATE)
        return cls(num_pages, page_size, windows, choose((0, 0, 1, 3)) if has.lookahead else 0)


@dataclass(frozen=True, slots=True)
class BlockManagerCapabilities(Capabilities):
    """What a manager declares."""

    caching: bool = False  # what was released is found again, until its pages are handed out
    namespaces: bool = False  # namespaces other than "" are kept apart
    # It refuses what no caller should do: to grow or release a request that is not there, to admit one that is
    misuse: bool = False
    # It gives back pages that no later position sees, also when it refuses to grow: their slots are -1 in `slots_of`.
    windows: bool = False
    groups: bool = False  # `tables_of`: several groups of layers, with a page table each
    # Groups whose layers keep a state. Their tables have the page of the state after the newest position, and of the
    # state from which the step went on; the slots of other pages may be -1. A state is cached at a page's end, where
    # a step ended there: a step that begins within a page goes no further than to its end.
    states: bool = False
    lookahead: bool = False  # `config.lookahead` slots behind the positions of a step
    events: bool = False  # `events`: a second account of what is cached, from which a router works
    lru: bool = False  # of the cached pages, those go first that no request has had for longest
    # A match is one page shorter than what is cached, as a draft head needs the hidden states of the last page.
    drops_last_page: bool = False
    # A request that computes what is cached meanwhile gets the cached pages in place of its own, also while it runs.
    rewrites_shared: bool = False
    evicts_when_refused: bool = False  # pages may leave the cache for a request that is refused then

    RELAXES: ClassVar[tuple[str, ...]] = ("drops_last_page", "rewrites_shared", "evicts_when_refused")
    FOUNDATIONS: ClassVar = dict.fromkeys(
        ("namespaces", "events", "lru", "drops_last_page", "rewrites_shared", "evicts_when_refused"), ("caching",)
    )


class BlockManager(Protocol):
    """A manager of KV blocks. A slot is one token's place, a page is `page_size` neighbouring slots from a multiple of
    it.

    To refuse is to return None or False, or to raise one of `REFUSALS`; nothing may have changed then.
    """

    def admit(self, request: str, tokens: Sequence[int], namespace: str, num_tokens: int) -> int | None:
        """Start a request: find the longest cached prefix of `tokens`, in whole pages and less than all of it, and
        allocate for the `num_tokens` positions behind it, or for as many as are left. Returns the length of that
        prefix."""

    def grow(self, request: str, tokens: Sequence[int], num_tokens: int) -> bool:
        """Allocate for `num_tokens` positions more.
        `tokens` is the whole text of the request by now; what was sampled is at its end."""

    def release(self, request: str) -> None:
        """End a request: it holds nothing any more."""

    def slots_of(self, request: str) -> Sequence[int]:
        """Return the slots of a request's positions in the first group, in whole pages; -1 in a page that it no longer
        has (`windows`)."""

    @needs("groups")
    def tables_of(self, request: str) -> Sequence[Sequence[int]]:
        """Return what `slots_of` returns, for each group."""

    @needs("events")
    def events(self) -> Sequence[CacheEvent]:
        """Return what entered the cache and what left it since the last call, in this order."""

    def num_free(self) -> int:
        """Count the pages that no request holds, cached or not."""
