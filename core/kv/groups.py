"""Groups of layers that keep less of a request than all its tokens: the last ones, or a state.

The slots of the pool hold the KV of layers with full attention. Each other group keeps *units*: a unit is the KV of one
page of tokens in the group's layers, or one recurrent state.

    tokens   0 ────────────────── begin ───────────────── committed ────── allocated
    full     [ a page of the pool for each page of tokens                          ]
    window                        [ a unit for each page that a later step may read ]
    state                                                 (`states` units, whatever the length)

A unit takes `pages` pages of the pool of full layers, so one number of free slots bounds all that requests keep. A
group with a `capacity` has a pool of so many units of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import Problem
from .request_table import ceil_to_page

_PARTS = 1 << 20
"""Pages are counted in so many parts, as integers: sums of them are exact."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that keep the same part of a request.

    `window`: the tokens that a position sees, itself included; 0: the layers keep states. `pages`: of the pool of full
    layers that a unit takes. `states`: units of a request, those for drafts included. `capacity`: units of a pool of
    its own, which then take nothing of the other.
    """

    window: int = 0
    pages: float = 1.0
    states: int = 1
    capacity: int | None = None

    @property
    def has_states(self) -> bool:
        return not self.window

    def pages_of(self, num_units: int) -> int:
        """Return the pages of the pool of full layers that so many units take together."""
        return 0 if self.capacity is not None else -(-num_units * round(self.pages * _PARTS) // _PARTS)

    def units_of(self, length: int, ahead: int, page_size: int) -> int:
        """Return the most units of a request with `length` slots (page aligned), at most `ahead` of them behind its
        committed tokens."""
        if self.has_states:
            return self.states
        return min(length // page_size, ceil_to_page(self.window - 1 + ahead, page_size) // page_size)

    def units_before(self, length: int, page_size: int) -> int:
        """Return the units of a group with a window that a step reads which begins at `length` (page aligned)."""
        return 0 if self.has_states else min(length, ceil_to_page(self.window - 1, page_size)) // page_size

    def problems(self, name: str) -> list[Problem]:
        """Return the problems of each value; `name` stands before it."""
        least = {"window": 0, "states": 1, "capacity": 1}
        given = {key: value for key in least if (value := getattr(self, key)) is not None}
        found = [
            Problem(f"{name}.{key}", f"must be at least {least[key]}, got {value}")
            for key, value in given.items()
            if value < least[key]
        ]
        if self.window == 1:
            found.append(Problem(f"{name}.window", "must be 0 (states) or at least 2, got 1"))
        if not round(self.pages * _PARTS) > 0:
            found.append(Problem(f"{name}.pages", f"must be greater than 0, got {self.pages}"))
        return found


class GroupSizes:
    """What requests take for groups of layers, in slots of the pool of full layers."""

    def __init__(self, groups: Sequence[KVGroup], page_size: int) -> None:
        self.groups = tuple(groups)
        self.page_size = page_size
        self.per_slot = sum(each.pages for each in groups if each.capacity is None and not each.has_states)
        """Slots of the pool that a token in a window takes beside its own."""

    def __bool__(self) -> bool:
        return bool(self.groups)

    def of(self, length: int, ahead: int = 0, num_cached: int = 0) -> int:
        """Return the slots, page aligned, beside those of `length` tokens. `ahead`: those of them that may lie behind
        the committed ones; `num_cached`: those whose units the prefix cache has."""
        if not self.groups:
            return 0
        length, size = ceil_to_page(length, self.page_size), self.page_size
        return size * sum(
            each.pages_of(each.units_of(length, ahead, size) - each.units_before(num_cached, size))
            for each in self.groups
        )

    def total(self, slots: int, ahead: int = 0) -> int:
        """Return `slots` slots of tokens and those beside them."""
        return slots + self.of(slots, ahead) if self.groups else slots

    def longest_in(self, num_slots: int, ahead: int) -> int:
        """Return the tokens of the longest request, page aligned, that the pools hold; `num_slots`: of full layers."""
        size = self.page_size

        def fits(pages: int) -> bool:
            own = all(
                each.units_of(pages * size, ahead, size) <= each.capacity
                for each in self.groups
                if each.capacity is not None
            )
            return own and self.total(pages * size, ahead) <= num_slots

        low, high = 0, num_slots // size
        if fits(high):
            return high * size
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low * size

    def most_of(self, num_slots: int, length: float, ahead: int = 0) -> float:
        """Return how many requests of `length` tokens the pools hold; `num_slots`: of full layers."""
        whole = math.ceil(length)
        most = num_slots / (length + self.of(whole, ahead))
        pages = ceil_to_page(whole, self.page_size)
        own = [
            each.capacity / max(each.units_of(pages, ahead, self.page_size), 1)
            for each in self.groups
            if each.capacity is not None
        ]
        return min([most, *own])


NO_GROUPS = GroupSizes((), 1)


@dataclass(frozen=True, slots=True)
class StoreSizes:
    """The sizes of a KV store: the rows of its table, the pages of its pool, the other groups of layers."""

    num_rows: int
    row_width: int  # in slots: whole pages
    num_pages: int
    page_size: int
    groups: GroupSizes = NO_GROUPS

    def __post_init__(self) -> None:
        assert self.row_width % self.page_size == 0, (
            f"a row of {self.row_width} slots is no multiple of {self.page_size}"
        )
