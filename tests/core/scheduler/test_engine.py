"""The engine's door, aborts, priorities and who enters, one behaviour at a time."""

import pytest
from foredraft.core.contract.events import Planned
from foredraft.core.contract.request import FinishReason
from foredraft.core.errors import ConfigError
from foredraft.core.scheduler.rules import OurRules
from foredraft.core.scheduler.waiting import least_entitled
from foredraft.properties.executor.reference import plain_greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from served_engine import MODEL, ask, finish, make, turn


def oracle(request, cap=None):
    return plain_greedy(MODEL, request, cap or request.max_tokens).tolist()


# -- the door ----------------------------------------------------------------------------------------------------------


def test_a_request_that_can_never_fit_is_refused_with_what_would():
    engine, _ = make(context_len=40)
    limit = 40  # with speculation as without it
    assert not engine.submit(ask("fits", prompt_len=limit - 1), 0).refusal
    outcome = engine.submit(ask("too long", prompt_len=limit), 0)
    assert f"a prompt of {limit} tokens and 1 of output, at most {limit} fit" in outcome.refusal
    assert not outcome.replan
    assert engine.num_waiting == 1


def test_the_pool_limits_what_fits_as_well():
    engine, _ = make(num_pages=30, context_len=90)
    assert engine.submit(ask("a", prompt_len=29), 0).refusal.startswith("too long")
    assert not engine.submit(ask("b", prompt_len=10), 0).refusal


def test_a_small_pool_says_that_it_has_cut_an_output():
    engine, executor = make(num_pages=40, context_len=90)
    request = ask("a", prompt_len=10, max_tokens=70)
    engine.submit(request, 0)
    end = finish(engine, executor)["a"]
    assert end.reason is FinishReason.LENGTH and end.num_output < 30
    assert f"the KV pool ended it at {end.num_output} of 70 tokens: it has 40 slots" in end.message
    engine.submit(ask("b", prompt_len=10, max_tokens=5), 0)
    assert not finish(engine, executor)["b"].message


def test_max_tokens_is_capped_by_the_context_and_the_reason_is_length():
    engine, executor = make(context_len=40)
    request = ask("a", prompt_len=20, max_tokens=500)
    engine.submit(request, 0)
    end = finish(engine, executor)["a"]
    assert end.reason is FinishReason.LENGTH
    assert end.num_output == 20 and end.message == "the context of 40 tokens is full"
    assert end.tokens.tolist() == oracle(request, end.num_output)


def test_a_live_id_is_refused_a_second_time_and_free_again_afterwards():
    engine, executor = make()
    assert not engine.submit(ask("a"), 0).refusal
    assert "duplicate" in engine.submit(ask("a"), 0).refusal
    assert finish(engine, executor)["a"].num_output == 12
    assert not engine.submit(ask("a"), 0).refusal


def test_a_full_queue_sheds_with_the_reason():
    engine, _ = make(max_queue=2)
    assert [bool(engine.submit(ask(f"r{i}"), 0).refusal) for i in range(4)] == [False, False, True, True]
    assert "queue full: 2" in engine.submit(ask("r9"), 0).refusal


def test_stop_strings_need_a_tokenizer():
    engine, _ = make()
    assert "tokenizer" in engine.submit(ask("a", stop_strings=("x",)), 0).refusal


@pytest.mark.parametrize(
    "config, key",
    [
        ({"num_pages": 0}, "num_pages"),
        ({"num_pages": 5}, "num_pages"),
        ({"context_len": 1}, "context_len"),
        ({"rules": OurRules(watermark=float("nan"))}, "watermark"),
        ({"max_queue": 0}, "max_queue"),
        ({"max_step_tokens": 16, "mixed": True}, "max_step_tokens"),
    ],
)
def test_an_impossible_configuration_is_refused_by_its_key(config, key):
    with pytest.raises(ConfigError, match=key):
        make(**config)


def test_an_algorithm_without_a_draft_is_refused_steps():
    with pytest.raises(ConfigError, match="drafts nothing"):
        make(algorithm="NONE", steps=2)


# -- aborts ------------------------------------------------------------------------------------------------------------


