"""`foredraft calibrate`: from files of benchmarks to a profile that a scenario takes, and one message for
what cannot be used."""

from __future__ import annotations

import json

import pytest
from benchmark_files import sglang, table

RUNS = [
    {
        "concurrency": clients, "input_tokens": 64.0, "output_tokens": 16.0, "mean_tpot_ms": tpot, "mean_ttft_ms": 30.0,
        "output_tokens_per_s": clients * 16e3 / (30 + 15 * tpot),
    }
    for clients, tpot in ((1, 6.0), (4, 6.3), (8, 6.8))
]  # fmt: skip
HARDWARE = ("--set", "hardware.server=sglang-0.5", "--set", "hardware.gpu=H200", "--set", "engine.mode=synchronous")


def test_a_profile_is_fitted_printed_written_and_taken(command, tmp_path):
    (tmp_path / "runs.jsonl").write_text("\n".join(map(sglang, RUNS[:2])))
    (tmp_path / "more.csv").write_text(table(RUNS[2:]))
    out = tmp_path / "mine.json"
    code, text, errors = command(
        "calibrate", "--from", tmp_path / "runs.jsonl", tmp_path / "more.csv", *HARDWARE, "--out", out, "-q"
    )
    assert (code, errors) == (0, "")
    assert "3 points, fitted around sglang-0.5 over the roofline: llama-3.1-8b on H200" in text
    assert "plain, 8 clients, 64 → 16 tokens" in text and "mean absolute error, decoding" in text
    assert f"Written to {out}" in text and 'server = "sglang-0.5"' in text
    profile = json.loads(out.read_text())
    assert (profile["name"], profile["source"]) == ("mine", "runs.jsonl, more.csv")
    assert profile["parameters"]["points"] == 3

    (tmp_path / "hardware.toml").write_text(text[text.index("[hardware]") :])
    few = ("--set", "workload.num_requests=3", "--set", "engine.mode=synchronous", "--quiet")
    code, text, _ = command("simulate", tmp_path / "hardware.toml", *few)
    assert code == 0
    assert "calibrated from 3 points (runs.jsonl, more.csv)" in " ".join(text.split())
    code, _, errors = command("simulate", tmp_path / "hardware.toml", "--set", "hardware.server=foredraft", *few)
    assert code == 2 and "fitted around sglang-0.5, but the run uses foredraft" in errors


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (table(RUNS[:2]), "2 points: at least 1 more needed"),
        (table([RUNS[0] | {"mean_tpot_ms": "nan"}]), "line 2: mean_tpot_ms: expected a finite number"),
        ("", "is empty"),
    ],
)
def test_what_cannot_be_used_is_one_message_and_writes_nothing(refused, tmp_path, text, message):
    (tmp_path / "runs.csv").write_text(text)
    assert message in refused("calibrate", "--from", tmp_path / "runs.csv", "--out", tmp_path / "profile.json", "-q")
    assert not (tmp_path / "profile.json").exists()


def test_nothing_given_is_said_and_a_profile_that_cannot_be_written_is_before_the_fit(command, tmp_path):
    code, _, errors = command("calibrate")
    assert code == 2 and "give --from FILE" in errors
    (tmp_path / "runs.csv").write_text(table(RUNS))
    for out, message in ((tmp_path, "is a directory"), (tmp_path / "absent" / "p.json", "cannot be written")):
        code, _, errors = command("calibrate", "--from", tmp_path / "runs.csv", "--out", out)
        assert code == 2 and message in errors and "simulations" not in errors


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (("--acceptance",), ("no files to fit to",)),
        (("--acceptance", "x", "--steps", "1,3"), ("--steps: found '1,3'; with --acceptance expected one number",)),
        (("--acceptance", "--model", "x"), ("contradicts",)),
        (
            ("--acceptance", "x", "--set", "seed=1", "--scenario", "a.toml", "--repeat", "2"),
            ("--set", "--scenario", "--repeat: has no effect: --acceptance makes no use of it"),
        ),
        (
            ("--from", "x", "--topk", "1", "--preset", "code", "--steps", "3"),
            (
                "--topk: has no effect: without --model",
                "--preset: has no effect: without --acceptance",
                "--steps: has no effect: without --model or --acceptance",
            ),
        ),
        (("--model", "x", "y.json"), ("[FILE]...: has no effect: --model makes no use of it",)),
    ],
)
def test_an_option_of_another_mode_is_refused(refused, line, expected):
    """With every option that does nothing, though it has the value of the default."""
    found = refused("calibrate", *line)
    assert all(words in found for words in expected), found
