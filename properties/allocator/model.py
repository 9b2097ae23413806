"""What is true of an allocator, in lists and dictionaries that are recounted from scratch, and the moment that the
checkers look at.

A model does not predict which ids a component hands out: it learns them. It remembers who has what. So it knows at any
time how many pages must be held, by how many holders, which are cached, and which wait for a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .canary import ShadowCell, ShadowMemory, UnitMemory, contents
from .contract import AllocatorCapabilities, AllocatorConfig
from .groups import UnitGroup, UnitTable


class Holder:
    """A holder of pages: `slots` in the order of positions, and the `cells` that were written to the first of them."""

    __slots__ = ("cells", "committed", "owner", "pages", "slots", "units", "wanted")

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self.pages: list[int] = []
        self.slots: list[int] = []
        self.cells: list[ShadowCell] = []
        self.committed = 0  # rows only: tokens that are final
        self.wanted = 0  # rows only: tokens that there must be room for
        self.units: tuple[UnitTable, ...] = ()  # rows only: what they hold of each group of layers

    def cut(self, num_pages: int, page_size: int) -> Holder:
        """Take the last `num_pages` pages off and return them as a holder of their own."""
        keep = len(self.pages) - num_pages
        gone = Holder(self.owner)
        gone.pages, gone.slots, gone.cells = (
            self.pages[keep:],
            self.slots[keep * page_size :],
            self.cells[keep * page_size :],
        )
        del self.pages[keep:], self.slots[keep * page_size :], self.cells[keep * page_size :]
        return gone


def _counted(holders: Iterable[Holder]) -> dict[int, int]:
    """Return page -> how many of these hold it."""
    count: dict[int, int] = {}
    for holder in holders:
        for page in holder.pages:
            count[page] = count.get(page, 0) + 1
    return count


class AllocatorModel:
    """The world around an allocator: who holds which pages, what is cached, what waits for which step."""

    def __init__(self, page_size: int, groups: Sequence[UnitGroup] = ()) -> None:
        self.page_size = page_size
        self.groups = groups
        self.memory, self.units = ShadowMemory(), UnitMemory(groups, page_size)
        self.unit_pages: list[Holder] = []  # of each group
        self.holders: dict[str, Holder] = {}
        self.rows: dict[str, Holder] = {}
        self.parts: dict[str, Holder] = {}  # requests whose last page need not be full
        self.cached: dict[int, list[ShadowCell]] = {}
        self.deferred: list[tuple[int, Holder, bool]] = []  # (step, what waits for it, whether a row goes with it)
        self.launched = 0
        self.completed = 0
        self._owners = 0

    def new_holder(self) -> Holder:
        self._owners += 1
        return Holder(self._owners)

    def give(self, name: str, slots: Sequence[int], cells: Sequence[ShadowCell] = ()) -> None:
        """Give a holder more slots in whole pages; it writes them, unless they have these cells."""
        if not slots:
            return
        holder = self.holders.get(name) or self.holders.setdefault(name, self.new_holder())
        holder.slots += slots
        holder.pages += self.pages_of(slots)
        holder.cells += cells
        self.write(holder)

    def write(self, holder: Holder, stop: int | None = None) -> None:
        """Let a holder write its slots, to the one before `stop` if that is given, from where it has written so far."""
        start = len(holder.cells)
        slots = holder.slots[start:stop]
        cells = contents(holder.owner, start, start + len(slots))
        self.memory.write(slots, cells)
        holder.cells += cells

    def pages_of(self, slots: Sequence[int]) -> list[int]:
        """Return the pages of slots that stand in whole pages."""
        return list(slots) if self.page_size == 1 else [slot // self.page_size for slot in slots[:: self.page_size]]

    def slots_of(self, pages: Sequence[int]) -> list[int]:
        size = self.page_size
        if size == 1:
            return list(pages)
        return [slot for page in pages for slot in range(page * size, page * size + size)]

    def everybody(self) -> list[Holder]:
        """Return all holders of pages now, except those that wait for a step."""
        return [*self.holders.values(), *self.rows.values(), *self.parts.values(), *self.unit_pages]

    def held(self) -> dict[int, int]:
        """Return page -> how many hold it now, recounted; pages without a holder are not in it."""
        return _counted(self.everybody())

    def waiting(self) -> dict[int, int]:
        """Return page -> how many references to it wait for a step, recounted."""
        return _counted(holder for _, holder, _ in self.deferred)

    def units_in_use(self, group: int) -> list[int]:
        """Return the units of a group that rows hold, those of rows that wait for a step included."""
        rows = (*self.rows.values(), *(holder for _, holder, with_row in self.deferred if with_row))
        return [unit for row in rows if row.units for unit in row.units[group][1]]

    def pages_for(self, more: Sequence[int]) -> int | None:
        """Return how many pages of the pool so many units more of each group take; None if a pool of its own has not so
        many."""
        pages = 0
        for i, (group, num) in enumerate(zip(self.groups, more, strict=True)):
            used = len(self.units_in_use(i))
            if group.capacity and used + num > group.capacity:
                return None
            pages += group.pages_of(used + num) - group.pages_of(used)
        return pages

    @property
    def num_rows_taken(self) -> int:
        return len(self.rows) + sum(with_row for _, _, with_row in self.deferred)

    @property
    def num_in_flight(self) -> int:
        """Steps that have begun and are not processed."""
        return self.launched - self.completed

    def retire(self, gone: Holder) -> None:
        """Note that pages which were given back are cached, as far as they have no other holder."""
        size, used = self.page_size, self.held().keys() | self.waiting().keys()
        for number, page in enumerate(gone.pages):
            if page not in used:
                self.cached[page] = gone.cells[number * size : (number + 1) * size]

    def cut(self, name: str, num_pages: int) -> Holder:
        """Take the last pages from a holder, at most all of them, and return them."""
        holder = self.holders[name]
        gone = holder.cut(min(num_pages, len(holder.pages)), self.page_size)
        if not holder.pages:
            del self.holders[name]
        return gone

    def complete(self) -> None:
        """Note that the oldest step has been processed: what waited for it is free."""
        self.completed += 1
        self.deferred = [item for item in self.deferred if item[0] > self.completed]


class AllocatorObservation(NamedTuple):
    """All that an allocator shows; None where it declares no such capability.
    Equal if and only if nothing has changed."""

    num_free: int
    free_pages: tuple[int, ...] | None
    cached_pages: tuple[int, ...] | None
    num_deferred: int | None
    references: tuple[int, ...] | None
    rows: tuple[tuple[str, tuple[int, ...]], ...] | None
    units: tuple[tuple[str, tuple[UnitTable, ...]], ...] | None = None
    used_units: tuple[int, ...] | None = None
    unit_pages: tuple[tuple[int, ...], ...] | None = None


NOTHING = AllocatorObservation(0, None, None, None, None, None)


@dataclass(slots=True)
class AllocatorMoment:
    """One operation and its effects. `held` and `waiting` are recounts: page -> number of references."""

    config: AllocatorConfig
    capabilities: AllocatorCapabilities
    model: AllocatorModel
    all_pages: frozenset[int] = frozenset()
    operation: object = "make"
    before: AllocatorObservation = NOTHING
    held_before: dict[int, int] = field(default_factory=dict)
    waiting_before: dict[int, int] = field(default_factory=dict)
    drained: bool = False
    asked: int | None = None  # slots that an allocation asked for
    answer: tuple[int, ...] | None = None  # slots that it got
    parts: tuple[tuple[str, int], ...] = ()  # (request, the position before) of those that a batch has given slots
    refusal: str | None = None
    allowed: bool | None = None  # what can_allocate said just before
    must_succeed: bool = False
    must_refuse: bool = False
    twice: int | None = None  # the page that a free named twice
    row_granted: bool | None = None  # whether a request got a row
    row_was_free: bool = False  # and whether there was one, with room for its states
    # (whose, slot, found, expected) of a slot that does not hold what its owner wrote
    stale: tuple[Any, ...] | None = None
    stale_unit: tuple[Any, ...] | None = None  # the same of the first unit: (whose, group, unit, found, expected)
    not_cacheable: tuple[int, ...] = ()
    after: AllocatorObservation = NOTHING
    held: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)
    recounted: dict[str, Any] | None = None  # what is wrong with the pool, by invariant

    @property
    def first_page(self) -> int:
        return 1 if self.capabilities.padding_page else 0

    def pages_of_answer(self) -> list[int]:
        return [slot // self.config.page_size for slot in self.answer]
