"""Quantized checkpoints: the format that each published form of the configuration means, and the
bytes of its weights."""

from __future__ import annotations

from typing import Any

import pytest
from foredraft.core.errors import ConfigError
from foredraft.core.model_shape import BUILT_IN, built_in_config, lookup_model, modelopt_config, read_model_shape
from foredraft.core.model_shape.quantization import bits_per_weight

LLAMA = BUILT_IN["llama-3.1-8b"]
LAYERS_16_BIT = lookup_model("llama-3.1-8b").weight_bytes - 2 * 2 * 128256 * 4096


def compressed(num_bits: int, kind: str, group_size: int | None = None, symmetric: bool = True) -> dict:
    weights = {
        "num_bits": num_bits,
        "type": kind,
        "group_size": group_size,
        "strategy": "group",
        "symmetric": symmetric,
    }
    return {
        "quant_method": "compressed-tensors",
        "ignore": ["lm_head"],
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
    "ModelOpt AWQ": ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 128}, "int4-g128-s16", 4 + 16 / 128),
    "ModelOpt NVFP4, AWQ": ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ", "group_size": 16}, "nvfp4", 4.5),
    "ModelOpt FP8, its other name": ({"quant_method": "modelopt_fp8"}, "fp8", 8),
    "compressed FP8": (compressed(8, "float"), "fp8", 8),
    "compressed NVFP4": (compressed(4, "float", 16), "nvfp4", 4.5),
    "compressed MXFP4": (compressed(4, "float", 32), "mxfp4", 4.25),
    "compressed integers": (compressed(4, "int", 128), "int4-g128-s16", 4 + 16 / 128),
    "compressed integers, zero points": (compressed(4, "int", 128, False), "int4-g128", 4 + 20 / 128),
    "AutoRound MXFP4": ({"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "mx_fp"}, "mxfp4", 4.25),
    "AutoRound NVFP4": ({"quant_method": "auto-round", "bits": 4, "group_size": 16, "data_type": "nv_fp4"}, "nvfp4", 4.5),
    "AutoRound FP8": ({"quant_method": "auto-round", "bits": 8, "group_size": -1, "data_type": "fp8_sym"}, "fp8", 8),
    "SGLang INT8 in blocks": ({"quant_method": "blockwise_int8", "weight_block_size": [128, 128]}, "int8", 8),
    "compressed W8A8": (compressed(8, "int"), "int8", 8),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4-g64-s32", 4.5),
    "bitsandbytes, scales of scales": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}, "int4-g64-s8", 4 + 8 / 64),
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
        (compressed(16, "float"), r"quantization_config.config_groups.group_0.weights.num_bits: 16 bits of type 'float'"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": 3}},
            r"quantization_config.config_groups.a: must be an object, got 3",
        ),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["re:("]}, r"quantization_config.modules_to_not_convert: 're:\(' is no"),
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


INT8 = {"weights": {"num_bits": 8, "type": "int"}, "input_activations": {"num_bits": 8, "type": "int"}}
INT4 = {"weights": {"num_bits": 4, "type": "int", "group_size": 128}, "input_activations": {"num_bits": 8}}
MIXTRAL = dict(built_in_config("qwen3-30b-a3b")[1])


@pytest.mark.parametrize(
    "entry",
    [
        "model.layers.0.mlp.gate_porj", "model.layers.0.input_layernom", "model.layers.*.mlp.gaet", "lm_haed",
        "model.embed_tokesn", "model.layers.99.mlp", "re:.*mlp[.]gates$", "model.layers.3.self_attn.q_nomr",
        "model.layers.0.mlp.shared_expert_gat", "self_attn.rotary_embd", "model.nrom",
    ],
)  # fmt: skip
def test_an_entry_that_is_misspelt_is_refused(entry: str):
    quantization = {"quant_method": "fp8", "modules_to_not_convert": [entry]}
    with pytest.raises(ConfigError, match=r"quantization_config.modules_to_not_convert: .* names no matrix"):
        read_model_shape({**MIXTRAL, "quantization_config": quantization}, "config.json", "model")


