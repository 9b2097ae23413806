"""The worked example of docs/properties.md: the code that stands there fails as it says there."""

import re
from pathlib import Path

from foretoken.properties.conformance import check
from foretoken.properties.suites import suite_of

ALLOCATOR = suite_of("allocator")

TEXT = (Path(__file__).parents[3] / "docs" / "properties.md").read_text(encoding="utf-8")


def test_the_bug_in_twenty_lines():
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "class Blocks" in block]
    (console,) = re.findall(r"```console\n\$ foretoken check .*?\n(.*?)```", TEXT, re.DOTALL)
    names = {}
    exec(compile(code, "docs/properties.md", "exec"), names)
    report = check(ALLOCATOR, names["Blocks"], capabilities=("misuse",), budget=20_000, subject="blocks:Blocks")
    (failure,) = report.failures
    replay = "foretoken check --replay runs/cases/allocator-ALLOC-10.case.json"
    assert failure.text(replay) == console.rstrip("\n")
