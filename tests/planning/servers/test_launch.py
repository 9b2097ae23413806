"""Launch commands of other servers: what becomes of every argument, and that what is written for a
server is read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foredraft.core.adaptive.config import load_adaptive_config
from foredraft.core.errors import ForedraftError
from foredraft.planning.servers.command import LIST, VALUE
from foredraft.planning.servers.files import server_files
from foredraft.planning.servers.launch import READERS, read_launch
from foredraft.planning.tuning.tables import settings_of
from foredraft.sim.assembly import assemble
from foredraft.sim.scenario_file import load_scenario, scenario_with
from launch_commands import problems_of, scenario_of


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


@pytest.mark.parametrize(
    ("server", "command", "messages"),
    [
        (
            "sglang",
            "--tensor-paralel-size 2 --port",
            ["did you mean '--tensor-parallel-size'", "--port: needs a value"],
        ),
        ("sglang", "vllm serve x", ["'vllm' is no command of SGLang"]),
        ("sglang", "--speculative-algorithm UNO", ["UNO is not simulated"]),
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
