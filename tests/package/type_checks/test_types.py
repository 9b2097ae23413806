"""What `make types` demands of the list of errors, and that type checkers find the package in a clone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import check_types
import pytest

ROOT = Path(__file__).resolve().parents[3]
IMPORTING = "from foredraft.core.errors import ForedraftError\n\nreveal_type(ForedraftError)\n"


def errors_of(**counts: int) -> check_types.Errors:
    return {package: [f"{package}/file.py:{i}: wrong" for i in range(count)] for package, count in counts.items()}


def test_more_errors_than_the_list_allows_are_a_problem_and_shown(capsys: pytest.CaptureFixture[str]):
    wrong = check_types.judge("mypy", errors_of(gpu=4, core=1), {"gpu": 3})
    assert wrong == ["mypy: core has 1 errors; 0 are allowed", "mypy: gpu has 4 errors; 3 are allowed"]
    assert "core/file.py:0: wrong" in capsys.readouterr().out


def test_fewer_errors_than_the_list_allows_must_be_written_there():
    (wrong,) = check_types.judge("mypy", errors_of(gpu=2), {"gpu": 3})
    assert wrong == "mypy: gpu has 2 errors: lower the number in tests/package/type_checks/type_errors.toml from 3"
    assert not check_types.judge("mypy", errors_of(gpu=3), {"gpu": 3})
    assert not check_types.judge("mypy for 3.14", errors_of(gpu=2), {"gpu": 3}, may_fall=True)


def test_lowering_raises_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "list.toml"
    path.write_text("# A remark.\n\n[mypy]\ngpu = 3\ncli = 2\ntwin = 1\n\n[pyright]\ngpu = 1\n")
    monkeypatch.setattr(check_types, "LIST", path)
    allowed = {"mypy": {"gpu": 3, "cli": 2, "twin": 1}, "pyright": {"gpu": 1}}
    check_types.lower(allowed, {"mypy": errors_of(gpu=4, cli=1), "pyright": errors_of(gpu=1)})
    assert path.read_text() == "# A remark.\n\n[mypy]\ngpu = 3\ncli = 1\n\n[pyright]\ngpu = 1\n"


def test_errors_are_counted_by_package_and_named_as_in_the_clone():
    line = {"line": 3, "message": "no", "code": "misc", "severity": "error"}
    files = ["build/editable/foredraft/session.py", "build/editable/foredraft/gpu/ops/host.py"]
    text = "\n".join(json.dumps({**line, "file": name}) for name in files)
    note = json.dumps({**line, "file": files[0], "severity": "note"})
    assert check_types.mypy_errors(f"{text}\n{note}\n") == {
        "api": ["api/session.py:3: no  [misc]"],
        "gpu": ["gpu/ops/host.py:3: no  [misc]"],
    }


def symbol(name: str, message: str, is_exported: bool = True, is_known: bool = False) -> dict:
    found = [{"severity": "error", "message": message}]
    return {"name": name, "isExported": is_exported, "isTypeKnown": is_known, "diagnostics": found}


def test_names_that_only_refer_to_incomplete_ones_count_when_those_are_mended():
    referring = symbol("foredraft.core.a", 'Type of parameter "b" is partially unknown\n  Parameter type is "B"')
    symbols = [
        referring,
        symbol("foredraft.core.b", 'Type of parameter "c" is partially unknown\n  Parameter type is "list[Unknown]"'),
        symbol("foredraft.core.c", "", is_known=True),
        symbol("foredraft.core.d", 'Type argument 2 for class "dict" has partially unknown type'),
        symbol("numpy.d", "Type annotation is missing", is_exported=False),
        symbol("foredraft.Session", "Type annotation is missing"),
    ]
    found = check_types.incomplete_names(symbols)
    assert {package: [line.split(":")[0] for line in lines] for package, lines in found.items()} == {
        "core": ["foredraft.core.b", "foredraft.core.d"],
        "api": ["foredraft.Session"],
    }
    assert [line.split(":")[0] for line in check_types.incomplete_names([referring])["core"]] == ["foredraft.core.a"]


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
