"""Configurations: what is read, what is refused, and rotary tables against their formulas."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest
import torch
from family_shapes import SHAPES
from foredraft.core.errors import ConfigError
from foredraft.gpu.models.config import LLAMA, QWEN3_MOE, ModelConfig, MoeConfig
from foredraft.gpu.models.heads.config import EAGLE, EAGLE3, MULTI_LAYER_EAGLE, HeadConfig
from foredraft.gpu.models.rope import Rope, cos_sin_table

QWEN2 = "Qwen2ForCausalLM"
MINIMAL = {
    "architectures": [LLAMA],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
}


def refused(data: dict, *keys: str) -> str:
    """The message of the error, which must name exactly `keys`."""
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(data, "some/config.json")
    assert [problem.key for problem in caught.value.problems] == list(keys), str(caught.value)
    assert str(caught.value).startswith("some/config.json: ")
    return str(caught.value)


def test_defaults_of_a_short_file():
    config = ModelConfig.from_dict(MINIMAL)
    assert (config.num_kv_heads, config.head_dim, config.rope, config.dtype) == (4, 16, Rope(), torch.float32)
    assert not (config.qkv_bias or config.qk_norm or config.tied_embeddings or config.eos_token_ids)


def test_what_each_architecture_implies():
    qwen2 = ModelConfig.from_dict(MINIMAL | {"architectures": [QWEN2]})
    assert qwen2.qkv_bias and not qwen2.output_bias
    llama = ModelConfig.from_dict(MINIMAL | {"attention_bias": True})
    assert llama.qkv_bias and llama.output_bias
    assert ModelConfig.from_dict(MINIMAL | {"architectures": ["Qwen3ForCausalLM"]}).head_dim == 128
    keys = {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]}
    moe = ModelConfig.from_dict(MINIMAL | {"architectures": [QWEN3_MOE], "decoder_sparse_step": 2} | keys)
    assert moe.moe == MoeConfig(8, 2, 32, False, 2, (1,)) and moe.qk_norm
    assert moe.moe_layers == (3, 5, 7) and moe.num_moe_layers == 3


def test_windows_beyond_the_context():
    """They hide nothing; but Gemma 3 rotates the layers that have one by another frequency."""
    mistral = MINIMAL | {"architectures": ["MistralForCausalLM"], "sliding_window": 4096}
    config = ModelConfig.from_dict(mistral | {"max_position_embeddings": 4096})
    assert (config.window, config.windowed_layers) == (0, ())
    gemma = MINIMAL | {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 4096, "max_position_embeddings": 64}
    config = ModelConfig.from_dict(gemma)
    assert config.local_rope == Rope(1e4) and config.windowed_layers == (0, 1, 2, 3, 4, 6, 7)


def test_old_and_new_spelling_of_rotary_parameters_and_dtype():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}, "torch_dtype": "bfloat16"}
    new = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **scaling}, "dtype": "bfloat16"}
    assert ModelConfig.from_dict(MINIMAL | old) == ModelConfig.from_dict(MINIMAL | new)
    assert ModelConfig.from_dict(MINIMAL | old).rope == Rope(5e5, "llama3", 8.0, 8192)
    plain = MINIMAL | {"rope_theta": 7.0, "rope_scaling": None}
    assert ModelConfig.from_dict(plain).rope == Rope(7.0)


def test_all_problems_at_once_with_file_and_key():
    data = MINIMAL | {"hidden_size": "64", "num_key_value_heads": 3, "hidden_act": "gelu", "tie_word_embeddings": 1}
    del data["vocab_size"]
    message = refused(data, "hidden_size", "num_key_value_heads", "vocab_size", "tie_word_embeddings", "hidden_act")
    assert "must be a whole number, got '64'" in message


HYBRID = {"qwen3_next", "qwen3_5"}


@pytest.mark.parametrize("label", sorted(HYBRID))
@pytest.mark.parametrize(
    "change, message",
    [
        ({"linear_num_value_heads": None}, "linear_num_value_heads: is missing"),
        ({"linear_key_head_dim": None, "linear_conv_kernel_dim": None}, "linear_key_head_dim: is missing.*conv_kernel"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads: 3 value heads cannot share 2 key heads evenly"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim: expected at least 2, got 1"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types: expected at least one layer with full_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types: must be a list with an entry for each of 4 layers"),
        (
            {"layer_types": ["mamba"] * 4},
            "layer_types: expected only full_attention and linear_attention, found 'mamba'",
        ),
        ({"attn_output_gate": False}, "attn_output_gate: attention without a gate"),
    ],
)
def test_a_hybrid_checkpoint_says_its_states(label: str, change: dict, message: str):
    with pytest.raises(ConfigError, match=re.compile(message, re.DOTALL)):
        ModelConfig.from_dict({**SHAPES[label].to_dict(), **change})


@pytest.mark.parametrize("label", ["qwen3_next", "glm4", "glm4_moe", "phi3"])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_how_much_of_a_head_is_rotated_is_written_whatever_it_is(label: str, fraction: float):
    shape = replace(SHAPES[label], rope=replace(SHAPES[label].rope, fraction=fraction, scaling="default"))
    assert ModelConfig.from_dict(shape.to_dict()).rope.fraction == fraction


def test_three_of_four_layers_are_recurrent_if_the_file_does_not_say_which():
    data = SHAPES["qwen3_5"].to_dict()
    del data["layer_types"]
    assert ModelConfig.from_dict(data).recurrent_layers == (0, 1, 2)
    assert ModelConfig.from_dict(data | {"full_attention_interval": 2}).recurrent_layers == (0, 2)


@pytest.mark.parametrize("architecture", ["DeepseekV32ForCausalLM", "KimiLinearForCausalLM", "MiniMaxM2ForCausalLM"])
def test_families_of_the_simulator_are_refused_for_what_they_are(architecture):
    message = refused(MINIMAL | {"architectures": [architecture]}, "architectures")
    assert "only `foredraft simulate` knows this family" in message and "did you mean" not in message


def test_unknown_architectures_name_the_known_ones_and_suggest_none():
    message = refused(MINIMAL | {"architectures": ["LlamaForCausalLm"]}, "architectures")
    assert "Qwen3MoeForCausalLM" in message and "did you mean" not in message
    refused({key: value for key, value in MINIMAL.items() if key != "architectures"}, "architectures")


def test_a_checkpoint_under_another_familys_name_is_refused():
    """As a Llama, a Mistral would load, and see too much."""
    assert "'mistral'" in refused(MINIMAL | {"model_type": "mistral"}, "architectures")
    refused(MINIMAL | {"sliding_window": 4096}, "sliding_window")
    assert not ModelConfig.from_dict(MINIMAL | {"model_type": "llama", "sliding_window": None}).window


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rope_scaling": {"type": "dynamic"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_scaling.type"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1] * 8}}, "rope_parameters.long_factor"),
        ({"rope_scaling": {"rope_type": "default", "llama_4_scaling_beta": 0.1}}, "rope_scaling.llama_4_scaling_beta"),
        ({"no_rope_layers": [1, 1, 0]}, "no_rope_layers"),
        ({"layer_types": ["full_attention", "linear_attention"] * 4}, "layer_types"),
        ({"residual_multiplier": 0.5}, "residual_multiplier"),
        ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "rope_scaling.factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"torch_dtype": "int8"}, "torch_dtype"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id"),
        ({"head_dim": 15}, "head_dim"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ],
)
def test_refused(changes: dict, key: str):
    refused(MINIMAL | changes, key)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_formats_of_heads_that_are_not_read_are_refused_by_their_method(key):
    with pytest.raises(ConfigError, match=f"{key}.quant_method"):
        HeadConfig.from_dict(HEAD | {key: {"quant_method": "hqq"}}, EAGLE3, TARGET)


def test_heads_are_quantized_by_the_file_beside_the_configuration(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HEAD))
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    found = HeadConfig.from_directory(tmp_path, EAGLE3, TARGET).quantization
    assert found is not None and found.scheme.base == "nvfp4"


LATENT = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"n_routed_experts": None}, "n_routed_experts"),
        ({"n_group": 3}, "n_group"),
        ({"sliding_window": 64}, "sliding_window"),
    ],
)
def test_glm_moe_with_other_parts_is_refused(changes: dict, key: str):
    data = SHAPES["glm4_moe"].to_dict()
    assert ModelConfig.from_dict(data) == SHAPES["glm4_moe"]
    refused(data | changes, key)


@pytest.mark.parametrize(
    ("architecture", "changes", "key"),
    [
        ("DeepseekV2ForCausalLM", {"scoring_func": "sigmoid"}, "scoring_func"),
        ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "topk_method"),
        ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("DeepseekV2ForCausalLM", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, "scoring_func"),
        ("DeepseekV3ForCausalLM", {"n_group": 3}, "n_group"),
        ("DeepseekV3ForCausalLM", {"kv_lora_rank": 15}, "kv_lora_rank"),
        ("DeepseekV3ForCausalLM", {"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
        ("DeepseekV3ForCausalLM", {"qk_rope_head_dim": None}, "qk_rope_head_dim"),
        ("DeepseekV3ForCausalLM", {"index_topk": 64}, "index_topk"),
    ],
)
def test_latent_attention_with_other_parts_is_refused(architecture: str, changes: dict, key: str):
    data = MINIMAL | {"architectures": [architecture]} | LATENT
    config = ModelConfig.from_dict(data | {"n_group": 4, "topk_group": 2, "topk_method": "greedy"})
    assert config.moe.num_groups == (1 if architecture.startswith("DeepseekV2") else 4)
    assert (config.head_dim, config.num_kv_heads, config.attention_scale) == (24, 1, 0.25)
    refused(data | changes, key)


ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default"},
}
GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"],
    "sliding_window": 16,
    "hidden_size_per_layer_input": 0,
    "rope_parameters": ROPES,
}


def test_a_key_of_sizes_that_is_not_read_is_refused():
    refused(MINIMAL | {"architectures": [QWEN2], "num_shared_heads": 2}, "num_shared_heads")
    refused(MINIMAL | {"architectures": [LLAMA], "hidden_size_per_layer_input": 64}, "hidden_size_per_layer_input")
    ModelConfig.from_dict(MINIMAL | {"architectures": [LLAMA], "embedding_init_size": 3, "num_shared_heads": None})


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters"),
        ({"enable_moe_block": True}, "enable_moe_block"),
        ({"per_layer_config": {"3": {"head_dim": 32}}}, "per_layer_config"),
        ({"per_layer_config": {"5": {"head_dim": "32"}, "7": {"head_dim": "32"}}}, "per_layer_config"),
        ({"global_head_dim": 31}, "global_head_dim"),
    ],
)
def test_gemma4_with_other_parts_is_refused(changes: dict, key: str):
    config = ModelConfig.from_dict(MINIMAL | GEMMA4)
    assert [config.heads_of(i).dim for i in range(8)] == [16] * 5 + [512] + [16] + [512]
    refused(MINIMAL | GEMMA4 | changes, key)


def test_inactive_sliding_windows_are_no_obstacle():
    def window(**changes) -> tuple[int, tuple[int, ...]]:
        config = ModelConfig.from_dict(MINIMAL | {"architectures": [QWEN2], "sliding_window": 64} | changes)
        return config.window, config.windowed_layers

    for changes in (
        {"use_sliding_window": False},
        {"use_sliding_window": True, "max_window_layers": 8},
        {"sliding_window": None, "use_sliding_window": True},
        {"use_sliding_window": True, "layer_types": ["full_attention"] * 8},
        {"use_sliding_window": True, "sliding_window": 2048, "max_window_layers": 0},  # as long as the context
    ):
        assert window(**changes) == (0, ())
    assert window(use_sliding_window=True, max_window_layers=6) == (64, (6, 7))


def test_files(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(MINIMAL | {"eos_token_id": 3}))
    assert ModelConfig.from_directory(tmp_path).eos_token_ids == (3,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    assert ModelConfig.from_directory(tmp_path).eos_token_ids == (3, 5)


def test_a_table_without_values_is_not_computed(monkeypatch):
    """On the meta device that would load torch's compiler, at every start."""

    def computed(*given, **more):
        raise AssertionError("computed")

    monkeypatch.setattr(torch, "arange", computed)
    table = cos_sin_table(Rope(100.0), 8, 50, "meta")
    assert (table.shape, table.dtype, table.is_meta) == ((50, 8), torch.float32, True)


