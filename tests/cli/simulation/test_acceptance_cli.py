"""`foredraft calibrate --acceptance`: what a simulation was given is found again in its events, and means say what
they cannot tell."""

from __future__ import annotations

import json
import tomllib

import numpy as np
import pytest
from foredraft.observe.log import LogError
from foredraft.sim.workload.acceptance.means import read_acceptance

SERVICE = (
    "workload.num_requests=150 workload.output.kind=fixed workload.output.value=150 workload.prompt.value=32 "
    "speculation.policy=fixed speculation.steps=3 acceptance.conditional=[0.8,0.7,0.6] "
    "acceptance.request_share=0.12 acceptance.field_share=0.3 acceptance.correlation_len=16"
)


def settings(text: str) -> list[str]:
    return [word for pair in text.split() for word in ("--set", pair)]


@pytest.mark.ci
def test_a_simulation_is_found_again(command, tmp_path):
    """Probabilities within 0.02, shares within 0.06, the length of correlation within a factor of 2:
    9,000 rounds of 150 requests."""
    quiet = ("--quiet", "--no-perfetto", "--out", tmp_path / "run")
    assert command("simulate", *settings(SERVICE), *quiet).code == 0
    code, out, errors = command("calibrate", "--acceptance", tmp_path / "run", "--out", tmp_path / "acceptance.toml")
    assert (code, errors) == (0, "")
    assert "Foredraft's events" in out and "150 requests, 3 draft steps" in out and "unknown" not in out
    text = (tmp_path / "acceptance.toml").read_text()
    assert text in out
    found = tomllib.loads(text)["acceptance"]
    assert found["conditional"] == pytest.approx([0.8, 0.7, 0.6], abs=0.02)
    assert found["request_share"] == pytest.approx(0.12, abs=0.06)
    assert found["field_share"] == pytest.approx(0.3, abs=0.06)
    assert found["correlation_len"] in (8, 16, 32)

    # The table is a scenario, whose rounds are as long as those recorded; the means of 150 requests scatter by 1.6 %.
    rest = settings(SERVICE.partition(" acceptance.")[0])
    again = ("--quiet", "--no-perfetto", "--no-events", "--out", tmp_path / "again")
    assert command("simulate", tmp_path / "acceptance.toml", *rest, *again).code == 0
    first, second = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "again"))
    assert second["accept_length"] == pytest.approx(first["accept_length"], rel=0.03)


@pytest.mark.fast("hardware.replicas=2", ci="*")
@pytest.mark.parametrize(
    "more", ["hardware.replicas=2", "engine.kv_slots=1200", "engine.kv_slots=1200 engine.mode=synchronous"]
)
def test_every_round_that_counted_is_read(command, tmp_path, more):
    """Rounds in flight of requests that have ended, or were retracted, are not read:
    the histogram is that of the summary."""
    some = f"workload.num_requests=40 workload.rate=80 speculation.policy=fixed speculation.steps=3 workload.output.high=400 {more}"
    assert command("simulate", *settings(some), "--quiet", "--no-perfetto", "--out", tmp_path).code == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert bool(summary["retractions"]) == ("kv_slots" in more)
    correct = read_acceptance([str(tmp_path)]).rounds[3]
    assert np.bincount(correct).tolist() == summary["correct_drafts_histogram"]

    # Of a run that was killed the rounds so far are read, where that is asked for.
    log = tmp_path / "events.jsonl"
    log.write_text(log.read_text()[:-200])
    with pytest.raises(LogError, match="breaks off"):
        read_acceptance([str(log)])
    assert 0 < len(correct) - read_acceptance([str(log)], allow_truncated=True).rounds.shape[1] < 100


def test_means_say_what_they_cannot_tell(command, tmp_path):
    (tmp_path / "means.csv").write_text("steps,accept_length\n1,1.65\n3,2.24\n7,2.59\n")
    code, out, errors = command("calibrate", "--acceptance", tmp_path / "means.csv", "--preset", "code")
    assert (code, errors) == (0, "")
    assert out.count("as in preset eagle-llama-code") == 6
    assert "request_share = 0.0800\nfield_share = 0.4300\ncorrelation_len = 8\n" in out


def test_inferred_steps_are_printed(command, tmp_path):
    """In the report, in the table of the scenario, and as JSON."""
    text = "".join(f"Decode batch. accept len: {a}, accept rate: {b}\n" for a, b in ((2.17, 0.54), (1.57, 0.39)))
    (tmp_path / "server.log").write_text(text)
    words = "3 draft steps: all of 2 lines fit accept rate = tokens / (rounds × (steps + 1)), SGLang 0.5.4 to 0.5.10"
    code, out, errors = command("calibrate", "--acceptance", tmp_path / "server.log")
    assert (code, errors) == (0, "") and f"inferred  {words}\n" in out and f"# inferred: {words}\n" in out
    assert json.loads(command("calibrate", "--acceptance", tmp_path / "server.log", "--json").out)["inferred"] == [
        words
    ]


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        ("hello\n", (), "unknown format"),
        ("steps,accept_length\n3,9\n", (), "line 2: accept_length 9"),
        ("steps,accept_length\n3,2\n", ("--preset", "chta"), "did you mean 'chat'"),
        ("steps,accept_length\n3,2\n", ("--steps", "3"), "leave --steps out"),
        ('{"t":"header","schema":1}\n', (), "breaks off"),
    ],
)
def test_bad_input_is_one_message(refused, tmp_path, text, arguments, expected):
    (tmp_path / "input").write_text(text)
    assert expected in refused("calibrate", "--acceptance", tmp_path / "input", *arguments)
