"""docs/programs.md: its Python programs print what is shown, and it names every command without `--json`."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
from foredraft.cli.simulation.schema import WITHOUT

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/programs.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
SLOW = ("calibrate", "plan", "tune")


def name_of(program: str) -> str:
    return re.search(r"foredraft\.(\w+)\(", program)[1]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
        for name in (name_of(p) for p, _ in PROGRAMS)
    ],
)
def test_a_program_prints_what_is_shown(monkeypatch, name):
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {}
    service = re.search(r"^service = .*$", TEXT, re.MULTILINE)
    exec("import foredraft\n" + service[0], names)
    (program, shown) = next(pair for pair in PROGRAMS if name_of(pair[0]) == name)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program, names)
    assert printed.getvalue() == shown


def test_every_function_has_a_program():
    assert [name_of(program) for program, _ in PROGRAMS] == ["cost", "doctor", "calibrate", "plan", "tune"]


def test_the_page_names_the_commands_without_json():
    for name, reason in WITHOUT.items():
        (row,) = (line for line in TEXT.splitlines() if line.startswith("| `") and f"`{name}`" in line)
        assert reason.split(maxsplit=1)[1].partition(";")[0] in row
