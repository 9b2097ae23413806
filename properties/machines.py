"""Hypothesis state machines over the same operations, models and invariants as the swarm's.

    TestMine = machine("allocator", lambda config: MyAllocator(config.num_pages)).TestCase

Hypothesis looks for short histories and shrinks what it finds itself; the swarm is much faster and finds what takes long ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from .alarm import alarm
from .conformance import capabilities_of
from .contracts import Capabilities
from .strategies import configs, operations
from .suites import RUN_LIMIT_S, suite_of
from .trial import Trial


def machine(
    contract: str, make: Callable[[Any], Any], capabilities: Capabilities | Iterable[str] | None = None
) -> type[RuleBasedStateMachine]:
    """A state machine whose rules are the contract's operations; everything is checked after each, and drained at the end.

    `capabilities` as in `conformance.check`. A broken invariant is a `Violation` in the machine's test. What takes two runs
    to see is left to the swarm.
    """
    suite = suite_of(contract)
    declared = suite.capabilities.of(capabilities_of(make) if capabilities is None else capabilities)
    invariants = suite.invariants(declared)
    limit_s = suite.limit_s or RUN_LIMIT_S

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.trial: Trial | None = None

        @initialize(config=configs(contract, declared))
        def start(self, config: Any) -> None:
            self.trial = suite.start(make, config, declared, invariants)
            self.operations = operations(contract, config, declared)

        @rule(data=st.data())
        def operate(self, data: Any) -> None:
            operation = data.draw(self.operations, label="operation")
            with alarm(limit_s):
                self.trial.apply(operation)

        def teardown(self) -> None:
            # After a failure the subject's state means nothing any more.
            if self.trial is not None and not self.trial.failed:
                with alarm(limit_s):
                    self.trial.drain()

    Machine.__name__ = Machine.__qualname__ = f"{contract.title().replace('-', '')}Machine"
    return Machine
