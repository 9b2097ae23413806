"""`--server-log`: a server's lines of its start are taken as measured, and what contradicts the scenario is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

VLLM = """\
INFO 11-02 09:12:01 [api_server.py:1839] vLLM API server version 0.18.1
(EngineCore_DP0 pid=27) INFO 11-02 09:12:20 [core.py:77] Initializing a V1 LLM engine (v0.18.1) with config: \
model='meta-llama/Llama-3.1-8B-Instruct', speculative_config=None, dtype=torch.bfloat16, max_seq_len=16000, \
tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1, enforce_eager=False, kv_cache_dtype=auto, \
compilation_config={'cudagraph_mode': <CUDAGraphMode.FULL: 2>, 'cudagraph_capture_sizes': [8, 4, 2, 1]}
\x1b[36m(EngineCore_DP0 pid=27)\x1b[0m INFO 11-02 09:12:44 Model loading took 14.9889 GiB memory and 3.301 seconds
(EngineCore_DP0 pid=27) INFO 11-02 09:13:05 [gpu_worker.py:298] Available KV cache memory: 51.38 GiB
(EngineCore_DP0 pid=27) INFO 11-02 09:13:05 [kv_cache_utils.py:1087] GPU KV cache size: 420,896 tokens
"""
ASKED = (
    "non-default args: {'model_tag': 'meta-llama/Llama-3.1-8B-Instruct', 'model': 'meta-llama/Llama-3.1-8B-Instruct'}"
)
CUT = "\n".join(ASKED if "with config" in line else line for line in VLLM.splitlines())
"""The log without the line of the engine."""
SGLANG = """\
[2026-03-02 11:27:50] server_args={'model_path': '/root/.cache/hub/models--Qwen--Qwen3-8B/snapshots/40c0', \
'tp_size': 2, 'pp_size': 1, 'dp_size': 1, 'enable_dp_attention': False, 'speculative_algorithm': 'EAGLE3'}
[2026-03-02 11:28:06 TP0] Load weight end. type=Qwen3ForCausalLM, dtype=torch.bfloat16, mem usage=7.63 GB.
[2026-03-02 11:28:06 TP1] Load weight end. type=Qwen3ForCausalLM, dtype=torch.bfloat16, mem usage=7.63 GB.
[2026-03-02 11:28:06 TP0] KV Cache is allocated. #tokens: 298447, K size: 10.25 GB, V size: 10.25 GB
[2026-03-02 11:28:07 TP0] Load weight end. type=LlamaForCausalLMEagle3, dtype=torch.bfloat16, mem usage=0.35 GB.
[2026-03-02 11:28:07 TP0] KV Cache is allocated. #tokens: 298447, K size: 0.29 GB, V size: 0.29 GB
[2026-03-02 11:28:08 TP0] Capture cuda graph bs [1, 2, 4, 8, 12, 16, 24, 32]
[2026-03-02 11:28:18 TP0] max_total_num_tokens=298447, chunked_prefill_size=2048, max_running_requests=3730
"""
TRTLLM = """\
[TensorRT-LLM] TensorRT-LLM version: 1.1.0rc3
[12/20/2025-04:20:21] [TRT-LLM] [I] Use 14.99 GB for model weights.
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 1.00 GiB for max tokens in paged KV cache (8192).
[12/20/2025-04:21:50] [TRT-LLM] [I] Run generation only CUDA graph warmup for batch size=64, draft_len=0
[12/20/2025-04:21:50] [TRT-LLM] [I] Run generation only CUDA graph warmup for batch size=1, draft_len=0
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 40.00 GiB for max tokens in paged KV cache (327680).
"""
WINDOWED = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 8, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "vocab_size": 201_088, "num_local_experts": 32,
    "num_experts_per_tok": 4, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 4,
    "max_position_embeddings": 131_072,
}  # fmt: skip
SERVE = "vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 16000 --gpu-memory-utilization 0.9"
OF_SGLANG = "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --tp 2 --speculative-algorithm EAGLE3"
PLAIN = ("--set", "speculation.algorithm=NONE")


@pytest.fixture
def log(tmp_path, monkeypatch):
    """`log(text)`: the name of a file that has it."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        Path("server.log").write_text(text)
        return "server.log"

    return write


@pytest.fixture
def explained(command):
    """`explained(…)`: the scenario with its origins, and what was said, as one line."""

    def run(*arguments: str) -> tuple[dict, dict, str]:
        outcome = command("simulate", "--explain", "--json", *arguments)
        assert outcome.code == 0, outcome.err
        document = json.loads(outcome.out)
        return document["scenario"], document["sources"], " ".join(outcome.err.split())

    return run


def test_pool_sizes_and_release_of_vllm_are_those_of_its_lines(log, explained):
    scenario, origins, said = explained("--from-vllm", SERVE, "--server-log", log(VLLM))
    assert scenario["engine"]["kv_slots"] == 420_896 and origins["engine.kv_slots"] == "server.log:5"
    assert scenario["hardware"]["graph_sizes"] == [1, 2, 4, 8]
    assert origins["hardware.graph_sizes"] == "server.log:2"
    assert scenario["hardware"]["release"] == "0.18.1" and origins["hardware.release"] == "server.log:1"
    assert "engine.kv_slots = 420896 (line 5)" in said and "the log's pool has 420,896 tokens" in said
    assert "CONTRADICTION" not in said


def test_sglang_counts_the_draft_of_each_device_once(log, explained):
    scenario, origins, said = explained("--from-sglang", OF_SGLANG, "--server-log", log(SGLANG))
    assert scenario["engine"]["kv_slots"] == 298_447 and origins["engine.kv_slots"] == "server.log:8"
    assert scenario["hardware"]["graph_sizes"] == [1, 2, 4, 8, 12, 16, 24, 32]
    assert "CONTRADICTION" not in said


def test_the_last_pool_of_tensorrt_llm_counts_and_the_log_alone_names_server_and_release(log, explained):
    scenario, origins, _ = explained("--server-log", log(TRTLLM), *PLAIN)
    assert scenario["engine"]["kv_slots"] == 327_680 and origins["engine.kv_slots"] == "server.log:6"
    assert scenario["hardware"]["server"] == "trtllm-1.x" and origins["hardware.server"] == "server.log:1"
    assert scenario["hardware"]["graph_sizes"] == [1, 64]


def test_a_log_alone_names_model_and_devices(log, explained):
    scenario, origins, _ = explained("--server-log", log(SGLANG))
    assert scenario["model"]["target"] == "Qwen/Qwen3-8B" and scenario["hardware"]["tensor_parallel"] == 2
    assert origins["model.target"] == "server.log:1"


@pytest.mark.parametrize(("tokens", "slots"), [(2_500_000, None), (1_310_720, 1_310_720)])
def test_layers_with_a_window_take_the_bytes_unless_the_server_keeps_them_whole(log, explained, tokens, slots):
    text = f"Available KV cache memory: 20.00 GiB\nGPU KV cache size: {tokens:,} tokens\n"
    Path("config.json").write_text(json.dumps(WINDOWED))
    scenario, _, said = explained(
        *("--set", "model.target=config.json", "--set", "hardware.server=vllm-0.18", "--server-log", log(text), *PLAIN)
    )
    assert scenario["engine"]["kv_slots"] == slots
    expected = None if slots else pytest.approx(20 * 2**30 / 1e9, abs=1e-3)
    assert scenario["hardware"]["kv_gb"] == expected and f"the log's pool has {tokens:,} tokens" in said


def test_the_least_memory_of_several_devices_counts_and_of_several_starts_the_last(log, explained):
    of_two = VLLM.replace("GPU KV cache size: 420,896", "GPU KV cache size: 425,000")
    lines = f"{VLLM}{of_two}(EngineCore_DP1 pid=28) INFO [kv_cache_utils.py:1087] GPU KV cache size: 424,000 tokens\n"
    scenario, _, said = explained("--from-vllm", SERVE, "--server-log", log(lines))
    assert scenario["engine"]["kv_slots"] == 424_000 and "1 earlier start" in said


def test_the_release_beside_the_signs_of_vllms_name_is_that_of_the_start(log, explained):
    """As servers begin their log since 0.14, here twice; the colours are of a terminal."""
    name = (
        "(APIServer pid=1) INFO 11-02 09:12:01 \x1b[93m  ▄▄\x1b[0m ▄█ █     █     █ ▀▄▀ █  version \x1b[1m{}\x1b[0m\n"
    )
    pool = "INFO 11-02 09:13:05 [kv_cache_utils.py:1087] GPU KV cache size: 420,896 tokens\n"
    text = name.format("0.17.0") + pool + name.format("0.18.1") + "INFO non-default args: {}\n" + pool
    scenario, origins, _ = explained("--from-vllm", SERVE, "--server-log", log(text))
    assert (scenario["hardware"]["release"], origins["hardware.release"]) == ("0.18.1", "server.log:3")


def test_what_set_gives_wins(log, explained):
    scenario, _, _ = explained("--from-vllm", SERVE, "--server-log", log(VLLM), "--set", "engine.kv_slots=4096")
    assert scenario["engine"]["kv_slots"] == 4096


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        (VLLM, ("--from-vllm", "vllm serve Qwen/Qwen3-8B"), "server.log:2: model: is meta-llama/Llama-3.1-8B-Instruct"),
        (VLLM, ("--from-vllm", f"{SERVE} -tp 2"), "server.log:2: tensor: is 1, and hardware.tensor_parallel is 2"),
        (
            VLLM,
            ("--from-vllm", "docker run vllm/vllm-openai:v0.21.0 --model meta-llama/Llama-3.1-8B-Instruct"),
            "server.log:1: release: is 0.18.1, and hardware.release is 0.21.0",
        ),
        (VLLM, ("--from-sglang", OF_SGLANG), "server: is vLLM's, and hardware.server is sglang-0.5"),
        (
            VLLM.replace("meta-llama/Llama-3.1-8B-Instruct", "/models/mine").replace("14.9889", "28.1"),
            ("--from-vllm", "vllm serve Qwen/Qwen3-8B"),
            "model: is /models/mine, which does not look like Qwen/Qwen3-8B: the weights take 28.10 GiB",
        ),
        (CUT, ("--from-vllm", "vllm serve Qwen/Qwen3-8B"), "server.log:2: model: is meta-llama/Llama-3.1-8B-Instruct"),
        ("INFO: Application startup complete.\n", (), "has no line of a server's start; expected lines of vLLM"),
        (VLLM + TRTLLM, (), "has the starts of vllm (line 1) and trtllm (line 6)"),
        (VLLM + "GPU KV cache size: 90,000 tokens\n", (), "kv_tokens: 420896 in line 5, 90000 in line 6"),
        (VLLM, ("--set", "disaggregation.prefill=1", "--set", "disaggregation.decode=1"), "is the log of one server"),
    ],
)
def test_another_server_model_release_or_size_is_refused(log, command, text, arguments, expected):
    outcome = command("simulate", "--explain", "--server-log", log(text), *arguments)
    assert outcome.code == 2 and not outcome.out
    assert expected in " ".join(outcome.err.splitlines()[-5:])


