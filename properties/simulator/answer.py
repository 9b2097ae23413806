"""The answers of a simulator, and one moment of its trial: the operation, and the answers to the runs that it made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .contract import Service, SimulatorConfig


class RequestOutcome(NamedTuple):
    """The end of a request; see `contract.py`. `emissions` are (time in ns, tokens)."""

    number: int
    reason: str
    arrival_ns: int
    first_token_ns: int | None
    finish_ns: int | None
    max_tokens: int
    num_output: int
    retractions: int
    emissions: tuple[tuple[int, int], ...]

    @property
    def runs(self) -> tuple[int, ...]:
        """Tokens of each emission."""
        return tuple(tokens for _, tokens in self.emissions)


class SimulatorAnswer(NamedTuple):
    """What a simulator said of one run, in the form that the contract wants."""

    service: Service
    events: tuple[str, ...]
    times_ns: tuple[int, ...]
    arrivals: tuple[tuple[int, int, int], ...]
    requests: tuple[RequestOutcome, ...]
    summary: dict[str, float | None]
    books: Mapping[str, Any] | None = None  # with the capability `books`

    def of_reason(self, reason: str) -> list[RequestOutcome]:
        return [request for request in self.requests if request.reason == reason]

    @property
    def completed(self) -> list[RequestOutcome]:
        return self.of_reason("completed")

    @property
    def duration_s(self) -> float:
        return self.summary["duration"]

    def __str__(self) -> str:
        return f"{len(self.completed)} of {len(self.requests)} completed, {len(self.events)} events, {self.duration_s:.4g} s"


class Queueing(NamedTuple):
    """A run of one server."""

    services: str
    tolerance: float
    answer: SimulatorAnswer


@dataclass(slots=True)
class SimulatorMoment:
    """One operation. `runs` are the answers of all runs that it made; pairs are (before, with the change)."""

    config: SimulatorConfig
    operation: object = "make"
    runs: tuple[SimulatorAnswer, ...] = ()
    twice: tuple[SimulatorAnswer, SimulatorAnswer] | None = None
    elsewhere: tuple[int, str, str] | None = None  # number of a case, digest here, digest in another process
    grown: tuple[SimulatorAnswer, SimulatorAnswer] | None = None  # one more request, or one more kind of fault
    planned: tuple[SimulatorAnswer, SimulatorAnswer] | None = None  # no plan, and one without probabilities
    enlarged: tuple[SimulatorAnswer, SimulatorAnswer] | None = None
    replayed: tuple[SimulatorAnswer, SimulatorAnswer] | None = None
    split: tuple[SimulatorAnswer, SimulatorAnswer] | None = None  # with steps of several rounds, and without
    apart: tuple[SimulatorAnswer, tuple[RequestOutcome, ...]] | None = None  # all engines together, and each by itself
    changed: tuple[
        tuple[str, SimulatorAnswer, SimulatorAnswer], ...
    ] = ()  # of each of `CHANGES`, without it and with it
    fluctuating: tuple[SimulatorAnswer, SimulatorAnswer] | None = None  # with device times that do not vary, and do
    queue: Queueing | None = None
    impossible: str = ""
    refusal: str | None = None  # of the run that was asked for last
    is_possible: bool = False  # whether there is no reason to refuse that run
