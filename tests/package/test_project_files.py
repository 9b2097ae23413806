"""The files for those who join: they parse, agree with pyproject.toml and the Makefile, and CI runs what a
contributor runs."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from typing import Any

import pytest
import yaml
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager
from source_tree import PACKAGES, ROOT, imports_of, sources

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]


def read_yaml(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def read_lines(name: str) -> list[str]:
    return (ROOT / name).read_text(encoding="utf-8").splitlines()


def make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return {name for line in re.findall(r"^([\w. ]+):(?!=)", text, re.MULTILINE) for name in line.split()}


@pytest.fixture(scope="module")
def workflow() -> Any:
    return read_yaml(".github/workflows/ci.yml")


def commands(job: Any) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def test_the_workflow_runs_what_a_contributor_runs(workflow):
    """The one command of the job for changes is the script itself, so that the two cannot differ."""
    assert commands(workflow["jobs"]["test"]) == [".ci/run"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    (line,) = commands(workflow["jobs"]["nightly"])
    program, target = line.split()
    assert program == "make" and target in make_targets()
    in_script = [line.split()[1] for line in read_lines(".ci/run") if line.startswith("make ")]
    assert in_script and set(in_script) <= make_targets()


def test_the_workflow_names_the_versions_of_the_classifiers(workflow):
    named = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["project"]["classifiers"]))
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == named
    assert PROJECT["project"]["requires-python"] == f">={named[0]}"
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{named[0].replace('.', '')}"


def test_the_workflow_may_only_read(workflow):
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert all("permissions" not in job for job in workflow["jobs"].values())
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in steps if "uses" in step)
    assert all(not step["with"]["persist-credentials"] for step in steps if "checkout" in step.get("uses", ""))


def test_pre_commit_has_the_pinned_ruff():
    repositories = {one["repo"].rpartition("/")[2]: one for one in read_yaml(".pre-commit-config.yaml")["repos"]}
    (pin,) = (line.removeprefix("ruff==") for line in read_lines("constraints.txt") if line.startswith("ruff=="))
    assert repositories["ruff-pre-commit"]["rev"] == f"v{pin}"
    assert [hook["id"] for hook in repositories["ruff-pre-commit"]["hooks"]] == ["ruff-check", "ruff-format"]


def test_the_forms_for_issues_ask_for_what_is_needed():
    forms = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in (ROOT / ".github").glob("*/*_re*.yml")}
    assert set(forms) == {"bug_report", "feature_request"}
    for form in forms.values():
        assert form["name"] and form["description"] and all(part["attributes"]["label"] for part in form["body"])
    required = {
        part["id"] for part in forms["bug_report"]["body"] if part.get("validations", {}).get("required", False)
    }
    assert required == {"what", "command", "versions"}
    (versions,) = (part for part in forms["bug_report"]["body"] if part["id"] == "versions")
    assert "foredraft --version" in versions["attributes"]["description"]


def test_the_containers_fit_the_project():
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=")
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    assert container["image"] == f"python:{oldest}"
    assert container["postCreateCommand"].removeprefix("make ") in make_targets()
    lines = read_lines("Dockerfile")
    assert [line.split()[1] for line in lines if line.startswith("FROM")] == [f"python:{oldest}-slim"] * 2
    (extras,) = (line.partition("EXTRAS=")[2].split(",") for line in lines if line.startswith("ARG EXTRAS="))
    assert set(extras) <= set(PROJECT["project"]["optional-dependencies"])
    sent = {line[1:] for line in read_lines(".dockerignore") if line.startswith("!")}
    assert sent == {*FOLDERS, "constraints.txt", "hatch_build.py", "LICENSE", "pyproject.toml", "README.md"}


@pytest.mark.parametrize(
    ("program", "what"),
    [
        ("#!/bin/sh\n[ $1 = --version ] && echo Python 3.10.13\n", "Python 3.10.13"),
        ("#!/bin/sh\nexit 127\n", "no Python"),
        (None, "no Python"),
    ],
)
def test_make_refuses_an_older_python_with_one_sentence(tmp_path, program, what):
    for name in ("Makefile", "pyproject.toml", "hatch_build.py", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "python"
    if program is not None:
        python.write_text(program)
        python.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name not in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS")}
    line = ["make", "setup", f"PYTHON={python}"]
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True)
    sentence = (
        f"Python 3.11 or newer is needed, and {python} is {what}; name another with: make PYTHON=/path/to/python3"
    )
    assert done.returncode == 2 and done.stdout == ""
    assert [line for line in done.stderr.splitlines() if not line.startswith("make")] == [sentence]
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(
    ("linked", "installs"), [(("__init__.py", "session.py"), False), (("__init__.py",), True), ((), True)]
)
def test_make_installs_again_where_links_are_missing(tmp_path, linked, installs):
    made = ["pyproject.toml", "hatch_build.py", "constraints.txt", "api/__init__.py", "api/session.py"]
    made += [".venv/bin/python", *(f"build/editable/foredraft/{name}" for name in linked)]
    for name in [*made, ".venv/.planning", ".venv/.gpu", ".venv/.installed"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    shutil.copy(ROOT / "Makefile", tmp_path)
    line = ["make", "--dry-run", "setup", "PYTHON=true"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ("pip install" in done.stdout) is installs


def test_an_old_python_is_refused_before_pip_searches(monkeypatch):
    specification = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    hook = module.LinkFolders(str(ROOT), {}, None, ProjectMetadata(str(ROOT), PluginManager()), "", "wheel")
    assert hook.dependencies() == []
    monkeypatch.setattr(module.platform, "python_version", lambda: "3.10.13")
    with pytest.raises(SystemExit, match=r"foredraft needs Python >=3\.11, and this is Python 3\.10\.13"):
        hook.dependencies()


# -- packaging ---------------------------------------------------------------------------------------------------------


def test_every_list_of_the_packages_names_all():
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert set(PACKAGES) == folders == set(PROJECT["tool"]["pyright"]["include"])


def test_nothing_at_the_root_is_named_like_the_package():
    """It would be imported instead of what is installed, wherever the working directory is on Python's path."""
    assert not [path.name for path in ROOT.iterdir() if path.stem.lower() == PROJECT["project"]["name"]]


