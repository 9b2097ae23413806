"""Rounds seen by themselves: `foredraft doctor --round` and `foredraft doctor`."""

from __future__ import annotations

import math

import pytest
from foredraft import simulate
from foredraft.core.contract.step import PLAIN_ROUND
from foredraft.planning.candidates.rounds import RoundModel
from foredraft.planning.confidence.unknowns import ACCEPTANCE, gains_by_unknown
from foredraft.sim.assembly.rounds import PricedRound
from foredraft.sim.cost.host import HOST_PRESETS
from foredraft.sim.scenario import Scenario
from foredraft.sim.scenario_file import scenario_with


def test_a_round_is_the_round_of_a_simulation():
    """In a closed loop of equal requests the median time between emissions is a round at the middle context."""
    settings = {
        "speculation.policy": "fixed",
        "speculation.steps": 3,
        "acceptance.conditional": [1.0],
        "workload.concurrency": 8,
        "workload.num_requests": 8,
        "workload.prompt": {"kind": "fixed", "value": 1000},
        "workload.output": {"kind": "fixed", "value": 400},
    }
    summary = simulate({}, settings).summary
    found = RoundModel(scenario_with({}, settings)).round(8, 1200, 3)
    assert found.accept_length == 4.0
    assert summary["median_itl_ms"] == pytest.approx(found.total_ns / 1e6, rel=0.005)


@pytest.mark.parametrize(("mode", "beside"), [("overlap", True), ("synchronous", False)])
def test_the_host_is_beside_the_device_or_after_it(mode: str, beside: bool):
    found = RoundModel(scenario_with({}, {"engine.mode": mode})).round(8, 1000, 2)
    assert found.is_overlapped == beside
    assert found.total_ns == (max if beside else lambda *times: sum(times))(found.device_ns, found.host_ns)


@pytest.mark.parametrize("shape", [{}, {"speculation.topk": 2, "speculation.num_draft_tokens": 6}])
@pytest.mark.parametrize("seed", [0, 7])
def test_a_mean_accept_length_is_that_of_the_most_steps(shape: dict, seed: int):
    """Its rounds have the mean as they stand, whatever the seed; with fewer and more steps the same drafts give it."""
    given = {"acceptance.mean_length": 2.5, "speculation.steps": 3, "speculation.policy": "fixed", "seed": seed}
    model = RoundModel(scenario_with({}, given | shape))
    one, three, five = (model.round(1, 1000, steps).accept_length for steps in (1, 3, 5))
    assert three == pytest.approx(2.5, abs=0.005)
    assert 1.5 < one < 1.9 and 2.5 < five < 3.2


def test_a_round_breaks_even_at_the_accept_length_that_gives_the_tokens_of_plain_decoding():
    model = RoundModel(Scenario())
    plain, found = model.round(16, 1024, 0), model.round(16, 1024, 4)
    per_token = found.break_even(plain) * plain.batch_size * 1e9 / found.total_ns
    assert per_token == pytest.approx(plain.tokens_per_s)


def test_drafts_are_compared_only_where_so_many_requests_decode_with_them():
    model = RoundModel(scenario_with({}, {"hardware.server": "sglang-0.5", "hardware.kernels": "roofline"}))
    assert (model.most_drafted_rows(512), model.largest_that_pays(512, 3)) == (48, 48)
    assert model.most_rows(512, 0) > 48
    vllm = RoundModel(scenario_with({}, {"hardware.server": "vllm-0.18", "hardware.kernels": "roofline"}))
    assert vllm.most_rows(64, 1) == 1024 > vllm.most_rows(64, 7) == 1023
    assert 1 <= vllm.best_drafted(1024, 64, 7).shape.steps < 7


@pytest.mark.parametrize("acceptance", [0.05, 0.3, 0.9])
def test_the_largest_batch_that_pays_is_followed_by_one_that_does_not(acceptance: float):
    model = RoundModel(scenario_with({}, {"acceptance.conditional": [acceptance]}))
    largest, most = model.largest_that_pays(512, 3), model.most_rows(512, 0)
    assert (largest == 0) == (acceptance == 0.05)
    if largest:
        assert model.best(largest, 512, 3).shape.steps > 0
    if largest < most:
        assert model.best(largest + 1, 512, 3).shape.steps == 0


