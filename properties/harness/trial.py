"""A trial: one component and its model in lockstep, under one sequence of operations, with everything checked after
each.

Every contract has its own subclass, which knows how to carry an operation out on both. This module has the common part:
the checkers to run, the counts, the reading of a component's answers, and the report of a failure.
"""

from __future__ import annotations

import operator
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, get_type_hints

from ...core.errors import InvariantViolation
from .contract import MISBEHAVIOURS, REFUSALS, Capabilities, promised_by
from .invariants import Checker, Finding, Invariant, invariant
from .operation import Declared, Operation, Values
from .text import shortened, shown

SHOWN_FRAMES = 3
MAX_ARGUMENT, MAX_ANSWER = 40, 60  # characters that a history shows of arrays and objects; plain data is not cut
_INTEGERS = frozenset({int})
_HARNESS = frozenset(str(path) for path in Path(__file__).parent.glob("*.py"))


class Broken(NamedTuple):
    """One broken invariant (or misbehaviour), with the checker's finding; `kind` tells misbehaviours of one id
    apart."""

    id: str
    finding: Finding
    kind: str = ""

    @property
    def sentence(self) -> str:
        return MISBEHAVIOURS.get(self.id) or invariant(self.id).sentence


class Violation(Exception):
    """A trial has failed: the operation, and the broken invariants. The first one names the failure."""

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


class LeftOut(Exception):
    """An operation makes no sense in the state of the trial."""


class Refused(NamedTuple):
    """The component said no, and how."""

    reason: str


