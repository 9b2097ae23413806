"""A block manager and block hashes that we did not write, as far as they are installed: all that they declare holds."""

import pytest
from foretoken.properties.allocator.contract import AllocatorConfig
from foretoken.properties.conformance import check, check_allocator
from foretoken.properties.prefix_cache.contract import PrefixCacheConfig
from foretoken.properties.suites import suite_of

pytestmark = pytest.mark.xdist_group("transformers")  # one worker imports it: it takes seconds

PREFIXES = suite_of("prefix-cache")


@pytest.fixture
def adapters():
    from foretoken.checks.adapters import transformers_blocks, transformers_prefixes

    return transformers_blocks, transformers_prefixes


@pytest.fixture
def installed(adapters):
    for adapter in adapters:
        if adapter.MISSING:
            pytest.skip(adapter.MISSING)
    return adapters


def test_blocks_hold(installed, record_property):
    report = check_allocator(installed[0].make, budget=20_000)
    assert report.skipped["ALLOC-10"] == "needs misuse"
    assert report.num_operations >= 20_000 and report.executed["reuse"] > 100 and report.executed["fork"] > 100
    record_property("note", f"transformers' blocks: {report.num_operations:,} operations, all that it declares holds")


def test_block_hashes_hold(installed):
    report = check(PREFIXES, installed[1].make, budget=10_000)
    assert report.ok, report.text()
    assert report.evaluations["RADIX-01"] > 1_000 and report.evaluations["RADIX-15"] > 100
    assert "unlock-stray" not in report.executed, "it trusts its callers, and declares no misuse"


def test_a_hash_without_what_stands_before_is_found(installed, monkeypatch):
    """The suite would have seen a hash of the tokens alone."""
    ledgers = installed[1]._LEDGERS
    original = ledgers.compute_block_hash
    monkeypatch.setattr(ledgers, "compute_block_hash", lambda parent, tokens: original(None, tokens))
    report = check(PREFIXES, installed[1].make, budget=5_000)
    assert not report.ok and report.failures[0].id in ("RADIX-01", "RADIX-10"), report.text()


def test_without_transformers_they_say_what_is_missing(adapters, monkeypatch):
    for adapter, config in zip(adapters, (AllocatorConfig(2), PrefixCacheConfig(1)), strict=True):
        monkeypatch.setattr(adapter, "MISSING", "no module")
        with pytest.raises(adapters[0].TransformersMissing, match="no module"):
            adapter.make(config)
