"""The engine's suite: broken ones are found, and twins of configurations are sound."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from foredraft.checks.adapters import core_engine
from foredraft.checks.registry import mutants_of
from foredraft.core.scheduler.rounds import DecodeRounds
from foredraft.properties.conformance import check
from foredraft.properties.engine import plain
from foredraft.properties.engine.contract import SHAPES, EngineCapabilities, ServingConfig
from foredraft.properties.engine.trial import EngineTrial as Do
from foredraft.properties.harness.cases import load_case
from foredraft.properties.harness.invariants import of_contract
from foredraft.properties.harness.letters import Choices, simpler_choices
from foredraft.properties.harness.swarm import Swarm
from foredraft.properties.harness.trial import Violation
from foredraft.properties.suites import suite_of

SUITE = suite_of("engine")
OURS = core_engine.make.capabilities
SMALL = ServingConfig(
    num_pages=40,
    page_size=2,
    context_len=24,
    max_running=2,
    max_queue=0,
    chunk_size=4,
    step_tokens=0,
    algorithm="draft",
    candidates=(2,),
)


# -- broken ones ------------------------------------------------------------------------------------------------------


class RunsTheNewestFirst(plain.PlainEngine):
    """A queue that is a stack."""

    def submit(self, wish):
        most = super().submit(wish)
        self.queue.insert(0, self.queue.pop())
        return most


@pytest.mark.parametrize(
    ("method", "answer", "id", "words"),
    [
        ("plan", lambda self: (1, 2), "TYPE", "a mapping with step"),
        ("plan", lambda self: {"step": 1}, "TYPE", "a mapping with step"),
        ("commit", lambda self, answer: None, "TYPE", "a list"),
        ("commit", lambda self, answer: [("said", "a", [1])], "TYPE", "tokens"),
        ("waiting", lambda self: "none", "TYPE", "a list of names"),
        ("running", lambda self: [1], "TYPE", "a list of names"),
        ("submit", lambda self, wish: "yes", "TYPE", "an integer"),
        ("abort", lambda self, request: 1 / 0, "RAISES", "ZeroDivisionError"),
        ("slots_of", lambda self, request: [0, 1], "TYPE", "page 0"),
        ("slots_of", None, "CAPABILITY", "slots_of"),
    ],
)
def test_misbehaviour_is_reported_with_its_operation(method, answer, id, words):
    strange = type("Strange", (plain.PlainEngine,), {method: answer})
    report = check(SUITE, strange, capabilities=["slots"], budget=3_000)
    (failure,) = report.failures
    assert failure.id == id and words in failure.text(), failure.text()


def test_an_engine_that_refuses_what_fits_is_told_so():
    """Where no limit is in a request's way, there is none for the refusal to name."""

    class Refuses(plain.PlainEngine):
        def submit(self, wish):
            raise ValueError("the pool is full")

    report = check(SUITE, Refuses, capabilities=["slots", "reasons"], budget=1_000)
    (failure,) = report.failures
    assert failure.id == "ENGINE-08" and "it could have been served" in failure.text(), failure.text()


def test_what_is_declared_is_expected():
    """Who says that two steps may be in flight, and launches one, leaves the device idle."""
    report = check(SUITE, plain.make, capabilities=["slots", "overlap"], budget=8_000)
    assert [failure.id for failure in report.failures] == ["ENGINE-07"]


def test_prompts_that_starve_rows_are_found():
    """Chunk by chunk of a long prompt, and nothing decodes beside it, though a step may have both."""
    mutant = next(each for each in mutants_of("engine") if each.name == "LetsPromptsGoFirst")
    config = replace(SMALL, num_pages=80, context_len=60, mixed=True)
    operations = [Do.submit("a", 2, 30), Do.run(1), Do.submit("b", 40, 2), Do.run(3)]
    SUITE.component(core_engine.make).execute(config, operations)
    with pytest.raises(Violation, match="is without a, which decodes"):
        SUITE.component(mutant.make).execute(config, operations)


def test_an_engine_that_stands_still_is_no_endless_run():
    class Sleeps(plain.PlainEngine):
        def plan(self):
            return None

    report = check(SUITE, Sleeps, capabilities=[], budget=2_000)
    assert [failure.id for failure in report.failures] == ["ENGINE-11"]