class Trial:
    """Base of the trials of all contracts: one component under operations, beside a model of it.

    A subclass declares its operations (`operation.py`), and sets `moment`, the value that the checkers look at. A
    subclass describes its contract in class variables, and annotates `subject`, `config` and `capabilities`. `begin`
    and `end` stand around every operation.
    """

    contract: ClassVar[str]
    config_type: ClassVar[type]  # of `config`: a data class with `draw(choose, capabilities)`, as `Choices` says
    capabilities_type: ClassVar[type[Capabilities]]  # of `capabilities`
    methods: ClassVar[dict[str, tuple[str, ...]]] = {}  # those of `subject`, by capability (`promised_by`)
    looks: ClassVar[tuple[str, ...]] = ()  # methods called after every operation: a history leaves them out
    quick: ClassVar[int]  # operations that are enough to find every planted defect
    run_length: ClassVar[int] = 200  # operations of one run
    limit_s: ClassVar[float | None] = None  # how long a run may take, if not as long as most
    # Optional parts of a component that a run may use -> the capability that promises it, "" for none. `use` counts.
    parts: ClassVar[Mapping[str, str]] = {}
    refuses_by_violation: ClassVar[bool] = False  # whether an InvariantViolation of the component is a refusal, too

    values: ClassVar[dict[str, Values]] = {}  # name of a parameter of operations -> the values that it may have
    declared: ClassVar[tuple[Declared, ...]] = ()
    operations: ClassVar[tuple[type[Operation], ...]] = ()

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        found = {name: item for base in reversed(cls.__mro__) for name, item in vars(base).items()}
        cls.declared = tuple(item for item in found.values() if isinstance(item, Declared))
        for item in cls.declared:
            item.complete(cls.values)
        cls.operations = tuple(item.kind for item in cls.declared)
        unused = cls.values.keys() - {name for kind in cls.operations for name in kind.__match_args__}
        assert not unused, f"{cls.__name__}: no operation has {sorted(unused)}"
        if "contract" in vars(cls):
            hints = get_type_hints(cls)
            cls.config_type, cls.capabilities_type = hints["config"], hints["capabilities"]
            cls.methods = promised_by(hints["subject"])

    def __init__(self, subject: Any, config: Any, capabilities: Any, invariants: Iterable[Invariant]) -> None:
        check_methods(subject, self.methods, capabilities)
        self.subject = subject
        self.config = config
        self.capabilities = capabilities
        self.invariants = tuple(invariants)
        self._checks: dict[type, list[tuple[int, Checker]]] = {}  # kind of operation -> (number, checker)
        self.evaluations = [0] * len(self.invariants)
        self.num_operations = 0
        self.executed: dict[type[Operation], int] = {}
        self.used: dict[str, int] = {}  # how often each optional part was used
        self.trace: list[Operation] = []  # what was carried out, draining included, to the one that failed
        self.transcript: list[object] = []
        self.calls: list[str] | None = None  # the calls of the component by `ask` and `must`, where a history is shown
        self.operation: Operation | str = "make"
        self.make: Callable[[Any], Any]  # makes another subject, from when this trial is made
        self.moment: Any = None
        self.failed = False
        self.prepare()
        if self.moment is not None:
            self.check()

    def prepare(self) -> None:
        """Make the first moment, which is checked at once. A subclass makes its model before."""
        self.begin(self.operation)
        self.end()

    @classmethod
    def twin_config(cls, kind: str, config: Any) -> Any:
        """Return the other configuration of an invariant over two runs, None if there is none."""
        return config

    def makes_sense(self, operation: Operation) -> bool:
        """Return whether the operation can be carried out in this state, by its `when`."""
        kind = type(operation)
        return kind.when is None or kind.when(self, *operation.arguments[: kind.num_when])

    def apply(self, operation: Operation) -> bool:
        """Carry out one operation and check everything.
        Raises Violation; returns False if the operation was left out."""
        if not self.makes_sense(operation):
            return False
        kind, self.operation = type(operation), operation
        self.trace.append(operation)
        self.begin(operation)
        try:
            kind.body(self, *operation.arguments)
        except LeftOut:
            self.trace.pop()
            return False
        self.count(kind)
        return True

    def only_if(self, condition: object) -> None:
        """Leave the operation out if the condition does not hold. To be called before anything has changed."""
        if not condition:
            raise LeftOut

    @contextmanager
    def stage(self, name: str) -> Iterator[Any]:
        """Check what happens in the body as after an operation. Yields the moment of it."""
        self.operation = name
        self.begin(name)
        yield self.moment
        self.end()
        self.check()

    def count(self, kind: type[Operation]) -> None:
        """Finish an operation that was carried out: observe its effects, count it, and run the checkers.
        Raises Violation."""
        self.end()
        self.num_operations += 1
        self.executed[kind] = self.executed.get(kind, 0) + 1
        self.check()

    def begin(self, operation: Operation | str) -> None:
        """Make the moment ready for the next operation."""

    def end(self) -> None:
        """Observe the changes by the operation."""

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
                if not item.twin and item.concerns(kind)
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

    def use(self, parts: Mapping[str, object]) -> None:
        """Count those optional parts that are used now."""
        for part, is_used in parts.items():
            self.used[part] = self.used.get(part, 0) + bool(is_used)

    def all_used(self) -> dict[str, int]:
        """Return how often each optional part was used, of those that only the component sees, too (`parts_of`)."""
        return self.used | dict(getattr(self.subject, "used_parts", {}))

    def drain(self) -> None:
        """Stop all faults, give everything back, and check that everything is there.
        Do nothing, where nothing is held."""

    def last_report(self) -> str:
        """Return the text of a report about the last operation: its refusal, or the component's answer."""
        refusal = getattr(self.moment, "refusal", None)
        return self.describe() if refusal is None else f"refused ({refusal})"

    def describe(self) -> str:
        """Return the component's answer to the last operation, which it did not refuse."""
        return "done"

    # -- asking the component ---------------------------------------------------------------------------------------

    def ask(self, method: Callable[..., Any], *arguments: object) -> Any:
        """Call the component where it may refuse: its answer, or Refused.
        Anything else that it raises is a violation."""
        try:
            return self.call(method, *arguments)
        except REFUSALS as error:
            is_refusal = self.refuses_by_violation or not isinstance(error, InvariantViolation)
            if isinstance(error, NotImplementedError | RecursionError) or not is_refusal:
                raise self._accident(method, error) from error
            return Refused(f"{type(error).__name__}: {error}")
        except Exception as error:
            raise self._accident(method, error) from error

    def refused(self, answer: object, *no: object) -> bool:
        """Return whether an answer is a refusal: what `ask` has caught, or one of `no` (False if not given).
        If so, note it."""
        if any(answer is item for item in no or (False,)):
            answer = Refused(str(answer))
        if isinstance(answer, Refused):
            self.moment.refusal = answer.reason
        return isinstance(answer, Refused)

    def carry_out(self, method: Callable[..., Any], *arguments: object) -> None:
        """Call the component where it must not refuse.
        Raises Violation if it raises or returns False; `must` ignores what is returned."""
        if self.refused(self.ask(method, *arguments)):
            was = f"{getattr(method, '__name__', self.operation)} was refused: {self.moment.refusal}"
            raise self.misbehaviour("RAISES", was, "it is carried out")

    def must(self, method: Callable[..., Any], *arguments: object) -> Any:
        """Call the component where it has nothing to refuse."""
        try:
            return self.call(method, *arguments)
        except Exception as error:
            raise self._accident(method, error) from error

    def call(self, method: Callable[..., Any], *arguments: object) -> Any:
        """Call the component, and record the call and its answer if the history is reported.

        An adapter with `own_calls` notes there the calls that it makes itself, as text: these are shown instead.
        """
        if self.calls is None or (name := getattr(method, "__name__", "?")) in self.looks:
            return method(*arguments)
        call = f"{name}({', '.join(shortened(value, MAX_ARGUMENT) for value in arguments)})"
        own: list[str] = []
        has_own = hasattr(self.subject, "own_calls")
        if has_own:
            self.subject.own_calls = own
        try:
            answer = method(*arguments)
        except Exception as error:
            call += f" raised {type(error).__name__}"
            raise
        else:
            call += f" -> {shortened(answer, MAX_ANSWER)}"
        finally:
            self.calls += own or [call]
            if has_own:
                self.subject.own_calls = None
        return answer

    def _accident(self, method: Callable[..., Any], error: Exception) -> Violation:
        name = getattr(method, "__name__", repr(method))
        if isinstance(error, NotImplementedError):
            return self.misbehaviour("CAPABILITY", f"{name} is not implemented", "a declared capability is there")
        kind = f"{name} raised {type(error).__name__}"
        where = frames(error)
        should = "an answer, or a refusal (None, or one of the error types) where one is due"
        return self.misbehaviour("RAISES", f"{kind}: {error}{where}", should, kind)

    def misbehaviour(self, id: str, was: str, should: str, kind: str = "") -> Violation:
        """Return the exception for a misbehaviour that belongs to no invariant."""
        self.failed = True
        return Violation(self.operation, [Broken(id, Finding(was, should, MISBEHAVIOURS[id]), kind)])

    def sequence(self, answer: object, what: str, should: str = "a list", length: int | None = None) -> Sequence[Any]:
        """Return a list, a tuple or an array (as a list), of so many entries if a length is given;
        `should` is what the contract says of it."""
        plain = answer.tolist() if hasattr(answer, "tolist") else answer
        if isinstance(plain, list | tuple) and length in (None, len(plain)):
            return plain
        raise self.misbehaviour("TYPE", f"{what} is {shown(answer)}", should)

    def mapping(self, answer: object, what: str, should: str, keys: Iterable[str] = ()) -> Mapping[str, Any]:
        """Return a mapping that has all of these keys."""
        if not isinstance(answer, Mapping):
            raise self.misbehaviour("TYPE", f"{what} is {shown(answer)}", should)
        missing = [key for key in keys if key not in answer]
        if missing:
            raise self.misbehaviour("TYPE", f"{what} has no {', '.join(missing)}", should)
        return answer

    def integer(self, answer: object, what: str) -> int:
        if type(answer) is int:
            return answer
        try:
            if isinstance(answer, bool):
                raise TypeError
            return operator.index(answer)
        except TypeError:
            raise self.misbehaviour("TYPE", f"{what} is {shown(answer)}", "an integer") from None

    def integers(self, answer: object, what: str, length: int | None = None) -> tuple[int, ...]:
        """Return a flat sequence of integers as a tuple, of this length if one is given:
        a list, an array, anything with `tolist`."""
        if length is not None:
            found = self.integers(answer, what)
            if len(found) != length:
                raise self.misbehaviour("TYPE", f"{what} has {len(found)} entries", f"{length} entries")
            return found
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
        raise self.misbehaviour("TYPE", f"{what} is {shown(answer)}", "a flat sequence of integers")


def check_methods(subject: object, promised: dict[str, tuple[str, ...]], capabilities: Any) -> None:
    """Raise a Violation (CAPABILITY) if a declared capability's methods are not there."""
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


def frames(error: BaseException) -> str:
    """Return the last places that an exception came through in the component, a line each, the innermost last."""
    through = traceback.extract_tb(error.__traceback__)[1:]  # the first is the caller
    return "".join(
        f"\n         {Path(place.filename).name}:{place.lineno} in {place.name}: {place.line}"
        for place in [place for place in through if place.filename not in _HARNESS][-SHOWN_FRAMES:]
    )
