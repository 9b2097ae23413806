"""What a simulator answers, as values: everything that is missing or of another type is said before anything is checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .contract import Service
from .moment import Answer, Outcome

if TYPE_CHECKING:
    from .trial import SimulatorTrial

LATENCIES = ("ttft", "tpot", "itl", "e2el")
STATISTICS = ("mean", "median", "p90", "p95", "p99")
REASONS = ("completed", "refused", "aborted", "failed")
COUNTS = ("completed", "retractions", "max_running", "total_output_tokens")
RATES = ("duration", "output_throughput", "request_throughput", "mean_concurrency")
_INTEGERS = ("number", "arrival_ns", "max_tokens", "num_output", "retractions")


def read_answer(trial: SimulatorTrial, answer: object, service: Service) -> Answer:
    """Raises a Violation (TYPE) for an answer of another form than the contract says."""
    parts = _mapping(trial, answer, "the answer", ("events", "times_ns", "arrivals", "requests", "summary"))
    events = _sequence(trial, parts["events"], "events")
    for line in events:
        if not isinstance(line, str):
            raise trial.misbehaviour("TYPE", f"an event is {line!r}", "a string")
    times = trial.integers(parts["times_ns"], "times_ns")
    if len(times) != len(events):
        raise trial.misbehaviour("TYPE", f"{len(times)} times for {len(events)} events", "one each")
    arrivals = tuple(
        _tuple_of(trial, arrival, 3, "an arrival") for arrival in _sequence(trial, parts["arrivals"], "arrivals")
    )
    requests = tuple(_outcome(trial, request) for request in _sequence(trial, parts["requests"], "requests"))
    for request in requests:
        if not -1 <= request.number < len(arrivals):
            raise trial.misbehaviour("ANSWER", f"request number {request.number}", f"0 … {len(arrivals) - 1}, or −1")
    return Answer(service, tuple(events), times, arrivals, requests, _summary(trial, parts["summary"]))


def _summary(trial: SimulatorTrial, given: object) -> dict[str, float | None]:
    names = [*COUNTS, *RATES, *(f"{statistic}_{name}_ms" for name in LATENCIES for statistic in STATISTICS)]
    if trial.capabilities.goodput:
        names += ["request_goodput", "slo_attainment"]
    summary = _mapping(trial, given, "summary", names)
    for name in names:
        value = summary[name]
        must_be = name in COUNTS or name == "duration"
        if isinstance(value, bool) or not isinstance(value, (int, float) if must_be else (int, float, type(None))):
            expected = "a number" if must_be else "a number, or None where it is undefined"
            raise trial.misbehaviour("TYPE", f"{name} of the summary is {value!r}", expected)
        if value is not None and not abs(value) < float("inf"):
            raise trial.misbehaviour("TYPE", f"{name} of the summary is {value!r}", "a finite number")
    return {name: summary[name] for name in names}


def _outcome(trial: SimulatorTrial, given: object) -> Outcome:
    request = _mapping(trial, given, "a request", Outcome._fields)
    if request["reason"] not in REASONS:
        raise trial.misbehaviour("TYPE", f"a request's reason is {request['reason']!r}", f"one of {', '.join(REASONS)}")
    values: dict[str, Any] = {name: trial.integer(request[name], f"{name} of a request") for name in _INTEGERS}
    for name in ("first_token_ns", "finish_ns"):
        value = request[name]
        values[name] = None if value is None else trial.integer(value, f"{name} of a request")
    emissions = _sequence(trial, request["emissions"], "emissions")
    return Outcome(
        reason=request["reason"],
        emissions=tuple(_tuple_of(trial, emission, 2, "an emission") for emission in emissions),
        **values,
    )


def _mapping(trial: SimulatorTrial, value: object, what: str, keys: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise trial.misbehaviour("TYPE", f"{what} is of type {type(value).__name__}", "a mapping")
    missing = [key for key in keys if key not in value]
    if missing:
        raise trial.misbehaviour("TYPE", f"{what} has no {', '.join(missing)}", f"the keys {', '.join(keys)}")
    return value


def _sequence(trial: SimulatorTrial, value: object, what: str) -> list | tuple:
    if not isinstance(value, list | tuple):
        raise trial.misbehaviour("TYPE", f"{what} is of type {type(value).__name__}", "a list")
    return value


def _tuple_of(trial: SimulatorTrial, value: object, length: int, what: str) -> tuple[int, ...]:
    found = trial.integers(value, what)
    if len(found) != length:
        raise trial.misbehaviour("TYPE", f"{what} is {list(found)}", f"{length} integers")
    return found
