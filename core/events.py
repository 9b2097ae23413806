"""What a run says of itself: one schema, whichever executor ran.

The engine hands every event to a sink as it happens. The sequence of `Submitted`, `Aborted`, `Planned` and `Committed` is the decision
log: fed to a fresh engine of the same configuration, every `Planned` comes out again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .request import FinishedRequest, Request
from .step import Step, StepResult


@dataclass(frozen=True, slots=True)
class EngineStarted:
    """First event of an engine: its resolved configuration, enough to build an equal one."""

    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request at the door. `refusal` is empty if it was queued, else the reason why not."""

    now_ns: int
    request: Request
    refusal: str


@dataclass(frozen=True, slots=True)
class Aborted:
    """A client gave up on a request."""

    now_ns: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Planned:
    """A decision. `step` is None if requests were retracted and nothing could be launched yet."""

    now_ns: int
    step: Step | None
    retracted: tuple[str, ...]
    num_waiting: int  # requests in the queue afterwards
    num_held_slots: int  # KV slots held by requests and the prefix cache afterwards


@dataclass(frozen=True, slots=True)
class Committed:
    """A result, and what the engine made of it."""

    now_ns: int
    step: Step
    result: StepResult
    first_tokens: tuple[str, ...]  # requests whose first token since admission this step delivered
    kept: (
        np.ndarray | None
    )  # int64 [rounds, bs]: tokens delivered per round and row of the decode part; 0 for departed rows
    finished: tuple[FinishedRequest, ...]  # by stop, length or error; an abort is its own event


Event = EngineStarted | Submitted | Aborted | Planned | Committed
EventSink = Callable[[Event], None]
