"""Families of models: parameters as published, what a token and a request keep, and formats of the parts of a layer.

The configurations are facts from the models' repositories on Hugging Face, cut to the keys that decide a shape; totals
are those that the models' cards or reports give.
"""

from __future__ import annotations

from typing import Any

import pytest
from foredraft.core.errors import ConfigError
from foredraft.core.model_shape import BUILT_IN, Attention, Recurrence, read_model_shape

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MOE = {"num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3, "n_routed_experts": 256}
LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def config(model_type: str, layers: int, hidden: int, heads: int, vocab: int, **others: Any) -> dict[str, Any]:
    return {
        "model_type": model_type, "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "vocab_size": vocab, "max_position_embeddings": 131072, "torch_dtype": "bfloat16", **others,
    }  # fmt: skip


DEEPSEEK_V3 = config(
    "deepseek_v3", 61, 7168, 128, 129280, intermediate_size=18432, moe_intermediate_size=2048,
    num_key_value_heads=128, quantization_config=FP8, **MOE, **LATENT,
)  # fmt: skip
GPT_OSS = config(
    "gpt_oss", 36, 2880, 64, 201088, num_key_value_heads=8, head_dim=64, intermediate_size=2880, num_local_experts=128,
    num_experts_per_tok=4, attention_bias=True, sliding_window=128,
    layer_types=["sliding_attention", "full_attention"] * 18,
    quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
)  # fmt: skip
QWEN3_NEXT = config(
    "qwen3_next", 48, 2048, 16, 151936, num_key_value_heads=2, head_dim=256, intermediate_size=5120, num_experts=512,
    num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512, full_attention_interval=4,
    linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
)  # fmt: skip
GEMMA_3 = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024,
    },
}  # fmt: skip
PUBLISHED: dict[str, tuple[dict[str, Any], float, float | None]] = {
    # name: configuration, billions of parameters, billions of active ones (where a source counts them as we do)
    "DeepSeek-V3 (arXiv 2412.19437)": (DEEPSEEK_V3, 671.0, 37.5),
    "Kimi-K2 (arXiv 2507.20534)": (
        {**DEEPSEEK_V3, "model_type": "kimi_k2", "num_attention_heads": 64, "vocab_size": 163840,
         "n_routed_experts": 384, "first_k_dense_replace": 1}, 1026.0, 32.9,
    ),
    "DeepSeek-V2-Lite (arXiv 2405.04434)": (
        config("deepseek_v2", 27, 2048, 16, 102400, intermediate_size=10944, moe_intermediate_size=1408,
               **{**LATENT, "q_lora_rank": None}, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6,
               first_k_dense_replace=1), 15.7, 2.66,
    ),
    # The card leaves the input embedding (0.58) out of its 5.13 active ones.
    "gpt-oss-120b (arXiv 2508.10925)": (GPT_OSS, 116.83, 5.13 + 0.58),
    "gpt-oss-20b (arXiv 2508.10925)": (
        {**GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32}, 20.91, 3.61 + 0.58,
    ),
    "Qwen3-Next-80B-A3B (its card: 80 in total, 3 active)": (QWEN3_NEXT, 79.7, 3.9),
    "Gemma-3-27B (arXiv 2503.19786: 25.6 + 1.4 of embeddings)": (GEMMA_3, 27.0, None),
    "GLM-4.5 (arXiv 2508.06471: 355 with one layer for drafts)": (
        config("glm4_moe", 92, 5120, 96, 151552, num_key_value_heads=8, head_dim=128, intermediate_size=12288,
               attention_bias=True, use_qk_norm=True, moe_intermediate_size=1536, **{**MOE, "n_routed_experts": 160}),
        353.0, None,
    ),
    "Qwen1.5-MoE-A2.7B (its card: 14.3 in total, 2.7 active)": (
        config("qwen2_moe", 24, 2048, 16, 151936, num_key_value_heads=16, intermediate_size=5632, num_experts=60,
               num_experts_per_tok=4, moe_intermediate_size=1408, shared_expert_intermediate_size=5632), 14.3, 2.7,
    ),
    "Llama-4-Scout (its card: 109 with vision, 17 active)": (
        config("llama4_text", 48, 5120, 40, 202048, num_key_value_heads=8, head_dim=128, intermediate_size=8192,
               intermediate_size_mlp=16384, num_local_experts=16, num_experts_per_tok=1, interleave_moe_layer_step=1),
        107.8, 17.2,
    ),
    "Llama-4-Maverick (its card: 400, 17 active)": (
        config("llama4_text", 48, 5120, 40, 202048, num_key_value_heads=8, head_dim=128, intermediate_size=8192,
               intermediate_size_mlp=16384, num_local_experts=128, num_experts_per_tok=1, interleave_moe_layer_step=2),
        400.7, 17.2,
    ),
    # The report counts no embedding (1.23 each) among its 45.9 active ones.
    "MiniMax-Text-01 (arXiv 2501.08313)": (
        config("minimax_text_01", 80, 6144, 64, 200064, num_key_value_heads=8, head_dim=128, intermediate_size=9216,
               num_local_experts=32, num_experts_per_tok=2, attn_type_list=[*[0] * 7, 1] * 10), 456.0, 45.9 + 2.46,
    ),
    "Mixtral 8x22B (its card: 141, 39 active)": (
        config("mixtral", 56, 6144, 48, 32768, num_key_value_heads=8, intermediate_size=16384, num_local_experts=8,
               num_experts_per_tok=2), 140.6, 39.1,
    ),
    "Phi-3-mini (arXiv 2404.14219)": (
        config("phi3", 32, 3072, 32, 32064, num_key_value_heads=32, intermediate_size=8192, sliding_window=2047), 3.82, 3.82,
    ),
    "Gemma-2-9B (arXiv 2408.00118: 8.32 + 0.92 of embeddings)": (
        config("gemma2", 42, 3584, 16, 256000, num_key_value_heads=8, head_dim=256, intermediate_size=14336,
               sliding_window=4096), 9.24, 9.24,
    ),
    "Nemotron-H-56B (arXiv 2504.03624)": (
        config("nemotron_h", 118, 8192, 64, 131072, num_key_value_heads=8, attention_head_dim=128,
               intermediate_size=32768, mamba_num_heads=256, mamba_head_dim=64, n_groups=8, ssm_state_size=256,
               hybrid_override_pattern="M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-"), 56.3, None,
    ),
    "Llama-3.3-Nemotron-Super-49B (arXiv 2505.00949)": (
        {**config("nemotron-nas", 80, 8192, 64, 128256), "block_configs": [
            {"attention": {"n_heads_in_group": 8 if attends else None, "no_op": not attends}, "ffn": {"ffn_mult": width}}
            for attends, width, count in (
                (True, 2.625, 1), (True, 5.25, 48), (False, 2.625, 5), (False, 3.28125, 1), (False, 1.3125, 10),
                (False, 5.25, 1), (False, 1.0, 8), (False, 0.5, 6),
            ) for _ in range(count)
        ]}, 49.9, None,
    ),
}  # fmt: skip


