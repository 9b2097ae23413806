"""The units of groups of layers in a prefix cache: which pages have one, and the text that each holds.

A unit of a window holds the KV of a page, a state that of all tokens up to the end of a page. So both are known by the
cell of the page's last position; 0 stands for anything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..allocator.groups import UnitGroup, UnitTable


class SeenUnits(NamedTuple):
    """All that a cache shows of units: what each request holds, and for each group the units that are cached, by page,
    the number in use, and the pages of the pool that they take. The first unit of a table of states is the cached one
    from which the request started, with −1 for none."""

    tables: dict[str, tuple[UnitTable, ...]]
    cached: tuple[dict[int, int], ...]
    used: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]


class CachedUnits:
    """What the cache showed last of units, and what stands in them. A path has a `CachedPage` for each page, a request
    is a `RunningRequest`."""

    def __init__(self, groups: Sequence[UnitGroup], page_size: int) -> None:
        self.groups = groups
        self.page_size = page_size
        self.seen = SeenUnits({}, tuple({} for _ in groups), (0,) * len(groups), ((),) * len(groups))
        self.content: list[dict[int, int]] = [{} for _ in groups]  # unit -> cell

    def usable(self, path: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the longest part of a cached path behind which a request may start."""
        return next((path[:end] for end in range(len(path), 0, -1) if self._is_start(path[:end])), ())

    def _is_start(self, path: tuple[Any, ...]) -> bool:
        return all(
            cached.page in units
            for group, units in zip(self.groups, self.seen.cached, strict=True)
            for cached in path[self.first_read(group, len(path) * self.page_size) :]
        )

    def first_read(self, group: UnitGroup, length: int) -> int:
        """Return the first page of which a step at `length` tokens, whole pages, reads a unit."""
        return group.first_page(length, self.page_size) if group.window else length // self.page_size - 1

    def follow(self, seen: SeenUnits, cells: Mapping[int, int], entered: Any, name: str, text: frozenset[int]) -> None:
        """Take over what the cache shows now. `cells`: page -> cell of what is cached; `entered`: the request `name`
        if it has just started, else None; `text`: the cells of what it has handed over otherwise."""
        before, self.seen = self.seen, seen
        for i, group in enumerate(self.groups):
            content, cached = self.content[i], seen.cached[i]
            if entered is not None:
                self._write(i, entered, seen.tables[name][i], before.cached[i])
            elif not group.window and name in before.tables:
                # The device puts a state into a unit of a request when the cache takes it.
                _, (_, *own) = before.tables[name][i]
                for page, unit in cached.items():
                    if unit in own and before.cached[i].get(page) != unit and cells.get(page) in text:
                        content[unit] = cells[page]

    def _write(self, i: int, request: Any, table: UnitTable, cached: Mapping[int, int]) -> None:
        """Write what a request computes that has just started."""
        first, units = table
        content, size, begin = self.content[i], self.page_size, len(request.path)
        if self.groups[i].window:
            cells = request.text.cells[size - 1 :: size]
            for page, unit in enumerate(units, first):
                if page >= begin:
                    content[unit] = cells[page] if page < len(cells) else 0
            return
        # Its own states are new, but for the one that has left the cache for it.
        source = cached.get(request.path[-1].page) if request.path else None
        content.update((unit, 0) for unit in units[1:] if unit != source)

    def written_by(self, i: int, request: Any, table: UnitTable) -> set[int]:
        """Return the units that a request may write: behind what it has handed over or found."""
        first, units = table
        return set(units[max(len(request.path) - first, 0) :] if self.groups[i].window else units[1:])
