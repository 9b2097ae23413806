"""Plans whose candidates have prefill and decode engines on hardware of their own."""

from __future__ import annotations

import pytest
from foredraft.core.errors import ConfigError
from foredraft.observe.figures.devices import gpus_by_name, value_of
from foredraft.planning.candidates.candidate import TENSOR_PARALLEL, base_tables, make_candidates
from foredraft.planning.grid import parse_grid
from foredraft.planning.rounds.cost import cost_of_rounds
from foredraft.planning.rounds.doctor import diagnose
from foredraft.sim.assembly.pools import gpus_by_name as gpus_of_pools
from foredraft.sim.assembly.pools import pools_of, pools_on
from foredraft.sim.scenario import Scenario
from foredraft.sim.scenario_file import scenario_with

PLAIN = "speculation.algorithm=NONE"


def candidates(*tried: str, scenario: Scenario | None = None, gpus: int | None = None):
    return make_candidates(scenario or Scenario(), parse_grid([PLAIN, *tried], "--try"), gpus)


def test_pools_are_compared_with_engines_that_do_both():
    """Without pools their hardware has no meaning, so that such engines are one candidate."""
    found = candidates(
        "disaggregation.ratio=none,2:1", "hardware.prefill.gpu=H100,H200", "hardware.decode.tensor_parallel=2"
    )
    assert [(one.name.removeprefix("plain decoding, "), one.gpus_per_unit) for one in found] == [
        ("ratio none", 1),
        ("ratio 2:1, prefill gpu H100, decode tensor_parallel 2", 4),
        ("ratio 2:1, prefill gpu H200, decode tensor_parallel 2", 4),
    ]
    assert [gpus_of_pools(one.pools) for one in found] == [{"H100": 1}, {"H100": 4}, {"H200": 2, "H100": 2}]
    assert [(one.unit, one.engines_on(8), one.gpus_of(6)) for one in found[1:]] == [(3, 6, 8)] * 2


def test_the_price_of_a_deployment_is_that_of_its_pools():
    *_, found = candidates("disaggregation.ratio=2:1", "hardware.prefill.gpu=H200", "hardware.decode.tensor_parallel=2")
    assert found.per_gpu({"H100": 2.0, "H200": 5.0}) == pytest.approx((2 * 5.0 + 2 * 2.0) / 4)
    assert found.per_gpu({"H100": 2.0}) is None
    (alike,) = candidates("disaggregation.ratio=2:1")
    assert alike.per_gpu({"H100": 0.1}) == 0.1


def test_sizes_of_pools_are_left_to_who_gives_them():
    assert not any(TENSOR_PARALLEL in one.settings for one in candidates("hardware.decode.tensor_parallel=2", gpus=4))
    own = scenario_with({}, {"hardware.prefill.tensor_parallel": 2})
    assert not any(TENSOR_PARALLEL in one.settings for one in candidates(scenario=own, gpus=4))


def test_numbers_of_engines_are_a_ratio():
    own = scenario_with({}, {"disaggregation.prefill": 2, "disaggregation.decode": 1, "hardware.prefill.gpu": "H200"})
    (found,) = candidates(scenario=own)
    assert (found.unit, gpus_of_pools(found.pools)) == (3, {"H200": 2, "H100": 1})
    twice = scenario_with(base_tables(own), {**found.settings, "hardware.replicas": 6})
    assert (pools_of(twice).num_prefill, pools_of(twice).num_decode) == (4, 2)


@pytest.mark.parametrize(
    ("tried", "message"),
    [
        ("hardware.prefill.gpu=H100,H999", "--try: hardware.prefill.gpu: unknown GPU 'H999'"),
        ("hardware.decode.tensor_parallel=1,x", "--try: hardware.decode.tensor_parallel: "),
        ("disaggregation.prefill.gpu=H100", "did you mean 'hardware.prefill.gpu'?"),
    ],
)
def test_every_value_is_looked_at_before_the_first_run(tried, message):
    with pytest.raises(ConfigError) as caught:
        candidates("disaggregation.ratio=none,1:1", tried)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "hardware",
    [
        {"disaggregation.ratio": "2:1", "hardware.replicas": 6, "hardware.prefill.gpu": "H200"},
        {"disaggregation.prefill": 2, "disaggregation.decode": 1, "hardware.decode.tensor_parallel": 4},
        {"hardware.replicas": 3, "hardware.attention_data_parallel": 2, "hardware.prefill.tensor_parallel": 8},
    ],
)
def test_figures_count_the_devices_that_run(hardware):
    scenario = scenario_with({}, hardware)
    tables = scenario.model_dump(mode="json")
    assert gpus_by_name(lambda key: value_of(tables, key)) == gpus_of_pools(
        pools_on(scenario.hardware, pools_of(scenario))
    )


def test_cost_and_doctor_look_at_the_decode_engines():
    pools = {"disaggregation.prefill": 1, "disaggregation.decode": 1, "hardware.decode.gpu": "L40S"}
    unlike, decode = scenario_with({}, pools), scenario_with({}, {"hardware.gpu": "L40S"})
    rounds = [cost_of_rounds(scenario, [8], 1000, [0, 3]) for scenario in (unlike, decode)]
    assert rounds[0].batches == rounds[1].batches
    assert "decode on L40S" in rounds[0].timing
    found = diagnose(unlike, None)
    assert found.gpu == "L40S" and found.about_speed_ups.startswith("The gains are those of the decode engines")
    assert diagnose(decode, None).about_speed_ups.startswith("The gains include the time of prompts")
    assert found.most_plain == diagnose(decode, None).most_plain