@pytest.mark.parametrize(
    "entry",
    [
        "model.layers.0.mlp.gate", "model.layers.*.mlp.gate", "re:.*mlp.gate$", "re:.*norm.*", "*norm*", "lm_head",
        "model.embed_tokens", "model.norm", "model.layers.0.input_layernorm.weight", "model.layers.48.eh_proj",
        "model.layers.48*", "mtp.layers.0.mlp.gate", "mtp*", "visual", "model.visual.blocks.0.attn.qkv", "gate",
        "vision_tower.encoder.layers.0.self_attn.q_proj", "model.layers.7.mlp.gate.e_score_correction_bias",
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["fp8", "awq"])
def test_an_entry_for_what_is_not_quantized_changes_nothing(entry: str, method: str):
    quantization: dict[str, Any] = {"quant_method": method} | (
        {"bits": 4, "group_size": 128} if method == "awq" else {}
    )
    plain = read_model_shape({**MIXTRAL, "quantization_config": quantization}, "config.json", "model")
    quantization["modules_to_not_convert"] = [entry]
    assert read_model_shape({**MIXTRAL, "quantization_config": quantization}, "config.json", "model") == plain


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": INT8}, "ignore": ["lm_head"]},
            "int8",
        ),  # SmoothQuant
        ({"quant_method": "modelopt", "quant_algo": "INT8_SQ"}, "int8"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": INT4}}, "int4-g128-s16"),  # W4A8
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "int4-g128-s16"),
        (
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}},
            "int8",
        ),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "UIntXWeightOnlyConfig"}}}, "'UIntX"),
        ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}}, "'hqq'"),
        ({"quant_method": "smoothquant"}, "'smoothquant'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_SVD"}, "'NVFP4_SVD'"),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "fp"}, "'fp' of 4 bits"),
    ],
)
def test_methods_are_read_or_refused_by_name(quantization: dict[str, Any], expected: str):
    config = {**LLAMA, "quantization_config": quantization}
    if expected.startswith("'"):
        with pytest.raises(ConfigError, match=f"found {expected}"):
            read_model_shape(config, "config.json", "model")
    else:
        assert read_model_shape(config, "config.json", "model").weight_dtype == expected


@pytest.mark.parametrize(
    ("kept", "is_wide"),
    [
        (["lm_head"], False),
        (["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"], True),
        (["re:.*self_attn.*"], True),
        (["self_attn"], True),
        ([f"model.layers.{layer}.self_attn" for layer in range(32)], True),
    ],
    ids=lambda kept: kept[0] if isinstance(kept, list) else None,
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


# -- formats by matrix -------------------------------------------------------------------------------------------------

ATTENTION, MLPS, TABLE = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096), 32 * 3 * 4096 * 14336, 128256 * 4096
FP8_GROUP = {"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 8, "type": "float"}}
FP4_GROUP = {"targets": ["re:.*mlp.*"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}
INT4 = 4 + 20 / 128


def mixed(**groups: dict) -> dict:
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}


def gigabytes(attention: float, mlps: float, head: float = 16, table: float = 16) -> float:
    return (ATTENTION * attention + MLPS * mlps + TABLE * (head + table)) / 8e9


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128}
QUARK = {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}}
MX = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}


def type_of(name: str, **settings: Any) -> dict[str, Any]:
    return {"_type": f"{name}Config", "_version": 1, "_data": settings}


