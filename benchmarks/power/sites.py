"""Where defects are drawn: functions of `core/`, `sim/` and `gpu/`, at random, longer ones more often."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCHEDULER = "core/scheduler/"
AREAS: dict[str, dict[str, tuple[str, ...]]] = {
    "scheduler": {
        "kv": ("core/kv/",),
        "rounds": tuple(
            f"{SCHEDULER}{name}.py"
            for name in ("engine", "rounds", "flights", "driver", "output", "life", "requests", "late", "recovery")
        ),
        "admission": (f"{SCHEDULER}admission.py", f"{SCHEDULER}waiting.py"),
        "adaptive": ("core/adaptive/",),
        "trees": ("core/tree/",),
        "acceptance": ("core/acceptance/",),
    },
    "services": {
        "handoff": ("core/handoff/", f"{SCHEDULER}transfers.py", "sim/disaggregation/"),
        "simulator": ("sim/actors/", "sim/running/", "sim/load.py"),
        "executor": ("gpu/executor/", "gpu/batch/", "gpu/draft/", "gpu/ops/", "gpu/models/"),
    },
}
"""Group -> area -> the folders and modules whose defects belong to it."""

LEFT_OUT = (
    # They read files and settings, or fit and describe, before anything runs: no contract is about them.
    "core/adaptive/config.py", "core/adaptive/interchange.py", "core/adaptive/table_text.py", "core/acceptance/fit.py",
    "core/acceptance/presets.py", "gpu/models/stored/", "gpu/models/checkpoint.py",
    "gpu/models/read_config.py", "gpu/models/families.py", "gpu/models/heads/config.py", "gpu/models/config.py",
    # They check what others did, or need a GPU.
    "core/kv/radix_check.py", "gpu/ops/debug.py", "gpu/ops/triton_ops.py", "gpu/executor/graphs.py",
)  # fmt: skip
NAMES_LEFT_OUT = (
    "check", "describe", "snapshot", "to_json", "to_dict", "checkpoint_weights",
    "__init__", "__post_init__", "__repr__",
)  # fmt: skip
"""Functions that recount what others did, describe, write files, or take in arguments."""

LEAST_LINES = 4
"""Of a function's statements: shorter ones, such as a property, have little to be wrong."""


@dataclass(frozen=True)
class Site:
    """A function: its module, its name with those of its classes, and its lines."""

    module: str
    name: str
    first: int
    last: int

    def text(self) -> str:
        lines = (ROOT / self.module).read_text(encoding="utf-8").splitlines()
        return "\n".join(lines[self.first - 1 : self.last])


@cache
def sites_of(group: str, area: str) -> tuple[Site, ...]:
    """Return all functions of an area that have at least `LEAST_LINES` lines beside their head and docstring."""
    found = []
    for path in sorted({path for place in AREAS[group][area] for path in _modules(ROOT / place)}):
        module = path.relative_to(ROOT).as_posix()
        if not module.startswith(LEFT_OUT):
            found += [Site(module, *part) for part in _functions(ast.parse(path.read_text(encoding="utf-8")), "")]
    return tuple(found)


def draw_sites(group: str, area: str, seed: int, count: int) -> list[Site]:
    """Return `count` different functions in random order, each drawn with a weight of its number of lines."""
    chance = random.Random(f"{area} {seed}")
    # The order of the keys is that of draws without replacement (Efraimidis and Spirakis, 2006).
    keyed = [(chance.random() ** (1 / (site.last - site.first + 1)), site) for site in sites_of(group, area)]
    return [site for _, site in sorted(keyed, key=lambda pair: -pair[0])[:count]]


def _modules(place: Path) -> list[Path]:
    return [place] if place.is_file() else list(place.rglob("*.py"))


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            body = child.body[1:] if ast.get_docstring(child) else child.body
            if child.name in NAMES_LEFT_OUT:
                continue
            if body and child.end_lineno is not None and child.end_lineno - body[0].lineno + 1 >= LEAST_LINES:
                yield prefix + child.name, child.lineno, child.end_lineno
