"""What `make types` demands, and that type checkers find the package in a clone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import check_types
import pytest

ROOT = Path(__file__).resolve().parents[3]
IMPORTING = "from foredraft.core.errors import ForedraftError\n\nreveal_type(ForedraftError)\n"


@pytest.mark.ci
def test_an_error_fails_in_every_package_but_those_that_check_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """By the settings of pyproject.toml, in a package of wrong modules."""
    package = tmp_path / check_types.LINKS / "foredraft"
    for name in ("gpu", "properties/engine", "checks"):
        folder = package / name
        folder.mkdir(parents=True)
        (folder / "wrong.py").write_text("number: int = ''\n")
    for folder in (package, *(path for path in package.rglob("*") if path.is_dir())):
        (folder / "__init__.py").touch()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    assert check_types.run_mypy(root=tmp_path) == 1
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "error:" in line]
    assert "gpu/wrong.py:1" in line
    (package / "gpu" / "wrong.py").write_text("number: int = 1\n")
    assert check_types.run_mypy(root=tmp_path) == 0


def test_versions_are_those_of_python():
    with pytest.raises(SystemExit, match=r"--lower: expected versions such as 3\.12"):
        check_types.main(["3.12", "--lower"])


@pytest.mark.fast("pyright")
@pytest.mark.parametrize("checker", ["pyright", "mypy"])
def test_a_type_checker_finds_the_package_by_the_settings_of_the_clone(checker: str, tmp_path: Path):
    """As editors do: without arguments, of a file that imports from one of its folders."""
    pytest.importorskip(checker, reason=f"{checker} is not installed")
    path = tmp_path / "importing.py"
    path.write_text(IMPORTING)
    done = subprocess.run([sys.executable, "-m", checker, str(path)], cwd=ROOT, capture_output=True, text=True)
    (line,) = [line for line in done.stdout.splitlines() if "importing.py:3" in line]
    assert "type[ForedraftError]" in line or "-> foredraft.core.errors.ForedraftError" in line, done.stdout