def read(data: dict[str, Any]):
    return read_model_shape(data, "config.json", "model")


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_are_published(name):
    data, total, active = PUBLISHED[name]
    shape = read(data)
    assert shape.parameters / 1e9 == pytest.approx(total, rel=0.006)
    if active is not None:
        assert shape.active_parameters / 1e9 == pytest.approx(active, rel=0.03)
    assert sum(count for _, count in shape.mixers) <= shape.layers or shape.family == "falcon_h1"


def test_the_latent_of_a_token_is_all_that_a_device_keeps_of_it():
    shape = read(DEEPSEEK_V3)
    assert shape.kv_bytes_per_token == 61 * (512 + 64) * 2  # 70 KB (DeepSeek-V3 report, section 5 of arXiv 2505.09343)
    assert shape.token_bytes(8) == shape.token_bytes(1)
    indexed = read(
        {**DEEPSEEK_V3, "model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
    )
    assert indexed.kv_bytes_per_token - shape.kv_bytes_per_token == 61 * 128 and indexed.reach == 2048
    assert indexed.token_bytes(windowed=True) == 0, "sparse attention reads few tokens, and keeps all"


def test_layers_with_a_window_keep_no_more_than_it():
    shape = read(GEMMA_3)
    layers = {mixer.window: count for mixer, count in shape.mixers}
    assert layers == {1024: 52, None: 10} and shape.attention_window == 1024
    assert shape.token_bytes(windowed=False) == 10 * 2 * 16 * 128 * 2
    assert shape.kv_bytes_per_token == 62 * 2 * 16 * 128 * 2
    assert (shape.vocab, shape.tied_embeddings) == (262_208, True), "left out in the file"
    assert {mixer.window: count for mixer, count in read(GPT_OSS).mixers} == {128: 18, None: 18}


def test_linear_attention_keeps_a_state_instead_of_tokens():
    shape = read(QWEN3_NEXT)
    kinds = {type(mixer): count for mixer, count in shape.mixers}
    assert kinds == {Recurrence: 36, Attention: 12}
    assert shape.kv_bytes_per_token == 12 * 2 * 2 * 256 * 2
    state = 32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 3 * 2  # the state, and the convolution's last three inputs
    assert shape.recurrent_state_bytes == 36 * state


def test_parts_of_a_layer_have_their_own_formats():
    shape = read(GPT_OSS)
    assert (shape.weight_dtype, shape.attention_dtype, shape.kv_dtype) == ("mxfp4", "bf16", "bf16")
    assert shape.weight_bytes / 1e9 == pytest.approx(65.2, rel=0.01)  # the checkpoint has 60.8 GiB
    shared = ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "lm_head"]
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}}
    quantization = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": shared}
    kimi = read({**DEEPSEEK_V3, "model_type": "kimi_k2", "quantization_config": quantization})
    assert (kimi.weight_dtype, kimi.attention_dtype, kimi.mlp_dtype) == ("int4-g32-s16", "bf16", "bf16")
    v4 = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "exclude_modules": [f"model.layers.{i}.self_attn*" for i in range(61)],
    }
    assert read({**DEEPSEEK_V3, "quantization_config": v4}).attention_dtype == "bf16"
    layers = {f"model.layers.{i}.mlp.experts.{k}": {"quant_algo": "NVFP4"} for i in range(3, 61) for k in range(256)}
    layers |= {f"model.layers.{i}.self_attn": {"quant_algo": "FP8"} for i in range(61)}
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    shape = read({**DEEPSEEK_V3, "quantization_config": mixed})
    assert (shape.weight_dtype, shape.attention_dtype, shape.mlp_dtype) == ("nvfp4", "fp8", "bf16")
    layers["model.layers.7.self_attn.o_proj"] = {"quant_algo": "FP5"}
    with pytest.raises(ConfigError, match=r"quantized_layers.model.layers.7.self_attn.o_proj: expected one of FP8"):
        read({**DEEPSEEK_V3, "quantization_config": mixed})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lora_rank": None}, "kv_lora_rank: is missing"),
        ({"num_experts_per_tok": 300}, "num_experts_per_tok: 300 experts per token, but there are 256"),
        ({"moe_layer_freq": [0, 1]}, "moe_layer_freq: must be a list with an entry for each of the 61 layers"),
        ({"model_type": "nemotron_h"}, r"hybrid_override_pattern: must be a text of M, \*, - and E"),
        ({"model_type": "nemotron-nas"}, "block_configs: must be a list of 61 objects"),
        ({"model_type": "deepseek_v4", "compress_ratios": [3] * 61, "head_dim": 512}, "compress_ratios: expected 0, 4 or 128"),
        ({"model_type": "qwen3_next", "layer_types": {"0": "linear_attention"}}, "layer_types: must be a list with an entry for each"),
    ],
)  # fmt: skip
def test_a_key_that_a_family_needs_is_named(change, message):
    with pytest.raises(ConfigError, match=message):
        read({**DEEPSEEK_V3, **change})


