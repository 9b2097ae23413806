"""The events of a run: one schema, whichever executor ran.

The engine hands every event to a sink as it happens. The sequence of `Submitted`, `Aborted`, `Planned` and `Committed`
is the decision log: fed to a fresh engine of the same configuration, every `Planned` comes out again. Faults are part
of it: `StepsLost`, `Resumed`, `RetractionAsked`, `AllocationsDenied` and `Reloaded` are inputs like the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, final

from .arrays import Int64Array
from .request import FinishedRequest, Request
from .step import Step, StepFailure, StepResult


@final
@dataclass(frozen=True, slots=True)
class EngineStarted:
    """First event of an engine: its resolved configuration, enough to build an equal one."""

    config: dict[str, Any]


@dataclass(slots=True)
class Submitted:
    """A request was submitted. `refusal` is empty if it was queued, else the reason why not."""

    now_ns: int
    request: Request
    refusal: str


@dataclass(frozen=True, slots=True)
class Aborted:
    """A client gave a request up."""

    now_ns: int
    request_id: str


@dataclass(slots=True)
class Planned:
    """A decision. `step` is None if requests were retracted and nothing could be launched yet."""

    now_ns: int
    step: Step | None
    retracted: tuple[str, ...]
    num_waiting: int  # requests in the queue afterwards
    num_held_slots: int  # KV slots held by requests and the prefix cache afterwards


@dataclass(frozen=True, slots=True)
class Deliveries:
    """When clients get the tokens of a step, where a simulated front end sends them in chunks or in turn.

    int64 nanoseconds; -1 where a token waits for a later chunk.
    """

    first_ns: Int64Array  # [len(first_tokens)]
    at_ns: Int64Array  # [rounds, bs]; -1 also for departed rows


@dataclass(slots=True)
class Committed:
    """A result, and what the engine made of it."""

    now_ns: int
    step: Step
    result: StepResult
    first_tokens: tuple[str, ...]  # requests whose first token since admission this step delivered
    kept: Int64Array | None  # int64 [rounds, bs]: tokens delivered per round and row; 0 for departed rows
    finished: tuple[FinishedRequest, ...]  # by stop, length or error; an abort is its own event
    deliveries: Deliveries | None = None  # None: clients get each token when its round ends


@dataclass(frozen=True, slots=True)
class StepsLost:
    """The oldest uncommitted step has failed: it and those launched behind it will never be committed."""

    now_ns: int
    failure: StepFailure
    step_ids: tuple[int, ...]  # the failed one first
    retracted: tuple[str, ...]
    finished: tuple[FinishedRequest, ...]  # the victim, if there is one; an abort is its own event


@dataclass(frozen=True, slots=True)
class Resumed:
    """The device is quiet: no lost step touches anything any more. `restarted`: all KV is gone."""

    now_ns: int
    restarted: bool
    retracted: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RetractionAsked:
    """A running request is asked to give its memory back; the next plan that can retracts it."""

    now_ns: int
    request_id: str


@dataclass(frozen=True, slots=True)
class AllocationsDenied:
    """Memory is taken away for a moment: the next `count` attempts to allocate find nothing."""

    now_ns: int
    count: int


@dataclass(frozen=True, slots=True)
class Reloaded:
    """The adaptive controller has another table from the next round on."""

    now_ns: int
    table: str  # JSON text


class HandoffMove(Enum):
    """The moves of an engine for a transfer between workers; see `core/scheduler/transfers.py`."""

    HOLD = "hold"
    RELEASE = "release"
    END = "end"
    MOVE = "move"
    RESERVE = "reserve"
    JOIN = "join"
    ROLE = "role"


@dataclass(frozen=True, slots=True)
class HandoffMoved:
    """One move of a handoff, an input like `Submitted`."""

    now_ns: int
    move: HandoffMove
    request_id: str = ""
    row: int = 0  # of HOLD, RELEASE, RESERVE, JOIN; 0 if a request failed instead of joining
    request: Request | None = None  # of RESERVE
    first_token: int | None = None  # of JOIN, where the executor has tokens
    detail: str = ""  # why a request failed, or the new role
    finished: tuple[FinishedRequest, ...] = ()


Event = (
    EngineStarted
    | Submitted
    | Aborted
    | Planned
    | Committed
    | StepsLost
    | Resumed
    | RetractionAsked
    | AllocationsDenied
    | Reloaded
    | HandoffMoved
)
EventSink = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Take an event and keep nothing: the sink of an engine that is not observed."""
