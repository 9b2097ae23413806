"""The KV pools that servers logged when they started, beside ours: model, server, flags, and where the line stands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from foredraft.core.errors import ForedraftError
from foredraft.planning.servers.launch import read_launch
from foredraft.sim.assembly import Assembly, assemble
from foredraft.sim.assembly.explaining import capacity_lines
from foredraft.sim.cost.hardware import GIB
from foredraft.sim.effects.notices import notices_of
from foredraft.sim.scenario_file import load_scenario

GPT_OSS = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "intermediate_size": 2880,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "sliding_window": 128,
    "num_experts_per_tok": 4, "max_position_embeddings": 131072, "tie_word_embeddings": False, "attention_bias": True,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
    },
}  # fmt: skip
GEMMA4 = {
    "model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "hidden_size": 5376, "num_hidden_layers": 60,
    "intermediate_size": 21504, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256,
    "num_global_key_value_heads": 4, "global_head_dim": 512, "attention_k_eq_v": True, "sliding_window": 1024,
    "vocab_size": 262144, "max_position_embeddings": 262144, "tie_word_embeddings": True, "enable_moe_block": False,
    "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
    "mistral-24b": {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], "hidden_size": 5120, "num_hidden_layers": 40,
        "intermediate_size": 32768, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 131072, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    },
    "qwen3-235b-a22b": {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 4096,
        "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
        "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8,
        "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": False,
    },
    "gemma4-31b": GEMMA4,
}  # fmt: skip
EMPIRICAL = "--max-model-len 16000 --block-size 128"
"""llm-d/llm-d-benchmark, config_explorer/empirical-vllm-memory-results.md: one H100, 0.9 of its memory."""
SHARE = "--gpu-memory-utilization 0.9"
FP8 = "--quantization fp8 --kv-cache-dtype bfloat16"

VLLM = [  # command, GPU, GiB of KV that vLLM logged; each within 8 %
    (f"serve llama-3.1-8b {EMPIRICAL} --gpu-memory-utilization 0.9", "H100", 51.38),
    (f"serve gpt-oss-20b {EMPIRICAL} --gpu-memory-utilization 0.9", "H100", 50.28),
    (f"serve gpt-oss-120b {EMPIRICAL} --gpu-memory-utilization 0.9", "H100", 3.33),
    # The parts that the source lists for it sum to 0.95 of the memory.
    (f"run:v0.12.0 --model gpt-oss-120b {EMPIRICAL} --gpu-memory-utilization 0.95", "H100", 3.33),
    (f"serve llama-3.3-70b {FP8} -tp 2 {EMPIRICAL} --gpu-memory-utilization 0.9", "H100", 32.0),
    (f"serve qwen3-0.6b {EMPIRICAL} --gpu-memory-utilization 0.9", "H100", 64.45),
    (f"serve qwen3-0.6b {EMPIRICAL} --max-model-len 32000 --gpu-memory-utilization 0.9", "H100", 64.45),
    (f"serve qwen3-32b {EMPIRICAL} --gpu-memory-utilization 0.9", "H100", 4.45),
    (f"serve qwen3-32b -tp 2 {EMPIRICAL} --gpu-memory-utilization 0.9", "H100", 34.49),
    (f"run:v0.11.0 --model mistral-24b {EMPIRICAL} --gpu-memory-utilization 0.95", "H100", 28.20),
    # vllm-project/vllm issues 27508, 23278 (-2.14 GiB at 0.9; here with 0.05 of 79.18 GiB more), neither in an image
    (
        "pip:0.11.0 gpt-oss-120b --gpu-memory-utilization 0.95 --max-num-batched-tokens 1024 --max-model-len 4096",
        "H100",
        1.71,
    ),
    ("pip:0.10.1 gpt-oss-120b --gpu-memory-utilization 0.95 --max-model-len 4096", "H100", 1.82),
    ("serve qwen3.5-35b-a3b -tp 4 --gpu-memory-utilization 0.85", "H100", 43.4),  # vllm-project/vllm issue 50722
    ("serve gemma4-31b --max-model-len 262144", "H200", 64.68),  # the log of a release from 0.21 on
    ("run:v0.21.0 --model gemma4-31b --max-model-len 262144", "H200", 64.68),
]
HYBRID = {
    "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 248320, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4, "max_position_embeddings": 262144, "tie_word_embeddings": False,
    "attn_output_gate": True, "mamba_ssm_dtype": "float32",
}  # fmt: skip
MODELS |= {
    "deepseek-v3": {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "first_k_dense_replace": 3, "vocab_size": 129280, "max_position_embeddings": 163840,
        "tie_word_embeddings": False, "num_nextn_predict_layers": 1,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    },
    "qwen3.5-27b": HYBRID | {
        "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4,
        "intermediate_size": 17408, "linear_num_value_heads": 48,
    },
    "qwen3.5-35b-a3b": HYBRID | {
        "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"], "hidden_size": 2048,
        "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_value_heads": 32,
        "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
}  # fmt: skip
CAPACITY = [  # command, GPU, GiB of KV, tokens and requests of the whole context that vLLM logged; each within 1 %
    # noonghunna/club-3090 issue 612, vLLM 0.24.0
    ("run:v0.24.0 --model qwen3.5-35b-a3b --max-model-len 131072 --kv-cache-dtype fp8", "H200", 5.98, 567_978, 4.33),
    # vllm-project/vllm issue 40691, vLLM 0.19.0: its 1,487 blocks have 784 tokens of 16 layers
    ("run:v0.19.0 --model qwen3.5-27b --max-model-len 32768 --max-num-batched-tokens 16384 --no-enable-prefix-caching",
     "H200", 71.16, 290_864, 33.04),
    # the log of a release from 0.21 on
    ("run:v0.21.0 --model gemma4-31b --max-model-len 262144", "H200", 64.68, 626_949, 2.39),
    ("serve gemma4-31b --max-model-len 262144", "H200", 64.68, 626_949, 2.39),
]  # fmt: skip
SGLANG = [  # command, GPU, tokens that SGLang logged; each within 4 %
    # vllm-project/vllm issue 21348
    ("--model-path qwen3-235b-a22b --quantization fp8 --tp 4 --mem-fraction-static 0.93", "H100", 367_404),
    # sgl-project/sglang pull 11716
    ("--model-path llama-3.1-70b --tp 8", "H200", 2_795_207),
    # ai-dynamo/aisimulate pull 263: DeepSeek-R1, "~509k"
    ("--model-path deepseek-v3 --tp 8 --mem-fraction-static 0.82 --chunked-prefill-size 32768", "H200", 509_000),
]


def assembled(folder: Path, server: str, command: str, gpu: str) -> Assembly:
    for name, config in MODELS.items():
        if name in command:
            (folder / name).mkdir(exist_ok=True)
            (folder / name / "config.json").write_text(json.dumps(config))
            command = command.replace(name, str(folder / name))
    launch = read_launch(server, command, "command", gpu)
    scenario, _ = load_scenario(None, [f"hardware.gpu={gpu}"], {"command": launch.settings})
    return assemble(scenario)


def vllm(command: str) -> str:
    first, _, rest = command.partition(" ")
    if first.startswith("pip:"):
        return f"pip install vllm=={first[4:]} && vllm serve {rest}"
    return f"docker run vllm/vllm-openai:{first[4:]} {rest}" if first.startswith("run:") else f"vllm {command}"


@pytest.mark.parametrize("command, gpu, gib", VLLM, ids=[row[0].partition(" -")[0] + f" {row[2]}" for row in VLLM])
def test_vllm_leaves_as_much_to_kv_as_it_logged(tmp_path, command, gpu, gib):
    found = assembled(tmp_path, "vllm", vllm(command), gpu)
    # What is left of 79 GiB is known to 0.2 GiB at best.
    assert found.memory.kv_pool_bytes / GIB == pytest.approx(gib, rel=0.08, abs=0.2)


@pytest.mark.parametrize("command, gpu, gib, tokens, requests", CAPACITY)
def test_vllm_tells_the_size_of_a_pool_as_here(tmp_path, command, gpu, gib, tokens, requests):
    found = assembled(tmp_path, "vllm", f"{vllm(command)} --kv-cache-memory-bytes {int(gib * GIB)}", gpu)
    assert found.memory.capacity(found.spec.config) == (
        pytest.approx(tokens, rel=0.01),
        pytest.approx(requests, rel=0.01),
    )


@pytest.mark.parametrize("command, gpu, tokens", SGLANG)
def test_sglang_has_as_many_tokens_as_it_logged(tmp_path, command, gpu, tokens):
    found = assembled(tmp_path, "sglang", f"python -m sglang.launch_server {command}", gpu)
    assert found.memory.slots == pytest.approx(tokens, rel=0.04)


def test_what_does_not_start_in_some_release_may_not_start(tmp_path):
    """Weights of 67.72 GiB left nothing on one H100; in 0.11.0 there would be little."""
    command = f"vllm serve llama-3.3-70b {FP8} {EMPIRICAL} --gpu-memory-utilization 0.9"
    notices = [text for text in notices_of(assembled(tmp_path, "vllm", command, "H100"), {}) if "start" in text]
    assert len(notices) == 1 and notices[0].startswith("vllm-0.18 may not start")
    with pytest.raises(ForedraftError, match="does not fit"):
        assembled(
            tmp_path, "vllm", command.replace("vllm serve", "docker run vllm/vllm-openai:v0.12.0 --model"), "H100"
        )
    for length, starts in ((16000, True), (32000, False)):
        command = f"vllm serve qwen3-32b --max-model-len {length} --gpu-memory-utilization 0.9"
        notices = [text for text in notices_of(assembled(tmp_path, "vllm", command, "H100"), {}) if "start" in text]
        assert not notices if starts else "may not start" in notices[0], "as logged"


def test_more_requests_than_there_are_blocks_for_their_states_do_not_start(tmp_path):
    """2,162,688 bytes for a state of each of 10 layers, in 1,056 tokens of theirs."""
    command = "vllm serve qwen3.5-35b-a3b --max-model-len 32768 --kv-cache-memory-bytes 4G"

    def told(more):
        notices = notices_of(assembled(tmp_path, "vllm", f"{command} {more}", "H100"), {})
        return [text for text in notices if "blocks for their states" in text]

    blocks = (4 << 30) // (10 * 1056 * 2048)
    (notice,) = told("")
    assert notice.startswith(f"vllm-0.18 does not start: 1,024 requests may run, and the KV pool has {blocks} blocks")
    assert not told(f"--max-num-seqs {blocks}") and told(f"--max-num-seqs {blocks + 1}")
    assert not told("--enforce-eager") and not told("--compilation-config.cudagraph_mode PIECEWISE")


def test_a_named_release_says_which_rules_hold(tmp_path):
    pools = {
        release: assembled(
            tmp_path, "vllm", f"docker run vllm/vllm-openai:v{release} --model llama-3.1-8b {SHARE}", "H100"
        ).memory
        for release in ("0.11.0", "0.16.0", "0.17.1", "0.21.0", "0.33.0")
    }
    assert pools["0.16.0"].kv_pool_bytes < pools["0.11.0"].kv_pool_bytes < pools["0.17.1"].kv_pool_bytes
    assert pools["0.17.1"].graphs_bytes == 0 < pools["0.21.0"].graphs_bytes
    assert pools["0.33.0"] == pools["0.21.0"]
    unnamed = assembled(tmp_path, "vllm", f"vllm serve llama-3.1-8b {SHARE}", "H100")
    assert unnamed.memory == pools["0.16.0"], "the one that takes most"


def test_a_release_on_the_command_line_is_a_text():
    scenario, _ = load_scenario(None, ["hardware.server=vllm-0.18", "hardware.release=0.20"])
    assert scenario.hardware.release == "0.20", "not 0.2"


@pytest.mark.parametrize("first, reserved", [
    ("pip install vllm==0.20.2 && vllm serve", 0.1), ("pip install vllm==0.21.0 && vllm serve", 0.08), ("vllm serve", 0.08),
])  # fmt: skip
def test_the_default_share_is_that_of_the_release(first, reserved):
    assert (
        read_launch("vllm", f"{first} llama-3.1-8b", "command", "H100").settings["hardware.reserved_fraction"]
        == reserved
    )


def test_the_release_of_the_scenario_gives_the_default_share_too():
    settings = read_launch("vllm", "vllm serve llama-3.1-8b", "command", "H100", release="0.18").settings
    assert settings["hardware.reserved_fraction"] == 0.1 and "hardware.release" not in settings


def test_an_image_of_that_time_samples_with_flashinfer_and_a_package_does_not(tmp_path):
    commands = [
        f"{first} llama-3.1-8b"
        for first in ("docker run vllm/vllm-openai:v0.10.1 --model", "pip install vllm==0.10.1 && vllm serve")
    ]
    image, package = (assembled(tmp_path, "vllm", command, "H100").memory for command in commands)
    assert image.kv_pool_bytes - package.kv_pool_bytes > 1.5 * GIB


def test_the_flags_of_sglang_give_the_proportions_of_its_pools():
    command = "python -m sglang.launch_server --model-path llama-3.1-8b --swa-full-tokens-ratio 0.3 --mamba-full-memory-ratio 0.5"
    launch = read_launch("sglang", command, "command", "H100")
    assert (launch.settings["hardware.window_ratio"], launch.settings["hardware.state_ratio"]) == (0.3, 0.5)
    assert not launch.not_modelled


DEFAULTS = [  # a card's command, GPU, and what a log says of it
    ("vllm serve google/gemma-4-31B-it", "H200", (64.68, 626_949)),
    ("vllm serve Qwen/Qwen3.5-35B-A3B", "H200", None),
    ("vllm serve Qwen/Qwen3.5-27B", "H200", None),
    ("vllm serve openai/gpt-oss-120b", "H100", None),
    ("vllm serve deepseek-ai/DeepSeek-V3 --tensor-parallel-size 8", "H200", None),
    ("vllm serve deepseek-ai/DeepSeek-V3-0324 --tensor-parallel-size 8", "H200", None),
    ("vllm serve moonshotai/Kimi-K2-Instruct --tensor-parallel-size 16", "H200", None),
    ("vllm serve meta-llama/Llama-3.1-8B-Instruct", "H100", None),
]


@pytest.mark.parametrize(("command", "gpu", "log"), DEFAULTS)
def test_a_command_as_it_is_published_has_the_servers_lines(command: str, gpu: str, log: tuple[float, int] | None):
    """By the model's name on Hugging Face: no file of it is here."""
    launch = read_launch("vllm", command, "command", gpu)
    run = assemble(load_scenario(None, [f"hardware.gpu={gpu}"], {"command": launch.settings})[0])
    tokens, requests = run.memory.capacity(run.spec.config)
    _, pool, size, most = capacity_lines(run)
    assert f"GPU KV cache size: {tokens:,} tokens" in size and f"{requests:.2f}x" in most and requests >= 1
    if log is not None:
        gib = run.memory.kv_pool_bytes / GIB
        assert gib == pytest.approx(log[0], rel=0.08) and f"{gib:.2f} GiB" in pool
        assert tokens / gib == pytest.approx(log[1] / log[0], rel=0.01)
