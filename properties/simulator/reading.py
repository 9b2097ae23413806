"""Reads the answer of a simulator. Missing values and wrong types are reported before anything is checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..harness.trial import Trial
from .answer import RequestOutcome, SimulatorAnswer
from .contract import Service

LATENCIES = ("ttft", "tpot", "itl", "e2el")
STATISTICS = ("mean", "median", "p90", "p95", "p99")
REASONS = ("completed", "refused", "aborted", "failed")
ALWAYS_KNOWN = ("completed", "retractions", "max_running", "total_output_tokens", "duration")
BOOKS = ("summary", "machine", "runs", "rounds", "process", "patience", "link", "port", "left")
RATES = ("output_throughput", "request_throughput", "mean_concurrency", "mean_running")


def read_answer(trial: Trial, answer: object, service: Service) -> SimulatorAnswer:
    """Return the answer as values. Raises a Violation (TYPE) for another form than the contract's."""
    has_books = trial.capabilities.books
    keys = ("events", "times_ns", "arrivals", "requests", "summary", *(("books",) if has_books else ()))
    parts = _whole(trial, answer, "the answer", keys)
    events = trial.sequence(parts["events"], "events")
    for line in events:
        if not isinstance(line, str):
            raise trial.misbehaviour("TYPE", f"an event is {line!r}", "a string")
    times = trial.integers(parts["times_ns"], "times_ns, one of each event,", len(events))
    arrivals = _tuples(trial, parts["arrivals"], "arrivals", 3)
    requests = read_requests(trial, parts["requests"], len(arrivals))
    books = _whole(trial, parts["books"], "books", BOOKS) if has_books else None
    return SimulatorAnswer(service, tuple(events), times, arrivals, requests, _summary(trial, parts["summary"]), books)


def read_requests(trial: Trial, given: object, num_arrivals: int) -> tuple[RequestOutcome, ...]:
    """Return the requests of an answer as values."""
    requests = tuple(_outcome(trial, request) for request in trial.sequence(given, "requests"))
    for request in requests:
        if not -1 <= request.number < num_arrivals:
            raise trial.misbehaviour("ANSWER", f"request number {request.number}", f"0 … {num_arrivals - 1}, or −1")
    return requests


def _summary(trial: Trial, given: object) -> dict[str, float | None]:
    names = [*ALWAYS_KNOWN, *RATES, *(f"{statistic}_{name}_ms" for name in LATENCIES for statistic in STATISTICS)]
    if trial.capabilities.goodput:
        names += ["request_goodput", "slo_attainment"]
    summary = _whole(trial, given, "the summary", names)
    for name in names:
        value = summary[name]
        if value is None and name not in ALWAYS_KNOWN:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            should = "a number" if name in ALWAYS_KNOWN else "a number, or None where it is undefined"
            raise trial.misbehaviour("TYPE", f"{name} of the summary is {value!r}", should)
        if not abs(value) < float("inf"):
            raise trial.misbehaviour("TYPE", f"{name} of the summary is {value!r}", "a finite number")
    return {name: summary[name] for name in names}


def _outcome(trial: Trial, given: object) -> RequestOutcome:
    request = _whole(trial, given, "a request", RequestOutcome._fields)
    if request["reason"] not in REASONS:
        raise trial.misbehaviour("TYPE", f"a request's reason is {request['reason']!r}", f"one of {', '.join(REASONS)}")
    values: dict[str, Any] = {}
    for name in RequestOutcome._fields:
        value = request[name]
        if name == "emissions":
            values[name] = _tuples(trial, value, "emissions", 2)
        elif name == "reason" or (value is None and name in ("first_token_ns", "finish_ns")):
            values[name] = value
        else:
            values[name] = trial.integer(value, f"{name} of a request")
    return RequestOutcome(**values)


def _whole(trial: Trial, value: object, what: str, keys: Sequence[str]) -> Mapping[str, Any]:
    return trial.mapping(value, what, f"a mapping with {', '.join(keys)}", keys)


def _tuples(trial: Trial, value: object, what: str, length: int) -> tuple[tuple[int, ...], ...]:
    """Return a sequence of so many integers each; `what` is a plural."""
    return tuple(trial.integers(item, f"one of the {what}", length) for item in trial.sequence(value, what))
