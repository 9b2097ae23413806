"""Judging a change in a copy of the tree: every run is a fork, with a limit of its own processor time."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from changes import ROOT, Change
from judges import Reach, tests_of, that_run, watched

PACKAGES = ("core", "sim", "gpu", "properties", "checks", "observe", "planning", "twin", "cli")
LEFT_BEHIND = ("build", "dist", "runs", "site")  # what is made here
LEAST_LIMIT_S, TIMES_SLOWER = 60, 4  # of processor time
IDLE_LIMIT_S = 60.0
LIBRARIES = (
    "numpy",
    "pytest",
    "hypothesis",
    "hypothesis.stateful",
    "pydantic",
    "typer.testing",
    "rich",
    "simpy",
    "pyarrow.parquet",
    "torch",
)
LIMIT = "past its limit"
WATCHED_SHARE = 0.1


class Noticed:
    """The part of a run of pytest that knows what failed first;
    examples are the same in each run, and not made smaller."""

    def __init__(self) -> None:
        self.failed = ""
        self.took_s: Counter[str] = Counter()  # by file

    def pytest_configure(self, config: Any) -> None:
        from hypothesis import Phase, settings

        quick = settings(derandomize=True, database=None, phases=[Phase.explicit, Phase.generate], print_blob=False)
        settings.register_profile("mutation", quick)
        settings.load_profile("mutation")

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.took_s[report.nodeid.partition("::")[0]] += report.duration
        self.pytest_collectreport(report)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid


def run_tests(tests: Sequence[str], folder: Path) -> tuple[str, dict[str, float]]:
    """Run tests in this process. Returns what failed, nothing if all is well, and how long each file took."""
    import pytest

    noticed = Noticed()
    options = ["-x", "-q", "-p", "foredraft.properties.plugin", "-m", "not slow and not gpu", f"--basetemp={folder}"]
    code = pytest.main([*options, *tests], plugins=[noticed])
    return noticed.failed or ("" if code in (0, 5) else f"pytest ends with {code!r}"), dict(noticed.took_s)


def run_check(subjects: Sequence[str], share: float = 1.0) -> tuple[str, dict[str, float]]:
    """Check components in this process, as `foredraft check` does, without making what fails small. Returns what
    failed.

    `share`: of the operations; further ones only until all invariants and operations have come up.
    """
    shrink = import_module("foredraft.properties.harness.shrink")
    shrink.MAX_ATTEMPTS = 4
    registry = import_module("foredraft.checks.registry")
    swarm = import_module("foredraft.properties.harness.swarm")
    contracts = {subject: contract for contract, subjects in registry.SUBJECTS.items() for subject in subjects}
    for name in subjects:
        make = import_module("foredraft.properties.harness.importing").load_make(name)
        budget = swarm.Budget(operations=int(share * registry.OPERATIONS[name]), is_extended=True)
        suite = import_module("foredraft.properties.suites").suite_of(contracts[name])
        report = import_module("foredraft.properties.conformance").check(suite, make, budget=budget, subject=name)
        if not report.ok:
            return f"{name} {' '.join(failure.id for failure in report.failures) or 'did not come to everything'}", {}
    return "", {}


def lines_run_by(subject: str, root: Path) -> dict[str, list[int]]:
    """Check a component in this process, however long it takes, and return the lines that it runs, by module.

    It goes through a tenth of its operations, since it is slow while it is watched: a line that is rarer is not noted.
    """
    import_module("foredraft.properties.harness.suite").alarm = lambda limit_s: nullcontext()
    with watched(root) as lines:
        failed, _ = run_check([subject], WATCHED_SHARE)
    assert not failed, failed
    return {module: sorted(of_one) for module, of_one in sorted(lines.items())}


class Copy:
    """A copy of the tree in `folder`, whose package is imported instead of what is installed."""

    def __init__(
        self, folder: Path, judge: str = "tests", quick_s: int | None = None, only: Sequence[str] | None = None
    ) -> None:
        """With `quick_s` only tests of the module's own folder run, for that much processor time;
        with `only` these tests alone."""
        self.folder, self.judge, self.quick_s, self.only = folder, judge, quick_s, only
        self.tree = folder / "tree"
        skip = shutil.ignore_patterns("__pycache__", "*.pyc")
        for path in ROOT.iterdir():
            if path.name.startswith(".") or path.name in LEFT_BEHIND:
                continue
            if path.is_dir():
                shutil.copytree(path, self.tree / path.name, ignore=skip)
            else:
                self.tree.mkdir(exist_ok=True)
                shutil.copy(path, self.tree)
        package = self.tree / "foredraft"
        package.mkdir()
        for path in [*(self.tree / "api").iterdir(), *(self.tree / folder for folder in PACKAGES)]:
            (package / path.name).symlink_to(path)
        self.reach: dict[str, Reach] = {}  # of the components by which `check` judges
        self.noticed: Counter[tuple[str, str]] = Counter()  # folder, test file or component -> changes that it noticed
        self._took_s: dict[tuple[str, ...], float] = {}
        self._file_took_s: dict[str, float] = {}
        self._fails_anyway: dict[str, bool] = {}
        self._written = int(time.time())

    def outcome(self, change: Change) -> tuple[str, str]:
        """Return "killed" and by what, or "survived"; "untested" if the test fails without the change, too."""
        path, folder = self.tree / change.module, change.module.rpartition("/")[0]
        if self.judge == "check":
            groups = [(name,) for name in self._promising(folder, that_run(change, self.reach))]
        elif self.only is not None:
            groups = [tuple(self.only)]
        else:
            groups = [self._ordered(folder, group) for group in tests_of(change.module, self.tree)]
        if self.quick_s is not None:
            groups = [group for group in groups if group][:1]  # those elsewhere where the folder has none
        source = path.read_bytes()
        for group in filter(None, groups):
            self._write(path, change.applied(source))
            try:
                failed, took_s = self._run(group, self._limit_s(group))
            finally:
                self._write(path, source)
            if self.quick_s is not None and failed.startswith(LIMIT):
                return "survived", failed
            if not failed:
                self._took_s[self._known(group)] = took_s
            elif self._fails_without(failed, group):
                return "untested", failed
            else:
                self.noticed[folder, group[0] if self.judge == "check" else failed.partition("::")[0]] += 1
                return "killed", failed
        return "survived", ""

    def subjects(self) -> list[str]:
        """Return all components of ours that `foredraft check` checks."""
        return self._fork(lambda: list(import_module("foredraft.checks.registry").OPERATIONS), None)[0]

    def measure(self, subject: str) -> Reach:
        """Check one component as it is, and note what it runs. Raises RuntimeError if the check fails."""
        said, seconds = self._fork(lambda: lines_run_by(subject, self.tree.resolve()), None)
        if not isinstance(said, dict):
            raise RuntimeError(f"the check of {subject} failed: {said}")
        return Reach(seconds, said)

    def _promising(self, folder: str, subjects: Sequence[str]) -> list[str]:
        """Put the components first that noticed most for the time that their checks take."""
        return sorted(subjects, key=lambda name: self.reach[name].seconds / (1 + self.noticed[folder, name]))

    def _ordered(self, folder: str, tests: tuple[str, ...]) -> tuple[str, ...]:
        """Return tests in the order in which a failure is probably found soonest."""

        def promise(test: str) -> tuple[float, float]:
            file = test.partition("::")[0]
            return -self.noticed[folder, file], self._file_took_s.get(file, 0.0)

        return tuple(sorted(tests, key=promise))

    def _known(self, group: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(sorted(group))

    def _limit_s(self, group: tuple[str, ...]) -> int:
        if self.quick_s is not None:
            return self.quick_s
        return int(max(LEAST_LIMIT_S, TIMES_SLOWER * self._took_s.get(self._known(group), 0.0)))

    def _fails_without(self, failed: str, group: tuple[str, ...]) -> bool:
        """Run what failed on the source as it is."""
        if failed.startswith(LIMIT):
            if self._known(group) in self._took_s:
                return False
            again, self._took_s[self._known(group)] = self._run(group, None)
            return bool(again) or TIMES_SLOWER * self._took_s[self._known(group)] > LEAST_LIMIT_S
        target = group if self.judge == "check" or "::" not in failed else (failed.partition("[")[0],)
        if failed.partition("[")[0] not in self._fails_anyway:
            self._fails_anyway[failed.partition("[")[0]] = bool(self._run(target, None)[0])
        return self._fails_anyway[failed.partition("[")[0]]

    def _write(self, path: Path, source: bytes) -> None:
        """Write a module with a time of its own, by which Python knows that what it compiled before is another one."""
        path.write_bytes(source)
        self._written += 2
        os.utime(path, (self._written, self._written))

    def _run(self, targets: tuple[str, ...], limit_s: int | None) -> tuple[str, float]:
        """Run targets in a fork. Returns what failed, and the processor time it took."""
        run = (
            partial(run_check, targets) if self.judge == "check" else partial(run_tests, targets, self.folder / "temp")
        )
        said, took_s = self._fork(run, limit_s)
        failed, files = said or (f"{LIMIT} or killed", {})
        if not failed:
            self._file_took_s |= files
        return failed, took_s

    def _fork(self, run: Callable[[], Any], limit_s: int | None) -> tuple[Any, float]:
        """Run a function in a fork. Returns what it returns, None if it was ended, and the processor time it took."""
        output = self.folder / "output"
        said = self.folder / "said"
        said.unlink(missing_ok=True)
        begin_s = children_s()
        child = os.fork()
        if child == 0:
            try:
                self._become_a_run(output, limit_s)
                result = run()
            except BaseException as error:
                result = f"{type(error).__name__}: {error}", {}
            said.write_text(json.dumps(result), encoding="utf-8")
            os._exit(0)
        try:
            _wait_for(child)
        finally:  # what it has started, and itself if this process is to end
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child, signal.SIGKILL)
        result = json.loads(said.read_text(encoding="utf-8")) if said.exists() else None
        return result, children_s() - begin_s

    def _become_a_run(self, output: Path, limit_s: int | None) -> None:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        if limit_s is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 5))
        os.chdir(self.tree)
        os.environ |= {"PYTHONPATH": str(self.tree), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        sys.dont_write_bytecode = False
        sys.path[0] = str(self.tree)
        sys.argv = ["pytest"]


def children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _wait_for(child: int) -> None:
    """Wait for the end of a process; end it, and its session, once that used no processor time for a minute."""
    used_s, since_s, pause_s = -1.0, time.monotonic(), 0.01
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 0.5)
        if (now_s := time.monotonic()) - since_s < IDLE_LIMIT_S:
            continue
        if (used_now_s := _session_s(child)) <= used_s:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return
        used_s, since_s = used_now_s, now_s


def _session_s(leader: int) -> float:
    """Return the processor time, in clock ticks, of all processes of a session (Linux: /proc, man 5 proc)."""
    ticks = 0.0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader:
                ticks += sum(map(int, fields[11:15]))
    return ticks


def warm_up() -> None:
    """Import what every run needs and no change touches."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for library in LIBRARIES:
        with suppress(ImportError):
            import_module(library)
