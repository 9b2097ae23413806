"""Change the source, one small thing at a time, and see whether a test notices: `make mutation`.

    python tests/mutation.py [--packages core sim gpu] [--judge tests|check] [--sample N] [--budget 2h] [--seed 1] [module …]
    python tests/mutation.py --again

Changes are drawn from all modules of the packages, from each package in turn, until the sample or the budget is spent. A copy of the
tree is changed, never the tree itself. For each change the tests of its folder run, then those elsewhere that import its module, then
`MORE_TESTS`; what noticed a change of this folder before comes first, and the first failure ends it. With `--judge check` it is the
components of `foretoken check` that consist of the module (`CONTRACTS`). Every run is a fork of a process that has imported the libraries,
has a limit of its own processor time, and is over when it uses none for a minute: how busy the machine is makes no difference. What
fails is run once without the change: if it fails there, too, it is named, and the change is left out.

Every outcome is a line of the results file: a second call goes on where the first one stopped, and runs again what belongs to a module
that is another one by now. A survivor is a change that was not noticed: either a test is missing, or it makes no difference; those stand
in `tests/support/equivalent_changes.json`. `--again` judges the survivors by the tests of today, and the report has both shares.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib import import_module
from itertools import zip_longest
from math import sqrt
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("core", "sim", "gpu", "properties", "checks", "observe", "cli")
CHANGED = ("core", "sim", "gpu")
LEFT_OUT = ("gpu/kernels/",)  # they need a GPU
EQUIVALENT = ROOT / "tests" / "support" / "equivalent_changes.json"
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

CHECK_SIMULATOR = "tests/checks/test_check_simulator.py::test_ours_holds"
CHECK_EXECUTOR = "tests/checks/test_check_executor.py::test_ours_hold"
CORPUS = "tests/sim/test_corpus.py"
MORE_TESTS: dict[str, tuple[str, ...]] = {
    "core/acceptance/": ("tests/checks/test_check_acceptance.py", CORPUS),
    "core/adaptive/": ("tests/properties/contracts/test_check_step_controller.py", CORPUS),
    "core/contract/future_map.py": ("tests/properties/contracts/test_check_relay.py::TestOurs",),
    "core/contract/hidden.py": ("tests/core/tree/test_tree_outputs.py",),
    "core/draws.py": (CORPUS,),
    "core/handoff/": ("tests/checks/test_check_transport.py", "tests/sim/test_disaggregated_service.py"),
    "core/kv/": (CORPUS,),
    "core/kv/allocator.py": ("tests/properties/contracts/test_check_allocator.py::TestOurs",),
    "core/kv/moves.py": ("tests/properties/contracts/test_check_accept.py::TestOurs",),
    "core/kv/radix.py": ("tests/properties/contracts/test_check_prefix_cache.py::test_ours_hold",),
    "core/scheduler/": ("tests/properties/contracts/test_check_engine.py", CORPUS, CHECK_EXECUTOR, CHECK_SIMULATOR),
    "core/tree/": ("tests/properties/contracts/test_check_accept.py::TestOurs", CHECK_EXECUTOR),
    "gpu/batch/": ("tests/gpu/executor", CHECK_EXECUTOR),
    "gpu/draft/": ("tests/gpu/executor", CHECK_EXECUTOR),
    "gpu/bench/": ("tests/cli/decode/test_bench_cli.py",),
    "gpu/executor/": (CHECK_EXECUTOR,),
    "gpu/ops/": ("tests/gpu/executor", CHECK_EXECUTOR),
    "gpu/session/": ("tests/cli/decode/test_generate.py",),
    "sim/": ("tests/sim/test_simulation.py", CORPUS, CHECK_SIMULATOR),
    "sim/disaggregation/": ("tests/sim/test_disaggregated_service.py",),
    "sim/workload/acceptance": ("tests/cli/simulation/test_acceptance_cli.py",),
}  # fmt: skip
"""Module or folder -> tests outside of its folder's own that must notice its changes, too."""

