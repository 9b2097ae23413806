"""Services that cannot be, each one value away from one that can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .contract import Service, SimulatorConfig

IMPOSSIBLE: dict[str, Callable[[Service, SimulatorConfig], Service]] = {
    "no-pages": lambda service, config: replace(service, pages=0),
    "negative-pages": lambda service, config: replace(service, pages=-1),
    "no-room": lambda service, config: replace(service, prompt_lens=(service.pages * config.page_size + 1,)),
    "no-replicas": lambda service, config: replace(service, replicas=0),
    "no-batch": lambda service, config: replace(service, max_running=0),
    "no-requests": lambda service, config: replace(service, num_requests=0),
    "no-rate": lambda service, config: replace(service, rate_per_ks=0),
    "negative-rate": lambda service, config: replace(service, rate_per_ks=-1000),
    "empty-prompts": lambda service, config: replace(service, prompt_lens=(0,)),
    "empty-outputs": lambda service, config: replace(service, output_lens=(0,)),
    "no-lengths": lambda service, config: replace(service, output_lens=()),
    "unknown-arrivals": lambda service, config: replace(service, arrivals="sometimes"),
}
"""Name -> the same service with that value. All prompts of `no-room` are longer than the pool: nothing would ever run."""

IMPOSSIBLE_FAULTS: dict[str, Callable[[Service, SimulatorConfig], Service]] = {
    "unknown-fault": lambda service, config: replace(service, faults=(("device.sulks", 100),)),
    "more-than-certain": lambda service, config: replace(service, faults=(("device.slow", 1001),)),
    "less-than-never": lambda service, config: replace(service, faults=(("device.slow", -1),)),
}
"""The same of fault plans."""

IMPOSSIBLE_DEMANDS: dict[str, Callable[[Service, SimulatorConfig], Service]] = {
    "negative-demand": lambda service, config: replace(service, slo_ttft_ms=-1),
}
"""The same of what a good request keeps to."""

ALL = {**IMPOSSIBLE, **IMPOSSIBLE_FAULTS, **IMPOSSIBLE_DEMANDS}
