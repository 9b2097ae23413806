"""Change the source, one small thing at a time, and see whether a test notices: `make mutation`.

    python tests/mutation.py [--packages core sim gpu] [--budget 2h] [--seed 1] [--results FILE] [module …]

Changes are drawn from all modules of the packages, from each package in turn, until the budget is spent. A copy of the tree is changed,
never the tree itself, and for each change only the tests of its folder run (`tests_of`). Every outcome is a line of the results file: a
second call goes on where the first one stopped, and runs again what belongs to a module that is another one by now. A survivor is a change
that no test noticed: either a test is missing, or it makes no difference; those stand in `tests/support/equivalent_changes.json`.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("core", "sim", "gpu", "properties", "checks", "observe", "cli")
CHANGED = ("core", "sim", "gpu")
LEFT_OUT = ("gpu/kernels/",)  # they need a GPU
EQUIVALENT = ROOT / "tests" / "support" / "equivalent_changes.json"
LEAST_TIMEOUT_S, TIMES_SLOWER = 30.0, 5.0

MORE_TESTS: dict[str, tuple[str, ...]] = {
    "core/contract/future_map.py": ("tests/properties/contracts/test_check_relay.py::TestOurs",),
    "core/contract/hidden.py": ("tests/core/tree/test_tree_outputs.py",),
    "core/kv/allocator.py": ("tests/properties/contracts/test_check_allocator.py::TestOurs",),
    "core/kv/moves.py": ("tests/properties/contracts/test_check_accept.py::TestOurs",),
    "core/kv/radix.py": ("tests/properties/contracts/test_check_prefix_cache.py::test_ours_hold",),
    "sim/actors/": ("tests/sim/test_simulation.py",),
    "sim/disaggregation/": ("tests/sim/test_disaggregated_service.py",),
    "gpu/batch/": ("tests/gpu/executor",),
    "gpu/ops/": ("tests/gpu/executor",),
    "sim/": ("tests/sim/test_simulation.py", "tests/checks/test_check_simulator.py::test_ours_holds"),
}
"""Module or folder -> tests outside of its folder's own that must notice its changes, too. A module has those of its folder."""

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
    """Yield (node, kind, the text that replaces it), outside of annotations, doc strings and messages of errors."""
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
    """Yield the nodes that decide something when the module runs."""
    if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr):
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


def tests_of(module: str, root: Path = ROOT) -> tuple[str, ...]:
    """Return the tests that must notice a change: those of the folder that mirrors the module's, and `MORE_TESTS`."""
    folder = module.rpartition("/")[0]
    own = root / "tests" / folder
    while not own.exists():
        own = own.parent
    if own == root / "tests" / module.split("/")[0]:
        found = sorted(path.relative_to(root).as_posix() for path in own.glob("test_*.py"))
    else:
        found = [own.relative_to(root).as_posix()]
    more = MORE_TESTS.get(module, ()) + MORE_TESTS.get(f"{folder}/", ())
    return tuple(dict.fromkeys([*found, *more]))


# -- running ----------------------------------------------------------------------------------------------------------


class Copy:
    """A copy of the tree in `folder`, whose package is imported instead of what is installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        skip = shutil.ignore_patterns("__pycache__", "*.pyc")
        for name in (*PACKAGES, "foretoken", "tests", "docs", "examples"):
            shutil.copytree(ROOT / name, folder / name, ignore=skip)
        for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "Makefile"):
            shutil.copy(ROOT / name, folder / name)
        for package in PACKAGES:
            (folder / "foretoken" / package).symlink_to(folder / package)
        self._took_s: dict[tuple[str, ...], float] = {}

    def outcome(self, change: Change) -> str:
        """Return "killed" or "survived"; "untested" if the tests fail without the change, which is said once."""
        tests, path = tests_of(change.module), self.folder / change.module
        if tests not in self._took_s:
            begin = time.monotonic()
            done = self._run(tests, None)
            if done.returncode:
                print(f"unchanged, {' '.join(tests)} fails:\n{done.stdout[-1000:]}", file=sys.stderr, flush=True)
                self._took_s[tests] = -1.0
            else:
                self._took_s[tests] = time.monotonic() - begin
        if self._took_s[tests] < 0:
            return "untested"
        source = path.read_bytes()
        path.write_bytes(change.applied(source))
        try:
            done = self._run(tests, max(LEAST_TIMEOUT_S, TIMES_SLOWER * self._took_s[tests]))
        finally:
            path.write_bytes(source)
        return "survived" if done is not None and done.returncode == 0 else "killed"

    def _run(self, tests: tuple[str, ...], timeout_s: float | None) -> subprocess.CompletedProcess[str] | None:
        """Run tests; None if they did not end in time."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow and not gpu"]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        try:
            return subprocess.run(
                command,
                cwd=self.folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None


def source_of(module: str) -> str:
    """Return a short hash of a module's text, to know an outcome that belongs to another one."""
    return sha256((ROOT / module).read_bytes()).hexdigest()[:16]


def read_results(path: Path) -> dict[str, dict]:
    """Return the outcomes so far that still belong to the source, by the key of their change."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line]
    there = [result for result in found if (ROOT / result["module"]).exists()]
    return {result["key"]: result for result in there if result["source"] == source_of(result["module"])}


def report(results: Sequence[dict], equivalent: dict[str, str]) -> str:
    """Return killed, survived and equivalent by package, and every survivor."""
    counts: dict[str, Counter[str]] = {}
    survivors = []
    for result in sorted(results, key=lambda result: (result["module"], result["line"])):
        outcome = result["outcome"]
        if outcome == "survived" and f"{result['module']}: {result['before']} -> {result['after']}" in equivalent:
            outcome = "equivalent"
        if outcome == "survived":
            survivors.append(f"{result['module']}:{result['line']}\n    - {result['before']}\n    + {result['after']}")
        counts.setdefault(result["module"].split("/")[0], Counter())[outcome] += 1
    rows = [f"{'package':<10} {'killed':>8} {'survived':>9} {'equivalent':>11} {'share':>7}"]
    for package, count in sorted(counts.items()):
        told = count["killed"] + count["survived"]
        share = f"{count['killed'] / told:.0%}" if told else "-"
        rows.append(f"{package:<10} {count['killed']:>8} {count['survived']:>9} {count['equivalent']:>11} {share:>7}")
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
    parser.add_argument("--budget", type=seconds_of, default=seconds_of("2h"), help="600s, 10m, 2h")
    parser.add_argument("--seed", type=int, default=1, help="another seed draws other changes first")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "mutation.jsonl")
    options = parser.parse_args()
    unknown = [module for module in options.modules if not (ROOT / module).is_file()]
    if unknown:
        parser.error(f"no such module: {', '.join(unknown)}")
    modules = options.modules or modules_of(options.packages)
    results = read_results(options.results)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, options.results.open("a", encoding="utf-8") as file:
        copy = Copy(Path(folder))
        for change in drawn(modules, options.seed):
            if (spent_s := time.monotonic() - begin) >= options.budget:
                break
            if change.key in results:
                continue
            outcome = copy.outcome(change)
            if outcome == "untested":
                continue
            result = {"key": change.key, "source": source_of(change.module), "outcome": outcome, **asdict(change)}
            results[change.key] = result
            print(json.dumps(result), file=file, flush=True)
            print(f"[{spent_s:.0f} s of {options.budget:.0f}] {change.key} {outcome}", file=sys.stderr, flush=True)
    chosen = set(modules)
    equivalent = json.loads(EQUIVALENT.read_text(encoding="utf-8"))
    print(report([result for result in results.values() if result["module"] in chosen], equivalent))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
