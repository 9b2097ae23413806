"""The common part of all contracts: versions, refusals of a component, its possible failures, and the declaration of
capabilities.

A contract is a package such as `allocator/`. In that folder, `contract.py` has the methods that a component must offer
(a Protocol), `model.py` has what must be true, and `trial.py` has the operations, their values, and their effect on
both. The checkers stand in `invariants/`, a file per group of the catalogue; `foredraft.checks.mutants` has the planted
defects that they must find.

Methods are synchronous, take integers and lists, and return integers and sequences of integers (lists, tuples, NumPy
arrays, or anything with `tolist`). What a component can do beyond the minimum is declared, never guessed: an absent
capability is skipped with its reason, a declared one that is not there is reported. The import needs neither pytest nor
hypothesis nor torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import update_wrapper
from types import FunctionType
from typing import Any, ClassVar, Self

from ...core.errors import ConfigError, ForedraftError, Problem, nearest

SUITE_VERSION = "2026.3"
"""What a stored case and a report were made with.
It changes whenever the meaning of an operation or an invariant does."""

REFUSALS: tuple[type[Exception], ...] = (ForedraftError, ValueError, RuntimeError, MemoryError, AssertionError)
"""How a component may say no. IndexError, KeyError, TypeError, AttributeError are accidents and are
reported as such."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Base of the declarations of components: a dataclass of flags. Each flag adds methods, operations that call them,
    and invariants."""

    FOUNDATIONS: ClassVar[dict[str, tuple[str, ...]]] = {}
    """Capability -> those that it makes no sense without."""

    RELAXES: ClassVar[tuple[str, ...]] = ()
    """Those that ask less of a component instead of more; `all` leaves them out."""

    VISIBLE: ClassVar[tuple[str, ...]] = ()
    """Capabilities that change answers to operations which need no capability;
    a control must have exactly those of the component."""

    def covers(self, others: Capabilities) -> bool:
        """Return whether a component with these capabilities answers as one with the others should."""
        missing, more = set(others.declared) - set(self.declared), set(self.declared) - set(others.declared)
        return not missing.difference(self.RELAXES) and not more.intersection(self.VISIBLE)

    @property
    def declared(self) -> tuple[str, ...]:
        return tuple(field.name for field in fields(self) if getattr(self, field.name))

    @classmethod
    def all(cls) -> Self:
        """Return every capability of the contract, those aside that ask for less."""
        return cls(**{field.name: field.name not in cls.RELAXES for field in fields(cls)})

    @classmethod
    def of(cls, names: Iterable[str] | Self, source: str = "capabilities") -> Self:
        """Build the capabilities from a list of names. Raises ConfigError for an unknown capability, and for one that
        needs another capability that is missing."""
        known = [field.name for field in fields(cls)]
        names = [*names.declared] if isinstance(names, Capabilities) else [str(name) for name in names]
        there_are = f"there are {', '.join(known)}" if known else "this contract has none"
        problems = [
            Problem(name, f"no such capability{nearest(name, known)}; {there_are}")
            for name in names
            if name not in known
        ]
        problems += [
            Problem(name, f"needs the capability {foundation} as well")
            for name in names
            for foundation in cls.FOUNDATIONS.get(name, ())
            if foundation not in names
        ]
        if problems:
            raise ConfigError(source, problems)
        return cls(**dict.fromkeys(names, True))


# What a component can get wrong without breaking an invariant: ids of their own, reported in the same way.
MISBEHAVIOURS: dict[str, str] = {
    "RAISES": "a call ends or is refused as the contract says; it does not raise something else",
    "HANGS": "a call returns in bounded time",
    "TYPE": "an answer has the type and shape that the contract says",
    "ANSWER": "an answer says what the contract lets it say at that point",
    "CAPABILITY": "what is declared is there",
}


def needs(*capabilities: str) -> Callable[[Callable], Callable]:
    """Return a decorator for a method of a Protocol: a component with any of these has it.
    (Elsewhere `needs` means all.)"""

    def mark(method: Callable) -> Callable:
        method.needs = capabilities
        return method

    return mark


def promised_by(protocol: type) -> dict[str, tuple[str, ...]]:
    """Return the methods that each capability promises, those of every component under ""."""
    found: dict[str, tuple[str, ...]] = {}
    for name, method in vars(protocol).items():
        if isinstance(method, FunctionType) and not name.startswith("_"):
            for capability in getattr(method, "needs", ("",)):
                found[capability] = (*found.get(capability, ()), name)
    return found


class Adapter:
    """A `make` with its declarations: the capabilities, and the configurations that it supports (all by default)."""

    def __init__(self, make: Callable[[Any], Any], capabilities: Any, supports: Callable[[Any], bool] | None) -> None:
        update_wrapper(self, make, updated=())
        self._make = make
        self.capabilities = capabilities
        self.parts = parts_of(make)
        if supports is not None:
            self.supports = supports

    def __call__(self, config: Any) -> Any:
        return self._make(config)


def capabilities_of(make: Callable[[Any], Any]) -> Any:
    """Return the capabilities that `make` declares itself; none if it does not."""
    return getattr(make, "capabilities", ())


def parts_of(make: Callable[[Any], Any]) -> tuple[str, ...]:
    """Return the names of optional parts that only the component sees: how often each was used stands in its attribute
    `used_parts`, a mapping."""
    return tuple(getattr(make, "parts", ()))


def supports_of(make: Callable[[Any], Any]) -> Callable[[Any], bool]:
    """Return the function that says which configurations `make` can build: `make.supports`, all if there is none."""
    return getattr(make, "supports", lambda config: True)
