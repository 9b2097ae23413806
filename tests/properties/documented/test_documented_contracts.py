"""docs/contracts.md has a section for every contract, with all that can be declared; docs/properties.md counts them."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from foredraft.checks.mutant import MAX_SHRUNK, kill
from foredraft.checks.registry import SUBJECTS, contracts, mutants_of
from foredraft.properties.conformance import check
from foredraft.properties.harness.importing import load_make
from foredraft.properties.harness.invariants import all_invariants, invariant, of_contract
from foredraft.properties.suites import suite_of

DOCS = Path(__file__).parents[3] / "docs"
PROPERTIES = (DOCS / "properties.md").read_text(encoding="utf-8")
CONTRACTS = (DOCS / "contracts.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", CONTRACTS, re.M | re.S))
LINKS = dict(re.findall(r"^\| \[`([\w-]+)`\]\(contracts\.md#([\w-]+)\) \|", PROPERTIES, re.M))
TITLES = {title.lower().replace(" ", "-"): title for title in SECTIONS}


def test_every_contract_has_a_section():
    assert tuple(LINKS) == contracts()
    assert sorted(LINKS.values()) == sorted(TITLES)


@pytest.mark.parametrize("contract", contracts())
def test_a_section_names_all_that_can_be_declared(contract):
    text = SECTIONS[TITLES[LINKS[contract]]]
    rows = re.findall(r"^\| (`.*?`) \| .+ \| .+ \|$", text, re.M)
    documented = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(documented) == sorted(field.name for field in fields(suite_of(contract).capabilities))
    assert f"{suite_of(contract).config.__module__.removeprefix('foredraft.').replace('.', '/')}.py" in text


@pytest.mark.parametrize("contract", contracts())
def test_the_numbers_of_invariants_and_of_defects(contract):
    pytest.importorskip("torch")
    row = re.search(rf"^\| `{contract}` \| (\d+) \| (\d+) \|$", PROPERTIES, re.M)
    defects = len(mutants_of(contract))
    assert (int(row[1]), int(row[2])) == (len(of_contract(contract)), defects)
    assert f"{defects} " in SECTIONS[TITLES[LINKS[contract]]]
    expected = {id for mutant in mutants_of(contract) for id in mutant.caught_by}
    assert expected >= {item.id for item in of_contract(contract)}, "no mutant is expected to break some invariant"


def shown_under(heading: str) -> tuple[str, list[str]]:
    """Return the sentence that a section quotes, and the report of a run that it shows, the latter as words."""
    text = CONTRACTS.partition(f"\n### {heading}\n")[2].partition("\n## ")[0]
    sentence = " ".join(line.removeprefix("> ") for line in text.splitlines() if line.startswith("> "))
    (report,) = re.findall(r"```text\n(ACCEPT.*?)\n```", text, re.DOTALL)
    return sentence, report.split()


def test_the_shown_move_out_of_bounds_is_what_a_run_gives():
    sentence, report = shown_under("No out-of-bounds KV move")
    (mutant,) = (one for one in mutants_of("accept") if one.name == "MovesByTheNumberOfNodes")
    assert kill(mutant, seed=8).failure.text().split() == report
    assert invariant("ACCEPT-16").sentence == f"no out-of-bounds KV move: {sentence}"


@pytest.mark.ci
def test_the_shown_hidden_state_is_what_a_run_gives():
    pytest.importorskip("torch")
    sentence, report = shown_under("STANDALONE hidden states are always None")
    subject = "foredraft.checks.mutants.torch_executor:KeepsTheVerifyPass"
    (failure,) = check(suite_of("executor"), load_make(subject), budget=2_000, seed=6, subject=subject).failures
    assert failure.text("foredraft check --replay runs/cases/executor-ACCEPT-17.case.json").split() == report
    assert sentence in invariant("ACCEPT-17").sentence


def test_the_numbers_that_are_said():
    assert f"the {len(all_invariants())} invariants" in PROPERTIES and MAX_SHRUNK == 20
    assert f"we have {sum(map(len, SUBJECTS.values()))} components now" in " ".join(PROPERTIES.split())


def test_the_first_line_says_what_the_two_searches_have_found():
    first = " ".join(PROPERTIES.split("\n\n")[1].split())
    table = PROPERTIES.partition("<!-- searches -->\n")[2].partition("<!-- end -->")[0]
    swarm, hypothesis = (re.search(rf"^\| {name} \| (\d+) \|", table, re.M)[1] for name in ("swarm", "Hypothesis"))
    defects = re.match(r"\d+ planted defects, 4 s", table)[0].split(",")[0]
    assert first.startswith(f"The swarm searches, Hypothesis repeats. Of {defects} the swarm, ")
    assert f"found {swarm} in four seconds each, and Hypothesis {hypothesis} in the same time" in first


def test_readme_checks_the_allocator_of_the_page():
    (code,) = re.findall(r"<!-- file blocks\.py -->\n```python\n(.*?)```", PROPERTIES, re.DOTALL)
    example = (DOCS.parent / "examples" / "blocks.py").read_text(encoding="utf-8")
    assert example.partition('"""\n\n')[2] == code
