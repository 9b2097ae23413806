"""One moment of an engine's trial: the operation, what the engine answered, and all that it shows before and after."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .contract import Answer, EngineCapabilities, ServingConfig, Wish
from .model import EngineModel, Flight, Life


class Observation(NamedTuple):
    """All that an engine shows; None where it declares no such capability."""

    waiting: tuple[str, ...]
    running: tuple[str, ...]
    slots: dict[str, tuple[int, ...]] | None  # by running request
    free: tuple[int, ...] | None
    cached: tuple[int, ...] | None


NOTHING_SHOWN = Observation((), (), None, None, None)


class End(NamedTuple):
    """An end event."""

    request: str
    reason: str
    tokens: tuple[int, ...]
    marks: tuple[int, ...] | None


@dataclass(slots=True)
class Moment:
    """One operation and what came of it. Lists and dictionaries are made anew for every operation."""

    config: ServingConfig
    capabilities: EngineCapabilities
    model: EngineModel
    ahead: dict[int, int]
    operation: object = "make"
    drained: bool = False
    before: Observation = NOTHING_SHOWN
    after: Observation = NOTHING_SHOWN
    refusal: str | None = None
    degenerate: tuple[str, ...] = ()  # which limits of what is legal this operation touches
    # submit
    wish: Wish | None = None
    promise: int | None = None
    impossible: str = ""
    must_accept: str = ""
    # abort
    abort_events: int = 0
    second_abort_events: int = 0
    # plan
    asked: bool = False
    flight: Flight | None = None
    admitted: list[tuple[Life, int]] = field(default_factory=list)  # with the length taken from the cache
    retracted: list[Life] = field(default_factory=list)
    was_waiting: list[Life] = field(default_factory=list)
    asked_back: frozenset[str] = frozenset()  # whom `retract` named
    was_lost: bool = False  # a step has failed: fewer steps may be drafted, and who is suspected goes first
    is_disturbed: bool = False  # allocations were denied, or somebody was asked back: no promise of progress
    overtaken: list[Life] = field(default_factory=list)  # by those who entered
    cached_before: frozenset[int] | None = None  # what the last cells of the cached pages held
    # commit
    committed: Flight | None = None
    answer: Answer | None = None
    delivered: dict[str, list[int]] = field(default_factory=dict)  # by request, of this operation
    ends: list[End] = field(default_factory=list)
    ended_lives: dict[str, Life] = field(default_factory=dict)
    stray: tuple[str, ...] = ()  # events that nobody waits for
    expected: dict[str, tuple[list[int], str]] = field(default_factory=dict)  # what the answer means, and the reason
    counters: tuple[int, ...] | None = None
    gone: tuple[str, ...] = ()  # requests of the committed step that had left before
    lost_flights: list[Flight] = field(default_factory=list)  # what has just failed
    # pages
    cells: list[int] = field(default_factory=list)  # the device's pool: which text stands in each slot
    owners: dict[int, str] = field(default_factory=dict)  # page -> the request that has it, "" free, "*" cached
    lost: tuple[int, str, str] | None = None  # (page, whose it was, why it left)
