"""The engine's suite: ours and a plain one hold, broken ones are found, and what the trial itself does is right."""

import itertools
import time
from dataclasses import replace

import pytest
from foretoken.checks.adapters import core_engine
from foretoken.checks.registry import SUBJECTS
from foretoken.core.errors import ConfigError
from foretoken.properties.conformance import EngineConformance, check
from foretoken.properties.engine import plain
from foretoken.properties.engine.contract import SHAPES, EngineCapabilities, ServingConfig, Wish
from foretoken.properties.engine.device import Device
from foretoken.properties.engine.language import GARBAGE, NOTHING, num_correct, prompt_of, stream_of
from foretoken.properties.engine.model import Chunk, EngineModel, Flight, Life, RoundRow
from foretoken.properties.engine.rules import extent, limits_of, promises, verdict
from foretoken.properties.engine.trial import EngineTrial as Do
from foretoken.properties.harness.importing import load_make
from foretoken.properties.harness.letters import Choices, simpler_choices
from foretoken.properties.harness.swarm import Swarm
from foretoken.properties.harness.trial import Violation
from foretoken.properties.invariants import of_contract
from foretoken.properties.suites import suite_of

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


@pytest.mark.parametrize("name", SUBJECTS["engine"])
def test_they_hold(name, record_property):
    begin = time.process_time()
    report = check(SUITE, load_make(name), budget=8_000)
    rate = report.num_operations / (time.process_time() - begin)
    assert not report.failures, report.text()
    # It takes the whole quick budget to come across an S of 0 in a run that is compared with another.
    assert set(report.vacuous) <= {"ACCEPT-15 was never evaluated"}
    record_property("note", f"{name}: {rate:,.0f} operations per second of processor time, recounted after each")


class TestPlain(EngineConformance):
    capabilities = ("slots",)
    budget = 30_000

    def make(self, config):
        return plain.PlainEngine(config)


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
def test_misbehaviour_is_told_with_its_operation(method, answer, id, words):
    strange = type("Strange", (plain.PlainEngine,), {method: answer})
    report = check(SUITE, strange, capabilities=["slots"], budget=3_000)
    (failure,) = report.failures
    assert failure.id == id and words in failure.text(), failure.text()


def test_what_is_declared_is_expected():
    """Who says that two steps may be in flight, and launches one, leaves the device idle."""
    report = check(SUITE, plain.make, capabilities=["slots", "overlap"], budget=8_000)
    assert [failure.id for failure in report.failures] == ["ENGINE-07"]
    with pytest.raises(ConfigError, match="needs the capability slots"):
        check(SUITE, plain.make, capabilities=["prefix_cache"])


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

    swarm = Swarm(SUITE, BreaksInLargePools, EngineCapabilities(slots=True), 1)
    drawn = (swarm.drawn(run) for run in range(20))
    config, operations = next(
        (config, found) for config, found in drawn if config.num_pages < 100 < 4 * config.num_slots
    )
    assert Do.twin_config("one at a time, in a large pool", config)[0].num_pages > 100
    SUITE.execute(
        BreaksInLargePools, config, swarm.capabilities, SUITE.invariants(swarm.capabilities), operations, twice=True
    )


# -- configurations ---------------------------------------------------------------------------------------------------


def test_configurations_are_small_and_at_the_edges_and_ours_accepts_them():
    swarm = Swarm(SUITE, core_engine.make, OURS, seed=2)
    configs = [swarm.drawn(run)[0] for run in range(400)]
    assert {config.page_size for config in configs} == {1, 2, 3, 4, 8, 16}
    assert {config.max_steps for config in configs} >= {0, 1, 2, 5, 8}
    assert {config.topk for config in configs} == {1, 2, 4, 16}
    assert any(config.nodes(config.max_steps) != config.max_steps + 1 for config in configs)
    assert any(config.num_slots < 2 * config.context_len for config in configs)
    for flag in ("overlap", "mixed", "prefix_cache", "preempt"):
        assert {getattr(config, flag) for config in configs} == {False, True}
    for config in configs[:150]:
        core_engine.make(config)


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


