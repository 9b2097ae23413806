"""Which runs have replicas that do not depend on each other, so that several processes can simulate one run."""

from __future__ import annotations

from ...core.errors import ConfigError
from ..actors.router import COUNTING_POLICIES
from ..assembly.pools import pools_of
from ..scenario import Scenario


def coupling(scenario: Scenario, has_faults: bool = False) -> str:
    """Return why the replicas of a run depend on each other, as a sentence without its end; empty if they do not."""
    if pools_of(scenario).is_disaggregated:
        return "prefill and decode engines hand requests over"
    if has_faults:
        return "a fault plan concerns the whole service"
    if scenario.workload.concurrency is not None:
        return "each client of a closed loop waits for its last request, whichever replica has it"
    if scenario.router.policy not in COUNTING_POLICIES:
        free = " and ".join(COUNTING_POLICIES)
        return f"router.policy = {scenario.router.policy} looks at all replicas; {free} do not"
    return ""


def check_workers(workers: int, scenario: Scenario, place: str, has_faults: bool = False) -> None:
    """Raise ConfigError if a run cannot be divided among so many processes."""
    if workers == 1:
        return
    reason = coupling(scenario, has_faults)
    if reason:
        raise ConfigError.of(place, "", f"one process has to simulate this run: {reason}")
    if workers > scenario.hardware.replicas:
        raise ConfigError.of(place, "", f"{workers} processes for hardware.replicas = {scenario.hardware.replicas}")
