"""docs/contracts.md has a section for every contract, with all that can be declared; docs/properties.md counts them."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from foredraft.checks.mutant import MAX_SHRUNK
from foredraft.checks.registry import contracts, mutants_of
from foredraft.properties.harness.invariants import all_invariants, of_contract
from foredraft.properties.suites import suite_of

DOCS = Path(__file__).parents[3] / "docs"
PROPERTIES = (DOCS / "properties.md").read_text(encoding="utf-8")
SECTIONS = dict(
    re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", (DOCS / "contracts.md").read_text(encoding="utf-8"), re.M | re.S)
)
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


def test_the_numbers_that_are_said():
    assert f"the {len(all_invariants())} invariants" in PROPERTIES and MAX_SHRUNK == 20


def test_readme_checks_the_allocator_of_the_page():
    (code,) = re.findall(r"<!-- file blocks\.py -->\n```python\n(.*?)```", PROPERTIES, re.DOTALL)
    example = (DOCS.parent / "examples" / "blocks.py").read_text(encoding="utf-8")
    assert example.partition('"""\n\n')[2] == code
