"""What a user of another component needs: no blame for what ours does too, only supported configurations,
frames, calls, clauses."""

from dataclasses import replace

import bad_allocators as bad
import pytest
from foredraft.checks.adapters.core_engine import make as make_core
from foredraft.checks.registry import mutants_of
from foredraft.core.errors import ConfigError
from foredraft.properties.conformance import AllocatorConformance, check
from foredraft.properties.engine.plain import PlainEngine
from foredraft.properties.engine.trial import EngineTrial
from foredraft.properties.harness.importing import load_make
from foredraft.properties.harness.invariants import Finding, clauses_of, collected, invariant
from foredraft.properties.harness.shrink import control_of
from foredraft.properties.harness.swarm import Budget, Swarm
from foredraft.properties.prefix_cache.plain import PlainPrefixCache
from foredraft.properties.suites import suite_of

ALLOCATOR, ENGINE = suite_of("allocator"), suite_of("engine")


# -- whose fault it is -------------------------------------------------------------------------------------------------


class RefusesLongOnes(PlainEngine):
    """Refuses prompts of five tokens and more. Nothing is wrong with what it says of an empty prompt."""

    def submit(self, wish):
        if len(wish.prompt) > 4:
            raise ValueError("too long for me")
        return super().submit(wish)


def test_an_engine_is_not_blamed_for_refusing_what_ours_refuses():
    """ENGINE-08 used to shrink to an empty prompt, which must be refused, too."""
    report = check(ENGINE, RefusesLongOnes, budget=5_000)
    (failure,) = report.failures
    assert failure.id == "ENGINE-08" and not failure.is_disputed
    (operation,) = failure.case.operations
    assert operation.length == 5 and operation.max_tokens >= 1, operation
    assert failure.control == "foredraft.properties.engine.plain:make"


@pytest.mark.parametrize("operation", [EngineTrial.submit("a", 0, 1), EngineTrial.submit("a", 2, 0)], ids=str)
def test_no_prompt_and_no_output_are_refused_rightly(operation):
    for name in ENGINE.controls:
        component = ENGINE.component(load_make(name))
        component.execute(Swarm(component, 1).drawn(1)[0], [operation])


def test_a_counterexample_that_ours_fails_too_is_a_defect_of_the_suite(monkeypatch):
    """Planted in the suite: every allocation must be refused. All allocators fail that, so none is to blame."""
    item = invariant("ALLOC-14")
    wrong = replace(item, check=lambda m: Finding("granted", "a refusal", "planted") if m.answer else None)
    monkeypatch.setattr("foredraft.properties.harness.suite.of_contract", lambda contract: (wrong,))
    report = check(ALLOCATOR, bad.ListAllocator, budget=2_000)
    assert not report.failures and not report.ok
    (failure,) = report.disputed
    assert failure.is_disputed and len(failure.case.operations) == 1
    text = report.text()
    assert "A defect of this suite, not of the component" in text and "could not be judged" in text
    assert report.to_json()["disputed_failures"][0]["invariant"] == "ALLOC-14"


def test_the_shrinker_leaves_what_only_the_component_fails(monkeypatch):
    """The suite is wrong about two pages, the component about three: what is shown has three."""

    class LosesThree(bad.ListAllocator):
        def alloc(self, n):
            return super().alloc(n) if n != 3 else None

    item = invariant("ALLOC-14")
    finding = Finding("two", "not two", "planted")
    wrong = replace(item, check=lambda m: finding if m.asked == 2 else item.check(m))
    monkeypatch.setattr("foredraft.properties.harness.suite.of_contract", lambda contract: (wrong,))
    (failure,) = check(ALLOCATOR, LosesThree, budget=20_000, every_failure=True).failures
    assert [operation.num_slots for operation in failure.case.operations] == [3]


def test_a_failure_that_does_not_happen_again_is_called_unrepeatable():
    """State that outlives a component: only the hundredth allocation of all fails."""
    calls = [0]

    class LosesOnce(bad.ListAllocator):
        def alloc(self, n):
            calls[0] += n > 0
            return None if n and calls[0] == 100 else super().alloc(n)

    (failure,) = check(ALLOCATOR, LosesOnce, budget=5_000).failures
    assert failure.id == "ALLOC-14" and not failure.is_repeatable and failure.to_json()["repeatable"] is False
    assert "did not fail when they ran again" in failure.text() and "unrepeatable: " in failure.text()
    (always,) = check(ALLOCATOR, bad.NegativeSlice, budget=5_000).failures
    assert always.is_repeatable and "unrepeatable" not in always.text()


