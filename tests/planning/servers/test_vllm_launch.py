"""vLLM's launch command: schedules, memory in bytes, and JSON in the hands of a shell."""

from __future__ import annotations

import json

import pytest
from foredraft.core.adaptive.config import load_adaptive_config
from foredraft.core.scheduler.rules import VLLMRules
from foredraft.observe.measuring.metrics import RunMetrics
from foredraft.planning.servers.launch import read_launch
from foredraft.sim.assembly import assemble
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario_file import load_scenario
from launch_commands import problems_of, scenario_of

SPECULATIVE = {
    "method": "eagle3",
    "model": "some/head",
    "num_speculative_tokens": 4,
    "num_speculative_tokens_per_batch_size": [[1, 8, 4], [9, 64, 1], [65, 512, 0]],
}


def test_vllm_with_a_schedule_short_names_and_keys_of_objects():
    command = (
        "OMP_NUM_THREADS=1 vllm serve Qwen/Qwen3-32B -tp 2 --max_num_seqs 128 --max-model-len 32k --no-enable-prefix-caching -O3 "
        f"--speculative-config '{json.dumps(SPECULATIVE)}' -cc.cudagraph_mode PIECEWISE --max-num-batched-tokens=8K --api-key a b"
    )
    scenario = scenario_of("vllm", command)
    assert (scenario.model.target, scenario.hardware.tensor_parallel, scenario.model.context_len) == (
        "Qwen/Qwen3-32B",
        2,
        32_000,
    )
    assert (scenario.engine.max_running, scenario.engine.max_step_tokens, scenario.engine.page_size) == (128, 8192, 16)
    assert scenario.hardware.launch == "piecewise" and not scenario.engine.prefix_cache
    config = load_adaptive_config(scenario.speculation.adaptive)
    assert (config.bounds, config.candidate_steps) == ((1, 9, 65), (0, 1, 4))
    assemble(scenario)


def test_vllm_admits_as_its_arguments_say():
    config = assemble(scenario_of("vllm", "vllm serve llama-3.1-8b")).spec.config
    assert (config.rules, config.mode) == (VLLMRules(), "overlap")
    words = "--watermark 0.05 --no-scheduler-reserve-full-isl --no-async-scheduling"
    config = assemble(scenario_of("vllm", f"vllm serve llama-3.1-8b {words}")).spec.config
    assert (config.rules, config.mode) == (VLLMRules(watermark=0.05, reserve_full_isl=False), "synchronous")


@pytest.mark.parametrize(
    ("text", "is_said"),
    [
        ("{method:eagle3,model:org/head-v1.5,num_speculative_tokens:3}", True),
        ('{"method": "eagle3", "model": "org/head-v1.5", "num_speculative_tokens": 3} --port 1', False),
        ('{"method":"eagle3","model":"org/head-v1.5","num_speculative_tokens":3}', False),
        ('\'{"method":"eagle3","model":"org/head-v1.5","num_speculative_tokens":3}\'', False),
    ],
)
def test_json_whose_quotes_a_shell_took_is_read(text: str, is_said: bool):
    launch = read_launch("vllm", f"vllm serve org/model --speculative-config {text}", "--from", "H100")
    assert launch.settings["speculation"]["steps"] == 3
    note = 'is read as {"method": "eagle3", "model": "org/head-v1.5", "num_speculative_tokens": 3}'
    assert (note in " ".join(launch.assumed)) == is_said