KV = ("foretoken.checks.adapters.kv_allocator:make", "foretoken.checks.adapters.kv_store:make")
PREFIXES = ("foretoken.checks.adapters.radix_cache:make", "foretoken.checks.adapters.prefix_store:make")
ENGINE = "foretoken.checks.adapters.core_engine:make"
REFERENCE, SIMULATED, TORCH = (
    f"foretoken.checks.executor.{name}_subject:make" for name in ("reference", "simulated", "torch")
)
TREES = "foretoken.checks.adapters.tree_accept:make"
SIMULATOR = "foretoken.checks.adapters.simulator:make"
CONTROLLERS = tuple(f"foretoken.checks.adapters.step_controller:make_{name}" for name in ("fixed", "ema", "goodput"))
READERS = (
    *(f"core/adaptive/{name}.py" for name in ("config", "interchange", "params", "routing")),
    *(f"core/scheduler/{name}.py" for name in ("config", "overlap_mode", "spec")),
    "core/handoff/wire.py",
    *(f"gpu/ops/{name}.py" for name in ("host_keys", "host_ops", "triton_ops")),
    *(f"sim/faults/{name}.py" for name in ("kinds", "plan")),
)
"""They read what a user has written, or are for other machines: no contract is about them."""
CONTRACTS: dict[str, tuple[str, ...]] = {
    "core/acceptance/process.py": ("foretoken.checks.acceptance.core_subject:make",),
    "core/adaptive/": CONTROLLERS,
    "core/contract/future_map.py": ("foretoken.checks.adapters.future_map:make", REFERENCE),
    "core/handoff/": ("foretoken.checks.transport.handoff_subject:make", SIMULATOR),
    "core/kv/": (*KV, *PREFIXES, ENGINE),
    "core/kv/moves.py": (TREES,),
    "core/kv/radix.py": (*PREFIXES, ENGINE),
    "core/kv/sizing.py": (ENGINE, *KV),
    "core/scheduler/": (ENGINE, REFERENCE, SIMULATOR),
    "core/tree/": (TREES, REFERENCE, SIMULATED),
    "gpu/batch/": (TORCH,),
    "gpu/executor/": (TORCH,),
    "gpu/ops/": ("foretoken.checks.adapters.torch_accept:make", TORCH),
    "sim/actors/": (SIMULATOR, SIMULATED),
    "sim/disaggregation/": (SIMULATOR,),
    "sim/faults/": (SIMULATOR,),
    "sim/run.py": (SIMULATOR,),
} | dict.fromkeys(READERS, ())
"""Module or folder -> our components that `foretoken check` checks and that consist of it; the longest name counts."""

OPPOSITE: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.Mult,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr,
}  # fmt: skip
OTHER_NAME = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}


@dataclass(frozen=True, slots=True)
class Change:
    """One change: where it stands in its module (bytes), and what stands there instead."""

    module: str
    line: int
    begin: int
    end: int
    kind: str
    new: str
    before: str  # the line as it is, and as it becomes
    after: str

    @property
    def key(self) -> str:
        return f"{self.module}:{self.line}:{self.begin}:{self.kind}"

    def applied(self, source: bytes) -> bytes:
        return source[: self.begin] + self.new.encode() + source[self.end :]


# -- changes ----------------------------------------------------------------------------------------------------------


def changes_of(module: str, source: bytes) -> list[Change]:
    """Return every change of a module, in the order of its text."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node, kind, new in _edits(ast.parse(source)):
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        changed = source[:begin] + new.encode() + source[end:]
        before, after = _line(source, begin), _line(changed, begin)
        if before != after:
            found.append(Change(module, node.lineno, begin, end, kind, new, before, after))
    return sorted(found, key=lambda change: (change.begin, change.kind))


def _line(source: bytes, at: int) -> str:
    begin = source.rfind(b"\n", 0, at) + 1
    end = source.find(b"\n", at)
    return source[begin : len(source) if end < 0 else end].decode().strip()


def _edits(tree: ast.AST) -> Iterator[tuple[ast.AST, str, str]]:
    """Yield (node, kind, the text that replaces it), outside of annotations, doc strings, assertions and messages of errors."""
    for node in _evaluated(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in OPPOSITE:
            other = ast.Compare(node.left, [OPPOSITE[type(node.ops[0])](), *node.ops[1:]], node.comparators)
            yield node, "compare", f"({ast.unparse(other)})"
        elif isinstance(node, ast.BoolOp):
            yield node, "logic", f"({ast.unparse(ast.BoolOp(OPPOSITE[type(node.op)](), node.values))})"
        elif isinstance(node, ast.BinOp) and type(node.op) in OPPOSITE:
            yield node, "arithmetic", f"({ast.unparse(ast.BinOp(node.left, OPPOSITE[type(node.op)](), node.right))})"
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, "not", f"({ast.unparse(node.operand)})"
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield node, "truth", str(not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            yield node, "number", str(node.value + 1)
        elif isinstance(node, ast.AugAssign) and type(node.op) in OPPOSITE:
            other = ast.AugAssign(node.target, OPPOSITE[type(node.op)](), node.value)
            yield node, "arithmetic", ast.unparse(other)
        elif isinstance(node, ast.Name) and node.id in OTHER_NAME:
            yield node, "name", OTHER_NAME[node.id]
        elif isinstance(node, ast.If | ast.IfExp | ast.While) and isinstance(
            node.test, ast.Name | ast.Attribute | ast.Call
        ):
            yield node.test, "condition", f"(not {ast.unparse(node.test)})"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node, "statement", "pass"
        elif isinstance(node, ast.Break | ast.Continue):
            yield node, "loop", "continue" if isinstance(node, ast.Break) else "break"


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that decide something when the module runs; a weaker assertion does not, as long as the code is right."""
    if isinstance(node, ast.Assert | ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr):
        return
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    yield node
    without = {"annotation", "returns", "decorator_list"} if not isinstance(node, ast.Expr) else set()
    for name, value in ast.iter_fields(node):
        if name in without:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _evaluated(child)


