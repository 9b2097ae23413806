"""Groups of layers that keep less of a request than all its tokens, as contracts draw them: the last ones, or states.

A group keeps units: the KV of a page of tokens in its layers, or one state. Its units have a pool of their own, or they
take whole pages of the pool of slots, as many as they fill together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..harness.letters import Choices

UnitTable = tuple[int, tuple[int, ...]]
"""What a request holds of a group: the first page of tokens that has a unit (0 for states), and the units."""


class UnitGroup(NamedTuple):
    """`window`: the tokens that a position sees, itself included; 0: states, so many for each request. A unit fills
    `quarters` quarters of a page. `capacity`: units of a pool of its own; 0: they take pages of the pool of slots."""

    window: int
    states: int
    quarters: int
    capacity: int

    def pages_of(self, num_units: int) -> int:
        """Return the pages of the pool of slots that so many units take."""
        return 0 if self.capacity else -(-num_units * self.quarters // 4)

    def first_page(self, committed: int, page_size: int) -> int:
        """Return the first page of tokens that a step may read which begins at `committed` or behind it."""
        return max(committed - self.window + 1, 0) // page_size if self.window else 0


def unit_groups(numbers: Sequence[int]) -> tuple[UnitGroup, ...]:
    """Return the groups of a configuration, which has four numbers for each."""
    return tuple(UnitGroup(*numbers[i : i + 4]) for i in range(0, len(numbers), 4))


def draw_unit_groups(choose: Choices, page_size: int, row_pages: int) -> tuple[int, ...]:
    """Choose groups of requests with so many pages at most; some of their pools are small."""
    numbers: tuple[int, ...] = ()
    for kind in choose(((), ("window",), ("states",), ("window", "states"), ("window", "window"), ())):
        is_window = kind == "window"
        window = choose((9, 2, 3, page_size + 1, 2 * page_size + 1)) if is_window else 0
        states = 1 if is_window else choose((2, 1, 3))
        most = row_pages if is_window else states
        numbers += UnitGroup(window, states, choose((4, 1, 3, 6, 12)), choose((0, 0, 2 * most + 1, most)))
    return numbers
