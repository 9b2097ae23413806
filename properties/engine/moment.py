"""One moment of an engine's trial: the operation, what the engine answered, and all that it shows before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


NO_ANSWERS: Mapping[str, tuple[list[int], str]] = {}


class Moment:
    """One operation and what came of it. What most operations have nothing to say of stands in the class, and is never written into."""

    drained = False
    refusal: str | None = None
    degenerate: tuple[str, ...] = ()  # which limits of what is legal this operation touches
    # submit
    wish: Wish | None = None
    promise: int | None = None
    impossible = ""
    must_accept = ""
    # abort
    abort_events = 0
    second_abort_events = 0
    # plan
    asked = False
    flight: Flight | None = None
    was_waiting: Sequence[Life] = ()
    overtaken: Sequence[Life] = ()  # by those who entered
    asked_back: frozenset[str] = frozenset()  # whom `retract` named
    was_lost = False  # a step has failed: fewer steps may be drafted, and who is suspected goes first
    is_disturbed = False  # allocations were denied, or somebody was asked back: no promise of progress
    cached_before: frozenset[int] | None = None  # what the last cells of the cached pages held
    # commit
    committed: Flight | None = None
    answer: Answer | None = None
    stray: tuple[str, ...] = ()  # events that nobody waits for
    expected = NO_ANSWERS  # what the answer means, and the reason
    counters: tuple[int, ...] | None = None
    gone: tuple[str, ...] = ()  # requests of the committed step that had left before
    lost_flights: Sequence[Flight] = ()  # what has just failed
    # pages
    lost: tuple[int, str, str] | None = None  # (page, whose it was, why it left)
    is_still = False  # nobody has other pages than before, and the same steps are in flight

    def __init__(
        self,
        config: ServingConfig,
        capabilities: EngineCapabilities,
        model: EngineModel,
        ahead: dict[int, int],
        cells: list[int],
        operation: object = "make",
        before: Observation = NOTHING_SHOWN,
    ) -> None:
        self.config = config
        self.capabilities = capabilities
        self.model = model
        self.ahead = ahead
        self.cells = cells  # the device's pool: which text stands in each slot
        self.operation = operation
        self.before = before
        self.after = NOTHING_SHOWN
        self.admitted: list[tuple[Life, int]] = []  # with the length taken from the cache
        self.retracted: list[Life] = []
        self.delivered: dict[str, list[int]] = {}  # by request, of this operation
        self.ends: list[End] = []
        self.ended_lives: dict[str, Life] = {}
        self.owners: dict[int, str] = {}  # page -> the request that has it, "" free, "*" cached
