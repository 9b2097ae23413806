"""The judges: which tests must notice a change of a module, and which lines the components of `foredraft check` run."""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from inspect import CO_NEWLOCALS
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from changes import CHANGED, ROOT, Change

OURS = "tests/properties/contracts/test_every_contract.py::test_ours_hold"
CHECK_SIMULATOR = f"{OURS}[simulator-foredraft.checks.adapters.simulator:make]"
CHECK_EXECUTOR = (
    f"{OURS}[executor-foredraft.properties.executor.reference.adapter:make]",
    *(f"{OURS}[executor-foredraft.checks.adapters.{name}_executor:make]" for name in ("simulated", "torch")),
)
CHECK_RELAY = f"{OURS}[relay-foredraft.checks.adapters.future_map:make]"
CHECK_TREES = tuple(f"{OURS}[accept-foredraft.checks.adapters.{name}_accept:make]" for name in ("tree", "torch"))
CORPUS = "tests/sim/test_corpus.py"
MORE_TESTS: dict[str, tuple[str, ...]] = {
    "core/acceptance/": ("tests/core/acceptance/test_laws_of_acceptance.py", CORPUS),
    "core/adaptive/": ("tests/properties/contracts/test_check_step_controller.py", CORPUS),
    "core/contract/future_map.py": ("tests/properties/contracts/test_check_relay.py", CHECK_RELAY),
    "core/contract/hidden.py": ("tests/core/tree/test_tree_outputs.py",),
    "core/draws.py": (CORPUS,),
    "core/handoff/": ("tests/checks/test_check_transport.py", "tests/sim/disaggregation"),
    "core/kv/": (CORPUS,),
    "core/kv/allocator.py": (f"{OURS}[allocator-foredraft.checks.adapters.kv_allocator:make]",),
    "core/kv/moves.py": CHECK_TREES,
    "core/kv/radix": (f"{OURS}[prefix-cache-foredraft.checks.adapters.radix_cache:make]",),
    "core/scheduler/": ("tests/properties/contracts/test_check_engine.py", CORPUS, *CHECK_EXECUTOR, CHECK_SIMULATOR),
    "core/tree/": (*CHECK_TREES, *CHECK_EXECUTOR),
    "gpu/batch/": ("tests/gpu/executor", *CHECK_EXECUTOR),
    "gpu/draft/": ("tests/gpu/executor", *CHECK_EXECUTOR),
    "gpu/bench/": ("tests/cli/decode/test_bench_cli.py",),
    "gpu/executor/": CHECK_EXECUTOR,
    "gpu/ops/": ("tests/gpu/executor", *CHECK_EXECUTOR),
    "gpu/session/": ("tests/cli/decode/test_generate.py",),
    "sim/": ("tests/sim/test_simulation.py", CORPUS, CHECK_SIMULATOR),
    "sim/disaggregation/": ("tests/sim/disaggregation",),
    "sim/workload/acceptance": ("tests/cli/simulation/test_acceptance_cli.py",),
}  # fmt: skip
"""Module or folder -> tests outside of its folder's own that must notice its changes, too."""


def tests_of(module: str, root: Path = ROOT) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the tests that must notice a change: those of the folder that mirrors the module's, then those elsewhere.

    Of the folder's own, those named after the module come first. Elsewhere are the tests that import it, and
    `MORE_TESTS`.
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
    imported = re.compile(rf"foredraft\.{folder.replace('/', '.')}(\.{name}\b| import .*\b{name}\b)")
    far = [path for path in sorted((root / "tests").rglob("test_*.py")) if imported.search(path.read_text("utf-8"))]
    more = [test for prefix, tests in MORE_TESTS.items() if module.startswith(prefix) for test in tests]
    near, far = (
        [path.relative_to(root).as_posix() for path in paths if path.name != "test_mutation.py"]
        for paths in (near, far)
    )
    return tuple(near), tuple(dict.fromkeys(test for test in (*far, *more) if test not in near))


class Reach(NamedTuple):
    """What the check of one component runs: lines by module, in so many seconds of processor time."""

    seconds: float
    lines: dict[str, list[int]]


Measure = Callable[[str], Reach]
BORING = 3000
"""A function of which so many calls in a row ran no new line is watched no longer:
to watch all of them takes ten times as long."""


def reach_of(subjects: list[str], measure: Measure, path: Path) -> dict[str, Reach]:
    """Return what the checks of components run, kept in `path` for as long as the source is the same."""
    folders = [ROOT / name for name in (*CHANGED, "properties", "checks")]
    sources = sorted(source for folder in folders for source in folder.rglob("*.py"))
    digest = sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found = kept["reach"] if kept.get("source") == digest else {}
    for subject in subjects:
        if subject not in found:
            found[subject] = measure(subject)
            path.write_text(json.dumps({"source": digest, "reach": found}), encoding="utf-8")
    return {subject: Reach(*found[subject]) for subject in subjects}


def that_run(change: Change, reach: dict[str, Reach]) -> list[str]:
    """Return the components whose check runs the changed line, the quickest check first."""
    subjects = [subject for subject, of_one in reach.items() if change.line in of_one.lines.get(change.module, ())]
    return sorted(subjects, key=lambda subject: reach[subject].seconds)


@contextmanager
def watched(root: Path) -> Iterator[dict[str, list[int]]]:
    """Note which lines inside functions of the changed packages run, by module. What runs at import is not noted."""
    lines: dict[str, list[int]] = {}
    watchers: dict[CodeType, Callable | None] = {}
    num_calls: dict[CodeType, int] = {}

    def watcher_of(code: CodeType) -> Callable | None:
        path = Path(code.co_filename).resolve()
        module = path.relative_to(root).as_posix() if path.is_relative_to(root) else ""
        if module.partition("/")[0] not in CHANGED or not code.co_flags & CO_NEWLOCALS:
            return None
        of_module = lines.setdefault(module, [])
        unseen = {line for _, _, line in code.co_lines() if line is not None}
        if code.co_name[0] != "<":
            unseen.discard(code.co_firstlineno)  # its definition: what stands there, such as a default, runs at import

        def watch(frame: FrameType, event: str, argument: Any) -> Any:
            if frame.f_lineno in unseen:
                unseen.remove(frame.f_lineno)
                of_module.append(frame.f_lineno)
                num_calls[code] = 0
            return watch if unseen else None

        return watch

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code not in watchers:
            watchers[code] = watcher_of(code)
        watch = watchers[code]
        if watch is None:
            return None
        num_calls[code] = num_calls.get(code, 0) + 1
        if num_calls[code] > BORING:
            watchers[code] = None
        return watch(frame, event, argument)

    gc.collect()  # or the end of an earlier tracer, if it is garbage, would end this one
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(None)
