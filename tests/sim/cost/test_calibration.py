"""Profiles: the file is read as it was written, every problem of it is told, and its parameters do what they say."""

import json

import pytest
from foredraft.core.contract.step import PLAIN_ROUND, RoundShape
from foredraft.core.errors import ConfigError
from foredraft.core.model_shape import lookup_model
from foredraft.sim.assembly import assemble
from foredraft.sim.assembly.explaining import derived_rows, timing_line
from foredraft.sim.cost.calibration import (
    PARAMETERS,
    Calibration,
    FittedParameter,
    FittedParameters,
    MeasuredClients,
    load_calibration,
    profile_document,
)
from foredraft.sim.cost.draft import eagle3_head
from foredraft.sim.cost.executor_steps import Grid
from foredraft.sim.cost.hardware import lookup_gpu
from foredraft.sim.cost.host import LaunchCost
from foredraft.sim.cost.passes.decode_work import DecodeWork
from foredraft.sim.cost.round import RoundCost
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario_file import scenario_from_dict
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

LLAMA, H100 = lookup_model("llama-3.1-8b"), lookup_gpu("H100")


def fitted(server="foredraft", kernels="roofline", **values):
    items = {name: FittedParameter(value, 0.9 * value, 1.1 * value) for name, value in values.items()}
    return FittedParameters(server, kernels, items, MeasuredClients(1.0, 8.0, 64.0), 7, 0.02, 0.03, 0.2)


def calibration(parameters=None, **fields):
    given = {"name": "mine", "source": "my bench", "gpu": "H100", "model": "llama-3.1-8b"} | fields
    return Calibration(parameters=parameters, **given)


def written(tmp_path, what):
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(what if isinstance(what, dict) else profile_document(what)))
    return file


@given(st.lists(st.sampled_from(sorted(PARAMETERS)), unique=True), st.floats(0.01, 2))
def test_a_profile_is_read_as_it_was_written(tmp_path_factory, names, value):
    whole = calibration(fitted(**dict.fromkeys(names, value)), tp=(1, 2))
    read = load_calibration(written(tmp_path_factory.mktemp("profile"), whole))
    assert profile_document(read) == profile_document(whole)
    assert read.parameters == whole.parameters and read.tp == (1, 2)


DOCUMENT = profile_document(calibration(fitted(round_factor=1.1, round_slope=-0.1, front_end_ns=1e5)))


def changed(key, value):
    document = json.loads(json.dumps(DOCUMENT))
    *path, last = key.split(".")
    place = document
    for part in path:
        place = place[part]
    place[last] = value
    return document


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("version", 3, "format"),
        ("version", True, "format"),
        ("version", 1, "version"),
        ("format", "other", "format"),
        ("name", 4, "name"),
        ("gpu", "", "gpu"),
        ("tp", 1, "tp"),
        ("tp", [0], "tp"),
        ("tabels", {}, "tabels"),
        ("parameters", [], "parameters"),
        ("parameters.server", None, "parameters.server"),
        ("parameters.round_factor", 1.0, "parameters.round_factor"),
        ("parameters.round_factor.value", 1000.0, "parameters.round_factor.value"),
        ("parameters.round_slope.value", -3.0, "parameters.round_slope.value"),
        ("parameters.clients", 8, "parameters.clients"),
        ("parameters.clients.least", 9.0, "parameters.clients"),
        ("parameters.left_out_ttft_error", "none", "parameters.left_out_ttft_error"),
        ("parameters.front_end_ns.low", -1, "parameters.front_end_ns.low"),
        ("parameters.front_end_ns.high", True, "parameters.front_end_ns.high"),
        ("parameters.host_base_ns", {}, "parameters.host_base_ns"),
        ("parameters.values", {"round_factor": {"value": 9}}, "parameters"),
    ],
)
def test_every_problem_of_a_profile_names_its_key(tmp_path, key, value, problem):
    file = written(tmp_path, changed(key, value))
    with pytest.raises(ConfigError) as caught:
        load_calibration(file)
    assert caught.value.source == str(file)
    assert problem in [item.key for item in caught.value.problems]


def test_waits_of_a_former_profile_are_refused_in_one_line(tmp_path):
    document = DOCUMENT | {
        "version": 1,
        "parameters": {"device_scale": {"value": 1.1, "low": 1, "high": 2, "told": 0.5}},
    }
    with pytest.raises(ConfigError) as caught:
        load_calibration(written(tmp_path, document))
    assert [item.key for item in caught.value.problems] == ["version"]
    assert "run `foredraft calibrate --from` again" in str(caught.value)


def test_all_problems_are_told_at_once(tmp_path):
    document = changed("gpu", 3) | {"tp": "two", "draft_pass": {}}
    document["parameters"]["points"] = "many"
    with pytest.raises(ConfigError) as caught:
        load_calibration(written(tmp_path, document))
    assert {item.key for item in caught.value.problems} == {"gpu", "tp", "draft_pass", "parameters.points"}


