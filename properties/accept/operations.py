"""What is done to acceptance: rounds are launched, finished, given up; their shape changes in between."""

from __future__ import annotations

from dataclasses import dataclass

from ..harness.operation import Operation


@dataclass(frozen=True, slots=True)
class Configure(Operation):
    """Rounds have another shape from now on: (steps, topk, nodes)."""

    tag = "configure"
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Replace(Operation):
    """The request in a row leaves; another one comes with a prompt of so many tokens."""

    tag = "replace"
    row: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Launch(Operation):
    """A round of these rows, as far as they are not in flight, and of so many rows of padding. The drafts are a function of `drafts`."""

    tag = "launch"
    round: str
    rows: tuple[int, ...]
    drafts: int
    padding: int


@dataclass(frozen=True, slots=True)
class LaunchGarbage(Operation):
    """The same with a draft that answers nonsense."""

    tag = "launch-garbage"
    round: str
    rows: tuple[int, ...]
    drafts: int
    garbage: str


@dataclass(frozen=True, slots=True)
class Propose(Operation):
    """A round of trees that somebody drew."""

    tag = "propose"
    round: str
    rows: tuple[int, ...]
    drafts: int


@dataclass(frozen=True, slots=True)
class Constrain(Operation):
    """A launched round gets a grammar."""

    tag = "constrain"
    round: str
    grammar: int


@dataclass(frozen=True, slots=True)
class Abandon(Operation):
    """A launched round is never finished."""

    tag = "abandon"
    round: str


@dataclass(frozen=True, slots=True)
class Greedy(Operation):
    """A round is finished; the target agrees with about `agreement` of four drafts."""

    tag = "greedy"
    round: str
    target: int
    agreement: int


@dataclass(frozen=True, slots=True)
class Sample(Operation):
    """The same by sampling."""

    tag = "sample"
    round: str
    target: int
    agreement: int


@dataclass(frozen=True, slots=True)
class SampleDrafted(Operation):
    """The same for a chain that was drawn from known distributions; `broken` says how some of these are none."""

    tag = "sample-drafted"
    round: str
    target: int
    agreement: int
    broken: str


@dataclass(frozen=True, slots=True)
class FailTarget(Operation):
    """A round is finished, and for some nodes the target gives no numbers."""

    tag = "fail-target"
    round: str
    target: int
    sampled: bool


@dataclass(frozen=True, slots=True)
class Distribution(Operation):
    """Many equal rows under coins that cover the unit square evenly: what is emitted must have the target's distribution."""

    tag = "distribution"
    target: int
    topk: int


@dataclass(frozen=True, slots=True)
class DistributionDrafted(Operation):
    """The same with drafts from a known distribution, each as often as it is drawn."""

    tag = "distribution-drafted"
    target: int


LAUNCHES = (Launch, LaunchGarbage, Propose)
SAMPLED = (Sample, SampleDrafted)
FINISHES = (Greedy, *SAMPLED, FailTarget)
OPERATIONS: tuple[type[Operation], ...] = (
    *(Configure, Replace, *LAUNCHES, Constrain, Abandon, *FINISHES, Distribution, DistributionDrafted),
)
