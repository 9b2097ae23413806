"""A block manager that we did not write, as far as it is installed."""

import pytest

pytest.importorskip("transformers.generation.continuous_batching.cache_allocators.cache_allocator")


def test_it_holds_but_for_what_it_does_not_promise(record_property):
    from foretoken.checks.adapters import transformers_blocks as blocks
    from foretoken.properties.conformance import check_allocator

    report = check_allocator(blocks.make, budget=20_000, expected_failures=blocks.EXPECTED_FAILURES)
    assert [failure.id for failure in report.expected] == ["ALLOC-10"]
    assert report.num_operations >= 20_000 and report.executed["reuse"] > 100 and report.executed["fork"] > 100
    record_property("note", f"transformers' blocks: {report.num_operations:,} operations, ALLOC-10 aside all hold")


def test_without_it_the_adapter_says_what_is_missing(monkeypatch):
    from foretoken.checks.adapters import transformers_blocks as blocks
    from foretoken.properties.allocator.contract import AllocatorConfig

    monkeypatch.setattr(blocks, "MISSING", "No module named 'torch'")
    with pytest.raises(blocks.TransformersMissing, match="torch"):
        blocks.make(AllocatorConfig(2))
