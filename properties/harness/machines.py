"""Hypothesis over the same operations, models and invariants as the swarm's: state machines, and strategies for tests
of your own.

    TestMine = machine("allocator", lambda config: MyAllocator(config.num_pages)).TestCase

Hypothesis looks for short histories and shrinks its own failures. The swarm is much faster and finds failures that need
long histories.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ..suites import suite_of
from .contract import Adapter, Capabilities
from .letters import Letter, vocabulary_of
from .operation import Operation
from .suite import RUN_LIMIT_S, alarm
from .trial import Trial


def configs(
    contract: str, capabilities: Capabilities, supports: Callable[[Any], bool] | None = None
) -> st.SearchStrategy[Any]:
    """Return a strategy for small configurations that are supported, from the choices that the swarm has."""
    component = suite_of(contract).component(Adapter(None, capabilities, supports))

    @st.composite
    def drawn(draw: Any) -> Any:
        return component.configure(lambda values: draw(st.sampled_from(values)))

    if supports is None:
        return drawn()
    seeds = st.integers(0, 2**64 - 1)
    return seeds.map(lambda seed: component.first_supported(lambda attempt: seed + attempt)[0])


def operations(contract: str, config: Any, capabilities: Capabilities) -> st.SearchStrategy[Operation]:
    """Return a strategy for the operations that these capabilities allow, hostile ones and those that make no sense in
    a state included."""
    spoken = vocabulary_of(suite_of(contract).trial.declared, config, capabilities)
    return st.one_of([_of(letter) for letters in spoken.values() for letter in letters])


def _of(letter: Letter, trial: Trial | None = None) -> st.SearchStrategy[Operation]:
    """Return the operations of a letter, in a trial only those that make sense in its state."""
    first = () if trial is None else letter.sensible(trial)
    rest = [st.sampled_from(tuple(dict.fromkeys(v))) for v in letter.arguments[letter.kind.num_when if trial else 0 :]]
    if trial is None:
        return st.builds(letter.kind, *rest)
    return st.tuples(st.sampled_from(first), *rest).map(lambda drawn: letter.kind(*drawn[0], *drawn[1:]))


@st.composite
def histories(draw: Any, contract: str, capabilities: Capabilities, max_size: int = 30) -> tuple[Any, list[Operation]]:
    """Draw a configuration and a sequence of operations for it."""
    config = draw(configs(contract, capabilities))
    return config, draw(st.lists(operations(contract, config, capabilities), max_size=max_size))


class TrialMachine(RuleBasedStateMachine):
    """A trial as a state machine. `machine` makes the subclass that has the rules of a contract."""

    limit_s: float

    def __init__(self) -> None:
        super().__init__()
        self.trial: Trial | None = None
        self.planted = ExitStack()  # the defect of a mutant
        self.letters: dict[type[Operation], list[Letter]] = {}

    def possible(self, kind: type[Operation]) -> st.SearchStrategy[Operation]:
        """Return the operations of this kind that make sense now."""
        return st.one_of([_of(letter, self.trial) for letter in self.letters[kind] if letter.sensible(self.trial)])

    def is_possible(self, kind: type[Operation]) -> bool:
        return any(letter.sensible(self.trial) for letter in self.letters.get(kind, ()))

    def carry_out(self, operation: Operation) -> None:
        with alarm(self.limit_s):
            self.trial.apply(operation)

    def teardown(self) -> None:
        # After a failure the subject's state means nothing any more.
        with self.planted:
            if self.trial is not None and not self.trial.failed:
                with alarm(self.limit_s):
                    self.trial.drain()


def machine(
    contract: str, make: Callable[[Any], Any], capabilities: Capabilities | Iterable[str] | None = None
) -> type[RuleBasedStateMachine]:
    """Make a state machine with a rule for each of the contract's operations; everything is checked after each, and
    drained at the end.

    `capabilities` as in `conformance.check`. A broken invariant is a `Violation` in the machine's test. What takes two
    runs to see is left to the swarm.
    """
    component = suite_of(contract).component(make, capabilities)

    @initialize(config=configs(contract, component.capabilities, getattr(make, "supports", None)))
    def start(self: TrialMachine, config: Any) -> None:
        self.planted.enter_context(getattr(make, "planted", nullcontext)())
        self.trial = component.start(config, component.invariants)
        for letters in component.vocabulary(config).values():
            for letter in letters:
                self.letters.setdefault(letter.kind, []).append(letter)

    members: dict[str, Any] = {kind.tag.replace("-", "_"): _rule_of(kind) for kind in component.operations}
    members |= {"start": start, "limit_s": component.suite.trial.limit_s or RUN_LIMIT_S}
    return type(f"{contract.title().replace('-', '')}Machine", (TrialMachine,), members)


def _rule_of(kind: type[Operation]) -> Any:
    """Make the rule of one operation. It is drawn where the state allows it, with arguments that the state allows."""

    @precondition(lambda self: self.is_possible(kind))
    @rule(operation=st.runner().flatmap(lambda self: self.possible(kind)))
    def carry_out(self: TrialMachine, operation: Operation) -> None:
        self.carry_out(operation)

    carry_out.__name__ = carry_out.__qualname__ = kind.tag.replace("-", "_")
    carry_out.__doc__ = kind.__doc__
    return carry_out
