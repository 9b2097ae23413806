"""The suites of the contracts that any engine can implement. A package with contracts of its own registers theirs."""

from __future__ import annotations

from ..core.errors import ConfigError, nearest
from .accept.trial import AcceptTrial
from .allocator.trial import AllocatorTrial
from .engine.trial import EngineTrial
from .harness.suite import Suite
from .prefix_cache.trial import PrefixCacheTrial
from .relay.trial import RelayTrial
from .simulator.trial import SimulatorTrial
from .step_controller.trial import StepControllerTrial

_SUITES: dict[str, Suite] = {
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
    "simulator": Suite(SimulatorTrial, ("foredraft.checks.adapters.simulator:make",)),
}


def register(suite: Suite) -> Suite:
    assert suite.name not in _SUITES, f"there is a contract {suite.name} already"
    _SUITES[suite.name] = suite
    return suite


def suite_of(contract: str, source: str = "contract") -> Suite:
    """Return the suite of a contract. Raises ConfigError for one that is not registered."""
    if contract not in _SUITES:
        what = f"there is no contract {contract!r}{nearest(contract, _SUITES)}; there is {', '.join(_SUITES)}"
        if ":" in contract:
            what = f"name the contract before the component, for example: allocator {contract}; there is {', '.join(_SUITES)}"
        raise ConfigError.of(source, "", what)
    return _SUITES[contract]
