"""Small scope: every sequence of operations up to a length, on the smallest configurations.

Most defects need little: few pages, few holders, few operations. Here nothing is left to chance within that scope. Sequences that lead
to the same state (`Trial.state`) are followed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.errors import ConfigError, Problem
from ..conformance import explain, name_of
from ..suites import suite_of
from .contract import Capabilities, capabilities_of, supports_of
from .operation import Operation
from .report import Failure
from .suite import Suite
from .swarm import Found
from .trial import Trial, Violation

MAX_STATES = 200_000


@dataclass(frozen=True, slots=True)
class Scope:
    """How far to go."""

    max_pages: int = 3
    max_page_size: int = 2
    max_operations: int = 6


@dataclass(frozen=True, slots=True)
class Coverage:
    """What was looked at. `complete` unless `MAX_STATES` came first."""

    num_configs: int
    num_states: int
    num_operations: int
    complete: bool
    failure: Failure | None


def explore(
    contract: str,
    make: Callable[[Any], Any],
    capabilities: Capabilities | Iterable[str] | None = None,
    scope: Scope = Scope(),
) -> Coverage:
    """Try every history of a component within the scope, each also drained; the first failure ends it.

    Raises ConfigError for a contract whose states are too many to be followed.
    """
    suite = suite_of(contract)
    if suite.small_scope is None:
        raise ConfigError("contract", [Problem("", f"{contract} has no small scope: its states are too many")])
    declared = suite.capabilities.of(capabilities_of(make) if capabilities is None else capabilities)
    states = operations = configs = 0
    for config, letters in suite.small_scope(declared, scope.max_pages, scope.max_page_size):
        if not supports_of(make)(config):
            continue
        configs += 1
        search = _Search(suite, make, config, declared, letters)
        failure = search.run(scope.max_operations, MAX_STATES - states)
        states += len(search.seen)
        operations += search.num_operations
        if failure is not None or states >= MAX_STATES:
            return Coverage(configs, states, operations, False, failure)
    return Coverage(configs, states, operations, True, None)


class _Search:
    """Breadth first: a state is reached by the shortest history, so a failure is short as it is."""

    def __init__(self, suite: Suite, make, config, capabilities, letters: Sequence[Operation]) -> None:
        self.suite = suite
        self.make = make
        self.config = config
        self.capabilities = capabilities
        self.letters = letters
        self.invariants = suite.invariants(capabilities)
        self.seen: set[object] = set()
        self.num_operations = 0

    def run(self, depth: int, max_states: int) -> Failure | None:
        border: list[tuple[Operation, ...]] = [()]
        for _ in range(depth):
            reached = []
            for history in border:
                for letter in self.letters:
                    longer = (*history, letter)
                    try:
                        state = self._state_after(longer)
                    except Violation as violation:
                        return self._explain(longer, violation)
                    if state is not None and state not in self.seen:
                        self.seen.add(state)
                        reached.append(longer)
                    if len(self.seen) >= max_states:
                        return None
            border = reached
        return None

    def _state_after(self, history: Sequence[Operation]) -> object | None:
        """Return the state after a history, then drained; None if its last operation makes no sense."""
        state = None

        def note(operation: Operation, trial: Trial) -> None:
            nonlocal state
            state = trial.state() if len(trial.trace) == len(history) else None

        trial = self.suite.execute(self.make, self.config, self.capabilities, self.invariants, history, watch=note)
        self.num_operations += trial.num_operations
        return state

    def _explain(self, history: tuple[Operation, ...], violation: Violation) -> Failure:
        found = Found(0, 0, self.config, history, violation)
        return explain(self.suite, self.make, self.capabilities, self.invariants, found, name_of(self.make))