def test_yarn_folds_its_attention_factor_into_the_table():
    config = ModelConfig.from_dict(
        MINIMAL
        | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}}
        | {"max_position_embeddings": 2048}
    )
    expected = 0.1 * math.log(4.0) + 1
    assert cos_sin_table(config.rope, 16, 1)[0, 0].item() == pytest.approx(expected)
    mscales = {"type": "yarn", "factor": 4.0, "mscale": 2.0, "mscale_all_dim": 1.0}
    config = ModelConfig.from_dict(MINIMAL | {"rope_scaling": mscales})
    assert config.rope.attention_factor == pytest.approx((0.2 * math.log(4.0) + 1) / expected)
    assert config.rope.original_max_position == 2048
    inferred = {"type": "yarn", "factor": None, "original_max_position_embeddings": 512}
    assert ModelConfig.from_dict(MINIMAL | {"rope_scaling": inferred}).rope.factor == 4.0


# -- draft heads -------------------------------------------------------------------------------------------------------

TARGET = ModelConfig.from_dict(MINIMAL)
HEAD = MINIMAL | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 40}


def test_layers_are_counted_by_output_inside_eagle_config_and_by_input_outside():
    ids = "eagle_aux_hidden_state_layer_ids"
    assert HeadConfig.from_dict(HEAD, EAGLE3, TARGET).aux_layers == (2, 4, 5)
    assert HeadConfig.from_dict(HEAD | {"eagle_config": {ids: [1, 3, 6]}}, EAGLE3, TARGET).aux_layers == (2, 4, 7)
    assert HeadConfig.from_dict(HEAD | {ids: [1, 3, 6]}, EAGLE3, TARGET).aux_layers == (1, 3, 6)
    assert HeadConfig.from_dict(HEAD | {"eagle_config": {ids: []}}, EAGLE3, TARGET).aux_layers == (2, 4, 5)
    for wrong in ([3, 1], [1, 1], [0, 9], "2", [1, "2"]):
        with pytest.raises(ConfigError, match=ids):
            HeadConfig.from_dict(HEAD | {ids: wrong}, EAGLE3, TARGET)


