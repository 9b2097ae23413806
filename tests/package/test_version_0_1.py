"""What version 0.1 made, when the project was called foretoken: one sentence with the remedy, exit code 2, and nothing
is changed.

The files in `version_0_1/` were written by that version: a run of two requests, a sweep of one run, a profile and a
case. scenario.toml is cut off behind [hardware], and trials.jsonl behind its first run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import foredraft
import pytest
from damaged_inputs import execute
from foredraft.core.errors import ConfigError
from foredraft.observe.distribution.former_name import VARIABLES
from foredraft.properties.harness.importing import load_make

MADE_BY = "made by version 0.1, then called foretoken, which this version does not read: "
RUN_AGAIN, RUNS_AGAIN = f"{MADE_BY}make the run again", f"{MADE_BY}make the runs again"
SERVER = "hardware.server: 'foretoken' is called 'foredraft' since version 0.2"


@pytest.fixture
def made(tmp_path) -> Path:
    """A copy of the files of 0.1."""
    folder = tmp_path / "made"
    shutil.copytree(Path(__file__).with_name("version_0_1"), folder)
    comparisons = {"version": "0.1.0", "comparisons": []}
    (folder / "twin.json").write_text(json.dumps(comparisons), encoding="utf-8")
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("audit --replay {}/run", f"{{}}/run/events.jsonl:1: {RUN_AGAIN}"),
        ("audit {}/run", f"{{}}/run/events.jsonl:1: {RUN_AGAIN}"),
        ("acceptance {}/run/events.jsonl", f"{{}}/run/events.jsonl:1: {RUN_AGAIN}"),
        ("report {}/run --out {}/out.html", f"{{}}/run/summary.json: {RUN_AGAIN}"),
        ("report {}/sweep --out {}/out.html", f"{{}}/sweep/question.json: {RUNS_AGAIN}"),
        ("report {}/twin.json --out {}/out.html", f"{{}}/twin.json: {MADE_BY}make the comparison again"),
        (
            "sweep --grid speculation.steps=0,1 --out {}/sweep",
            f"{{}}/sweep/question.json: {MADE_BY}give another --out, or remove the directory, and make the runs again",
        ),
        ("simulate {}/run/scenario.toml", f"{{}}/run/scenario.toml: {SERVER}"),
        ("simulate --set hardware.server=foretoken", f"--set: {SERVER}"),
        ("simulate --set hardware.host=Foretoken", f"--set: {SERVER.replace('server', 'host')}"),
        (
            "simulate --set hardware.profile={}/profile.json",
            f"{{}}/profile.json: {MADE_BY}`foredraft calibrate` makes it again from the same measurements",
        ),
        (
            "check --replay {}/allocator-ALLOC-05.case.json",
            "foretoken.checks.mutants.allocator:LosesTheLastPage: a component of version 0.1, then called foretoken: "
            "name foredraft.checks.mutants.allocator:LosesTheLastPage instead",
        ),
    ],
)
def test_what_0_1_made_is_refused_with_the_remedy(made, command, message):
    before = contents(made)
    code, out, errors = execute(tuple(word.replace("{}", str(made)) for word in command.split()))
    assert (code, out) == (2, "")
    assert errors == f"foredraft: {message}\n".replace("{}", str(made))
    assert contents(made) == before


@pytest.mark.parametrize("name", VARIABLES)
def test_variables_of_0_1_are_refused(monkeypatch, name):
    monkeypatch.delenv(f"FOREDRAFT_{name}", raising=False)
    monkeypatch.setenv(f"FORETOKEN_{name}", "1")
    code, out, errors = execute(("simulate", "--models"))
    what = f"is called FOREDRAFT_{name} since version 0.2; set that, or unset FORETOKEN_{name}"
    assert (code, out, errors) == (2, "", f"foredraft: environment: FORETOKEN_{name}: {what}\n")
    monkeypatch.setenv(f"FOREDRAFT_{name}", "1")
    assert execute(("simulate", "--models"))[0] == 0


def test_the_library_refuses_them_too(monkeypatch):
    monkeypatch.delenv("FOREDRAFT_KERNELS", raising=False)
    monkeypatch.setenv("FORETOKEN_KERNELS", "roofline")
    with pytest.raises(ConfigError, match="is called FOREDRAFT_KERNELS since"):
        foredraft.simulate({"workload": {"num_requests": 2}})
    with pytest.raises(ConfigError, match="is called FOREDRAFT_KERNELS since"):
        foredraft.Session("runs/no-such-model")


def test_another_project_of_that_name_is_neither_imported_nor_changed(tmp_path):
    """A stand-in with metadata, entry points of the groups of 0.1, and an import that raises."""
    other, information = tmp_path / "foretoken", tmp_path / "foretoken-0.0.7.dist-info"
    other.mkdir()
    information.mkdir()
    (other / "__init__.py").write_text('raise SystemError("the other project was imported")\n')
    (information / "METADATA").write_text("Metadata-Version: 2.4\nName: foretoken\nVersion: 0.0.7\n")
    points = "[foretoken.adapters]\nother = foretoken:make\n[foretoken.algorithms]\nother = foretoken:Algorithm\n"
    (information / "entry_points.txt").write_text(f"{points}[console_scripts]\nforetoken = foretoken:main\n")
    before = contents(tmp_path)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "FOREDRAFT_KERNELS": "roofline"}
    few = ("--quiet", "--set", "workload.num_requests=3")
    program = "import sys; from foredraft.cli.__main__ import main; sys.argv[0] = 'foredraft'; main()"
    for line in (
        ("simulate", *few),
        ("sweep", *few, "--grid", "speculation.steps=0,1", "--seeds", "1", "--out", f"{tmp_path}-sweep"),
        ("check", "allocator", "plain-allocator", "--budget", "2000"),
        ("check", "--list"),
        ("--version",),
    ):
        command = [sys.executable, "-P", "-c", program, *line]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert "other project" not in done.stdout + done.stderr
        assert done.returncode == 0, (line, done.stderr)
    assert contents(tmp_path) == before


def test_a_component_of_the_other_project_may_be_named():
    """Only the modules that 0.1 had are refused by their name."""
    with pytest.raises(ConfigError, match="then called foretoken: name foredraft"):
        load_make("foretoken.properties.allocator.plain:make")
    with pytest.raises(ConfigError, match="cannot be imported"):
        load_make("foretoken.benchmark:make")
