"""How to install an extra: for every way in which Foredraft can have come here, a command that
installs this project."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from foredraft.observe.distribution.install_hint import install_command

REPOSITORY = "https://example.com/some/repository.git"
VCS = {"vcs": "git", "commit_id": "0" * 40}
IN_A_CLONE = "in a clone of Foredraft: pip install '.[sim]'"


class Installed:
    """A distribution of which only pip's record is asked."""

    def __init__(self, record: str | None) -> None:
        self.record = record

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self.record


@pytest.fixture
def hint_of(monkeypatch):
    def of(record: object) -> str:
        text = record if record is None or isinstance(record, str) else json.dumps(record)
        monkeypatch.setattr(metadata, "distribution", lambda name: Installed(text))
        return install_command("sim")

    return of


@pytest.mark.parametrize(
    ("record", "hint"),
    [
        (None, IN_A_CLONE),
        ({"url": REPOSITORY, "vcs_info": VCS}, f"pip install 'foredraft[sim] @ git+{REPOSITORY}'"),
        (
            {"url": REPOSITORY, "vcs_info": VCS | {"requested_revision": "v0.2.0"}, "subdirectory": "part"},
            f"pip install 'foredraft[sim] @ git+{REPOSITORY}@v0.2.0#subdirectory=part'",
        ),
        (
            {"url": "ssh://git@example.com/some/repository.git", "vcs_info": VCS},
            "pip install 'foredraft[sim] @ git+ssh://git@example.com/some/repository.git'",
        ),
        (
            {"url": "file:///some/a clone", "vcs_info": VCS},
            "pip install 'foredraft[sim] @ git+file:///some/a%20clone'",
        ),
        (
            {"url": "https://example.com/foredraft-0.2.0-py3-none-any.whl", "archive_info": {}},
            "pip install 'foredraft[sim] @ https://example.com/foredraft-0.2.0-py3-none-any.whl'",
        ),
        ({"url": "file:///nowhere/foredraft-0.2.0-py3-none-any.whl", "archive_info": {}}, IN_A_CLONE),
        ({"url": "file:///nowhere/clone", "dir_info": {"editable": True}}, IN_A_CLONE),
        ("no JSON", IN_A_CLONE),
        ("[]", IN_A_CLONE),
        ({}, IN_A_CLONE),
        ({"url": REPOSITORY, "vcs_info": None}, IN_A_CLONE),
    ],
)
def test_the_hint_follows_the_record(hint_of, record, hint):
    assert hint_of(record) == hint


@pytest.mark.parametrize("name", ["clone", "a clone", "it's $HOME", "größer", "100%"])
@pytest.mark.parametrize("is_editable", [False, True])
def test_a_folder_is_quoted_for_the_shell(hint_of, tmp_path, name, is_editable):
    folder = tmp_path / name
    folder.mkdir()
    words = shlex.split(hint_of({"url": folder.as_uri(), "dir_info": {"editable": True} if is_editable else {}}))
    assert words == ["pip", "install", *(["--editable"] if is_editable else []), f"{folder}[sim]"]


def test_a_wheel_that_is_there_is_installed_again(hint_of, tmp_path):
    wheel = tmp_path / "foredraft-0.2.0-py3-none-any.whl"
    wheel.touch()
    assert hint_of({"url": wheel.as_uri(), "archive_info": {}}) == f"pip install '{wheel}[sim]'"


def test_without_metadata_the_hint_names_a_clone(monkeypatch):
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert install_command("sim") == IN_A_CLONE


def test_pip_takes_the_hint(hint_of, tmp_path):
    """Pip itself reads the requirement of a folder with a space in its name, without installing anything."""
    project = tmp_path / "a clone"
    project.mkdir()
    (project / "pyproject.toml").write_text(
        '[project]\nname = "foredraft"\nversion = "9"\noptional-dependencies.sim = []\n'
    )
    requirement = shlex.split(hint_of({"url": project.as_uri(), "dir_info": {}}))[-1]
    code = (
        "import sys\n"
        "from pip._internal.req.constructors import install_req_from_line\n"
        "found = install_req_from_line(sys.argv[1])\n"
        "print(found.link.file_path, *found.extras, sep='\\n')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, requirement], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(Path(project)), "sim"]
