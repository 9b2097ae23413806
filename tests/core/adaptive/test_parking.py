"""A parked draft: when the goodput policy parks it, and that a return leaves no context without the draft's KV."""

from types import SimpleNamespace

import numpy as np
import pytest
from foredraft.core.adaptive import AdaptiveController, CostTable, GoodputPolicy, load_adaptive_config
from foredraft.core.adaptive.parking import NEVER_PARKED, PATIENCE_ROUNDS, Parking, ParkingState
from foredraft.core.adaptive.policy import FixedPolicy
from foredraft.core.algorithm.registry import get_algorithm
from foredraft.core.contract.events import Planned
from foredraft.core.contract.request import Request
from foredraft.core.contract.step import PARKED_ROUND, PLAIN_ROUND
from foredraft.core.errors import ConfigError, InvariantViolation
from foredraft.core.kv.radix import RadixCache
from foredraft.core.prompt import Prompt
from foredraft.core.scheduler.config import EngineConfig, EngineRole
from foredraft.core.scheduler.driver import Driver
from foredraft.core.scheduler.engine import Engine
from foredraft.core.scheduler.preemption import Preemption
from foredraft.properties.executor.reference import HashDraft, HashLanguageModel, ReferenceExecutor, plain_greedy

MODEL = HashLanguageModel(seed=2, vocab_size=24)
CONFIGS = {
    "chain": {},
    "multi-step": {"multi_step_rounds": 6},
    "apart": {"mixed": False},
    "pages": {"page_size": 4, "num_pages": 40},
}
TABLE = load_adaptive_config({"1": {"candidate_steps": [0, 3]}})


def test_a_draft_is_parked_after_its_patience_and_returns_for_the_price_of_a_return():
    parking = Parking(prefill_token_ps=2_000_000)
    assert not any(parking.rest(now) for now in range(PATIENCE_ROUNDS)) and not parking.is_parked
    parking.want(PATIENCE_ROUNDS, 0.0, 100)  # drafts in between: it begins anew
    assert not any(parking.rest(now) for now in range(100, 100 + PATIENCE_ROUNDS))
    assert parking.rest(100 + PATIENCE_ROUNDS) and parking.state is ParkingState.PARKED
    assert parking.price_ns(100) == 200_000
    for now in range(165, 168):
        parking.want(now, 70_000.0, 100)
        parking.rest(now)
        assert parking.is_returning == (now == 167)
    parking.returned()
    assert not parking.is_parked and parking.num_returns == 1
    assert not any(
        parking.rest(now) for now in range(300, 300 + 2 * PATIENCE_ROUNDS)
    )  # the second time it waits longer
    assert parking.rest(300 + 2 * PATIENCE_ROUNDS)


def test_without_a_price_a_draft_is_never_parked():
    assert not any(NEVER_PARKED.rest(now) for now in range(10 * PATIENCE_ROUNDS))
    with pytest.raises(KeyError):
        NEVER_PARKED.returned()


def costs(plain_us=1000, prefill_token_ps=20_000_000):
    return CostTable((0, 3), (1, 64), ((plain_us * 1000,) * 2, (2_000_000, 2_000_000)), (0, 0), prefill_token_ps)


def test_the_price_of_a_return_is_an_optional_part_of_a_cost_table():
    table = costs()
    assert CostTable.from_json(table.to_json()) == table
    assert "prefill_token_ps" not in costs(prefill_token_ps=0).to_json()
    for wrong in (-1, 0.5, "1"):
        with pytest.raises(ConfigError) as refused:
            CostTable.from_json({**table.to_json(), "prefill_token_ps": wrong}, "costs.json")
        assert "costs.json" in str(refused.value) and "prefill_token_ps" in str(refused.value)


def drive(policy, rounds, correct, rows=8, kv_tokens=800):
    """Run rounds in which each row has so many correct drafts; return the steps of each."""
    chosen = []
    for _ in range(rounds):
        steps = policy.steps_for(rows, kv_tokens)
        chosen.append(steps)
        right = min(correct, steps)
        counts = [rows if each == right else 0 for each in range(steps + 1)]
        policy.observe(counts, right * rows, rows, rows, steps)
    return chosen


def test_the_policy_parks_where_plain_is_best_and_a_probe_waits_for_its_price():
    policy = GoodputPolicy(TABLE, costs())
    chosen = drive(policy, 1500, correct=0)
    assert policy.parking.is_parked and not any(chosen[-500:])
    # A return costs 800 tokens · 20 µs, 16 rounds; half a percent of the time are 3,200 rounds.
    drive(policy, 6000, correct=0)
    assert policy.parking.is_returning and policy.probes.current is not None
    policy.parking.returned()
    assert set(drive(policy, 3, correct=3)) == {3}  # the probe was kept for the return
    drive(policy, 400, correct=3)
    assert drive(policy, 1, correct=3) == [3] and not policy.parking.is_parked


def test_another_batch_size_brings_the_draft_back_when_it_has_cost_as_much():
    """Drafts pay with one row and not with 64."""
    table = CostTable((0, 3), (1, 64), ((1_000_000, 1_000_000), (1_200_000, 4_000_000)), (0, 0), 20_000_000)
    policy = GoodputPolicy(TABLE, table)
    drive(policy, 1500, correct=1, rows=64, kv_tokens=6400)
    assert policy.parking.is_parked
    chosen = drive(policy, 200, correct=1, rows=1, kv_tokens=500)  # a return: 10 ms; lost: about 0.4 ms a round
    assert policy.parking.is_returning and not any(chosen)
    policy.parking.returned()
    assert drive(policy, 1, correct=1, rows=1, kv_tokens=500) == [3]