def torchao(about: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": about}, "modules_to_not_convert": None, **others}


INTX = type_of(
    "Int8DynamicActivationIntxWeight", weight_dtype={"_type": "torch.dtype", "_data": "int4"},
    weight_granularity={"_type": "PerGroup", "_data": {"group_size": 32}},
)  # fmt: skip
FIRST_LAYERS = [f"model.layers.{layer}.mlp.down_proj" for layer in range(16)]
BY_MATRIX = {
    "two groups": (mixed(a=FP8_GROUP, b=FP4_GROUP), gigabytes(8, 4.5)),
    "two groups, in the other order": (mixed(a=FP4_GROUP, b=FP8_GROUP), gigabytes(8, 4.5)),
    "a class and a name": (mixed(a={**FP8_GROUP, "targets": ["Linear"]}, b=FP4_GROUP), gigabytes(8, 4.5)),
    "a class without an exception": (
        {**mixed(a={**FP8_GROUP, "targets": ["Linear"]}), "ignore": []}, gigabytes(8, 8, head=8)),
    "a group for the embeddings": (
        mixed(a=FP8_GROUP, b={**FP8_GROUP, "targets": ["Embedding"]}), gigabytes(8, 16, table=8)),
    "half of one projection": (
        {**mixed(a={**FP8_GROUP, "targets": ["Linear"]}), "ignore": ["lm_head", *FIRST_LAYERS]},
        gigabytes(8, 8 + 8 / 6)),
    "names of a model that sees": (
        {"quant_method": "fp8", "modules_to_not_convert": ["model.language_model.layers.0.mlp", "visual.blocks.3"]},
        gigabytes(8, 8 + 8 / 32)),
    "AWQ, a part of a name": ({**GPTQ, "quant_method": "awq", "modules_to_not_convert": ["attn"]}, gigabytes(16, INT4)),
    "GPTQ, a rule that keeps": ({**GPTQ, "dynamic": {"-:.*self_attn.*": {}}}, gigabytes(16, INT4)),
    "GPTQ, a rule that changes": (
        {**GPTQ, "dynamic": {r"+:.*\.mlp\..*": {"bits": 8, "group_size": 32}, ".*mlp.*": {"bits": 2}}},
        gigabytes(INT4, 8 + 24 / 32)),
    "GPTQ, its LM head": ({**GPTQ, "lm_head": True}, gigabytes(INT4, INT4, head=INT4)),
    "GPTQ, some modules": (
        {**GPTQ, "modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.k_proj"], ["self_attn.v_proj", "self_attn.o_proj"]]},
        gigabytes(INT4, 16)),
    "AutoRound, a name and an expression": (
        {**ROUND, "extra_config": {"model.layers.0.mlp.up_proj": {"bits": 16}, ".*self_attn.*": {"bits": 8, "group_size": 128}}},
        gigabytes(8 + 24 / 128, INT4 + (16 - INT4) / 96)),
    "bitsandbytes, a list": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["self_attn", "lm_head"]},
        gigabytes(16, 8)),
    "Quark": ({**QUARK, "exclude": ["lm_head"]}, gigabytes(8, 8)),
    "Quark, a head": (QUARK, gigabytes(8, 8, head=8)),
    "Quark, MXFP4 by layer": (
        {**QUARK, "exclude": ["lm_head"], "layer_quant_config": {"*.mlp.*": {"weight": MX}}}, gigabytes(8, 4.25)),
    "torchao": ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}, gigabytes(8, 8)),
    "torchao, groups": (torchao(type_of("Int8WeightOnly", group_size=32)), gigabytes(8.5, 8.5)),
    "torchao, 4 bits": (torchao(type_of("Int4WeightOnly", group_size=64)), gigabytes(4.5, 4.5)),
    "torchao, a byte for each": (torchao(INTX), gigabytes(8.75, 8.75)),
    "torchao, by name": (
        torchao(type_of("FqnTo", fqn_to_config={
            "_default": type_of("Float8WeightOnly"), r"re:.*self_attn\..*": None, "model.layers.0.mlp.up_proj": None,
        })), gigabytes(16, 8 + 8 / 96)),
    "torchao, embeddings": (
        torchao(type_of("ModuleFqnTo", module_fqn_to_config={
            "_default": type_of("Int4WeightOnly"), "model.embed_tokens": type_of("Int8WeightOnly"),
        }), include_input_output_embeddings=True), gigabytes(4.25, 4.25, head=4.25, table=8)),
    "torchao, all": (
        torchao(type_of("Int8WeightOnly"), include_input_output_embeddings=True), gigabytes(8, 8, head=8, table=8)),
    "SmoothQuant": ({"quant_algo": "W8A8_SQ_PER_CHANNEL", "exclude_modules": ["lm_head"]}, gigabytes(8, 8)),
    "W4A8": (
        {**mixed(a={"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 128},
                    "input_activations": {"num_bits": 8, "type": "float"}})}, gigabytes(4.125, 4.125)),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_MATRIX)
