"""Sizes and names of every family against `transformers`: its own model of the family's usual configuration, without
memory for the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from foredraft.core.model_shape import BUILT_IN, FAMILIES, ModelShape, read_matrices, read_model_shape  # noqa: E402
from foredraft.core.model_shape.matrices import matrix_named  # noqa: E402
from foredraft.core.parsing import ConfigReader  # noqa: E402
from transformers.core_model_loading import revert_weight_conversion  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

TEXT = {name: f"{name}_text" for name in ("qwen3_5", "qwen3_5_moe", "gemma3", "gemma4", "llama4")}
CHANGED: Mapping[str, dict[str, Any]] = {  # where the usual configuration is no model, or has another form than files
    "glm4_moe": {"head_dim": 128},
    "deepseek_v2": {
        "num_experts_per_tok": 6,
        "n_routed_experts": 64,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 4,
    },
    "gemma4": {"num_kv_shared_layers": 18, "use_double_wide_mlp": True},
    "hunyuan_v1_dense": {"head_dim": 128, "num_key_value_heads": 8},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8, "moe_topk": [2] * 32, "num_hidden_layers": 32},
    "dots1": {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "nemotron": {"num_key_value_heads": 8},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * 8, "num_hidden_layers": 24},
    "granitemoeshared": {"shared_intermediate_size": 1024},
    "granitemoehybrid": {"layer_types": ["linear_attention"] * 5 + ["full_attention"] * 3, "num_hidden_layers": 8},
    "bamba": {"attn_layer_indices": [3, 9]},
    "stablelm": {"use_qkv_bias": True},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "exaone4": {"num_key_value_heads": 8},
    "ernie4_5_moe": {"moe_layer_end_index": 20, "moe_layer_start_index": 3},
}
ABSENT = {"mimo", "step3p7", "nemotron-nas", "mistral4"}  # transformers has no language model of these
# it writes other keys, has room for experts that are none, adds a table of positions
OTHER_FORM = {"minimax_m3", "mimo_v2_flash", "deepseek_v4", "kimi_linear", "nemotron_h", "longcat_flash", "opt"}
CASES = [family for family in FAMILIES if family not in ABSENT | OTHER_FORM]
NOT_QUANTIZED = (
    "gate",
    "conv1d",
    "shared_expert_gate",
    "router",
    "router.proj",
    "router.layer",
    "mlp.gate.wg",
    "conv.conv",
    "A_log",
)  # of what transformers has beside these


def model_and_shape(family: str, changed: Mapping[str, Any]) -> tuple[Any, ModelShape, dict[str, Any]]:
    name = TEXT.get(family, family)
    config = CONFIG_MAPPING[name](**changed)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    written = config.to_dict() | {"dtype": "bfloat16", "model_type": family}
    return model, read_model_shape(written, "config.json", family), written


def kv_bytes(model: Any) -> tuple[int, int]:
    """Return the bytes of a token in layers that keep all, and in those that keep a window, by the modules."""
    kept = [0, 0]
    kinds = getattr(model.config, "layer_types", None)
    for layer in model.model.layers:
        attention = getattr(layer, "self_attn", None)
        if hasattr(attention, "kv_a_proj_with_mqa"):
            kept[0] += 2 * attention.kv_a_proj_with_mqa.out_features
        elif getattr(attention, "k_proj", None) is not None:
            values = getattr(attention, "v_proj", None) or attention.k_proj
            kind = kinds[attention.layer_idx] if kinds else getattr(model.config, "sliding_window", None)
            window = kind not in (None, "full_attention")
            kept[window] += 2 * (attention.k_proj.out_features + values.out_features)
    return kept[0], kept[1]


@pytest.mark.slow
@pytest.mark.fast("gemma4", "qwen2_moe", "mistral", "deepseek_v3")
@pytest.mark.parametrize("family", CASES)
def test_weights_kv_and_names_of_a_family(family: str):
    model, shape, config = model_and_shape(family, CHANGED.get(family, {}))
    assert shape.parameters == pytest.approx(sum(one.numel() for one in model.parameters()), rel=1e-3)
    if family not in (
        "phi3",
        "minimax",
        "falcon_h1",
        "glm_moe_dsa",
        "deepseek_v32",
    ):  # fused, or with states and indexers
        assert (shape.token_bytes(windowed=False), shape.token_bytes(windowed=True)) == kv_bytes(model)
    stored = revert_weight_conversion(model, dict(model.state_dict()))
    theirs = {str(matrix_named(name.removesuffix(".weight"))) for name, weight in stored.items() if weight.dim() > 1}
    ours = [one for one in read_matrices(ConfigReader(config, "config.json"), family) if one.layer is not None]
    of_layers = {f"layers.{one.layer}.{name}" for one in ours for name in one.names}
    assert [str(one) for one in ours if not {f"layers.{one.layer}.{name}" for name in one.names} & theirs] == []
    assert [
        name for name in theirs if name.startswith("layers.") and name not in of_layers and not is_other(name)
    ] == []


def is_other(name: str) -> bool:
    return (
        name.endswith(NOT_QUANTIZED)
        or "norm" in name
        or "_bias" in name
        or "per_layer" in name
        or name.endswith(("slope_rate", "_decay"))
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT_IN)
def test_weights_of_the_catalogue(name: str):
    config = dict(BUILT_IN[name])
    family = config.pop("model_type")
    model, _, _ = model_and_shape(family, config | {"dtype": "bfloat16"})
    shape = read_model_shape(BUILT_IN[name], "config.json", name)
    assert shape.parameters == pytest.approx(sum(one.numel() for one in model.parameters()), rel=1e-3)


@pytest.mark.slow
@pytest.mark.fast("qwen2_5_vl")
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen2_vl", "qwen3_vl", "llava", "paligemma", "idefics3", "smolvlm"])
def test_weights_of_what_sees(kind: str):
    config = CONFIG_MAPPING[kind]()
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    shape = read_model_shape(config.to_dict() | {"dtype": "bfloat16"}, "config.json", kind)
    towers = sum(one.numel() for one in model.parameters()) - shape.parameters
    assert shape.tower_parameters == pytest.approx(towers, rel=0.05) and shape.tower_parameters > 0
    assert shape.weight_bytes == pytest.approx(2 * sum(one.numel() for one in model.parameters()), rel=0.005)