def test_an_abort_in_a_running_multi_step_keeps_what_its_earlier_rounds_delivered():
    engine, executor = make(overlap=False, multi_step_rounds=16, algorithm="NONE", steps=0)
    engine.submit(ask("a", max_tokens=40), 0)
    engine.submit(ask("b", start=7, max_tokens=40), 0)
    turn(engine, executor)
    step = engine.plan(0)
    assert step.max_rounds == 16
    executor.launch(step)
    assert not executor.advance(5)
    outcome = engine.abort("a", 0)
    assert outcome.finished is None and outcome.replan
    assert not engine.abort("a", 0).replan
    executor.request_stop(engine.last_step_id)
    result = executor.collect()
    assert result.decode.rounds == 6, "the round that runs is finished, no other begins"
    (end,) = engine.commit(result, 0).finished
    assert (end.request_id, end.reason, end.num_output) == ("a", FinishReason.ABORT, 1 + 5)
    assert end.tokens.tolist() == oracle(ask("a", max_tokens=40))[:6]
    assert finish(engine, executor)["b"].tokens.tolist() == oracle(ask("b", start=7, max_tokens=40))


# -- who runs ----------------------------------------------------------------------------------------------------------


def test_a_greater_priority_preempts_a_strictly_lower_one_only():
    for priorities, expected in (((0, 1), ["low"]), ((1, 1), [])):
        events = []
        engine, executor = make(
            num_pages=44,
            preempt=True,
            max_running=4,
            prefix_cache=False,
            events=events.append,
            rules=OurRules(watermark=0.0),
        )
        low, high = priorities
        engine.submit(ask("low", prompt_len=16, max_tokens=12, priority=low), 0)
        for _ in range(3):
            turn(engine, executor)
        engine.submit(ask("high", start=5, prompt_len=16, max_tokens=8, priority=high), 0)
        ended = finish(engine, executor)
        retracted = [name for event in events if isinstance(event, Planned) for name in event.retracted]
        assert retracted == expected
        assert ended["low"].tokens.tolist() == oracle(ask("low", prompt_len=16))
        assert ended["high"].num_output == 8


def urgent(start=9, **config):
    """Four requests that decode in a full pool, and an urgent one that waits: the engine, its executor, its events."""
    events = []
    defaults = {
        "num_pages": 88,
        "max_running": 8,
        "preempt": True,
        "events": events.append,
        "rules": OurRules(watermark=0.0),
    }
    engine, executor = make(**{**defaults, "prefix_cache": False, **config})
    for i in range(4):
        engine.submit(ask(f"low{i}", start=i, prompt_len=10, max_tokens=60), 0)
    for _ in range(4):
        turn(engine, executor)
    events.clear()
    engine.submit(ask("high", start=start, prompt_len=20, max_tokens=4, priority=1), 0)
    return engine, executor, events


def has_entered(engine, name):
    return any(record.request.request_id == name for record in engine.requests.running.values())


@pytest.mark.fast("*-pages1", ci="*")
@pytest.mark.parametrize("pages", [{}, {"page_size": 4, "num_pages": 22}])
@pytest.mark.parametrize(
    "rules", [{}, {"rules": OurRules(guarantee_output=0.8)}, {"rules": OurRules(watermark=0.1)}, {"max_running": 4}]
)
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_what_gives_way_lets_a_greater_priority_in(overlap, mixed, rules, pages):
    """In the same plan or, behind a fence, in the next one: the others have grown until then."""
    engine, executor, events = urgent(overlap=overlap, mixed=mixed, **rules, **pages)
    running = engine.requests.running_ids
    turn(engine, executor)
    victims = [name for event in events if isinstance(event, Planned) for name in event.retracted]
    assert victims and victims == sorted(running, reverse=True)[: len(victims)]
    if overlap and not has_entered(engine, "high"):
        engine.plan(0)
    assert has_entered(engine, "high")
    assert not has_entered(engine, victims[-1])


def test_a_preemption_counts_what_the_cache_has_for_the_newcomer():
    """Its prompt begins as that of a request that stays: without the cache two would have to give way."""
    engine, executor, events = urgent(overlap=False, prefix_cache=True, start=0)
    turn(engine, executor)
    assert has_entered(engine, "high")
    assert [name for event in events if isinstance(event, Planned) for name in event.retracted] == ["low3"]


def test_an_aged_request_is_not_preempted_for_ever():
    """Every newcomer has priority and only one fits: the lowest still gets its turn within the ageing bound."""
    engine, executor = make(
        num_pages=40, preempt=True, ageing_bound=2, prefix_cache=False, rules=OurRules(watermark=0.0)
    )
    engine.submit(ask("low", prompt_len=16, max_tokens=10), 0)
    turn(engine, executor)
    ended = {}
    for i in range(60):
        if i % 2 == 0:
            engine.submit(ask(f"high{i}", start=i % 24, prompt_len=16, max_tokens=6, priority=1), 0)
        _, outcome = turn(engine, executor)
        ended |= {end.request_id: end for end in outcome.finished}
        if "low" in ended:
            break
    assert "low" in ended
    assert engine.num_waiting > 2, "it did not just wait for the others to be gone"