def test_capabilities_bound_the_configuration():
    for bits in range(200):
        config = ServingConfig.draw(Choices(bits), EngineCapabilities())
        assert not (config.overlap or config.mixed or config.prefix_cache or config.preempt or config.step_tokens)
        assert config.block_rounds == len(config.candidates) == 1 and config.chunk_size == config.context_len


@pytest.mark.parametrize(("candidates", "topk", "tree_nodes"), dict.fromkeys(SHAPES))
def test_the_slots_of_a_round_are_those_of_our_engine(candidates, topk, tree_nodes):
    for page_size, overlap in itertools.product((1, 2, 3, 4, 8, 16), (False, True)):
        shape = {"candidates": candidates, "topk": topk, "tree_nodes": tree_nodes, "page_size": page_size}
        config = replace(SMALL, num_pages=400, context_len=200, overlap=overlap, **shape)
        sizes = core_engine.make(config).engine.sizes
        assert (config.round_slots, config.reserve) == (sizes.alloc_len, sizes.reserve), config


# -- the rules --------------------------------------------------------------------------------------------------------


def _life(max_tokens=10, stops=(), prompt=4) -> tuple[EngineModel, Life]:
    model = EngineModel(SMALL)
    wish = Wish("a", prompt_of(0, prompt, 0), max_tokens, stop_tokens=stops)
    life = model.lives["a"] = Life(wish, 1, max_tokens, stream_of(wish.prompt, 0, 0))
    return model, life


def test_what_must_be_promised():
    room = SMALL.context_len
    assert promises(SMALL, Wish("a", prompt_of(0, 5, 0), 4)) == (4, 4)
    assert promises(SMALL, Wish("a", prompt_of(0, 5, 0), 90)) == (room - 5, room - 5)
    small = replace(SMALL, num_pages=8)
    assert promises(small, Wish("a", prompt_of(0, 5, 0), 90))[0] == 16 - small.whole_pages(small.reserve + 2) - 5
    assert limits_of(SMALL, Wish("a", prompt_of(0, 5, 0), 1), 3) == set()
    assert limits_of(replace(SMALL, max_queue=2), Wish("a", prompt_of(0, 5, 0), 1), 2) == {2}
    assert limits_of(SMALL, Wish("a", prompt_of(0, room + 2, 0), 1), 0) == {room, room + 1, room + 2}


