"""One moment of an allocator's trial: the operation, what the allocator answered, and all that can be observed before and after."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .contract import AllocatorCapabilities, AllocatorConfig
from .model import AllocatorModel


class Observation(NamedTuple):
    """All that an allocator shows; None where it declares no such capability. Equal if and only if nothing has changed."""

    num_free: int
    free_pages: tuple[int, ...] | None
    cached_pages: tuple[int, ...] | None
    num_deferred: int | None
    references: tuple[int, ...] | None
    rows: tuple[tuple[str, tuple[int, ...]], ...] | None


@dataclass(slots=True)
class Moment:
    """One operation and what came of it. `held` and `waiting` are recounts: page -> number of references."""

    config: AllocatorConfig
    capabilities: AllocatorCapabilities
    model: AllocatorModel
    all_pages: frozenset[int] = frozenset()
    operation: object = "make"
    drained: bool = False
    asked: int | None = None  # slots that an allocation asked for
    answer: tuple[int, ...] | None = None  # slots that it got
    refusal: str | None = None
    allowed: bool | None = None  # what can_allocate said just before
    must_succeed: bool = False
    must_refuse: bool = False
    twice: int | None = None  # the page that a free named twice
    row_granted: bool | None = None  # whether a request got a row
    row_was_free: bool = False  # and whether there was one
    stale: tuple | None = None  # (whose, slot, found, expected) of a slot that does not hold what its owner wrote
    not_cacheable: tuple[int, ...] = ()
    before: Observation = field(default_factory=lambda: Observation(0, None, None, None, None, None))
    after: Observation = field(default_factory=lambda: Observation(0, None, None, None, None, None))
    held_before: dict[int, int] = field(default_factory=dict)
    waiting_before: dict[int, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)

    @property
    def first_page(self) -> int:
        return 1 if self.capabilities.padding_page else 0

    def pages_of_answer(self) -> list[int]:
        return [slot // self.config.page_size for slot in self.answer]
