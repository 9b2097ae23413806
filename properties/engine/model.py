"""What is true of the requests of an engine: who asked for what, who runs, what was delivered, which steps are in flight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .contract import ServingConfig, Wish
from .language import Stream, stream_of

WAITING, RUNNING = "waiting", "running"


class Row:
    """One stay of a request on the device: `length` positions have KV, `stream.tokens[length]` is the last token."""

    __slots__ = ("good", "length", "over", "stream", "wrong")

    def __init__(self, stream: Stream, length: int) -> None:
        self.stream = stream
        self.length = length
        self.good = True  # whether all that was read was right
        self.over = False  # the device has seen the end
        self.wrong = ""  # what was read instead


class Life:
    """One accepted request.

    context   what its prefill computes in this stay: the prompt, and what was delivered before
    launched  positions of it that launched chunks reach; computed: that committed chunks reach
    kv        committed KV length of a decoding request, −1 before
    """

    __slots__ = (
        *(
            "aborted",
            "admissions",
            "computed",
            "context",
            "decoding",
            "delivered",
            "failing",
            "kv",
            "launched",
            "leaving",
        ),
        *("marks", "name", "number", "overtaken", "promise", "retractions", "row", "state", "stay", "truth", "wish"),
    )

    def __init__(self, wish: Wish, number: int, promise: int, model: int) -> None:
        self.wish = wish
        self.name = wish.request
        self.number = number
        self.promise = promise
        self.truth = stream_of(wish.prompt, wish.seed, model)
        self.delivered: list[int] = []
        self.marks: list[int] = []
        self.state = WAITING  # or RUNNING, or the reason of its end
        self.stay = 0  # counts admissions and departures, so that a step knows whose row it had
        self.context: list[int] = []
        self.launched = self.computed = 0
        self.decoding = False
        self.kv = -1
        self.row: Row | None = None
        self.aborted = self.leaving = self.failing = False
        self.retractions = self.overtaken = self.admissions = 0

    @property
    def is_live(self) -> bool:
        return self.state is WAITING or self.state is RUNNING

    @property
    def end_kv(self) -> int:
        """KV length at which the promise is kept."""
        return len(self.wish.prompt) + self.promise - 1

    def depart(self, state: str) -> None:
        """Leave the batch, to wait again or for good."""
        self.state = state
        self.stay += 1
        self.launched = self.computed = 0
        self.decoding = self.leaving = self.failing = False
        self.kv = -1


class Chunk(NamedTuple):
    """One chunk of a step."""

    life: Life
    stay: int
    row: Row
    start: int
    due: int  # where the last chunk ended
    tokens: tuple[int, ...]
    tail: int
    key: int
    is_last: bool


class RoundRow(NamedTuple):
    """One row of a step's rounds. It may begin at any length up to `latest`, and write any position below `reach`."""

    life: Life
    stay: int
    row: Row
    length: int
    is_known: bool  # no step in flight before it moves the row
    root: int | None
    key: int
    latest: int
    reach: int


class Flight:
    """A step in flight, as it was launched. `slots`: what each of its requests had, by name."""

    __slots__ = ("chunks", "interrupted", "number", "rounds", "rows", "slots", "steps", "writes")

    def __init__(self, number: int, chunks: list[Chunk], rows: list[RoundRow], steps: int, rounds: int) -> None:
        self.number = number
        self.chunks = chunks
        self.rows = rows
        self.steps = steps
        self.rounds = rounds
        self.slots: dict[str, tuple[int, ...]] = {}
        self.writes: dict[int, tuple[Life, int]] = {}  # page -> whose stay writes it
        self.interrupted = False

    def lives(self) -> list[Life]:
        return [chunk.life for chunk in self.chunks] + [row.life for row in self.rows]


class EngineModel:
    """All requests and all steps in flight."""

    def __init__(self, config: ServingConfig) -> None:
        self.config = config
        self.lives: dict[str, Life] = {}  # by name: those that live
        self.ended: dict[str, Life] = {}  # by name: the last one that ended
        self.flights: list[Flight] = []
        self.num_accepted = self.num_refused = self.num_attempts = 0
        self.num_ended = 0
        self.lost: list[Flight] = []  # steps that failed, and may still be writing
        self.launched = self.committed = 0  # numbers of steps
        self.steps = config.max_steps
        self.last_answer = None
        self.lingering: dict[int, tuple[int, str, str]] = {}  # page -> (step that it waits for, whose it was, why)
        self.holding = False  # since a retraction, until a round is committed
        self.retractions_since_progress = 0
        self.outputs: dict[tuple[tuple[int, ...], int], list[tuple[int, ...]]] = {}  # (prompt, seed) -> outputs
        self.decisions: list[tuple] = []
        self.verified = self.proposed = self.correct = 0

    def waiting(self) -> list[Life]:
        return [life for life in self.lives.values() if life.state is WAITING]

    def running(self) -> list[Life]:
        return [life for life in self.lives.values() if life.state is RUNNING]

    def admit(self, life: Life, start: int, key: int) -> None:
        """A request enters with its first chunk."""
        life.state = RUNNING
        life.stay += 1
        life.admissions += 1
        life.context = [*life.wish.prompt, *life.delivered]
        life.launched = life.computed = start
        life.row = Row(stream_of(life.context, key, self.config.model), start)

    def end(self, life: Life, reason: str) -> None:
        life.depart(reason)
        self.lives.pop(life.name, None)
        self.ended[life.name] = life
        self.num_ended += 1
        outputs = self.outputs.setdefault((tuple(life.wish.prompt), life.wish.seed), [])
        outputs.append(tuple(life.delivered))

    def unseen(self, life: Life) -> list[Flight]:
        """The steps in flight that move this stay of the request, oldest first."""
        return [
            flight
            for flight in self.flights
            if any(part.life is life and part.stay == life.stay for part in (*flight.chunks, *flight.rows))
        ]

    def cut(self, life: Life, so_far: int, run: Sequence[int]) -> tuple[list[int], str]:
        """What of a run is delivered after `so_far` tokens, and the reason if that is the end."""
        left = life.promise - so_far
        kept = list(run[:left])
        stops = life.wish.stop_tokens
        if stops:
            for at, token in enumerate(kept):
                if token in stops:
                    return kept[: at + 1], "stop"
        return kept, "length" if len(kept) == left else ""
