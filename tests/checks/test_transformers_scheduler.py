"""The engine's suite on the scheduler of Hugging Face transformers: the bug that it found, and what else holds."""

import pytest
from foredraft.checks.servers.packages import package_of
from foredraft.properties.conformance import check
from foredraft.properties.engine.contract import ServingConfig
from foredraft.properties.engine.trial import EngineTrial as Do
from foredraft.properties.harness.shrink import control_of
from foredraft.properties.harness.trial import Violation
from foredraft.properties.suites import suite_of

pytestmark = pytest.mark.xdist_group("transformers")  # one worker imports it

SUITE = suite_of("engine")
SMALL = ServingConfig(3, 4, 12, 2, 0, chunk_size=64, step_tokens=0, algorithm="none", candidates=(0,), mixed=True)
UNDER_PRESSURE = [Do.submit("a", 4, 8), Do.submit("b", 4, 8), Do.run(2)]  # three pages: b is put back


@pytest.fixture
def adapter():
    """transformers takes seconds to import: not while tests are collected."""
    from foredraft.checks.servers import transformers_scheduler

    if transformers_scheduler.MISSING:
        pytest.skip(transformers_scheduler.MISSING)
    return transformers_scheduler


def run(adapter, operations):
    return SUITE.component(adapter.make).execute(SMALL, operations, drain=False)


def test_nothing_is_admitted_any_more_after_the_last_one_is_cancelled(adapter):
    """The bug that docs/properties.md tells. Where this test fails, transformers has mended it:
    the docs should say so."""
    trial = run(adapter, UNDER_PRESSURE)
    assert [life.name for life in trial.model.waiting()] == ["b"], "put back for want of memory"
    assert trial.subject.scheduler.block_new_requests
    with pytest.raises(Violation, match="ENGINE-11") as caught:
        run(adapter, [*UNDER_PRESSURE, Do.abort("a"), Do.plan()])
    assert "nothing is launched or in flight, ['b'] live" in str(caught.value)
    with pytest.raises(Violation, match="ENGINE-11"):
        run(
            adapter, [*UNDER_PRESSURE, Do.submit("c", 2, 1), Do.abort("a"), Do.plan()]
        )  # later requests wait for ever, too


def test_our_engine_goes_through_the_same(adapter):
    name, control = control_of(SUITE.component(adapter.make), "")
    assert name.endswith("core_engine:make")
    control.execute(SMALL, [*UNDER_PRESSURE, Do.abort("a"), Do.plan(), Do.run(6)])


def test_if_the_last_one_finishes_the_others_are_admitted(adapter):
    trial = run(adapter, [*UNDER_PRESSURE, *[Do.run(6)] * 4])
    assert trial.model.num_ended == 2, "so it is the cancellation that matters"


def test_the_rest_holds(adapter, record_property):
    (component,) = [each for each in package_of("transformers").components if each.contract == "engine"]
    allowed = component.may_break(adapter._TRANSFORMERS.__version__)
    report = check(SUITE, adapter.make, allowed_failures=allowed, every_failure=True, budget=600)
    assert not report.failures and not report.disputed, report.text()
    assert report.executed["abort"] and report.evaluations["ACCEPT-03"] > 50
    record_property("note", f"transformers' scheduler: {report.num_operations:,} operations")


def test_without_transformers_it_says_what_is_missing(monkeypatch):
    from foredraft.checks.servers import transformers_scheduler as adapter
    from foredraft.checks.servers.transformers_blocks import TransformersMissing

    monkeypatch.setattr(adapter, "MISSING", "no module")
    with pytest.raises(TransformersMissing, match="no module"):
        adapter.make(SMALL)
