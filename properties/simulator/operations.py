"""What is done to a simulator. Some operations describe the service, the others run it as it is then, one or several times."""

from __future__ import annotations

from dataclasses import dataclass

from ..harness.operation import Operation


@dataclass(frozen=True, slots=True)
class Load(Operation):
    """The service gets these requests, `gap_ms` apart on average."""

    tag = "load"
    num_requests: int
    arrivals: str
    gap_ms: int
    prompt_lens: tuple[int, ...]
    output_lens: tuple[int, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class Size(Operation):
    """The service gets this much hardware; a pool of so many times 16 tokens."""

    tag = "size"
    pool: int
    max_running: int
    replicas: int


@dataclass(frozen=True, slots=True)
class Demand(Operation):
    """A good request keeps to this; 0: no demand."""

    tag = "demand"
    ttft_ms: int
    e2el_ms: int


@dataclass(frozen=True, slots=True)
class Plan(Operation):
    """A kind of fault joins the service's plan."""

    tag = "plan"
    kind: str
    percent: int


@dataclass(frozen=True, slots=True)
class Calm(Operation):
    """The service has no fault plan any more."""

    tag = "calm"


@dataclass(frozen=True, slots=True)
class Run(Operation):
    """The service runs."""

    tag = "run"


@dataclass(frozen=True, slots=True)
class Twice(Operation):
    """It runs twice."""

    tag = "twice"


@dataclass(frozen=True, slots=True)
class OneMoreRequest(Operation):
    """It runs, and runs again with one request more."""

    tag = "one-more-request"


@dataclass(frozen=True, slots=True)
class OneMoreFault(Operation):
    """It runs, and runs again with one kind of fault more, which changes nothing of what is asked."""

    tag = "one-more-fault"
    kind: str
    percent: int


@dataclass(frozen=True, slots=True)
class NoProbability(Operation):
    """It runs without a plan, and with one in which this kind and those of its plan have probability 0."""

    tag = "no-probability"
    kind: str


@dataclass(frozen=True, slots=True)
class MorePages(Operation):
    """It runs without faults, and runs again with more pages."""

    tag = "more-pages"
    pages: int


@dataclass(frozen=True, slots=True)
class Replay(Operation):
    """It runs without faults, and its requests are replayed from a trace."""

    tag = "replay"


@dataclass(frozen=True, slots=True)
class Impossible(Operation):
    """It is asked to run with something that cannot be."""

    tag = "impossible"
    how: str


@dataclass(frozen=True, slots=True)
class Queue(Operation):
    """A thousand Poisson arrivals at one server, with "exponential" or "constant" service times."""

    tag = "queue"
    services: str
    seed: int


OPERATIONS: tuple[type[Operation], ...] = (
    *(Load, Size, Demand, Plan, Calm, Run, Twice, OneMoreRequest, OneMoreFault),
    *(NoProbability, MorePages, Replay, Impossible, Queue),
)
