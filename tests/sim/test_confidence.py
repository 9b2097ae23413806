"""Intervals of a run's results: from published points, from the user's own points, or none."""

from dataclasses import replace

import foredraft
import pytest
from foredraft.sim.assembly import assemble
from foredraft.sim.assembly.confidence import difference, factors_of_rounds, intervals, rests_on
from foredraft.sim.scenario_file import load_scenario, scenario_from_dict

SMALL = {
    "model": {"target": "llama-3.1-8b", "context_len": 4096},
    "hardware": {"kernels": "roofline"},
    "speculation": {"algorithm": "NONE"},
    "workload": {"concurrency": 8, "num_requests": 24},
}
SUMMARY = {
    "mean_tpot_ms": 10.0,
    "mean_ttft_ms": 100.0,
    "mean_e2el_ms": 2000.0,
    "output_throughput": 1000.0,
    "mean_running": 8.0,
    "mean_output_tokens": 200.0,
}


def run_of(**hardware):
    return assemble(scenario_from_dict(SMALL | {"hardware": SMALL["hardware"] | hardware}, "test"))


@pytest.mark.parametrize(
    ("hardware", "says"),
    [
        ({}, "no benchmark of this server"),
        ({"server": "vllm-0.9"}, "no benchmark of this server"),
        ({"server": "vllm-0.18", "gpu": "RTX4090"}, "no benchmark of this GPU"),
        ({"server": "sglang-0.5", "gpu": "MI300X"}, "no benchmark of this GPU"),
    ],
)
def test_where_nothing_is_published_the_interval_is_an_order_of_magnitude(hardware, says):
    run = run_of(**hardware)
    assert rests_on(run) == f"{says}: order of magnitude"
    low, high = factors_of_rounds(run, 8)
    assert low < 0.6 and high > 1.6
    low, high = intervals(run, SUMMARY)["mean_ttft_ms_interval"]
    assert low < 50 and high > 200


def test_a_server_with_points_has_intervals():
    run = run_of(server="trtllm-1.x")
    found = intervals(run, SUMMARY)
    assert set(found) == {
        f"{name}_interval" for name in ("mean_tpot_ms", "mean_ttft_ms", "mean_e2el_ms", "output_throughput")
    }
    for low, high in found.values():
        assert 0 < low < high
    assert "published points of this deployment, which took" in rests_on(run)


@pytest.mark.parametrize("kernels", ["roofline", "auto"])
@pytest.mark.parametrize("server", ["vllm-0.18", "sglang-0.5", "trtllm-1.x"])
def test_no_interval_excludes_the_number_beside_it(server: str, kernels: str):
    scenario = SMALL | {"hardware": SMALL["hardware"] | {"server": server, "kernels": kernels}}
    summary = foredraft.simulate(scenario).summary
    for key in ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "output_throughput", "round_whole_us"):
        low, high = summary[f"{key}_interval"]
        assert low <= summary[key] <= high


def test_requests_of_one_token_are_as_sure_as_their_first_token():
    same = SUMMARY | {"mean_tpot_ms": None, "mean_e2el_ms": SUMMARY["mean_ttft_ms"], "mean_output_tokens": 1.0}
    found = intervals(run_of(server="trtllm-1.x"), same)
    assert found["mean_e2el_ms_interval"] == found["mean_ttft_ms_interval"] and "mean_tpot_ms_interval" not in found


def test_intervals_are_wider_the_less_is_known():
    def width(**hardware):
        low, high = factors_of_rounds(run_of(**hardware), 8)
        return high / low

    tried = [
        {"server": "trtllm-1.x", "gpu": "H100"},
        {"server": "vllm-0.18", "gpu": "H100"},
        {"server": "vllm-0.18", "gpu": "L40S"},
    ]
    widths = [width(**hardware) for hardware in tried]
    assert widths[0] < widths[1] < widths[2]
    drafting = SMALL | {"hardware": SMALL["hardware"] | tried[1]}
    run = assemble(scenario_from_dict(drafting | {"speculation": {"algorithm": "EAGLE3"}}, "test"))
    low, high = factors_of_rounds(run, 8)
    assert high / low >= widths[1] and rests_on(run).endswith("; with drafts none of this GPU and server")


def test_batches_with_drafts_beyond_the_published_ones_are_no_surer_than_plain_ones():
    hardware = SMALL["hardware"] | {"server": "sglang-0.5", "gpu": "H200"}
    runs = [
        assemble(scenario_from_dict(SMALL | {"hardware": hardware, "speculation": {"algorithm": name}}, "test"))
        for name in ("NONE", "EAGLE3")
    ]
    plain, few, many = (factors_of_rounds(run, rows) for run, rows in ((runs[0], 9), (runs[1], 8), (runs[1], 9)))
    assert many.low <= plain.low and many.high >= plain.high and many.low <= few.low and many.high >= few.high
    assert few.high / few.low < many.high / many.low
    for rows, ends in ((8, few), (9, many)):
        shown = intervals(runs[1], SUMMARY | {"mean_running": 4 * rows, "replicas": 4})
        assert shown["mean_tpot_ms_interval"] == pytest.approx([10 * end for end in ends])


def test_published_points_correct_times_only_if_that_is_asked_for():
    settings = ["hardware.server=vllm-0.18", "hardware.correction=published"]
    assert assemble(load_scenario(None, settings)[0]).deployment.is_corrected
    assert not assemble(load_scenario(None, settings[:1])[0]).deployment.is_corrected


def test_a_correction_moves_the_interval_with_the_times():
    runs = [run_of(server="trtllm-1.x", correction=one) for one in ("off", "published")]
    plain, corrected = (factors_of_rounds(run, 8) for run in runs)
    factor = runs[0].evidence.factor
    assert factor > 1.05 and [run.is_corrected for run in runs] == [False, True]
    assert [rests_on(run).endswith("(--correct applies it)") for run in runs] == [True, False]
    assert corrected.high * factor == pytest.approx(plain.high) and plain.low == pytest.approx(corrected.low * factor)
    without = run_of(server="vllm-0.9", correction="published")
    assert without.evidence.factor == 1.0 and not without.is_corrected


def test_two_servers_differ_by_more_than_two_loads_of_one():
    runs = [run_of(server=server) for server in ("trtllm-1.x", "vllm-0.18")]
    assert difference("tpot", runs[0], SUMMARY, runs[1], SUMMARY) > 0.1
    assert difference("tpot", runs[0], SUMMARY, runs[0], SUMMARY) == 0.0


def test_an_open_loop_has_no_interval_of_its_output_rate():
    run = run_of(server="trtllm-1.x")
    workload = run.scenario.workload.model_copy(update={"concurrency": None})
    opened = replace(run, scenario=run.scenario.model_copy(update={"workload": workload}))
    assert "output_throughput_interval" not in intervals(opened, SUMMARY)
