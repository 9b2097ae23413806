"""The changes: small ones of a module's source, each of which a test should notice, and the draw of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHANGED = ("core", "sim", "gpu")
LEFT_OUT = ("gpu/kernels/",)  # they need a GPU

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
    """Yield (node, kind, the text that replaces it), outside of annotations, doc strings, assertions and
    messages of errors."""
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
    """Yield the nodes that decide something when the module runs;
    a weaker assertion does not, as long as the code is right."""
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