class Scripted(FixedPolicy):
    """Drafts three tokens, parks and returns as it is told."""

    config = TABLE

    def __init__(self):
        super().__init__(3)
        self.config = TABLE
        self.parking = Parking(1)

    def steps_for(self, batch_size, kv_tokens):
        return 0 if self.parking.is_parked else 3

    def park(self):
        for now in range(10**5):
            if self.parking.rest(now):
                return


def serve(algorithm, turns, park_at=(6, 24), back_at=(14, 40), **config):
    """Serve requests that share prefixes; the draft is parked and wanted back after so many turns."""
    events, policy = [], Scripted()
    defaults = {"num_pages": 90, "context_len": 120, "max_running": 4, "multi_step_rounds": 1, "chunk_size": 16}
    engine = Engine(
        EngineConfig(**{**defaults, **config}, track_tokens=True),
        get_algorithm(algorithm), AdaptiveController(policy), events=events.append,
    )  # fmt: skip
    executor = ReferenceExecutor(engine, HashDraft(MODEL, 0.8))
    driver = Driver(engine, executor)
    requests = [
        Request(f"r{i}", Prompt.of_tokens([i % 3, 5, 7, 1, 2, 3, 4, 5, 6, 7, i % 5, *range(i % 4)]), 12 + 7 * (i % 3))
        for i in range(12)
    ]
    ended = {}
    for turn in range(turns):
        if turn % 4 == 0 and turn // 4 < len(requests):
            driver.submit(requests[turn // 4])
        if turn in park_at:
            policy.park()
        if turn in back_at:
            policy.parking.ask_back()
        outcome = driver.turn()
        ended |= {} if outcome is None else {end.request_id: end for end in outcome.finished}
    ended |= driver.run_until_idle()
    engine.check()
    return requests, ended, [event.step for event in events if isinstance(event, Planned) and event.step is not None]


@pytest.mark.fast("chain-EAGLE3-True", "multi-step-STANDALONE-False", ci="*")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE", "MULTI_LAYER_EAGLE", "EAGLE"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_return_loses_no_token_and_drafts_from_complete_kv(algorithm, overlap, config):
    """The reference executor refuses each read of draft KV that is not that of the whole prefix."""
    requests, ended, steps = serve(algorithm, 80, overlap=overlap, **config)
    for request in requests:
        expected = plain_greedy(MODEL, request, request.max_tokens).tolist()
        assert ended[request.request_id].tokens.tolist() == expected
    shapes = [step.decode.shape for step in steps if step.decode is not None]
    parked = [shape == PARKED_ROUND for shape in shapes]
    assert any(parked) and not parked[0] and not parked[-1] and PLAIN_ROUND not in shapes
    assert any(step.prefill.is_parked for step in steps if step.prefill is not None)
    for step in steps:
        if step.prefill is not None and step.decode is not None:
            assert step.prefill.is_parked == step.decode.shape.is_parked


@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])
@pytest.mark.parametrize("defect", ["requests run on", "the cache is kept"])
def test_a_return_that_leaves_draft_kv_incomplete_is_found(monkeypatch, algorithm, defect):
    if defect == "the cache is kept":
        monkeypatch.setattr(RadixCache, "begin_generation", lambda cache: None)
    else:
        monkeypatch.setattr(Preemption, "return_draft", lambda _, parking: parking.is_returning and parking.returned())
    with pytest.raises(InvariantViolation, match=r"draft KV|did not all write|draft candidates"):
        serve(algorithm, 80)


def test_a_generation_of_the_cache_is_found_no_more_and_listeners_do_not_see_its_name():
    heard, cache = [], RadixCache()
    cache.listener = SimpleNamespace(stored=lambda keys, slots, before, namespace: heard.append(namespace))
    for namespace in ("", "\0lora\0salt"):
        name = cache.named(namespace)
        cache.insert([1, 2, 3], np.arange(1, 4) + 10 * len(heard), name)
        assert name == namespace and cache.peek([1, 2, 3], name) == 3
    cache.begin_generation()
    for namespace in ("", "\0lora\0salt"):
        assert cache.peek([1, 2, 3], cache.named(namespace)) == 0
        cache.insert([1, 2, 3], np.arange(1, 4) + 10 * len(heard), cache.named(namespace))
        assert cache.peek([1, 2, 3], cache.named(namespace)) == 3
    assert heard == ["", "\0lora\0salt"] * 2


def test_an_engine_that_only_computes_prompts_does_not_park():
    policy = Scripted()
    engine = Engine(
        EngineConfig(num_pages=50, context_len=60, role=EngineRole.PREFILL), get_algorithm("EAGLE3"),
        AdaptiveController(policy),
    )  # fmt: skip
    policy.park()
    engine.submit(Request("a", Prompt.of_tokens(np.arange(9)), 5), 0)
    step = engine.plan(0)
    assert not step.prefill.is_parked and not policy.parking.is_parked
