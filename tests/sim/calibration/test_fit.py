"""Calibration: a known timing is simulated, written as benchmarks write it, and found again;
what the points cannot tell is said."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, replace
from functools import cache

import numpy as np
import pytest
from benchmark_files import aiperf, guidellm, sglang, table, vllm
from foredraft.core.errors import ConfigError
from foredraft.sim.assembly.explaining import timing_line
from foredraft.sim.calibration.fit import LENGTH_SPREAD, as_its_clients_send, calibrate
from foredraft.sim.calibration.points import BenchmarkPoint
from foredraft.sim.calibration.prediction import CannotPredict, Predictor, measured_scenario
from foredraft.sim.calibration.result import CalibrateResult
from foredraft.sim.calibration.result_files import read_points
from foredraft.sim.cost.calibration import Calibration, MeasuredClients, load_calibration, read_profile
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario_file import load_scenario

pytestmark = pytest.mark.xdist_group("fit")  # one worker makes the fit that most tests share

SETTINGS = ("hardware.server=sglang-0.5", "hardware.gpu=H200", "engine.mode=synchronous", "engine.max_running=64")
BASE = load_scenario(None, SETTINGS)[0]
LOADS = [
    {"concurrency": clients, "input_tokens": 64.0, "output_tokens": 16.0, **draft}
    for draft in (
        {},
        {"algorithm": "EAGLE3", "steps": 3, "accept_length": 2.5},
        {"algorithm": "EAGLE3", "steps": 5, "accept_length": 3.0},
    )
    for clients in ((1, 8, 64) if not draft else (1, 16))
]
TRUTH = {
    "round_factor": 1.25,
    "round_slope": 0.08,
    "drafts_factor": 1.15,
    "drafts_slope": 0.0,
    "prompt_factor": 1.4,
    "front_end_ns": 4e6,
}
CLIENTS = MeasuredClients(1.0, (1 * 8 * 64 * 16**2) ** (1 / 7), 64.0)
"""Of LOADS."""


def exact(truth: Mapping[str, float]) -> tuple[dict[str, float], ...]:
    """Return what a server of this timing would measure."""
    return _exact(tuple(truth.items()))


@cache
def _exact(truth: tuple[tuple[str, float], ...]) -> tuple[dict[str, float], ...]:
    runs = []
    for load in LOADS:
        point = BenchmarkPoint("truth", mean_tpot_ms=1.0, num_draft_tokens=load.get("steps", 0) + 1, **load)
        runs.append(load | Predictor(point, BASE, clients=CLIENTS).predict(dict(truth)))
    return tuple(runs)


def noisy(seed: int, noise: float = 0.01, truth: Mapping[str, float] = TRUTH) -> list[dict[str, float]]:
    """Return those results with the noise of a benchmark."""
    draws = np.random.default_rng(seed)
    runs = []
    for run in exact(truth):
        factor, first = np.exp(noise * draws.standard_normal(2))
        changes = {"mean_tpot_ms": factor, "output_tokens_per_s": 1 / factor, "mean_ttft_ms": first}
        runs.append(run | {name: run[name] * change for name, change in changes.items()})
    return runs


def written(folder, runs) -> str:
    file = folder / "runs.csv"
    file.write_text(table(runs))
    return str(file)


def fitted(tmp_path, runs) -> CalibrateResult:
    return calibrate(read_points([written(tmp_path, runs)]), BASE)


def profile(fit) -> Calibration:
    return read_profile(fit.profile, "fit")


@pytest.fixture(scope="module")
def fit(tmp_path_factory) -> CalibrateResult:
    """A calibration from noisy points of TRUTH."""
    return fitted(tmp_path_factory.mktemp("runs"), noisy(1))


def holds(fit: CalibrateResult, truth=TRUTH) -> list[bool]:
    values = profile(fit).parameters.values
    return [item.low <= truth[name] <= item.high for name, item in values.items()]


def test_a_known_timing_is_found(fit):
    parameters = profile(fit).parameters
    assert astuple(parameters.clients) == pytest.approx(astuple(CLIENTS))
    for name, truth in TRUTH.items():
        found = parameters.values[name]
        assert found.low <= truth <= found.high and found.low <= found.value <= found.high, name
    assert parameters.error < 0.04 and parameters.left_out_error < 0.08 and parameters.left_out_ttft_error < 0.15
    assert not any(item.contradicts for item in fit.results)


@pytest.mark.slow
def test_a_slow_host_is_met_from_three_points(tmp_path):
    """Nothing forbids a machine that takes 1.3 times as long for one request and six times for many."""
    truth = {"round_factor": 2.4, "round_slope": 0.33, "drafts_factor": 1.1, "prompt_factor": 1.5}
    runs = exact(truth)
    fit, first = fitted(tmp_path, [runs[0], runs[2], runs[4]]), read_points([str(tmp_path / "runs.csv")])[0]
    parameters = profile(fit).parameters
    values = {name: item.value for name, item in parameters.values.items()}
    for run in (runs[1], runs[3], runs[5]):
        point = replace(first, **{name: run[name] for name in run if name in LOADS[3]})
        draft = {"num_draft_tokens": 1 + run["steps"]} if "steps" in run else {"algorithm": "NONE", "steps": 0}
        found = Predictor(replace(point, **draft), BASE, clients=parameters.clients).predict(values)
        assert found["mean_tpot_ms"] == pytest.approx(run["mean_tpot_ms"], rel=0.2)


def test_files_of_several_tools_are_points_of_one_fit(tmp_path):
    plain, spec = noisy(3)[:3], noisy(3)[3:]
    (tmp_path / "guide.json").write_text(guidellm(plain[:2]))
    (tmp_path / "perf.json").write_text(aiperf(plain[2]))
    (tmp_path / "spec.jsonl").write_text("\n".join(map(sglang, spec[:2])))
    (tmp_path / "spec.json").write_text("\n".join(map(vllm, spec[2:])))
    points = read_points([str(tmp_path / name) for name in ("guide.json", "perf.json", "spec.jsonl", "spec.json")])
    assert measured_scenario(points, BASE, ()).model.target == "meta-llama/Llama-3.1-8B-Instruct"
    read = {(point.algorithm, point.steps, point.concurrency): point.mean_tpot_ms for point in points}
    wanted = {
        (run.get("algorithm", "NONE"), run.get("steps", 0), run["concurrency"]): run["mean_tpot_ms"] for run in noisy(3)
    }
    assert read == wanted


@pytest.mark.ci
def test_the_profile_makes_the_simulator_meet_the_points(fit, tmp_path):
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(fit.profile))
    assert load_calibration(file) == profile(fit)
    predictor = Predictor(read_points([written(tmp_path, noisy(1))])[0], BASE)
    scenario = predictor.scenario.model_copy(
        update={"hardware": predictor.scenario.hardware.model_copy(update={"profile": str(file)})}
    )
    report = Simulation(scenario).run()
    assert "calibrated from 7 points (runs.csv)" in timing_line(report.assembly)
    values = {name: item.value for name, item in profile(fit).parameters.values.items()}
    assert Simulation(predictor.scenario, calibration=profile(fit)).run().duration_ns == report.duration_ns
    assert predictor.predict(values)["mean_tpot_ms"] == pytest.approx(fit.results[0].fitted, rel=0.2)


@pytest.mark.parametrize("share", [0.0, LENGTH_SPREAD])
def test_clients_that_keep_no_step_are_known_by_their_times_to_the_first_token(share):
    """The same load with lengths of one size and with a spread:
    the point has means alone, and the load is taken that was measured."""
    std = share / 3**0.5
    point = BenchmarkPoint("run", 1024.0, 48.0, concurrency=16, mean_tpot_ms=1.0)
    run = Predictor(replace(point, input_std=std * 1024, output_std=std * 48), BASE).predict(TRUTH)
    measured = replace(point, mean_tpot_ms=run["mean_tpot_ms"], mean_ttft_ms=run["mean_ttft_ms"])
    found = as_its_clients_send(Predictor(measured, BASE), BASE)
    assert (found.point.output_std > 0) == (share > 0)
    # What a file tells is left as it is.
    for told in (
        replace(measured, output_std=1.0),
        replace(measured, mean_ttft_ms=None),
        replace(measured, concurrency=1),
    ):
        assert as_its_clients_send(Predictor(told, BASE), BASE).point is told


def test_too_few_points_say_how_many_more_and_which(tmp_path):
    with pytest.raises(ConfigError, match=r"2 points: at least 1 more needed; three buy most: plain decoding at one"):
        fitted(tmp_path, noisy(6)[2:4])


def test_the_run_of_which_the_points_tell_least_is_next(fit, tmp_path):
    assert fit.next_run == "EAGLE3 3 steps, 64 clients"
    plain = fitted(tmp_path, [run for run in noisy(5)[:3] for run in (run, run | {"input_tokens": 80.0})][:4])
    assert plain.next_run == "plain, 64 clients"  # which the points with 1 and 8 tell least of
    assert {"drafts_factor", "drafts_slope"}.isdisjoint(profile(plain).parameters.values)


@pytest.mark.slow
def test_a_point_that_contradicts_the_others_is_named(tmp_path):
    runs = noisy(7)
    for name, factor in (("mean_tpot_ms", 1.5), ("output_tokens_per_s", 1 / 1.5)):
        runs[1][name] *= factor
    fit = fitted(tmp_path, runs)
    assert {item.source.rpartition(" ")[2] for item in fit.results if item.contradicts} == {"3"}  # its line of the file


@pytest.mark.slow
def test_left_out_errors_are_those_of_fits_without_the_point(tmp_path):
    runs = noisy(8, 0.03)
    fit = fitted(tmp_path, runs)
    without = fitted(tmp_path, runs[:1] + runs[2:])
    values = {name: item.value for name, item in profile(without).parameters.values.items()}
    left = next(item for item in fit.results if "plain, 8 clients" in item.point and item.name == "mean_tpot_ms")
    point = read_points([written(tmp_path, runs)])[1]
    again = Predictor(point, BASE, clients=profile(without).parameters.clients).predict(values)["mean_tpot_ms"]
    assert left.left_out_error == pytest.approx(again / left.measured - 1, abs=0.05)


PHYSICS = r"cannot be: expected at (least|most) .*llama-3.1-8b.*4,800 GB/s.*fewer bits.*another GPU.*more devices"


@pytest.mark.parametrize(
    ("result", "draft"),
    [
        ({"mean_tpot_ms": 2.5}, {}),
        ({"output_tokens_per_s": 450.0}, {}),
        ({"mean_tpot_ms": 9.0, "mean_ttft_ms": 2.5}, {}),
        ({"mean_tpot_ms": 1.0}, {"algorithm": "EAGLE3", "steps": 3, "accept_length": 2.5}),
    ],
)
def test_what_is_faster_than_reading_the_weights_is_refused(result, draft):
    """The 8B model's 15.0 GB, of which the input embeddings are not read, take 3.13 ms at the 4.8 TB/s of an H200."""
    point = BenchmarkPoint(
        "a.json",
        64.0,
        16.0,
        concurrency=1,
        file="a.json",
        **draft,
        num_draft_tokens=draft.get("steps", 0) + 1,
        **result,
    )
    column = list(result)[-1]
    with pytest.raises(ConfigError, match=rf"a\.json: {column}: [\d.]+ {PHYSICS}"):
        calibrate([point], BASE)
    # Of the same results of two devices, or of 8-bit weights, each pass reads half as much.
    Predictor(replace(point, tensor_parallel=2), BASE).refuse_unphysical()
    Predictor(point, load_scenario(None, [*SETTINGS, "model.weight_dtype=fp8"])[0]).refuse_unphysical()


