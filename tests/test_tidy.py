"""The source itself: who imports whom, sizes, names, the maximum instead of the configured draft tokens."""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_tree import PACKAGES, ROOT, Import, imports_of, imports_that, module_name, sources, statements, tree_of

pytestmark = pytest.mark.xdist_group("tidy")  # one worker parses every file once

ABOVE = {  # package -> the packages that it may import
    "core": {"core"},
    "observe": {"observe", "core"},
    "sim": {"sim", "core", "observe"},
    "gpu": {"gpu", "core", "observe"},
    "properties": {"properties", "core", "observe"},
    "checks": {"checks", "sim", "gpu", "properties", "core", "observe"},
    "api": {"api", "planning", "sim", "gpu", "properties", "checks", "core", "observe"},
    "planning": {"planning", "sim", "core", "observe"},
    "twin": {"twin", "sim", "gpu", "core", "observe"},
    "serve": {"serve", "sim", "gpu", "core", "observe"},
    "ui": {"ui", "serve", "planning", "sim", "core", "observe"},
    "cli": set(PACKAGES),
}
# Package -> its rooms, which are folders, modules beside them, and "", all other modules beside them. Each imports only
# what stands before it.
ROOMS = {
    "core": (
        *("", "model_shape", "contract", "acceptance", "adaptive"),
        *("kv", "tree", "algorithm", "scheduler", "handoff"),
    ),
    "cli": (
        *("names", "terminal", "progress", "documents", "options", "logs"),
        *("simulation", "decode", "calibration", "serving", "planning", "checking", "ui", "app", "__main__"),
    ),
    "serve": ("base", "lossless", "metrics", "bodies", "answers", "requests", "telemetry", ""),
    "observe": ("", "children", "distribution", "measuring", "figures"),
    "planning": (
        *("slo", "demand", "trial", "workers", "store", "search", "grid", "candidates", "confidence"),
        *("rounds", "plan", "answers", "servers", "sweep", "tuning", ""),
    ),
    "sim": (
        *("cost", "workload", "actors", "scenario", "scenario_file", "assembly", "load", "effects"),
        *("disaggregation", "faults", "running", "calibration", "summary", ""),
    ),
    "gpu": (
        *("", "types", "kernels", "models", "batch", "ops", "draft", "executor", "tiny"),
        *("parallel", "session", "disaggregation", "measure", "selftest"),
    ),
}
NOT_JUDGED = {"core.errors", "core.draws"}  # what an oracle may import from core
# The executor's contract speaks in core's types: a configuration makes the engine whose steps the executor runs, and
# the model reads the steps and results that it judges.
JUDGED_IN_CORE_TYPES = {
    "properties.executor.contract": {
        *("core.adaptive", "core.algorithm.registry", "core.contract.events", "core.contract.handoff_batch"),
        *(
            "core.contract.step",
            "core.scheduler.config",
            "core.scheduler.engine",
            "core.scheduler.rules",
            "core.scheduler.spec",
        ),
    },
    "properties.executor.judge": {"core.contract.request"},
    "properties.executor.model": {"core.algorithm.algorithm", "core.contract.step"},
    "properties.executor.oracle": {"core.contract.request"},
}
LIBRARIES = {  # package -> what it may import from outside the standard library
    "core": {"numpy"},
    "observe": {"numpy", "pyarrow", "rich", "plotly"},
    "sim": {"numpy", "scipy", "pydantic", "simpy", "ray", "aiconfigurator_core"},
    "gpu": {
        *("numpy", "numba", "torch", "triton", "safetensors", "threadpoolctl", "tokenizers", "jinja2", "flashinfer"),
        *("huggingface_hub", "llguidance", "transformers", "ctranslate2"),
    },
    "properties": {"numpy", "hypothesis", "pytest"},
    "checks": {"numpy", "torch", "threadpoolctl", "simpy", "pyarrow", "hypothesis", "transformers"},
    "planning": {"numpy", "pyarrow", "scipy", "ray", "yaml"},
    "twin": {"numpy", "simpy", "torch"},
    "serve": {
        *("numpy", "pydantic", "pydantic_core", "fastapi", "starlette", "uvicorn", "prometheus_client", "httpx"),
        *("zmq", "msgspec", "opentelemetry"),
    },
    "ui": {"starlette", "uvicorn"},
    "cli": {"numpy", "pydantic", "typer", "rich", "kaleido", "choreographer"},
    "api": {"pyarrow", "rich"},
}
# The core does not wait, read clocks, draw random numbers or communicate.
NOT_IN_CORE = {
    *("time", "random", "secrets", "threading", "logging", "asyncio"),
    *("socket", "subprocess", "multiprocessing", "concurrent"),
}
NOWHERE = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 70  # of a kernel its arguments alone, a line each, may be 40
MAX_MAIN_LOOP_LINES = 300  # core/scheduler/engine.py
# Accepted for a reason; an entry that is no longer needed must go.
LONG_FILES: dict[str, str] = {}
# Modules that nothing in the packages imports: entrances for users, which may start any package.
ENTRANCES = {"api.__main__": "python -m foredraft"}


