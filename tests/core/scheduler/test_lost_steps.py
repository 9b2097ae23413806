"""Steps that fail: nothing of them is seen, what they held stays behind a fence, less is tried, and in the end
one request fails."""

import pytest
from foredraft.core.adaptive import build_controller
from foredraft.core.algorithm.registry import get_algorithm
from foredraft.core.contract.events import Planned, Resumed, StepsLost
from foredraft.core.contract.request import FinishReason
from foredraft.core.contract.step import FailureCause, StepFailure
from foredraft.core.errors import InvariantViolation
from foredraft.core.scheduler.config import EngineConfig
from foredraft.core.scheduler.engine import Engine
from foredraft.core.scheduler.recovery import GOOD_STEPS, StepLimits
from foredraft.properties.executor.reference import HashDraft, ReferenceExecutor
from served_engine import MODEL, ask, make, turn

RAISED = FailureCause.RAISED


class FailingDriver:
    """The loop around an engine whose steps `fails(step, engine)` says to lose: a cause, or None."""

    def __init__(self, engine, executor, fails, most=3000):
        self.engine, self.executor, self.fails, self.most = engine, executor, fails, most
        self.ended = {}
        self.num_failures = 0

    def lose(self, step_id, cause):
        engine = self.engine
        outcome = engine.lose_steps(StepFailure(step_id, cause, "planted"), 0)
        assert engine.plan(0) is None, "nothing is planned before the device is quiet"
        assert outcome.step_ids[0] == step_id
        self.num_failures += 1
        self._note(outcome.finished)
        engine.check()
        for _ in outcome.step_ids:  # the device finishes; its results are dropped
            self.executor.collect()
        engine.resume(0)
        engine.check()

    def run(self):
        engine = self.engine
        for _ in range(self.most):
            while (step := engine.plan(0)) is not None:
                self.executor.launch(step)
            if not engine.num_uncommitted:
                assert engine.is_idle
                return self.ended
            oldest = engine.requests.in_flight[0].step
            cause = self.fails(oldest, engine)
            if cause is not None:
                self.lose(oldest.step_id, cause)
                continue
            self._note(engine.commit(self.executor.collect(), 0).finished)
            engine.check()
        raise AssertionError("no end")

    def _note(self, finished):
        for end in finished:
            assert end.request_id not in self.ended, "a second end"
            self.ended[end.request_id] = end


def requests(count, prompt_len=9, max_tokens=14):
    return [ask(f"r{i}", prompt_len=prompt_len + i % 3, max_tokens=max_tokens, start=i) for i in range(count)]


def serve(asked, fails, **config):
    engine, executor = make(**config)
    for request in asked:
        assert not engine.submit(request, 0).refusal
    driver = FailingDriver(engine, executor, fails)
    driver.run()
    assert engine.store.num_request_slots == 0
    return driver


def test_only_the_request_that_makes_steps_fail_fails():
    asked = requests(6)

    def poisoned(step, engine):
        there = [record.request.request_id for record in engine.requests.records_of(engine.requests.in_flight[0])]
        return RAISED if "r4" in there else None

    driver = serve(asked, poisoned, max_running=6)
    reasons = {name: end.reason for name, end in driver.ended.items()}
    assert reasons.pop("r4") is FinishReason.ERROR
    assert set(reasons.values()) == {FinishReason.LENGTH} and len(reasons) == 5
    assert "planted; it ran alone" in driver.ended["r4"].message
    assert driver.num_failures <= 8, "the suspect is tried by itself, not the whole batch again and again"


def test_what_a_lost_step_should_have_copied_from_host_memory_is_not_cached():
    asked = requests(2)
    driver = serve(asked[:1], lambda step, engine: None, prefix_cache=True, host_pages=64)
    engine = driver.engine
    cache = engine.store.cache
    engine.store.allocator.free(cache.evict(cache.evictable_slots))
    assert not engine.submit(ask("again", prompt_len=9, max_tokens=4, start=0), 0).refusal
    step = engine.plan(0)
    assert step.joins[0].num_loaded == step.joins[0].num_cached > 0
    engine.lose_steps(StepFailure(step.step_id, RAISED, "planted"), 0)
    engine.resume(0)
    assert not len(cache.cached_slots()), "nothing was computed, and nothing is known to be copied"


def test_a_request_that_turns_bad_later_is_found_by_halves():
    asked = requests(8, max_tokens=30)

    def turns_bad(step, engine):
        for record in engine.requests.records_of(engine.requests.in_flight[0]):
            if record.request.request_id == "r5" and engine.output.num_delivered(record) >= 6:
                return RAISED
        return None

    driver = serve(asked, turns_bad, max_running=8, overlap=False)
    reasons = {name: end.reason for name, end in driver.ended.items()}
    assert reasons.pop("r5") is FinishReason.ERROR and driver.ended["r5"].num_output >= 6
    assert set(reasons.values()) == {FinishReason.LENGTH}


