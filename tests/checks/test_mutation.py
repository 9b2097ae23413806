"""The tool behind `make mutation`: every change is one, the draw is fair and goes on, and a survivor is told from an equivalent one."""

import ast
import importlib.util
import json
import sys
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("mutation", ROOT / "tests" / "mutation.py")
mutation = sys.modules["mutation"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(mutation)

SOURCE = '''"""A doc string with 3 numbers."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    LIMIT = 4

def share(ä: int | None, b: float = 2) -> "1":
    """Another 5."""
    if ä is None or not b:
        raise ValueError(f"{1 + 2} is wrong", 6)
    return min(ä + 1, b) if ä < b else True
'''


def test_changes_are_what_a_run_depends_on_and_nothing_else():
    changes = mutation.changes_of("x.py", SOURCE.encode())
    assert [(change.kind, change.new) for change in changes] == [
        ("number", "3"),
        ("compare", "(ä is not None)"),
        ("logic", "(ä is None and (not b))"),
        ("not", "(b)"),
        ("name", "max"),
        ("arithmetic", "(ä - 1)"),
        ("number", "2"),
        ("compare", "(ä <= b)"),
        ("truth", "False"),
    ]
    assert changes[7].after == "return min(ä + 1, b) if (ä <= b) else True", "places count in bytes"


def test_every_change_of_the_tree_can_be_parsed():
    for module in ("core/kv/radix.py", "sim/actors/engine.py", "sim/cost/round.py"):
        source = (ROOT / module).read_bytes()
        changes = mutation.changes_of(module, source)
        assert len(changes) > 20
        for change in changes:
            changed = change.applied(source)
            assert changed != source and ast.parse(changed)


def test_the_draw_takes_every_package_in_turn_and_follows_its_seed():
    modules = ["core/draws.py", "sim/load.py", "gpu/batch/chunks.py"]
    first = list(islice(mutation.drawn(modules, 1), 9))
    assert {change.module for change in first[: len(modules)]} == set(modules)
    assert first == list(islice(mutation.drawn(modules, 1), 9)) != list(islice(mutation.drawn(modules, 2), 9))


def test_each_module_has_tests_and_no_kernel_is_changed():
    modules = mutation.modules_of(mutation.CHANGED)
    assert not any(module.startswith("gpu/kernels") for module in modules) and len(modules) > 100
    for module in modules:
        tests = mutation.tests_of(module)
        assert tests and all((ROOT / test.partition("::")[0]).exists() for test in tests), (module, tests)


def test_outcomes_are_forgotten_with_their_source_and_reported_by_package(tmp_path):
    change = mutation.changes_of("core/draws.py", (ROOT / "core/draws.py").read_bytes())[0]
    known = {
        "key": change.key,
        "source": mutation.source_of(change.module),
        "outcome": "survived",
        "module": change.module,
    }
    known |= {"line": change.line, "before": change.before, "after": change.after}
    path = tmp_path / "results.jsonl"
    path.write_text("\n".join(json.dumps(known | {"source": source}) for source in (known["source"], "older")) + "\n")
    results = mutation.read_results(path)
    assert results == {} or list(results) == [change.key]
    text = mutation.report([known, known | {"outcome": "killed"}], {})
    assert f"core/draws.py:{change.line}" in text and "50%" in text
    excused = {f"core/draws.py: {change.before} -> {change.after}": "makes no difference"}
    assert "100%" in mutation.report([known, known | {"outcome": "killed"}], excused)
