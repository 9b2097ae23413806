"""Hypothesis over the operations of a contract."""

import pytest
from foredraft.checks.adapters import kv_allocator
from foredraft.checks.registry import mutants_of
from foredraft.properties.harness.machines import histories, machine
from foredraft.properties.harness.trial import Violation
from foredraft.properties.suites import suite_of
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.stateful import run_state_machine_as_test

ALLOCATOR = suite_of("allocator")

MUTANTS = {mutant.name: mutant for mutant in mutants_of("allocator")}
QUIET = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)


@pytest.mark.parametrize("name", ["LosesTheLastPage", "FreesAnything"])
def test_hypothesis_finds_defects_too(name):
    broken = machine("allocator", MUTANTS[name].make)
    found = settings(QUIET, max_examples=400, stateful_step_count=20, phases=[Phase.generate])
    with pytest.raises(Violation) as caught:
        run_state_machine_as_test(broken, settings=found)
    assert {broken.id for broken in caught.value.broken} & set(MUTANTS[name].caught_by)


@given(histories("allocator", kv_allocator.make.capabilities))
@settings(QUIET, max_examples=40)
def test_histories_as_values(history):
    config, operations = history
    ALLOCATOR.component(kv_allocator.make).execute(config, operations, twice=True)
