"""Services of the trial: what some of them are, which are possible, and the ways in which one is not."""

from __future__ import annotations

from math import log
from typing import Any

from .contract import BURST, FAULTS, Service, SimulatorCapabilities, SimulatorConfig

MAX_REQUESTS = 64
MAX_LENGTH = 512
MAX_PAGES = 1 << 20
MAX_REPLICAS = 8

QUEUE_REQUESTS = 1000
QUEUE_LOAD_PERMILLE = 500
QUEUE_TOLERANCE = 0.5
"""Of the mean wait. At half load a sample mean over n exponential services has a standard error of 5.4 / √n of it
(Daley, "The serial correlation coefficients of waiting times in a stationary single server queue", 1968): 17 % of a
thousand."""

EXPONENTIAL = tuple(max(1, round(-12 * log(1 - (share + 0.5) / 20))) for share in range(20))
"""Output lengths at the middles of twenty equal shares of an exponential distribution with mean 12."""

STAYS: dict[str, Any] = {"faults": None, "clients": 0, "cancels": 0, "deadline_ms": 0}
"""No faults, and clients that send at their times and stay."""
LONG: dict[str, Any] = {"output_lens": (30,)}
ALONE = Service(num_requests=40, arrivals="even", rate_per_ks=10, prompt_lens=(16,), max_running=1)

IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "no-pages": {"pages": 0},
    "negative-pages": {"pages": -1},
    "no-room": {},  # all prompts are longer than the pool
    "no-replicas": {"replicas": 0},
    "no-batch": {"max_running": 0},
    "no-requests": {"num_requests": 0},
    "no-rate": {"rate_per_ks": 0},
    "negative-rate": {"rate_per_ks": -1000},
    "empty-prompts": {"prompt_lens": (0,)},
    "empty-outputs": {"output_lens": (0,)},
    "no-lengths": {"output_lens": ()},
    "unknown-arrivals": {"arrivals": "sometimes"},
    "unknown-fault": {"faults": (("device.sulks", 100),)},
    "more-than-certain": {"faults": (("device.slow", 1001),)},
    "less-than-never": {"faults": (("device.slow", -1),)},
    "negative-demand": {"slo_ttft_ms": -1},
}
"""Name -> the values that make a service impossible."""


def impossible_for(config: SimulatorConfig, has: SimulatorCapabilities) -> list[str]:
    """Return the names of what a simulator with these capabilities has to refuse."""
    without: tuple[str, ...] = () if has.faults else ("faults",)
    without += () if has.goodput else ("slo_ttft_ms",)
    return [name for name, values in IMPOSSIBLE.items() if values.keys().isdisjoint(without)]


def makes_sense(service: Service) -> bool:
    """Return whether the service is possible in itself, and small. Shrinking tries everything."""
    lengths = (*service.prompt_lens, *service.output_lens)
    return (
        1 <= service.num_requests <= MAX_REQUESTS
        and service.arrivals in ("poisson", "even")
        and service.rate_per_ks >= 1
        and bool(service.prompt_lens and service.output_lens)
        and all(1 <= length <= MAX_LENGTH for length in lengths)
        and service.seed >= 0
        and 1 <= service.pages <= MAX_PAGES
        and service.max_running >= 1
        and 1 <= service.replicas <= MAX_REPLICAS
        and min(service.slo_ttft_ms, service.slo_e2el_ms) >= 0
        and service.policy in ("least_loaded", "round_robin", "prefix_aware")
        and min(service.prefix_groups, service.prefix_len) >= 0
        and service.link_mbps >= 1
        and 0 <= service.clients <= MAX_REQUESTS
        and 0 <= service.cancels <= 1000
        and service.stream_interval >= 1
        and min(service.deadline_ms, service.jitter, service.chunk_us) >= 0
        and all(kind in (*FAULTS, BURST) and 0 <= permille <= 1000 for kind, permille in service.faults or ())
    )
