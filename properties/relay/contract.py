"""The contract of a relay: it keeps values that a step leaves, on the device, for the next step that
has the same row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from ..harness.contract import Capabilities, needs
from ..harness.letters import Choices

LENGTHS, HIDDEN = "lengths", "hidden_states"
ALL = "all"  # fields of a cell


@dataclass(frozen=True, slots=True)
class RelayConfig:
    """What `make(config)` builds: one cell per row of the request table.

    A cell has the fields `lengths`, a single integer, and field0, field1, …: `widths[i]` integers per row, 0 for a
    single one. An algorithm that needs hidden states has a field `hidden_states` of `hidden_width` floats per row.
    """

    num_rows: int
    widths: tuple[int, ...] = ()
    hidden_width: int = 0

    def __post_init__(self) -> None:
        assert self.num_rows >= 1 and self.hidden_width >= 0 and all(width >= 0 for width in self.widths)

    @classmethod
    def draw(cls, choose: Choices, has: RelayCapabilities) -> RelayConfig:
        """Choose a few rows, with or without hidden states."""
        return cls(
            num_rows=choose((1, 2, 3, 4)),
            widths=choose(((), (0,), (0, 3), (2, 0, 1))),
            hidden_width=choose((0, 0, 1, 4)),
        )

    @property
    def fields(self) -> dict[str, int]:
        """Return name -> width of every declared field, `lengths` first."""
        found = {LENGTHS: 0} | {f"field{number}": width for number, width in enumerate(self.widths)}
        return {**found, HIDDEN: self.hidden_width} if self.hidden_width else found

    def parts(self, has: RelayCapabilities) -> dict[str, tuple[str, ...]]:
        """Return the fields of each call that a cell is written with."""
        first, *others = self.fields
        return (
            {LENGTHS: (first,), **({"others": tuple(others)} if others else {})}
            if has.halves
            else {ALL: (first, *others)}
        )


@dataclass(frozen=True, slots=True)
class RelayCapabilities(Capabilities):
    """What a relay declares. Each flag adds to what is called, what is done and what is checked."""

    # Row 0 is padding: any number of lanes of a batch may be row 0; what they write is lost, what they read is zeros.
    # Rows are 1 … num_rows then, else 0 … num_rows − 1.
    padding_row: bool = False
    generations: bool = False  # a cell remembers which generation wrote it, and only that one can read it
    halves: bool = False  # a cell is written in two calls: `lengths` alone, and the other fields; in any order
    inspection: bool = False  # `num_unread()`
    # It refuses what no step does: to read what is not written, to write twice, rows that are not there, fields that
    # are missing
    misuse: bool = False

    VISIBLE: ClassVar = ("padding_row",)


class Relay(Protocol):
    """A relay. A call names the rows of a batch and the generations of the requests that hold them; these grow, and may
    pass 2³¹.

    A cell is empty, or holds values. Only a cell with all fields can be read; reading empties it. To refuse is to
    return False or to raise one of `REFUSALS` or an InvariantViolation; then no row of the batch has changed. A batch
    without rows does nothing.
    """

    def write(self, rows: Sequence[int], generations: Sequence[int], values: Mapping[str, Any]) -> object:
        """Write every declared field of these cells, which have none: a list with one integer, or one list of `width`,
        per row. With `halves`, `lengths` alone, or all the others.

        Beside fields other than `lengths` stands `hidden_states`, None if it is not declared. Refuse a declared field
        that is missing or None, and a field that is not declared.
        """

    def read(self, rows: Sequence[int], generations: Sequence[int]) -> Mapping[str, Any]:
        """Read and empty these cells, which these generations wrote: every declared field as `write` was given it. What
        is not declared is absent or None."""

    def drop(self, rows: Sequence[int]) -> object:
        """Empty these cells, read or unread: their rows are released."""

    @needs("inspection")
    def num_unread(self) -> int:
        """Count the cells with something in them."""