def test_only_the_experts_of_one_token_must_be_read():
    base = load_scenario(None, [*SETTINGS, "model.target=qwen3-30b-a3b"])[0]
    predictor = Predictor(BenchmarkPoint("a.json", 64.0, 16.0, concurrency=1, mean_tpot_ms=2.0), base)
    predictor.refuse_unphysical()
    assert predictor.reading_ms < 0.2 * predictor.cost.target.weight_bytes / 4800e9 * 1e3


@pytest.mark.parametrize(("factor", "shown"), [(0.75, r"0\.7\d*"), (6.0, r"[56]\.\d+")])
def test_factors_that_no_deployment_has_are_refused(factor, shown):
    """Points of large batches alone take longer than reading the weights, and yet the fit needs impossible kernels."""
    base = load_scenario(None, [*SETTINGS, "hardware.gpu=L40S"])[0]
    points = []
    for clients in (40, 52, 64):
        point = BenchmarkPoint(f"{clients}.json", 64.0, 16.0, concurrency=clients, mean_tpot_ms=1.0, file="a.json")
        found = Predictor(point, base).predict({"round_factor": factor, "prompt_factor": factor})
        points.append(replace(point, mean_tpot_ms=found["mean_tpot_ms"]))
    with pytest.raises(
        ConfigError, match=rf"json: round_factor: {shown}: .*expected 0.8 to 3: .*bits.*another GPU.*more devices"
    ):
        calibrate(points, base)


def test_points_that_cannot_be_simulated_are_named(tmp_path):
    runs = [run | {"tensor_parallel": 3} for run in noisy(9)]
    with pytest.raises(CannotPredict, match=r"line 2 \(plain, 1 client.*tensor parallelism 3"):
        fitted(tmp_path, runs)


def test_the_model_and_the_gpu_of_the_files_are_used_and_must_agree_with_what_was_given(tmp_path):
    point = BenchmarkPoint("p", 1.0, 1.0, concurrency=1, model="meta-llama/Llama-3.1-70B-Instruct", gpu="H100")
    scenario = measured_scenario([point], BASE, ())
    assert (scenario.model.target, scenario.hardware.gpu) == ("meta-llama/Llama-3.1-70B-Instruct", "H100")
    with pytest.raises(ConfigError, match=r"gpu: H100 was measured, but hardware.gpu is H200"):
        measured_scenario([point], BASE, {"hardware.gpu"})
    unknown = replace(point, model="me/my-model", gpu=None)
    with pytest.raises(ConfigError, match=r"'me/my-model' is not in the catalogue.*--set model.target"):
        measured_scenario([unknown], BASE, ())
    assert measured_scenario([unknown], BASE, {"model.target"}) is BASE