def drawn(modules: Sequence[str], seed: int, root: Path = ROOT) -> Iterator[Change]:
    """Yield all changes of the modules in random order, from each package in turn."""
    packages: dict[str, list[Change]] = {}
    for module in modules:
        packages.setdefault(module.split("/")[0], []).extend(changes_of(module, (root / module).read_bytes()))
    for changes in packages.values():
        changes.sort(key=lambda change: sha256(f"{seed} {change.key}".encode()).digest())
    for group in zip_longest(*packages.values()):
        yield from filter(None, group)


def modules_of(packages: Sequence[str], root: Path = ROOT) -> list[str]:
    """Return the modules of packages that have something to change."""
    paths = [path for package in packages for path in sorted((root / package).rglob("*.py"))]
    modules = [path.relative_to(root).as_posix() for path in paths if path.name != "__init__.py"]
    return [module for module in modules if not module.startswith(LEFT_OUT)]


def tests_of(module: str, root: Path = ROOT) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the tests that must notice a change: those of the folder that mirrors the module's, then those elsewhere.

    Of the folder's own, those named after the module come first. Elsewhere are the tests that import it, and `MORE_TESTS`.
    """
    folder, _, name = module.removesuffix(".py").rpartition("/")
    own = root / "tests" / folder
    while not own.exists():
        own = own.parent
    if own == root / "tests" / module.split("/")[0]:
        near = sorted(own.glob("test_*.py"))
    else:
        near = sorted(own.rglob("test_*.py"))
    near.sort(key=lambda path: name not in path.stem)
    imported = re.compile(rf"foretoken\.{folder.replace('/', '.')}(\.{name}\b| import .*\b{name}\b)")
    far = [path for path in sorted((root / "tests").rglob("test_*.py")) if imported.search(path.read_text("utf-8"))]
    more = [test for prefix, tests in MORE_TESTS.items() if module.startswith(prefix) for test in tests]
    near, far = (
        [path.relative_to(root).as_posix() for path in paths if path.name != "test_mutation.py"]
        for paths in (near, far)
    )
    return tuple(near), tuple(dict.fromkeys(test for test in (*far, *more) if test not in near))


def contracts_of(module: str) -> tuple[str, ...]:
    """Return the components that `foretoken check` judges a change by; none if no contract covers the module."""
    prefixes = [prefix for prefix in CONTRACTS if module.startswith(prefix)]
    return CONTRACTS[max(prefixes, key=len)] if prefixes else ()


# -- running ----------------------------------------------------------------------------------------------------------


class Noticed:
    """The part of a run of pytest that knows what failed first; examples are the same in each run, and not made smaller."""

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
    options = ["-x", "-q", "-p", "foretoken.properties.plugin", "-m", "not slow and not gpu", f"--basetemp={folder}"]
    code = pytest.main([*options, *tests], plugins=[noticed])
    return noticed.failed or ("" if code in (0, 5) else f"pytest ends with {code!r}"), dict(noticed.took_s)


def run_check(subjects: Sequence[str]) -> tuple[str, dict[str, float]]:
    """Check components in this process, as `foretoken check` does, without making what fails small. Returns what failed."""
    shrink = import_module("foretoken.properties.harness.shrink")
    shrink.MAX_ATTEMPTS = 4
    registry = import_module("foretoken.checks.registry")
    swarm = import_module("foretoken.properties.harness.swarm")
    contracts = {subject: contract for contract, subjects in registry.SUBJECTS.items() for subject in subjects}
    for name in subjects:
        make = import_module("foretoken.properties.harness.importing").load_make(name)
        budget = swarm.Budget(operations=registry.OPERATIONS[name], is_extended=True)
        suite = registry.suite_of(contracts[name])
        report = import_module("foretoken.properties.conformance").check(suite, make, budget=budget, subject=name)
        if not report.ok:
            return f"{name} {' '.join(failure.id for failure in report.failures) or 'did not come to everything'}", {}
    return "", {}


class Copy:
    """A copy of the tree in `folder`, whose package is imported instead of what is installed."""

    def __init__(
        self, folder: Path, judge: str = "tests", quick_s: int | None = None, only: Sequence[str] | None = None
    ) -> None:
        """With `quick_s` only tests of the module's own folder run, for that much processor time; with `only` these tests alone."""
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
        for package in PACKAGES:
            (self.tree / "foretoken" / package).symlink_to(self.tree / package)
        self.noticed: Counter[tuple[str, str]] = Counter()  # folder, test file -> changes that it noticed
        self._took_s: dict[tuple[str, ...], float] = {}
        self._file_took_s: dict[str, float] = {}
        self._fails_anyway: dict[str, bool] = {}
        self._written = int(time.time())

    def outcome(self, change: Change) -> tuple[str, str]:
        """Return "killed" and by what, or "survived"; "untested" if the test fails without the change, too."""
        path, folder = self.tree / change.module, change.module.rpartition("/")[0]
        if self.judge == "check":
            groups = [(name,) for name in contracts_of(change.module)]
        elif self.only is not None:
            groups = [tuple(self.only)]
        else:
            groups = [self._ordered(folder, group) for group in tests_of(change.module, self.tree)]
        if self.quick_s is not None:
            groups = groups[:1]
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
                self.noticed[folder, failed.partition("::")[0]] += 1
                return "killed", failed
        return "survived", ""

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
        output = self.folder / "output"
        said = self.folder / "said"
        said.unlink(missing_ok=True)
        begin_s = _children_s()
        child = os.fork()
        if child == 0:
            try:
                self._become_a_run(output, limit_s)
                result = run_check(targets) if self.judge == "check" else run_tests(targets, self.folder / "temp")
            except BaseException as error:
                result = f"{type(error).__name__}: {error}", {}
            said.write_text(json.dumps(result), encoding="utf-8")
            os._exit(0)
        try:
            _wait_for(child)
        finally:  # what it has started, and itself if this process is to end
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child, signal.SIGKILL)
        took_s = _children_s() - begin_s
        failed, files = json.loads(said.read_text(encoding="utf-8")) if said.exists() else (f"{LIMIT} or killed", {})
        if not failed:
            self._file_took_s |= files
        return failed, took_s

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


