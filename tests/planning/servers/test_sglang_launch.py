"""SGLang's launch command: its script, and what is written for it is read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foredraft.core.scheduler.rules import SGLangRules
from foredraft.planning.servers.files import server_files
from foredraft.planning.servers.launch import read_launch
from foredraft.planning.tuning.tables import settings_of
from foredraft.sim.assembly import assemble
from foredraft.sim.scenario_file import scenario_with
from launch_commands import problems_of, scenario_of

SCRIPT = """\
#!/bin/sh
# two GPUs
export HF_HOME=/data
CUDA_VISIBLE_DEVICES=0,1 exec python3 -m sglang.launch_server --model meta-llama/Llama-3.1-8B-Instruct \\
  --tp 2 --mem-frac 0.8 --page-size=16 --disable-overlap-schedule --disable-radix-cache --kv_cache_dtype fp8_e4m3 \\
  --speculative-algorithm EAGLE3 --speculative-draft-model-path some/head --speculative-num-steps 3 \\
  --speculative-eagle-topk 4 --speculative-num-draft-tokens 8 --cuda-graph-bs 1 2 4 8 48 --max-running-requests 48 \\
  --chunked-prefill-size 4096 --enable-mixed-chunk --port 30000 --lora-paths a b > log 2>&1 &
"""


def test_a_script_is_a_scenario(tmp_path: Path):
    script = tmp_path / "serve.sh"
    script.write_text(SCRIPT)
    launch = read_launch("sglang", str(script), "--from", "H100")
    expected: dict[str, Any] = {
        "hardware.server": "sglang-0.5",
        "model.target": "meta-llama/Llama-3.1-8B-Instruct",
        "model.draft": "some/head",
        "hardware.tensor_parallel": 2,
        "hardware.attention_data_parallel": 1,
        "hardware.replicas": 1,
        "hardware.static_fraction": 0.8,
        "hardware.graph_sizes": [1, 2, 4, 8, 48],
        "model.kv_dtype": "fp8",
        "engine.page_size": 16,
        "engine.max_running": 48,
        "engine.chunk_size": 4096,
        "engine.mixed": True,
        "engine.mode": "synchronous",
        "engine.prefix_cache": False,
        "speculation": {"algorithm": "EAGLE3", "policy": "fixed", "steps": 3, "topk": 4, "num_draft_tokens": 8},
    }
    assert launch.settings == expected
    assert (launch.without_effect, list(launch.not_modelled)) == (["--port"], ["--lora-paths"])
    (release,) = launch.assumed
    assert release.startswith(
        "the command names no release: the timing is that of sglang-0.5, and its published points"
    )
    assert assemble(scenario_of("sglang", str(script))).spec.draft_shape.round_shape(3, 1) == (3, 4, 8)


def test_arguments_alone_may_stand_on_lines(tmp_path: Path):
    file = tmp_path / "arguments"
    file.write_text("# of the small model\n--model qwen3-8b\n--tp 2\n")
    assert scenario_of("sglang", str(file)).hardware.tensor_parallel == 2


@pytest.mark.parametrize(("steps", "groups"), [(0, 1), (3, 1), (3, 2)])
def test_the_batch_limit_is_written_for_sglang(steps: int, groups: int):
    table = {"1": {"candidate_steps": [steps]}}
    keys = {"hardware.attention_data_parallel": groups, "hardware.server": "sglang-0.5", **settings_of(table)}
    files, _ = server_files(scenario_with({}, keys), table, None, 96)
    parallel = f" --tp {groups} --dp {groups} --enable-dp-attention" if groups > 1 else ""
    read = scenario_of("sglang", files["sglang.args"] + parallel)
    assert (read.engine.max_running, read.hardware.attention_data_parallel) == (96, groups)
    assert read.speculation.algorithm == ("EAGLE3" if steps else "NONE")


def test_the_rules_of_the_scheduler_are_read_and_written():
    launch = "--model llama-3.1-8b --speculative-algorithm EAGLE3 --speculative-num-steps 3"
    config = assemble(scenario_of("sglang", launch)).spec.config
    assert config.rules == SGLangRules()
    for groups, share in (("", 0.35), (" --tp 4 --dp 2 --enable-dp-attention", 0.105)):
        other = f"{launch} --schedule-conservativeness 0.5 --retraction-policy priority{groups}"
        config = assemble(scenario_of("sglang", other)).spec.config
        assert config.rules == SGLangRules(guarantee_output=pytest.approx(share), retraction_policy="priority")
    scenario = scenario_of("sglang", f"{launch} --schedule-conservativeness 0.5 --retraction-policy length")
    arguments = server_files(scenario, {"1": {"candidate_steps": [3]}}, None, 48)[0]["sglang.args"]
    for words in ("--max-running-requests 48", "--schedule-conservativeness 0.5", "--retraction-policy length"):
        assert words in arguments
    zero = read_launch("sglang", f"{launch} --schedule-conservativeness 0", "--from", "H100")
    assert "--schedule-conservativeness" in zero.not_modelled and "engine.guarantee_output" not in zero.settings


def test_the_intervals_are_written_for_sglang():
    keys = {"front_end.stream_interval": 20, "front_end.poll_steps": 10, "hardware.server": "sglang-0.5"}
    keys |= settings_of({"1": {"candidate_steps": [3]}})
    files, _ = server_files(scenario_with({}, keys), {"1": {"candidate_steps": [3]}}, None, 48)
    read = scenario_of("sglang", files["sglang.args"])
    assert (read.front_end.stream_interval, read.front_end.poll_steps) == (20, 10)


@pytest.mark.parametrize(
    ("algorithm", "flags", "rule"),
    [
        ("EAGLE3", "--speculative-use-rejection-sampling", "rejection"),
        ("EAGLE3", "--speculative-use-block-verification", "block"),
        ("DFLASH", "--speculative-use-block-verification", "block"),
        ("EAGLE3", "", "target"),
    ],
)
def test_flags_of_verification_are_the_rule(algorithm, flags, rule):
    shape = "--speculative-num-steps 3 --speculative-eagle-topk 1" if algorithm == "EAGLE3" else ""
    command = (
        f"python -m sglang.launch_server --model-path qwen3-8b --speculative-algorithm {algorithm} {shape} {flags}"
    )
    assert scenario_of("sglang", command).speculation.accept_rule == rule


def test_a_rule_that_sglang_does_not_have_for_an_algorithm_is_refused():
    command = "python -m sglang.launch_server --model-path qwen3-8b --speculative-algorithm STANDALONE"
    problems = problems_of("sglang", f"{command} --speculative-num-steps 3 --speculative-use-block-verification")
    assert "is for EAGLE, EAGLE3, DFLASH, DSPARK, not for STANDALONE" in problems
