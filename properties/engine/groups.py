"""Groups of layers beside those whose KV the slots hold: what is drawn of them, and what stands in their units.

A group with a window keeps units of a page of tokens each; a group without one keeps states. The suite's device looks
at what a step reads of them: the units of the window before a row, and the state that it goes on from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

UNITS = ("units_of", "cached_units", "free_units", "unit_pages")
"""What an engine shows of them."""

UnitTable = tuple[int, tuple[int, ...]]
"""Of a group with a window: the first page that has a unit, and the units; of one with states: the cached state from
which the row starts, −1 without one, and its own states, of which the first is the newest."""


class LayerGroup(NamedTuple):
    """`window`: the tokens that a position sees, itself included; 0: states, so many for each request. `capacity`:
    units, twice what the running requests need at most. `eighths`: of a page of the pool that a unit takes; 0: the
    units are those of a pool of their own."""

    window: int
    states: int
    capacity: int
    eighths: int

    def pages_of(self, num_units: int) -> int:
        """Return the pages of the pool that so many units take together."""
        return -(-num_units * self.eighths // 8)

    @property
    def most_pages(self) -> int:
        """The pages that are in the pool for the units."""
        return self.pages_of(self.capacity)

    def units_in(self, num_pages: int) -> int:
        """Return the number of units in a pool of so many pages, or in the pool of its own."""
        return num_pages * 8 // self.eighths if self.eighths else self.capacity


def draw_groups(
    choose: Callable[[Sequence[Any]], Any], num_rows: int, row_pages: int, page: int, may_share: bool
) -> tuple[int, ...]:
    """Choose groups for requests of so many rows and pages: four numbers for each. `may_share`: units may take pages of
    the pool."""
    groups: tuple[int, ...] = ()
    kinds = choose(("", "window", "states", "window, states", "window, states"))
    eighths = choose((0, 4, 8, 12)) if kinds and may_share else 0
    if "window" in kinds:
        window = choose((9, 2, 3, page + 1, 2 * page + 1))
        groups = LayerGroup(window, 1, 2 * num_rows * row_pages, eighths)
    if "states" in kinds:
        states = choose((2, 3))
        groups = (*groups, *LayerGroup(0, states, 2 * num_rows * states + 1, eighths))
    return groups


class UnitCells:
    """What stands in the units of each group, as hashes of texts."""

    def __init__(self, groups: Sequence[LayerGroup], page_size: int) -> None:
        self.groups = groups
        self.page_size = page_size
        self.empty()

    def empty(self) -> None:
        """Be those of a new device."""
        self._windows: list[dict[tuple[int, int], int]] = [{} for _ in self.groups]  # by unit and place in its page
        self._rows: list[dict[int, Any]] = [{} for _ in self.groups]  # the last one that had a unit
        self._states: list[dict[int, Sequence[int]]] = [{} for _ in self.groups]  # the text that the state has seen

    def note(self, group: int, rows: Sequence[tuple[Any, Sequence[int]]]) -> None:
        """Note the rows (`EngineRow`) whose units these are."""
        for row, units in rows:
            self._rows[group].update(dict.fromkeys(units, row))

    def keep(self, group: int, unit: int) -> None:
        """Put the state of the text of a unit's last row into it: the cache has taken it."""
        row = self._rows[group].get(unit)
        self._states[group][unit] = () if row is None else tuple(row.stream.hashes)

    def read(self, hashes: Sequence[int], tables: Sequence[UnitTable], length: int, has_state: bool) -> str:
        """Return what is wrong with what a row of this text reads at `length`; empty if nothing is."""
        if not length:
            return ""
        size = self.page_size
        for group, cells, states, (first, units) in zip(self.groups, self._windows, self._states, tables, strict=True):
            for position in range(max(length - group.window + 1, 0), length) if group.window else ():
                page = position // size - first
                unit = units[page] if 0 <= page < len(units) else None
                if unit is None or cells.get((unit, position % size)) != hashes[position]:
                    return f"at {length} tokens position {position} is read of unit {unit}, which does not hold it"
            if not group.window:
                unit = units[0] if has_state else first
                seen = states.get(unit, ())
                if len(seen) < length or seen[length - 1] != hashes[length - 1] or (has_state and len(seen) > length):
                    return f"at {length} tokens the state in unit {unit} is not that of the text"
        return ""

    def write(
        self, hashes: Sequence[int], tables: Sequence[UnitTable], start: int, stop: int, reach: int, is_good: bool
    ) -> None:
        """Write the text from `start` to `stop`, and garbage to the rest up to `reach`."""
        size = self.page_size
        for group, cells, states, (first, units) in zip(self.groups, self._windows, self._states, tables, strict=True):
            for position in range(start, reach) if group.window else ():
                page = position // size - first
                if 0 <= page < len(units):
                    good = is_good and position < stop
                    cells[units[page], position % size] = hashes[position] if good else 0
            if not group.window and units:
                states[units[0]] = tuple(hashes[:stop]) if is_good else ()
