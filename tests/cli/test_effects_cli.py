"""Options without effect are one message and exit code 2; keys of a file without effect are a note in the report."""

from __future__ import annotations

import json

import pytest

SIMULATE = ("simulate", "--quiet", "--set", "workload.num_requests=5")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--explain", "--out", "x"], "--out: has no effect: --explain runs nothing"),
        (["--explain", "--faults", "swarm"], "--faults: has no effect: --explain"),
        (["--no-events"], "--no-events: has no effect: without --out"),
        (["--no-perfetto"], "--no-perfetto: has no effect: without --out"),
        (["--trace", "t.csv", "--set", "workload.rate=8.0"], "--set: workload.rate: 8.0 has no effect: the requests"),
        (["--explain", "--set", "workload.amplitude=0.1"], "--set: workload.amplitude: 0.1 has no effect: arrivals are poisson"),
        (["--set", "workload.end_rate=9.0"], "--set: workload.end_rate: is gone: use workload.arrivals = "),
        (["--set", "engine.late_tokens=delivered"], "--set: engine.late_tokens: is gone: use hardware.server, which chooses"),
        (["--set", "engine.retract_first=latest"], "the rules of a server whole, and with SGLang engine.retraction_policy"),
        (["--set", "engine.admit_with=chunk"], "the rules of a server whole, and with vLLM engine.reserve_full_isl"),
        (["--set", "engine.block_rounds=1"], "--set: engine.block_rounds: is gone: use engine.multi_step_rounds"),
        (["--set", "workload.arrivals=ramp"], "--set: workload.arrivals: ramp is gone: use workload.arrivals = "),
        (["--set", "hardware.replicas=100000"], "hardware.replicas: input should be less than or equal to 1024"),
        (["--set", "disaggregation.prefill=100000"], "disaggregation.prefill: input should be less than or equal to 1024"),
    ],
)  # fmt: skip
def test_an_option_of_simulate_without_effect_is_refused(refused, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,48,10\n")
    message = refused("simulate", *options)
    assert words in message and len(message.splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"t.csv"}, "nothing was made"


def test_a_key_of_a_file_without_effect_is_a_note(command, tmp_path):
    path = tmp_path / "base.toml"
    path.write_text("[speculation]\nsteps = 3\npolicy = 'fixed'\n")
    run = tmp_path / "run"
    outcome = command(*SIMULATE, path, "--set", "speculation.algorithm=NONE", "--out", run)
    assert outcome.code == 0
    note = f"speculation.steps = 3 ({path}) has no effect: NONE drafts nothing"
    # A path may be broken over two lines of the terminal.
    assert "".join(f"Note: {note}.".split()) in "".join(outcome.out.split())
    assert json.loads((run / "summary.json").read_text())["notices"] == [note]
    assert f"# Note: {note}." in (run / "scenario.toml").read_text()
    explained = command("simulate", path, "--set", "speculation.algorithm=NONE", "--explain")
    assert f"# Note: {note}." in explained.out
    assert "Note:" not in command(*SIMULATE, path).out


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        (
            ["engine.prefix_cache=false"],
            "engine.prefix_cache = False (--set) says what happens anyway: what the prompts",
        ),
        (["speculation.steps=3"], "speculation.steps = 3 are the first steps, which the policy ema changes"),
        (["speculation.steps=3", "speculation.policy=ema"], ""),
        (["speculation.steps=3", "speculation.policy=fixed"], ""),
        (["workload.prefixes={groups=2}", "engine.prefix_cache=false"], ""),  # it has an effect
    ],
)
def test_a_setting_that_needs_a_word_gets_a_note(command, tmp_path, settings, note):
    given = [word for setting in settings for word in ("--set", setting)]
    outcome = command(*SIMULATE, *given, "--out", tmp_path / "run")
    assert outcome.code == 0
    notices = json.loads((tmp_path / "run" / "summary.json").read_text())["notices"]
    assert len(notices) == bool(note) and all(one.startswith(note) for one in notices)


def test_a_setting_that_contradicts_what_happens_is_still_refused(refused):
    assert "engine.prefix_cache: True has no effect" in refused(*SIMULATE, "--set", "engine.prefix_cache=true")


