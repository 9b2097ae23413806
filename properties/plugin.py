"""The pytest plugin: a marker for property checks, a seed on the command line, and a line per component at the end.

Active where the package is installed (entry point `pytest11`), or with `-p foredraft.properties.plugin`.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .conformance import Conformance


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("foredraft", "foredraft property checks")
    group.addoption("--foredraft-seed", type=int, help="seed of conformance classes, instead of their own")
    group.addoption("--foredraft-cases", default="runs/cases", help="directory for the cases of failed tests")
    group.addoption("--foredraft-budget", help="budget of conformance classes: a number of operations, or a time (60s)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "foredraft(contract): a conformance check of a contract")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give conformance classes the marker, and the seed and budget of the command line."""
    for item in items:
        cls = _conformance_class(item)
        if cls is None:
            continue
        item.add_marker(pytest.mark.foredraft(cls.contract))
        seed, budget = config.getoption("--foredraft-seed"), config.getoption("--foredraft-budget")
        if seed is not None:
            cls.seed = seed
        if budget is not None:
            cls.budget = budget


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, object]:
    """Note which implementation ran with which seed;
    with several workers the note travels as a property of the report."""
    skip = None if call.excinfo is None else call.excinfo.value  # pytest replaces one of unittest by its own
    report: Any = yield
    error = None if call.excinfo is None else call.excinfo.value
    if report.when == "call" and error is not None:
        _leave_cases(item, error, report)
        _expect(skip, report)
    cls = _conformance_class(item)
    done = vars(cls).get("_report") if cls is not None else None
    if report.when == "call" and done is not None:
        line = f"{done.contract} {done.subject}: seed {done.seed}, {done.num_operations:,} operations, "
        report.user_properties.append(("foredraft", line + done.in_short()))
    return report


def _expect(error: BaseException, report: pytest.TestReport) -> None:
    """Make a test of an invariant that is broken as announced an expected failure."""
    conformance = sys.modules.get("foredraft.properties.conformance")
    if conformance is not None and isinstance(error, conformance.BrokenAsExpected):
        report.outcome, report.wasxfail = "skipped", str(error)  # as pytest itself marks such a report


def _leave_cases(item: pytest.Item, error: BaseException, report: pytest.TestReport) -> None:
    """Store the cases of a failure, and say in the test's report how they are run again."""
    failures = getattr(error, "failures", None) or ([error.failure] if hasattr(error, "failure") else [])
    if "foredraft.properties.harness.report" not in sys.modules:
        return
    from .harness.report import Failure, left_behind

    for failure in failures:
        if isinstance(failure, Failure):
            folder = Path(item.config.getoption("--foredraft-cases"))
            report.sections.append((f"case of {failure.id}", left_behind(failure, folder)))


def pytest_terminal_summary(terminalreporter: object) -> None:
    lines: dict[str, None] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            lines.update((value, None) for name, value in getattr(report, "user_properties", ()) if name == "foredraft")
    if lines:
        terminalreporter.section("foredraft")
        for line in sorted(lines):
            terminalreporter.line(line)


def _conformance_class(item: pytest.Item) -> type[Conformance] | None:
    cls, conformance = getattr(item, "cls", None), sys.modules.get("foredraft.properties.conformance")
    if cls is None or conformance is None:  # a test that has such a class has imported the suite
        return None
    return cls if issubclass(cls, conformance.Conformance) else None
