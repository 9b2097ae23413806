"""Components that raise, hang, answer nonsense or lie are reported as that, with the operation."""

import json
import os
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import bad_allocators as bad
import pytest
from foredraft.properties.allocator.plain import make as make_plain
from foredraft.properties.conformance import check
from foredraft.properties.harness.suite import Hanging, alarm, can_interrupt
from foredraft.properties.suites import suite_of

ALLOCATOR = suite_of("allocator")


def failure_of(make, **options):
    report = check(ALLOCATOR, make, budget=20_000, **options)
    assert not report.ok
    (failure,) = report.failures
    return failure


@pytest.mark.parametrize(
    ("make", "capabilities", "id", "words"),
    [
        (bad.Raises, ("misuse",), "RAISES", "free raised KeyError"),
        (bad.AnswersWithText, (), "TYPE", "str '2'"),
        (bad.AnswersWithFloats, (), "TYPE", "0.0"),
        (bad.AnswersWithColumns, (), "TYPE", "[[0]]"),
        (bad.AnswersWithManyTruths, (), "TYPE", "could not be read: ValueError"),
        (bad.CountsInTruth, (), "TYPE", "num_free() is bool True"),
        (bad.Unfinished, ("inspection",), "CAPABILITY", "free_pages is not implemented"),
        (bad.ListAllocator, ("inspection", "sharing"), "CAPABILITY", "free_pages (inspection), share (sharing)"),
        (bad.CannotBeMade, (), "RAISES", "no such thing"),
        (bad.OneAtATime, ("sharing",), "ALLOC-04", "references(0) is 1"),
    ],
)
def test_it_is_reported_as_what_it_is(make, capabilities, id, words):
    failure = failure_of(make, capabilities=capabilities)
    assert failure.id == id
    assert words in failure.finding.was
    assert len(failure.case.operations) <= 3


def test_a_machine_that_stalls_once_is_no_component_that_hangs(monkeypatch):
    monkeypatch.setattr("foredraft.properties.harness.suite.RUN_LIMIT_S", 0.4)
    stalls = iter([False, True])  # not at the first call, which only warms up

    def make(config):
        if next(stalls, False):
            threading.Event().wait()
        return make_plain(config)

    assert check(ALLOCATOR, make, capabilities=make_plain.capabilities, budget=2_000).ok


@pytest.mark.fast("SwallowsEverything")
@pytest.mark.parametrize("make", [bad.Hangs, bad.SwallowsEverything])
def test_what_hangs_is_stopped_and_shrunk(make, monkeypatch):
    monkeypatch.setattr("foredraft.properties.harness.suite.RUN_LIMIT_S", 0.4)
    monkeypatch.setattr("foredraft.properties.harness.shrink.HANG_LIMIT_S", 0.04)
    failure = failure_of(make)
    assert failure.id == "HANGS" and "did not return" in failure.finding.was
    assert len(failure.case.operations) <= 4
    assert failure.case.operations[-1].tag == "free", "the operation that hangs is the last"


def test_a_refusal_is_no_accident():
    """AssertionError, ValueError, RuntimeError, None and False say no; the suite takes them all."""

    class Asserts(bad.ListAllocator):
        def free(self, slots):
            assert self.held.issuperset(slots), slots
            super().free(slots)

        def alloc(self, n):
            if n > len(self.pages):
                raise MemoryError
            return super().alloc(n)

    assert check(ALLOCATOR, Asserts, budget=5_000).ok


def test_the_alarm_rings_once_and_is_gone():
    with pytest.raises(Hanging), alarm(0.05):
        while True:
            pass
    with alarm(5.0):
        pass
    done = []

    def elsewhere():
        with alarm(0.01):
            done.append(can_interrupt())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert done == [False] and can_interrupt()


def checked(name: str, *options: str, most_files: int = 0) -> subprocess.CompletedProcess[str]:
    """Check a bad allocator in a process of its own, which may open so many files."""
    line = [sys.executable, "-P", "-m", "foredraft", "check", "allocator", f"bad_allocators:{name}", *options]
    limit = f"ulimit -n {most_files}; " if most_files else ""
    line = ["bash", "-c", limit + shlex.join([*line, "--budget", "5000"])]
    return subprocess.run(line, cwd=Path(bad.__file__).parent, capture_output=True, text=True, timeout=300)


@pytest.mark.ci
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_copy_of_a_process_that_a_call_forks_ends():
    """Only one process goes on with the check and prints its report."""
    done = checked("Forks")
    assert (done.returncode, done.stdout.count("\nok\n")) == (0, 1), done.stderr
    assert done.stderr.count("a call of the component forked") == 1


@pytest.mark.ci
@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="the system does not tell its open files")
def test_files_that_stay_open_are_counted_until_there_can_be_no_more():
    done = checked("LeavesFilesOpen")
    assert done.returncode == 0 and re.search(r"\nleft behind by the component: \d+ open files\n", done.stdout)
    done = checked("LeavesFilesOpen", most_files=40)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert "LeavesFilesOpen: it leaves files open: after" in done.stderr and "can open no more" in done.stderr


def test_a_closed_output_is_no_error():
    command = f"exec {sys.executable} -m foredraft.cli check relay --budget 4000 >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_threads_that_nothing_ends_are_counted_and_do_not_keep_the_command():
    done = checked("LeavesThreads")
    assert done.returncode == 0 and re.search(r"\nleft behind by the component: \d+ threads\n", done.stdout)


KEEPS_MEMORY = """
import bad_allocators as bad
from foredraft.cli.checking import printed
from foredraft.properties.conformance import check
from foredraft.properties.suites import suite_of

printed.MOST_MEMORY_MIB = 50
with printed.held_back() as traces:
    check(suite_of("allocator"), bad.KeepsMemory, budget=5_000)
    assert bad.KEPT
print(traces.lines())
"""


@pytest.mark.ci
def test_memory_that_is_kept_is_reported():
    """In a process of its own: elsewhere it may fit into what others have freed."""
    line = [sys.executable, "-c", KEEPS_MEMORY]
    done = subprocess.run(line, cwd=Path(bad.__file__).parent, capture_output=True, text=True, timeout=300)
    assert re.fullmatch(r"\nleft behind by the component: \d+ MiB of memory\n", done.stdout), done.stderr


@pytest.mark.ci
def test_what_is_written_past_python_stands_in_no_document():
    found = checked("WritesToTheOutput", "--json")
    assert json.loads(found.stdout)["ok"], found.stderr
    assert re.search(r"not shown: \d+,\d{3},000 characters, first 'xxx", checked("WritesToTheOutput").stdout)
