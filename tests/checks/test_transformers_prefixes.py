"""The prefix cache's suite on one that is not ours: it holds all that it declares."""

import pytest
from foretoken.checks.adapters import transformers_prefixes
from foretoken.checks.adapters.transformers_blocks import TransformersMissing
from foretoken.properties.conformance import check
from foretoken.properties.prefix_cache.contract import PrefixCacheConfig
from foretoken.properties.suites import suite_of

SUITE = suite_of("prefix-cache")
needs_transformers = pytest.mark.skipif(bool(transformers_prefixes.MISSING), reason=transformers_prefixes.MISSING)


@needs_transformers
def test_block_hashes_hold():
    report = check(SUITE, transformers_prefixes.make, budget=10_000)
    assert report.ok, report.text()
    assert report.evaluations["RADIX-01"] > 1_000 and report.evaluations["RADIX-15"] > 100
    assert "unlock-stray" not in report.executed, "it trusts its callers, and declares no misuse"


@needs_transformers
def test_a_hash_without_what_stands_before_is_found(monkeypatch):
    """The suite would have seen a hash of the tokens alone."""
    original = transformers_prefixes._LEDGERS.compute_block_hash
    monkeypatch.setattr(
        transformers_prefixes._LEDGERS, "compute_block_hash", lambda parent, tokens: original(None, tokens)
    )
    report = check(SUITE, transformers_prefixes.make, budget=5_000)
    assert not report.ok and report.failures[0].id in ("RADIX-01", "RADIX-10"), report.text()


def test_without_transformers_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(transformers_prefixes, "MISSING", "no module")
    with pytest.raises(TransformersMissing, match="no module"):
        transformers_prefixes.make(PrefixCacheConfig(1))