NONE = ("--algorithm", "NONE")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([*NONE, "--adaptive", "none/such.json"], "adaptive: has no effect: NONE drafts nothing"),
        ([*NONE, "--policy", "ema"], "policy: has no effect: NONE"),
        ([*NONE, "--num-draft-tokens", 4], "--num-draft-tokens: has no effect: NONE"),
        ([*NONE, "--topk", 4], "topk: NONE drafts no trees"),
        ([*NONE, "--steps", 3], "steps: has no effect: NONE"),
        (
            ["--round-times", "none/such.json"],
            "--round-times: has no effect: only the policy confidence makes use of it",
        ),
        ([*NONE, "--confidence-temperatures", "t.json"], "--confidence-temperatures: has no effect: only the policy"),
        (["--top-p", 0.9], "--top-p: has no effect: every request is greedy"),
        (["--top-k", 5], "--top-k: has no effect: every request is greedy"),
    ],
)
def test_an_option_of_generate_without_effect_is_refused(command, refused, models, options, words):
    line = ("generate", "--model", models["target"], "--prompt", "def", "--max-tokens", 2, "--quiet")
    assert words in refused(*line, *options)
    assert command(*line, "--top-p", 0.9, "--temperature", 0.5).code == 0


def test_what_is_unusual_in_an_adaptive_table_is_a_note(command, models, tmp_path):
    table = tmp_path / "table.json"
    table.write_text('{"candidate_steps": [1, 2], "ema_alpha": 0.5}')
    line = ("generate", "--model", models["target"], "--draft", models["EAGLE3"], "--prompt", "def", "--max-tokens", 2)
    outcome = command(*line, "--adaptive", table, "--quiet")
    assert outcome.code == 0
    assert (
        outcome.err
        == f'foredraft: note: {table}: the flat form is read as {{"1": ...}}, one range for all batch sizes\n'
    )
    outcome = command(*SIMULATE, "--set", f"speculation.adaptive='{table}'", "--set", "speculation.policy=goodput")
    assert outcome.code == 0 and "makes no use of ema_alpha." in " ".join(outcome.out.split())


def test_options_that_every_prompt_overrides_are_refused(command, refused, models, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"prompt": "def", "max_tokens": 2, "seed": 4}\n{"prompt": "class", "max_tokens": 3, "seed": 5}\n'
    )
    line = ("generate", "--model", models["target"], "--prompts", prompts, "--quiet")
    message = refused(*line, "--max-tokens", 9, "--seed", 7)
    assert "--max-tokens: has no effect: every prompt has a max_tokens of its own" in message
    prompts.write_text(prompts.read_text() + '{"prompt": "for"}\n')
    assert command(*line, "--max-tokens", 2).code == 0


def test_the_chat_template_needs_a_text(refused, models, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"tokens": [5, 6, 7], "max_tokens": 2}\n')
    message = refused("generate", "--model", models["target"], "--prompts", prompts, "--chat", "--quiet")
    assert "--chat: has no effect: no prompt of the file is a text" in message


BENCH = ("bench", "--random-weights", "qwen3-0.6b", "--device", "cpu")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ([*BENCH, "--acceptance", 10, "--steps", 3], "--acceptance: 10 is not reached: 3 steps give at most 4 tokens"),
        ([*BENCH, *NONE, "--topk", 4], "NONE"),
        ([*BENCH, *NONE, "--num-draft-tokens", 4], "--num-draft-tokens: has no effect: NONE drafts nothing"),
        (["check", "--list", "--seed", 7], "--seed: has no effect: --list"),
        (["check", "--replay", "case.json", "--budget", "5s"], "--budget: has no effect: --replay"),
        (["check", "--mutants", "--expect", "ALLOC-10=known"], "--expect: has no effect: --mutants"),
        (["check", "allocator", "my:make", "--mutants"], "SUBJECT: has no effect: --mutants"),
    ],
)
def test_an_option_of_bench_or_check_without_effect_is_refused(refused, line, words):
    assert words in refused(*line)