def test_less_is_asked_of_a_device_out_of_memory_and_then_more_again():
    """Steps of more than 8 verify tokens fail for a while:
    fewer steps and a smaller batch succeed, and no request fails."""
    controller = build_controller("ema", {"1": {"candidate_steps": [1, 3]}}, initial_steps=3)
    controller.init_states(None)
    events = []
    engine = Engine(
        EngineConfig(num_pages=2000, context_len=240, max_running=8, overlap=True, track_tokens=True),
        get_algorithm("STANDALONE"),
        controller,
        events=events.append,
    )
    executor = ReferenceExecutor(engine, HashDraft(MODEL, 0.9))
    asked = requests(8, max_tokens=180)
    for request in asked:
        engine.submit(request, 0)

    def too_large(step, engine):
        large = step.decode is not None and len(step.decode.rows) * step.decode.shape.nodes > 8
        return FailureCause.OUT_OF_MEMORY if large and 6 < step.step_id < 40 else None

    FailingDriver(engine, executor, too_large).run()
    lost = [event for event in events if type(event) is StepsLost]
    shapes = [
        (e.step.decode.shape.steps, len(e.step.decode.rows)) for e in events if type(e) is Planned and e.step.decode
    ]
    assert lost and all(not event.finished for event in lost)
    first = next(i for i, event in enumerate(events) if type(event) is StepsLost)
    after = [e.step.decode for e in events[first:] if type(e) is Planned and e.step.decode]
    assert after[0].shape.steps == 1, "fewer steps first"
    assert min(len(decode.rows) for decode in after[:20]) <= 4, "then a smaller batch"
    assert shapes[0][0] == 3 and any(decode.shape.steps == 3 and len(decode.rows) > 4 for decode in after), (
        "and back again"
    )
    assert not engine.recovery.limits.are_reduced


def test_slots_of_a_lost_step_are_not_reused_until_the_device_is_quiet():
    engine, executor = make(overlap=True, prefix_cache=False)
    engine.submit(ask("a", prompt_len=20, max_tokens=9), 0)
    turn(engine, executor)
    turn(engine, executor)
    held = engine.store.allocator.num_held_slots
    failing = engine.requests.in_flight[0].step.step_id
    outcome = engine.lose_steps(StepFailure(failing, RAISED), 0)
    assert not outcome.finished and engine.num_waiting == 1 and engine.num_uncommitted == 0
    assert engine.store.allocator.num_held_slots == held, "fenced"
    assert engine.plan(0) is None and not engine.is_idle
    assert engine.abort("a", 0).finished.num_output >= 1, "a client may leave meanwhile"
    assert not engine.is_idle
    engine.resume(0)
    assert engine.is_idle and engine.store.num_request_slots == 0


def test_results_of_lost_steps_are_refused():
    engine, executor = make(overlap=True)
    engine.submit(ask("a"), 0)
    executor.launch(engine.plan(0))
    executor.launch(engine.plan(0))
    late = executor.collect()
    with pytest.raises(InvariantViolation, match="RELAY-07"):
        engine.lose_steps(StepFailure(late.step_id + 1, RAISED), 0)
    with pytest.raises(InvariantViolation, match="RELAY-01"):
        engine.resume(0)
    engine.lose_steps(StepFailure(late.step_id, RAISED), 0)
    engine.resume(0)
    with pytest.raises(InvariantViolation, match="RELAY-07"):
        engine.commit(late, 0)
    step = engine.plan(0)
    assert step.step_id == 3, "numbers are not used twice, so a late result has no other step to be taken for"
    with pytest.raises(InvariantViolation, match="RELAY-07"):
        engine.commit(late, 0)


def test_a_restart_empties_the_cache_and_loses_no_request():
    events = []
    engine, executor = make(overlap=False, mixed=False, events=events.append)
    engine.submit(ask("a", prompt_len=30, max_tokens=4), 0)
    while not engine.is_idle:
        turn(engine, executor)
    assert engine.store.cache.evictable_slots > 20
    engine.submit(ask("b", prompt_len=30, max_tokens=8), 0)
    turn(engine, executor)
    engine.resume(0, restarted=True)
    engine.check()
    assert engine.store.allocator.num_held_slots == 0
    assert events[-1] == Resumed(0, True, ("b",))
    executor = ReferenceExecutor(engine, HashDraft(MODEL, 0.7))
    executor._last_step_id = engine.last_step_id
    joins = engine.plan(0).joins
    assert [(join.request.request_id, join.num_cached) for join in joins] == [("b", 0)]


def test_a_newcomer_that_makes_steps_fail_is_tried_by_itself_and_the_others_once():
    events = []
    engine, executor = make(max_running=8, overlap=False, events=events.append)
    asked = requests(5, max_tokens=60)
    for request in asked:
        engine.submit(request, 0)
    while len(engine.rounds.rows) < 5:
        turn(engine, executor)
    engine.submit(ask("bad", prompt_len=9), 0)

    def poisoned(step, engine):
        there = [record.request.request_id for record in engine.requests.records_of(engine.requests.in_flight[0])]
        return RAISED if "bad" in there else None

    driver = FailingDriver(engine, executor, poisoned)
    driver.run()
    assert driver.ended["bad"].reason is FinishReason.ERROR
    back = [name for event in events if type(event) is StepsLost for name in event.retracted]
    assert all(back.count(request.request_id) <= 1 for request in asked), back
    assert all(driver.ended[request.request_id].num_output == 60 for request in asked)


