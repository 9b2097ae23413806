"""The replicas that each hour of a trace needs, and the GPU hours of all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...sim.scenario import Scenario
from ...sim.scenario_file import scenario_with
from .trace_part import TracePart

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Hour:
    """One hour of a trace.

    Attributes:
        start_s: Its start, in seconds after the trace's first row.
        rate: Requests per second on average.
        replicas: Those that serve it.
        replica_hours: Those that are paid in it, with the ones that warm up for the next hours.
    """

    start_s: float
    rate: float
    replicas: int
    replica_hours: float


def busiest_hour(scenario: Scenario, part: TracePart) -> Scenario:
    """Return the scenario with the hour of its trace that has the most requests; the same if the trace is shorter."""
    if part.span_s <= HOUR_S:
        return scenario
    counts = _counts(part)
    start_s = scenario.workload.start_s + int(np.argmax(counts)) * HOUR_S
    window = {"workload.start_s": start_s, "workload.stop_s": start_s + HOUR_S}
    return scenario_with(scenario.model_dump(mode="json"), window)


def replicas_by_hour(part: TracePart, capacity: float, headroom: float, warm_up_s: float) -> list[Hour]:
    """Return the replicas of each hour, if one replica holds `capacity` requests per second.

    `headroom`: the share of the rate that is added to it. `warm_up_s`: how long before an hour its replicas start; they
    are paid from then on. A replica that is not needed ends with the hour.
    """
    counts, start_s = _counts(part), part.scenario.workload.start_s
    seconds = [min(HOUR_S, part.span_s - place * HOUR_S) for place in range(len(counts))]
    rates = [count / length for count, length in zip(counts.tolist(), seconds, strict=True)]
    replicas = [max(1, math.ceil(rate * (1 + headroom) / capacity - 1e-9)) for rate in rates]
    return [
        Hour(start_s + place * HOUR_S, rate, number, _paid(replicas, seconds, place, warm_up_s) / HOUR_S)
        for place, (rate, number) in enumerate(zip(rates, replicas, strict=True))
    ]


def _counts(part: TracePart) -> np.ndarray:
    """Return the requests of each hour, int64 [hours]; the last hour may be shorter."""
    places = part.rows.times_ns // round(HOUR_S * 1e9)
    return np.bincount(places, minlength=max(1, math.ceil(part.span_s / HOUR_S - 1e-9)))


def _paid(replicas: Sequence[int], seconds: Sequence[float], place: int, warm_up_s: float) -> float:
    """Return the replica seconds of an hour: at each moment as many run as any hour needs that begins within the
    warm-up after it."""
    end, needed, paid = seconds[place], replicas[place], 0.0
    begins, at = end, place + 1  # of the next hour, from the start of this one
    while at < len(replicas) and begins - warm_up_s < end:
        if replicas[at] > needed:
            from_s = max(0.0, begins - warm_up_s)
            paid += (replicas[at] - needed) * (end - from_s)
            needed = replicas[at]
        begins += seconds[at]
        at += 1
    return paid + replicas[place] * end


def hours_to_json(part: TracePart, hours: Sequence[Hour], gpus: int, price: float | None) -> dict[str, Any]:
    """Return the hours as plain data. `gpus`: of a replica; `price`: of an hour of one, if it is known."""
    gpu_hours = gpus * sum(hour.replica_hours for hour in hours)
    return {
        "gpus_per_replica": gpus,
        "hours": [
            {"start_s": one.start_s, "rate": one.rate, "replicas": one.replicas, "replica_hours": one.replica_hours}
            for one in hours
        ],
        "hours_long": part.span_s / HOUR_S,
        "gpu_hours": gpu_hours,
        "bill": None if price is None else gpu_hours * price,
    }
