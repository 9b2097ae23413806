"""The engine's suite on the scheduler of Hugging Face transformers: the bug that it found, and what else holds."""

import pytest
from foretoken.checks.adapters import transformers_scheduler as adapter
from foretoken.checks.adapters.transformers_blocks import TransformersMissing
from foretoken.properties.conformance import check
from foretoken.properties.engine.contract import ServingConfig
from foretoken.properties.engine.trial import EngineTrial as Do
from foretoken.properties.harness.shrink import control_of
from foretoken.properties.harness.trial import Violation
from foretoken.properties.suites import suite_of

SUITE = suite_of("engine")
needs_transformers = pytest.mark.skipif(bool(adapter.MISSING), reason=adapter.MISSING)
SMALL = ServingConfig(3, 4, 12, 2, 0, chunk_size=64, step_tokens=0, algorithm="none", candidates=(0,), mixed=True)
UNDER_PRESSURE = [Do.submit("a", 4, 8), Do.submit("b", 4, 8), Do.run(2)]  # three pages: b is put back


def run(operations):
    capabilities = SUITE.capabilities.of(adapter.make.capabilities)
    return SUITE.execute(adapter.make, SMALL, capabilities, SUITE.invariants(capabilities), operations, drain=False)


@needs_transformers
def test_nothing_is_admitted_any_more_after_the_last_one_is_cancelled():
    """The bug that docs/properties.md tells. Where this test fails, transformers has mended it: the docs should say so."""
    trial = run(UNDER_PRESSURE)
    assert [life.name for life in trial.model.waiting()] == ["b"], "put back for want of memory"
    assert trial.subject.scheduler.block_new_requests
    with pytest.raises(Violation, match="ENGINE-11") as caught:
        run([*UNDER_PRESSURE, Do.abort("a"), Do.plan()])
    assert "nothing is launched or in flight, ['b'] live" in str(caught.value)
    with pytest.raises(Violation, match="ENGINE-11"):
        run([*UNDER_PRESSURE, Do.submit("c", 2, 1), Do.abort("a"), Do.plan()])  # later requests wait for ever, too


@needs_transformers
def test_our_engine_goes_through_the_same():
    capabilities = SUITE.capabilities.of(adapter.make.capabilities)
    control = control_of(SUITE, capabilities, "")
    history = [*UNDER_PRESSURE, Do.abort("a"), Do.plan(), Do.run(6)]
    assert control.name.endswith("core_engine:make") and control.holds(SMALL, history, drain=True, twice=False)


@needs_transformers
def test_if_the_last_one_finishes_the_others_are_admitted():
    trial = run([*UNDER_PRESSURE, *[Do.run(6)] * 4])
    assert trial.model.num_ended == 2, "so it is the cancellation that matters"


@needs_transformers
def test_the_rest_holds(record_property):
    report = check(SUITE, adapter.make, expected_failures=adapter.EXPECTED_FAILURES, budget=600)
    assert not report.failures and not report.disputed, report.text()
    assert report.executed["abort"] and report.evaluations["ACCEPT-03"] > 50
    record_property("note", f"transformers' scheduler: {report.num_operations:,} operations")


def test_without_transformers_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(adapter, "MISSING", "no module")
    with pytest.raises(TransformersMissing, match="no module"):
        adapter.make(SMALL)
