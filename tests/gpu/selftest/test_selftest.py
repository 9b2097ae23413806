"""The self-test's steps on a CPU and on a GPU, and that a step which fails, hangs or dies stops none behind it."""

from __future__ import annotations

import json
import signal
from dataclasses import replace

import pytest
import torch
import worker_that_dies
from foredraft.checks import selftest
from foredraft.checks.selftest import catalogue
from foredraft.cli.app import app
from foredraft.core.errors import ConfigError, ForedraftError
from foredraft.gpu.models.heads.block import BlockHead
from foredraft.gpu.ops.host_ops import HostOps
from foredraft.gpu.selftest import sessions
from foredraft.gpu.selftest.machine import is_wanted
from foredraft.gpu.selftest.report import JSON, MARKDOWN, seconds_of
from foredraft.gpu.selftest.steps import (
    Context,
    SelftestStep,
    State,
    StepFinding,
    UnavailableHere,
    run_apart,
    run_here,
    run_step,
)
from typer.testing import CliRunner

FAST = {
    "machine: matrix products",
    "kernels: norms and gate",
    "kernels: products of stored numbers, FP8 in blocks of 128",
    "kernels: products of stored numbers, int4 in groups of 128",
    "kernels: products of stored numbers, NVFP4",
    "contracts: acceptance",
    "contracts: executor, every index checked",
    "contracts: executor, captured rounds",
    "sessions: bfloat16, STANDALONE tree, pages of 4",
    "sessions: bfloat16, EAGLE3 tree",
    *(f"sessions: bfloat16, {name}, all drafts in one pass" for name in ("DFLASH", "DFLASH2", "DSPARK", "P_EAGLE")),
    *(f"sessions: drafts are those of float64, {name}" for name in ("DFLASH", "DFLASH2", "DSPARK", "P_EAGLE")),
    "sessions: bfloat16, keys and values in 8 bits",
    "sessions: bfloat16, windows in rings",
    "sessions: bfloat16, recurrent states",
    "sessions: close() frees",
}


@pytest.fixture(scope="module")
def context(tmp_path_factory) -> Context:
    return Context("cpu", tmp_path_factory.mktemp("selftest"))


def steps_of(context: Context) -> dict[str, SelftestStep]:
    return {step.title: step for step in catalogue(context)}


@pytest.mark.fast("[km]*", "contracts: acceptance", "sessions*", ci="*")
@pytest.mark.parametrize("title", sorted(FAST))
def test_steps_pass_on_a_cpu(context, title):
    outcome = run_step(steps_of(context)[title])
    assert outcome.state is State.PASSED, outcome.traceback
    assert outcome.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_every_step_passes_on_a_gpu(tmp_path):
    report = selftest.selftest("cuda", tmp_path, "20m", print)
    assert report.ok and not report.counts.get(State.NOT_FINISHED), (tmp_path / MARKDOWN).read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_command_runs_to_its_end_on_a_cpu(tmp_path):
    result = CliRunner().invoke(app, ["selftest", "--device", "cpu", "--out", str(tmp_path), "--quiet"])
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / JSON).read_text(encoding="utf-8"))
    assert document["complete"] and set(document["counts"]) == {"passed", "not run"}
    assert {step["text"] for step in document["steps"] if step["state"] == "not run"} == {"needs a GPU"}


def test_a_wrong_token_is_found(context):
    reference = sessions.reference_of(context)
    session = sessions.session_of(context, sessions.WAYS["plain"])
    requests = sessions.requests_of(context)[:1]
    outputs = session.run(requests)
    reference.check(requests, outputs)
    tokens = outputs["0"].tokens
    wrong = replace(outputs["0"], tokens=(*tokens[:-1], (tokens[-1] + 1) % sessions.shape_of(context).vocab_size))
    with pytest.raises(AssertionError, match="below the greatest logit"):
        reference.check(requests, {"0": wrong})


def test_drafts_of_other_places_are_found(context, monkeypatch):
    choose = BlockHead.choose

    def a_place_late(head, hidden, roots):
        return choose(head, hidden.roll(1, 1) if hidden.dtype == torch.float32 else hidden, roots)

    monkeypatch.setattr(BlockHead, "choose", a_place_late)
    with pytest.raises(AssertionError, match="of 60 drafts are those of float64"):
        sessions.same_drafts(context, "DFLASH")


def test_a_broken_operation_is_found_by_the_contracts(context, monkeypatch):
    """The history stands in the report, with the command's seed and the number of the run."""
    gather = HostOps.gather_emitted

    def always_the_first_token(*arguments):
        emitted, bonus = gather(*arguments)
        return emitted.clamp(max=0), bonus

    monkeypatch.setattr(HostOps, "gather_emitted", staticmethod(always_the_first_token))
    outcome = run_step(steps_of(context)["contracts: executor, captured rounds"])
    assert outcome.state is State.FAILED and "ANSWER at collect" in outcome.text
    assert "seed 1, run" in outcome.traceback and "submit" in outcome.traceback


# -- the order of steps, whatever they do ------------------------------------------------------------------------------