def test_the_control_can_do_what_the_component_can():
    ours = {
        ("allocator", ()): "foredraft.properties.allocator.plain:make_unpadded",
        ("allocator", ("padding_page", "table")): "foredraft.properties.allocator.plain:make",
        ("engine", ("slots",)): "foredraft.properties.engine.plain:make",
        ("engine", ("slots", "overlap")): "foredraft.checks.adapters.core_engine:make",
        ("step-controller", ("adaptive", "averages", "goodput")): None,
    }
    for (contract, names), wanted in ours.items():
        suite = suite_of(contract)
        control = control_of(suite.component(None, names), "theirs:make")
        assert (control and control[0]) == wanted
    name, _ = control_of(ENGINE.component(None, ("slots",)), "foredraft.properties.engine.plain:make")
    assert name != "foredraft.properties.engine.plain:make", "a component is not its own control"
    of_plain = control_of(ALLOCATOR.component(None, ("misuse",)), "foredraft.properties.allocator.plain:make_unpadded")
    assert of_plain is None, "another component of the same module shares its defects"
    of_core = control_of(ENGINE.component(None, ("slots", "overlap")), "core-engine")
    assert of_core is None or of_core[0] != "foredraft.checks.adapters.core_engine:make", "nor under its other name"


# -- what a report shows -----------------------------------------------------------------------------------------------


class KeepsABook(bad.ListAllocator):
    def __init__(self, config):
        super().__init__(config)
        self.book = {}

    def free(self, slots):
        for slot in slots:
            self.strike_out(slot)

    def strike_out(self, slot):
        del self.book[slot]


def test_an_exception_shows_its_last_frames_and_a_history_the_calls():
    (failure,) = check(ALLOCATOR, KeepsABook, budget=2_000).failures
    assert failure.id == "RAISES"
    lines = failure.finding.was.splitlines()
    assert lines[0].startswith("free raised KeyError")
    assert [line.split(" in ")[1] for line in lines[1:]] == [
        "free: self.strike_out(slot)",
        "strike_out: del self.book[slot]",
    ]
    assert all("test_other_peoples.py:" in line for line in lines[1:])
    assert failure.calls == (("can_allocate(1) -> True", "alloc(1) -> [0]"), ("free([0]) raised KeyError",))
    assert "\n    2. free holder=a, num_pages=1\n         free([0]) raised KeyError\n" in failure.text()
    assert failure.to_json()["calls"] == [list(calls) for calls in failure.calls]


def test_a_component_that_cannot_be_made_shows_where():
    (failure,) = check(ALLOCATOR, bad.CannotBeMade, budget=200).failures
    assert "bad_allocators.py:" in failure.finding.was


# -- what is drawn -----------------------------------------------------------------------------------------------------


class OnePageSize(PlainEngine):
    """Pages of four slots, and no speculation."""

    def __init__(self, config):
        assert config.page_size == 4 and config.candidates == (0,), config
        super().__init__(config)


def supports(config):
    return config.page_size == 4 and config.candidates == (0,)


def test_only_supported_configurations_are_drawn():
    assert not check(ENGINE, OnePageSize, budget=1_000).ok
    report = check(ENGINE, OnePageSize, budget=6_000, supports=supports)
    assert report.ok, report.text()
    assert report.evaluations["ENGINE-17"], "alone in a large pool, of its own page size"


def test_a_case_stays_within_what_is_supported():
    class Wrong(OnePageSize):
        def free_pages(self):
            return super().free_pages()[1:]

    (failure,) = check(ENGINE, Wrong, budget=2_000, supports=supports).failures
    assert supports(failure.case.config) and failure.id not in ("RAISES", "CAPABILITY")


def test_nothing_supported_is_bad_input():
    with pytest.raises(ConfigError, match="accepts none of 5,000 configurations"):
        check(ENGINE, PlainEngine, budget=100, supports=lambda config: False)


