"""What is done to an executor: an engine gets requests, and its steps are launched and collected."""

from __future__ import annotations

from dataclasses import dataclass

from ...properties.harness.operation import Operation


@dataclass(frozen=True, slots=True)
class Submit(Operation):
    """A request with a prompt of `prompt_len` tokens, of which the first `shared` begin everybody's; `show`: it asks for hidden states."""

    tag = "submit"
    request: str
    prompt_len: int
    max_tokens: int
    shared: int
    stops: bool
    show: bool


@dataclass(frozen=True, slots=True)
class Abort(Operation):
    tag = "abort"
    request: str


@dataclass(frozen=True, slots=True)
class Retract(Operation):
    """A running request gives everything back and begins again from what was delivered."""

    tag = "retract"
    request: str


@dataclass(frozen=True, slots=True)
class Launch(Operation):
    """The engine's next step, if it has one."""

    tag = "launch"


@dataclass(frozen=True, slots=True)
class Collect(Operation):
    """The result of the oldest step, committed."""

    tag = "collect"


@dataclass(frozen=True, slots=True)
class Stop(Operation):
    """All that is launched is to end at its next round boundary."""

    tag = "stop"


@dataclass(frozen=True, slots=True)
class Advance(Operation):
    """The oldest step runs `rounds` rounds, and is not answered yet."""

    tag = "advance"
    rounds: int


@dataclass(frozen=True, slots=True)
class Merge(Operation):
    """Hidden states of two batches are joined: of so many rows each, −1 for a batch that has None."""

    tag = "merge"
    first: int
    second: int


@dataclass(frozen=True, slots=True)
class Arrive(Operation):
    """A prefill worker hands over a request for each entry of `sent`: 1 with a hidden state, 0 with None."""

    tag = "arrive"
    sent: tuple[int, ...]


OPERATIONS: tuple[type[Operation], ...] = (Submit, Abort, Retract, Launch, Collect, Stop, Advance, Merge, Arrive)