LIMIT = "past its limit"


def _children_s() -> float:
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


# -- results ----------------------------------------------------------------------------------------------------------


def source_of(module: str) -> str:
    """Return a short hash of a module's text, to know an outcome that belongs to another one."""
    return sha256((ROOT / module).read_bytes()).hexdigest()[:16]


def read_results(path: Path) -> dict[str, list[dict]]:
    """Return the outcomes so far that still belong to the source, oldest first, by the key of their change."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    results: dict[str, list[dict]] = {}
    for result in (json.loads(line) for line in lines if line):
        if (ROOT / result["module"]).exists() and result["source"] == source_of(result["module"]):
            results.setdefault(result["key"], []).append(result)
    return results


def interval(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson, JASA 22, 1927, p. 209)."""
    z = 1.959964
    middle, width = successes + z * z / 2, z * sqrt(successes * (trials - successes) / trials + z * z / 4)
    return (middle - width) / (trials + z * z), (middle + width) / (trials + z * z)


def report(results: Sequence[Sequence[dict]], equivalent: dict[str, str]) -> str:
    """Return killed, survived and equivalent by package, with the share at first and now, and every survivor."""
    counts: dict[str, Counter[str]] = {}
    survivors = []
    for outcomes in sorted(results, key=lambda outcomes: (outcomes[0]["module"], outcomes[0]["line"])):
        first, last = outcomes[0], outcomes[-1]
        count = counts.setdefault(first["module"].split("/")[0], Counter())
        if last["outcome"] == "survived" and f"{first['module']}: {first['before']} -> {first['after']}" in equivalent:
            count["equivalent"] += 1
            continue
        count[last["outcome"]] += 1
        count["at first"] += first["outcome"] == "killed"
        if last["outcome"] == "survived":
            survivors.append(f"{first['module']}:{first['line']}\n    - {first['before']}\n    + {first['after']}")
    heads = ("package", "killed", "survived", "equivalent", "at first", "now", "95 % interval")
    rows = [("{:<10}" + "{:>11}" * 5 + "{:>16}").format(*heads)]
    for package, count in sorted(counts.items()):
        if told := count["killed"] + count["survived"]:
            low, high = interval(count["killed"], told)
            shares = f"{count['at first'] / told:>11.0%}{count['killed'] / told:>11.0%}{f'{low:.0%} to {high:.0%}':>16}"
            rows.append(f"{package:<10}{count['killed']:>11}{count['survived']:>11}{count['equivalent']:>11}{shares}")
    return "\n".join([*survivors, "", *rows])


