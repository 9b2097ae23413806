"""The observations of an engine's trial around one operation: the answers, and everything that the engine shows before
and after."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from .contract import ServingConfig, StepAnswer, Wish
from .groups import UnitTable
from .model import EngineModel, GivenWay, ModelFlight, RequestLife
from .recovery import DeviceLimits, Loss


class EngineObservation(NamedTuple):
    """All that an engine shows; None where it declares no such capability."""

    waiting: tuple[str, ...]
    running: tuple[str, ...]
    slots: dict[str, tuple[int, ...]] | None  # by running request
    free: tuple[int, ...] | None
    cached: tuple[int, ...] | None
    units: dict[str, tuple[UnitTable, ...]] | None = None  # by running request; with `config.groups` alone
    cached_units: tuple[tuple[int, ...], ...] = ()
    free_units: tuple[int, ...] = ()
    unit_pages: tuple[tuple[int, ...], ...] = ()

    def room(self, config: ServingConfig) -> int:
        """Return the free slots, without those that units of groups of layers may yet take."""
        assert self.free is not None, "asked of engines that show their pages"
        yet = max(sum(each.most_pages for each in config.layer_groups) - sum(map(len, self.unit_pages)), 0)
        return (len(self.free) - yet) * config.page_size

    def own_room(self, config: ServingConfig) -> float:
        """Return for how many tokens each group with a window and a pool of its own has free units."""
        groups = zip(config.layer_groups, self.free_units, strict=False)
        own = [free for group, free in groups if group.window and not group.eighths]
        return min(own, default=math.inf) * config.page_size


Known = tuple[tuple[float, ...] | None, tuple[float, ...] | None]
"""By which confidences an engine takes a request, and by which it should; None if there are none."""


class EndEvent(NamedTuple):
    """An end event."""

    request: str
    reason: str
    tokens: tuple[int, ...]
    marks: tuple[int, ...] | None


class EngineMoment:
    """One operation and its effects. The class holds what few operations set, and these values are
    never written into."""

    drained = False
    observed = False  # `after` is what the engine shows now
    refusal: str | None = None
    degenerate: tuple[str, ...] = ()  # which limits of what is legal this operation touches
    # submit
    wish: Wish | None = None
    promise: int | None = None
    impossible = ""
    must_accept = ""
    promises: tuple[int, int] = (0, 0)  # the fewest and the most tokens that may be promised
    has_reasons = False  # refusals must name a limit
    limits: Collection[int] = ()  # the numbers of which a refusal must name one
    interrupted: int | None = (
        None  # the newest step that must end at its next round; None where there are no multi-steps
    )
    cuts = False  # this operation has newly interrupted a step, and no step was ever lost
    # abort
    abort_events = 0
    second_abort_events = 0
    # plan
    asked = False
    flight: ModelFlight | None = None
    was_waiting: Sequence[RequestLife] = ()
    overtaken: Sequence[RequestLife] = ()  # by requests that entered
    given_way: GivenWay | None = None  # to what, if not to a round
    asked_back: frozenset[str] = frozenset()  # requests that `retract` named
    before_plan: Sequence[ModelFlight] = ()  # the steps that were in flight
    lingering_before: Collection[int] = ()  # pages that wait for a step to be committed
    was_lost = False  # a step has failed: fewer steps may be drafted, and suspects of the failure go first
    recovery: DeviceLimits | None = None  # what that has led to, where there are rules for it
    was_holding = False  # nothing may enter until a round is committed
    first: Sequence[RequestLife] = ()  # before a plan: the suspects that go first
    should_wait = should_enter = ""  # with `config.waits`: why newcomers wait at this plan, and why they do no longer
    is_disturbed = False  # allocations were denied, a step was lost or a request was asked back: no promise of progress
    known: Mapping[str, Known] = {}  # by running request, before a plan that chooses a budget
    loads: Mapping[str, int] = {}  # by request that enters: positions that come from host memory
    cached_before: frozenset[int] | None = None  # what the last cells of the cached pages held
    # commit
    committed: ModelFlight | None = None
    answer: StepAnswer | None = None
    stray: tuple[str, ...] = ()  # events of requests that do not live
    expected: Mapping[str, tuple[list[int], str]] = {}  # what the answer means, and the reason if the request ends
    counters: tuple[int, ...] | None = None
    invalid: int | None = None
    lessons: tuple[tuple[int, ...], ...] | None = None
    gone: tuple[str, ...] = ()  # requests of the committed step that had left before
    lost_flights: Sequence[ModelFlight] = ()  # what has just failed
    loss: Loss | None = None  # what must follow from that
    # pages
    leaked: tuple[int, str, str] | None = None  # (page, whose it was, why it left) of one that should be free
    keeps_reserves = False  # the engine declares `reserves`
    has_table = False  # and `table`
    own_victims = to_tail = estimates = strict_priorities = caches_at_allocation = own_ties = False  # likewise
    reuse_is_ordered = False  # a page that a step in flight may write can go to a step that is launched later
    is_still = False  # all pages have the owners that they had, and the same steps are in flight

    def __init__(self, model: EngineModel, cells: list[int], operation: object, before: EngineObservation) -> None:
        self.config = model.config
        self.model = model
        self.cells = cells  # the device's pool: which text stands in each slot
        self.operation = operation
        self.before = self.after = before
        self.admitted: list[tuple[RequestLife, int]] = []  # with the length taken from the cache
        self.retracted: list[RequestLife] = []
        self.delivered: dict[str, list[int]] = {}  # by request, of this operation
        self.ends: list[EndEvent] = []
        self.ended_lives: dict[str, RequestLife] = {}
        self.owners: dict[int, str] = {}  # page -> the request that has it, "" free, "*" cached

    @property
    def max_running(self) -> int:
        return self.config.max_running if self.recovery is None else self.recovery.max_running

    @property
    def ageing(self) -> float:
        """How often a request may be overtaken by later ones of greater priority."""
        return math.inf if self.strict_priorities else self.config.ageing

    @property
    def leak_from(self) -> str | None:
        """Why the request left whose page should be free and is not; None if there is no such page."""
        return None if self.leaked is None else self.leaked[2]

    def retract(self, life: RequestLife) -> None:
        """Note that a request that ran waits again."""
        self.retracted.append(life)
        self._note_pages(life, "retracted")
        # What a failed step or device takes along keeps its place.
        to_tail = self.to_tail and self.operation.tag not in ("lose", "resume", "restart")
        self.model.retract(life, to_tail, len(self.retracted) == 1)

    def end(self, life: RequestLife, end: EndEvent) -> None:
        self.ends.append(end)
        self.ended_lives[end.request] = life
        self._note_pages(life, end.reason)
        self.model.end(life, end.reason)

    def _note_pages(self, life: RequestLife, why: str) -> None:
        """Remember whose pages those are that must come back."""
        size = self.config.page_size
        for page in {slot // size for slot in (self.before.slots or {}).get(life.name, ())}:
            self.model.lingering.setdefault(page, (0, life.name, why))

    def note_hold(self, running: Sequence[RequestLife]) -> None:
        """Note whether this plan had to wait for a round to be committed.
        `running` are the requests that ran before it. Who gave way to a request that enters now may be kept out until
        its first round."""
        new = {chunk.life for chunk in self.flight.chunks} if self.flight is not None else ()
        if not any(f.rows for f in self.before_plan) and not any(x.decoding and x not in new for x in running):
            gave_way = any(life.wish.priority > self.model.given_up for life, _ in self.admitted)
            self.model.may_hold = self.model.holding and gave_way
            self.model.holding = False  # no round is to come
        self.was_holding = self.model.holding

    def count_overtaken(self) -> None:
        """Count, for the first of each class, the later requests that have entered before it."""
        self.overtaken = []
        waiting = sorted((*self.was_waiting, *self.retracted), key=lambda life: life.place)
        for entered, _ in self.admitted:
            waiting = [life for life in waiting if life is not entered]
            for front in {life.wish.priority: life for life in reversed(waiting)}.values():
                if front.place < entered.place:
                    front.overtaken += 1
                    self.overtaken.append(front)

    def decision(self) -> tuple[Any, ...]:
        """Return the decisions of a plan, without the tokens, and the number of slots that each request held then."""
        held = () if self.after.slots is None else [(name, len(slots)) for name, slots in self.after.slots.items()]
        flight = self.flight
        if flight is None:
            return ("plan", None, self.after.waiting, held)
        chunks = [(c.life.name, c.start, len(c.tokens)) for c in flight.chunks]
        rows = [(r.life.name, r.length) for r in flight.rows]
        planned = flight.steps if rows else 0, flight.rounds, flight.budget
        return ("plan", chunks, rows, *planned, self.after.waiting, held)
