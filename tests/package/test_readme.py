"""README and the tutorial, run in a fresh clone and a fresh environment:
every command, every Python block, every output that they show."""

from __future__ import annotations

from pathlib import Path

import commands as documents
import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [
    command
    for document in documents.DOCUMENTS
    for command in documents.commands_of(document, (ROOT / document).read_text(encoding="utf-8"))
]


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    return documents.Reader(tmp_path_factory.mktemp("reader"))


@pytest.mark.readme
@pytest.mark.parametrize("command", COMMANDS, ids=[command.name for command in COMMANDS])
def test_it_runs_as_shown(command, reader):
    if problem := command.problem(reader.run(command)):
        pytest.fail(problem, pytrace=False)


@pytest.mark.readme
@pytest.mark.parametrize(
    "code",
    [
        "python -c 'import foredraft.core.errors as module; print(module.__file__)' | grep environment/",
        "foredraft sweep --grid speculation.steps=0,1 --set workload.num_requests=5 --seeds 1 --out beside",
        "python -m foredraft.cli sweep --grid speculation.steps=0,1 --set workload.num_requests=5 --seeds 1 --out again",
    ],
    ids=["import", "command", "module"],
)
def test_the_installed_package_is_found_beside_a_clone_of_its_name(code, reader):
    """The clone's folder is called foredraft, too. Workers of a sweep are processes of their own."""
    assert reader.clone.name == "foredraft"
    command = documents.Command("beside the clone", 0, "", documents.BASH, f"cd ..\n{code}\n", None, False, 0)
    if problem := command.problem(reader.run(command)):
        pytest.fail(problem, pytrace=False)
