"""The pytest plugin, the base class and the entry points, in a process of their own."""

import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import bad_allocators
import pytest

TESTS = """
from bad_allocators import Exact, ListAllocator
from foredraft.properties.conformance import AllocatorConformance, check_allocator
from foredraft.properties.harness.machines import machine
from foredraft.properties.suites import suite_of

class TestGood(AllocatorConformance):
    def make(self, config):
        return ListAllocator(config)

class TestBad(AllocatorConformance):
    def make(self, config):
        return Exact(config)

class TestKnown(TestBad):
    expected_failures = {"ALLOC-14": "issue 12"}

def test_in_one_call():
    check_allocator(ListAllocator, budget=2000)

def test_that_fails():
    check_allocator(lambda config: Exact(config), budget=2000)

TestMachine = machine(suite_of("allocator"), Exact).TestCase
"""


@pytest.fixture
def run_pytest(tmp_path):
    (tmp_path / "bad_allocators.py").write_text(Path(bad_allocators.__file__).read_text(encoding="utf-8"))
    (tmp_path / "test_theirs.py").write_text(TESTS)

    def run(*arguments):
        is_installed = any(point.name == "foredraft" for point in entry_points(group="pytest11"))
        plugins = ["no:cacheprovider", "no:xdist", "no:schemathesis", "no:benchmark"]
        plugins += [] if is_installed else ["foredraft.properties.plugin"]
        line = [
            sys.executable,
            "-m",
            "pytest",
            *(word for name in plugins for word in ("-p", name)),
            "--strict-markers",
        ]
        return subprocess.run([*line, *arguments], cwd=tmp_path, capture_output=True, text=True)

    return run


def test_the_plugin_marks_conformance_tests_and_says_what_ran(run_pytest):
    done = run_pytest("-v", "-rs", "-m", "foredraft", "--foredraft-seed", "7", "--foredraft-budget", "4000")
    assert done.returncode == 1
    assert "TestGood::test_alloc_16 PASSED" in done.stdout and "TestGood::test_behaves PASSED" in done.stdout
    assert "test_in_one_call" not in done.stdout
    assert "1 failed" in done.stdout and "ALLOC-14" in done.stdout
    assert "needs sharing" in done.stdout
    section = done.stdout.partition("= foredraft =")[2]
    assert "allocator test_theirs:TestGood: seed 7, 4," in section and "all hold" in section
    assert "allocator test_theirs:TestBad: seed 7" in section and "ALLOC-14 is broken" in section
    (known,) = [line for line in section.splitlines() if "TestKnown" in line]
    assert known.endswith("operations, 1 broken as expected (ALLOC-14), the others hold")
    assert "TestKnown::test_alloc_14 XFAIL" in done.stdout and "1 xfailed" in done.stdout


@pytest.mark.ci
def test_a_failure_leaves_its_case_a_command_and_a_test(run_pytest, tmp_path):
    done = run_pytest("-k", "alloc_14 or that_fails or Machine", "--foredraft-budget", "4000")
    assert done.returncode == 1 and "3 failed" in done.stdout
    names = ["test_theirs-TestBad", "test_theirs-test_that_fails-locals-lambda", "bad_allocators-Exact"]
    kept = sorted(path.name for path in (tmp_path / "runs" / "cases").iterdir())
    assert kept == sorted(f"{name}-ALLOC-14.case.json" for name in names)
    assert "check allocator MODULE:MAKE --replay runs/cases/test_theirs-test_that_fails" in done.stdout
    (command,) = re.findall(r"^replay foredraft (check --replay \S+TestBad\S+)$", done.stdout, re.MULTILINE)
    again = subprocess.run(
        [sys.executable, "-m", "foredraft", *command.split()], cwd=tmp_path, capture_output=True, text=True
    )
    assert again.returncode == 1 and "ALLOC-14" in again.stdout
    tests = re.findall(r"^from pathlib import Path\n\n.*?\n    check_case.*?\n", done.stdout, re.MULTILINE | re.DOTALL)
    (test,) = [test for test in tests if "TestBad" in test]
    (tmp_path / "runs" / "cases" / "test_kept.py").write_text(test)
    kept = run_pytest("runs/cases/test_kept.py")
    assert kept.returncode == 1 and "test_alloc_14" in kept.stdout and "were refused" in kept.stdout


@pytest.mark.ci
def test_a_case_that_cannot_be_written_hides_no_failure(run_pytest, tmp_path):
    (tmp_path / "file").write_text("")
    done = run_pytest("-k", "that_fails", "--foredraft-cases", "file/cases")
    assert done.returncode == 1 and "the case cannot be written to file/cases" in done.stdout
    assert "ALLOC-14" in done.stdout
