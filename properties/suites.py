"""The suites of all contracts. A contract that declares its operations is a trial; of the others `suite.py` of the package says all."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

from ..core.errors import ConfigError, Problem, nearest
from .accept.trial import AcceptTrial
from .allocator.small_scope import small_scope
from .allocator.trial import AllocatorTrial
from .engine.trial import EngineTrial
from .harness.suite import Suite
from .relay.trial import RelayTrial
from .simulator.trial import SimulatorTrial
from .step_controller.trial import StepControllerTrial

_DECLARED = {
    "allocator": Suite.of(
        AllocatorTrial,
        subjects=(
            "foretoken.checks.adapters.kv_allocator:make",
            "foretoken.checks.adapters.kv_store:make",
            "foretoken.properties.allocator.plain:make",
        ),
        small_scope=small_scope,
    ),
    "relay": Suite.of(
        RelayTrial,
        subjects=(
            "foretoken.checks.adapters.future_map:make",
            "foretoken.checks.adapters.future_map:make_poisoned",
        ),
    ),
    "accept": Suite.of(
        AcceptTrial,
        subjects=(
            "foretoken.checks.adapters.tree_accept:make",
            "foretoken.properties.accept.plain:make",
            "foretoken.checks.adapters.torch_accept:make",
        ),
    ),
    "simulator": Suite.of(SimulatorTrial, subjects=("foretoken.checks.adapters.simulator:make",)),
    "step-controller": Suite.of(
        StepControllerTrial,
        subjects=(
            "foretoken.checks.adapters.step_controller:make_fixed",
            "foretoken.checks.adapters.step_controller:make_ema",
            "foretoken.checks.adapters.step_controller:make_goodput",
        ),
    ),
    "engine": Suite.of(
        EngineTrial,
        subjects=("foretoken.checks.adapters.core_engine:make", "foretoken.properties.engine.plain:make"),
    ),
}

PACKAGES: dict[str, str] = {
    "allocator": "foretoken.properties.allocator",
    "prefix-cache": "foretoken.properties.prefix_cache",
    "relay": "foretoken.properties.relay",
    "accept": "foretoken.properties.accept",
    "step-controller": "foretoken.properties.step_controller",
    "engine": "foretoken.properties.engine",
    "executor": "foretoken.checks.executor",
    "transport": "foretoken.checks.transport",
    "simulator": "foretoken.properties.simulator",
}
"""Contract -> its package."""


def contracts() -> tuple[str, ...]:
    """The contracts that have a suite."""
    return tuple(name for name, package in PACKAGES.items() if find_spec(package) is not None)


def suite_of(contract: str, source: str = "contract") -> Suite:
    """The suite of a contract; raises ConfigError for one that is not there."""
    known = contracts()
    if contract not in known:
        what = f"there is no contract {contract!r}{nearest(contract, known)}; there is {', '.join(known)}"
        raise ConfigError(source, [Problem("", what)])
    if contract in _DECLARED:
        return _DECLARED[contract]
    return importlib.import_module(f"{PACKAGES[contract]}.suite").SUITE
