"""The tool behind `make mutation`: every change is one, the draw is fair and goes on, and a survivor is told from
an equivalent one."""

import ast
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import changes
import copies
import judges
import outcomes
import pytest
from foredraft.core.prompt import Prompt

ROOT = Path(__file__).parents[2]

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
    found = changes.changes_of("x.py", SOURCE.encode())
    assert [(change.kind, change.new) for change in found] == [
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
    assert found[7].after == "return min(ä + 1, b) if (ä <= b) else True", "places count in bytes"


def test_every_change_of_the_tree_can_be_parsed():
    for module in ("core/kv/radix.py", "sim/actors/engine.py", "sim/cost/round.py"):
        source = (ROOT / module).read_bytes()
        found = changes.changes_of(module, source)
        assert len(found) > 20
        for change in found[::5]:
            changed = change.applied(source)
            assert changed != source and ast.parse(changed)


def test_the_draw_takes_every_package_in_turn_and_follows_its_seed():
    modules = ["core/draws.py", "sim/load.py", "gpu/batch/pools.py"]
    first = list(islice(changes.drawn(modules, 1), 9))
    assert {change.module for change in first[: len(modules)]} == set(modules)
    assert first == list(islice(changes.drawn(modules, 1), 9)) != list(islice(changes.drawn(modules, 2), 9))


def test_each_module_has_tests_and_no_kernel_is_changed():
    modules = changes.modules_of(changes.CHANGED)
    assert not any(module.startswith("gpu/kernels") for module in modules) and len(modules) > 100
    for module in modules[::9]:
        near, far = judges.tests_of(module)
        assert (near or far) and all((ROOT / test.partition("::")[0]).exists() for test in (*near, *far)), module
        assert not set(near) & set(far)
    assert judges.tests_of("core/kv/radix.py")[0][0] == "tests/core/kv/test_radix_cache.py", "its own tests come first"
    assert all(any(ROOT.glob(name.rstrip("/") + "*")) for name in judges.MORE_TESTS)


def test_the_lines_that_run_are_noted_and_kept_with_their_source(tmp_path):
    with judges.watched(ROOT) as lines:
        for _ in range(3):
            Prompt.of_tokens([1, 2])
    ran = [line.strip() for line in (ROOT / "core/prompt.py").read_text().splitlines()]
    ran = [ran[number - 1] for number in lines["core/prompt.py"]]
    assert sys.gettrace() is None and ran and not any(line.startswith(("def ", "@", '"""')) for line in ran)

    measured = []

    def measure(subject):
        measured.append(subject)
        return judges.Reach(float(len(subject)), lines)

    kept = tmp_path / "reach.json"
    for subjects in (["slow one", "quick"], ["quick"]):
        reach = judges.reach_of(subjects, measure, kept)
    assert measured == ["slow one", "quick"]
    reach = judges.reach_of(measured, measure, kept)
    found = changes.changes_of("core/prompt.py", (ROOT / "core/prompt.py").read_bytes())
    runs = {change.line: judges.that_run(change, reach) for change in found}
    assert {line for line, by in runs.items() if by == ["quick", "slow one"]} == set(runs) & set(
        lines["core/prompt.py"]
    )


def outcome_of(change, outcome, source=None):
    return {
        "key": change.key,
        "source": source or outcomes.source_of(change.module),
        "outcome": outcome,
        **asdict(change),
    }


def test_outcomes_are_forgotten_with_their_source_and_reported_by_package(tmp_path):
    first, second = changes.changes_of("core/draws.py", (ROOT / "core/draws.py").read_bytes())[:2]
    told = [outcome_of(first, "survived"), outcome_of(second, "survived"), outcome_of(first, "killed")]
    path = tmp_path / "results.jsonl"
    path.write_text("\n".join(json.dumps(outcome) for outcome in [*told, outcome_of(second, "killed", "older")]))
    results = outcomes.read_results(path)
    assert [len(of_one) for of_one in results.values()] == [2, 1]
    text = outcomes.report(list(results.values()), {})
    assert f"core/draws.py:{second.line}" in text and text.split()[-9:-3] == ["core", "1", "1", "0", "0%", "50%"]
    excused = {f"core/draws.py: {second.before} -> {second.after}": "makes no difference"}
    text = outcomes.report(list(results.values()), excused)
    assert text.split()[-9:-3] == ["core", "1", "0", "1", "0%", "100%"]


@pytest.mark.slow
@pytest.mark.parametrize("judge", ["tests", "check"])
def test_changes_are_judged_in_a_copy(judge, tmp_path):
    source = (ROOT / "core/kv/moves.py").read_bytes()
    results = tmp_path / "results.jsonl"
    options = ["--judge", judge, "--sample", "3", "--results", str(results), "core/kv/moves.py"]
    done = subprocess.run([sys.executable, ROOT / "tests/mutation", *options], capture_output=True, text=True)
    told = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(told) == 3 and "killed" in {outcome["outcome"] for outcome in told}, done.stderr
    assert all(outcome["by"] for outcome in told if outcome["outcome"] == "killed")
    assert (ROOT / "core/kv/moves.py").read_bytes() == source


def test_what_uses_no_time_is_ended(monkeypatch):
    monkeypatch.setattr(copies, "IDLE_LIMIT_S", 0.05)
    child = os.fork()
    if child == 0:
        os.setsid()
        time.sleep(600)
        os._exit(0)
    copies._wait_for(child)
    with pytest.raises(ChildProcessError):
        os.waitpid(child, 0)
