"""Shadow memory: every slot of a pool remembers who wrote it, at which position, which token, after which tokens.

    cell    (owner, position, token, hash of all tokens up to and including it)

Reading finds a component that hands a slot to two owners, moves the wrong slot, or lets an old one be read: the cell is
not the one that its owner wrote. Owners are numbers that are never used twice; their tokens are a function of (owner,
position), so that no cell of one owner equals a cell of another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

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