def test_prompts_make_the_gain_smaller_and_their_own_share_larger():
    """With prompts, a batch emits as many tokens as one whose rounds are longer by its prompts."""
    apart = scenario_with({}, {"engine.mixed": False})
    plain_only, whole = RoundModel(apart), RoundModel(apart, output_len=200.0)
    steps = 3
    alone, found = plain_only.round(16, 1024, steps), whole.round(16, 1024, steps)
    assert alone.prompt_ns == 0 and found.total_ns == alone.total_ns
    ended = 16 * found.accept_length / 200  # requests that end per round
    one_prompt_ns = found.prompt_ns * 200
    assert found.tokens_per_s == pytest.approx(
        16 * found.accept_length * 1e9 / (found.total_ns + ended * one_prompt_ns)
    )
    assert 1 < whole.gain(found) < plain_only.gain(alone)
    mixed = RoundModel(scenario_with({}, {"engine.mixed": True}), output_len=200.0).round(16, 1024, steps)
    assert 0 < mixed.prompt_ns < found.prompt_ns  # a round goes along
    eight = whole.with_steps(steps).cost.step_ns([(924, 0)] * 8)  # 8192 tokens of a step
    assert one_prompt_ns == pytest.approx(eight / 8)
    plain = whole.round(16, 1024, 0)
    even = found.break_even(plain)
    assert 16 * even * 1e9 / (found.total_ns + 16 * even * found.prompt_ns) == pytest.approx(plain.tokens_per_s)
    assert found.break_even(PricedRound(16, 1024, PLAIN_ROUND, {}, 0, True, 1.0, 0.0)) == math.inf


def test_the_unknown_that_moves_the_gain_most_comes_first():
    model = RoundModel(scenario_with({}, {"acceptance.mean_length": 2.0}), output_len=200.0)
    found = gains_by_unknown(model, 8, 1024, 3)
    assert {one.name for one in found} == {"the cost model", "the accept length", "the lengths"}
    ratios = [one.high / one.low for one in found]
    assert ratios == sorted(ratios, reverse=True)
    own = model.gain(model.best_drafted(8, 1024, 3))
    assert all(one.low <= own <= one.high for one in found)
    by_length = next(one for one in found if one.name == "the accept length")
    assert by_length.high / by_length.low > 1.05 and "fewer or more accepted drafts" in by_length.what


def test_gains_without_a_published_acceptance_are_between_those_of_such_drafts():
    model = RoundModel(scenario_with({}, {"model.target": "qwen2.5-7b", "speculation.algorithm": "EAGLE3"}), 200.0)
    by_length = next(one for one in gains_by_unknown(model, 8, 1024, 3) if one.name == ACCEPTANCE)
    assert "of this kind (eagle3-qwen3-chat to eagle3-llama-chat)" in by_length.what
    assert by_length.high == pytest.approx(model.gain(model.best_drafted(8, 1024, 3))), "what is used is Llama's"
    assert by_length.low < 0.8 * by_length.high


def test_a_synchronous_host_reads_what_was_accepted_in_each_round_with_drafts():
    """The round that planning prices has what a simulation pays: once for the round, and for each row."""
    settings = {"engine.mode": "synchronous", "hardware.server": "sglang", "hardware.kernels": "roofline"}
    model = RoundModel(scenario_with({}, settings))
    host, drafting = model.with_steps(3).host, model.round(8, 1024, 3)
    emitted = round(8 * drafting.accept_length)
    assert drafting.host_ns == host.round_ns(8, emitted) + host.verify_base_ns + 8 * host.verify_row_ns
    assert host.verify_base_ns > 0 and model.round(8, 1024, 0).host_ns == host.round_ns(8, 8)
    beside = RoundModel(scenario_with({}, settings | {"engine.mode": "overlap"})).round(8, 1024, 3)
    assert beside.host_ns == host.round_ns(8, emitted)


def test_the_launch_of_look_ups_is_beside_no_device():
    settings = {"hardware.server": "sglang", "hardware.kernels": "roofline", "engine.mode": "overlap"}
    eagle, ngram = (
        RoundModel(scenario_with({}, settings | {"speculation.algorithm": name})).round(8, 1024, 2)
        for name in ("EAGLE3", "NGRAM")
    )
    host = HOST_PRESETS["sglang-overlap"]
    assert eagle.total_ns == max(eagle.device_ns, eagle.host_ns)
    assert ngram.total_ns == host.launch_ns(8) + max(ngram.device_ns, ngram.host_ns - host.launch_ns(8))
