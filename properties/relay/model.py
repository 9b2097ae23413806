"""What is true of a relay: a plain one, which says of every call why it is forbidden, and the moment that the checkers
look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .contract import RelayCapabilities, RelayConfig

FIRST_GENERATIONS = (1, 2**31 - 3, 2**40)


class Owner(NamedTuple):
    """A lane of a batch: a row, and the generation that it is asked for."""

    row: int
    generation: int


PADDING = Owner(0, 0)


@dataclass(slots=True)
class RelayMoment:
    """One operation, how its call had to end and how it ended.

    `forbidden` says for each invariant why the call must be refused. With "" it may be; with nothing it must not be.
    `wrong` has for each invariant what was read, and what was written.
    """

    operation: object = "make"
    forbidden: dict[str, str] = field(default_factory=dict)
    refusal: str | None = None
    wrong: dict[str, tuple[str, str]] = field(default_factory=dict)
    lengths: list[Any] | None = None  # that were read
    unread: tuple[int, int] | None = None  # num_unread(), and the recount


class PlainRelay:
    """The cells, the requests that have rows, and who wrote which value."""

    def __init__(self, config: RelayConfig, has: RelayCapabilities) -> None:
        self.fields, self.parts = config.fields, config.parts(has)
        self.rows = range(has.padding_row, has.padding_row + config.num_rows)
        self.owners: dict[int, Owner] = {}  # of the open requests
        self.cells: dict[int, tuple[int, dict[str, Any]]] = {}  # row -> (generation, fields as far as written)
        self.writers: dict[Any, int] = {}  # first entry of a value -> generation
        self.generation = FIRST_GENERATIONS[config.num_rows % len(FIRST_GENERATIONS)]  # the last one

    def forbids(self, call: str, lanes: Sequence[Owner]) -> dict[str, str]:
        """Return why a call must be refused, as in the moment: "read", "drop", "all", or the name of the part that is
        written."""
        found, rows = {}, [lane.row for lane in lanes]
        part = self.parts.get(call, self.fields) if call != "drop" else ()
        for lane in lanes:
            generation, values = self.cells.get(lane.row, (lane.generation, {}))
            if lane is PADDING:
                continue
            if lane.row not in self.rows:
                found["RELAY-03"] = f"there is no row {lane.row}"
            elif rows.count(lane.row) > 1:
                found["" if call == "drop" else "RELAY-02"] = f"row {lane.row} occurs twice in the call"
            elif call != "drop" and generation != lane.generation:
                found["RELAY-03"] = f"the cell of row {lane.row} is of generation {generation}"
            elif len(values) < len(self.fields) if call == "read" else values.keys() & part:
                found["RELAY-02"] = f"row {lane.row} has {', '.join(values) or 'nothing'} unread"
        return found
