"""The sources of the packages, parsed once: their modules, statements and imports."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("core", "sim", "gpu", "properties", "checks", "observe", "planning", "twin", "serve", "ui", "cli", "api")


@dataclass(frozen=True)
class Import:
    """`target` is a module of ours ("core.engine") or the top-level name of a library. `when` it runs: as the module is
    loaded, for type checkers alone ("types"), or in a function ("call")."""

    target: str
    ours: bool
    when: str
    line: int


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def statements_in(node: ast.AST) -> Iterator[ast.AST]:
    """Its children without expressions, in which neither an import nor a function of a name can stand."""
    return (n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt | ast.ExceptHandler | ast.match_case))


def statements(node: ast.AST) -> Iterator[ast.AST]:
    for child in statements_in(node):
        yield child
        yield from statements(child)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    found: list[Import] = []
    package = path.relative_to(ROOT).parent.parts

    def visit(node: ast.AST, when: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            when = "call"
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            when = "types"
        if isinstance(node, ast.Import):
            for alias in node.names:
                add(alias.name, (), when, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            name = ".".join(filter(None, [base, node.module or ""])) if node.level else node.module
            add(name, tuple(alias.name for alias in node.names), when, node.lineno, relative=bool(node.level))
        for child in statements_in(node):
            visit(child, when)

    def add(name: str, members: tuple[str, ...], when: str, line: int, relative: bool = False) -> None:
        if name == "foredraft" or name.startswith("foredraft."):
            inside = name.removeprefix("foredraft").lstrip(".")
            name, relative = (inside if inside and is_module(inside) else f"api.{inside}".rstrip(".")), True
        if not relative:
            found.append(Import(name.split(".")[0], False, when, line))
            return
        modules = [f"{name}.{member}".lstrip(".") for member in members]
        for module in [m for m in modules if is_module(m)] or [name]:
            found.append(Import(module, True, when, line))
        if any(not is_module(m) for m in modules) and name not in [f.target for f in found]:
            found.append(Import(name, True, when, line))

    visit(tree_of(path), "load")
    return tuple(found)


def imports_that(is_wrong: Callable[[Path, Import], bool], *folders: str) -> str:
    """Say which imports of the folders' files are wrong, a line each."""
    return "\n".join(
        f"{path.relative_to(ROOT)}:{item.line} imports {item.target}"
        for path in sources(*folders)
        for item in imports_of(path)
        if is_wrong(path, item)
    )
