"""docs/no-out-of-bounds-kv-move.md: its counterexamples are what a run gives, its mutants are all that there are."""

import re
from pathlib import Path

import pytest
from foredraft.checks.adapters.tree_accept import TreeAccept
from foredraft.checks.mutant import kill
from foredraft.checks.registry import mutants_of
from foredraft.properties.accept.plain import PlainAccept
from foredraft.properties.harness.invariants import invariant

TEXT = (Path(__file__).parents[3] / "docs" / "no-out-of-bounds-kv-move.md").read_text(encoding="utf-8")
BLOCKS = {
    re.search(r"  mutant (\w+):", block)[1]: block for block in re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL)
}
MUTANTS = {mutant.name: mutant for mutant in mutants_of("accept")}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_counterexample_is_what_a_run_gives(name):
    seed = int(re.search(r"^  seed (\d+), run", BLOCKS[name], re.M)[1])
    failure = kill(MUTANTS[name], seed=seed).failure
    assert failure.text().split() == BLOCKS[name].split()  # the page wraps long lines


def test_the_counterexamples_are_of_moves_and_widths():
    assert [block[:9] for block in BLOCKS.values()] == ["ACCEPT-16"] * 4 + ["ACCEPT-18"]


def test_the_sentence():
    said = " ".join(line.removeprefix("> ") for line in TEXT.splitlines() if line.startswith("> "))
    assert invariant("ACCEPT-16").sentence == f"no out-of-bounds KV move: {said}"


def test_the_mutants_are_all_that_break_it():
    table = re.findall(r"^\| (ours|plain) \| `(\w+)` \| (.*?) \|$", TEXT, re.MULTILINE)
    of = {"ours": TreeAccept, "plain": PlainAccept}
    assert all(MUTANTS[name].make.make is of[where] for where, name, _ in table)
    breaking = [(mutant.name, mutant.defect) for mutant in MUTANTS.values() if "ACCEPT-16" in mutant.caught_by]
    assert [(name, defect) for _, name, defect in table] == breaking
