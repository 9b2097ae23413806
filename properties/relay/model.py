"""The expected state of a relay: the owner of each row, the content of each cell, and the moment that the checkers look
at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .contract import HIDDEN, RelayCapabilities, RelayConfig

FIRST_GENERATIONS = (1, 2**31 - 3, 2**40)
FIRST_VALUE = 1 << 16  # lengths pass 2¹⁵, as long contexts do


class Owner(NamedTuple):
    """A lane of a batch: a row, and the generation that it is asked for."""

    row: int
    generation: int


PADDING = Owner(0, 0)


class RelayCell(NamedTuple):
    """An unread cell: the generation that wrote it, and the stamp of each half that is written,
    "lengths" or "fields"."""

    generation: int
    stamps: dict[str, int]


class WrongValue(NamedTuple):
    """A value that is not what was last written to its row.
    `writer` is the generation that wrote it, None if none did."""

    where: str
    found: object
    expected: object
    generation: int
    writer: int | None


@dataclass(slots=True)
class RelayMoment:
    """One operation, how it had to end and how it ended.

    `trace` says why the cells, or the fields given, forbid it; `foreign` says why the generations or the rows do. With
    one of them it must be refused. With neither it must not, unless `optional`.
    """

    config: RelayConfig
    capabilities: RelayCapabilities
    operation: object = "make"
    call: str = ""  # the method that it ended with
    trace: str = ""
    foreign: str = ""
    optional: bool = False
    refusal: str | None = None
    answer: tuple[int, ...] | None = None  # the lengths read
    wrong: WrongValue | None = None
    padding: str = ""  # what a padding lane read, if not zeros
    undeclared: str = ""  # a field that came back and is not declared
    num_unread: int | None = None
    should_be_unread: int = 0


class RelayModel:
    """The requests and the cells. Every write has a stamp of its own, and what is written is a function of it."""

    def __init__(self, config: RelayConfig, first_row: int) -> None:
        self.fields = config.fields
        self.halves = ("lengths", "fields") if config.fields else ("lengths",)
        self.rows = range(first_row, first_row + config.num_rows)
        self.owners: dict[int, Owner] = {}  # of the open requests
        self.cells: dict[int, RelayCell] = {}  # row -> its cell; empty cells are not there
        self.written: dict[int, int] = {}  # stamp -> generation
        self._generation = FIRST_GENERATIONS[config.num_rows % len(FIRST_GENERATIONS)]

    def new_owner(self, row: int) -> Owner:
        self._generation += 1
        return Owner(row, self._generation)

    def free_row(self) -> int | None:
        taken = {owner.row for owner in self.owners.values()}
        return next((row for row in self.rows if row not in taken), None)

    def may_write(self, owner: Owner, half: str) -> bool:
        cell = self.cells.get(owner.row)
        return cell is None or (cell.generation == owner.generation and half not in cell.stamps)

    def may_read(self, owner: Owner) -> bool:
        cell = self.cells.get(owner.row)
        return cell is not None and cell.generation == owner.generation and len(cell.stamps) == len(self.halves)

    def new_stamp(self, generation: int) -> int:
        stamp = len(self.written) + 1
        self.written[stamp] = generation
        return stamp

    def write(self, owner: Owner, half: str, stamp: int) -> None:
        if half not in self.halves:
            return
        cell = self.cells.get(owner.row)
        if cell is None or cell.generation != owner.generation:
            cell = self.cells[owner.row] = RelayCell(owner.generation, {})
        cell.stamps[half] = stamp

    def content(self, cell: RelayCell) -> dict[str, object]:
        """Return what reading a whole cell must bring."""
        length = length_of(cell.stamps["lengths"])
        return {"length": length, **(self.values(cell.stamps["fields"]) if self.fields else {})}

    def values(self, stamp: int) -> dict[str, int | list[int] | list[float]]:
        """Return one row of every declared field; all entries of all writes differ, and a float32 holds them."""
        found = {}
        for number, (name, width) in enumerate(self.fields.items()):
            first = length_of(stamp) + number * 8 + 1
            kind = float if name == HIDDEN else int
            found[name] = [kind(first + j) for j in range(width)] if width else first
        return found


def length_of(stamp: int) -> int:
    return FIRST_VALUE + stamp * 64


def stamp_of(found: object) -> int:
    """Return the stamp of an entry that was read, 0 or less if none wrote it."""
    return (int(found) - FIRST_VALUE) // 64 if isinstance(found, int | float) and abs(found) < 2**53 else 0
