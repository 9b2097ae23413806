"""The replicas that each hour of a trace needs, and the GPU hours of all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.errors import ConfigError
from ...sim.scenario import Scenario
from ...sim.scenario_file import scenario_with
from .trace_part import TracePart

HOUR_S = 3600.0
MOST_HEADROOM, MOST_WARM_UP_S = 10, 86_400


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


@dataclass(frozen=True)
class Hours:
    """The replicas of a candidate by the hour of a trace, and the GPU hours of all of them.

    Attributes:
        candidate: Its name.
        capacity: Requests per second that one replica holds in the busiest hour.
        headroom: The share that is added to the rate of each hour.
        warm_up_s: How long a replica starts.
        gpus_per_replica: Devices of the candidate's smallest deployment.
        hours: The hours of the trace.
        hours_long: How many hours the trace lasts.
        gpu_hours: Those of all devices, with the ones that warm up.
        bill: Their price; None without a price of the device.
    """

    candidate: str
    capacity: float
    headroom: float
    warm_up_s: float
    gpus_per_replica: int
    hours: tuple[Hour, ...]
    hours_long: float
    gpu_hours: float
    bill: float | None


@dataclass(frozen=True, slots=True)
class Day:
    """The question for replicas by the hour. `part`: of the whole trace. `headroom`: the share that is added to an
    hour's rate. `warm_up_s`: how long a replica starts."""

    part: TracePart
    headroom: float
    warm_up_s: float

    @classmethod
    def of(cls, scenario: Scenario, load: float | None, headroom: float, warm_up_s: float) -> Day:
        """Return the question about the trace of a scenario. Raises ConfigError without a trace, and for a given
        load."""
        if load is not None:
            raise ConfigError.of("--by-hour", "", "has the rates of the trace; leave --rate out")
        part = TracePart.of(scenario, None)
        if part is None:
            raise ConfigError.of("--by-hour", "", "divides a trace into hours; give --trace")
        return cls(part, headroom, warm_up_s)

    def answer(self, candidate: str, capacity: float, gpus: int, price: float | None) -> Hours:
        """Return the replicas by the hour of a candidate, whose replica holds `capacity` requests per second on `gpus`
        devices. `price`: of an hour of one, if it is known."""
        hours = replicas_by_hour(self.part, capacity, self.headroom, self.warm_up_s)
        gpu_hours = gpus * sum(hour.replica_hours for hour in hours)
        bill = None if price is None else gpu_hours * price
        long = self.part.span_s / HOUR_S
        return Hours(candidate, capacity, self.headroom, self.warm_up_s, gpus, tuple(hours), long, gpu_hours, bill)


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