def test_twins_of_other_configurations_do_not_fail_for_themselves():
    """What breaks in large pools alone is found in runs of its own, with the configuration that it breaks in."""

    class BreaksInLargePools(plain.PlainEngine):
        def running(self):
            return super().running() if self.config.num_pages < 100 else ["unknown"]

    component = SUITE.component(BreaksInLargePools)
    swarm = Swarm(component, 1)
    drawn = (swarm.drawn(run) for run in range(20))
    config, operations = next(
        (config, found) for config, found in drawn if config.num_pages < 100 < 4 * config.num_slots
    )
    assert Do.twin_config("one at a time, in a large pool", config)[0].num_pages > 100
    component.execute(config, operations, twice=True)


class SaysNothingOfItsRules(core_engine.CoreEngineByOtherRules):
    """An engine with a victim, a place in the queue and estimates of its own, declared as if it had none."""

    capabilities = core_engine.CoreEngine.capabilities


def test_rules_of_its_own_must_be_declared():
    """The declared ones hold: `test_ours_hold`."""
    config = replace(SMALL, num_pages=18, page_size=1, context_len=12, chunk_size=12, max_running=3)
    submits = [Do.submit(name, length, 8) for name, length in (("a", 4), ("b", 2), ("c", 1))]
    operations = [*submits, *(Do.run(1) for _ in range(12))]
    with pytest.raises(Violation) as caught:
        SUITE.component(SaysNothingOfItsRules).execute(config, operations)
    assert caught.value.id in ("ENGINE-07", "ENGINE-10", "ENGINE-16")
    SUITE.component(core_engine.make_by_other_rules).execute(config, operations)


# -- configurations ---------------------------------------------------------------------------------------------------


def test_twins_and_simpler_ones_are_made_too():
    kinds = {item.twin for item in of_contract("engine") if item.twin}
    assert len(kinds) == 7
    for bits in range(60):
        choose = Choices(bits)
        config = ServingConfig.draw(choose, OURS)
        for kind in sorted(kinds):
            other = Do.twin_config(kind, config)
            for one in other if isinstance(other, list) else [other] if other is not None else []:
                core_engine.make(one)
        for given in simpler_choices(choose.taken)[:: 1 + bits % 4]:
            core_engine.make(ServingConfig.draw(Choices(given=given), OURS))
    with pytest.raises(AssertionError, match="no twin"):
        Do.twin_config("upside down", SMALL)


class HidesPagesOfUnits(core_engine.CoreEngineWithGroups):
    """An engine that shows one page less of those that units take."""

    def unit_pages(self):
        return [pages[1:] for pages in super().unit_pages()]


def test_units_take_pages_of_the_pool_or_have_pools_of_their_own():
    configs = [ServingConfig.draw(Choices(bits), EngineCapabilities.all()) for bits in range(200)]
    with_groups = [config for config in configs if config.groups]
    assert {group.eighths for config in with_groups for group in config.layer_groups} == {0, 4, 8, 12}
    for config in with_groups[:40]:
        held = core_engine.make_with_groups(config).engine.store.groups.all
        in_all = [group.units_in(config.num_pages) for group in config.layer_groups]
        assert [each.pool.ids.num_pages for each in held] == in_all
    (failure,) = check(SUITE, HidesPagesOfUnits, budget=2_000, seed=1).failures
    assert failure.id == "RELAY-01" and "neither free nor cached nor held" in str(failure.finding)


def test_a_multi_step_leaves_the_units_of_a_pool_of_their_own_to_the_next_plan(monkeypatch):
    stored = Path(__file__).parents[2] / "support/cases/engine/a-multi-step-leaves-the-units-of-a-pool-of-its-own.json"
    config, component = load_case(stored, suite_of).config, SUITE.component(core_engine.make_with_groups)
    history = [Do.submit("b", 1, 7), Do.run(6, True)]
    component.execute(config, history)
    monkeypatch.setattr(DecodeRounds, "_tokens_in", lambda self, free: 0)
    with pytest.raises(Violation, match="ENGINE-07 at plan: step 2 has one round"):
        component.execute(config, history)


@pytest.mark.parametrize(("candidates", "topk", "tree_nodes"), dict.fromkeys(SHAPES))
def test_the_slots_of_a_round_are_those_of_our_engine(candidates, topk, tree_nodes):
    for page_size, overlap in itertools.product((1, 2, 3, 4, 8, 16), (False, True)):
        shape = {"candidates": candidates, "topk": topk, "tree_nodes": tree_nodes, "page_size": page_size}
        config = replace(SMALL, num_pages=400, context_len=200, overlap=overlap, **shape)
        sizes = core_engine.make(config).engine.sizes
        assert (config.round_slots, config.reserve) == (sizes.alloc_len, sizes.reserve), config


