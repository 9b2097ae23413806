"""Everything within a small scope, and Hypothesis over the same operations."""

import pytest
from foretoken.checks.adapters import kv_allocator, kv_store
from foretoken.checks.registry import mutants_of
from foretoken.properties.allocator.contract import AllocatorConfig
from foretoken.properties.allocator.plain import EVERYTHING, PlainAllocator
from foretoken.properties.allocator.small_scope import alphabet
from foretoken.properties.harness.exhaustive import Scope, explore
from foretoken.properties.harness.machines import histories, machine
from foretoken.properties.harness.trial import Violation
from foretoken.properties.suites import suite_of
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.stateful import run_state_machine_as_test

ALLOCATOR = suite_of("allocator")

MUTANTS = {mutant.name: mutant for mutant in mutants_of("allocator")}
QUIET = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)


@pytest.mark.fast("make-scope2-150", "PlainAllocator-*")
@pytest.mark.parametrize(
    ("make", "scope", "states"),
    [
        (kv_allocator.make, Scope(3, 2, 4), 400),
        (kv_allocator.make, Scope(2, 2, 6), 200),
        (kv_store.make, Scope(2, 2, 3), 150),
        (PlainAllocator, Scope(1, 2, 3), 80),
    ],
)
def test_nothing_breaks_within_the_scope(make, scope, states):
    capabilities = getattr(make, "capabilities", EVERYTHING)
    coverage = explore("allocator", make, capabilities, scope)
    assert coverage.failure is None and coverage.complete, coverage.failure and coverage.failure.text()
    assert coverage.num_states > states and coverage.num_operations > 10 * coverage.num_states


@pytest.mark.slow
@pytest.mark.parametrize("make", [kv_allocator.make, kv_store.make])
def test_nothing_breaks_within_the_whole_scope(make):
    coverage = explore("allocator", make)
    assert coverage.failure is None and coverage.num_configs == 6


@pytest.mark.parametrize(
    "name", ["TakesWhatThereIs", "FreesBeforeItLooks", "ServesThePadding", "SharesWithoutCounting"]
)
def test_what_is_broken_breaks_at_once_and_shortly(name):
    coverage = explore("allocator", MUTANTS[name].make, scope=Scope(2, 2, 3))
    assert (not coverage.complete and coverage.failure.id in MUTANTS[name].caught_by) or name == "ServesThePadding"
    assert coverage.failure is not None and len(coverage.failure.case.operations) <= 3


def test_equal_states_are_followed_once():
    """Without pruning, sequences of four letters would be as many as letters to the power of four."""
    config = AllocatorConfig(2, 1)
    letters = len(alphabet(config, kv_allocator.make.capabilities))
    coverage = explore("allocator", kv_allocator.make, scope=Scope(2, 1, 4))
    assert coverage.num_states < letters**4 / 50


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
    capabilities = kv_allocator.make.capabilities
    ALLOCATOR.execute(
        kv_allocator.make, config, capabilities, ALLOCATOR.invariants(capabilities), operations, twice=True
    )
