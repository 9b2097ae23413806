"""No false alarm on our own components: ten times the operations of a check without a budget, and twenty thousand
examples of Hypothesis.

A small share of the examples runs with every test; the rest is `make soak`. What a failure found is in its report:
seed, run, operations. Hypothesis draws other examples every day: their seed is the date, but in CI, where a commit
always has the same ones. Its database keeps the examples that failed.
"""

from __future__ import annotations

import os
from datetime import date

import pytest
from foredraft.checks.registry import OPERATIONS, contracts, suite_of
from foredraft.checks.registry import SUBJECTS as OURS
from foredraft.properties.conformance import check
from foredraft.properties.harness.importing import load_make
from foredraft.properties.harness.machines import SETTINGS, machine
from hypothesis import seed, settings
from hypothesis.stateful import run_state_machine_as_test

EXAMPLES = {
    "allocator": 6_000,
    "prefix-cache": 5_000,
    "relay": 5_000,
    "accept": 800,
    "step-controller": 1_000,
    "engine": 1_300,
    "executor": 300,
    "block-manager": 400,
    "transport": 120,
    "simulator": 20,
}
"""Contract -> examples of Hypothesis, up to 25 operations each."""
SHARE = 80
"""How many times fewer examples run with every test."""

SUBJECTS = [
    pytest.param(contract, subject, id=f"{contract}-{number}")
    for contract in contracts()
    for number, subject in enumerate(OURS[contract])
]


@pytest.mark.slow
@pytest.mark.parametrize("of_the_day", range(int(os.environ.get("SOAK_SEEDS", "2"))))
@pytest.mark.parametrize(("contract", "subject"), SUBJECTS)
def test_the_swarm_finds_nothing(contract, subject, of_the_day, record_property):
    """Seeds of the day: two, or `make soak SOAK_SEEDS=20`."""
    seed, budget = 100 * TODAY + of_the_day, 10 * OPERATIONS[subject]
    report = check(suite_of(contract), load_make(subject), budget=budget, seed=seed, subject=subject)
    record_property("note", f"soak, {subject}, seed {seed}: {report.num_operations:,} operations")
    again = f"foredraft check {contract} {subject} --seed {seed} --budget {budget}"
    assert report.ok, f"{report.text()}\nagain: {again}"


TODAY = int(f"{date.today():%Y%m%d}")


def hypothesis_on(contract: str, subject: str, examples: int, **options) -> None:
    machine_of_it = machine(suite_of(contract), load_make(subject))
    if not options.get("derandomize"):
        seed(TODAY)(machine_of_it)
    quiet = settings(SETTINGS, max_examples=examples, stateful_step_count=25, **options)
    run_state_machine_as_test(machine_of_it, settings=quiet)


@pytest.mark.fast(
    "allocator-1",
    "prefix-cache-0",
    "relay-0",
    "accept-0",
    "step-controller-0",
    "engine-0",
    "executor-0",
    "block-manager-0",
    "transport-0",
    ci="*",
)
@pytest.mark.parametrize(("contract", "subject"), SUBJECTS)
def test_hypothesis_finds_nothing(contract, subject):
    """The examples of the day."""
    if "torch" in subject:
        pytest.importorskip("torch")
    hypothesis_on(
        contract, subject, max(EXAMPLES[contract] // SHARE // len(OURS[contract]), 4), derandomize="CI" in os.environ
    )


@pytest.mark.slow
@pytest.mark.parametrize("contract", contracts())
def test_hypothesis_finds_nothing_in_many_examples(contract):
    """The examples of the day."""
    hypothesis_on(contract, OURS[contract][0], EXAMPLES[contract])
