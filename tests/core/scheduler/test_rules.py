"""The rules of servers, each against numbers computed by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from foredraft.core.contract.request import Request
from foredraft.core.errors import ConfigError
from foredraft.core.prompt import Prompt
from foredraft.core.scheduler.config import EngineConfig
from foredraft.core.scheduler.life import RequestRecord, RequestState
from foredraft.core.scheduler.rules import RULES, OurRules, SGLangRules, VLLMRules, rules_from_json, rules_to_json
from foredraft.properties.executor.reference import plain_greedy
from served_engine import MODEL, ask, finish, make, turn


def record(name, arrival=0, *, prompt=1, max_tokens=10, priority=0, decodes=True) -> RequestRecord:
    made = RequestRecord(Request(name, Prompt.of_length(prompt), max_tokens, priority), arrival, max_tokens)
    made.state = RequestState.DECODE if decodes else RequestState.PREFILL
    return made


# -- the guaranteed share ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rounds", "expected"), [(0, 0.7), (1, 0.7 - 0.602 / 600), (300, 0.399), (600, 0.098), (9000, 0.098)]
)
def test_the_share_falls_in_a_straight_line_to_a_floor(rounds, expected):
    share = SGLangRules().share()
    share.count(rounds)
    assert share.now(0) == pytest.approx(expected)
    assert share.now(5) == pytest.approx(max(expected - 5 * 0.602 / 600, 0.098))
    share.reset()
    assert share.now(0) == 0.7


def test_after_a_retraction_the_share_is_estimated_from_what_the_others_have_emitted():
    share = SGLangRules().share()
    share.count(600)
    kept, emitted = [record("a", max_tokens=100), record("b", max_tokens=300)], {"a": 30, "b": 50}
    share.estimate(kept, lambda one: emitted[one.request.request_id], rounds_in_flight=1)
    expected = (30 + 50 + 2 * 20) / (100 + 300 + 1)
    # The step in flight was launched before, and the next one is that for which the retraction has made room.
    assert share.now(1) == share.now(2) == pytest.approx(expected)
    share.count(2)
    assert share.now(1) == pytest.approx(expected - 0.602 / 600)
    share.estimate(kept, lambda one: 1000, rounds_in_flight=0)
    assert share.now(0) == 1.0


def test_a_share_that_does_not_fall_is_not_estimated():
    share = OurRules(guarantee_output=0.7).share()
    share.count(600)
    share.estimate([record("a")], lambda one: 9, rounds_in_flight=0)
    assert share.now(3) == 0.7 and not share.falls


@pytest.mark.parametrize(
    ("rules", "fixed_length", "expected"),
    [
        (SGLangRules(), False, 56),
        (SGLangRules(), True, 80),
        (SGLangRules(guarantee_limit=16), False, 12),
        (SGLangRules(guarantee_limit=16), True, 16),
        (OurRules(guarantee_output=0.7), True, 56),
    ],
)
def test_a_newcomer_leaves_free_what_a_running_request_is_expected_to_emit(rules, fixed_length, expected):
    """One request may emit 80 tokens more: it counts in full, or by 0.699 after one round."""
    engine, executor = make(overlap=False, steps=0, num_pages=400, context_len=200, rules=rules)
    engine.submit(ask("a", prompt_len=6, max_tokens=80, fixed_length=fixed_length), 0)
    turn(engine, executor)
    turn(engine, executor)
    (row,) = engine.requests.running
    missing = 6 + 80 + engine.sizes.reserve - int(engine.store.allocated[row])
    assert missing == 80
    assert engine.admission.room.to_leave(1) == expected
    (running,) = engine.requests.running.values()
    assert engine.admission.room.to_leave(1, [running]) == (
        expected if rules.name == "ours" else min(missing, rules.guarantee_limit)
    )


@pytest.mark.parametrize("multi_step_rounds", [1, 8])
def test_the_share_counts_rounds_and_begins_again_when_the_engine_is_idle(multi_step_rounds):
    engine, executor = make(
        algorithm="NONE", steps=0, overlap=False, multi_step_rounds=multi_step_rounds, rules=SGLangRules()
    )
    engine.submit(ask("a", max_tokens=25), 0)
    finish(engine, executor)
    assert engine.admission.room.share.now(0) == pytest.approx(
        0.7 - 24 * 0.602 / 600
    )  # the prefill emits the first token
    engine.submit(ask("b"), 0)
    assert engine.admission.room.share.now(0) == 0.7


# -- who gives way -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (OurRules(), "late"),
        (VLLMRules(), "late"),
        (SGLangRules(), "long"),
        (SGLangRules(retraction_policy="priority"), "low"),
    ],
)
def test_each_server_names_its_victim(rules, expected):
    running = [
        record("low", 0, priority=-1, prompt=5),
        record("long", 1, prompt=9),
        record("short", 2, prompt=8),
        record("late", 3, priority=-1, prompt=2),
    ]
    emitted = {"low": 4, "long": 3, "short": 3, "late": 7}
    assert rules.victim(running, lambda one: emitted[one.request.request_id]).request.request_id == expected


def test_among_equals_the_last_of_the_batch_gives_way():
    running = [record("first", 1), record("second", 0)]
    assert SGLangRules().victim(running, lambda one: 3) is running[1]


def test_a_prompt_in_progress_gives_way_before_the_last_request_that_decodes():
    prompt, one, other = record("prompt", decodes=False), record("one"), record("other")
    rules = SGLangRules()
    emitted = {"prompt": 0, "one": 5, "other": 6}.get
    assert rules.victim([prompt, one, other], lambda each: emitted(each.request.request_id)) is one
    assert rules.victim([prompt, one], lambda each: emitted(each.request.request_id)) is prompt


# -- in an engine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("rules", [OurRules(), SGLangRules(), VLLMRules()])
def test_a_retracted_request_waits_at_its_place_or_at_the_tail(rules, overlap):
    engine, executor = make(overlap=overlap, max_running=2, rules=rules)
    for i in range(4):
        engine.submit(ask(f"r{i}", start=i, max_tokens=30), 0)
    for _ in range(4):
        turn(engine, executor)
    engine.request_retraction("r0", 0)
    engine.plan(0)
    waiting = [each.request.request_id for each in engine.requests.waiting]
    assert waiting == (["r2", "r3", "r0"] if rules.name == "sglang" else ["r0", "r2", "r3"])


def test_the_pause_ends_with_the_launch_of_a_round():
    engine, executor = make(overlap=True, rules=SGLangRules(guarantee_output=0.0))
    for i in range(2):
        engine.submit(ask(f"r{i}", start=i, max_tokens=30), 0)
    for _ in range(4):
        turn(engine, executor)
    while engine.num_uncommitted:
        engine.commit(executor.collect(), 0)
    engine.request_retraction("r1", 0)
    engine.submit(ask("newcomer", start=9), 0)
    planned = []
    while (step := engine.plan(0)) is not None:
        executor.launch(step)
        planned.append(step)
    assert not planned[0].joins and planned[0].decode is not None
    assert [join.request.request_id for join in planned[1].joins] == ["newcomer", "r1"]
    finish(engine, executor)


class RetriesAfterAChange(SGLangRules):
    retries_after_departure = False


@pytest.mark.parametrize(("kind", "enters"), [(RetriesAfterAChange, True), (SGLangRules, False)])
def test_a_refused_request_is_tried_again_after_a_change_or_a_departure(kind, enters):
    """The prompt of the second request goes into the cache, which is a change, and no departure."""
    rules = kind(guarantee_floor=0.01, guarantee_rounds=2)
    engine, executor = make(overlap=False, num_pages=60, rules=rules, steps=0, chunk_size=8)
    engine.submit(ask("a", start=1, prompt_len=6, max_tokens=25), 0)
    engine.submit(ask("b", start=2, prompt_len=6, max_tokens=25), 0)
    for _ in range(12):
        turn(engine, executor)
    assert (len(engine.requests.running) == 2) == enters
    ended = finish(engine, executor)
    assert ended["b"].num_output == 25


@pytest.mark.parametrize("rules", [OurRules(), SGLangRules()])
def test_the_output_of_a_retracted_request_is_kept_in_the_cache_or_not(rules):
    engine, executor = make(algorithm="NONE", steps=0, overlap=False, rules=rules)
    engine.submit(ask("a", prompt_len=5, max_tokens=30), 0)
    for _ in range(8):
        turn(engine, executor)
    engine.request_retraction("a", 0)
    step = engine.plan(0)
    # The first turn has emitted the token after the prompt, and each later one a token; the last one has no KV.
    assert step.joins[0].num_cached == (5 + 7 if rules.caches_retracted else 5)
    executor.launch(step)
    assert finish(engine, executor)["a"].num_output == 30


@pytest.mark.fast("rules[12]-*-4", ci="*")
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(
    ("rules", "overlap"),
    [
        (SGLangRules(), False),
        (SGLangRules(), True),
        (VLLMRules(), False),  # its slots have no fence, on which this executor insists in overlap mode
        (VLLMRules(reserve_full_isl=False), False),
    ],
)
def test_by_the_rules_of_others_every_request_gets_its_tokens(rules, overlap, page_size):
    engine, executor = make(
        num_pages=96 // page_size, page_size=page_size, overlap=overlap, multi_step_rounds=8, rules=rules
    )
    requests = [ask(f"r{i}", start=i, prompt_len=3 + i, max_tokens=30) for i in range(8)]
    for request in requests:
        assert not engine.submit(request, 0).refusal
    ended = finish(engine, executor)
    for request in requests:
        assert ended[request.request_id].tokens.tolist() == plain_greedy(MODEL, request, 30).tolist()


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (SGLangRules(guarantee_floor=1.5), r"guarantee_floor: must be in \[0, 1\], got 1.5"),
        (SGLangRules(guarantee_rounds=0), "guarantee_rounds: must be at least 1, got 0"),
        (SGLangRules(guarantee_limit=0), "guarantee_limit: must be at least 1, got 0"),
        (SGLangRules(retraction_policy="lenght"), "none of length, priority .did you mean"),
        (OurRules(batch_wait_rounds=-1), "batch_wait_rounds: must be at least 0, got -1"),
        (OurRules(batch_wait_tokens=1.5), r"batch_wait_tokens: must be in \[0, 1\], got 1.5"),
        (OurRules(guarantee_output=-0.1), r"guarantee_output: must be in \[0, 1\], got -0.1"),
        (VLLMRules(watermark=1.0), r"watermark: must be in \[0, 1\), got 1.0"),
    ],
)
def test_an_impossible_setting_is_one_error(rules, message):
    with pytest.raises(ConfigError, match=message):
        make(rules=rules)


def test_the_description_of_an_engine_names_the_rules_of_others():
    plain = EngineConfig(num_pages=8, context_len=8)
    assert {"watermark": 0.01, "guarantee_output": 0.0}.items() <= plain.to_json().items()
    assert not {"rules", "batch_wait_rounds"} & set(plain.to_json())
    other = replace(plain, rules=SGLangRules(guarantee_limit=9)).to_json()
    assert other == plain.to_json() | {"rules": "sglang", "guarantee_output": 0.7, "guarantee_limit": 9}


@pytest.mark.parametrize("kind", RULES.values())
def test_rules_are_read_as_they_are_written(kind):
    other = replace(kind(), watermark=0.125)
    for rules in (kind(), other):
        assert rules_from_json(rules_to_json(rules) | {"num_pages": 8}, "log", "config") == rules


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"retracted_to": "tail"}, "log: config.retracted_to: is a rule by itself, which only older versions write"),
        ({"rules": "sglan"}, "log: config.rules: 'sglan' is none of ours, sglang, vllm .did you mean 'sglang'"),
        ({"rules": "vllm", "guarantee_limit": 9}, "log: config.guarantee_limit: is no setting of the rules vllm"),
    ],
)
def test_rules_that_cannot_be_read_are_one_line(values, message):
    with pytest.raises(ConfigError, match=message):
        rules_from_json(values, "log", "config")


# -- newcomers that wait for more of them ------------------------------------------------------------------------------


def plans_until(engine, executor, name: str, most=30) -> int:
    """Return how many decode rounds come before the step in which a request enters."""
    for count in range(most):
        planned, _ = turn(engine, executor)
        if any(join.request.request_id == name for step in planned for join in step.joins):
            return count
    raise AssertionError(f"{name} does not enter")


@pytest.mark.parametrize(
    ("rounds", "share", "waited"),
    [(0, 0.9, 0), (5, 0.0, 0), (5, 0.9, 5), (9, 0.9, 9), (5, 0.5, 5), (5, 0.37, 0)],
)
def test_newcomers_wait_so_many_rounds_for_a_step_that_is_large_enough(rounds, share, waited):
    """A step with the newcomer has 5 tokens, and one of the request that decodes: 0.375 of 16."""
    engine, executor = make(
        algorithm="NONE", steps=0, overlap=False, rules=OurRules(batch_wait_rounds=rounds, batch_wait_tokens=share)
    )
    engine.submit(ask("a", max_tokens=40), 0)
    assert plans_until(engine, executor, "a") == 0, "nothing decodes, so it does not wait"
    engine.submit(ask("b"), 0)
    assert plans_until(engine, executor, "b") == waited


def test_a_newcomer_that_makes_the_step_large_enough_ends_the_wait_of_all():
    engine, executor = make(
        algorithm="NONE", steps=0, overlap=False, rules=OurRules(batch_wait_rounds=20, batch_wait_tokens=0.6)
    )
    engine.submit(ask("a", max_tokens=60), 0)
    turn(engine, executor)
    engine.submit(ask("b"), 0)
    for _ in range(3):
        planned, _ = turn(engine, executor)
        assert not any(step.joins for step in planned)
    engine.submit(ask("c"), 0)  # with it 5 + 5 + 1 of 16 tokens
    (step,), _ = turn(engine, executor)
    assert [join.request.request_id for join in step.joins] == ["b", "c"]
    engine.submit(ask("d"), 0)
    assert plans_until(engine, executor, "d", most=60) == 20, "the next one waits from the beginning"


def test_a_newcomer_that_does_not_fit_does_not_wait_for_others():
    """Its wait begins when there is room: as in TensorRT-LLM, which counts the requests that fit."""
    engine, executor = make(
        algorithm="NONE",
        steps=0,
        overlap=False,
        max_running=1,
        rules=OurRules(batch_wait_rounds=6, batch_wait_tokens=0.9),
    )
    engine.submit(ask("a", max_tokens=10), 0)
    turn(engine, executor)
    engine.submit(ask("b"), 0)
    for _ in range(9):
        turn(engine, executor)
    assert not engine.requests.running, "the first has ended"
    assert plans_until(engine, executor, "b") == 0


@pytest.mark.parametrize("num_pages", [18, 26, 34])
def test_a_newcomer_waits_also_if_it_fits_by_its_cached_prefix_alone(num_pages):
    """Of its 12 tokens the cache has 11; beside the 15 slots of the first there are 3, 11 or 19."""
    engine, executor = make(
        algorithm="NONE",
        steps=0,
        overlap=False,
        num_pages=num_pages,
        context_len=32,
        rules=OurRules(watermark=0.0, batch_wait_rounds=3, batch_wait_tokens=1.0),
    )
    engine.submit(ask("a", prompt_len=12, max_tokens=12), 0)
    turn(engine, executor)
    turn(engine, executor)
    engine.submit(ask("b", prompt_len=12, max_tokens=2), 0)
    assert plans_until(engine, executor, "b") == 3


def test_who_waits_for_others_does_not_take_a_row_of_others():
    with pytest.raises(ConfigError, match="batch_wait_rounds: contradicts preempt"):
        make(rules=OurRules(batch_wait_rounds=3), preempt=True)


@pytest.mark.parametrize(("kind", "expected"), [(OurRules, (1, 2, 0, 0, 0, 7)), (VLLMRules, (2, 1, 4, 3, 9, 9))])
def test_what_follows_from_the_constants_of_a_server(kind, expected):
    """The engine asks these methods, so that one file says what a constant changes."""
    rules, record = kind(), SimpleNamespace(prefill_launched=9, prefill_committed=7)
    found = rules.num_rows(1), rules.chunks_ahead(True), rules.padding(5), rules.lookahead(3)
    assert (*found, rules.shared_at_launch(record), rules.tokens_passed(record)) == expected
    assert rules.chunks_ahead(False) == 1


@pytest.mark.parametrize(
    ("kind", "place", "context", "refused"), [(OurRules, 3, "kept", "head"), (SGLangRules, 8, None, None)]
)
def test_where_a_request_waits_that_gives_way_or_does_not_fit(kind, place, context, refused):
    rules = kind()
    assert rules.place_of_retracted(3, lambda: 8) == place
    assert rules.kept_of_retracted(lambda: "kept") == context
    assert rules.refused("head", may_wait=True) == refused and rules.refused("head", may_wait=False) == "head"


@pytest.mark.parametrize(("kind", "grown"), [(OurRules, []), (VLLMRules, [(0, 4)])])
def test_rows_whose_round_does_not_fit_get_none_of_its_slots_or_one_after_the_other(kind, grown):
    store = SimpleNamespace(grow=lambda rows, targets: False, grow_some=lambda *asked: taken.append(asked))
    taken = []
    assert not kind().grow(store, 0, 4) and taken == grown
