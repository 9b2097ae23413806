"""Our components of each contract, and where its planted defects stand."""

from __future__ import annotations

from importlib import import_module

from ..properties.suites import suite_of as suite_of
from .mutant import Mutant

OURS: dict[str, dict[str, int]] = {
    "allocator": {
        "foredraft.checks.adapters.kv_allocator:make": 40_000,
        "foredraft.checks.adapters.kv_store:make": 40_000,
        "foredraft.checks.adapters.kv_store:make_with_groups": 20_000,
        "foredraft.properties.allocator.plain:make": 20_000,
    },
    "prefix-cache": {
        "foredraft.checks.adapters.radix_cache:make": 30_000,
        "foredraft.checks.adapters.prefix_store:make": 30_000,
        "foredraft.checks.adapters.prefix_store:make_with_groups": 20_000,
        "foredraft.properties.prefix_cache.plain:make": 10_000,
    },
    "relay": {
        "foredraft.checks.adapters.future_map:make": 25_000,
        "foredraft.checks.adapters.future_map:make_poisoned": 20_000,
    },
    "accept": {
        "foredraft.checks.adapters.tree_accept:make": 8_000,
        "foredraft.checks.adapters.tree_accept:make_block": 1_200,
        "foredraft.properties.accept.plain:make": 1_200,
        "foredraft.checks.adapters.torch_accept:make": 2_000,
        "foredraft.checks.adapters.torch_accept:make_block": 600,
    },
    "step-controller": {
        "foredraft.checks.adapters.step_controller:make_fixed": 20_000,
        "foredraft.checks.adapters.step_controller:make_ema": 15_000,
        "foredraft.checks.adapters.step_controller:make_goodput": 1_600,
    },
    "engine": {
        "foredraft.checks.adapters.core_engine:make": 45_000,
        "foredraft.checks.adapters.core_engine:make_by_other_rules": 20_000,
        "foredraft.checks.adapters.core_engine:make_with_groups": 20_000,
        "foredraft.checks.adapters.core_engine:make_by_confidence": 15_000,
        "foredraft.properties.engine.plain:make": 8_000,
    },
    "executor": {
        "foredraft.properties.executor.reference.adapter:make": 3_000,
        "foredraft.checks.adapters.simulated_executor:make": 3_000,
        "foredraft.checks.adapters.torch_executor:make": 1_150,
        "foredraft.checks.adapters.torch_executor:make_block": 1_000,
        "foredraft.checks.adapters.torch_executor:make_hybrid": 600,
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


def mutants_of(contract: str) -> tuple[Mutant, ...]:
    """Return the planted defects of a contract. Raises ConfigError for one that there is not."""
    return import_module(f".mutants.{suite_of(contract).name.replace('-', '_')}", __package__).MUTANTS
