"""The requests of a scenario: a trace, or synthetic ones."""

from __future__ import annotations

from .scenario import Length, Scenario, Workload
from .scenario_file import refuse_keys
from .workload.arrivals import ArrivalProcess, RateCurve
from .workload.lengths import (
    EmpiricalLength,
    FixedLength,
    LengthDistribution,
    LognormalLength,
    SharedPrefixes,
    UniformLength,
)
from .workload.traces import TraceSource
from .workload.workload import SyntheticWorkload

SHOWN_REQUESTS = 1000  # after the ramp: ten of them are beyond the p99 that a run prints
RAMP_LIVES = 3  # lives of a request, after which the clients of a closed loop no longer move in step
LARGE_DEVIATION = 0.05  # of an achieved mean length from the one asked for, in shares of it


def make_workload(scenario: Scenario, context_len: int) -> TraceSource | SyntheticWorkload:
    """Return the requests of a scenario, as `Arrival`s. Raises a ForedraftError for a contradiction or an unreadable
    trace.

    `context_len`: prompt and output tokens that the engines take of one request. Lognormal lengths without a `high` end
    there, those of prompts so far before it that an average output fits.
    """
    refuse_keys(scenario, "workload.")
    table = scenario.workload
    if table.trace is not None:
        part = table.start_s, table.stop_s, table.num_requests
        options = table.trace_options
        return TraceSource(table.trace, options, table.rate_scale, *part, table.resample_s, scenario.seed)
    rate = table.rate * table.rate_scale
    arrivals = None
    if table.concurrency is None:
        match table.arrivals:
            case "poisson":
                arrivals = ArrivalProcess.poisson(rate)
            case "gamma":
                arrivals = ArrivalProcess.gamma(rate, table.burstiness)
            case "constant":
                arrivals = ArrivalProcess.evenly(rate)
            case "day":
                curve = RateCurve.day(rate, table.amplitude, period_s=table.period_s)
                arrivals = ArrivalProcess.gamma(curve, table.burstiness)
            case "curve":
                arrivals = ArrivalProcess.gamma(_curve(table, rate), table.burstiness)
    prefixes = None
    if table.prefixes is not None:
        prefixes = SharedPrefixes(table.prefixes.groups, FixedLength(table.prefixes.length), table.prefixes.zipf)
    num_requests = table.num_requests
    if num_requests is None and (table.stop_s is None or arrivals is None):
        num_requests = SHOWN_REQUESTS + RAMP_LIVES * (table.concurrency or 0)
    output_len = _lengths(table.output, context_len)
    room = max(1, round(output_len.moments[0]))
    return SyntheticWorkload(
        _lengths(table.prompt, context_len - room),
        output_len,
        arrivals,
        table.concurrency,
        prefixes,
        num_requests,
        table.stop_s if arrivals is not None else None,
        table.urgent_share,
        scenario.seed,
    )


def _curve(table: Workload, rate: float) -> RateCurve:
    """Return the curve of `workload.curve`, raised or lowered to the mean `rate`."""
    assert table.curve is not None, "declared as needed"
    pieces = len(table.curve) - 1
    mean = (sum(table.curve) - (table.curve[0] + table.curve[-1]) / 2) / pieces
    times = [table.period_s * i / pieces for i in range(pieces)]
    return RateCurve.table([*times, table.period_s], [rate * value / mean for value in table.curve], table.period_s)


def trace_notes(table: Workload) -> tuple[str, ...]:
    """Return how the trace of a scenario is read where its file does not say so. Raises TraceError."""
    return () if table.trace is None else TraceSource(table.trace, table.trace_options).layout().notes


def _lengths(table: Length, greatest: int) -> LengthDistribution:
    match table:
        case Length(kind="fixed", value=int(value)):
            return FixedLength(value)
        case Length(kind="uniform", high=int(high)):
            return UniformLength(table.low, high)
        case Length(kind="lognormal", mean=float(mean), sigma=float(sigma)):
            high = max(greatest, table.low) if table.high is None else table.high
            return LognormalLength(mean, sigma, table.low, high)
        case Length(kind="empirical", values=list(values)):
            weights = table.weights or [1.0] * len(values)
            return EmpiricalLength(tuple(values), tuple(weights))
    raise AssertionError(f"a {table.kind} length lacks what its keys declare as needed")


def asked_lengths(workload: TraceSource | SyntheticWorkload) -> dict[str, tuple[float, float]]:
    """Return mean and standard deviation of the prompts ("input") and outputs asked for, in tokens;
    nothing for a trace."""
    if isinstance(workload, TraceSource):
        return {}
    return {"input": workload.prompt_len.moments, "output": workload.output_len.moments}


def length_notice(kind: str, asked: tuple[float, float], got: float, num_requests: int) -> str | None:
    """Return a sentence if the mean of `num_requests` lengths differs from the configured mean by more than chance."""
    mean, std = asked
    if abs(got - mean) <= max(LARGE_DEVIATION * mean, 4 * std / num_requests**0.5):
        return None
    return (
        f"{kind} tokens per completed request: {mean:,.0f} asked for on average, {got:,.0f} achieved; what is left out are lengths "
        "beyond the bounds (low, high, the model's context, max_tokens) and requests that did not complete"
    )


def scan_workload(workload: TraceSource | SyntheticWorkload) -> tuple[int | None, int]:
    """Return how many requests a run will see at most (None if that is unknown), and how many rows of its trace have no
    prompt or no output and cannot be replayed. Validates a trace by reading it once.
    """
    if isinstance(workload, TraceSource):
        summary = workload.scan()
        most = workload.limit
        if workload.resample_s is None:
            most = min(summary.num_requests, workload.limit or summary.num_requests)
        return most, summary.num_rows - summary.num_requests
    return workload.num_requests, 0
