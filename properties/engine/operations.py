"""What is done to an engine."""

from __future__ import annotations

from dataclasses import dataclass

from ..harness.operation import Operation


@dataclass(frozen=True, slots=True)
class Submit(Operation):
    """A client asks. Equal `stem`s share all but the last token of the shorter prompt, equal `variant`s that too."""

    tag = "submit"
    request: str
    length: int
    max_tokens: int
    stem: int = 0
    variant: int = 0
    priority: int = 0
    seed: int = 0
    stops: bool = False
    marks: bool = False


@dataclass(frozen=True, slots=True)
class SubmitAgain(Operation):
    """Somebody asks under the name of a live request. Must be refused."""

    tag = "submit-again"
    request: str


@dataclass(frozen=True, slots=True)
class SubmitImpossible(Operation):
    """A request that can never run: 0 no prompt, 1 no output, 2 negative output, 3 longer than the context, 4 larger than the pool."""

    tag = "submit-impossible"
    kind: int


@dataclass(frozen=True, slots=True)
class Abort(Operation):
    """The client of a live request is gone, and says so twice."""

    tag = "abort"
    request: str


@dataclass(frozen=True, slots=True)
class AbortUnknown(Operation):
    """Somebody gives up a request that is not there."""

    tag = "abort-unknown"
    request: str


@dataclass(frozen=True, slots=True)
class Plan(Operation):
    """Ask for one step, and launch it."""

    tag = "plan"


@dataclass(frozen=True, slots=True)
class Commit(Operation):
    """The oldest step is done, after `rounds` rounds at most, one if it was interrupted before it ran."""

    tag = "commit"
    rounds: int = 1_000


@dataclass(frozen=True, slots=True)
class Run(Operation):
    """Some cycles of a driver: plan until there is no more, commit the oldest."""

    tag = "run"
    cycles: int


@dataclass(frozen=True, slots=True)
class CommitAgain(Operation):
    """The answer that was committed last comes a second time. Must be refused."""

    tag = "commit-again"


@dataclass(frozen=True, slots=True)
class CommitEarly(Operation):
    """The answer of the newer of two steps in flight comes first. Must be refused."""

    tag = "commit-early"


@dataclass(frozen=True, slots=True)
class SetSteps(Operation):
    """From the next plan on, draft the candidate of this number (modulo how many there are)."""

    tag = "set-steps"
    number: int


@dataclass(frozen=True, slots=True)
class Retract(Operation):
    """A running request is to give its memory back."""

    tag = "retract"
    request: str


@dataclass(frozen=True, slots=True)
class Deny(Operation):
    """The next attempts to allocate find nothing."""

    tag = "deny"
    count: int


@dataclass(frozen=True, slots=True)
class Fail(Operation):
    """The next answer about a running request says that its computation went wrong."""

    tag = "fail"
    request: str


@dataclass(frozen=True, slots=True)
class Lose(Operation):
    """The oldest step fails as a whole, and with it those launched behind it."""

    tag = "lose"


@dataclass(frozen=True, slots=True)
class Resume(Operation):
    """After a loss the device is quiet again."""

    tag = "resume"


OPERATIONS: tuple[type[Operation], ...] = (
    *(Submit, SubmitAgain, SubmitImpossible, Abort, AbortUnknown, Plan, Commit, Run, CommitAgain, CommitEarly),
    *(SetSteps, Retract, Deny, Fail, Lose, Resume),
)
