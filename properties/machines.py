"""Hypothesis state machines over the same operations, models and invariants as the swarm's.

    TestMine = allocator_machine(lambda config: MyAllocator(config.num_pages)).TestCase

Hypothesis looks for short histories and shrinks what it finds itself; the swarm is much faster and finds what takes long ones.
"""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from .alarm import alarm
from .allocator_trial import AllocatorTrial
from .conformance import capabilities_of
from .contracts import AllocatorCapabilities, MakeAllocator
from .strategies import allocator_configs, allocator_operations
from .suites import ALLOCATOR, RUN_LIMIT_S


def allocator_machine(
    make: MakeAllocator, capabilities: AllocatorCapabilities | Iterable[str] | None = None
) -> type[RuleBasedStateMachine]:
    """A state machine whose rules are the allocator's operations; everything is checked after each, and drained at the end.

    `capabilities` as in `check_allocator`. A broken invariant is a `Violation` in the machine's test.
    """
    declared = AllocatorCapabilities.of(capabilities_of(make) if capabilities is None else capabilities)
    invariants = ALLOCATOR.invariants(declared)

    class AllocatorMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.trial: AllocatorTrial | None = None

        @initialize(config=allocator_configs(declared))
        def start(self, config) -> None:
            self.trial = ALLOCATOR.start(make, config, declared, invariants)
            self.operations = allocator_operations(config, declared)

        @rule(data=st.data())
        def operate(self, data) -> None:
            operation = data.draw(self.operations, label="operation")
            with alarm(RUN_LIMIT_S):
                self.trial.apply(operation)

        def teardown(self) -> None:
            # After a failure the subject's state means nothing any more.
            if self.trial is not None and not self.trial.failed:
                with alarm(RUN_LIMIT_S):
                    self.trial.drain()

    AllocatorMachine.__name__ = AllocatorMachine.__qualname__ = "AllocatorMachine"
    return AllocatorMachine
