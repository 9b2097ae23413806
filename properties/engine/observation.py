"""What an engine's trial sees around one operation: the answers, and all that the engine shows before and after; and how it is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ..harness.trial import Trial, shown
from .contract import REASONS, Answer, Wish
from .model import WAITING, Chunk, EngineModel, Flight, Life, RoundRow
from .rules import extent


class Observation(NamedTuple):
    """All that an engine shows; None where it declares no such capability."""

    waiting: tuple[str, ...]
    running: tuple[str, ...]
    slots: dict[str, tuple[int, ...]] | None  # by running request
    free: tuple[int, ...] | None
    cached: tuple[int, ...] | None


class End(NamedTuple):
    """An end event."""

    request: str
    reason: str
    tokens: tuple[int, ...]
    marks: tuple[int, ...] | None


class Moment:
    """One operation and its effects. The class holds what few operations set, and these values are never written into."""

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
    interrupted: int | None = None  # the newest step that must end at its next round; None where there are no blocks
    # abort
    abort_events = 0
    second_abort_events = 0
    # plan
    asked = False
    flight: Flight | None = None
    was_waiting: Sequence[Life] = ()
    overtaken: Sequence[Life] = ()  # by requests that entered
    asked_back: frozenset[str] = frozenset()  # requests that `retract` named
    before_plan: Sequence[Flight] = ()  # the steps that were in flight
    lingering_before: Collection[int] = ()  # pages that wait for a step to be committed
    was_lost = False  # a step has failed: fewer steps may be drafted, and suspects of the failure go first
    is_disturbed = False  # allocations were denied, a step was lost or a request was asked back: no promise of progress
    cached_before: frozenset[int] | None = None  # what the last cells of the cached pages held
    # commit
    committed: Flight | None = None
    answer: Answer | None = None
    stray: tuple[str, ...] = ()  # events of requests that do not live
    expected: Mapping[str, tuple[list[int], str]] = {}  # what the answer means, and the reason if the request ends
    counters: tuple[int, ...] | None = None
    gone: tuple[str, ...] = ()  # requests of the committed step that had left before
    lost_flights: Sequence[Flight] = ()  # what has just failed
    # pages
    leaked: tuple[int, str, str] | None = None  # (page, whose it was, why it left) of one that should be free
    reuse_is_ordered = False  # a page that a step in flight may write can go to a step that is launched later
    is_still = False  # all pages have the owners that they had, and the same steps are in flight

    def __init__(self, model: EngineModel, cells: list[int], operation: object, before: Observation) -> None:
        self.config = model.config
        self.model = model
        self.cells = cells  # the device's pool: which text stands in each slot
        self.operation = operation
        self.before = self.after = before
        self.admitted: list[tuple[Life, int]] = []  # with the length taken from the cache
        self.retracted: list[Life] = []
        self.delivered: dict[str, list[int]] = {}  # by request, of this operation
        self.ends: list[End] = []
        self.ended_lives: dict[str, Life] = {}
        self.owners: dict[int, str] = {}  # page -> the request that has it, "" free, "*" cached

    @property
    def leak_from(self) -> str | None:
        """Why the request left whose page should be free and is not; None if there is no such page."""
        return None if self.leaked is None else self.leaked[2]

    def retract(self, life: Life) -> None:
        """Note that a request that ran waits again."""
        self.retracted.append(life)
        self._note_pages(life, "retracted")
        self.model.retract(life)

    def end(self, life: Life, end: End) -> None:
        self.ends.append(end)
        self.ended_lives[end.request] = life
        self._note_pages(life, end.reason)
        self.model.end(life, end.reason)

    def _note_pages(self, life: Life, why: str) -> None:
        """Remember whose pages those are that must come back."""
        size = self.config.page_size
        for page in {slot // size for slot in (self.before.slots or {}).get(life.name, ())}:
            self.model.lingering.setdefault(page, (0, life.name, why))

    def count_overtaken(self) -> None:
        """Count, for the first of each class, the later requests that have entered before it."""
        self.overtaken = []
        waiting = sorted((*self.was_waiting, *self.retracted), key=lambda life: life.number)
        for entered, _ in self.admitted:
            waiting = [life for life in waiting if life is not entered]
            for front in {life.wish.priority: life for life in reversed(waiting)}.values():
                if front.number < entered.number:
                    front.overtaken += 1
                    self.overtaken.append(front)

    def decision(self) -> tuple:
        """Return what a plan decided, without the tokens, and how many slots each request then held."""
        held = () if self.after.slots is None else [(name, len(slots)) for name, slots in self.after.slots.items()]
        flight = self.flight
        if flight is None:
            return ("plan", None, self.after.waiting, held)
        chunks = [(c.life.name, c.start, len(c.tokens)) for c in flight.chunks]
        rows = [(r.life.name, r.length) for r in flight.rows]
        return ("plan", chunks, rows, flight.steps if rows else 0, flight.rounds, self.after.waiting, held)


_STRINGS = frozenset({str})
_KEYS = ("step", "enters", "prefill", "decode", "steps", "rounds")


def names(trial: Trial, answer: object, what: str) -> tuple[str, ...]:
    """Return a sequence of requests' names as a tuple."""
    if isinstance(answer, list | tuple) and _STRINGS.issuperset(map(type, answer)):
        return tuple(answer)
    raise trial.misbehaviour("TYPE", f"{what} is {shown(answer)}", "a list of names")


