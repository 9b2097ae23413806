"""What is true of a relay: who has which row, and what every cell holds. Dictionaries, no cleverness."""

from __future__ import annotations

from typing import NamedTuple

from .contract import HIDDEN, RelayConfig

FIRST_GENERATIONS = (1, 2**31 - 3, 2**40)


class Owner(NamedTuple):
    """A request's place."""

    row: int
    generation: int


class Cell:
    """What was written: by whom, and the stamps of the two halves (None: not written)."""

    __slots__ = ("fields", "generation", "length")

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.length: int | None = None
        self.fields: int | None = None


class RelayModel:
    """The world around a relay. Every write has a stamp of its own, and what is written is a function of it."""

    def __init__(self, config: RelayConfig, first_row: int) -> None:
        self.config = config
        self.first_row = first_row
        self.owners: dict[int, Owner] = {}
        self.cells: dict[int, Cell] = {}
        self.written: dict[int, int] = {}  # stamp -> generation
        self._generation = FIRST_GENERATIONS[config.num_rows % len(FIRST_GENERATIONS)]
        self._stamp = 0

    @property
    def rows(self) -> range:
        """Those that requests can have."""
        return range(self.first_row, self.first_row + self.config.num_rows)

    def new_owner(self, row: int) -> Owner:
        self._generation += 1
        return Owner(row, self._generation)

    def free_row(self) -> int | None:
        taken = {owner.row for owner in self.owners.values()}
        return next((row for row in self.rows if row not in taken), None)

    def new_stamp(self, generation: int) -> int:
        self._stamp += 1
        self.written[self._stamp] = generation
        return self._stamp

    def is_whole(self, cell: Cell | None) -> bool:
        return cell is not None and cell.length is not None and (cell.fields is not None or not self.config.fields)

    def unread(self) -> int:
        """Cells with something in them, recounted."""
        return sum(cell.length is not None or cell.fields is not None for cell in self.cells.values())

    def write(self, owner: Owner, half: str, stamp: int) -> None:
        cell = self.cells.get(owner.row)
        if cell is None or cell.generation != owner.generation:
            cell = self.cells[owner.row] = Cell(owner.generation)
        if half == "lengths":
            cell.length = stamp
        elif self.config.fields:
            cell.fields = stamp


def length_of(stamp: int) -> int:
    """The length that is written with a stamp; beyond 2¹⁵, as long contexts are."""
    return 40_000 + stamp


def values_of(stamp: int, number: int, name: str, width: int) -> int | list[int] | list[float]:
    """One row of field `number`; all entries of all writes differ, and a float32 holds them."""
    first = stamp * 64 + number * 8 + 1
    if not width:
        return first
    return [float(first + j) if name == HIDDEN else first + j for j in range(width)]


def stamp_of(found: object) -> int:
    """The stamp of an entry that was read, if any wrote it."""
    return int(found) // 64 if isinstance(found, int | float) and abs(found) < 2**53 else 0
