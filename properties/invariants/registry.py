"""The registry: every invariant of the catalogue, and the checker of those that have one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..harness.operation import Operation
from .catalogue import CATALOGUE


class Finding(NamedTuple):
    """What a checker found wrong: what was, what should have been, why that matters."""

    was: str
    should: str
    why: str


Outcome = Finding | bool | None
"""A checker's answer: None where it does not apply, True where it holds, a Finding where it does not."""

Checker = Callable[[Any], Outcome]

WHEN = {
    "E": "after every operation",
    "S": "at each scheduler step",
    "T": "when a request ends",
    "I": "idle, drained",
    "R": "over a whole run",
    "M": "two runs compared",
}

# The reference executor and its driver raise these in every cell of the matrix (`python -m foretoken.checks.matrix`).
BY_THE_MATRIX = {
    *("ALLOC-06", "ALLOC-07", "ALLOC-12", "ALLOC-15", "RADIX-10"),
    *("RELAY-01", "RELAY-02", "RELAY-03", "RELAY-05", "RELAY-06", "RELAY-07"),
    *("ACCEPT-02", "ACCEPT-03", "ACCEPT-06", "ACCEPT-08", "ACCEPT-10", "ACCEPT-16", "STEPS-01", "STEPS-10"),
    *("ENGINE-01", "ENGINE-02", "ENGINE-04", "ENGINE-05", "ENGINE-11", "ENGINE-13", "ENGINE-14", "SIM-12"),
}


@dataclass(frozen=True, slots=True)
class Invariant:
    """One statement. `contract` and `needs` (capabilities, all of them) say for which components `check` is run.

    `on` are the tags of the operations that it has something to say about; () is all of them.

    A `general` one is upset by almost any defect. With `twin`, it is about two runs of the same operations: `check` gets both trials,
    and the suite's `twin_config(twin, config)` says how the second one was configured.
    """

    id: str
    sentence: str
    group: str
    when: str
    contract: str = ""
    needs: tuple[str, ...] = ()
    check: Checker | None = None
    on: tuple[str | type[Operation], ...] = ()
    general: bool = False
    twin: str = ""

    @property
    def how(self) -> str:
        """How it is checked, or that it is not."""
        ways = []
        if self.check is not None:
            with_what = f" with {', '.join(self.needs)}" if self.needs else ""
            ways.append(f"contract {self.contract}{with_what}, {self.when_in_words}")
        if self.id in BY_THE_MATRIX:
            ways.append("in every cell of the matrix")
        return "; ".join(ways) or "not yet checked"

    @property
    def telling(self) -> int:
        """Of several that are broken at once, the one that says most names the failure: first what is about the operation itself."""
        return 0 if self.general else 1 if not self.on else 2

    @property
    def when_in_words(self) -> str:
        return " and ".join(WHEN[letter] for letter in self.when.split(","))

    def concerns(self, kind: type) -> bool:
        """Whether it has something to say about an operation of this kind; `str` is the kind of "make" and "drained"."""
        return not self.on or kind in self.on or getattr(kind, "tag", "") in self.on

    def missing(self, capabilities: object) -> tuple[str, ...]:
        """The capabilities that it needs and that are not declared."""
        return tuple(name for name in self.needs if not getattr(capabilities, name))


_REGISTRY: dict[str, Invariant] = {
    id: Invariant(id, sentence, group, when) for group, members in CATALOGUE.items() for id, sentence, when in members
}


def checks(
    id: str,
    contract: str,
    *needs: str,
    on: tuple[str | type[Operation], ...] = (),
    general: bool = False,
    twin: str = "",
) -> Callable[[Checker], Checker]:
    """Decorator: the one checker of invariant `id`, for components of `contract` that declare all of `needs`."""

    def register(check: Checker) -> Checker:
        assert _REGISTRY[id].check is None, f"{id} has a checker already"
        _REGISTRY[id] = replace(
            _REGISTRY[id], contract=contract, needs=needs, check=check, on=on, general=general, twin=twin
        )
        return check

    return register


def all_invariants() -> tuple[Invariant, ...]:
    """Every invariant in the order of the catalogue."""
    return tuple(_REGISTRY.values())


def invariant(id: str) -> Invariant:
    return _REGISTRY[id]


def of_contract(contract: str) -> tuple[Invariant, ...]:
    """The invariants that are checked for a contract, in the order of the catalogue."""
    return tuple(item for item in _REGISTRY.values() if item.contract == contract)
