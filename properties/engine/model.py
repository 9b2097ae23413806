"""The state of an engine's requests: those that wait, those that run, the tokens delivered to each, and the steps in
flight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .budget import are_valid
from .contract import ServingConfig, StepAnswer, Wish
from .groups import UnitTable
from .language import Stream, stream_of, text

Curve = tuple[float, tuple[float, ...]]
WAITING, RUNNING = "waiting", "running"
NO_SLOT = -1


@dataclass(slots=True, eq=False)
class EngineRow:
    """One stay of a request on the device: `length` positions have KV, `stream.tokens[length]` is the last token."""

    stream: Stream
    length: int
    over: bool = False  # the device has seen the end
    wrong: str = ""  # the first wrong read; from there on the row computes garbage
    stale: int | None = None  # a slot whose draft KV looked at another token, in its last read
    lacking: str = ""  # what a step has read of a group of layers that is not of its text
    has_state: bool = False  # its own state is written
    table: list[int] = field(default_factory=list)  # by position the slot that the device knows of

    def write_table(self, start: int, slots: Sequence[int]) -> None:
        """Note that the KV from position `start` on is in these slots."""
        self.table += [NO_SLOT] * (start - len(self.table))
        self.table[start : start + len(slots)] = slots


@dataclass(slots=True, eq=False)
class RequestLife:
    """One accepted request. A stay is the time between an admission and the next departure."""

    wish: Wish
    number: int
    promise: int
    truth: Stream  # its text, as the model alone says
    delivered: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    state: str = WAITING  # or RUNNING, or the reason of its end
    stay: int = 0  # counts admissions and departures, so that a step knows whose row it had
    # what prefill computes in this stay: the prompt, and what was delivered
    context: list[int] = field(default_factory=list)
    launched: int = 0  # positions of the context that launched chunks reach
    decoding: bool = False
    kv: int = -1  # committed KV length while it decodes, else -1
    row: EngineRow | None = None
    aborted: bool = False
    leaving: bool = False  # aborted, and its end event is due with a commit
    failing: bool = False
    poisoned: bool = False  # every step fails that has it
    has_committed: bool = False  # a step since it has entered
    retractions: int = 0
    overtaken: int = 0
    # of the last committed round of this stay; none before it, and if one of them is no probability
    confidences: tuple[float, ...] | None = None
    place: int = 0  # in the order of the queue: its number, or a later one if it was retracted to the tail

    @property
    def name(self) -> str:
        return self.wish.request

    @property
    def context_of_now(self) -> list[int]:
        """Its prompt and the delivered tokens."""
        return [*self.wish.prompt, *self.delivered]

    @property
    def is_live(self) -> bool:
        return self.state is WAITING or self.state is RUNNING

    @property
    def end_kv(self) -> int:
        """KV length at which the promised length is reached."""
        return len(self.wish.prompt) + self.promise - 1

    def depart(self, state: str) -> None:
        """Leave the batch, to wait again or for good."""
        self.state = state
        self.stay += 1
        self.launched = 0
        self.decoding = self.leaving = self.failing = False
        self.confidences = None
        self.kv = -1

    def cut(self, before: Sequence[int], run: Sequence[int]) -> tuple[list[int], str]:
        """Return what of a run is delivered after the output `before`, and the reason if that is the end."""
        left = self.promise - len(before)
        kept = list(run[:left])
        stop = self.first_stop(before, kept)
        if stop >= 0:
            return kept[: stop + 1], "stop"
        return kept, "length" if len(kept) == left else ""

    def first_stop(self, before: Sequence[int], run: Sequence[int]) -> int:
        """Return where in a run the output ends: at a stop token, or one that completes a stop string;
        -1 if it does not end."""
        wish = self.wish
        if not wish.stop_tokens and not wish.stop_strings:
            return -1
        output = list(before)
        for at, token in enumerate(run):
            output.append(token)
            if token in wish.stop_tokens:
                return at
            if wish.stop_strings:
                words = text(output)
                if any(stop in words for stop in wish.stop_strings):
                    return at
        return -1

    @property
    def has_stops(self) -> bool:
        """Whether its output may end before its promised length."""
        return bool(self.wish.stop_tokens or self.wish.stop_strings)


class ModelChunk(NamedTuple):
    """One chunk of a step."""

    life: RequestLife
    stay: int
    row: EngineRow
    start: int
    due: int  # where the last chunk ended
    tokens: tuple[int, ...]
    tail: int
    key: int
    is_last: bool
    loaded: int = 0  # positions before `start` whose KV the device copies from host memory

    @property
    def is_present(self) -> bool:
        """Whether the request has not left since the launch."""
        return self.stay == self.life.stay

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    @property
    def written(self) -> tuple[int, int]:
        """The positions that the device may write, from and to."""
        return self.start - self.loaded, self.stop


class RoundRow(NamedTuple):
    """One row of a step's rounds. It may begin at any length up to `latest`, and write any position below `reach`."""

    life: RequestLife
    stay: int
    row: EngineRow
    length: int
    is_known: bool  # no step in flight before it moves the row
    root: int | None
    key: int
    drafts: int
    latest: int
    reach: int

    is_present = ModelChunk.is_present

    @property
    def written(self) -> tuple[int, int]:
        """The positions that the device may write, from and to."""
        return self.row.length, self.reach


