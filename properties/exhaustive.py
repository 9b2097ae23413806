"""Small scope: every sequence of operations up to a length, on the smallest pools.

Most defects need little: few pages, few holders, few operations. Here nothing is left to chance within that scope. Sequences that lead
to the same state are followed once: the state is what the model knows and all that the subject shows, so a subject must declare
`inspection` for this to be sound; without it only sequences with the same answers are taken for equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from . import operations as ops
from .allocator_trial import AllocatorTrial
from .conformance import capabilities_of, explain, name_of
from .contracts import AllocatorCapabilities, AllocatorConfig
from .models import AllocatorModel
from .operations import Operation
from .report import Failure
from .suites import ALLOCATOR, Suite
from .swarm import Found
from .trial import Violation

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


def explore_allocator(
    make: Callable[[AllocatorConfig], Any],
    capabilities: AllocatorCapabilities | Iterable[str] | None = None,
    scope: Scope = Scope(),
) -> Coverage:
    """Every history of an allocator within the scope, each also drained; the first failure ends it."""
    declared = AllocatorCapabilities.of(capabilities_of(make) if capabilities is None else capabilities)
    states = operations = configs = 0
    for config in _configs(declared, scope):
        configs += 1
        search = _Search(ALLOCATOR, make, config, declared, alphabet(config, declared))
        failure = search.run(scope.max_operations, MAX_STATES - states)
        states += len(search.seen)
        operations += search.num_operations
        if failure is not None or states >= MAX_STATES:
            return Coverage(configs, states, operations, False, failure)
    return Coverage(configs, states, operations, True, None)


def _configs(capabilities: AllocatorCapabilities, scope: Scope) -> list[AllocatorConfig]:
    sizes = range(1, scope.max_page_size + 1) if capabilities.paged else (1,)
    found = []
    for pages in range(1, scope.max_pages + 1):
        for size in sizes:
            rows = (2, pages * size) if capabilities.table else (0, 0)
            found.append(AllocatorConfig(pages, size, *rows))
    return found


def alphabet(config: AllocatorConfig, capabilities: AllocatorCapabilities) -> list[Operation]:
    """The operations of the small scope: two holders, two requests, every amount that fits and one that does not."""
    size, pages = config.page_size, config.num_pages
    first = 1 if capabilities.padding_page else 0
    letters: list[Operation] = [
        ops.Alloc(who, n * size) for who in "ab" for n in range(1 if who == "b" else 0, pages + 2)
    ]
    letters += [ops.Free(who, n) for who in "ab" for n in (1, pages)]
    letters += [ops.FreeStray((page,)) for page in range(first, first + pages)] + [ops.FreeTwice("a")]
    if capabilities.sharing:
        letters += [ops.Fork("a", "b", pages)]
    if capabilities.eviction:
        letters += [ops.Retire("a", 1), ops.Reuse("b", 1), ops.Evict(1)]
    if capabilities.deferred_free or capabilities.deferred_close:
        letters += [ops.Launch(), ops.Complete()]
    if capabilities.deferred_free:
        letters += [ops.FreeAfter("a")]
    if capabilities.table:
        letters += [
            ops.Open("r"),
            ops.Open("q"),
            ops.Grow("q", 1),
            ops.Trim("r", 0),
            ops.Close("r"),
            ops.Commit("r", size),
        ]
        letters += [ops.Grow("r", n) for n in range(1, 2 * size + 1)]
    if capabilities.snapshots:
        letters += [ops.Snapshot("s"), ops.Restore("s")]
    return list(dict.fromkeys(letters))


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
        """The state after a history, then drained; None if its last operation makes no sense."""
        state = None

        def note(operation: Operation, trial: AllocatorTrial) -> None:
            nonlocal state
            state = state_of(trial) if len(trial.trace) == len(history) else None

        trial = self.suite.execute(self.make, self.config, self.capabilities, self.invariants, history, watch=note)
        self.num_operations += trial.num_operations
        return state

    def _explain(self, history: tuple[Operation, ...], violation: Violation) -> Failure:
        found = Found(0, 0, self.config, history, violation)
        return explain(self.suite, self.make, self.capabilities, self.invariants, found, name_of(self.make))


def state_of(trial: AllocatorTrial) -> object:
    """All that decides what can happen next, as a value: equal states have equal futures if the subject shows its free list."""
    hidden = () if trial.capabilities.inspection else tuple(map(str, trial.transcript))
    saved = tuple((name, _known(model), shown) for name, (_, model, shown) in sorted(trial.saved.items()))
    return _known(trial.model), trial.moment.after, saved, hidden


def _known(model: AllocatorModel) -> object:
    """The model's state as a value; steps count from the last one that was completed."""
    return (
        tuple((name, tuple(holder.pages)) for name, holder in sorted(model.holders.items())),
        tuple((name, tuple(row.pages), row.committed, row.wanted) for name, row in sorted(model.rows.items())),
        tuple(model.cached),
        tuple((step - model.completed, tuple(holder.pages), with_row) for step, holder, with_row in model.deferred),
        model.launched - model.completed,
    )