@pytest.mark.parametrize(
    ("algorithm", "changes", "message"),
    [
        (EAGLE3, {"vocab_size": 90}, "target has 100 tokens, the draft head 90"),
        (EAGLE3, {"draft_vocab_size": 101}, "101 of 100 tokens"),
        (EAGLE3, {"hidden_size": 32, "head_dim": 16}, "states of size 32, the target's have 64"),
        (
            EAGLE,
            {"hidden_size": 32, "head_dim": 16, "target_hidden_size": 64},
            "states of size 32, the target's have 64",
        ),
        (EAGLE3, {"target_hidden_size": 32}, "states of size 32, the target's have 64"),
        (EAGLE3, {"num_hidden_layers": 2}, "one layer each, got 2"),
        (EAGLE3, {"eagle_config": {"use_gated_fusion": True}}, "eagle_config.use_gated_fusion: true: this is not impl"),
        (EAGLE3, {"parallel_drafting": True}, "parallel_drafting: true"),
        (EAGLE3, {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state: false"),
        (
            EAGLE3,
            {"dflash_config": {"causal": False, "mask_token_id": 3}},
            "dflash_config: the draft is made for DFLASH, not for EAGLE3",
        ),
        (EAGLE, {"norm_output": True}, "norm_output: true: this is not implemented for EAGLE heads"),
        (EAGLE, {"layernorms": True}, "layernorms: true"),
        (EAGLE3, {"architectures": ["Qwen3MoeForCausalLM"]}, "heads have layers of llama, qwen2, qwen3"),
        (EAGLE3, {"architectures": None}, "must name one architecture"),
        (EAGLE, {"intermediate_size": None}, "intermediate_size: is missing"),
        (EAGLE, {"hidden_size": None, "head_dim": 16}, "hidden_size: is missing"),
        (MULTI_LAYER_EAGLE, {}, "num_nextn_predict_layers: is missing"),
    ],
)
def test_heads_that_do_not_fit(algorithm: str, changes: dict, message: str):
    with pytest.raises(ConfigError) as caught:
        HeadConfig.from_dict(HEAD | changes, algorithm, TARGET, "head/config.json")
    assert message in str(caught.value) and len(caught.value.problems) == 1, str(caught.value)


def test_a_narrower_eagle3_head_states_the_targets_width():
    config = HeadConfig.from_dict(HEAD | {"hidden_size": 32, "target_hidden_size": 64}, EAGLE3, TARGET)
    assert (config.model.hidden_size, config.target_hidden_size) == (32, 64)
