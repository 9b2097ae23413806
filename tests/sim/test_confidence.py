"""Intervals of a run's results: from published points, from the user's own points, or none."""

import math
from dataclasses import replace

import foredraft
import pytest
from foredraft.observe.tables import outside_of_intervals
from foredraft.sim.assembly import assemble
from foredraft.sim.confidence import difference, factors_of_rounds, intervals, rests_on
from foredraft.sim.cost.published.evidence import Load
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


def test_our_own_executor_has_no_published_points():
    run = run_of()
    assert intervals(run, SUMMARY) == {} and rests_on(run) == "no published points"
    assert "No intervals of these times: no published points." in str(foredraft.simulate(SMALL))


def test_a_server_with_points_has_intervals():
    run = run_of(server="trtllm-1.x")
    found = intervals(run, SUMMARY)
    assert set(found) == {
        f"{name}_interval" for name in ("mean_tpot_ms", "mean_ttft_ms", "mean_e2el_ms", "output_throughput")
    }
    for low, high in found.values():
        assert 0 < low < high
    assert "published points of this model, GPU and server" in rests_on(run)


def test_numbers_outside_of_their_intervals_are_named():
    numbers = {"mean TTFT": (1.0, (1.5, 3.0)), "TPOT": (2.0, (1.0, 3.0)), "output tokens/s": (9.0, (5.0, 8.0))}
    text = "Outside of the interval as simulated: {}. Most published services like this one were {}."
    assert outside_of_intervals(numbers) == text.format("mean TTFT, output tokens/s", "slower")
    assert outside_of_intervals({"TPOT": (4.0, (1.0, 3.0))}) == text.format("TPOT", "faster")
    assert outside_of_intervals({"TPOT": (3.0, (1.0, 3.0))}) == ""


@pytest.mark.parametrize("kernels", ["roofline", "auto"])
def test_a_report_names_exactly_the_means_outside_of_their_intervals(kernels: str):
    scenario = SMALL | {"hardware": SMALL["hardware"] | {"server": "vllm-0.18", "kernels": kernels}}
    result = foredraft.simulate(scenario)
    text = " ".join(str(result).split())
    told = text.partition("Outside of the interval as simulated: ")[2].partition(".")[0].split(", ")
    for key, name in {"mean_ttft_ms": "mean TTFT", "mean_tpot_ms": "TPOT"}.items():
        low, high = result.summary[f"{key}_interval"]
        assert (name in told) is not (low <= result.summary[key] <= high)


def test_requests_of_one_token_are_as_sure_as_their_first_token():
    same = SUMMARY | {"mean_tpot_ms": None, "mean_e2el_ms": SUMMARY["mean_ttft_ms"], "mean_output_tokens": 1.0}
    found = intervals(run_of(server="trtllm-1.x"), same)
    assert found["mean_e2el_ms_interval"] == found["mean_ttft_ms_interval"] and "mean_tpot_ms_interval" not in found


def test_the_factor_is_in_the_times_or_in_the_interval():
    evidence = run_of(server="trtllm-1.x").evidence
    corrected, plain = (evidence.interval("tpot", Load(), is_corrected) for is_corrected in (True, False))
    assert corrected.low * evidence.factor == pytest.approx(plain.low)
    assert corrected.high * evidence.factor == pytest.approx(plain.high)


def test_intervals_are_wider_where_nothing_near_was_measured():
    def width(**hardware):
        low, high = intervals(run_of(**hardware), SUMMARY)["mean_tpot_ms_interval"]
        return high / low

    known, unknown = width(server="trtllm-1.x", gpu="H100"), width(server="trtllm-1.x", gpu="L40S")
    assert unknown > known


def test_a_setting_turns_the_correction_off():
    settings = ["hardware.server=vllm-0.18", "hardware.correction=off"]
    assert not assemble(load_scenario(None, settings)[0]).deployment.is_corrected
    assert assemble(load_scenario(None, settings[:1])[0]).deployment.is_corrected


def test_a_server_without_points_is_not_corrected():
    run = run_of(server="vllm-0.9")
    assert run.evidence.factor == 1.0 and rests_on(run).startswith("none of this server")
    assert intervals(run, SUMMARY)


def test_a_comparison_is_of_times_with_their_factors(monkeypatch):
    """Two servers: what is published of one is its factor times longer, of which corrected passes have it already."""
    runs = [run_of(server=server) for server in ("trtllm-1.x", "vllm-0.18")]
    logs = [math.log(run.evidence.factor) for run in runs]
    plain = difference("tpot", runs[0], SUMMARY, runs[1], SUMMARY)
    monkeypatch.setattr(type(runs[0]), "is_corrected", property(lambda run: run.deployment.server.name == "trtllm-1.x"))
    first, second = (
        difference("tpot", runs[0], SUMMARY, runs[1], SUMMARY),
        difference("tpot", runs[1], SUMMARY, runs[0], SUMMARY),
    )
    assert abs(logs[0]) > 0.01
    assert first.mean == pytest.approx(plain.mean - logs[0]) == pytest.approx(-second.mean)
    assert first.half_width == plain.half_width == pytest.approx(second.half_width)
    assert difference("tpot", run_of(), SUMMARY, runs[0], SUMMARY) is None


def test_rounds_have_the_interval_of_their_batch():
    run = run_of(server="trtllm-1.x")
    few, many = (factors_of_rounds(run, rows) for rows in (32, 512))
    assert few == run.evidence.interval("tpot", Load(32.0), is_corrected=False)
    assert many.high / many.low > few.high / few.low
    assert factors_of_rounds(run_of(), 32) is None


def test_an_open_loop_has_no_interval_of_its_output_rate():
    run = run_of(server="trtllm-1.x")
    workload = run.scenario.workload.model_copy(update={"concurrency": None})
    opened = replace(run, scenario=run.scenario.model_copy(update={"workload": workload}))
    assert "output_throughput_interval" not in intervals(opened, SUMMARY)
