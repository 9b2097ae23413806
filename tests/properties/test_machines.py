"""Hypothesis over the operations of a contract."""

import pytest
from bad_allocators import Hangs, ListAllocator
from foredraft.checks.registry import contracts, mutants_of
from foredraft.properties.engine.plain import PlainEngine
from foredraft.properties.harness.catalogue import CATALOGUE
from foredraft.properties.harness.invariants import of_contract
from foredraft.properties.harness.machines import SETTINGS, machine
from foredraft.properties.harness.trial import Violation
from foredraft.properties.suites import suite_of
from hypothesis import settings
from hypothesis.stateful import rule, run_state_machine_as_test

ALLOCATOR, ENGINE = suite_of("allocator"), suite_of("engine")
IN_TESTS = settings(SETTINGS, database=None, derandomize=True, max_examples=100)


def test_loading_the_suites_loads_a_checker_for_every_invariant():
    checked = {item.id for contract in contracts() for item in of_contract(suite_of(contract).name)}
    assert checked == {id for members in CATALOGUE.values() for id, *_ in members}


FOUND = {
    "allocator": ["PromisesTooLittle", "FreesAnything"],
    "prefix-cache": ["TrustsTheHash"],
    "relay": ["ReadsTheUnwritten"],
    "accept": ["MatchesAnyNode", "WalksTheSiblingsInACircle"],
    "step-controller": ["ReadsHalfOfATable"],
    "engine": ["SaysGoodbyeTwice"],
    "executor": ["AllocatesForTheWidestAlgorithm"],
    "block-manager": ["SharesAmongNamespaces"],
    "transport": ["SendsTheFirstDraft"],
    "simulator": ["CountsTheFirstTokenTwice"],
}


def violation_of(broken, **options):
    with pytest.raises(Violation) as caught:
        run_state_machine_as_test(broken, settings=settings(IN_TESTS, **options))
    return caught.value


@pytest.mark.parametrize(
    ("contract", "name"),
    [
        pytest.param(contract, name, marks=pytest.mark.ci if contract in ("simulator", "transport") else ())  # seconds
        for contract in FOUND
        for name in FOUND[contract]
    ],
)
def test_hypothesis_finds_a_defect_of_each_contract_and_tells_a_short_history(contract, name):
    mutant = next(mutant for mutant in mutants_of(contract) if mutant.name == name)
    found = violation_of(machine(suite_of(contract), mutant.make))
    assert {broken.id for broken in found.broken} & set(mutant.caught_by)
    assert found.failure.ends_in and len(found.failure.case.operations) <= 10
    assert found.failure.case.replay(mutant.make) is not None and not found.failure.is_disputed


def test_every_contract_has_such_a_defect():
    assert tuple(FOUND) == contracts()


def test_a_failure_of_a_rule_of_ones_own_is_reported_as_hypothesis_drew_it():
    class Mine(machine(ALLOCATOR, ListAllocator)):
        @rule()
        def steal(self):
            if self.trial.subject.pages:
                self.trial.subject.pages.pop()

    found = violation_of(Mine)
    assert found.id in ("ALLOC-01", "ALLOC-15") and found.failure is None and str(found).startswith(found.id)


@pytest.mark.ci
def test_a_component_that_hangs_is_stopped(monkeypatch):
    monkeypatch.setattr("foredraft.properties.harness.suite.RUN_LIMIT_S", 0.4)
    monkeypatch.setattr("foredraft.properties.harness.shrink.HANG_LIMIT_S", 0.04)
    found = violation_of(machine(ALLOCATOR, Hangs))
    assert found.id == "HANGS" and found.failure.case.operations[-1].tag == "free"


def test_a_component_is_made_from_supported_configurations_alone():
    def make(config):
        assert make.supports(config), config
        return PlainEngine(config)

    make.supports = lambda config: config.page_size == 16 and config.candidates == (0,)
    drawn = settings(IN_TESTS, max_examples=20, stateful_step_count=5)
    run_state_machine_as_test(machine(ENGINE, make, ["slots"]), settings=drawn)