def test_who_had_left_in_a_multi_step_that_is_lost_has_left():
    engine, executor = make(overlap=True, multi_step_rounds=8)
    for name in ("a", "b"):
        engine.submit(ask(name, max_tokens=40), 0)
    while not engine.requests.in_flight or engine.requests.in_flight[0].step.max_rounds == 1:
        turn(engine, executor)
        while (step := engine.plan(0)) is not None:
            executor.launch(step)
    assert engine.abort("a", 0).finished is None, "what it got is known when the multi-step is committed"
    outcome = engine.lose_steps(StepFailure(engine.requests.in_flight[0].step.step_id, RAISED), 0)
    assert [(end.request_id, end.reason) for end in outcome.finished] == [("a", FinishReason.ABORT)]
    engine.resume(0)
    engine.check()
    assert engine.requests.running_ids == [] and engine.num_waiting == 1


def test_rows_above_the_limit_are_retracted_too():
    """Prefill runs alone here, so the decoding rows are not in the step that fails;
    a smaller batch means them as well."""
    engine, executor = make(max_running=6, overlap=False, mixed=False, chunk_size=64)
    for request in requests(3, max_tokens=40):
        engine.submit(request, 0)
    turn(engine, executor)
    turn(engine, executor)
    assert len(engine.requests.running_ids) == 3
    for name in ("x", "y"):
        engine.submit(ask(name, prompt_len=7), 0)
    step = engine.plan(0)
    assert step.decode is None and len(step.prefill.rows) == 2
    engine.lose_steps(StepFailure(step.step_id, RAISED), 0)
    assert engine.requests.running_ids == ["r0"], "one row may be held, and it is the most entitled one's"


def test_a_limit_that_is_lifted_lets_the_next_one_in_at_once():
    engine, executor = make(max_running=4, overlap=False, num_pages=900, context_len=400)
    for name in ("a", "b"):
        engine.submit(ask(name, max_tokens=300), 0)
    lost = 0
    while lost < 1 or engine.recovery.limits.row_limit != 1:
        step = engine.plan(0)
        executor.launch(step)
        engine.lose_steps(StepFailure(step.step_id, RAISED), 0)
        executor.collect()
        engine.resume(0)
        lost += 1
    for _ in range(GOOD_STEPS + 4):
        turn(engine, executor)
    assert engine.requests.running_ids == ["a", "b"]


def test_no_multi_steps_while_steps_are_kept_small():
    events = []
    engine, executor = make(overlap=False, multi_step_rounds=8, events=events.append, num_pages=900, context_len=400)
    engine.submit(ask("a", max_tokens=250), 0)
    turn(engine, executor)
    step = engine.plan(0)
    executor.launch(step)
    engine.lose_steps(StepFailure(step.step_id, RAISED), 0)
    executor.collect()
    engine.resume(0)
    rounds = {False: [], True: []}
    while not engine.is_idle:
        degraded = engine.recovery.limits.are_reduced
        planned, _ = turn(engine, executor)
        rounds[degraded] += [step.max_rounds for step in planned]
    assert set(rounds[True]) == {1} and max(rounds[False]) == 8


# -- memory that is not to be had --------------------------------------------------------------------------------------


def test_a_denial_leaves_a_lone_request_whole():
    engine, executor = make(overlap=False)
    request = ask("a", prompt_len=6, max_tokens=30)
    engine.submit(request, 0)
    turn(engine, executor)
    engine.deny_allocations(1, 0)
    planned, _ = turn(engine, executor)
    assert planned[0].joins, "it came back in the same plan"


# -- the ladder --------------------------------------------------------------------------------------------------------


def test_the_ladder():
    limits = StepLimits(chunk_size=64, max_rows=8)
    assert not limits.are_reduced
    assert not limits.count_failure(8, 8, False, can_draft_less=True)
    assert (limits.fewer_steps, limits.row_limit) == (True, None)
    row_limits = []
    for rows in (8, 4, 2):
        assert not limits.count_failure(rows, rows, False, False)
        row_limits.append(limits.row_limit)
    assert row_limits == [4, 2, 1]
    assert limits.count_failure(1, 1, False, False), "alone, and nothing less to try"
    for expected in (2, 4, None):
        assert [limits.count_success() for _ in range(GOOD_STEPS)][-1]
        assert limits.row_limit == expected
    assert limits.are_reduced
    for _ in range(GOOD_STEPS):
        limits.count_success()
    assert not limits.are_reduced


def test_a_long_prompt_is_tried_in_smaller_chunks_before_it_fails():
    limits = StepLimits(chunk_size=64, max_rows=8)
    budgets = []
    while not limits.count_failure(1, 1, True, False):
        budgets.append(limits.prefill_budget)
    assert budgets == [32, 16, 8]


def test_suspects_are_tried_by_themselves():
    limits = StepLimits(chunk_size=64, max_rows=8)
    assert not limits.count_failure(7, 2, False, False)
    assert limits.row_limit == 2