def test_devices_that_share_heads_and_experts_hold_parts_of_the_weights():
    shape = read(DEEPSEEK_V3)
    whole = shape.weight_bytes
    assert shape.weight_bytes_per_device(1, 1) == whole
    eight = shape.weight_bytes_per_device(8, 8)
    assert whole / 8 < eight < whole / 8 * 1.03, "what every device needs whole is little"
    # Attention whole on every device, experts divided among all.
    spread = shape.weight_bytes_per_device(1, 8, 8)
    dense = whole - 58 * 256 * 3 * 7168 * 2048
    assert spread == pytest.approx(dense + 58 * 32 * 3 * 7168 * 2048, rel=0.001)
    assert shape.tensor_problem(3) and not shape.tensor_problem(16)


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
        ({"hidden_size_per_layer_input": 64}, "hidden_size_per_layer_input"),
        ({"num_shared_heads": 2}, "num_shared_heads"),
        ({"window_sizes": [1, 2]}, "window_sizes"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ({"num_layers": 30}, "num_layers"),
        ({"num_layers": 32, "n_head": 32}, None),
        ({"num_kv_shared_layers": 0, "layer_types": ["full_attention"] * 32}, None),
        ({"embedding_init_size": 3, "rope_head_dim": 8, "dropout_layers": 3, "max_window_layers": 28}, None),
        ({"use_sliding_window": True, "sliding_window": None, "num_layer_name": "x"}, None),
    ],
)
def test_keys_of_sizes_that_a_family_does_not_read(keys: dict, refused: str | None):
    config = {**BUILT_IN["llama-3.1-8b"], **keys}
    if refused is None:
        assert read_model_shape(config, "config.json", "m") == read_model_shape(
            BUILT_IN["llama-3.1-8b"], "config.json", "m"
        )
        return
    with pytest.raises(ConfigError, match=f"config.json: {refused}: is not read for the family llama"):
        read_model_shape(config, "config.json", "m")


