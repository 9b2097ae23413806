"""A block manager that we did not write, as far as it is installed."""

import pytest

pytest.importorskip("transformers.generation.continuous_batching.cache_allocators.cache_allocator")


def test_it_holds_all_that_it_declares(record_property):
    from foretoken.checks.adapters import transformers_blocks as blocks
    from foretoken.properties.conformance import check_allocator

    report = check_allocator(blocks.make, budget=20_000)
    assert report.skipped["ALLOC-10"] == "needs misuse"
    assert report.num_operations >= 20_000 and report.executed["reuse"] > 100 and report.executed["fork"] > 100
    record_property("note", f"transformers' blocks: {report.num_operations:,} operations, all that it declares holds")


def test_without_it_the_adapter_says_what_is_missing(monkeypatch):
    from foretoken.checks.adapters import transformers_blocks as blocks
    from foretoken.properties.allocator.contract import AllocatorConfig

    monkeypatch.setattr(blocks, "MISSING", "No module named 'torch'")
    with pytest.raises(blocks.TransformersMissing, match="torch"):
        blocks.make(AllocatorConfig(2))
