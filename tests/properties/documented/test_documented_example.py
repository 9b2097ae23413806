"""The worked example of docs/properties.md: the code that stands there fails as it says there."""

import re
from pathlib import Path

import pytest
from foredraft.properties.conformance import check
from foredraft.properties.engine.contract import EngineCapabilities
from foredraft.properties.engine.plain import PlainEngine
from foredraft.properties.harness.contract import Adapter
from foredraft.properties.harness.swarm import Swarm
from foredraft.properties.harness.trial import Violation
from foredraft.properties.suites import suite_of

ALLOCATOR, ENGINE = suite_of("allocator"), suite_of("engine")

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "properties.md").read_text(encoding="utf-8")


def test_the_bug_in_twenty_lines():
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "class Blocks" in block]
    (console,) = re.findall(r"```console\n\$ foredraft check .*?\n(.*?)```", TEXT, re.DOTALL)
    names = {}
    exec(compile(code, "docs/properties.md", "exec"), names)
    example = (ROOT / "examples" / "blocks.py").read_text(encoding="utf-8")
    assert example.partition('"""\n\n')[2] == code, "examples/blocks.py, which README checks, is another one"
    report = check(ALLOCATOR, names["Blocks"], capabilities=("misuse",), budget=20_000, subject="blocks:Blocks")
    (failure,) = report.failures
    replay = "foredraft check --replay runs/cases/allocator-ALLOC-10.case.json"
    assert failure.text(replay).split() == console.split()  # the page wraps long lines


@pytest.mark.xdist_group("transformers")  # one worker imports it
def test_the_bug_in_published_code():
    pytest.importorskip("transformers.generation.continuous_batching.cache_allocators.cache_allocator")
    (code,) = [
        block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "transformers_scheduler" in block
    ]
    exec(compile(code, "docs/properties.md", "exec"), {})


def test_the_configurations_of_the_example():
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "def supports" in block]
    names = {}
    exec(compile(code, "docs/properties.md", "exec"), names)
    capabilities = EngineCapabilities(slots=True, prefix_cache=True)
    config, _ = Swarm(ENGINE.component(Adapter(PlainEngine, capabilities, names["supports"])), 1).drawn(0)
    assert config.page_size == 16 and config.prefix_cache and config.max_steps == 0


def test_the_state_machine_of_the_example(monkeypatch):
    """The test that the page shows fails with the history that the page shows."""
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if ".TestCase" in block]
    monkeypatch.syspath_prepend(ROOT / "examples")
    names = {}
    exec(compile(code, "docs/properties.md", "exec"), names)
    with pytest.raises(Violation) as caught:
        names["TestBlocks"]("runTest").runTest()
    assert caught.value.id in ("ALLOC-10", "ALLOC-01") and len(caught.value.failure.case.operations) <= 3
