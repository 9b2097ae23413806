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