def test_the_default_batch_is_what_a_step_holds_with_its_drafts():
    settings = read_launch("vllm", "vllm serve qwen3-8b", "--from", "H100").settings
    for speculation, rows in (("NONE", 1024), ("EAGLE3", (8192 - 1) // 8)):
        drafting = {} if speculation == "NONE" else {"policy": "fixed", "steps": 7}
        given = settings | {"speculation": {"algorithm": speculation} | drafting}
        assert assemble(load_scenario(None, (), {"--from": given})[0]).spec.config.max_running == rows


PRETENDS = (
    "vllm serve Qwen/Qwen3-8B -sc "
    '\'{"method":"eagle3","model":"x/y","num_speculative_tokens":3,"rejection_sample_method":"synthetic",%s}\''
)


@pytest.mark.parametrize(
    ("server", "command", "conditional", "mean"),
    [
        ("vllm", PRETENDS % '"synthetic_acceptance_rates":[0.8,0.6,0.3]', [0.8, 0.75, 0.5], 2.7),
        ("vllm", PRETENDS % '"synthetic_acceptance_length":2.5', [1.0, 0.5, 0.0], 2.5),
        (
            "sglang",
            "SGLANG_SIMULATE_ACC_LEN=2.5 python -m sglang.launch_server --model-path Qwen/Qwen3-8B "
            "--speculative-algorithm EAGLE3 --speculative-num-steps 3 --speculative-eagle-topk 1",
            [1.0, 0.5, 0.0],
            2.5,
        ),
    ],
)  # fmt: skip
def test_an_acceptance_that_a_server_pretends_is_the_acceptance(server, command, conditional, mean):
    launch = read_launch(server, command, "--from", "H100")
    assert launch.settings["acceptance.conditional"] == conditional
    assert any("the server pretends its acceptance" in line for line in launch.notes())
    settings = ("workload.num_requests=60", "workload.rate=5", "hardware.kernels=roofline")
    scenario, _ = load_scenario(None, settings, {"--from": launch.settings})
    metrics = RunMetrics(None)
    report = Simulation(scenario, sinks=lambda replica: [metrics.sink(replica)]).run()
    assert metrics.summary(report.duration_ns)["accept_length"] == pytest.approx(mean, rel=0.02)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ('"synthetic_acceptance_rates":[0.8,0.9,0.3]', "expected 3 numbers from 1 to 0 that do not rise"),
        ('"synthetic_acceptance_rates":[0.8]', "expected 3 numbers"),
        ('"synthetic_acceptance_length":4.5', "synthetic_acceptance_length is 4.5; expected 1 to 4"),
        ('"synthetic_acceptance_length":2,"synthetic_acceptance_rates":[1,1,1]', "expected either"),
    ],
)
def test_a_pretended_acceptance_that_cannot_be_is_refused(key, message):
    assert message in problems_of("vllm", PRETENDS % key)


RULE = 'vllm serve Qwen/Qwen3-8B -sc \'{"method":"%s","model":"x/y","num_speculative_tokens":3,%s}\''


@pytest.mark.parametrize(
    ("method", "words", "rule", "note"),
    [
        ("eagle3", '"draft_sample_method":"greedy"', "target", ""),
        ("eagle3", '"draft_sample_method":"probabilistic"', "rejection", ""),
        ("eagle3", '"draft_sample_method":"probabilistic","rejection_sample_method":"block"', "block", ""),
        ("eagle3", '"rejection_sample_method":"block"', "target", "drafts that are not drawn"),
        (
            "eagle3",
            '"draft_sample_method":"probabilistic","rejection_sample_method":"fly"',
            "target",
            "fly keeps tokens",
        ),
        ("eagle3", '"rejection_sample_method":"strict"', "target", ""),
        ("eagle3", '"rejection_sample_method":"probabilistic"', "rejection", ""),
        ("ngram", '"draft_sample_method":"probabilistic"', "target", ""),
    ],
)
def test_how_drafts_are_drawn_and_verified_is_the_rule(method, words, rule, note):
    launch = read_launch("vllm", RULE % (method, words), "--from", "H100")
    assert scenario_of("vllm", RULE % (method, words)).speculation.accept_rule == rule
    said = [line for line in launch.notes() if "sample_method" in line or "verification" in line]
    assert bool(said) == bool(note) and all(note in line for line in said)


def test_an_unknown_way_to_verify_is_refused():
    message = "rejection_sample_method is 'blocks'; expected standard, block, synthetic"
    assert message in problems_of("vllm", RULE % ("eagle3", '"rejection_sample_method":"blocks"'))
