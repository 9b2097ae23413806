"""`foredraft calibrate --model` and `foredraft bench --twin`: from checkpoints to a profile, and to both sides of a
run. Messages name the parts that do not fit."""

import json
from dataclasses import replace
from functools import partial

import pytest
from foredraft.cli.decode.twin import _show
from foredraft.twin import run
from foredraft.twin.acceptance import AcceptLength
from foredraft.twin.comparison import ComparedNumber, Comparison

SCENARIO = """
name = "small"
[speculation]
algorithm = "EAGLE3"
policy = "fixed"
steps = 1
[engine]
max_running = 2
[workload]
rate = 200.0
num_requests = 6
prompt = {value = 6}
output = {value = 5}
"""


@pytest.fixture(scope="module")
def scenario(tmp_path_factory):
    path = tmp_path_factory.mktemp("scenario") / "small.toml"
    path.write_text(SCENARIO)
    return path


@pytest.mark.slow  # with every test from arms to comparisons: tests/twin/test_twin.py
def test_a_profile_is_measured_and_both_sides_are_printed(command, tmp_path, models, scenario, monkeypatch):
    few = partial(run.TwinPlan, calibration_requests_per_s=1.0)
    monkeypatch.setattr(run, "TwinPlan", few)
    monkeypatch.setattr("foredraft.gpu.measure.prompts.CORPUS_BYTES", 400_000)
    target, draft = models["target"], models["EAGLE3"]
    profile = tmp_path / "profile.json"
    size = ("--max-running", 2, "--context-len", 64, "--threads", 1, "--clock", "cpu", "-q")
    code, text, errors = command(
        "calibrate", "--model", target, "--draft", draft, "--steps", "1,2", "--repeat", 1, *size, "--out", profile
    )
    assert (code, errors) == (0, "")
    assert "EAGLE3 chain 2" in text and "served steps of chains: the profile says" in text
    steps = json.loads(profile.read_text())["steps"]
    assert steps["algorithms"]["EAGLE3"]["rounds"]["1"]["draft"]["axes"]["steps"] == [1, 2]
    assert not (tmp_path / "profile.json.partial").exists()

    more = ("--model", target, "--draft", draft, "--threads", 1, "--clock", "cpu", "--repeat", 1, "-q")
    code, text, errors = command("bench", "--twin", scenario, *more, "--profile", profile)
    assert (code, errors) == (0, "")
    for words in (
        "measured",
        "error of times",
        "error of forecast",
        "predicted  batch",
        "other prompts forecast (± 95 %",
    ):
        assert words in text
    assert "the mean of the only run" in text and "Times are processor time of one thread" in text
    as_json = command("bench", "--twin", scenario, *more, "--profile", profile, "--json")
    (one,) = json.loads(as_json.out)["comparisons"]
    assert one["requests"] == 6 and one["metrics"]["output_throughput"]["measured"] > 0

    steps["device"] = "another device"
    document = json.loads(profile.read_text()) | {"steps": steps}
    profile.write_text(json.dumps(document))
    code, _, errors = command("bench", "--twin", scenario, *more, "--profile", profile)
    assert code == 2 and "steps.device: measured on another device, but this device is" in errors


def test_a_busy_machine_measures_nothing(capsys):
    """Errors of a measurement that other work disturbed are none of the simulation."""
    metrics = {key: ComparedNumber(10.0, 2.31, 0.1, 0.1) for key in ("output_throughput", "mean_ttft_ms")}
    batch = (tuple(range(10)), tuple(range(10)))
    busy, quiet = (
        Comparison(
            f"{share:.0%} of a processor", "knee", 40, 2, metrics, {3: (1.0, 1.0)}, batch, share, paces=(1.0, 1.04)
        )
        for share in (0.3, 0.95)
    )
    _show([busy], "wall")
    text = capsys.readouterr().out
    assert "not measured" in text and "%  " not in text.partition("This process")[0].replace("30% of a processor", "")
    assert "+332.9%" not in text and "so 1 of 1 comparison counts as not measured" in text
    _show([busy, quiet], "wall")
    text = capsys.readouterr().out
    assert text.count("+332.9%") == 2 and text.count("not measured") == 2 and text.count("predicted  batch") == 1
    _show([busy], "cpu")
    assert capsys.readouterr().out.count("+332.9%") == 2


def test_what_is_sure_of_accept_lengths_and_of_ttft_is_printed(capsys):
    metrics = {"mean_ttft_ms": ComparedNumber(10.0, 8.0, 0.1, 0.1, 8.4)}
    batch = (tuple(range(10)), tuple(range(10)))
    lengths = {"measured": AcceptLength(2.5, 90, 0.1), "forecast": AcceptLength(2.4, 700, 0.072)}
    one = Comparison(
        "chain", "knee", 40, 3, metrics, {3: (1.0, 1.0)}, batch, 1.0, accept_lengths=lengths, ttft_per_load=4.2
    )
    _show([one, replace(one, arm="closed", ttft_per_load=None)], "cpu")
    text = capsys.readouterr().out
    assert "+5.0%" in text and "+25.0%" in text  # of times, of the forecast
    assert "2.50 ± 0.10 (4.0%) of 90 prompts measured, 2.40 ± 0.07 (3.0%) of 700 other prompts forecast" in text
    assert "TTFT for 1 % more load, simulated: chain +4.2 %." in text and text.count("closed +") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("bench", "--twin", "{scenario}", "--model", "{target}", "-q"),
            "--draft: EAGLE3 needs the directory of a draft checkpoint",
        ),
        (
            ("bench", "--twin", "--model", "{target}", "--loads", "knees"),
            "--loads: 'knees' is none of light, knee, saturated",
        ),
        (
            ("bench", "--twin", "--pair", "{scenario}"),
            "has no target, draft, eagle3; expected a directory made by `foredraft tiny`",
        ),
        (("bench", "--twin", "--draft", "{target}", "--pair", "x"), "--draft: needs --model"),
        (
            ("bench", "--twin", "{scenario}", "--loads", "knee"),
            "--loads: has no effect: the scenario has arrivals of its own",
        ),
        (("bench", "--twin", "{scenario}", "--seconds", 3), "--seconds: has no effect"),
        (("bench", "--twin", "{scenario}.missing"), "small.toml.missing"),  # before a pair is trained
        (("bench", "{scenario}", "--loads", "knee"), "SCENARIO: has no effect: without --twin"),
        (("bench", "--loads", "knee"), "--loads: has no effect: without --twin"),
        (("bench", "--twin", "--steps", "3"), "--steps: has no effect: --twin makes no use of it"),
        (("bench", "--estimate", "H100", "--repeat", "3"), "--repeat: has no effect: --estimate makes no use of it"),
        (("bench", "--estimate", "H100", "--twin"), "--twin: contradicts --estimate"),
        (("calibrate", "--model", "{target}", "--from", "x.json"), "--from: has no effect: --model makes no use of it"),
        (("calibrate", "--draft", "{target}"), "--draft: has no effect: without --model"),
        (
            ("calibrate", "--model", "{target}", "--steps", "3", "-q"),
            "--draft: is missing; without it nothing is drafted",
        ),
        (("calibrate", "--model", "{target}/none", "-q"), "no such directory"),
    ],
)
def test_what_does_not_fit_is_one_message(command, models, scenario, arguments, message):
    names = {"target": models["target"], "scenario": scenario}
    code, _, errors = command(*(str(argument).format(**names) for argument in arguments))
    assert code == 2 and message in errors
