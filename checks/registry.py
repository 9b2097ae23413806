"""All contracts: registers those that are defined in `checks/`, and lists our components of each and where its
planted defects stand."""

from __future__ import annotations

from importlib import import_module

from ..properties.block_manager.trial import ManagerTrial
from ..properties.executor.trial import ExecutorTrial
from ..properties.harness.mutants import Mutant
from ..properties.harness.suite import Suite
from ..properties.suites import register
from ..properties.suites import suite_of as suite_of  # offered here, since all contracts are registered then
from ..properties.transport.trial import TransportTrial
from .acceptance.trial import ProcessTrial

EXECUTOR = register(Suite(ExecutorTrial, ("foredraft.properties.executor.reference.adapter:make",)))
ACCEPTANCE = register(Suite(ProcessTrial, ("foredraft.checks.acceptance.core_subject:make",)))
MANAGER = register(Suite(ManagerTrial, ("foredraft.properties.block_manager.plain:make",)))
TRANSPORT = register(Suite(TransportTrial, ("foredraft.checks.adapters.handoff:make",)))

OURS: dict[str, dict[str, int]] = {
    "allocator": {
        "foredraft.checks.adapters.kv_allocator:make": 40_000,
        "foredraft.checks.adapters.kv_store:make": 40_000,
        "foredraft.properties.allocator.plain:make": 20_000,
    },
    "prefix-cache": {
        "foredraft.checks.adapters.radix_cache:make": 30_000,
        "foredraft.checks.adapters.prefix_store:make": 30_000,
        "foredraft.properties.prefix_cache.plain:make": 10_000,
    },
    "relay": {
        "foredraft.checks.adapters.future_map:make": 25_000,
        "foredraft.checks.adapters.future_map:make_poisoned": 20_000,
    },
    "accept": {
        "foredraft.checks.adapters.tree_accept:make": 8_000,
        "foredraft.properties.accept.plain:make": 1_200,
        "foredraft.checks.adapters.torch_accept:make": 2_000,
    },
    "acceptance-process": {"foredraft.checks.acceptance.core_subject:make": 800},
    "step-controller": {
        "foredraft.checks.adapters.step_controller:make_fixed": 20_000,
        "foredraft.checks.adapters.step_controller:make_ema": 15_000,
        "foredraft.checks.adapters.step_controller:make_goodput": 1_600,
    },
    "engine": {
        "foredraft.checks.adapters.core_engine:make": 45_000,
        "foredraft.checks.adapters.core_engine:make_by_other_rules": 20_000,
        "foredraft.properties.engine.plain:make": 8_000,
    },
    "executor": {
        "foredraft.properties.executor.reference.adapter:make": 3_000,
        "foredraft.checks.adapters.simulated_executor:make": 3_000,
        "foredraft.checks.adapters.torch_executor:make": 1_150,
    },
    "block-manager": {"foredraft.properties.block_manager.plain:make": 15_000},
    "transport": {"foredraft.checks.adapters.handoff:make": 7_000},
    "simulator": {"foredraft.checks.adapters.simulator:make": 420},
}
"""Contract -> our components, under the names that reports and cases have. Each can be loaded if what it needs is
installed. The number is that of the operations of a check without a budget: more where a component has more states,
about a minute in all on two cores."""

SUBJECTS: dict[str, tuple[str, ...]] = {contract: tuple(ours) for contract, ours in OURS.items()}
OPERATIONS: dict[str, int] = {name: number for ours in OURS.values() for name, number in ours.items()}


def contracts() -> tuple[str, ...]:
    return tuple(SUBJECTS)


MUTANTS = {contract: f".mutants.{contract.replace('-', '_')}" for contract in OURS} | {
    "acceptance-process": ".acceptance.mutants"
}
"""Contract -> the module that has its planted defects."""


def mutants_of(contract: str) -> tuple[Mutant, ...]:
    """Return the planted defects of a contract. Raises ConfigError for one that there is not."""
    return import_module(MUTANTS[suite_of(contract).name], __package__).MUTANTS