# -- single histories -------------------------------------------------------------------------------------------------


def test_a_violation_knows_how_far_it_came():
    operations = [Do.submit("a", 3, 2), Do.submit("b", 3, 2), Do.plan()]
    has = EngineCapabilities(slots=True)
    with pytest.raises(Violation) as caught:
        SUITE.component(RunsTheNewestFirst, has).execute(SMALL, operations)
    assert caught.value.id == "ENGINE-16" and caught.value.trial.trace == operations
    assert "step 1: b computes" in caught.value.trial.last_report()


class DraftsWhatIsLeft(plain.PlainEngine):
    """Drafts no more tokens than the request may still get."""

    slots_per_draft = 1

    def plan(self):
        view = super().plan()
        if view is not None:
            entries = {entry.name: entry for entry in self.batch}
            rows = [(row, entries[row[0]]) for row in view["decode"]]
            view["decode"] = [(*row, min(view["steps"], entry.most - len(entry.output) - 1)) for row, entry in rows]
            for row in view["decode"]:
                pages = entries[row[0]].pages
                while len(pages) > -(-(row[1] + 1 + self.slots_per_draft * row[4]) // self.config.page_size):
                    self.free.append(pages.pop())
        return view


class ReservesNothingForDrafts(DraftsWhatIsLeft):
    slots_per_draft = 0


def ragged(kind, *more):
    def is_chain(config):
        return config.topk == 1 and not config.tree_nodes

    declared = [*plain.PlainEngine.capabilities.declared, "ragged_drafts", *more]
    return check(suite_of("engine"), kind, capabilities=declared, budget=3_000, seed=1, supports=is_chain)


def test_rows_of_a_step_may_have_fewer_drafts():
    assert ragged(DraftsWhatIsLeft).ok
    (failure,) = ragged(ReservesNothingForDrafts).failures
    assert failure.id == "RELAY-06"


def test_the_next_drafts_have_slots_behind_the_verify_window():
    class ReservesTheWindowAlone(plain.PlainEngine):
        def __init__(self, config):
            super().__init__(replace(config, lookahead=False))

    assert ragged(plain.PlainEngine, "lookahead").ok
    (failure,) = ragged(ReservesTheWindowAlone, "lookahead").failures
    assert failure.id == "RELAY-06"


def test_no_row_drafts_more_than_its_step():
    class DraftsMore(plain.PlainEngine):
        def plan(self):
            view = super().plan()
            if view is not None:
                view["decode"] = [(*row, view["steps"] + 1) for row in view["decode"]]
            return view

    (failure,) = ragged(DraftsMore).failures
    assert failure.id == "TYPE" and "drafts" in str(failure.finding)


def comes(request, max_tokens, priority=0, length=1):
    return Do.submit(request, length, max_tokens, 0, 0, priority, 0, False, False)


@pytest.mark.parametrize(
    "operations",
    [
        (comes("a", 2), comes("b", 2, 1), Do.run(1, False), Do.fail("b"), comes("c", 1, 1), Do.plan(), Do.commit(0),
         Do.commit(0), Do.plan(), Do.plan()),
        (comes("a", 2), comes("b", 2), comes("c", 1), Do.run(3, False), comes("a", 1), Do.plan(), comes("b", 1, 1),
         Do.leave(0, 1), Do.commit(0), Do.commit(0), Do.run(1, False)),
        (comes("a", 2), Do.plan(), Do.retract("a", 0), comes("b", 1, 1), Do.run(2, False)),
    ],
    ids=["a row fails", "a row has left", "retracted on demand"],
)  # fmt: skip
def test_who_gave_way_may_wait_for_the_first_round_of_the_other(operations):
    """Where no round is to come at first, an engine may let it in at once or after that round."""
    config = replace(SMALL, num_pages=45, page_size=1, context_len=6, chunk_size=64, algorithm="none", candidates=(0,),
                     overlap=True, multi_step_rounds=3, preempt=True)  # fmt: skip
    SUITE.component(core_engine.make, OURS).execute(config, operations, drain=False)
