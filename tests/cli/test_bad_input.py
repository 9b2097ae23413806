"""Every kind of bad input is one clear message on standard error and exit code 2, never a traceback."""

from __future__ import annotations

import re

import pytest
import typer
from foredraft.cli import app


def settings(*pairs: str) -> list[str]:
    return [word for pair in pairs for word in ("--set", pair)]


SETTINGS = {
    "unknown key": (["engine.page_sise=4"], ["engine.page_sise", "unknown key", "did you mean 'page_size'"]),
    "wrong type": (["engine.page_size=big"], ["engine.page_size", "valid integer", "'big'"]),
    "no setting": (["engine.page_size"], ["engine.page_size", "table.key=value"]),
    "NaN": (["workload.rate=nan"], ["workload.rate", "finite", "nan"]),
    "a rate that no clock holds": (["workload.rate_scale=1e-300"], ["--set: workload.rate_scale", "1e-300"]),
    "unknown GPU": (["hardware.gpu=H10"], ["--set: hardware.gpu", "'H10'", "did you mean 'H100'"]),
    "another model": (
        ["model.target=Qwen/Qwen3-99B"],
        ["'Qwen/Qwen3-99B'; the nearest known: qwen3-8b", "config.json"],
    ),
    "several unknown names": (
        ["hardware.gpu=H10", "hardware.host=x", "engine.eviction_policy=lur", "acceptance.preset=chta"],
        ["hardware.gpu", "hardware.host", "engine.eviction_policy", "acceptance.preset", "did you mean 'lru'"],
    ),
    "a context that the model does not have": (
        ["model.context_len=100000000"],
        ["model.context_len", "131072 positions"],
    ),
    "another algorithm": (["speculation.algorithm=EAGLE2"], ["unknown algorithm 'EAGLE2'; known"]),
    "a pool too small for anything": (["engine.kv_slots=3"], ["3 pages", "slots needed"]),
    "nd beyond the tree": (
        ["speculation.policy=fixed", "speculation.steps=3", "speculation.topk=2", "speculation.num_draft_tokens=60"],
        ["num_draft_tokens", "60", "capacity", "at most 11"],
    ),
    "a tree deeper than acceptance is known": (
        ["speculation.policy=fixed", "speculation.steps=65", "speculation.topk=2"],
        ["speculation.steps", "65", "1 ... 64"],
    ),
    "hysteresis that oscillates": (
        ['speculation.adaptive={"1" = {candidate_steps = [1, 3], up_hysteresis = -1.0}}'],
        ["speculation.adaptive", "up_hysteresis"],
    ),
    "a length of another kind": (["workload.prompt={kind = 'uniform', mean = 9.0}"], ["workload.prompt", "no mean"]),
    "a length without its numbers": (["workload.prompt.kind=fixed"], ["workload.prompt.value", "missing"]),
    "a length that is a number": (
        ["workload.prompt=1024"],
        ["workload.prompt", "write 'workload.prompt={value=1024}'"],
    ),
    "a table that is a word": (["hardware=H100"], ["hardware", "'H100' is no table", "such as hardware.gpu"]),
    "contradicting acceptance": (["acceptance.preset=chat", "acceptance.mean_length=2.0"], ["contradicts", "preset"]),
    "times of rounds for one number of steps of several": (
        ["speculation.policy=confidence", "speculation.round_times=times.json"],
        ["speculation.round_times", "give steps alone"],
    ),
    "an empty path": (
        ["speculation.policy=confidence", "speculation.steps=3", "speculation.round_times=''"],
        ["an empty path: cannot be read"],
    ),
    "times of rounds that fall": (
        [
            *("speculation.policy=confidence", "speculation.steps=3"),
            "speculation.round_times={sample_batch_tokens=[1, 9], sample_steps_per_sec=[5.0, 6.0], max_batch_tokens=9}",
        ],
        ["speculation.round_times: sample_steps_per_sec[1]", "is 6.0, more than 5.0"],
    ),
    "temperatures of other positions": (
        [
            "speculation.policy=confidence",
            "speculation.steps=3",
            "speculation.confidence_temperatures={temperatures=[1.0]}",
        ],
        ["speculation.confidence_temperatures: temperatures", "one for each draft step"],
    ),
    "a file that is not there": (["acceptance.recorded=none.csv"], ["none.csv", "cannot be read"]),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_setting(case, refused):
    given, expected = SETTINGS[case]
    message = refused("simulate", *settings(*given))
    assert all(words in message for words in expected), message


def test_all_problems_of_a_file_at_once(refused, tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text('[engine]\npagesize = 1\nmode = "fast"\n[workload]\nrate = -2.0\nburstiness = nan\n')
    message = refused("simulate", path)
    lines = message.splitlines()
    assert len(lines) == 4 and all(line.startswith(f"foredraft: {path}: ") for line in lines)
    keys = ("engine.pagesize", "engine.mode", "workload.rate", "workload.burstiness")
    assert all(words in message for words in (*keys, "'page_size'", "'synchronous'")), message


def test_nothing_is_written_for_bad_input(command, tmp_path):
    (tmp_path / "empty.csv").touch()
    for bad in (["--set", "hardware.gpu=none"], ["--trace", tmp_path / "empty.csv"]):
        assert command("simulate", *bad, "--out", tmp_path / "run").code == 2
        assert not (tmp_path / "run").exists()


def test_a_directory_that_cannot_be_made(refused, tmp_path):
    (tmp_path / "file").touch()
    assert str(tmp_path / "file" / "run") in refused("simulate", "--out", tmp_path / "file" / "run", "--quiet")


def test_unknown_option_and_command(command):
    assert command("simulate", "--sed", "3").code == 2
    assert command("simulat").code == 2


def test_problems_found_later_name_file_and_key(refused, tmp_path):
    """What only a look-up or an assembly can find is reported where the key was given, as a wrong type is."""
    scenario = tmp_path / "typo.toml"
    scenario.write_text('[hardware]\ngpu = "H10"\n[engine]\neviction_policy = "lur"\n')
    lines = refused("simulate", scenario, *settings("model.target=lama-3.1-8b")).splitlines()
    assert len(lines) == 3
    assert any(f"{scenario}" in line and "hardware.gpu" in line for line in lines)
    assert any(f"{scenario}" in line and "engine.eviction_policy" in line for line in lines)
    assert any("--set" in line and "model.target" in line for line in lines)
    scenario.write_text('[speculation]\nalgorithm = "NONE"\ntopk = 4\n')
    assert f"{scenario}: speculation.topk: " in refused("simulate", scenario)


PLANNING = {
    "seeds are no setting": (["sweep", "--grid", "seed=0..1"], ["--grid: seed", "same seeds", "--seeds 2"]),
    "no ratio": (["plan", "--try", "disaggregation.ratio=1:1,a:b"], ["disaggregation.ratio: 'a:b'", "such as 2:1"]),
    "a trace of two requests": (["plan", "--trace", "two.csv"], ["two.csv has 2 requests", "expected at least 20"]),
}


@pytest.mark.parametrize("case", PLANNING)
def test_a_question_that_cannot_be_answered(case, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"2023-11-16 18:17:0{second},48,10\n" for second in range(2))
    (tmp_path / "two.csv").write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    given, expected = PLANNING[case]
    message = refused(*given)
    assert all(words in message for words in expected), message
    assert [path.name for path in tmp_path.iterdir()] == ["two.csv"], "no run was made"


def test_a_removed_command_and_a_removed_option_name_their_successors(refused, monkeypatch):
    monkeypatch.setitem(app.GONE, "estimate", "`foredraft simulate`")
    monkeypatch.setitem(app.GONE, "simulate --hours", "--set workload.stop_s=SECONDS")
    assert "estimate is gone: use `foredraft simulate`" in refused("estimate", "x.toml")
    assert "simulate --hours is gone: use --set workload.stop_s=SECONDS" in refused("simulate", "--hours=3")
    assert "plan --power is gone: use `--price`" in refused("plan", "--power", "H100=600")
    assert "plan --model-error is gone" in refused("plan", "--model-error=5")
    assert "No such option: --minutes" in refused("simulate", "--minutes", "3")
    assert "No such command 'estimates'" in refused("estimates")


@pytest.mark.parametrize("name", app.GONE)
def test_what_is_gone_names_commands_and_options_that_exist(refused, name):
    """In words that a reader can type, of the commands as they are."""
    assert f"{name} is gone: use {app.GONE[name]}" in refused(*name.split(), "x.toml")
    commands = typer.main.get_command(app.app).commands
    for words in re.findall(r"`foredraft ([^`]+)`", app.GONE[name]):
        command, *options = words.split()
        known = {flag for one in commands[command].params for flag in one.opts}
        assert known.issuperset(one for one in options if one.startswith("-")), words


def test_few_commands_in_the_order_of_what_one_wants(command):
    """At most 17, each in a group of the help, and each with an example."""
    commands = typer.main.get_command(app.app).commands
    groups = [one.rich_help_panel.partition(":")[0] for one in commands.values()]
    assert len(commands) <= 17 and list(dict.fromkeys(groups)) == ["Answer", "Decode", "Check"]
    assert not [name for name, one in commands.items() if f"\n    foredraft {name}" not in one.help]
