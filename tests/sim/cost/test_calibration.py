"""Profiles: the file is read as it was written, every problem of it is told, and its parameters do what they say."""

import json
from dataclasses import replace

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
    host_total_ns,
    load_calibration,
    profile_document,
    with_host_total,
)
from foredraft.sim.cost.draft import eagle3_head
from foredraft.sim.cost.hardware import lookup_gpu
from foredraft.sim.cost.host import HOST_PRESETS, LaunchCost
from foredraft.sim.cost.passes.decode_work import DecodeWork
from foredraft.sim.cost.round import RoundCost
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario_file import scenario_from_dict
from hypothesis import given
from hypothesis import strategies as st

LLAMA, H100 = lookup_model("llama-3.1-8b"), lookup_gpu("H100")


def fitted(server="foredraft", kernels="roofline", **values):
    items = {name: FittedParameter(value, 0.9 * value, 1.1 * value, 0.8) for name, value in values.items()}
    return FittedParameters(server, kernels, items, 7, 0.02, 0.03)


def calibration(parameters=None, **fields):
    given = {"name": "mine", "source": "my bench", "gpu": "H100", "model": "llama-3.1-8b"} | fields
    return Calibration(parameters=parameters, **given)


def written(tmp_path, what):
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(what if isinstance(what, dict) else profile_document(what)))
    return file


@given(st.lists(st.sampled_from(sorted(PARAMETERS)), unique=True), st.floats(0.01, 100))
def test_a_profile_is_read_as_it_was_written(tmp_path_factory, names, value):
    whole = calibration(fitted(**dict.fromkeys(names, value)), tp=(1, 2))
    read = load_calibration(written(tmp_path_factory.mktemp("profile"), whole))
    assert profile_document(read) == profile_document(whole)
    assert read.parameters == whole.parameters and read.tp == (1, 2)


DOCUMENT = profile_document(calibration(fitted(device_scale=1.1, host_base_ns=1e5)))


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
        ("version", 2, "format"),
        ("format", "other", "format"),
        ("name", 4, "name"),
        ("gpu", "", "gpu"),
        ("tp", 1, "tp"),
        ("tp", [0], "tp"),
        ("tabels", {}, "tabels"),
        ("parameters", [], "parameters"),
        ("parameters.server", None, "parameters.server"),
        ("parameters.device_scale", 1.0, "parameters.device_scale.value"),
        ("parameters.device_scale.value", 1000.0, "parameters.device_scale.value"),
        ("parameters.host_base_ns.low", -1, "parameters.host_base_ns.low"),
        ("parameters.host_base_ns.high", True, "parameters.host_base_ns.high"),
        ("parameters.host_bass_ns", {}, "parameters.host_bass_ns"),
    ],
)
def test_every_problem_of_a_profile_names_its_key(tmp_path, key, value, problem):
    file = written(tmp_path, changed(key, value))
    with pytest.raises(ConfigError) as caught:
        load_calibration(file)
    assert caught.value.source == str(file)
    assert problem in [item.key for item in caught.value.problems]


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


def cost(parameters=None, steps=3, launch=None):
    launch = launch or LaunchCost("mine", 100_000.0, 5_000.0, 0.0, "test", 50_000.0, 70_000.0)
    whole = None if parameters is None else calibration(parameters)
    launch = launch if parameters is None else parameters.launch(launch)
    return RoundCost(LLAMA, H100, draft=eagle3_head(LLAMA), launch=launch, calibration=whole)


@pytest.mark.parametrize(("rows", "shape"), [(1, (0, 1, 1)), (8, (3, 1, 4)), (8, (3, 4, 16)), (600, (3, 1, 4))])
def test_the_device_factor_scales_kernels_and_not_the_launch(rows, shape):
    work = DecodeWork(rows, RoundShape(*shape), 5_000)
    kernels = cost(fitted(graph_gap_ns=0.0, draft_step_ns=0.0, tree_ns=0.0)).decode_ns(*work)
    launches = cost().decode_ns(*work) - kernels
    slow = cost(fitted(device_scale=1.25)).decode_ns(*work)
    if rows < 512:  # beyond the largest graph passes are at least as long as their dispatch
        assert slow == pytest.approx(1.25 * kernels + launches, abs=5)
    assert cost(fitted(device_scale=1.0)).decode_ns(*work) == cost().decode_ns(*work)
    chunks = [(512, 0), (100, 300)]
    free = fitted(graph_gap_ns=0.0, draft_step_ns=0.0, tree_ns=0.0)
    ratio = cost(replace(free, values=free.values | fitted(device_scale=1.25).values)).step_ns(chunks) / cost(
        free
    ).step_ns(chunks)
    assert ratio == pytest.approx(1.25, rel=1e-3)


def test_launch_parameters_are_added_where_they_say():
    times = {"graph_gap_ns": 150_000.0, "row_gap_ns": 7_000.0, "draft_step_ns": 80_000.0, "tree_ns": 100_000.0}
    before, after = cost(), cost(fitted(**times))
    differences = {
        (rows, shape): after.decode_ns(rows, shape, 100) - before.decode_ns(rows, shape, 100)
        for rows, shape in ((1, PLAIN_ROUND), (2, PLAIN_ROUND), (1, RoundShape.chain(3)), (1, RoundShape(3, 4, 16)))
    }
    # A plain round is one captured pass, a speculative one two, of which the target's alone waits for every row.
    chain = 2 * 50_000 + 7_000 + 3 * 30_000
    assert list(differences.values()) == [50_000 + 7_000, 50_000 + 2 * 7_000, chain, chain + 30_000]


@pytest.mark.parametrize("host", HOST_PRESETS.values(), ids=HOST_PRESETS)
@given(base=st.integers(0, 5_000_000), row=st.integers(0, 100_000))
def test_host_times_keep_their_division(host, base, row):
    found = fitted(host_base_ns=float(base), host_row_ns=float(row)).host(host)
    assert host_total_ns(found, "base") == pytest.approx(base, abs=2)
    assert host_total_ns(found, "row") == pytest.approx(row, abs=2)
    assert with_host_total(host, "base", host_total_ns(host, "base")) == host


def test_a_profile_changes_a_run_and_its_report_says_so(tmp_path):
    scenario = {"workload": {"concurrency": 2, "num_requests": 4, "prompt": {"value": 64}, "output": {"value": 32}}}
    whole = calibration(fitted(device_scale=2.0, host_base_ns=0.0, host_row_ns=0.0))
    file = written(tmp_path, whole)
    plain = Simulation(scenario_from_dict(scenario, "test")).run()
    with_file = Simulation(scenario_from_dict(scenario | {"hardware": {"profile": str(file)}}, "test")).run()
    given = Simulation(scenario_from_dict(scenario, "test"), calibration=whole).run()
    assert with_file.duration_ns == given.duration_ns > 1.8 * plain.duration_ns
    assert "calibrated from 7 points (my bench)" in timing_line(with_file.assembly)
    assert "2.0% on average, points left out within 3.0%" in timing_line(with_file.assembly)
    assert any(name == "calibrated device_scale" for name, *_ in derived_rows(with_file.assembly))
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
