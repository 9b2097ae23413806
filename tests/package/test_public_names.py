"""What is public (docs/stability.md) is stored in public_names.txt:
a name that goes or changes is noticed, and is news for users."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from public_names import STORED, public_lines

ROOT = Path(__file__).resolve().parents[2]
UPDATE = "run `python tests/package/public_names.py --write`, and say in CHANGELOG.md what users must change (docs/stability.md)"


def differences(stored: list[str], found: list[str]) -> str:
    """Return what is gone and what is new, a line each; empty if nothing is."""
    gone, new = ([line for line in one if line not in set(other)] for one, other in ((stored, found), (found, stored)))
    return "\n".join([*(f"gone or changed: {line}" for line in gone), *(f"new: {line}" for line in new)])


def test_the_public_names_are_those_that_are_stored():
    found = differences(STORED.read_text(encoding="utf-8").splitlines(), public_lines())
    assert not found, f"{found}\n{UPDATE}"


def test_each_kind_of_name_is_listed():
    """A list that misses a kind would hold whatever is renamed."""
    lines = set(STORED.read_text(encoding="utf-8").splitlines())
    expected = {"python foredraft.simulate", "command foredraft simulate", "scenario workload.output.kind"}
    assert lines >= expected | {"command foredraft export", "scenario hardware.server"}
    assert not [line for line in lines if re.search(r"[. ]_[a-z]", line)], "a name with an underscore is private"


def test_a_name_that_goes_is_noticed():
    before = ["command foredraft simulate --set", "scenario seed"]
    assert differences(before, before) == ""
    after = ["command foredraft simulate --setting", "scenario seed"]
    gone, new = differences(before, after).splitlines()
    assert gone == "gone or changed: command foredraft simulate --set" and new.startswith("new: ")


def test_the_list_is_made_by_one_command():
    done = subprocess.run(
        [sys.executable, "-P", ROOT / "tests/package/public_names.py"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, STORED.read_text(encoding="utf-8"))
