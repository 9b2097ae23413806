"""The suites of the contracts."""

from __future__ import annotations

from ..core.errors import ConfigError, nearest
from .accept.trial import AcceptTrial
from .allocator.trial import AllocatorTrial
from .block_manager.trial import BlockManagerTrial
from .engine.trial import EngineTrial
from .executor.trial import ExecutorTrial
from .harness.suite import Suite
from .prefix_cache.trial import PrefixCacheTrial
from .relay.trial import RelayTrial
from .simulator.trial import SimulatorTrial
from .step_controller.trial import StepControllerTrial
from .transport.trial import TransportTrial

SUITES: dict[str, Suite] = {
    "allocator": Suite(
        AllocatorTrial,
        ("foredraft.properties.allocator.plain:make", "foredraft.properties.allocator.plain:make_unpadded"),
    ),
    "prefix-cache": Suite(
        PrefixCacheTrial,
        ("foredraft.properties.prefix_cache.plain:make", "foredraft.checks.adapters.prefix_store:make"),
    ),
    "relay": Suite(RelayTrial, ("foredraft.checks.adapters.future_map:make",)),
    "accept": Suite(
        AcceptTrial, ("foredraft.properties.accept.plain:make", "foredraft.checks.adapters.tree_accept:make")
    ),
    "step-controller": Suite(
        StepControllerTrial,
        (
            "foredraft.checks.adapters.step_controller:make_ema",
            "foredraft.checks.adapters.step_controller:make_goodput",
        ),
    ),
    "engine": Suite(
        EngineTrial, ("foredraft.properties.engine.plain:make", "foredraft.checks.adapters.core_engine:make")
    ),
    "executor": Suite(ExecutorTrial, ("foredraft.properties.executor.reference.adapter:make",)),
    "block-manager": Suite(BlockManagerTrial, ("foredraft.properties.block_manager.plain:make",)),
    "transport": Suite(TransportTrial, ("foredraft.checks.adapters.handoff:make",)),
    "simulator": Suite(SimulatorTrial, ("foredraft.checks.adapters.simulator:make",)),
}


def suite_of(contract: str, source: str = "contract") -> Suite:
    """Return the suite of a contract. Raises ConfigError for an unknown one."""
    if contract == "acceptance-process":
        what = "is no contract since version 0.2: tests/core/acceptance/test_laws_of_acceptance.py checks our processes"
        raise ConfigError.of(source, "", f"{contract} {what}")
    if contract not in SUITES:
        what = f"there is no contract {contract!r}{nearest(contract, SUITES)}; there is {', '.join(SUITES)}"
        if ":" in contract:
            what = f"name the contract before the component, for example: allocator {contract}; there is {', '.join(SUITES)}"
        raise ConfigError.of(source, "", what)
    return SUITES[contract]
