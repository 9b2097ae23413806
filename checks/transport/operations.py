"""What is done to a transport. `side` is where a message arrives; `nth` counts what is under way to it, modulo how many there are."""

from __future__ import annotations

from dataclasses import dataclass

from ...properties.harness.operation import Operation


@dataclass(frozen=True, slots=True)
class Start(Operation):
    """A request comes to the prefill worker. Prompts of one family have equal beginnings."""

    tag = "start"
    request: int
    family: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Compute(Operation):
    """The prefill worker computes a chunk."""

    tag = "compute"


@dataclass(frozen=True, slots=True)
class Decode(Operation):
    """The decode worker runs a round."""

    tag = "decode"


@dataclass(frozen=True, slots=True)
class Deliver(Operation):
    """One message arrives; not always the oldest."""

    tag = "deliver"
    side: str
    nth: int


@dataclass(frozen=True, slots=True)
class DeliverAll(Operation):
    """All that is under way arrives, in order."""

    tag = "deliver-all"
    side: str


@dataclass(frozen=True, slots=True)
class Drop(Operation):
    """A message is lost."""

    tag = "drop"
    side: str
    nth: int


@dataclass(frozen=True, slots=True)
class Duplicate(Operation):
    """A message will arrive twice."""

    tag = "duplicate"
    side: str
    nth: int


@dataclass(frozen=True, slots=True)
class Again(Operation):
    """A message that has arrived arrives once more, however late; `nth` counts back from the newest."""

    tag = "again"
    side: str
    nth: int


@dataclass(frozen=True, slots=True)
class Damage(Operation):
    """A page under way is changed, cut short, or misnumbered."""

    tag = "damage"
    nth: int
    how: int


@dataclass(frozen=True, slots=True)
class Cancel(Operation):
    """The client of one side gives up."""

    tag = "cancel"
    side: str
    request: int


@dataclass(frozen=True, slots=True)
class Advance(Operation):
    """Time passes, and both sides notice."""

    tag = "advance"
    ns: int


@dataclass(frozen=True, slots=True)
class Kill(Operation):
    """A worker is gone; the other one is told, or has to find out."""

    tag = "kill"
    side: str
    told: bool


@dataclass(frozen=True, slots=True)
class Restart(Operation):
    """A worker begins anew, and what was sent to and by the old one is still under way."""

    tag = "restart"
    side: str


@dataclass(frozen=True, slots=True)
class Quiet(Operation):
    """All that is under way is lost, and so is all that follows, until every patience has run out."""

    tag = "quiet"


@dataclass(frozen=True, slots=True)
class ChangeRole(Operation):
    """A worker is to do something else for a moment."""

    tag = "change-role"
    side: str


OPERATIONS: tuple[type[Operation], ...] = (
    *(Start, Compute, Decode, Deliver, DeliverAll, Drop, Duplicate, Again, Damage, Cancel, Advance),
    *(Kill, Restart, Quiet, ChangeRole),
)