def seconds_of(text: str) -> float:
    match = re.fullmatch(r"(\d+)(s|m|h)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a time, such as 600s, 10m or 2h")
    return int(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def main() -> int:
    parser = argparse.ArgumentParser(description="Change the source, one small thing at a time.")
    parser.add_argument("modules", nargs="*", help="as in core/contract/hidden.py; all of the packages by default")
    parser.add_argument("--packages", nargs="+", choices=CHANGED, default=list(CHANGED))
    parser.add_argument("--judge", choices=("tests", "check"), default="tests", help="what must notice a change")
    parser.add_argument(
        "--quick",
        type=int,
        metavar="S",
        help="only the tests of the module's folder, for S seconds; --again goes further",
    )
    parser.add_argument(
        "--tests", nargs="+", help="these tests alone; with --again, for the survivors that they concern"
    )
    parser.add_argument("--sample", type=int, help="changes of each package at most, those of earlier calls included")
    parser.add_argument("--budget", type=seconds_of, default=seconds_of("2h"), help="600s, 10m, 2h")
    parser.add_argument("--seed", type=int, default=1, help="another seed draws other changes first")
    parser.add_argument("--again", action="store_true", help="judge the survivors again, and nothing else")
    parser.add_argument(
        "--results", type=Path, help="runs/mutation.jsonl by default, runs/mutation_check.jsonl of check"
    )
    options = parser.parse_args()
    unknown = [module for module in options.modules if not (ROOT / module).is_file()]
    if unknown:
        parser.error(f"no such module: {', '.join(unknown)}")
    modules = options.modules or modules_of(options.packages)
    if options.judge == "check":
        modules = [module for module in modules if contracts_of(module)]
    path = options.results or ROOT / "runs" / ("mutation.jsonl" if options.judge == "tests" else "mutation_check.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    results = {key: outcomes for key, outcomes in read_results(path).items() if outcomes[0]["module"] in set(modules)}
    equivalent = json.loads(EQUIVALENT.read_text(encoding="utf-8"))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, path.open("a", encoding="utf-8") as file:
        copy = Copy(Path(folder), options.judge, options.quick, options.tests)
        warm_up()
        for change in remaining(modules, options, results):
            if (spent_s := time.monotonic() - begin) >= options.budget:
                break
            used_s = _children_s()
            outcome, by = copy.outcome(change)
            used_s = _children_s() - used_s
            print(f"[{spent_s:.0f} s] {change.key} {outcome} in {used_s:.1f} s {by}", file=sys.stderr, flush=True)
            if outcome == "untested":
                continue
            result = {
                "key": change.key,
                "source": source_of(change.module),
                "outcome": outcome,
                "by": by,
                **asdict(change),
            }
            results.setdefault(change.key, []).append(result)
            print(json.dumps(result), file=file, flush=True)
    print(report(list(results.values()), equivalent))
    return 0


def remaining(modules: Sequence[str], options: argparse.Namespace, results: dict[str, list[dict]]) -> Iterator[Change]:
    """Yield the changes that are still to be judged."""
    there = Counter(key.split("/")[0] for key in results)
    survivors = {key for key, outcomes in results.items() if outcomes[-1]["outcome"] == "survived"}
    for change in drawn(modules, options.seed):
        package = change.module.split("/")[0]
        if options.again:
            if change.key in survivors:
                yield change
        elif change.key not in results and (options.sample is None or there[package] < options.sample):
            there[package] += 1
            yield change


def warm_up() -> None:
    """Import what every run needs and no change touches."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for library in LIBRARIES:
        with suppress(ImportError):
            import_module(library)


if __name__ == "__main__":
    raise SystemExit(main())
