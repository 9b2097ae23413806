"""Hypothesis over the same operations, models and invariants as the swarm's: state machines, and strategies for tests
of your own.

    TestMine = machine(suite_of("allocator"), lambda config: MyAllocator(config.num_pages)).TestCase

Hypothesis finds the failure, and the shrinker of the suite makes it short: Hypothesis's own removes at most five draws
at a time, and an operation has up to ten arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import lru_cache
from itertools import chain, product
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from .contract import Adapter, Capabilities
from .importing import name_of
from .letters import Letter, vocabulary_of
from .operation import Operation
from .report import Failure
from .shrink import explain
from .suite import DRAWN_FOR_SUPPORT, Component, Suite, alarm
from .swarm import Found
from .trial import Trial, Violation

MAX_TRIES = 6
"""Kinds of operations that are drawn until one makes sense. No other kind takes the place of one that does not: the
shrinker would come to histories in which the place of a kind depends on all that was done before."""
KEPT_CONFIGS = 200
"""Configurations that a strategy has to choose from where a component supports only some."""


SETTINGS = settings(
    deadline=None,
    stateful_step_count=50,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large),
)
"""The settings of a machine's test, if it sets no others. Hypothesis's own phases of shrinking and explaining are left
out: they take minutes where the suite takes seconds."""


def configs(
    suite: Suite, capabilities: Capabilities, supports: Callable[[Any], bool] | None = None
) -> st.SearchStrategy[Any]:
    """Return a strategy for small configurations that are supported, from the choices that the swarm has. It shrinks to
    the plainest one."""
    return _configs(suite.component(Adapter(capabilities.of, capabilities, supports)), {})


def _configs(component: Component, choices: dict[Any, tuple[int, ...]]) -> st.SearchStrategy[Any]:
    """Return the strategy of `configs`. Notes the choices that each configuration is made of."""
    if hasattr(component.make, "supports"):
        for seed in range(KEPT_CONFIGS):
            config, taken = component.first_supported(lambda attempt, seed=seed: seed * DRAWN_FOR_SUPPORT + attempt)
            choices.setdefault(config, taken)
        return st.sampled_from(sorted(choices, key=lambda config: (sum(choices[config]), choices[config])))

    @st.composite
    def drawn(draw: Any) -> Any:
        taken: list[int] = []

        def choose(values: Sequence[Any]) -> Any:
            value = values[draw(_places(len(values)))]
            taken.append(values.index(value))
            return value

        config = component.configure(choose)
        choices[config] = tuple(taken)
        return config

    return drawn()


@lru_cache(maxsize=1024)
def _places(length: int) -> st.SearchStrategy[int]:
    """Return a strategy for the place of one of `length` values: one object, since Hypothesis validates each anew."""
    return st.sampled_from(range(length))


def operations(suite: Suite, config: Any, capabilities: Capabilities) -> st.SearchStrategy[Operation]:
    """Return a strategy for the operations that these capabilities allow, hostile ones and those that make no sense in
    a state included."""
    spoken = vocabulary_of(suite.trial.declared, config, capabilities)
    return st.one_of(
        [
            st.builds(letter.kind, *(st.sampled_from(tuple(dict.fromkeys(values))) for values in letter.arguments))
            for letters in spoken.values()
            for letter in letters
        ]
    )


@st.composite
def histories(draw: Any, suite: Suite, capabilities: Capabilities, max_size: int = 30) -> tuple[Any, list[Operation]]:
    """Draw a configuration and a sequence of operations for it."""
    config = draw(configs(suite, capabilities))
    return config, draw(st.lists(operations(suite, config, capabilities), max_size=max_size))


Draw = Callable[[st.SearchStrategy[Any]], Any]


class Words:
    """The values that the arguments of one kind of operation may have under one configuration, the simplest first;
    those of all its letters."""

    def __init__(self, letters: Sequence[Letter]) -> None:
        self.kind: Any = letters[0].kind
        self.weight = sum(letter.weight for letter in letters)
        columns = zip(*(letter.arguments for letter in letters), strict=True)
        names = self.kind.__match_args__
        # Once each: what is drawn rarely by the swarm, whose runs are many, is drawn as often as the rest.
        self.values = {
            name: tuple(dict.fromkeys(chain.from_iterable(column))) for name, column in zip(names, columns, strict=True)
        }
        self.names = names[: self.kind.num_when]  # of the arguments that `when` takes
        self.first = tuple(product(*(self.values[name] for name in self.names)))

    def makes_sense(self, trial: Trial, chosen: Mapping[str, Any]) -> bool:
        """Return whether some operation with these arguments makes sense in the state of the trial."""
        when = self.kind.when
        given = [(number, chosen[name]) for number, name in enumerate(self.names) if name in chosen]
        return when is None or any(
            when(trial, *first) for first in self.first if all(first[number] == value for number, value in given)
        )

    def draw(self, trial: Trial, draw: Draw) -> Operation:
        """Draw an operation of this kind; `makes_sense` has said that there is one.

        An argument's value that makes no sense gives way to the next one that does. Draws keep their meaning then when
        other operations are left out, and shrink to the plainest value.
        """
        chosen: dict[str, Any] = {}
        for name, values in self.values.items():
            at = draw(_places(len(values)))
            if name in self.names:
                turned = (at + i if at + i < len(values) else at + i - len(values) for i in range(len(values)))
                at = next(at for at in turned if self.makes_sense(trial, {**chosen, name: values[at]}))
            chosen[name] = values[at]
        return self.kind(**chosen)


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
    known_words: dict[Any, list[Words]]  # by configuration, kept for all examples
    choices: dict[Any, tuple[int, ...]]  # by configuration: what it is made of
    explained: dict[tuple[Any, ...], Violation]  # by operations: the first failure, shrunk

    def __init__(self) -> None:
        super().__init__()
        self.trial: Any = None  # the Trial, once it has begun
        self.words: list[Words] = []
        self._is_busy = False
        self._ends = ExitStack()  # of the defect of a mutant, and of the limit of time
        self._limit_s = self.component.limit_s

    def start_with(self, config: Any, left_out: Iterable[str]) -> None:
        """Make the component and its model. Operations of the kinds that are left out are not drawn, if there are
        others: what an even mix does not reach is reached without some."""
        self.config = config
        self._ends.enter_context(getattr(self.component.make, "planted", nullcontext)())
        self._ends.enter_context(alarm(self._limit_s, lambda: self._is_busy))
        if config not in self.known_words:
            by_kind: dict[type[Operation], list[Letter]] = {}
            for letter in chain.from_iterable(self.component.vocabulary(config).values()):
                by_kind.setdefault(letter.kind, []).append(letter)
            words = sorted(map(Words, by_kind.values()), key=lambda of_kind: -of_kind.weight)
            self.known_words[config] = [of_kind for of_kind in words for _ in range(of_kind.weight)]
        words = self.known_words[config]
        self.words = [of_kind for of_kind in words if of_kind.kind.tag not in left_out] or words
        with self._judged():
            self.trial = self.component.start(config, self.component.invariants)

    def draw(self, draw: Draw) -> Operation | None:
        """Draw an operation that makes sense now, each argument by a strategy of its own; None if none is found."""
        for _ in range(MAX_TRIES):
            words = self.words[draw(_places(len(self.words)))]
            if words.makes_sense(self.trial, {}):
                return words.draw(self.trial, draw)
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
            with self.component.judged(lambda: "make" if self.trial is None else self.trial.operation, self._limit_s):
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
            found = Found(0, 0, self.config, trace[1:], violation, self.choices.get(self.config, ()))
            failure = explain(self.component, self.component.invariants, found, name_of(self.component.make))
            self.explained[trace] = (
                Explained(violation, failure) if failure.case.replay(self.component.make) else violation
            )
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
    choices: dict[Any, tuple[int, ...]] = {}
    drawn_configs = _configs(component, choices)
    kinds = [kind.tag for kind in component.operations]

    @initialize(config=drawn_configs, left_out=st.lists(st.sampled_from(kinds), unique=True, max_size=len(kinds) // 2))
    def start(self: TrialMachine, config: Any, left_out: list[str]) -> None:
        self.start_with(config, left_out)

    @rule(operation=_OPERATION)
    def then(self: TrialMachine, operation: Operation | None) -> None:
        if operation is not None:
            self.apply(operation)

    members = {"start": start, "then": then, "component": component, "known_words": {}, "choices": choices}
    made: Any = type(f"{suite.name.title().replace('-', '')}Machine", (TrialMachine,), {**members, "explained": {}})
    made.TestCase.settings = SETTINGS
    return made


@st.composite
def _operation(draw: Any) -> Any:
    """Draw an operation that makes sense in the state of the machine."""
    return draw(_RUNNER).draw(draw)


_RUNNER, _OPERATION = st.runner(), _operation()
