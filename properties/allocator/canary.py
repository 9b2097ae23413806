"""Shadow memory: every slot of a pool remembers who wrote it, at which position, which token, after which tokens.

    cell    (owner, position, token, hash of all tokens up to and including it)

Reading finds a component that hands a slot to two owners, moves the wrong slot, or lets an old one be read: the cell is
not the one that its owner wrote. Owners are numbers that are never used twice; their tokens are a function of (owner,
position), so that no cell of one owner equals a cell of another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .groups import UnitGroup, UnitTable

_MASK = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15
_VOCAB_SIZE = 50_021


class ShadowCell(NamedTuple):
    """What stands in one slot."""

    owner: int
    position: int
    token: int
    prefix_hash: int


_CONTENTS: dict[int, list[ShadowCell]] = {}


def contents(owner: int, start: int, stop: int) -> list[ShadowCell]:
    """Return the cells of positions `start … stop − 1` of an owner.
    Made once: the same owner always writes the same."""
    cells = _CONTENTS.setdefault(owner, [])
    while len(cells) < stop:
        position = len(cells)
        token = (owner * 7919 + position * 104_729) % _VOCAB_SIZE
        before = cells[-1].prefix_hash if cells else owner * _MULTIPLIER & _MASK
        cells.append(ShadowCell(owner, position, token, ((before ^ token) * _MULTIPLIER) & _MASK))
    return cells[start:stop]


class ShadowMemory:
    """The slots of one pool. A write out of bounds is not stopped here; the invariants find it."""

    def __init__(self) -> None:
        self._cells: dict[int, ShadowCell] = {}

    def write(self, slots: Iterable[int], cells: Iterable[ShadowCell]) -> None:
        self._cells.update(zip(slots, cells, strict=True))

    def read(self, slots: Iterable[int]) -> list[ShadowCell | None]:
        return list(map(self._cells.get, slots))

    def first_wrong(
        self, slots: Sequence[int], expected: Sequence[ShadowCell]
    ) -> tuple[int, ShadowCell | None, ShadowCell] | None:
        """Return the first slot that does not hold what is expected: (slot, found, expected); None if all do."""
        found = self.read(slots)
        if found == expected:
            return None
        return next(
            (slot, was, should) for slot, was, should in zip(slots, found, expected, strict=True) if was != should
        )


class UnitMemory:
    """The units of each group of layers: a window's have a cell for each token of their page, a state's the number of
    tokens that it has seen. A row is a `Holder`."""

    def __init__(self, groups: Sequence[UnitGroup], page_size: int) -> None:
        self.groups = groups
        self.page_size = page_size
        self._cells: list[dict[int, object]] = [{} for _ in groups]

    def write(self, row: Any, start: int, stop: int) -> None:
        """Write the tokens of a row from `start` to `stop`, and its states behind them."""
        for group, cells, table in zip(self.groups, self._cells, row.units, strict=True):
            cells.update(self._wanted(group, row.owner, table, start, stop))

    def first_wrong(self, row: Any) -> tuple[int, int, object, object] | None:
        """Return the first unit that does not hold what its row wrote, as far as a step reads it: (group, unit, found,
        expected); None if all do."""
        for i, (group, table) in enumerate(zip(self.groups, row.units, strict=True)):
            start = max(row.committed - group.window + 1, 0)
            for place, cell in self._wanted(group, row.owner, table, start, row.committed).items():
                if self._cells[i].get(place) != cell:
                    unit = place // self.page_size if group.window else place
                    return i, unit, self._cells[i].get(place), cell
        return None

    def _wanted(self, group: UnitGroup, owner: int, table: UnitTable, start: int, stop: int) -> dict[int, object]:
        first, units = table
        if not group.window:
            return {unit: (owner, number, stop) for number, unit in enumerate(units)}
        size, wanted = self.page_size, {}
        for position, cell in enumerate(contents(owner, start, stop), start):
            page = position // size - first
            if 0 <= page < len(units):  # ALLOC-18 finds a page without a unit
                wanted[units[page] * size + position % size] = cell
        return wanted
