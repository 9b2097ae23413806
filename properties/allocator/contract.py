"""The contract of a KV allocator: pages and slots, and, where declared, sharing, eviction, fences, rows of requests and
what these hold of other groups of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from ..harness.contract import Capabilities, needs
from ..harness.letters import Choices
from .groups import UnitGroup, UnitTable, draw_unit_groups, unit_groups


@dataclass(frozen=True, slots=True)
class AllocatorConfig:
    """What `make(config)` builds. Sizes are small on purpose: a defect shows at the edges.

    `num_pages` can be handed out, a padding page comes on top; `page_size` slots each (1 unless `paged`). `num_rows`
    rows of `row_width` slots, a multiple of the page size, for those with a request table (else both 0). `groups`: four
    numbers for each group of layers that keeps less than all tokens (`unit_groups`).
    """

    num_pages: int
    page_size: int = 1
    num_rows: int = 0
    row_width: int = 0
    groups: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.num_pages >= 0 and self.page_size >= 1 and self.num_rows >= 0
        assert self.row_width % self.page_size == 0

    @classmethod
    def draw(cls, choose: Choices, has: AllocatorCapabilities) -> AllocatorConfig:
        """Choose a pool of a few pages."""
        page_size = choose((1, 1, 2, 2, 3, 4, 8, 16)) if has.paged else 1
        num_pages = choose(range(1, 9))
        if not has.table:
            return cls(num_pages, page_size)
        row_pages = choose(range(1, num_pages + 2))
        num_rows = choose((1, 2, 3))
        groups = draw_unit_groups(choose, page_size, row_pages) if has.groups else ()
        more = choose((16, 8, 4, 0)) if groups else 0
        return cls(num_pages + more, page_size, num_rows, row_pages * page_size, groups)

    @property
    def unit_groups(self) -> tuple[UnitGroup, ...]:
        return unit_groups(self.groups)


@dataclass(frozen=True, slots=True)
class AllocatorCapabilities(Capabilities):
    """What an allocator declares. Each flag adds methods of `Allocator`, operations that call them, and invariants."""

    paged: bool = False  # pages of more than one slot; `alloc` and `free` still speak of slots, in whole pages
    padding_page: bool = False  # page 0 is never given out: ids begin at 1, else at 0
    inspection: bool = False  # `free_pages()`
    sharing: bool = False  # `share(slots)` and `references(page)`
    eviction: bool = False  # `retire(slots)`, `reuse(slots)`, `evict(num_pages)` and `cached_pages()`
    deferred_free: bool = False  # `free_after(slots, step)`, `complete(step)` and `num_deferred()`
    table: bool = False  # `open`, `grow`, `trim`, `close` and `slots_of`: rows of slots, one per request
    # `close(request, step)` waits for `complete(step)`, as does `num_deferred()`; needs `table`
    deferred_close: bool = False
    # `alloc_extend(…)` and `alloc_decode(…)`: slots for several requests at once, whose last pages need not be full
    batches: bool = False
    # `config.groups` may be set; `advance`, `units_of`, `used_units` and `unit_pages`: rows hold units of them, too
    groups: bool = False
    # It refuses what no caller should do: to free what is not held, to ask for no whole pages or for less than none
    misuse: bool = False

    FOUNDATIONS: ClassVar = {"deferred_close": ("table",), "groups": ("table",)}
    VISIBLE: ClassVar = ("padding_page",)


class Allocator(Protocol):
    """A KV allocator. A slot is one token's place, a page is `page_size` neighbouring slots: slot = page · page_size +
    offset.

    To refuse is to return None (where something is returned) or False, or to raise one of `REFUSALS`; nothing may have
    changed then.
    """

    def alloc(self, num_slots: int) -> Sequence[int] | None:
        """Allocate `num_slots` slots (a multiple of the page size) in whole pages;
        ascending and together inside a page."""

    def free(self, slots: Sequence[int]) -> None:
        """Give back whole pages, or with `sharing` one reference of each."""

    def can_allocate(self, num_slots: int) -> bool:
        """Return whether `alloc(num_slots)` would succeed now."""

    def num_free(self) -> int:
        """Return how many slots are on the free list; what could be evicted is not among them."""

    @needs("inspection")
    def free_pages(self) -> Sequence[int]:
        """Return the pages of the free list, in its own order."""

    @needs("sharing")
    def share(self, slots: Sequence[int]) -> None:
        """Count one more holder of each of these pages, which are held, full and read-only from now on."""

    @needs("sharing")
    def references(self, page: int) -> int:
        """Return how many holders the page has."""

    @needs("eviction")
    def retire(self, slots: Sequence[int]) -> None:
        """Do what `free` does, but a page that has lost its last holder may be kept for reuse, until
        its room is needed."""

    @needs("eviction")
    def reuse(self, slots: Sequence[int]) -> None:
        """Give cached pages a holder again."""

    @needs("eviction")
    def evict(self, num_pages: int) -> object:
        """Free at least `min(num_pages, cached)` cached pages; what it returns is not looked at."""

    @needs("eviction")
    def cached_pages(self) -> Sequence[int]:
        """Return the pages that have no holder but are not free:
        `alloc` evicts them when the free ones do not suffice."""

    @needs("batches")
    def alloc_extend(
        self, prefix_lens: Sequence[int], seq_lens: Sequence[int], last_slots: Sequence[int]
    ) -> Sequence[int] | None:
        """Allocate slots for positions `prefix_lens[i] … seq_lens[i] − 1` of each request i, one request after the
        other. They go on in the page of `last_slots[i]`, the slot of position `prefix_lens[i] − 1` (−1 if there is
        none), and then in new pages. All or nothing. `free` gets all slots of a request, the last page's as far as they
        are used."""

    @needs("batches")
    def alloc_decode(self, seq_lens: Sequence[int], last_slots: Sequence[int]) -> Sequence[int] | None:
        """Allocate a slot for position `seq_lens[i] − 1` of each request i, in the same way."""

    @needs("deferred_free")
    def free_after(self, slots: Sequence[int], step: int) -> None:
        """Give back pages that step `step`, still running, may touch."""

    @needs("deferred_free", "deferred_close")
    def complete(self, step: int) -> None:
        """Note that all steps up to `step` have been processed."""

    @needs("deferred_free", "deferred_close")
    def num_deferred(self) -> int:
        """Return how many pages wait for a step."""

    @needs("table")
    def open(self, request: str) -> bool:
        """Give a row to a request, with its states of each group. Returns whether there was room."""

    @needs("table")
    def grow(self, request: str, num_tokens: int) -> bool:
        """Extend the row to `num_tokens` tokens in all, with a unit for each new page of every window; never to less
        than before. Returns whether there was room."""

    @needs("table")
    def trim(self, request: str, num_tokens: int) -> None:
        """Give back the pages that lie wholly past `num_tokens` tokens."""

    @needs("table")
    def close(self, request: str, step: int | None = None) -> None:
        """Let the request leave; with `deferred_close`, its pages and its row wait for `step` if it is given."""

    @needs("table")
    def slots_of(self, request: str) -> Sequence[int]:
        """Return the allocated slots of a row, in the order of positions."""

    @needs("groups")
    def advance(self, request: str, num_tokens: int) -> None:
        """Note that so many tokens of a request are final: steps begin there or behind it. Units of pages that no
        window there reaches are given back at once."""

    @needs("groups")
    def units_of(self, request: str) -> Sequence[UnitTable]:
        """Return what a row holds of each group. A unit has the id that no other of its group has."""

    @needs("groups")
    def used_units(self) -> Sequence[int]:
        """Count the units of each group that are in use, those of rows that wait for a step included."""

    @needs("groups")
    def unit_pages(self) -> Sequence[Sequence[int]]:
        """Return the pages of the pool of slots that the units of each group take."""