class ChosenDrafts(NamedTuple):
    """What the device chose in one round by a budget, row by row."""

    confidences: list[tuple[float, ...]]
    lengths: tuple[int, ...]  # the drafts that are verified, as the engine says


@dataclass(slots=True, eq=False)
class ModelFlight:
    """A step in flight, as it was launched. `slots`: what each of its requests had, by name."""

    number: int
    chunks: list[ModelChunk]
    rows: list[RoundRow]
    steps: int
    rounds: int
    slots: dict[str, tuple[int, ...]] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)  # how many each had before
    writes: dict[int, tuple[RequestLife, int]] = field(default_factory=dict)  # page -> whose stay may write it
    interrupted: bool = False
    units: dict[str, tuple[UnitTable, ...]] = field(default_factory=dict)  # and of other groups of layers
    budget: int | None = None  # of drafts, for all rows
    curve: Curve = (0.0, ())
    chosen: list[ChosenDrafts] = field(default_factory=list)  # by round; none without a budget

    def num_verified(self, config: ServingConfig) -> int:
        """Return the tokens that the target verifies in a round."""
        most = sum(config.nodes(row.drafts) for row in self.rows)
        return most if self.budget is None else min(most, len(self.rows) + self.budget)

    @property
    def parts(self) -> list[ModelChunk | RoundRow]:
        return [*self.chunks, *self.rows]

    def lives(self) -> list[RequestLife]:
        return [part.life for part in self.parts]

    def note_writes(self, page_size: int) -> None:
        """Note which pages this step may write."""
        self.writes = {}
        for part in self.parts:
            start, stop = part.written
            for slot in self.slots[part.life.name][start - start % page_size : stop : page_size]:
                self.writes[slot // page_size] = (part.life, part.stay)


@dataclass(slots=True, eq=False)
class GivenWay:
    """A retraction that no round needed. `room` are the slots that were free without it, `needed` those of a round."""

    victim: RequestLife
    gainers: list[RequestLife]  # of greater priority, which waited for it
    fence: list[int]  # the steps that were in flight
    needed: int
    room: int
    num_plans: int = 0  # since the fence, with room for a step


class EngineModel:
    """All requests and all steps in flight."""

    def __init__(self, config: ServingConfig) -> None:
        self.config = config
        self.lives: dict[str, RequestLife] = {}  # by name: those that live
        self.ended: dict[str, RequestLife] = {}  # by name: the last one that ended
        self.flights: list[ModelFlight] = []
        self.lost: list[ModelFlight] = []  # steps that failed, and may still be writing
        self.num_accepted = self.num_attempts = self.num_ended = self._places = 0
        self.launched = self.committed = 0  # numbers of steps
        self.steps = config.max_steps
        self.last_answer: StepAnswer | None = None
        self.lingering: dict[int, tuple[int, str, str]] = {}  # page -> (step that it waits for, whose it was, why)
        self.asked_back: set[str] = set()  # by `retract`, not yet done
        self.interrupted = 0  # as the engine said last
        self.order_is_unknown: bool = False  # how often requests were overtaken is not known either
        self.holding = False  # since a retraction, until a round is committed
        self.may_hold = False  # it may go on, until a round is committed
        self.given_up: float = -math.inf  # the greatest priority that was retracted since then
        self.given_way: list[GivenWay] = []  # for greater priorities, of which none has entered since
        self.retractions_since_progress = 0
        self.waited = self.plans_since_entry = 0  # plans for which newcomers have waited: at least, and at most
        self.outputs: dict[tuple[tuple[int, ...], int], list[tuple[int, ...]]] = {}  # (prompt, seed) -> outputs
        self.decisions: list[tuple[Any, ...]] = []
        self.verified = self.proposed = self.correct = self.invalid = 0

    def waiting(self) -> list[RequestLife]:
        return [life for life in self.lives.values() if life.state is WAITING]

    def running(self) -> list[RequestLife]:
        return [life for life in self.lives.values() if life.state is RUNNING]

    # -- requests -----------------------------------------------------------------------------------------------------

    def accept(self, wish: Wish, promise: int) -> None:
        """Take a request into the queue."""
        self.num_accepted += 1
        self.order_is_unknown &= bool(self.lives)
        truth = stream_of(wish.prompt, wish.seed, self.config.model)
        self.lives[wish.request] = RequestLife(wish, self.num_attempts, promise, truth, place=self._next_place())

    def _next_place(self) -> int:
        self._places += 1
        return self._places

    def admit(self, life: RequestLife, start: int, key: int) -> None:
        """Let a request enter with its first chunk."""
        life.state = RUNNING
        life.stay += 1
        life.context = [*life.wish.prompt, *life.delivered]
        life.launched = start
        life.has_committed = False
        life.row = EngineRow(stream_of(life.context, key, self.config.model), start)

    def retract(self, life: RequestLife, to_tail: bool, is_first: bool = True) -> None:
        """Let a running request wait again. Of several that go to the tail at once the order is not known: they share
        a place."""
        life.depart(WAITING)
        if to_tail:
            life.place = self._next_place() if is_first else self._places
            self.order_is_unknown |= not is_first
        life.retractions += 1
        self.given_up = max(self.given_up if self.holding else -math.inf, life.wish.priority)
        self.holding = True
        if life.name not in self.asked_back:
            self.retractions_since_progress += 1

    def follow_given_way(self, entered: Sequence[RequestLife], in_flight: Sequence[ModelFlight]) -> None:
        """Count a plan for those that wait for what was retracted for them, until a greater priority has entered."""
        numbers = [flight.number for flight in in_flight]
        for given in self.given_way:
            has_room = len(in_flight) < self.config.depth and not any(number in numbers for number in given.fence)
            given.num_plans += has_room
        self.given_way = [
            given
            for given in self.given_way
            if all(life.state is WAITING and not life.aborted for life in given.gainers)
            and not any(life.wish.priority > given.victim.wish.priority for life in entered)
        ]

    def end(self, life: RequestLife, reason: str) -> None:
        """Let a request leave for good."""
        life.depart(reason)
        self.lives.pop(life.name, None)
        self.ended[life.name] = life
        self.num_ended += 1
        outputs = self.outputs.setdefault((tuple(life.wish.prompt), life.wish.seed), [])
        outputs.append(tuple(life.delivered))

    # -- steps --------------------------------------------------------------------------------------------------------

    def launch(self, flight: ModelFlight, slots: dict[str, tuple[int, ...]] | None) -> None:
        """Take a step into flight; `slots` are those that the running requests have now."""
        self.launched = max(self.launched, flight.number)
        for chunk in flight.chunks:
            chunk.life.launched = chunk.stop
            chunk.life.decoding = chunk.is_last
        if slots is not None:
            flight.slots = {life.name: slots.get(life.name, ()) for life in flight.lives()}
            flight.note_writes(self.config.page_size)
        self.flights.append(flight)

    def expected(self, flight: ModelFlight, answer: StepAnswer) -> dict[str, tuple[list[int], str]]:
        """Return what each request that is still there gets by the contract, and the reason if it ends."""
        expected: dict[str, tuple[list[int], str]] = {}
        for chunk, token in zip(flight.chunks, answer.first, strict=True):
            if chunk.is_last and chunk.is_present:
                expected[chunk.life.name] = chunk.life.cut(chunk.life.delivered, [token])
        for number, row in enumerate(flight.rows):
            if not row.is_present:
                continue
            life = row.life
            got, reason = expected.get(life.name, ([], ""))
            # A request that left while a multi-step ran, or met an error in it, gets what came before its last round.
            cut_short = life.leaving or life.name in answer.failed
            for runs in answer.runs[:-1] if cut_short else answer.runs:
                if not reason:
                    kept, reason = life.cut(life.delivered + got, runs[number])
                    got = got + kept
            expected[life.name] = (got, reason)
        for name in [name for name in expected if self.lives[name].leaving]:
            expected[name] = (expected[name][0], "abort")
        for name in answer.failed:
            if not self.lives[name].leaving:
                expected[name] = (expected[name][0] if len(answer.runs) > 1 else [], "error")
        return expected

    def late(self, flight: ModelFlight, answer: StepAnswer) -> dict[str, tuple[list[int], str]]:
        """Return what requests may still get that were retracted since the launch, and the reason if they end."""
        runs: list[tuple[ModelChunk | RoundRow, list[int]]] = [
            (chunk, [token]) for chunk, token in zip(flight.chunks, answer.first, strict=True) if chunk.is_last
        ]
        runs += [(row, [t for run in answer.runs for t in run[number]]) for number, row in enumerate(flight.rows)]
        return {
            part.life.name: part.life.cut(part.life.delivered, run)
            for part, run in runs
            if part.life.state is WAITING and part.stay + 1 == part.life.stay
        }

    def commit(self, flight: ModelFlight, answer: StepAnswer, expected: dict[str, tuple[list[int], str]]) -> None:
        """Move committed lengths and counters on by the oldest step in flight."""
        self.flights.pop(0)
        self.committed = max(self.committed, flight.number)
        for number, chunk in enumerate(flight.chunks):
            life = chunk.life
            life.has_committed |= chunk.is_present
            if chunk.is_present and chunk.is_last:
                life.kv = chunk.stop
                if life.wish.marks and life.name not in answer.failed:
                    life.marks.append(answer.first_marks[number])
        for number, row in enumerate(flight.rows):
            if not row.is_present:
                continue
            life = row.life
            got, reason = expected[life.name]
            life.kv += len(got)
            counted = len(answer.runs) - (reason in ("abort", "error"))
            self.verified += counted
            self.proposed += counted * (self.config.nodes(row.drafts) - 1) if flight.budget is None else 0
            for chosen in flight.chosen[:counted]:
                self.proposed += chosen.lengths[number]
            if flight.chosen and reason not in ("abort", "error"):
                values = flight.chosen[-1].confidences[number]
                is_valid = are_valid(values)
                life.confidences = values if is_valid else None
                self.invalid += not is_valid
            self.correct += sum(len(runs[number]) - 1 for runs in answer.runs[:counted])
            if life.wish.marks:
                beside = [mark for marks in answer.marks for mark in marks[number]]
                life.marks += beside[: len(got)]

    def recount_flight(self) -> None:
        """Replace the bounds of the next step by the lengths at which it begins, known now, also for
        requests that have left."""
        if not self.flights:
            return
        flight = self.flights[0]
        for number, row in enumerate(flight.rows):
            start = last_start = row.row.length
            if flight.rounds > 1 and not row.row.over:
                last_start += (flight.rounds - 1) * (flight.steps + 1)
                last_start = max(start, min(last_start, row.life.end_kv - 1))
            reach = min(row.reach, self.config.reach(last_start, row.drafts))
            flight.rows[number] = row._replace(latest=start, reach=reach)
        if flight.slots:
            flight.note_writes(self.config.page_size)
