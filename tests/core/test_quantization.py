"""Quantized checkpoints: the format that each published form of the configuration means, and the
bytes of its weights."""

from __future__ import annotations

import pytest
from foredraft.core.errors import ConfigError
from foredraft.core.model_shape import BUILT_IN, lookup_model, modelopt_config, read_model_shape
from foredraft.core.model_shape.quantization import bits_per_weight

LLAMA = BUILT_IN["llama-3.1-8b"]
LAYERS_16_BIT = lookup_model("llama-3.1-8b").weight_bytes - 2 * 2 * 128256 * 4096


def compressed(num_bits: int, kind: str, group_size: int | None = None) -> dict:
    weights = {"num_bits": num_bits, "type": kind, "group_size": group_size, "strategy": "group"}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


CONFIGS = {
    "DeepSeek's and Qwen's FP8": ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, "fp8", 8),
    "FBGEMM FP8": ({"quant_method": "fbgemm_fp8"}, "fp8", 8),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, "int4-g128", 4 + 20 / 128),
    "AWQ, older keys": ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, "int4-g64", 4 + 20 / 64),
    "GPTQ": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}, "int4-g32", 4 + 20 / 32),
    "GPTQ, 8 bits": ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "int8-g128", 8 + 24 / 128),
    "GPTQ, a scale per column": ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "int8", 8),
    "MXFP4": ({"quant_method": "mxfp4"}, "mxfp4", 4.25),
    "ModelOpt NVFP4": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, "nvfp4", 4.5),
    "ModelOpt FP8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8", 8),
    "ModelOpt AWQ": ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 128}, "int4-g128", 4 + 20 / 128),
    "compressed FP8": (compressed(8, "float"), "fp8", 8),
    "compressed NVFP4": (compressed(4, "float", 16), "nvfp4", 4.5),
    "compressed MXFP4": (compressed(4, "float", 32), "mxfp4", 4.25),
    "compressed integers": (compressed(4, "int", 128), "int4-g128", 4 + 20 / 128),
    "compressed W8A8": (compressed(8, "int"), "int8", 8),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4-g64", 4 + 20 / 64),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_the_weights_bytes_follow_the_format(case):
    quantization, name, bits = CONFIGS[case]
    shape = read_model_shape({**LLAMA, "quantization_config": quantization}, "config.json", "model")
    assert (shape.weight_dtype, shape.kv_dtype) == (name, "bf16")
    assert bits_per_weight(name) == pytest.approx(bits)
    layers = shape.weight_bytes - 2 * 2 * 128256 * 4096
    assert layers == pytest.approx(LAYERS_16_BIT * bits / 16, rel=1e-9), "embeddings and LM head stay 16-bit"


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "quarot"}, r"quantization_config.quant_method: expected one of fp8, .*found 'quarot'"),
        ({}, r"quantization_config.quant_method: expected one of .*found None"),
        ("fp8", r"quantization_config: must be an object, got 'fp8'"),
        ({"quant_method": "awq"}, r"quantization_config.w_bit: is missing"),
        ({"quant_method": "gptq", "bits": 5, "group_size": 128}, r"quantization_config.bits: 5 bits in groups of 128"),
        ({"quant_method": "gptq", "bits": "4"}, r"quantization_config.bits: must be a whole number, got '4'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP2"}, r"quantization_config.quant_algo: expected one of FP8"),
        ({"quant_method": "compressed-tensors"}, r"quantization_config.config_groups: is missing"),
        (compressed(16, "float"), r"quantization_config.config_groups.group_0.weights.type: 16 bits of type 'float'"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": 3}},
            r"quantization_config.config_groups.a: must be an object, got 3",
        ),
        ({"quant_method": ["fp8"]}, r"quantization_config.quant_method: expected one of .*found \['fp8'\]"),
        ({"quant_method": "modelopt", "quant_algo": {}}, r"quantization_config.quant_algo: expected one of FP8"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"model.layers.0.mlp.experts": {"quant_algo": ["FP8"]}}},
            r"quantization_config.quantized_layers.model.layers.0.mlp.experts: expected one of FP8",
        ),
    ],
)  # fmt: skip
def test_an_unknown_format_is_refused_with_its_key(quantization, message):
    with pytest.raises(ConfigError, match=f"config.json: {message}"):
        read_model_shape({**LLAMA, "quantization_config": quantization}, "config.json", "model")


@pytest.mark.parametrize(
    ("kept", "is_wide"),
    [
        (["lm_head"], False),
        (["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"], True),
        (["re:.*self_attn.*"], True),
        (["self_attn"], True),
        ([f"model.layers.{layer}.self_attn.q_proj" for layer in range(32)], True),
        (["model.layers.0.self_attn.q_proj", "re:("], False),
    ],
    ids=str,
)
def test_attention_that_is_left_out_stays_wide(kept, is_wide):
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    shape = read_model_shape({**LLAMA, "quantization_config": quantization}, "config.json", "model")
    all_narrow = read_model_shape({**LLAMA, "quantization_config": {"quant_method": "mxfp4"}}, "config.json", "model")
    attention = shape.attention_parameters
    assert shape.attention_dtype == ("bf16" if is_wide else None)
    assert shape.weight_bytes - all_narrow.weight_bytes == pytest.approx(attention * (16 - 4.25) / 8 * is_wide, abs=1)
    assert shape.with_dtypes(weight_dtype="bf16").attention_dtype is None


def test_modelopts_file_stands_for_a_quantization_config():
    document = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    }
    config = modelopt_config(document, "hf_quant_config.json")
    shape = read_model_shape({**LLAMA, "quantization_config": config}, "config.json", "model")
    assert (shape.weight_dtype, shape.kv_dtype) == ("nvfp4", "fp8")
    assert modelopt_config({"quantization": {"quant_algo": None}}, "x") is None
    for bad in ({}, {"quantization": 3}):
        with pytest.raises(ConfigError, match="x: quantization: "):
            modelopt_config(bad, "x")


@pytest.mark.parametrize(
    ("name", "bits"), [("int4", 4 + 20 / 128), ("int4-g128", 4 + 20 / 128), ("int2-g32", 2 + 18 / 32)]
)
def test_formats_by_name(name, bits):
    assert lookup_model("qwen3-8b").with_dtypes(weight_dtype=name).format_bytes() == pytest.approx(bits / 8)


@pytest.mark.parametrize("name", ["int3", "int4-g0", "int5-g128", "fp4", "FP8", ""])
def test_names_that_are_no_format(name):
    assert bits_per_weight(name) is None
