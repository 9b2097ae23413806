"""docs/standalone-hidden-states.md: its counterexamples are what a run gives, its mutants are all that there are."""

import re
from pathlib import Path

import pytest
from foredraft.checks.registry import mutants_of
from foredraft.properties.conformance import check
from foredraft.properties.harness.importing import load_make
from foredraft.properties.harness.invariants import invariant
from foredraft.properties.suites import suite_of

TEXT = (Path(__file__).parents[3] / "docs" / "standalone-hidden-states.md").read_text(encoding="utf-8")
STORIES = dict(
    re.findall(
        r"```console\n\$ foredraft check executor (\S+) --budget 2000 --seed 6\n(.*?)\n```",
        TEXT.replace(" \\\n   ", ""),
        re.DOTALL,
    )
)
EXECUTORS = {"": "reference", "sim": "simulated", "gpu": "real"}


@pytest.mark.parametrize("subject", STORIES)
def test_a_counterexample(subject):
    if ".torch_" in subject:
        pytest.importorskip("torch")
    report = check(suite_of("executor"), load_make(subject), budget=2_000, seed=6, subject=subject)
    (failure,) = report.failures
    text = failure.text("foredraft check --replay runs/cases/executor-ACCEPT-17.case.json")
    assert text.split() == STORIES[subject].split()  # the page wraps long lines


def test_there_is_one_of_each_executor():
    assert sorted(subject.split(".")[3].split(":")[0] for subject in STORIES) == [
        *("executor", "simulated_executor", "torch_executor")
    ]


def test_the_sentence():
    said = " ".join(line.removeprefix("> ") for line in TEXT.splitlines() if line.startswith("> "))
    assert said in invariant("ACCEPT-17").sentence


def test_every_mutant_is_listed():
    pytest.importorskip("torch")
    wanted = []
    for mutant in mutants_of("executor"):
        if "ACCEPT-17" in mutant.caught_by:
            where, _, name = mutant.name.rpartition(":")
            wanted.append((EXECUTORS[where], name, mutant.defect))
    assert re.findall(r"^\| (\w+) \| `(\w+)` \| (.*) \|$", TEXT, re.MULTILINE) == wanted
    assert {executor for executor, _, _ in wanted} == set(EXECUTORS.values())
