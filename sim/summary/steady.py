"""Rates and means of a run while its load was on: without its ramp, and without the time after the last arrival."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor
from typing import Any

SETTLED = 3.0  # mean lives of a request, after which nearly all of the first ones have ended
LEAST_BUCKETS = 2  # of the timeline, in a window that has rates
LEAST_REQUESTS = 50  # that end in a window: of fewer, chance is more than the ramp
GAUGES = {
    "running": "steady_mean_running",
    "waiting": "steady_mean_queue_length",
    "kv_occupancy": "steady_kv_occupancy_mean",
}


def steady_window(arrivals_s: float, mean_life_s: float | None, bucket_s: float) -> tuple[int, int] | None:
    """Return the first bucket of the timeline after the ramp, and the one after the last that counts; None if a run is
    too short for them. `arrivals_s`: from the first arrival, with which the timeline begins, to the last one.

    The ramp lasts `SETTLED` mean lives of a request, and at most half of the arrivals: in an overload lives have no
    mean that they settle at. The window ends with the last arrival, or with the last client's last request.
    """
    if not bucket_s or mean_life_s is None:
        return None
    begin = ceil(min(SETTLED * mean_life_s, arrivals_s / 2) / bucket_s)
    end = floor(arrivals_s / bucket_s)
    return (begin, end) if end - begin >= LEAST_BUCKETS else None


def steady_rates(
    summary: Mapping[str, Any], timeline: Mapping[str, Any], first_s: float, last_s: float
) -> dict[str, Any]:
    """Return the rates and means of a whole run within the steady window, as `steady_*`, with its bounds; nothing where
    the window is too short or has too few requests. `first_s`, `last_s`: of arrivals.

    Requests per second are output tokens per second over the mean output, so that no request counts half.
    """
    life_ms, bucket_s = summary["mean_e2el_ms"], timeline["bucket_s"]
    window = steady_window(last_s - first_s, None if life_ms is None else life_ms / 1e3, bucket_s)
    if window is None or not summary["mean_output_tokens"]:
        return {}
    begin, end = window
    output = _mean(timeline["tokens_per_s"][begin:end])
    per_s = output / summary["mean_output_tokens"]
    if per_s * (end - begin) * bucket_s < LEAST_REQUESTS:
        return {}
    means = {name: _mean(timeline[gauge][begin:end]) for gauge, name in GAUGES.items()}
    return {
        "steady_from": first_s + begin * bucket_s,
        "steady_until": first_s + end * bucket_s,
        "steady_request_throughput": per_s,
        "steady_output_throughput": output,
        "steady_total_token_throughput": output + per_s * summary["mean_input_tokens"],
        **means,
        "steady_mean_concurrency": means["steady_mean_running"] + means["steady_mean_queue_length"],
    }


def _mean(values: Sequence[float | None]) -> float:
    return sum(value or 0.0 for value in values) / len(values)