def read_step(trial: Trial, view: object) -> Flight:
    """Return the step as the model sees it, and admit the requests that enter with it. Raises a Violation (TYPE)."""
    if not isinstance(view, Mapping) or any(key not in view for key in _KEYS):
        raise trial.misbehaviour("TYPE", f"plan() is {shown(view)}", f"None, or a mapping with {', '.join(_KEYS)}")
    number, steps, rounds = (trial.integer(view[key], key) for key in ("step", "steps", "rounds"))
    m: Moment = trial.moment
    enters = names(trial, view["enters"], "enters")
    chunks = [_chunk(trial, m, item, enters) for item in trial.sequence(view["prefill"], "prefill")]
    decode = trial.sequence(view["decode"], "decode")
    if decode and steps not in m.config.ahead:
        raise trial.misbehaviour("TYPE", f"steps is {steps}", f"one of {sorted(m.config.ahead)}")
    if decode and rounds < 1:
        raise trial.misbehaviour("TYPE", f"rounds is {rounds}", "at least 1")
    rows = [_row(trial, m, item, steps, rounds) for item in decode]
    if not chunks and not rows:
        raise trial.misbehaviour("TYPE", "a step without chunks and rows", "None, if there is nothing to do")
    return Flight(number, chunks, rows, steps, rounds)


def _chunk(trial: Trial, m: Moment, item: object, enters: tuple[str, ...]) -> Chunk:
    name, start, tokens, tail, key = _fields(trial, item, "a chunk", "(request, start, tokens, tail, key)")
    life = _life(trial, m, name)
    start, tail, key = trial.integer(start, "start"), trial.integer(tail, "tail"), trial.integer(key, "key")
    tokens = trial.integers(tokens, "the tokens of a chunk")
    if life.state is WAITING or name in enters:
        if life.state is not WAITING:
            m.retract(life)  # it has never been seen waiting
        m.admitted.append((life, start))
        m.model.admit(life, start, key)
    is_last = start + len(tokens) >= len(life.context)
    return Chunk(life, life.stay, life.row, start, life.launched, tokens, tail, key, is_last)


def _row(trial: Trial, m: Moment, item: object, steps: int, rounds: int) -> RoundRow:
    name, length, root, key = _fields(trial, item, "a row", "(request, length, root, key)")
    life = _life(trial, m, name)
    length, key = trial.integer(length, "length"), trial.integer(key, "key")
    root = None if root is None else trial.integer(root, "root")
    if life.row is None:
        raise trial.misbehaviour("TYPE", f"request {name} decodes", "a prefill first")
    is_known, latest, reach = extent(m.config, m.model.flights, life, steps, rounds)
    return RoundRow(life, life.stay, life.row, length, is_known, root, key, latest, reach)


def _fields(trial: Trial, item: object, what: str, should: str) -> Sequence[Any]:
    if isinstance(item, list | tuple) and len(item) == should.count(",") + 1:
        return item
    raise trial.misbehaviour("TYPE", f"{what} is {shown(item)}", should)


def _life(trial: Trial, m: Moment, name: object) -> Life:
    life = m.model.lives.get(name) if type(name) is str else None
    if life is None:
        has_ended = type(name) is str and name in m.model.ended
        was = f"the step has {name!r}, which {'has ended' if has_ended else 'was never submitted'}"
        raise trial.misbehaviour("TYPE", was, "requests that live")
    return life


def read_events(trial: Trial, events: object) -> int:
    """Note events in the moment and the model. Returns how many there were."""
    items = trial.sequence(events, "the events")
    m: Moment = trial.moment
    for item in items:
        kind = item[0] if isinstance(item, tuple | list) and item else None
        if kind == "tokens" and len(item) == 3:
            tokens = trial.integers(item[2], "delivered tokens")
            life = m.model.lives.get(item[1])
            if life is None:
                m.stray += (f"{len(tokens)} tokens for {item[1]!r}",)
                continue
            life.delivered += tokens
            m.delivered.setdefault(life.name, []).extend(tokens)
        elif kind == "end" and len(item) == 5 and item[2] in REASONS:
            marks = None if item[4] is None else trial.integers(item[4], "the marks")
            end = End(item[1], item[2], trial.integers(item[3], "the output"), marks)
            life = m.model.lives.get(end.request)
            if life is None:
                m.stray += (f"an end ({end.reason}) of {end.request!r}",)
                continue
            m.end(life, end)
        else:
            should = '("tokens", request, tokens) or ("end", request, reason, tokens, marks)'
            raise trial.misbehaviour("TYPE", f"an event is {shown(item)}", should)
    return len(items)
