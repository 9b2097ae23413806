"""Change the core's source, one small thing at a time, and see whether a test notices: `make mutation`, with cosmic-ray.

    python tests/mutation.py [--cosmic-ray PATH] [module …]

A copy of the tree is mutated, never the tree itself. A survivor is a change that no test of its module noticed: either a test is
missing, or the change makes no difference. What was found so far stands in docs/properties.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("core", "sim", "gpu", "properties", "checks", "observe", "cli")
TIMEOUT_S = 60.0

TESTS: dict[str, tuple[str, ...]] = {
    "core/contract/hidden.py": ("tests/core/contract/test_hidden.py", "tests/core/tree/test_tree_outputs.py"),
    "core/contract/request.py": ("tests/core/contract/test_finish.py",),
    "core/tree/outputs.py": ("tests/core/tree/test_tree_outputs.py",),
    "core/kv/allocator.py": (
        "tests/core/kv/test_kv_allocator.py",
        "tests/properties/contracts/test_check_allocator.py::TestOurs",
    ),
    "core/kv/moves.py": ("tests/core/kv/test_kv_moves.py", "tests/properties/contracts/test_check_accept.py::TestOurs"),
    "core/kv/radix.py": (
        "tests/core/kv/test_radix_cache.py",
        "tests/properties/contracts/test_check_prefix_cache.py::test_ours_hold",
    ),
    "core/kv/sizing.py": ("tests/core/kv/test_kv_sizing.py",),
    "core/contract/future_map.py": (
        "tests/core/contract/test_future_map.py",
        "tests/properties/contracts/test_check_relay.py::TestOurs",
    ),
}
"""Module -> the tests that must notice its changes. They run once for every change, so only quick ones are named."""

# Annotations are never evaluated, so a `|` in one can be anything; the core's masks are few, and their tests are not these.
WITHOUT = ("core/ReplaceBinaryOperator_BitOr_",)


@dataclass(frozen=True, slots=True)
class Change:
    """One change and its outcome."""

    module: str
    line: int
    operator: str
    outcome: str  # "killed", "survived" or "incompetent"
    diff: str


def copy_of_the_tree(target: Path) -> None:
    """Copy all packages and tests; the copy's folder `foretoken` is imported instead of what is installed."""
    skip = shutil.ignore_patterns("__pycache__", "*.pyc")
    for folder in (*PACKAGES, "foretoken", "tests", "docs", "examples"):
        shutil.copytree(ROOT / folder, target / folder, ignore=skip)
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "Makefile"):
        shutil.copy(ROOT / name, target / name)
    for package in PACKAGES:
        (target / "foretoken" / package).symlink_to(target / package)


def mutate(module: str, copy: Path, cosmic_ray: str) -> Iterator[Change]:
    """Every change of one module."""
    config, session = copy / "mutation.toml", copy / "mutation.sqlite"
    session.unlink(missing_ok=True)
    command = f"{sys.executable} -m pytest -x -q -p no:cacheprovider {' '.join(TESTS[module])}"
    config.write_text(
        f'[cosmic-ray]\nmodule-path = "{module}"\ntimeout = {TIMEOUT_S}\nexcluded-modules = []\ntest-command = "{command}"\n'
        f'[cosmic-ray.distributor]\nname = "local"\n[cosmic-ray.filters.operators-filter]\n'
        f"exclude-operators = {json.dumps([f'{prefix}.*' for prefix in WITHOUT])}\n",
        encoding="utf-8",
    )
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=copy, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return done.stdout

    run(*command.split())  # unchanged, everything passes
    run(cosmic_ray, "init", config.name, session.name)
    run(str(Path(cosmic_ray).with_name("cr-filter-operators")), session.name, config.name)
    run(cosmic_ray, "exec", config.name, session.name)
    for line in run(cosmic_ray, "dump", session.name).splitlines():
        item, result = json.loads(line)
        if result is None or result["worker_outcome"] == "skipped":
            continue
        mutation = item["mutations"][0]
        yield Change(
            module, mutation["start_pos"][0], mutation["operator_name"], result["test_outcome"], result["diff"] or ""
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Change the core's source, one small thing at a time.")
    parser.add_argument("modules", nargs="*", default=list(TESTS), help="as in core/contract/hidden.py")
    parser.add_argument("--cosmic-ray", default=shutil.which("cosmic-ray"), help="its command")
    options = parser.parse_args()
    if not options.cosmic_ray:
        parser.error("cosmic-ray is not installed: name it with --cosmic-ray")
    unknown = [module for module in options.modules if module not in TESTS]
    if unknown:
        parser.error(f"no tests are named for {', '.join(unknown)}")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copy_of_the_tree(copy)
        for module in options.modules:
            changes = list(mutate(module, copy, str(Path(options.cosmic_ray).resolve())))
            survivors = [change for change in changes if change.outcome == "survived"]
            for change in survivors:
                lines = [
                    line for line in change.diff.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")
                ]
                print(f"{module}:{change.line} survives {change.operator}")
                print("\n".join(f"    {line}" for line in lines))
            print(
                f"{module}: {len(changes)} changes, {len(changes) - len(survivors)} noticed, {len(survivors)} not",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