def test_a_module_may_say_what_it_supports(tmp_path, monkeypatch):
    (tmp_path / "paged.py").write_text(
        "def supports(config): return config.page_size == 2\ndef make(config): return config\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    make = load_make("paged:make")
    assert make.capabilities == () and make.__name__ == "make"
    assert make.supports(ALLOCATOR.config(3, 2)) and not make.supports(ALLOCATOR.config(3, 1))


@pytest.mark.ci
def test_an_engine_with_one_budget_for_prompts_and_outputs_is_compared_too():
    """Its one budget bounds each step, and it cannot do without."""

    def has_one(config):
        return config.mixed and 0 < config.step_tokens <= config.chunk_size

    def make(config):
        assert has_one(config)
        return make_core(replace(config, chunk_size=config.step_tokens))

    # How long newcomers wait depends on the chunk size, which this one does not have.
    compared = replace(make_core.capabilities, waits=False)
    report = check(ENGINE, make, capabilities=compared, supports=has_one, budget=6_000)
    assert report.ok and report.evaluations["ENGINE-05"] and report.evaluations["ENGINE-17"], report.text()


def test_what_cannot_be_compared_is_skipped_and_said():
    report = check(ENGINE, PlainEngine, budget=6_000, supports=lambda config: config.algorithm == "none")
    assert report.ok and "ACCEPT-15" in report.skipped
    assert "never came up" in report.skipped["ACCEPT-15"]


# -- what is left out --------------------------------------------------------------------------------------------------


def test_a_class_of_tests_says_both_as_well():
    class Mine(AllocatorConformance):
        capabilities = ("misuse",)
        without = ("free-twice",)
        budget = 2_000

        def make(self, config):
            assert config.num_pages > 2
            return bad.ListAllocator(config)

        def supports(self, config):
            return config.num_pages > 2

    report = Mine().report()
    assert report.ok and "free-twice" not in report.executed and report.executed["free-stray"], report.text()


def test_kinds_are_left_out_and_what_they_alone_show():
    report = check(ENGINE, PlainEngine, budget=6_000, without=("submit-again", "abort"))
    assert report.ok, report.text()
    assert "submit-again" not in report.executed and "abort" not in report.executed
    assert report.skipped["ENGINE-12"] == "needs submit-again, which is left out"


def test_a_kind_that_is_none_is_bad_input():
    with pytest.raises(ConfigError, match=r"no operation of this name \(did you mean 'abort'\?\)"):
        check(ENGINE, PlainEngine, budget=100, without=("abrot",))


# -- clauses -----------------------------------------------------------------------------------------------------------


def _checker(m):
    if m["asked"] and m["answer"] > 1:
        return Finding("too many", "one", "a reason that is said")
    return _part(m)


def _part(m):
    for item in m["items"]:
        if item < 0:
            return Finding("negative", "positive", f"{item}")
    return True


def test_a_clause_is_reached_where_its_last_condition_is_evaluated():
    clauses = clauses_of(_checker)
    assert [str(clause) for clause in clauses] == [
        "a reason that is said (if m['asked'] and m['answer'] > 1)",
        "if item < 0",
    ]
    first, second = (clause.number for clause in clauses)
    for moment, wanted in (
        ({"asked": False, "answer": 0, "items": []}, set()),
        ({"asked": True, "answer": 0, "items": []}, {first}),
        ({"asked": False, "answer": 0, "items": [1]}, {second}),
    ):
        reached = set()
        with collected(reached):
            assert _checker(moment) is True
        assert reached == wanted
    assert isinstance(_checker({"asked": True, "answer": 2, "items": []}), Finding)
    assert clauses_of(_checker) == clauses, "marked once"


@pytest.mark.ci
def test_a_clause_that_no_run_reached_is_reported():
    report = check(ENGINE, PlainEngine, budget=4_000, without=("abort",))
    assert report.ok and any("its client is gone" in clause for clause in report.unreached["ENGINE-13"])
    assert report.to_json()["unreached"]["ENGINE-13"]
    everything = check(ENGINE, PlainEngine, budget=10_000)
    assert not any("an abort is idempotent" in clause for clause in everything.unreached.get("ENGINE-13", ()))


# -- policy is no failure ----------------------------------------------------------------------------------------------


class LocksTheRoot(PlainPrefixCache):
    """The root has one lock of its own, and no more, as SGLang's has."""

    def nodes(self):
        return [(id, parent, 1 if parent == -1 else locks, *rest) for id, parent, locks, *rest in super().nodes()]


def test_what_a_cache_counts_on_its_root_is_its_own_affair():
    assert check(suite_of("prefix-cache"), LocksTheRoot, budget=4_000).ok


def test_a_device_that_runs_steps_in_order_may_reuse_at_once():
    """Pages that go back under a step in flight: RELAY-01 finds that, unless the device keeps the order;
    then the tokens must show it."""
    make = next(mutant.make for mutant in mutants_of("engine") if mutant.name == "FreesSlotsUnderAStep")
    found = {}
    for names in (("slots", "overlap"), ("slots", "overlap", "ordered_reuse")):
        swarm = Swarm(ENGINE.component(make, names), 1)
        relay = [item for item in swarm.enabled if item.id == "RELAY-01"]
        found[names] = swarm.search(relay, Budget(operations=2_000))
    without, with_order = found.values()
    assert without.violation.id == "RELAY-01" and with_order is None
    assert "ordered_reuse" not in ENGINE.capabilities.all().declared, "it asks for less"
