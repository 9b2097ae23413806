"""The contract of a relay: values that one step leaves for the next one that contains the row, past the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from ..harness.contract import Capabilities

HIDDEN = "hidden_states"


@dataclass(frozen=True, slots=True)
class RelayConfig:
    """What `make(config)` builds: one cell per row of the request table.

    A cell has a length and one field per entry of `widths`, named field0, field1, …: integers, `widths[i]` of them per row, 0 for a
    single one. With `hidden_width` > 0 the algorithm needs hidden states, so many floats per row in the field "hidden_states"; with 0
    (as in STANDALONE drafting) there is no such field, and nothing else than None may ever stand in its place.
    """

    num_rows: int
    widths: tuple[int, ...] = ()
    hidden_width: int = 0

    def __post_init__(self) -> None:
        assert self.num_rows >= 1 and self.hidden_width >= 0 and all(width >= 0 for width in self.widths)

    @property
    def fields(self) -> dict[str, int]:
        """Name -> width of every declared field, hidden states included."""
        found = {f"field{number}": width for number, width in enumerate(self.widths)}
        return {**found, HIDDEN: self.hidden_width} if self.hidden_width else found


@dataclass(frozen=True, slots=True)
class RelayCapabilities(Capabilities):
    """What a relay declares. Each flag adds to what is called, what is done and what is checked."""

    padding_row: bool = False
    """Row 0 belongs to nobody: any number of lanes of a batch may be row 0; what they write is lost, what they read is zeros. Rows are
    1 … num_rows then, else 0 … num_rows − 1."""
    generations: bool = False
    """A cell remembers which generation wrote it, and is read by that one alone."""
    inspection: bool = False
    """`num_unread()`"""

    FOUNDATIONS: ClassVar = {}


class Relay(Protocol):
    """A relay. `rows` and `generations` say for each row of the batch whose it is; generations grow, and may pass 2³¹.

    A cell is empty, or holds a length, or field values, or both. Only what is whole can be read; reading empties it. To refuse is to
    return False or to raise one of `REFUSALS` (an InvariantViolation, too); then nothing has changed, for no row of the batch. A batch
    without rows is legal and does nothing.
    """

    def publish(self, rows: Sequence[int], generations: Sequence[int], lengths: Sequence[int]) -> object:
        """Write a length into each of these cells, which have none."""

    def stash(self, rows: Sequence[int], generations: Sequence[int], values: Mapping[str, Any]) -> object:
        """Write every declared field of these cells, which have none: a list with one integer, or one list of `width`, per row.

        `hidden_states` is always among the names, and None if they are not declared. A declared field that is left out or None, and one
        that is given and not declared, is refused. Without declared fields nothing is written.
        """

    def resolve(self, rows: Sequence[int], generations: Sequence[int]) -> tuple[Sequence[int], Mapping[str, Any]]:
        """Read these cells, whole and written by these generations, and empty them: the lengths, and every declared field as it was
        given to `stash`. What is not declared is absent or None."""

    def drop(self, rows: Sequence[int]) -> object:
        """Empty these cells, read or unread: their rows are released."""

    # inspection
    def num_unread(self) -> int:
        """Cells with something in them."""


MakeRelay = Callable[[RelayConfig], Relay]

METHODS: dict[str, tuple[str, ...]] = {
    "": ("publish", "stash", "resolve", "drop"),
    "inspection": ("num_unread",),
}
"""Capability -> the methods of a relay that it promises; "" is what every relay has."""