@pytest.mark.ci
@settings(max_examples=10)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 30)), min_size=2, max_size=9),
    num_slots=st.integers(64, 200),
    page_size=st.sampled_from([1, 4]),
    share=st.sampled_from([0.3, 1.0]),
    mode=st.fixed_dictionaries(
        {"overlap": st.booleans(), "prefix_cache": st.booleans(), "multi_step_rounds": st.sampled_from([1, 8])}
    ),
)
def test_with_guaranteed_outputs_memory_retracts_nobody(lengths, num_slots, page_size, share, mode):
    events = []
    engine, executor = make(
        num_pages=num_slots // page_size,
        page_size=page_size,
        rules=OurRules(watermark=0.0, guarantee_output=share),
        events=events.append,
        **mode,
    )
    requests = [ask(f"r{i}", start=i, prompt_len=prompt, max_tokens=most) for i, (prompt, most) in enumerate(lengths)]
    for request in requests:
        assert not engine.submit(request, 0).refusal
    ended = finish(engine, executor)
    assert share < 1 or not any(event.retracted for event in events if isinstance(event, Planned))
    assert all(ended[each.request_id].tokens.tolist() == oracle(each) for each in requests)


def test_the_less_is_guaranteed_the_more_requests_enter_and_may_be_retracted():
    def run(guarantee_output):
        events = []
        engine, executor = make(
            num_pages=80, rules=OurRules(watermark=0.0, guarantee_output=guarantee_output), events=events.append
        )
        for i in range(4):
            engine.submit(ask(f"r{i}", start=i, prompt_len=6, max_tokens=30), 0)
        finish(engine, executor)
        planned = [event for event in events if isinstance(event, Planned)]
        most = max(
            len(event.step.decode.rows) for event in planned if event.step is not None and event.step.decode is not None
        )
        return most, any(event.retracted for event in planned)

    assert run(0.0) == (4, True)
    assert run(0.2) == (3, True)
    assert run(1.0) == (1, False)


@pytest.mark.parametrize("overlap", [False, True])
def test_no_request_enters_after_a_retraction_until_a_live_round_is_committed(overlap):
    engine, executor = make(overlap=overlap)  # with room for everybody, so that only the hold keeps the request out
    for i in range(2):
        engine.submit(ask(f"r{i}", start=i, max_tokens=30), 0)
    for _ in range(4):
        turn(engine, executor)
    engine.requests.retract(least_entitled(engine.requests.running.values()))
    engine.submit(ask("newcomer", start=9), 0)
    planned = []
    while (step := engine.plan(0)) is not None:
        executor.launch(step)
        planned.append(step)
    assert planned and all(not step.joins and step.decode is not None for step in planned)
    while engine.num_uncommitted:
        engine.commit(executor.collect(), 0)
    step = engine.plan(0)
    assert [join.request.request_id for join in step.joins] == ["r1", "newcomer"]
    executor.launch(step)
    ended = finish(engine, executor)
    assert ended["r1"].tokens.tolist() == oracle(ask("r1", start=1, max_tokens=30))


def test_the_hold_ends_when_no_request_is_left_to_decode():
    engine, executor = make(overlap=False)
    engine.submit(ask("alone"), 0)
    for _ in range(3):
        turn(engine, executor)
    engine.requests.retract(next(iter(engine.requests.running.values())))
    assert finish(engine, executor)["alone"].tokens.tolist() == oracle(ask("alone"))


# -- what enters -------------------------------------------------------------------------------------------------------


def test_a_newcomer_leaves_its_reserve_to_the_prompt_that_ends_before_it():
    engine, executor = make("NONE", 0, num_pages=34, chunk_size=8, overlap=False, rules=OurRules(watermark=0.0))
    reserve = engine.sizes.reserve
    engine.submit(ask("first", prompt_len=12, max_tokens=20), 0)
    turn(engine, executor)
    # The second chunk of the first prompt leaves room for the second one, but not for a reserve of both.
    engine.submit(ask("second", prompt_len=34 - 12 - reserve, max_tokens=2, start=12), 0)
    step = engine.plan(0)
    assert step.prefill.lens.tolist() == [4] and engine.num_waiting == 1
