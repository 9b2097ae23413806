"""The judges: which tests, and which components of `foretoken check`, must notice a change of a module."""

from __future__ import annotations

import re
from pathlib import Path

from changes import ROOT

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
    "core/kv/allocator.py": ("tests/properties/contracts/test_check_allocator.py::test_ours_hold",),
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