def test_the_small_models_of_gemma4():
    """Of six layers the last two read the keys and values of others; per-layer embeddings are further weights."""
    config = {
        "model_type": "gemma4_text", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 16, "global_head_dim": 32, "sliding_window": 8, "intermediate_size": 100,
        "vocab_size": 1000, "max_position_embeddings": 512, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 900,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    }  # fmt: skip
    shape = read_model_shape(config, "config.json", "gemma")
    attention = (
        4 * (2 * 64 * 64) + 2 * (2 * 64 * 128) + 3 * (2 * 64 * 16) + 2 * 64 * 32
    )  # queries and outputs, KV of four
    norms = 3 * 2 * 16 + 2 * 32 + 16 + 32
    mlps = 4 * 3 * 64 * 100 + 2 * 3 * 64 * 200
    inputs = 6 * (3 * 64 * 8 + 64) + 8 + 900 * 8 * 6
    assert shape.parameters == attention + norms + mlps + inputs + 13 * 64 + 1000 * 64
    assert (shape.token_bytes(windowed=True), shape.token_bytes(windowed=False)) == (3 * 2 * 16 * 2, 2 * 32 * 2)
    assert shape.kv_layers == 4 and shape.read_bytes == shape.weight_bytes - 2 * 900 * 8 * 6
    with pytest.raises(ConfigError, match="num_kv_shared_layers: 6 of 6 layers"):
        read_model_shape(config | {"num_kv_shared_layers": 6}, "config.json", "gemma")