def test_the_door():
    assert verdict(SMALL, Wish("a", prompt_of(0, SMALL.context_len - 1, 0), 5), 0)[1]
    tight = replace(SMALL, num_pages=SMALL.whole_pages(SMALL.context_len) // SMALL.page_size)
    assert verdict(tight, Wish("a", prompt_of(0, SMALL.context_len - 1, 0), 5), 0) == ("", ""), (
        "in doubt the engine decides"
    )
    assert verdict(SMALL, Wish("a", prompt_of(0, SMALL.context_len, 0), 5), 0)[0]


def test_what_a_row_may_write_counts_what_is_in_flight():
    _, life = _life(20)
    life.kv, life.stay = 8, 1
    assert SMALL.ahead == {2: 3}
    assert extent(SMALL, [], life, 2, 1) == (True, 8, 11)
    earlier = Flight(1, [], [RoundRow(life, 1, None, 8, True, None, 0, 8, 11)], 2, 3)
    assert extent(SMALL, [earlier], life, 2, 1) == (False, 17, 20), "three rounds of three tokens may come before"
    life.promise = 10
    assert extent(SMALL, [earlier], life, 2, 1) == (False, 15, 18), "no row goes more than a round past the end"
    life.stay = 2
    assert extent(SMALL, [earlier], life, 2, 1) == (True, 8, 11), "another stay's steps do not move this one"


# -- the device -------------------------------------------------------------------------------------------------------


def _device(accept: int = 8) -> tuple[Device, Life, Flight]:
    """A device that has computed a prompt of four tokens, and the step of its first round (S = 2)."""
    model, life = _life()
    device = Device(replace(SMALL, accept=accept), OURS)
    model.admit(life, 0, 0)
    slots = tuple(range(2, 18))
    prefill = Flight(1, [Chunk(life, 1, life.row, 0, 0, tuple(life.wish.prompt), -1, 0, True)], [], 0, 1)
    prefill.slots["a"] = slots
    first = device.execute(prefill, 1).first
    assert first == stream_of(life.wish.prompt, 0, 0).tokens[4:5]
    flight = Flight(2, [], [RoundRow(life, 1, life.row, 4, True, None, 0, 4, 7)], 2, 1)
    flight.slots["a"] = slots
    return device, life, flight


def test_a_round_leaves_nothing_of_what_was_rejected():
    device, life, flight = _device(accept=0)
    assert device.execute(flight, 1).runs == [[[life.truth.tokens[5]]]]
    assert device.cells[2:7] == life.truth.hashes[:5] and device.cells[7:9] == [NOTHING, NOTHING]
    device, life, flight = _device(accept=8)
    assert device.execute(flight, 1).runs == [[life.truth.tokens[5:8]]]
    assert device.cells[2:9] == life.truth.hashes[:7]


@pytest.mark.parametrize("wrong", ["cell", "table", "length"])
def test_a_wrong_read_is_a_wrong_token(wrong):
    device, life, flight = _device()
    if wrong == "cell":
        device.forget([2])
    elif wrong == "table":
        flight.slots["a"] = (2, 3, 6, 7, *range(8, 20))
    else:
        flight.rows[0] = flight.rows[0]._replace(length=5)
    answer = device.execute(flight, 1)
    assert set(answer.runs[0][0]) == {GARBAGE} and life.row.wrong


def test_drafts_do_not_depend_on_the_text():
    assert {num_correct(1, position, 4, 8) for position in range(20)} == {4}
    assert {num_correct(1, position, 4, 0) for position in range(20)} == {0}
    assert {num_correct(1, position, 4, 4) for position in range(60)} == {0, 1, 2, 3, 4}


# -- single histories -------------------------------------------------------------------------------------------------


def _run(operations, watch=None, **changes):
    config = replace(SMALL, **changes)
    return SUITE.execute(core_engine.make, config, OURS, SUITE.invariants(OURS), operations, watch=watch)


def test_a_request_is_served_to_its_end():
    trial = _run([Do.submit("a", 5, 6), Do.run(20)], accept=8)
    life = trial.model.ended["a"]
    assert life.state == "length" and life.delivered == life.truth.tokens[5:11]
    assert trial.model.verified == 2 and trial.model.correct == 4, "six tokens: one after the prompt, two rounds"


def test_hostile_results_are_refused_and_change_nothing():
    operations = [Do.submit("a", 5, 9), Do.run(2), Do.commit_again(), Do.plan(), Do.plan(), Do.commit_early()]
    trial = _run(operations, overlap=True)
    assert trial.executed[Do.commit_again] == trial.executed[Do.commit_early] == 1
    assert trial.model.ended["a"].state == "length"


def test_a_retracted_request_computes_what_it_was_given_again():
    seen = []
    operations = [Do.submit("a", 5, 9), Do.run(4), Do.retract("a"), Do.run(30)]
    _run(operations, lambda operation, trial: seen.append(trial.model.lives.get("a") or trial.model.ended["a"]))
    life = seen[-1]
    assert life.retractions == 1 and life.delivered == life.truth.tokens[5:14]


def test_equal_prompts_share_their_pages():
    entered = []

    def watch(operation, trial):
        entered.extend((life.name, start) for life, start in trial.moment.admitted)

    operations = [Do.submit("a", 9, 2), Do.run(12), Do.submit("b", 9, 2), Do.plan()]
    _run(operations, watch, prefix_cache=True)
    assert entered == [("b", 8)], "the last of nine positions is computed; the pages hold two"


def test_a_violation_knows_how_far_it_came():
    operations = [Do.submit("a", 3, 2), Do.submit("b", 3, 2), Do.plan()]
    has = EngineCapabilities(slots=True)
    with pytest.raises(Violation) as caught:
        SUITE.execute(RunsTheNewestFirst, SMALL, has, SUITE.invariants(has), operations)
    assert caught.value.id == "ENGINE-16" and caught.value.trial.trace == operations
    assert "step 1: b computes" in caught.value.trial.told()