def test_every_matrix_has_the_format_that_the_entries_give_it(case):
    quantization, expected = BY_MATRIX[case]
    shape = read_model_shape({**LLAMA, "quantization_config": quantization}, "config.json", "model")
    assert shape.weight_bytes / 1e9 == pytest.approx(expected, rel=2e-4)  # norms have the format of the MLPs
    assert shape.weight_bytes_per_device(2, 2) == pytest.approx(shape.weight_bytes / 2, rel=1e-3)
    if shape.weight_dtype != "bf16":
        assert shape.with_dtypes(weight_dtype="bf16").weight_bytes == lookup_model("llama-3.1-8b").weight_bytes


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (
            mixed(a=FP8_GROUP, b={**FP4_GROUP, "targets": ["re:.*q_proj"]}),
            "b.targets: 're:.*q_proj' names layers.0.self_attn.q_proj, which 're:.*self_attn.*' of a names, too",
        ),
        (mixed(a={**FP8_GROUP, "targets": ["re:.*self_atn.*"]}), "config_groups.a.targets: 're:.*self_atn.*' names no matrix"),
        (mixed(a={**FP8_GROUP, "targets": ["LinearLayer"]}), "'LinearLayer' names no matrix"),
        ({**mixed(a=FP8_GROUP), "ignore": ["model.layers.3.self_attn.qq"]}, "ignore: 'model.layers.3.self_attn.qq' names no"),
        ({**mixed(a=FP8_GROUP), "ignore": {"lm_head": True}}, "ignore: must be a list of names"),
        ({**GPTQ, "dynamic": {"-:.*atention.*": {}}}, "dynamic.-:.*atention.*: 're:.*atention.*' names no matrix"),
        ({**GPTQ, "dynamic": {".*mlp.*": {"bits": 5}}}, "dynamic..*mlp.*.bits: 5 bits"),
        ({**GPTQ, "dynamic": {"-:(": {}}}, "dynamic.-:(: 're:(' is no expression"),
        ({**GPTQ, "extra_config": {"model.layers.0.mlp.up_proj": {"bits": 16}}}, "extra_config: is no exception that is"),
        ({"quant_method": "fp8", "skip_these_layers": [0, 1]}, "skip_these_layers: is no exception that is understood for fp8"),
        ({"quant_method": "hqq", "quant_config": {}}, "quant_method: expected one of"),
        (
            {**QUARK, "global_quant_config": {"weight": [{"dtype": "fp8_e4m3"}, {"dtype": "int4"}]}},
            "global_quant_config.weight: formats in several steps",
        ),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "FqnToConfig"}}}, "quant_type: expected one of"),
        (torchao(type_of("FqnTo", fqn_to_config={})), "quant_type: fqn_to_config is missing"),
        (torchao(type_of("FqnTo", fqn_to_config={"re:.*self_atn.*": None})), "'re:(?:.*self_atn.*)(?:"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quantized_layers: is missing"),
        ({"quant_method": "fp8", "moe_quant_algo": "NVFP4"}, "moe_quant_algo: is no exception that is understood"),
        ({**mixed(a=FP8_GROUP), "kv_cache_scheme": {"num_bits": 3, "type": "int"}}, "its KV cache has the format"),
        ({**mixed(a=FP8_GROUP), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else None,
)  # fmt: skip
def test_an_entry_that_cannot_be_resolved_is_refused(quantization, message):
    with pytest.raises(ConfigError) as error:
        read_model_shape({**LLAMA, "quantization_config": quantization}, "config.json", "model")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"quant_method": "w4afp8", "group_size": 128}, 4.25),
        ({"quant_method": "fp8", "routed_experts_quant_method": "mxfp4"}, 4.25),
    ],
)
def test_experts_have_a_format_of_their_own_beside_fp8(quantization: dict[str, Any], bits: float):
    shape = read_model_shape({**MIXTRAL, "quantization_config": quantization}, "config.json", "model")
    experts = 48 * 128 * 3 * 768 * 2048
    assert shape.attention_dtype == "fp8"
    mixed = shape.weight_bytes - shape.with_dtypes(weight_dtype="fp8").weight_bytes
    assert mixed == pytest.approx(experts * (bits - 8) / 8, rel=2e-3)


EXPERT = "model.layers.3.mlp.experts.5.down_proj"


@pytest.mark.parametrize(
    "ignored",
    [[EXPERT], ["model.layers.*.mlp.experts.5.*"], ["re:.*mlp.experts.5.*"], ["re:.*experts.([0-9]|[1-9][0-9])[.].*"]],
)
def test_a_format_of_some_experts_of_a_layer_is_refused(ignored: list[str]):
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ignored}
    with pytest.raises(ConfigError, match=r"ignore: .* names some experts of a layer"):
        read_model_shape({**MIXTRAL, "quantization_config": quantization}, "config.json", "model")


def test_all_experts_of_a_layer_may_be_named_one_by_one():
    ignored = [EXPERT.replace("5", str(number)) for number in range(128)]
    sizes = [
        read_model_shape(
            {**MIXTRAL, "quantization_config": {**QUANT, "ignore": names}}, "config.json", "m"
        ).weight_bytes
        for QUANT in ({"quant_method": "modelopt", "quant_algo": "NVFP4"},)
        for names in (ignored, ["model.layers.3.mlp.experts.*.down_proj"], [])
    ]
    assert sizes[0] == sizes[1] == pytest.approx(sizes[2] + 128 * 768 * 2048 * 11.5 / 8, rel=1e-4)


def test_the_kv_format_of_a_checkpoint_is_read_in_each_form():
    quark = {
        **QUARK,
        "export": {"kv_cache_group": ["*k_proj", "*v_proj"]},
        "layer_quant_config": {"*k_proj": {**QUARK["global_quant_config"], "output_tensors": {"dtype": "fp8_e4m3"}}},
    }
    scheme = {**mixed(a=FP8_GROUP), "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    own = {**QUARK, "kv_cache_quant_config": quark["layer_quant_config"]}
    for quantization in (quark, own, scheme, {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}):
        shape = read_model_shape({**LLAMA, "quantization_config": quantization}, "config.json", "model")
        assert shape.kv_dtype == "fp8"
