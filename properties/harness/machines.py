"""Hypothesis over the same operations, models and invariants as the swarm's, for tests that have rules of their own.

    TestMine = machine(suite_of("allocator"), lambda config: MyAllocator(config.num_pages)).TestCase

Hypothesis draws a letter and applies it. The shrinker of the suite makes a failure short: Hypothesis's own removes at
most five draws at a time, and an operation has up to ten arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from ...core.draws import Purpose, hash64
from .contract import Capabilities
from .importing import name_of
from .letters import Letter
from .operation import Operation
from .report import Failure
from .shrink import explain
from .suite import Component, Suite, alarm
from .swarm import Found
from .trial import Violation

MAX_TRIES = 12
"""Operations that are drawn until one makes sense in the state of the trial."""

SETTINGS = settings(
    deadline=None,
    stateful_step_count=50,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large),
)
"""The settings of a machine's test, if it sets no others. Hypothesis's own phases of shrinking and explaining are left
out: they take minutes where the suite takes seconds."""


@lru_cache(maxsize=1024)
def _places(length: int) -> st.SearchStrategy[int]:
    """Return a strategy for a place below `length`: one object, since Hypothesis validates each anew."""
    return st.integers(0, length - 1)


class Explained(Violation):
    """A failure of a machine with its shortest history; `failure` is what a report has of it."""

    def __init__(self, violation: Violation, failure: Failure) -> None:
        super().__init__(violation.operation, violation.broken)
        self.trial, self.failure = violation.trial, failure

    def __str__(self) -> str:
        return f"\n{self.failure.text()}"


class TrialMachine(RuleBasedStateMachine):
    """A trial as a state machine. `machine` makes the subclass of a component, which may have rules of your own: what a
    rule does to `self.trial` by `self.apply(operation)` is checked."""

    component: Component
    explained: dict[tuple[Any, ...], Violation]  # by operations: the first failure, shrunk

    def __init__(self) -> None:
        super().__init__()
        self.trial: Any = None  # the Trial, once it has begun
        self.letters: list[Letter] = []  # each as often as it weighs
        self._is_busy = False
        self._ends = ExitStack()  # of the defect of a mutant, and of the limit of time

    def start_with(self, bits: int, left_out: Iterable[str]) -> None:
        """Make the component, in the first supported configuration that these bits give, and its model. Operations of
        the kinds that are left out are not drawn, if there are others: what an even mix does not reach is reached
        without some."""
        drawn = self.component.first_supported(lambda attempt: int(hash64(bits, Purpose.SWARM, 0, attempt)))
        self.config, self.choices = drawn
        self._ends.enter_context(getattr(self.component.make, "planted", nullcontext)())
        self._ends.enter_context(alarm(self.component.limit_s, lambda: self._is_busy))
        spoken = self.component.vocabulary(self.config).values()
        letters = [letter for letters in spoken for letter in letters for _ in range(letter.weight)]
        self.letters = [letter for letter in letters if letter.kind.tag not in left_out] or letters
        with self._judged():
            self.trial = self.component.start(self.config, self.component.invariants)

    def draw(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> Operation | None:
        """Draw a letter, and one of its operations. Returns None if none was found that makes sense now."""
        for _ in range(MAX_TRIES):
            letter = self.letters[draw(_places(len(self.letters)))]
            operation = letter.operation(draw(_places(letter.size)))
            kind = letter.kind
            if kind.when is None or kind.when(self.trial, *operation.arguments[: kind.num_when]):
                return operation
        return None

    def apply(self, operation: Operation) -> None:
        """Carry out one operation and check everything. Raises Violation."""
        with self._judged():
            self.trial.apply(operation)

    @contextmanager
    def _judged(self) -> Iterator[None]:
        """Have the limit of time hold, and whatever goes wrong be a Violation."""
        self._is_busy = True
        try:
            at = lambda: "make" if self.trial is None else self.trial.operation  # noqa: E731
            with self.component.judged(at, self.component.limit_s):
                yield
        except Violation as violation:
            self._is_busy = False
            raise self._shrunk(violation) from violation.__cause__
        finally:
            self._is_busy = False

    def _shrunk(self, violation: Violation) -> Violation:
        """Return the same failure with a short history. Of several failures the first one is shrunk, and only if it
        fails again: rules of your own are not among the operations."""
        violation.trial = self.trial
        trace = (self.config, *(self.trial.trace if self.trial is not None else ()))
        if not self.explained:
            self._ends.close()  # a defect that is planted would be one of the control, too
            found = Found(0, 0, self.config, trace[1:], violation, self.choices)
            failure = explain(self.component, self.component.invariants, found, name_of(self.component.make))
            is_repeated = failure.case.replay(self.component.make)
            self.explained[trace] = Explained(violation, failure) if is_repeated else violation
        return self.explained.get(trace, violation)

    def teardown(self) -> None:
        # After a failure the subject's state means nothing any more.
        with self._ends:
            if self.trial is not None and not self.trial.failed:
                with self._judged():
                    self.trial.drain()


def machine(
    suite: Suite, make: Callable[[Any], Any], capabilities: Capabilities | Iterable[str] | None = None
) -> type[TrialMachine]:
    """Make a state machine of the operations of a contract, whose suite is given; everything is checked after each, and
    drained at the end.

    `capabilities` as in `conformance.check`. A broken invariant is a `Violation` in the machine's test. What takes two
    runs to see is left to the swarm.
    """
    component = suite.component(make, capabilities)
    kinds = [kind.tag for kind in component.operations]

    some = st.lists(st.sampled_from(kinds), unique=True, max_size=len(kinds) // 2)

    @initialize(bits=st.integers(0, 2**32 - 1), left_out=some)
    def start(self: TrialMachine, bits: int, left_out: list[str]) -> None:
        self.start_with(bits, left_out)

    @rule(operation=_OPERATION)
    def then(self: TrialMachine, operation: Operation | None) -> None:
        if operation is not None:
            self.apply(operation)

    members = {"start": start, "then": then, "component": component, "explained": {}}
    made: Any = type(f"{suite.name.title().replace('-', '')}Machine", (TrialMachine,), members)
    made.TestCase.settings = SETTINGS
    return made


@st.composite
def _operation(draw: Any) -> Any:
    """Draw an operation that makes sense in the state of the machine."""
    return draw(_RUNNER).draw(draw)


_RUNNER, _OPERATION = st.runner(), _operation()