def test_every_package_is_packaged():
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    places = {"api": "foredraft"} | {package: f"foredraft/{package}" for package in PACKAGES if package != "api"}
    assert wheel["sources"] == places and set(wheel["only-include"]) == set(PACKAGES)
    without_init = {
        str(path.parent.relative_to(ROOT)) for path in sources(*PACKAGES) if not (path.parent / "__init__.py").is_file()
    }
    assert not without_init


def test_constraints_pin_every_dependency():
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pins = dict(line.split("==") for line in lines if line)
    normal = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
    project = PROJECT["project"]
    wanted = [
        *project["dependencies"],
        *(item for extra in project["optional-dependencies"].values() for item in extra),
    ]
    names = {re.split(r"[\s\[<>=;!~]", item)[0] for item in wanted} - {"foredraft"}
    missing = {name for name in names if re.sub(r"[-_.]+", "-", name).lower() not in normal}
    assert not missing
    assert normal["torch"] == "2.13.0"


@pytest.mark.parametrize(
    ("extra", "folders", "optional"),
    [
        (None, ("core",), set()),
        ("properties", ("core", "properties"), {"pytest"}),
        (
            "sim",
            ("core", "sim", "observe", "cli"),
            {"plotly", "kaleido", "choreographer", "ray", "aiconfigurator_core", "scipy"},
        ),
    ],
)
def test_an_extra_covers_what_its_packages_import(extra: str | None, folders: tuple[str, ...], optional: set[str]):
    """NumPy comes with a plain install; `optional` is imported only where it is there."""
    project = PROJECT["project"]
    wanted = project["dependencies"] + (project["optional-dependencies"][extra] if extra else [])
    imported = {
        item.target
        for path in sources(*folders)
        for item in imports_of(path)
        if not item.ours and item.target not in sys.stdlib_module_names
    }
    assert imported <= {re.split(r"[\s\[<>=;!~]", item)[0] for item in wanted} | optional


PAIRS = {"2.13.0": "3.7.1", "2.14.0": "3.8.0"}
"""The release of Triton that each release of torch for CUDA requires (its metadata), and no other."""


def test_torch_and_triton_are_pinned_as_a_build_for_cuda_pairs_them():
    pins = dict(line.split("==") for line in read_lines("constraints.txt") if "==" in line)
    assert pins["triton"] == PAIRS[pins["torch"]]
    floors = {re.split("[<>=!]", one)[0]: one for one in PROJECT["project"]["optional-dependencies"]["gpu"]}
    assert floors["torch"] == "torch>=2.10" and floors["triton"].startswith("triton>=3.5;")
