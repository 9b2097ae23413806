"""A trial: one component and its model in lockstep, under one sequence of operations, with everything checked after each.

Every contract has its own subclass, which knows how to carry an operation out on both. What is the same for all is here: which
checkers run, what is counted, how a component's answers are taken, and what becomes of a failure.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

from ..core.errors import InvariantViolation
from .contracts import MISBEHAVIOURS, REFUSALS
from .invariants.registry import Checker, Finding, Invariant, invariant
from .operations import Operation

_INTEGERS = frozenset({int})


class Broken(NamedTuple):
    """One broken invariant (or misbehaviour), with what the checker found."""

    id: str
    finding: Finding

    @property
    def sentence(self) -> str:
        return MISBEHAVIOURS.get(self.id) or invariant(self.id).sentence


class Violation(Exception):
    """A trial has failed: at which operation, and what is broken; the first is what it is known by."""

    def __init__(self, operation: Operation | str, broken: Sequence[Broken]) -> None:
        super().__init__(operation, broken)
        self.operation = operation
        self.broken = tuple(broken)
        self.trial: Trial | None = None  # how far it came

    @property
    def id(self) -> str:
        return self.broken[0].id

    def __str__(self) -> str:
        first = self.broken[0]
        return f"{first.id} at {self.operation}: {first.finding.was}; expected: {first.finding.should}"


class Refused(NamedTuple):
    """The component said no, and how."""

    reason: str


class Trial:
    """Base of the trials of all contracts. A subclass fills `actions`, and sets `moment` before the checkers run.

    An action returns False when its operation makes no sense now; then nothing was done and nothing is checked.
    """

    actions: ClassVar[dict[type[Operation], Callable[[Any, Any], bool]]] = {}

    def __init__(self, invariants: Iterable[Invariant]) -> None:
        self.invariants = tuple(invariants)
        self._checks: dict[type, list[tuple[int, Checker]]] = {}  # kind of operation -> (number, checker)
        self.evaluations = [0] * len(self.invariants)
        self.num_operations = 0
        self.executed: dict[type[Operation], int] = {}
        self.trace: list[Operation] = []  # what was carried out, draining included, to the one that failed
        self.transcript: list[object] = []
        self.operation: Operation | str = "make"
        self.moment: Any = None
        self.failed = False

    def apply(self, operation: Operation) -> bool:
        """Carry out one operation and check everything. Raises Violation; returns False if the operation was left out."""
        self.operation = operation
        kind = type(operation)
        self.trace.append(operation)
        if not self.actions[kind](self, operation):
            self.trace.pop()
            return False
        self.num_operations += 1
        self.executed[kind] = self.executed.get(kind, 0) + 1
        self.check()
        return True

    def check(self) -> None:
        """Run every checker that the last operation concerns on the moment."""
        broken: list[Broken] = []
        moment, evaluations = self.moment, self.evaluations
        kind = type(self.operation)
        checks = self._checks.get(kind)
        if checks is None:
            checks = self._checks[kind] = [
                (number, item.check)
                for number, item in enumerate(self.invariants)
                if not item.twin and (not item.on or kind in item.on)
            ]
        for number, check in checks:
            outcome = check(moment)
            if outcome is None:
                continue
            evaluations[number] += 1
            if outcome is not True:
                broken.append(Broken(self.invariants[number].id, outcome))
        if broken:
            self.failed = True
            broken.sort(key=lambda item: invariant(item.id).telling, reverse=True)
            raise Violation(self.operation, broken)

    def drain(self) -> None:
        """Faults off: give everything back, and check that everything is there."""
        raise NotImplementedError

    def describe(self) -> str:
        """What a report says of the last operation: what the component answered."""
        raise NotImplementedError

    def state(self) -> object:
        """A value: trials of equal states go on equally. For the contracts that are searched in small scope."""
        raise NotImplementedError

    # -- asking the component ---------------------------------------------------------------------------------------

    def ask(self, method: Callable[..., Any], *arguments: object) -> Any:
        """Call the component where it may refuse: its answer, or Refused. Anything else that it raises is a violation."""
        try:
            return method(*arguments)
        except REFUSALS as error:
            if isinstance(error, NotImplementedError | RecursionError | InvariantViolation):
                raise self._accident(method, error) from error
            return Refused(f"{type(error).__name__}: {error}")
        except Exception as error:
            raise self._accident(method, error) from error

    def must(self, method: Callable[..., Any], *arguments: object) -> Any:
        """Call the component where it has nothing to refuse."""
        try:
            return method(*arguments)
        except Exception as error:
            raise self._accident(method, error) from error

    def _accident(self, method: Callable[..., Any], error: Exception) -> Violation:
        name = getattr(method, "__name__", repr(method))
        if isinstance(error, NotImplementedError):
            return self.misbehaviour("CAPABILITY", f"{name} is not implemented", "a declared capability is there")
        was = f"{name} raised {type(error).__name__}: {error}"
        return self.misbehaviour(
            "RAISES", was, "an answer, or a refusal (None, or one of the error types) where one is due"
        )

    def misbehaviour(self, id: str, was: str, should: str) -> Violation:
        """What to raise when the component does something that no invariant is about."""
        self.failed = True
        return Violation(self.operation, [Broken(id, Finding(was, should, MISBEHAVIOURS[id]))])

    def integer(self, answer: object, what: str) -> int:
        if type(answer) is int:
            return answer
        try:
            if isinstance(answer, bool):
                raise TypeError
            return operator.index(answer)
        except TypeError:
            raise self.misbehaviour("TYPE", f"{what} is {_shown(answer)}", "an integer") from None

    def integers(self, answer: object, what: str) -> tuple[int, ...]:
        """A flat sequence of integers as a tuple of ints: a list, a tuple, an array, anything with `tolist`."""
        if type(answer) is list and _INTEGERS.issuperset(map(type, answer)):
            return tuple(answer)
        tolist = getattr(answer, "tolist", None)
        plain = tolist() if tolist is not None else answer
        if isinstance(plain, list | tuple | range):
            plain = tuple(plain)
            if _INTEGERS.issuperset(map(type, plain)):
                return plain
            if not any(isinstance(item, bool) for item in plain):
                try:
                    return tuple(map(operator.index, plain))
                except TypeError:
                    pass
        raise self.misbehaviour("TYPE", f"{what} is {_shown(answer)}", "a flat sequence of integers")


def check_methods(subject: object, promised: dict[str, tuple[str, ...]], capabilities: Any) -> None:
    """Raises a Violation (CAPABILITY) if a declared capability's methods are not there."""
    missing = [
        f"{method} ({capability or 'every component has it'})"
        for capability, methods in promised.items()
        if not capability or getattr(capabilities, capability)
        for method in methods
        if not callable(getattr(subject, method, None))
    ]
    if missing:
        was = f"{type(subject).__name__} has no {', '.join(missing)}"
        raise Violation(
            "make", [Broken("CAPABILITY", Finding(was, "the methods of the contract", MISBEHAVIOURS["CAPABILITY"]))]
        )


def _shown(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) < 80 else text[:77] + '…'}"
