"""Rounds seen by themselves: `foredraft cost` and `foredraft doctor`."""

from __future__ import annotations

import pytest
from foredraft import simulate
from foredraft.planning.rounds.model import RoundModel
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
    assert 1 <= vllm.best_drafted(1024, 64, 7).steps < 7


@pytest.mark.parametrize("acceptance", [0.05, 0.3, 0.9])
def test_the_largest_batch_that_pays_is_followed_by_one_that_does_not(acceptance: float):
    model = RoundModel(scenario_with({}, {"acceptance.conditional": [acceptance]}))
    largest, most = model.largest_that_pays(512, 3), model.most_rows(512, 0)
    assert (largest == 0) == (acceptance == 0.05)
    if largest:
        assert model.best(largest, 512, 3).steps > 0
    if largest < most:
        assert model.best(largest + 1, 512, 3).steps == 0