@pytest.mark.parametrize("text", ["{", "[]", '{"format": NaN}'])
def test_files_that_are_no_profile(tmp_path, text):
    file = tmp_path / "profile.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"profile\.json"):
        load_calibration(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_calibration(tmp_path / "absent.json")


# -- what parameters do ------------------------------------------------------------------------------------------------


def cost(parameters=None):
    launch = LaunchCost("mine", 100_000.0, 5_000.0, 0.0, "test", 50_000.0, 70_000.0)
    whole = None if parameters is None else calibration(parameters)
    return RoundCost(LLAMA, H100, draft=eagle3_head(LLAMA), launch=launch, calibration=whole)


@pytest.mark.parametrize(("rows", "shape"), [(1, (0, 1, 1)), (8, (3, 1, 4)), (8, (3, 4, 16)), (600, (3, 1, 4))])
def test_factors_scale_whole_rounds(rows, shape):
    work = DecodeWork(rows, RoundShape(*shape), 5_000)
    before = cost().decode_ns(*work)
    assert cost(fitted(round_factor=1.0)).decode_ns(*work) == before
    assert cost(fitted(round_factor=1.25)).decode_ns(*work) == pytest.approx(1.25 * before, rel=1e-6)
    # With the number of requests, up to the most that were measured.
    sloped = cost(fitted(round_slope=0.1)).decode_ns(*work)
    assert sloped == pytest.approx(before * (min(rows, 64) / 8) ** 0.1, rel=1e-6)
    drafts = cost(fitted(round_factor=1.25, drafts_factor=1.2)).decode_ns(*work)
    assert drafts == pytest.approx((1.25 * 1.2 if shape[0] else 1.25) * before, rel=1e-6)


def test_prompts_have_their_own_factor_and_a_round_beside_them_its_own():
    chunks, work = [(512, 0), (100, 300)], DecodeWork(8, PLAIN_ROUND, 5_000)
    before, beside = cost().step_ns(chunks), cost().step_ns(chunks, work)
    slow = cost(fitted(prompt_factor=1.5, round_factor=2.0))
    assert slow.step_ns(chunks) == pytest.approx(1.5 * before, rel=1e-6)
    added = beside - cost().decode_ns(8, PLAIN_ROUND, 0)
    wanted = 1.5 * added + 2.0 * (beside - added)
    assert slow.step_ns(chunks, work) == pytest.approx(wanted, rel=0.02)


def test_the_host_has_the_pace_of_its_rounds_and_the_front_end_its_time():
    scenario = scenario_from_dict({"front_end": {"request_us": 500}}, "test")
    before, after = assemble(scenario), assemble(scenario, calibration(fitted(round_factor=2.0, front_end_ns=3e6)))
    assert after.host.round_ns(4, 8) == pytest.approx(2 * before.host.round_ns(4, 8), abs=10)
    assert after.deployment.front_end.request_ns == 3_500_000


def test_a_profile_changes_a_run_and_its_report_says_so(tmp_path):
    scenario = {"workload": {"concurrency": 2, "num_requests": 4, "prompt": {"value": 64}, "output": {"value": 32}}}
    whole = calibration(fitted(round_factor=2.0, prompt_factor=2.0))
    file = written(tmp_path, whole)
    plain = Simulation(scenario_from_dict(scenario, "test")).run()
    with_file = Simulation(scenario_from_dict(scenario | {"hardware": {"profile": str(file)}}, "test")).run()
    given = Simulation(scenario_from_dict(scenario, "test"), calibration=whole).run()
    assert with_file.duration_ns == given.duration_ns > 1.8 * plain.duration_ns
    assert "calibrated from 7 points (my bench)" in timing_line(with_file.assembly)
    assert "2.0% on average, points left out within 3.0%" in timing_line(with_file.assembly)
    assert any(name == "calibrated round_factor" for name, *_ in derived_rows(with_file.assembly))
    assert "calibrated" not in timing_line(plain.assembly)


def test_parameters_hold_for_their_server_gpu_and_kernels():
    scenario = scenario_from_dict({}, "test")
    for parameters, fields, key in (
        (fitted(server="sglang-0.5"), {}, "parameters.server: fitted around sglang-0.5.*hardware.server=sglang-0.5"),
        (fitted(kernels="measured"), {}, "parameters.kernels: fitted around measured"),
        (fitted(), {"gpu": "H200"}, "profile.gpu: measured for H200"),
    ):
        with pytest.raises(ConfigError, match=key):
            assemble(scenario, calibration(parameters, **fields))
    other = calibration(fitted(), model="other", tp=(2, 4))
    assert len(Simulation(scenario, calibration=other).notices) == 2 + len(Simulation(scenario).notices)


@pytest.mark.parametrize(
    "ns", [{}, [{}, 1], [10**400, 1], [1], [1, -1]], ids=["object", "inside", "huge", "few", "below 0"]
)
def test_times_of_a_grid_that_are_no_numbers_are_refused(ns):
    with pytest.raises(ValidationError, match="expected 2 rows numbers ≥ 0"):
        TypeAdapter(Grid).validate_json(json.dumps({"axes": {"rows": [1, 2]}, "ns": ns}))
