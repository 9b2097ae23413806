"""Launch commands of other servers: what becomes of every argument, and that what is written for a
server is read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from foredraft.core.adaptive.config import load_adaptive_config
from foredraft.core.errors import ConfigError, ForedraftError
from foredraft.core.scheduler.rules import OurRules, SGLangRules, VLLMRules
from foredraft.observe.measuring.metrics import RunMetrics
from foredraft.planning.servers.command import LIST, VALUE
from foredraft.planning.servers.files import server_files
from foredraft.planning.servers.launch import READERS, read_launch
from foredraft.planning.tuning.tables import settings_of
from foredraft.sim.assembly import assemble
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario import Scenario
from foredraft.sim.scenario_file import load_scenario, scenario_with

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
SPECULATIVE = {
    "method": "eagle3",
    "model": "some/head",
    "num_speculative_tokens": 4,
    "num_speculative_tokens_per_batch_size": [[1, 8, 4], [9, 64, 1], [65, 512, 0]],
}

TRTLLM_OPTIONS = """\
kv_cache_config:
  free_gpu_memory_fraction: 0.8
  dtype: fp8
  host_cache_size: 100
cuda_graph_config: {batch_sizes: [1, 2, 64], enable_padding: true}
enable_attention_dp: true
disable_overlap_scheduler: true
max_batch_size: 64
moe_config: {backend: CUTLASS}
print_iter_log: true
scheduler_config: {capacity_scheduler_policy: MAX_UTILIZATION, context_chunking_policy: FIRST_COME_FIRST_SERVED}
speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 3, max_concurrency: 32}
"""


def scenario_of(server: str, command: str) -> Scenario:
    launch = read_launch(server, command, "--from", "H100", has_model=True)
    return load_scenario(None, (), {"--from": launch.settings})[0]


def problems_of(server: str, command: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_launch(server, command, "--from", "H100")
    return str(caught.value)


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


def test_trtllm_with_its_options_in_yaml(tmp_path: Path):
    options = tmp_path / "options.yaml"
    options.write_text(TRTLLM_OPTIONS)
    launch = read_launch("trtllm", f"trtllm-serve llama-3.1-8b --tp_size 2 --config {options}", "--from", "H100")
    expected: dict[str, Any] = {
        "hardware.server": "trtllm-1.x",
        "hardware.free_fraction": 0.8,
        "hardware.graph_sizes": [1, 2, 64],
        "hardware.attention_data_parallel": 2,
        "engine.mode": "synchronous",
        "engine.guarantee_output": False,
        "engine.max_running": 64,
        "model.kv_dtype": "fp8",
    }
    assert {key: launch.settings.get(key) for key in expected} == expected
    assert launch.settings["speculation"]["algorithm"] == "EAGLE"
    assert "--print-iter-log" in launch.without_effect
    left = {"kv_cache_config.host_cache_size", "--moe-config", "scheduler_config.context_chunking_policy"}
    assert left == set(launch.not_modelled)
    options.write_text("scheduler_config: {capacity_scheduler_policy: STATIC_BATCH}\n")
    launch = read_launch("trtllm", f"trtllm-serve llama-3.1-8b --config {options}", "--from", "H100")
    assert list(launch.not_modelled) == ["scheduler_config.capacity_scheduler_policy"]


def test_the_memory_for_kv_may_be_given_in_bytes(tmp_path: Path):
    scenario = scenario_of("vllm", "vllm serve llama-3.1-8b --kv-cache-memory-bytes 10G --gpu-memory-utilization 0.5")
    assert scenario.hardware.kv_gb == 2**30 * 10 / 1e9 and scenario.hardware.reserved_fraction is None
    memory = assemble(scenario).memory
    assert memory is not None and 10 * 2**30 - 16 * 131_072 < memory.kv_pool_bytes <= 10 * 2**30
    assert memory.slots == memory.kv_pool_bytes // 131_072 - 16
    with pytest.raises(ForedraftError, match=r"does not fit .* KV pool as given 85"):
        assemble(scenario_of("vllm", "vllm serve llama-3.1-8b --kv-cache-memory-bytes 80G"))
    assert (
        scenario_of("vllm", "vllm serve llama-3.1-8b --kv-cache-memory-bytes 1.5GiB").hardware.kv_gb
        == 1.5 * 2**30 / 1e9
    )
    for wrong in ("1.5", "1.5X", "G"):
        assert f"--kv-cache-memory-bytes: is {wrong!r}" in problems_of(
            "vllm", f"vllm serve m --kv-cache-memory-bytes {wrong}"
        )

    def slots_of(given: str) -> int:
        options = tmp_path / "options.yaml"
        options.write_text(f"kv_cache_config: {{max_gpu_total_bytes: {given}, free_gpu_memory_fraction: 0.5}}\n")
        found = assemble(scenario_of("trtllm", f"trtllm-serve llama-3.1-8b --config {options}")).memory
        assert found is not None
        return found.slots

    assert slots_of("10737418240") == 10 * 2**30 // (32 * 131_072) * 32 - 32
    assert slots_of("0") == slots_of("200000000000") > 3 * slots_of("10737418240"), "the smaller bound holds"


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


@pytest.mark.parametrize(("name", "least"), [("sglang", 200), ("vllm", 200), ("trtllm", 70)])
def test_every_known_argument_is_accounted_for(name: str, least: int):
    server = READERS[name][0]
    others = {name: known for name, known in server.known.items() if known.reason != ""}
    words = []
    for word, known in others.items():
        dashes = "-" if len(word) < 4 and name == "vllm" else "--"
        words += [dashes + word, *(["1"] if known.kind in (VALUE, LIST) else [])]
    launch = read_launch(name, " ".join(words), "--from", "H100", has_model=True)
    assert {*launch.without_effect, *launch.not_modelled} == {f"--{word}" for word in others}
    assert len(others) > least and all(launch.not_modelled.values())
    mapped = {word for word, known in server.known.items() if known.reason == ""}
    assert mapped.isdisjoint(others) and set(server.other_names.values()) <= set(server.known)


@pytest.mark.parametrize(
    "table", [{"1": [4]}, {"1": [1, 3, 5], "16": [0, 1]}, {"1": [5], "8": [2], "32": [0]}], ids=str
)
def test_what_is_written_for_a_server_is_read_back(
    table: dict[str, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ours = {bound: {"candidate_steps": steps} for bound, steps in table.items()}
    schedule = {bound: {"candidate_steps": steps[-1:]} for bound, steps in table.items()}
    files = {}
    for profile in ("sglang-0.5", "vllm-0.18", "trtllm-1.x"):
        scenario = scenario_with({}, settings_of(ours) | {"hardware.server": profile})
        written, left_out = server_files(scenario, ours, schedule, 256)
        assert len(left_out) == 2
        files |= written
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    sglang = assemble(scenario_of("sglang", files["sglang.args"])).spec
    read = sglang.adaptive
    assert sglang.config.max_running == 256  # with speculation SGLang's own limit is 48
    assert (read.bounds, read.candidate_steps) == (
        (tuple(map(int, table)), tuple(sorted({s for steps in table.values() for s in steps})))
    )
    spoken = files["vllm-speculative-config.json"]
    again = assemble(scenario_of("vllm", f"--model llama-3.1-8b --speculative-config '{spoken}'")).spec.adaptive
    expected = [slot.candidate_steps for slot in load_adaptive_config(schedule).slots]
    assert [slot.candidate_steps for slot in again.slots] == expected
    trtllm = assemble(scenario_of("trtllm", "trtllm-serve llama-3.1-8b --config trtllm.yaml")).spec.adaptive
    steps = [slot.candidate_steps for slot in trtllm.slots]
    assert steps == expected or steps == [*expected, (0,)]  # beyond the last range it does not speculate


@pytest.mark.parametrize(("steps", "groups"), [(0, 1), (3, 1), (3, 2)])
def test_the_batch_limit_is_written_for_sglang(steps: int, groups: int):
    table = {"1": {"candidate_steps": [steps]}}
    keys = {"hardware.attention_data_parallel": groups, "hardware.server": "sglang-0.5", **settings_of(table)}
    files, _ = server_files(scenario_with({}, keys), table, None, 96)
    parallel = f" --tp {groups} --dp {groups} --enable-dp-attention" if groups > 1 else ""
    read = scenario_of("sglang", files["sglang.args"] + parallel)
    assert (read.engine.max_running, read.hardware.attention_data_parallel) == (96, groups)
    assert read.speculation.algorithm == ("EAGLE3" if steps else "NONE")


@pytest.mark.parametrize(
    ("server", "command", "messages"),
    [
        (
            "sglang",
            "--tensor-paralel-size 2 --port",
            ["did you mean '--tensor-parallel-size'", "--port: needs a value"],
        ),
        ("sglang", "vllm serve x", ["'vllm' is no command of SGLang"]),
        ("sglang", "--speculative-algorithm DFLASH", ["DFLASH is not simulated"]),
        ("sglang", "--mem-fraction-static 80", ["above 0, up to 1"]),
        ("sglang", "--schedule-conservativeness -1", ["is '-1'; expected a number from 0 on"]),
        ("sglang", "--schedule-conservativeness=nan", ["is 'nan'; expected a number from 0 on"]),
        ("sglang", "--retraction-policy lenght", ["is 'lenght'; expected length or priority"]),
        ("sglang", "--tp 3 --dp 2 --enable-dp-attention", ["2 groups of data-parallel attention do not divide"]),
        ("sglang", "--model-path $MODEL", ["--model-path: is '$MODEL', which has a variable"]),
        ("sglang", "--disable-radix-cache=7", ["takes no value"]),
        ("sglang", "--cuda-graph-max-bs 999999999", ["expected an integer from 1 to 1048576"]),
        ("sglang", "--cuda-graph-bs 8 999999999", ["is '8 999999999'; expected numbers from 1 to 1048576"]),
        ("sglang", "--disaggregation-mode both", ["is 'both'; expected null, prefill or decode"]),
        ("sglang", "--radix-eviction-policy release", ["is 'release'; SGLang knows lru, lfu, slru, priority, tlru"]),
        ("sglang", "--tp-size.most 2", ["--tp-size: has no keys, got tp-size.most"]),
        ("vllm", "vllm serve x --scheduling-policy fair", ["is 'fair'; expected fcfs or priority"]),
        ("vllm", "vllm serve x --watermark 1.5", ["is '1.5'; expected a number from 0 to 1"]),
        ("vllm", "vllm serve x -O9", ["is '9'; expected 0, 1, 2 or 3"]),
        (
            "vllm",
            "vllm serve x -cc.cudagraph_mode HALF -cc.max_cudagraph_capture_size 512.5 -cc.cudagraph_capture_sizes [0]",
            [
                "--compilation-config cudagraph_mode: is 'HALF'",
                "--compilation-config max_cudagraph_capture_size: is '512.5'",
                "--compilation-config cudagraph_capture_sizes: is '0'",
            ],
        ),
        ("sglang", "'unclosed", ["No closing quotation"]),
        ("sglang", " ", ["is empty"]),
        ("vllm", "vllm serve x --speculative-config '{\"method\": 3'", ["is no JSON"]),
        ("vllm", "vllm serve x --spec-method medusa --spec-tokens 3", ["'medusa' is not simulated"]),
        ("vllm", "vllm serve x --spec-method eagle", ["num_speculative_tokens is None"]),
        ("trtllm", "trtllm-serve x --tp-sze 2 --max_batch_size many", ["did you mean '--tp-size'"]),
        ("trtllm", "trtllm-serve x --max_batch_size many", ["--max-batch-size: is 'many'"]),
        ("trtllm", "trtllm-serve x --config missing.yaml", ["missing.yaml: cannot be read"]),
        (
            "vllm",
            "vllm serve x --max-num-seqs many --block-size 0",
            ["--max-num-seqs: is 'many'", "--block-size: is '0'"],
        ),
    ],
)
def test_what_cannot_be_read_is_said_all_at_once(server: str, command: str, messages: list[str]):
    text = problems_of(server, command)
    assert all(message in text for message in messages), text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("tensor_parallel_size: true", "tensor_parallel_size: is True; expected a number or a word"),
        ("max_batch_size: {most: 3}", "max_batch_size: is {'most': 3}; expected a number or a word"),
        ("kv_cache_config: true", "kv_cache_config: is True; expected keys with values"),
        ("kv_cache_config: {enable_block_reuse: 'no'}", "kv_cache_config.enable_block_reuse: is 'no'"),
        ("cuda_graph_config: {max_batch_size: 999999999}", "expected a number from 1 to 1048576"),
        ("scheduler_config: {capacity_scheduler_policy: FAIR}", "is 'FAIR'; expected GUARANTEED_NO_EVICT"),
    ],
)
def test_impossible_values_of_a_yaml_file_are_refused(tmp_path: Path, options: str, message: str):
    path = tmp_path / "options.yaml"
    path.write_text(options)
    assert message in problems_of("trtllm", f"trtllm-serve llama-3.1-8b --config {path}")


@pytest.mark.parametrize(
    ("server", "command", "expected"),
    [
        (
            "sglang",
            "docker run lmsysorg/sglang:v0.4.1-cu124 python3 -m sglang.launch_server --model x",
            "the command names release 0.4.1: the timing is that of sglang-0.5, and its published points are of",
        ),
        ("vllm", "docker run vllm/vllm-openai:v0.33.0 --model x", "the command names release 0.33.0: the timing is"),
        (
            "vllm",
            "pip install vllm==0.9.1 && vllm serve x",
            "; vllm-0.9 is nearer: set hardware.server",
        ),
        (
            "trtllm",
            "docker run nvcr.io/nvidia/tensorrt-llm/release:1.2.0 trtllm-serve x",
            "the command names release 1.2.0: the timing is that of trtllm-1.x",
        ),
        ("vllm", "vllm serve x", "the command names no release: the timing is that of vllm-0.18"),
    ],
)
def test_a_release_that_the_command_names_is_said_beside_the_profile(server: str, command: str, expected: str):
    launch = read_launch(server, command, "--from", "H100")
    assert launch.settings["model.target"] == "x"
    lines = [line for line in launch.notes() if "the timing is that of" in line]
    assert len(lines) == 1 and expected in lines[0], lines


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


@pytest.mark.parametrize(
    ("server", "start"), [("sglang", "--model"), ("vllm", "vllm serve"), ("trtllm", "trtllm-serve")]
)
def test_the_output_interval_is_read_and_pipeline_stages_are_refused(server: str, start: str):
    plain = scenario_of(server, f"{start} llama-3.1-8b")
    assert assemble(plain).deployment.front_end.stream_interval == 1
    scenario = scenario_of(server, f"{start} llama-3.1-8b --stream-interval 20 --pipeline-parallel-size 1")
    assert assemble(scenario).deployment.front_end.stream_interval == 20
    for word in ("0", "-3", "ten"):
        assert "stream-interval: is" in problems_of(server, f"{start} llama-3.1-8b --stream-interval={word}")
    text = problems_of(server, f"{start} llama-3.1-8b --pipeline-parallel-size 2")
    assert text.count("\n") == 0 and "is 2, but pipeline stages have no price here" in text


def test_the_intervals_are_written_for_sglang():
    keys = {"front_end.stream_interval": 20, "front_end.poll_steps": 10, "hardware.server": "sglang-0.5"}
    keys |= settings_of({"1": {"candidate_steps": [3]}})
    files, _ = server_files(scenario_with({}, keys), {"1": {"candidate_steps": [3]}}, None, 48)
    read = scenario_of("sglang", files["sglang.args"])
    assert (read.front_end.stream_interval, read.front_end.poll_steps) == (20, 10)


def test_trtllm_waits_for_a_batch_if_both_numbers_say_so(tmp_path: Path):
    options = tmp_path / "options.yaml"
    command = f"trtllm-serve llama-3.1-8b --config {options}"

    def config_of(text: str):
        options.write_text(text)
        return assemble(scenario_of("trtllm", command)).spec.config

    both = "batch_wait_timeout_iters: 20\nbatch_wait_max_tokens_ratio: 0.9\n"
    config = config_of(both + "stream_interval: 10\n")
    assert config.rules == OurRules(guarantee_output=1.0, batch_wait_rounds=20, batch_wait_tokens=0.9)
    for text in ("batch_wait_timeout_iters: 20\n", "batch_wait_max_tokens_ratio: 0.9\n", "stream_interval: 2\n"):
        config = config_of(text)
        assert config.rules == OurRules(guarantee_output=1.0)
    options.write_text(both + "enable_attention_dp: true\n")
    launch = read_launch("trtllm", f"{command} --tp_size 2", "--from", "H100")
    assert "--batch-wait-timeout-iters" in launch.not_modelled and "engine.batch_wait_rounds" not in launch.settings
    for text in ("batch_wait_timeout_iters: -1\n", "batch_wait_max_tokens_ratio: 1.5\n", "stream_interval: [1]\n"):
        options.write_text(text)
        assert "expected" in problems_of("trtllm", command)


def test_tries_of_drafts_back_off_as_in_the_server_unless_a_key_or_the_table_says():
    table = {"1": {"candidate_steps": [0, 3]}}

    def rules_of(server: str, speculation: dict[str, Any] | None = None) -> list[bool | None]:
        given = {"hardware.server": server, "speculation": {"policy": "ema", "adaptive": table} | (speculation or {})}
        return [
            slot.probe_backoff for slot in assemble(load_scenario(None, (), {"--from": given})[0]).spec.adaptive.slots
        ]

    assert (rules_of("foredraft"), rules_of("sglang-0.5")) == ([None], [False])
    assert rules_of("foredraft", {"probe_backoff": False}) == [False]
    assert rules_of("sglang-0.5", {"probe_backoff": True}) == [None]  # what it means unless a table says
    own = {"probe_backoff": True, **table}
    assert rules_of("sglang-0.5", {"adaptive": own}) == [True]


def test_the_mode_is_that_of_the_release():
    def config_of(server: str, **engine: str):
        given = {"hardware.server": server} | {f"engine.{key}": value for key, value in engine.items()}
        return assemble(load_scenario(None, (), {"--from": given})[0]).spec.config

    assert config_of("vllm-0.9").mode == "synchronous" and "does not overlap" in config_of("vllm-0.9").mode_reason
    assert config_of("vllm-0.18").mode == "overlap"
    assert config_of("vllm-0.9", mode="overlap").mode == "overlap"


def test_the_default_batch_is_what_a_step_holds_with_its_drafts():
    settings = read_launch("vllm", "vllm serve qwen3-8b", "--from", "H100").settings
    for speculation, rows in (("NONE", 1024), ("EAGLE3", (8192 - 1) // 8)):
        drafting = {} if speculation == "NONE" else {"policy": "fixed", "steps": 7}
        given = settings | {"speculation": {"algorithm": speculation} | drafting}
        assert assemble(load_scenario(None, (), {"--from": given})[0]).spec.config.max_running == rows


def test_defaults_follow_the_device_and_the_model():
    def keys(server: str, command: str, gpu: str) -> dict[str, Any]:
        return dict(read_launch(server, command, "--from", gpu, has_model=True).settings)

    plain, large = (keys("sglang", "--model qwen3-8b", gpu) for gpu in ("L4", "B200"))
    assert (plain["engine.chunk_size"], large["engine.chunk_size"]) == (2048, 16_384)
    assert plain["speculation"] == {"algorithm": "NONE"} and plain["engine.max_running"] == 2048
    llama = keys("sglang", "--model llama-3.1-8b --speculative-algorithm EAGLE3", "H100")
    assert llama["speculation"] == {
        "algorithm": "EAGLE3",
        "policy": "fixed",
        "steps": 5,
        "topk": 4,
        "num_draft_tokens": 8,
    }
    assert llama["engine.max_running"] == 48
    for gpu, rows in (("L4", 256), ("H100", 1024)):
        launch = read_launch("vllm", "vllm serve qwen3-8b", "--from", gpu)
        assert f"max-num-seqs is {rows}, its default on {gpu}" in launch.assumed
    groups = keys("sglang", "--tp 8 --dp 4 --enable-dp-attention --ep 8", "H100")
    assert (
        groups["hardware.tensor_parallel"],
        groups["hardware.attention_data_parallel"],
        groups["hardware.replicas"],
    ) == (2, 4, 1)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("sglang serve m --enable-hierarchical-cache", {"engine.host_cache_ratio": 2.0}),
        ("sglang serve m --tp 2 --enable-hierarchical-cache --hicache-ratio 3", {"engine.host_cache_ratio": 3.0}),
        (
            "sglang serve m --tp 2 --enable-hierarchical-cache --hicache-ratio 3 --hicache-size 40",
            {"engine.host_cache_gb": 80.0},
        ),
        ("sglang serve m --hicache-size 40", {}),
        ("vllm serve m --kv-offloading-size 40", {"engine.host_cache_gb": 42.949673}),
        ("vllm serve m --kv-offloading-size 0", {}),
    ],
)
def test_host_memory_behind_the_prefix_cache_is_read(command, expected):
    server = command.split()[0]
    command = command.replace(" m", " --model-path Qwen/Qwen3-8B" if server == "sglang" else " Qwen/Qwen3-8B", 1)
    found = read_launch(server, command, "--from", "H100")
    assert {key: value for key, value in found.settings.items() if "host_cache" in key} == expected
    assert not any("hicache" in name or "offloading" in name for name in found.not_modelled)


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
