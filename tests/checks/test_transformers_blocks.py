"""A block manager that we did not write, if it is installed: all that it declares holds."""

import pytest
from foredraft.properties.allocator.contract import AllocatorConfig
from foredraft.properties.conformance import check_allocator

pytestmark = pytest.mark.xdist_group("transformers")  # one worker imports it: it takes seconds


@pytest.fixture
def blocks():
    from foredraft.checks.servers import transformers_blocks

    return transformers_blocks


def test_blocks_hold(blocks, record_property):
    if blocks.MISSING:
        pytest.skip(blocks.MISSING)
    report = check_allocator(blocks.make, budget=20_000)
    assert report.skipped["ALLOC-10"] == "needs misuse"
    assert report.num_operations >= 20_000 and report.executed["reuse"] > 100 and report.executed["fork"] > 100
    record_property("note", f"transformers' blocks: {report.num_operations:,} operations, all that it declares holds")


def test_without_transformers_it_says_what_is_missing(blocks, monkeypatch):
    monkeypatch.setattr(blocks, "MISSING", "no module")
    with pytest.raises(blocks.TransformersMissing, match="no module"):
        blocks.make(AllocatorConfig(2))