def test_other_weights_another_kv_format_and_a_draft_are_said(log, explained):
    text = VLLM.replace("14.9889", "8.49").replace("420,896", "841,792")
    _, _, said = explained("--from-vllm", SERVE, "--server-log", log(text), "--set", "speculation.algorithm=EAGLE3")
    assert "CONTRADICTION: the weights take 8.49 GiB of a device (server.log:3)" in said
    assert "CONTRADICTION: a token takes 65,537 B of the pool (server.log:5)" in said
    assert "CONTRADICTION: the server of the log does not draft" in said


def test_doctor_takes_the_pool(log, command):
    outcome = command("doctor", "--from-vllm", SERVE, "--server-log", log(VLLM))
    assert "420,896 tokens (engine.kv_slots)" in outcome.out and "does not speculate" in outcome.out


def test_a_plan_takes_the_pool_for_the_devices_of_the_log_alone(log):
    from foredraft.planning.candidates.candidate import make_candidates
    from foredraft.planning.servers.started.measured import with_log
    from foredraft.planning.servers.started.start_log import read_start_log
    from foredraft.sim.scenario_file import load_scenario

    given, _ = with_log(read_start_log(log(VLLM)), None, (), {})
    scenario, _ = load_scenario(None, (), given)
    sizes = {
        one.settings["hardware.tensor_parallel"]: one.settings.get("engine.kv_slots", scenario.engine.kv_slots)
        for one in make_candidates(scenario, {}, 2, ["engine.kv_slots"])
    }
    assert sizes == {1: 420_896, 2: None}
