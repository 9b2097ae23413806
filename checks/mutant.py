"""Planted defects, and whether the suite finds them. An invariant that no defect can break proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..properties.harness.report import Failure
from ..properties.harness.shrink import explain
from ..properties.harness.swarm import Budget, Found, Swarm
from ..properties.suites import suite_of

MAX_SHRUNK = 20
"""Operations that a shrunk history may have."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A component with one defect. `caught_by`: at least one of these invariants must be broken when the defect is
    found."""

    name: str
    defect: str
    contract: str
    make: Callable[[Any], Any]
    caught_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Kill:
    """The result for a mutant: `broken` are the invariants broken at the first failure, none if it survived."""

    mutant: Mutant
    broken: tuple[str, ...]
    num_operations: int
    failure: Failure | None

    @property
    def is_killed(self) -> bool:
        """Whether it was found for one of the expected reasons and shrunk to a short history."""
        found = any(id in self.broken for id in self.mutant.caught_by)
        return found and len(self.failure.case.operations) <= MAX_SHRUNK

    def line(self) -> str:
        if self.failure is None:
            return f"{self.mutant.name:<26} SURVIVED {self.num_operations:,} operations: {self.mutant.defect}"
        verdict = "killed" if self.is_killed else "NOT KILLED AS IT SHOULD"
        what = f"{', '.join(self.broken)} after {self.num_operations:,} operations, shrunk to {len(self.failure.case.operations)}"
        return f"{self.mutant.name:<26} {verdict} by {what}: {self.mutant.defect}"

    def to_json(self) -> dict[str, Any]:
        return {
            "mutant": self.mutant.name,
            "defect": self.mutant.defect,
            "expected": list(self.mutant.caught_by),
            "killed": self.is_killed,
            "broken": list(self.broken),
            "operations": self.num_operations,
            "case": self.failure.case.to_json() if self.failure is not None else None,
        }


def find(mutant: Mutant, budget: str | int | Budget | None = None, seed: int = 1) -> tuple[Found | None, int]:
    """Search for the mutant's defect, within the quick budget of its contract.
    Returns the first failing run, and the operations so far."""
    component = suite_of(mutant.contract).component(mutant.make)
    swarm = Swarm(component, seed)
    found = swarm.search(component.invariants, Budget.of(component.suite.quick if budget is None else budget))
    return found, swarm.num_operations


def kill(mutant: Mutant, budget: str | int | Budget | None = None, seed: int = 1) -> Kill:
    """Search for the mutant's defect as `find` does, and shrink the failure."""
    found, num_operations = find(mutant, budget, seed)
    if found is None:
        return Kill(mutant, (), num_operations, None)
    component = suite_of(mutant.contract).component(mutant.make)
    failure = explain(component, component.invariants, found, f"mutant {mutant.name}")
    return Kill(mutant, tuple(item.id for item in found.violation.broken), num_operations, failure)