def passes() -> StepFinding:
    return StepFinding("fine", ({"tokens/s": 7},))


def fails() -> StepFinding:
    raise ValueError("off by one")


def interrupted() -> StepFinding:
    raise KeyboardInterrupt


def needs_more() -> StepFinding:
    raise UnavailableHere("needs 2 GPUs, torch finds 1")


def steps(**named) -> list[SelftestStep]:
    return [SelftestStep("part", name, function) for name, function in named.items()]


def test_a_step_that_fails_stops_no_other_and_time_does():
    left = iter((9.0, 9.0, 0.0))
    outcomes = list(run_here(steps(bad=fails, good=passes, late=passes), lambda: next(left), lambda step: None))
    assert [outcome.state for outcome in outcomes] == ["failed", "passed", "not run"]
    assert outcomes[0].text == "ValueError: off by one" and "in fails" in outcomes[0].traceback


def test_a_step_for_which_the_machine_is_too_small_is_not_run_and_has_not_failed():
    outcome = run_step(SelftestStep("part", "name", needs_more))
    assert (outcome.state, outcome.text) == (State.NOT_RUN, "needs 2 GPUs, torch finds 1")


@pytest.mark.parametrize(
    ("found", "wanted", "holds"),
    [
        ("3.6.0", "triton==3.6.0", True),
        ("3.6.0+git1", "triton==3.6.0", True),
        ("3.7.1", "triton==3.6.0", False),
        ("3.8.2", "triton~=3.8.0", True),
        ("3.9.0", "triton~=3.8.0", False),
        ("3.7.9", "triton~=3.8.0", False),
        ("3.9.0", "triton>=3.5", True),
    ],
)
def test_the_triton_that_torch_asks_for_is_told_from_others(found, wanted, holds):
    assert is_wanted(found, wanted) == holds


@pytest.mark.parametrize(
    ("named", "code", "states"),
    [
        ({"good": passes, "bad": fails, "more": passes}, 1, ["passed", "failed", "passed"]),
        ({"good": passes, "stopped": interrupted, "more": passes}, 130, ["passed"]),
        ({"good": passes}, 0, ["passed"]),
    ],
)
def test_the_report_holds_what_ran(tmp_path, monkeypatch, named, code, states):
    monkeypatch.setattr("foredraft.checks.selftest.catalogue", lambda context: steps(**named))
    result = CliRunner().invoke(app, ["selftest", "--device", "cpu", "--out", str(tmp_path / "report"), "--quiet"])
    assert result.exit_code == code, result.output
    document = json.loads((tmp_path / "report" / JSON).read_text(encoding="utf-8"))
    assert [step["state"] for step in document["steps"]] == states
    assert document["interrupted"] == (code == 130) and document["complete"] == (code != 130)
    text = (tmp_path / "report" / MARKDOWN).read_text(encoding="utf-8")
    assert "| 7 |" in text and ("off by one" in text) == ("bad" in named)
    assert ("Begun and not ended: **part: stopped**" in text) == (code == 130)


@pytest.mark.ci
def test_a_process_that_dies_or_hangs_is_followed_by_another():
    """The worker's steps: pass (printing), fail, fail and spoil the device, die by a signal, hang, find
    no number, pass."""
    names = ("prints", "fails", "spoils", "dies", "hangs", "unreadable", "passes")
    asked = [SelftestStep("part", name, passes, limit_s=30.0 if name != "hangs" else 2.0) for name in names]
    begun: list[str] = []
    outcomes = list(run_apart(asked, worker_that_dies.serve, lambda: 60.0, lambda step: begun.append(step.name)))
    assert tuple(begun) == names
    assert [outcome.state for outcome in outcomes] == ["passed", *["failed"] * 5, "passed"]
    assert outcomes[0].rows == ({"process": 0},) and outcomes[-1].rows == ({"process": 5},)
    assert outcomes[2].text == "ValueError: off by one"
    assert outcomes[3].text == f"its process ended with code {-signal.SIGKILL}"
    assert "about to die" in outcomes[3].traceback and outcomes[4].text == "stopped after 2 s"
    assert "not JSON compliant" in outcomes[5].text


@pytest.mark.ci
def test_a_process_that_ends_before_its_first_step_fails_that_step():
    (outcome,) = run_apart(steps(first=passes), worker_that_dies.ends, lambda: 60.0, lambda step: None)
    assert (outcome.state, outcome.text) == ("failed", "its process ended with code 0")


def test_the_budget_cuts_a_step_off_and_that_is_no_failure():
    (outcome,) = run_apart(steps(slow=passes), worker_that_dies.sleep, lambda: 0.2, lambda step: None)
    assert outcome.state is State.NOT_FINISHED


def test_what_cannot_be_is_refused(tmp_path):
    for budget in ("10", "0m", "soon"):
        with pytest.raises(ConfigError, match="budget"):
            seconds_of(budget)
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ForedraftError, match="file: cannot be written"):
        selftest.selftest("cpu", tmp_path / "file", "1m", print)
