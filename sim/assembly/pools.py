"""The numbers of prefill and decode engines of a scenario, and the times that they wait for each other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ...core.errors import ConfigError
from ...core.handoff import HandoffTiming
from ...core.scheduler.config import EngineRole
from ..scenario import Hardware, Scenario, refusals
from ..scenario_file import SCENARIO, refuse_keys


class Pools(NamedTuple):
    """Engines by their role at the start: those that compute prompts have the first numbers, those that
    decode the next."""

    num_prefill: int = 0
    num_decode: int = 0
    num_both: int = 1

    @property
    def num_engines(self) -> int:
        return self.num_prefill + self.num_decode + self.num_both

    @property
    def is_disaggregated(self) -> bool:
        return self.num_prefill > 0

    def role_of(self, engine: int) -> EngineRole:
        if not self.is_disaggregated:
            return EngineRole.BOTH
        return EngineRole.PREFILL if engine < self.num_prefill else EngineRole.DECODE


def pools_of(scenario: Scenario) -> Pools:
    """Return the pools of a scenario. Raises ConfigError for numbers that contradict each other."""
    refuse_keys(scenario, "disaggregation.", "hardware.replicas")
    table, replicas = scenario.disaggregation, scenario.hardware.replicas
    prefill, decode = table.prefill, table.decode
    if table.ratio is not None:
        parts = parts_of(table.ratio)
        prefill, decode = (part * replicas // sum(parts) for part in parts)
    return Pools(prefill, decode, 0) if prefill else Pools(num_both=replicas)


class Pool(NamedTuple):
    """The engines of one role: how many there are, the GPU that they have, and the devices of each."""

    role: EngineRole
    engines: int
    gpu: str
    devices: int

    @property
    def gpus(self) -> int:
        """The devices of all of them."""
        return self.engines * self.devices


def pools_on(hardware: Hardware, pools: Pools) -> tuple[Pool, ...]:
    """Return the pools that have engines, with their hardware. Raises UnknownGPU."""
    counts = {EngineRole.PREFILL: pools.num_prefill, EngineRole.DECODE: pools.num_decode}
    found = []
    for role, count in {**counts, EngineRole.BOTH: pools.num_both}.items():
        own = hardware.of_role(role)
        if count:
            found.append(Pool(role, count, own.device.name, own.devices))
    return tuple(found)


def gpus_by_name(pools: Iterable[Pool]) -> dict[str, int]:
    """Return the numbers of devices of all pools by the name of their GPU."""
    found: dict[str, int] = {}
    for pool in pools:
        found[pool.gpu] = found.get(pool.gpu, 0) + pool.gpus
    return found


def parts_of(ratio: str) -> tuple[int, int]:
    """Return P and D of a ratio P:D. Raises ConfigError for another text."""
    parts = refusals.parts_of(ratio)
    if parts is None:
        raise ConfigError.of(SCENARIO, "disaggregation.ratio", refusals.no_ratio(ratio))
    return parts


def timing_of(scenario: Scenario) -> HandoffTiming:
    """Return the timeouts of a scenario."""
    table = scenario.disaggregation
    return HandoffTiming(*(round(seconds * 1e9) for seconds in (table.lease_s, table.hold_s, table.fence_s)))
