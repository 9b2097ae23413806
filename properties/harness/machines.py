"""Hypothesis over the same operations, models and invariants as the swarm's, for tests that have rules of their own.

    TestMine = machine(suite_of("allocator"), lambda config: MyAllocator(config.num_pages)).TestCase

Hypothesis draws a letter and applies it. The shrinker of the suite makes a failure short: Hypothesis's own removes at
most five draws at a time, and an operation has up to ten arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from ...core.draws import Purpose, hash64
from .contract import Capabilities
from .importing import name_of
from .letters import weighted
from .operation import Operation
from .report import Failure
from .shrink import explain
from .suite import Component, Suite
from .swarm import Found
from .trial import Trial, Violation

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

_BITS = st.integers(0, 2**32 - 1)


class Explained(Violation):
    """A failure of a machine, which is made short when its text or its `failure` is asked for."""

    def __init__(self, component: Component, found: Found) -> None:
        super().__init__(found.violation.operation, found.violation.broken)
        self._known = component, found

    @cached_property
    def failure(self) -> Failure | None:
        """What a report has of it. None if it does not happen again, as rules of your own are not among the
        operations."""
        component, found = self._known
        failure = explain(component, component.invariants, found, name_of(component.make))
        return failure if failure.case.replay(component.make) is not None else None

    def __str__(self) -> str:
        return super().__str__() if self.failure is None else f"\n{self.failure.text()}"


class TrialMachine(RuleBasedStateMachine):
    """A trial as a state machine. `machine` makes the subclass of a component, which may have rules of your own: what a
    rule does to `self.trial` by `self.apply(operation)` is checked."""

    component: Component
    trial: Trial | None = None  # once it has begun

    def start_with(self, bits: int, left_out: Iterable[str]) -> None:
        """Make the component, in the first supported configuration that these bits give, and its model. Operations of
        the kinds that are left out are not drawn, if there are others: what an even mix does not reach is reached
        without some."""
        drawn = self.component.first_supported(lambda attempt: int(hash64(bits, Purpose.SWARM, 0, attempt)))
        self.config, self.choices = drawn
        letters = weighted(self.component.vocabulary(self.config))
        self.letters = st.sampled_from([one for one in letters if one.kind.tag not in left_out] or letters)
        self.ends = ExitStack()
        self.ends.enter_context(getattr(self.component.make, "planted", nullcontext)())  # the defect of a mutant
        with self._judged():
            self.trial = self.component.start(self.config, self.component.invariants)

    def apply(self, operation: Operation) -> None:
        """Carry out one operation and check everything. Raises Violation."""
        with self._judged():
            self.trial.apply(operation)

    @contextmanager
    def _judged(self) -> Iterator[None]:
        try:
            with self.component.judged(lambda: self.trial, self.component.limit_s):
                yield
        except Violation as violation:
            trace = tuple(self.trial.trace) if self.trial is not None else ()
            found = Found(0, 0, self.config, trace, violation, self.choices)
            raise Explained(self.component, found) from violation.__cause__

    def teardown(self) -> None:
        with self.ends:
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

    @rule(operation=_operation())
    def then(self: TrialMachine, operation: Operation | None) -> None:
        if operation is not None:
            self.apply(operation)

    start = initialize(bits=_BITS, left_out=some)(TrialMachine.start_with)
    members = {"start": start, "then": then, "component": component}
    made: Any = type(f"{suite.name.title().replace('-', '')}Machine", (TrialMachine,), members)
    made.TestCase.settings = SETTINGS
    return made


@st.composite
def _operation(draw: Any) -> Operation | None:
    """Draw an operation that makes sense in the state of the machine. Returns None if none of several does."""
    now = draw(st.runner())
    for _ in range(MAX_TRIES):
        letter = draw(now.letters)
        operation = letter.operation(draw(_BITS))
        if now.trial.makes_sense(operation):
            return operation
    return None
