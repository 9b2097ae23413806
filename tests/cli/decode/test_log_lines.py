"""`--log-level` and `--log-format` of simulate and generate, in one process and in several."""

from __future__ import annotations

import json

import pytest
from foredraft.observe.engine_lines import stop_logging

BUSY = ("simulate", "--quiet", "--set", "workload.num_requests=60", "--set", "workload.rate=60")


@pytest.fixture(autouse=True)
def _silence():
    yield
    stop_logging()


def test_lines_of_a_simulation_go_to_standard_error(command):
    quiet = command(*BUSY)
    text = command(*BUSY, "--log-level", "info")
    as_json = command(*BUSY, "--log-level", "info", "--log-format", "json")
    assert quiet.err == "" and quiet.out == text.out == as_json.out
    lines = [json.loads(line) for line in as_json.err.splitlines()]
    assert [f"{line['level'].upper()} {line['message']}" for line in lines] == text.err.splitlines()
    assert sum(line["event"] == "steps" for line in lines) > 1
    assert command(*BUSY, "--log-level", "warning").err == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--log-level", "inof"], "--log-level: 'inof' is none of debug, info, warning, error (did you mean 'info'?)"),
        (["--log-level", "info", "--log-format", "xml"], "--log-format: 'xml' is none of text, json"),
        (["--log-format", "json"], "--log-format: has no effect: without --log-level"),
        (["--log-level", "info", "--explain"], "--log-level: has no effect: --explain runs nothing"),
    ],
)
def test_what_makes_no_sense_is_refused(command, options, words):
    outcome = command(*BUSY, *options)
    assert outcome.code == 2 and words in outcome.err


@pytest.mark.fast("alone")
@pytest.mark.parametrize("more", [(), ("--disaggregate", "prefill=1,decode=1")], ids=["alone", "disaggregated"])
def test_lines_and_statistics_of_decoding(command, models, tmp_path, more):
    """The same lines and the same statistics, whichever processes decode."""
    table = tmp_path / "table.json"
    table.write_text('{"1": {"candidate_steps": [1, 2], "warmup_batches": 0, "update_interval": 1}}')
    line = (
        "generate",
        "--model",
        models["target"],
        "--draft",
        models["EAGLE3"],
        "--adaptive",
        table,
        "--dtype",
        "float64",
    )
    line += ("--device", "cpu", "--prompt", "def add", "--max-tokens", 60, "--stats", "--out", tmp_path / "run")
    outcome = command(*line, "--log-level", "info", "--log-format", "json", *more)
    assert outcome.code == 0, outcome.err
    told = [json.loads(text) for text in outcome.err.splitlines() if text.startswith("{")]
    engine = "decode0" if more else "engine"
    steps = [entry for entry in told if entry["event"] == "steps"]
    assert {entry["engine"] for entry in steps} <= {engine}
    assert {entry["engine"] for entry in told if entry["event"] == "start"} >= {engine}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert len(steps) == summary["switches"] >= 1
    assert len(summary["ema_accept_len_from_1"]) == 1 and summary["ema_accept_len_from_1"][0] >= 0
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert summary[f"median_{name}_ms"] > 0
    for words in ("1 request: ", "accept length", "medians: TTFT", "EMA of correct drafts by batch size: ", "host "):
        assert words in outcome.err
