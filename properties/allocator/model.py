"""Reference models: what is true, kept so plainly that it is obviously right. Lists and dictionaries, recounted from scratch.

A model does not predict which ids a component hands out. It is told, remembers who has what, and can say at any time what must be
so: how many pages are held, by how many holders, which are cached, which wait for a step.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..canary import Cell


class Holder:
    """Somebody with pages: `slots` in the order of positions, and the `cells` that were written to the first of them."""

    __slots__ = ("cells", "committed", "owner", "pages", "slots", "wanted")

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self.pages: list[int] = []
        self.slots: list[int] = []
        self.cells: list[Cell] = []
        self.committed = 0  # rows only: tokens that are final
        self.wanted = 0  # rows only: tokens that there must be room for

    def copy(self) -> Holder:
        twin = Holder(self.owner)
        twin.pages, twin.slots, twin.cells = self.pages[:], self.slots[:], self.cells[:]
        twin.committed, twin.wanted = self.committed, self.wanted
        return twin

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


class AllocatorModel:
    """The world around an allocator: who holds which pages, what is cached, what waits for which step."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.holders: dict[str, Holder] = {}
        self.rows: dict[str, Holder] = {}
        self.cached: dict[int, list[Cell]] = {}
        self.deferred: list[tuple[int, Holder, bool]] = []  # (step, what waits for it, whether a row goes with it)
        self.launched = 0
        self.completed = 0
        self._owners = 0

    def new_holder(self) -> Holder:
        self._owners += 1
        return Holder(self._owners)

    def holder(self, name: str) -> Holder:
        """The holder of this name, a new one if there is none."""
        if name not in self.holders:
            self.holders[name] = self.new_holder()
        return self.holders[name]

    def pages_of(self, slots: Sequence[int]) -> list[int]:
        """The pages of slots that stand in whole pages."""
        return list(slots) if self.page_size == 1 else [slot // self.page_size for slot in slots[:: self.page_size]]

    def slots_of(self, pages: Sequence[int]) -> list[int]:
        size = self.page_size
        if size == 1:
            return list(pages)
        return [slot for page in pages for slot in range(page * size, page * size + size)]

    def everybody(self) -> list[Holder]:
        """All that hold pages now, what waits for a step aside."""
        return [*self.holders.values(), *self.rows.values()]

    def held(self) -> dict[int, int]:
        """Page -> how many hold it now, recounted; pages without a holder are not in it."""
        count: dict[int, int] = {}
        for holder in self.everybody():
            for page in holder.pages:
                count[page] = count.get(page, 0) + 1
        return count

    def waiting(self) -> dict[int, int]:
        """Page -> how many references to it wait for a step, recounted."""
        count: dict[int, int] = {}
        for _, holder, _ in self.deferred:
            for page in holder.pages:
                count[page] = count.get(page, 0) + 1
        return count

    @property
    def num_rows_taken(self) -> int:
        return len(self.rows) + sum(with_row for _, _, with_row in self.deferred)

    def complete(self) -> None:
        """The oldest step has been processed: what waited for it is free."""
        self.completed += 1
        self.deferred = [item for item in self.deferred if item[0] > self.completed]

    def copy(self) -> AllocatorModel:
        twin = AllocatorModel(self.page_size)
        twin.holders = {name: holder.copy() for name, holder in self.holders.items()}
        twin.rows = {name: holder.copy() for name, holder in self.rows.items()}
        twin.cached = dict(self.cached)
        twin.deferred = [(step, holder.copy(), with_row) for step, holder, with_row in self.deferred]
        twin.launched, twin.completed, twin._owners = self.launched, self.completed, self._owners
        return twin

    def known(self) -> object:
        """The state as a value; steps count from the last one that was completed."""
        return (
            tuple((name, tuple(holder.pages)) for name, holder in sorted(self.holders.items())),
            tuple((name, tuple(row.pages), row.committed, row.wanted) for name, row in sorted(self.rows.items())),
            tuple(self.cached),
            tuple((step - self.completed, tuple(holder.pages), with_row) for step, holder, with_row in self.deferred),
            self.launched - self.completed,
        )
