"""A model that drafts with layers of its own checkpoint: each is a layer of the model, experts and all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from foredraft.core.errors import ConfigError
from foredraft.core.model_shape import built_in_config, prediction_layer, prediction_layers, read_model_shape
from foredraft.sim.assembly import Assembly, assemble
from foredraft.sim.scenario_file import load_scenario

DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "vocab_size": 129280, "max_position_embeddings": 163840,
    "num_nextn_predict_layers": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
QWEN: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text", "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "vocab_size": 1000,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2, "max_position_embeddings": 4096,
    "mtp_num_hidden_layers": 1,
}  # fmt: skip
FLASH: dict[str, Any] = {
    "model_type": "mimo_v2_flash", "hidden_size": 256, "num_hidden_layers": 3, "hybrid_layer_pattern": [0, 1, 1],
    "moe_layer_freq": [0, 1, 1], "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 48, "v_head_dim": 32,
    "swa_num_attention_heads": 8, "swa_num_key_value_heads": 2, "swa_head_dim": 48, "swa_v_head_dim": 32,
    "sliding_window": 128, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 4096,
}  # fmt: skip


def shape_of(config: dict[str, Any]):
    return read_model_shape(config, "config.json", "the model")


def run_of(folder: Path, config: dict[str, Any], *settings: str) -> Assembly:
    (folder / "config.json").write_text(json.dumps(config))
    given = [f"model.target={folder}", "speculation.algorithm=EAGLE", "engine.kv_slots=1000", *settings]
    return assemble(load_scenario(None, given)[0])


def test_the_layer_of_deepseek_v3(tmp_path: Path):
    draft = run_of(tmp_path, DEEPSEEK, "hardware.tensor_parallel=8").draft
    assert draft is not None and draft.body is not None and draft.body.experts is not None
    attention = 7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168 + 1536 + 512
    experts = 257 * 3 * 7168 * 2048 + 7168 * 256
    assert draft.parameters == attention + experts + 2 * 7168 + 2 * 7168 * 7168
    assert round(draft.parameters / 1e9, 1) == 11.6
    assert (draft.kv_bytes_per_token, draft.body.experts.count) == (576 * 2, 256)


def test_experts_of_the_layer_are_divided_among_all_devices(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK | FP8))
    parallel = ["hardware.attention_data_parallel=8", "hardware.expert_parallel=8", "hardware.gpu=H200"]
    settings = [f"model.target={tmp_path}", "speculation.algorithm=EAGLE", *parallel]
    run = assemble(load_scenario(None, settings)[0])
    assert run.memory is not None and run.draft is not None
    expert = 3 * 7168 * 2048
    rest = run.draft.parameters - 256 * expert
    assert run.memory.draft_weights_bytes == rest + 32 * expert


@pytest.mark.parametrize(
    ("config", "count", "kv", "width"),
    [
        (QWEN, 1, 2 * 2 * 64 * 2, 2 * 128 + 128),
        (QWEN | {"mtp_num_hidden_layers": 0}, 0, None, None),
        (FLASH, 1, 2 * (48 + 32) * 2, 512),  # a window, and a dense MLP
        (built_in_config("qwen3-8b")[1] | {"num_nextn_predict_layers": 2}, 2, 2 * 8 * 128 * 2, 12288),
        (built_in_config("glm-4.5-air")[1], 1, 2 * 8 * 128 * 2, 9 * 1408),
        (built_in_config("qwen3-next-80b-a3b")[1], 1, 2 * 2 * 256 * 2, 11 * 512),
        (built_in_config("llama-3.1-8b")[1], 0, None, None),
    ],
)
def test_which_layer_drafts(config: dict[str, Any], count: int, kv: int | None, width: int | None):
    model = shape_of(dict(config))
    assert prediction_layers(model) == count
    if count:
        layer = prediction_layer(model)
        ((mlp, one),) = layer.mlps
        active = mlp.active_parameters(model.hidden) - (mlp.router_parameters(model.hidden) if layer.experts else 0)
        assert (layer.kv_bytes_per_token, one, active) == (kv, 1, 3 * width * model.hidden)


@pytest.mark.parametrize(
    ("config", "kept", "expected"),
    [
        (DEEPSEEK, [], "nvfp4"),
        (DEEPSEEK, ["model.layers.61*"], "bf16"),
        (DEEPSEEK, ["model.layers.60*"], "nvfp4"),
        (DEEPSEEK, ["model.layers.61.mlp.experts"], "bf16"),
        (QWEN, [], "nvfp4"),
        (QWEN, ["mtp.layers.0*"], "bf16"),
        (QWEN, ["mtp*"], "bf16"),
        (QWEN, ["model.layers.0.mlp.experts"], "nvfp4"),  # of the model's own layer 0
    ],
)
def test_the_layer_has_the_format_that_the_checkpoint_gives_it(config: dict[str, Any], kept: list[str], expected: str):
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": kept}
    model = shape_of(config | {"quantization_config": quantization})
    assert prediction_layer(model).weight_dtype == expected
    assert model.weight_dtype.startswith("nvfp4")


def test_a_scenario_asks_for_other_weights_of_the_layer_too(tmp_path: Path):
    draft = run_of(tmp_path, DEEPSEEK, "model.weight_dtype=fp8", "hardware.tensor_parallel=8").draft
    assert draft is not None and draft.body is not None and draft.body.weight_dtype == "fp8"


def test_a_checkpoint_of_the_layer_alone(tmp_path: Path):
    head = tmp_path / "layer"
    head.mkdir()
    config = DEEPSEEK | {"architectures": ["DeepseekV3ForCausalLMNextN"], "num_hidden_layers": 1}
    (head / "config.json").write_text(json.dumps(config))
    settings = (f"model.draft={head}", "hardware.tensor_parallel=8")
    draft = run_of(tmp_path, DEEPSEEK, *settings).draft
    assert draft is not None and round(draft.parameters / 1e9, 1) == 11.6
    (head / "config.json").write_text(json.dumps(config | {"hidden_size": 4096}))
    with pytest.raises(ConfigError, match=r"layer/config.json: hidden_size: is 4096, that of .* is 7168"):
        run_of(tmp_path, DEEPSEEK, *settings)
    # A head of EAGLE for such a model is one.
    plain = {key: value for key, value in DEEPSEEK.items() if key != "num_nextn_predict_layers"}
    plain |= {"model_type": "llama", "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
    (head / "config.json").write_text(json.dumps(plain | {"num_key_value_heads": 128, "head_dim": 128}))
    eagle = run_of(tmp_path, DEEPSEEK, *settings).draft
    assert eagle is not None and eagle.kv_bytes_per_token == 2 * 128 * 128 * 2
