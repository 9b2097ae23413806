"""What a plan is asked: limits, a load or devices, and how surely."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from ...core.errors import ConfigError, Problem
from ...sim.cost.hardware import CUSTOM
from ...sim.scenario import Scenario
from ..slo import Objective, objectives_of
from .hours import MOST_HEADROOM, MOST_WARM_UP_S, Day, busiest_hour

MOST_GPUS, MOST_SEEDS, LEAST_REQUESTS = 4096, 100, 100
REQUESTS = 600  # of a run, where no trace has its own


@dataclass(frozen=True)
class PlanQuestion:
    """What is asked.

    Attributes:
        objectives: What must hold.
        load: Requests per second, or the scale of a trace's arrivals; None asks for the greatest load.
        gpus: Devices there are; None asks for the least number of them.
        seeds: Those of the last round.
        requests: Of a run, at least; None: all of a trace's.
        prices: Of an hour of a GPU by its name. Where every candidate has one, the least GPUs are the cheapest ones.
        day: The trace whose hours get replicas; None: no replicas by the hour are asked for.
    """

    objectives: tuple[Objective, ...]
    load: float | None
    gpus: int | None
    seeds: Sequence[int]
    requests: int | None
    prices: Mapping[str, float] = field(default_factory=dict)
    day: Day | None = None


def question_of(
    scenario: Scenario,
    slo: str | None = None,
    load: float | None = None,
    gpus: int | None = None,
    seeds: int = 48,
    requests: int | None = None,
    prices: Mapping[str, float] = MappingProxyType({}),
    by_hour: bool = False,
    headroom: float = 0.2,
    warm_up_s: float = 300.0,
) -> tuple[PlanQuestion, Scenario]:
    """Return the question about a scenario, and the scenario of its runs: with the limits of each request, and with the
    busiest hour of its trace if replicas are asked for `by_hour`.

    `seeds`: most runs per load, from the scenario's own seed on. Without a trace, a run has REQUESTS requests. Raises
    ConfigError with every value that is out of range.
    """
    rules = {
        "rate": (load is None or 0 < load < math.inf, load, "above 0"),
        "gpus": (gpus is None or 1 <= gpus <= MOST_GPUS, gpus, f"from 1 to {MOST_GPUS:,}"),
        "seeds": (2 <= seeds <= MOST_SEEDS, seeds, f"from 2 to {MOST_SEEDS}"),
        "requests": (requests is None or requests >= LEAST_REQUESTS, requests, f"from {LEAST_REQUESTS} on"),
        "headroom": (0 <= headroom <= MOST_HEADROOM, headroom, f"a share from 0 to {MOST_HEADROOM}"),
        "warm_up_s": (0 <= warm_up_s <= MOST_WARM_UP_S, warm_up_s, f"from 0 to {MOST_WARM_UP_S:,}"),
        **{f"prices.{gpu}": (0 < price < math.inf, price, "above 0") for gpu, price in prices.items()},
    }
    if wrong := [
        Problem(key, f"is {value}; expected {what}") for key, (is_right, value, what) in rules.items() if not is_right
    ]:
        raise ConfigError("<arguments>", wrong)
    objectives, scenario = objectives_of(slo, scenario)
    day = Day.of(scenario, load, headroom, warm_up_s) if by_hour else None
    if day is not None:
        scenario = busiest_hour(scenario, day.part)
    if requests is None and scenario.workload.trace is None:
        requests = REQUESTS
    hardware = scenario.hardware
    priced = {CUSTOM: hardware.custom.price} if hardware.custom is not None and hardware.custom.price else {}
    priced |= {hardware.find_gpu(gpu).name: price for gpu, price in prices.items()}
    decisive = range(scenario.seed, scenario.seed + seeds)
    return PlanQuestion(objectives, load, gpus, decisive, requests, priced, day), scenario