def test_the_walk_sees_the_tree():
    """A rule over no files would hold."""
    assert len(list(sources(*PACKAGES))) > 60
    engine = {(item.target, item.ours) for item in imports_of(ROOT / "core" / "scheduler" / "engine.py")}
    assert ("core.contract.step", True) in engine and ("numpy", False) in engine
    entry = imports_of(ROOT / "cli" / "__main__.py")
    assert any(item.target == "core.errors" and item.when == "call" for item in entry)
    assert any(item.target == "api.simulation" for item in imports_of(ROOT / "api" / "__init__.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_stands_below_it(package: str):
    def is_wrong(path: Path, item: Import) -> bool:
        return item.ours and item.target.split(".")[0] not in ABOVE[package] and module_name(path) not in ENTRANCES

    assert not imports_that(is_wrong, package)


@pytest.mark.parametrize("package", ROOMS)
def test_the_rooms_of_a_package_import_in_one_direction(package: str):
    def place(module: str) -> int:
        room = module.removeprefix(f"{package}.").split(".")[0]
        is_folder = (ROOT / package / room).is_dir() and module != package
        return ROOMS[package].index(room if is_folder or room in ROOMS[package] else "")

    def is_wrong(path: Path, item: Import) -> bool:
        is_inside = item.ours and item.target.startswith(f"{package}.")
        return is_inside and place(item.target) > place(module_name(path))

    assert not imports_that(is_wrong, package)


def test_what_checks_any_contract_imports_none():
    def is_wrong(path: Path, item: Import) -> bool:
        is_outside = item.ours and item.target.startswith("properties.") and ".harness" not in item.target
        return path.parent.name == "harness" and is_outside

    assert not imports_that(is_wrong, "properties")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_its_libraries(package: str):
    allowed = {*LIBRARIES[package], *sys.stdlib_module_names} - NOWHERE - (NOT_IN_CORE if package == "core" else set())
    assert not imports_that(lambda path, item: not item.ours and item.target not in allowed, package)


def test_an_oracle_imports_nothing_from_core_that_it_judges():
    """Models, plain components and invariants, and what these import from `properties`."""
    names = ("model", "plain", "invariants")
    queue = [path for path in sources("properties", "checks") if path.stem in names or path.parent.name in names]
    assert len(queue) > 20
    seen, wrong = set(), []
    while queue:
        path = queue.pop()
        if path in seen:
            continue
        seen.add(path)
        allowed = NOT_JUDGED | JUDGED_IN_CORE_TYPES.get(module_name(path), set())
        for item in imports_of(path):
            if item.ours and item.target.startswith("core.") and item.target not in allowed:
                wrong.append(f"{path.relative_to(ROOT)}:{item.line} imports {item.target}")
            found = ROOT.joinpath(*item.target.split(".")).with_suffix(".py")
            if item.ours and item.target.startswith("properties.") and found.is_file():
                queue.append(found)
    assert not wrong, "\n".join(wrong)


def test_core_draws_no_random_numbers():
    """Draws are pure functions of their keys (core/draws.py); NumPy's generators are streams."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources("core")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("np.random", "numpy.random")
    ]
    assert not wrong, wrong


def test_the_command_line_loads_nothing_heavy():
    """What `foredraft.cli.app` loads at import, however indirectly: typer, the standard library, other files of cli,
    `core.errors`, which the entry point loads before it, and the declaration of a session's options."""
    seen, queue = set(), ["cli.app"]
    while queue:
        name = queue.pop()
        if name in seen:
            continue
        seen.add(name)
        path = ROOT.joinpath(*name.split(".")).with_suffix(".py")
        for item in imports_of(path) if path.is_file() else ():
            if item.when != "load":
                continue
            if item.ours:
                known = item.target.startswith("cli") or item.target in ("core.errors", "gpu.types.session_options")
                assert known, f"{name}:{item.line} loads {item.target} at import"
                queue.append(item.target)
            else:
                assert item.target == "typer" or item.target in sys.stdlib_module_names, f"{name}:{item.line}"
    assert {"cli.simulation.simulate", "cli.checking.audit", "cli.checking.check"} <= seen


def fail_on_a_circle(graph: dict[str, set[str]]) -> None:
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_modules_import_in_no_circle():
    graph: dict[str, set[str]] = {}
    for path in sources(*PACKAGES):
        name = module_name(path)
        # Imports for type checkers count; those in a function, which break a circle openly, count in core.
        counted = ("load", "types", "call") if name.startswith("core.") else ("load", "types")
        targets = {item.target for item in imports_of(path) if item.ours and item.when in counted}
        graph.setdefault(name, set()).update(targets - {name})
    fail_on_a_circle(graph)


def test_any_module_can_be_imported_first():
    """Python loads the packages around a module before it, except those that it is loading already."""
    graph: dict[str, set[str]] = {}
    for path in sources(*PACKAGES):
        name = module_name(path)
        targets = {item.target for item in imports_of(path) if item.ours and item.when == "load"}
        parts = [target.split(".") for target in targets]
        packages = {".".join(part[:length]) for part in parts for length in range(1, len(part))}
        outside = {package for package in packages if not name.startswith(f"{package}.")}
        graph.setdefault(name, set()).update((targets | outside) - {name})
    fail_on_a_circle(graph)


def test_measurements_read_one_clock():
    """What times an executor reads `gpu/measure/clock.py`, whose clock a caller chooses."""

    def is_wrong(path: Path, item: Import) -> bool:
        return path.parent.name == "measure" and path.name != "clock.py" and item.target == "time"

    assert not imports_that(is_wrong, "gpu")


def test_no_module_is_dead():
    """Every module is imported by another one of the packages, or is an entrance."""
    used = {item.target for path in sources(*PACKAGES) for item in imports_of(path)}
    modules = {module_name(path) for path in sources(*PACKAGES) if path.name != "__init__.py"}
    dead = {name for name in modules - used if not name.startswith(("gpu.", "properties.", "checks."))}
    assert dead == set(ENTRANCES), "add what is dead to ENTRANCES with its reason, or remove it"


def test_file_sizes():
    lines = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in sources(*PACKAGES, "tests")
    }
    assert lines["core/scheduler/engine.py"] <= MAX_MAIN_LOOP_LINES
    long = {name: n for name, n in lines.items() if n > MAX_FILE_LINES}
    assert set(long) == set(LONG_FILES), f"longer than {MAX_FILE_LINES} lines: {long}; accepted: {sorted(LONG_FILES)}"


def test_function_sizes():
    long, kernels = {}, 0
    for path in sources(*PACKAGES):
        for node in statements(tree_of(path)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if "jit" in map(ast.unparse, node.decorator_list):  # compiled whole
                kernels += 1
            elif (n := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES:
                long[f"{path.relative_to(ROOT).as_posix()}::{node.name}"] = n
    assert kernels > 20
    assert not long, f"longer than {MAX_FUNCTION_LINES} lines: {long}"


def test_no_folder_is_crowded():
    """At most 15 entries beside `__init__.py`, so that a folder is read at a glance."""
    folders = {path.parent for path in sources(*PACKAGES, "tests", "benchmarks", "examples")}
    entries = {
        folder.relative_to(ROOT).as_posix(): len(
            [
                path
                for path in folder.iterdir()
                if not path.name.startswith((".", "__init__", "__pycache__"))
                and (path.is_file() or any(path.rglob("*.py")))
            ]
        )
        for folder in folders
    }
    assert {name: n for name, n in entries.items() if n > 15} == {}


def test_class_names_are_unique():
    """One name, one class: a reader need not ask whose `Moment` it is. Names with an underscore are their file's
    own."""
    places: dict[str, list[str]] = {}
    for path in sources(*PACKAGES, "benchmarks", "examples"):
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    assert len(places) > 200
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_files_are_named_after_what_is_in_them():
    grab_bags = {"util", "utils", "helper", "helpers", "common", "misc", "manager", "managers", "stuff", "base"}
    wrong = [
        str(path.relative_to(ROOT)) for path in sources(*PACKAGES, "tests", "benchmarks") if path.stem in grab_bags
    ]
    assert not wrong, wrong


# -- D1: whatever is reserved uses the maximum -------------------------------------------------------------------------

HOLDERS_OF_SETTINGS = re.compile(r"(^|\.|_)(config|settings|speculation|scenario|args|server_args)$")
# Here slots, rows and buffers are reserved; what a single round drafts has no business here.
RESERVING = ("core/kv", "core/scheduler/config.py", "core/scheduler/admission.py", "core/contract/future_map.py")


def functions_around(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Every node with the name of the function that it stands in."""

    def visit(node: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            inside = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else name
            yield inside, child
            yield from visit(child, inside)

    yield from visit(tree, "<module>")


def test_only_the_resolver_reads_the_configured_draft_tokens():
    readers = set()
    for path in (path for path in sources(*PACKAGES) if "num_draft_tokens" in path.read_text(encoding="utf-8")):
        for function, node in functions_around(tree_of(path)):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in ("num_draft_tokens", "speculative_num_draft_tokens")
                and HOLDERS_OF_SETTINGS.search(ast.unparse(node.value))
            ):
                readers.add(f"{path.relative_to(ROOT).as_posix()}::{function}")
    assert not readers, "`resolve_spec` resolves the configured number; its result says what rounds verify"


def test_reservations_know_only_the_maximum():
    wrong, seen = [], 0
    for path in sources("core"):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(RESERVING):
            continue
        for node in ast.walk(tree_of(path)):
            read = node.attr if isinstance(node, ast.Attribute) else ""
            seen += read.endswith(("draft_tokens", "max_nd"))
            if read.endswith("num_draft_tokens") and not read.startswith(("max_", "_max_")):
                wrong.append(f"{name}:{node.lineno} reads {ast.unparse(node)}")
    assert seen, "nothing that reserves reads a number of draft tokens: this test looks in the wrong place"
    assert not wrong, "\n".join(wrong)


# -- what the tree must not have ---------------------------------------------------------------------------------------


def tracked_texts() -> Iterator[tuple[str, str]]:
    """Names and contents of the project's own text files."""
    names = ["pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "constraints.txt", ".ci/run"]
    paths = [ROOT / name for name in names]
    for folder in (*PACKAGES, "tests", "benchmarks", "examples", "docs"):
        paths += [p for p in sorted((ROOT / folder).rglob("*")) if p.suffix in (".py", ".md", ".toml", ".json", ".csv")]
    for path in paths:
        if path.is_file() and path != Path(__file__).resolve():
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        ("a path of one machine", r"(?<![\w.~])/(home|root|Users|mnt(?!/models\b)|opt|work|srv)/\w"),
        ("a registry's address", r"(index-url|--find-links|pypi\.org|pythonhosted)"),
        ("something left to do", r"\b(TODO|FIXME|XXX|HACK)\b"),
    ],
)
def test_the_tree_is_free_of(what: str, pattern: str):
    wrong = [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in tracked_texts()
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert not wrong, f"{what}:\n" + "\n".join(wrong)


def test_test_files_have_names_of_their_own():
    """The folders of tests are no packages, so that two files of one name are one module, whichever comes first."""
    paths = list((ROOT / "tests").rglob("*.py"))
    names = [path.name for path in paths if path.name != "conftest.py"]
    twice = {name for name in names if names.count(name) > 1}
    assert not twice, f"more than one file of the name: {sorted(twice)}"
    importing = [path for path in paths if re.search(r"^\s*(from|import) conftest\b", path.read_text("utf-8"), re.M)]
    assert not importing, f"these import a conftest, of which there are several: {importing}"
