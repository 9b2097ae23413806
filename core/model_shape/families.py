"""The reader of Hugging Face's `config.json`: which keys a family of models uses for which part of its layers.

A configuration is read as data, a mapping or a text; files are opened by the caller. All problems of a configuration
are reported at once, with its source and the key of each. Where a published configuration leaves a key out, the default
is that of the family's class in `transformers` (4.57) or of the checkpoint's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypedDict

from ..errors import nearest_name
from ..parsing import REQUIRED, ConfigReader
from .keys.saved import as_published
from .keys.towers import tower_parameters
from .keys.unread import note_unread
from .kv_formats import KV_FORMATS
from .layers import LayerInputs
from .matrices import Matrix, matrices_of
from .mixers import (
    Mixers,
    compressed,
    delta_rule,
    falcon,
    gemma4,
    gpt_oss,
    grouped,
    jamba,
    kimi_linear,
    latent,
    latent_pairs,
    lightning,
    mamba_hybrid,
    mimo_flash,
    minimax_m3,
    nas_attention,
    nemotron,
    nemotron_pattern,
    replace_missing,
    short_convolutions,
)
from .mlps import (
    Parts,
    deepseek_experts,
    dense_mlps,
    ernie_experts,
    gemma4_experts,
    jamba_experts,
    lfm2_mlps,
    llama4_experts,
    longcat_experts,
    nas_mlps,
    nemotron_mlps,
    qwen_experts,
    small_experts,
    ungated,
)
from .quantization import CONFIG_KEYS
from .schemes.read import read_weight_formats
from .shape import ModelShape, counted

_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, slots=True)
class Family:
    """How a family's configuration is read. `defaults`: keys that published files leave out. `names`: those that it
    calls otherwise, by the usual names."""

    architecture: str
    mixers: Callable[[ConfigReader, str, int], Mixers] = grouped
    mlps: Callable[[ConfigReader, str, int], Parts] = dense_mlps
    defaults: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)

    def reader(self, reader: ConfigReader) -> ConfigReader:
        """Return a reader of a file of this family that finds the usual keys."""
        data = dict(reader.data)
        for usual, own in self.names.items():
            value = data.pop(own, None)
            if isinstance(value, list) and value and all(one == value[0] for one in value):
                value = value[0]  # a list with the same entry for each layer
            if value is not None and data.get(usual) is None:
                data[usual] = value
        return replace_missing(reader.with_data(data), **self.defaults)


_TIED: Mapping[str, Any] = {"tie_word_embeddings": True}
_GEMMA = {**_TIED, "head_dim": 256, "query_pre_attn_scalar": 256}
_GEMMA3 = {
    **_GEMMA, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4,
    "max_position_embeddings": 131_072, "use_qk_norm": True,
}  # fmt: skip
_GLM_MOE = {"rms_norm_eps": 1e-5, "norm_topk_prob": True, "first_k_dense_replace": 1, "n_shared_experts": 1}
_BIASES: Mapping[str, Any] = {"attention_bias": True}
_NORMS: Mapping[str, Any] = {"use_qk_norm": True}
_EVERY_FOURTH: Mapping[str, Any] = {"use_sliding_window": True, "sliding_window_pattern": 4}
_FIRST_DENSE: Mapping[str, Any] = {"first_k_dense_replace": 1}
_HUNYUAN = {
    "head_dim": "attention_head_dim",
    "num_experts_per_tok": "moe_topk",
    "num_shared_experts": "num_shared_expert",
}
_HUNYUAN |= {key: key for key in ("num_experts", "moe_intermediate_size")}  # lists with an entry for each layer
_ERNIE = {
    "n_routed_experts": "moe_num_experts", "num_experts_per_tok": "moe_k", "n_shared_experts": "moe_num_shared_experts",
    "first_k_dense_replace": "moe_layer_start_index", "moe_layer_freq": "moe_layer_interval",
}  # fmt: skip
_LONGCAT = {
    "num_hidden_layers": "num_layers", "intermediate_size": "ffn_hidden_size", "num_experts_per_tok": "moe_topk",
    "moe_intermediate_size": "expert_ffn_hidden_size",
}  # fmt: skip
_QWEN_HYBRID: Mapping[str, Any] = {"head_dim": 256}
_QWEN_NEXT = {**_QWEN_HYBRID, "linear_num_value_heads": 32, "linear_num_key_heads": 16}

FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM"),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", mlps=qwen_experts),
    "mixtral": Family("MixtralForCausalLM", mlps=qwen_experts, defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6}),
    "phi3": Family("Phi3ForCausalLM", defaults={"rms_norm_eps": 1e-5}),
    "mimo": Family("MiMoForCausalLM"),
    "gemma2": Family("Gemma2ForCausalLM", defaults=_GEMMA),
    "gemma3": Family("Gemma3ForCausalLM", defaults=_GEMMA3),
    "gemma4": Family("Gemma4ForConditionalGeneration", gemma4, gemma4_experts, _TIED),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", mlps=qwen_experts),
    "gpt_oss": Family("GptOssForCausalLM", gpt_oss, small_experts, {"rms_norm_eps": 1e-5, "attention_bias": True}),
    "llama4": Family("Llama4ForConditionalGeneration", mlps=llama4_experts, defaults={"attention_chunk_size": 8192}),
    "glm4_moe": Family("Glm4MoeForCausalLM", mlps=deepseek_experts, defaults=_GLM_MOE),
    "minimax": Family("MiniMaxForCausalLM", lightning, small_experts),
    "minimax_m2": Family("MiniMaxM2ForCausalLM", mlps=small_experts),
    "minimax_m3": Family("MiniMaxM3ForCausalLM", minimax_m3, deepseek_experts),
    "mimo_v2_flash": Family("MiMoV2FlashForCausalLM", mimo_flash, deepseek_experts),
    "step3p7": Family("Step3p7FlashForCausalLM", mlps=deepseek_experts),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", latent, deepseek_experts),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", latent, deepseek_experts),
    "deepseek_v32": Family("DeepseekV32ForCausalLM", latent, deepseek_experts),
    "deepseek_v4": Family("DeepseekV4ForCausalLM", compressed, deepseek_experts),
    "glm_moe_dsa": Family("GlmMoeDsaForCausalLM", latent, deepseek_experts),
    "kimi_linear": Family("KimiLinearForCausalLM", kimi_linear, deepseek_experts),
    "qwen3_next": Family("Qwen3NextForCausalLM", delta_rule, qwen_experts, _QWEN_NEXT),
    "qwen3_5": Family("Qwen3_5ForConditionalGeneration", delta_rule, defaults=_QWEN_HYBRID),
    "qwen3_5_moe": Family("Qwen3_5MoeForConditionalGeneration", delta_rule, qwen_experts, _QWEN_HYBRID),
    "nemotron_h": Family("NemotronHForCausalLM", nemotron, nemotron_mlps),
    "nemotron-nas": Family("DeciLMForCausalLM", nas_attention, nas_mlps),
    "falcon_h1": Family("FalconH1ForCausalLM", falcon),
    "smollm3": Family("SmolLM3ForCausalLM", defaults={**_TIED, "rope_theta": 2e6}),
    "olmo2": Family("Olmo2ForCausalLM", defaults={"rms_norm_eps": 1e-5}),
    "olmo3": Family("Olmo3ForCausalLM", defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5}),
    "granite": Family("GraniteForCausalLM"),
    "glm4": Family("Glm4ForCausalLM", defaults={"rms_norm_eps": 1.5625e-7, "attention_bias": True, "head_dim": 128}),
    "ministral3": Family("Ministral3ForCausalLM", defaults={"rms_norm_eps": 1e-5, "head_dim": 128}),
    "seed_oss": Family("SeedOssForCausalLM", defaults={"attention_bias": True, "head_dim": 128}),
    # Families whose sizes are read alone: no decoder of this project runs them.
    "gemma": Family("GemmaForCausalLM", defaults={**_TIED, "head_dim": 256}),
    "vaultgemma": Family("VaultGemmaForCausalLM", defaults={**_GEMMA, **_EVERY_FOURTH, "sliding_window_pattern": 2}),
    "cohere": Family("CohereForCausalLM", defaults=_TIED),
    "cohere2": Family("Cohere2ForCausalLM", defaults={**_TIED, **_EVERY_FOURTH, "sliding_window": 4096}),
    "cohere2_moe": Family("Cohere2MoeForCausalLM", mlps=deepseek_experts, defaults={**_TIED, **_EVERY_FOURTH}),
    "exaone4": Family("Exaone4ForCausalLM", defaults={**_EVERY_FOURTH, **_NORMS}),
    "exaone_moe": Family(
        "ExaoneMoeForCausalLM", mlps=deepseek_experts, defaults={**_EVERY_FOURTH, **_NORMS, **_FIRST_DENSE}
    ),
    "ernie4_5": Family("Ernie4_5ForCausalLM", defaults={**_TIED, "head_dim": 128}),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM", mlps=ernie_experts, defaults={**_TIED, **_FIRST_DENSE}, names=_ERNIE
    ),
    "glm": Family("GlmForCausalLM", defaults={**_BIASES, "head_dim": 128}),
    "glm4_moe_lite": Family("Glm4MoeLiteForCausalLM", latent, deepseek_experts, _FIRST_DENSE),
    "mistral4": Family("Mistral4ForCausalLM", latent, deepseek_experts),
    "minicpm3": Family("MiniCPM3ForCausalLM", latent, defaults=_TIED),
    "youtu": Family("YoutuForCausalLM", latent, defaults=_TIED),
    "longcat_flash": Family("LongcatFlashForCausalLM", latent_pairs, longcat_experts, names=_LONGCAT),
    "helium": Family("HeliumForCausalLM"),
    "internlm3": Family("InternLM3ForCausalLM", defaults={"head_dim": 128}),
    "olmo": Family("OlmoForCausalLM"),
    "olmoe": Family("OlmoeForCausalLM", mlps=small_experts, defaults=_NORMS),
    "flex_olmo": Family("FlexOlmoForCausalLM", mlps=small_experts, defaults=_NORMS),
    "stablelm": Family("StableLmForCausalLM", names={"attention_bias": "use_qkv_bias"}),
    "hunyuan_v1_dense": Family("HunYuanDenseV1ForCausalLM", defaults=_NORMS, names=_HUNYUAN),
    "hunyuan_v1_moe": Family(
        "HunYuanMoEV1ForCausalLM", mlps=deepseek_experts, defaults={**_NORMS, "num_shared_experts": 1}, names=_HUNYUAN
    ),
    "hy_v3": Family("HYV3ForCausalLM", mlps=deepseek_experts, defaults={**_FIRST_DENSE, **_NORMS, "head_dim": 128}),
    "dots1": Family("Dots1ForCausalLM", mlps=deepseek_experts, defaults=_NORMS),
    "afmoe": Family(
        "AfmoeForCausalLM",
        partial(grouped, output_gate=True),
        deepseek_experts,
        {**_EVERY_FOURTH, **_NORMS, **_FIRST_DENSE, "head_dim": 128},
        {"first_k_dense_replace": "num_dense_layers", "sliding_window_pattern": "global_attn_every_n_layers"},
    ),
    "solar_open": Family("SolarOpenForCausalLM", mlps=deepseek_experts, defaults={"head_dim": 128}),
    "phimoe": Family("PhimoeForCausalLM", mlps=small_experts),
    "granitemoe": Family("GraniteMoeForCausalLM", mlps=small_experts),
    "granitemoeshared": Family("GraniteMoeSharedForCausalLM", mlps=small_experts),
    "granitemoehybrid": Family("GraniteMoeHybridForCausalLM", mamba_hybrid, small_experts),
    "bamba": Family("BambaForCausalLM", mamba_hybrid),
    "jamba": Family("JambaForCausalLM", jamba, jamba_experts),
    "lfm2": Family("Lfm2ForCausalLM", short_convolutions, lfm2_mlps, _TIED, {"intermediate_size": "block_ff_dim"}),
    "lfm2_moe": Family(
        "Lfm2MoeForCausalLM", short_convolutions, deepseek_experts, _TIED, {"first_k_dense_replace": "num_dense_layers"}
    ),
    "arcee": Family("ArceeForCausalLM", mlps=ungated),
    "apertus": Family("ApertusForCausalLM", mlps=ungated, defaults=_NORMS),
    "nemotron": Family("NemotronForCausalLM", mlps=ungated),
    "jais2": Family("Jais2ForCausalLM", mlps=ungated, defaults=_BIASES),
    "phi": Family("PhiForCausalLM", mlps=ungated, defaults=_BIASES),
    "starcoder2": Family("Starcoder2ForCausalLM", mlps=ungated, defaults={**_TIED, **_BIASES}),
    "opt": Family(
        "OPTForCausalLM", mlps=ungated, defaults={**_TIED, **_BIASES}, names={"intermediate_size": "ffn_dim"}
    ),
}
"""The families whose configurations are understood, by `model_type`."""
ARCHITECTURES: Mapping[str, str] = {name: family.architecture for name, family in FAMILIES.items()}
MAX_LAYERS = 10_000

_ALIASES: Mapping[str, str] = {
    "gemma3_text": "gemma3", "gemma4_text": "gemma4", "llama4_text": "llama4", "kimi_k2": "deepseek_v3",
    "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe", "minimax_text_01": "minimax",
    "minimax_m3_vl": "minimax_m3", "minimax_m3_vl_text": "minimax_m3", "deepseek_ref": "deepseek_v4",
    "qwen2_vl": "qwen2", "qwen2_vl_text": "qwen2", "qwen2_5_vl": "qwen2", "qwen2_5_omni_text": "qwen2",
    "qwen3_omni_moe_text": "qwen3_moe", "glm4v_text": "glm4", "glm4v_moe_text": "glm4_moe", "internlm2": "llama",
}  # fmt: skip
"""Other names of `model_type` for a family: language models inside multimodal ones, and models that are
configured alike."""


LANGUAGE_MODEL = ("text_config", "thinker_config", "llm_config", "language_config")


def family_of_type(model_type: Any) -> str | None:
    """Return the family that a `model_type` belongs to; None for an unknown one."""
    known = _ALIASES.get(model_type, model_type) if isinstance(model_type, str) else None
    return known if known in FAMILIES else None


def read_model_shape(config: Mapping[str, Any], source: str, name: str, *, is_whole: bool = True) -> ModelShape:
    """Read the shape of a parsed `config.json`; `name` is what reports call the model. `is_whole`: a key of sizes that
    its family does not read is refused; files of drafts repeat those of their targets. Raises ConfigError."""
    reader = language_model(config, source)
    model_type = reader.get("model_type")
    key = family_of_type(model_type)
    if key is None:
        is_name = isinstance(model_type, str) and model_type != "mistral3"  # a model that sees, whose text part is gone
        hint = nearest_name(model_type, ARCHITECTURES) if is_name else ""
        listed = "a family out of the table in docs/scenario.md, or of the same shape as one of them"
        reader.problem("model_type", f"expected {listed}{hint}, found {model_type!r}")
        reader.raise_problems()
    assert key is not None
    family = FAMILIES[key]
    reader = family.reader(reader)
    layers = reader.integer("num_hidden_layers", len(nemotron_pattern(reader)) if key == "nemotron_h" else REQUIRED)
    if layers > MAX_LAYERS:
        reader.problem("num_hidden_layers", f"must be at most {MAX_LAYERS:,}, got {layers}")
        reader.raise_problems()
    if reader.get("per_layer_config") and family.mixers is not gemma4:
        reader.problem("per_layer_config", "layers of different sizes are not counted for this family")
    mixers, mlps = list(family.mixers(reader, key, layers)), list(family.mlps(reader, key, layers))
    hidden, vocab = reader.integer("hidden_size"), reader.integer("vocab_size")
    inputs = _layer_inputs(reader) if family.mixers is gemma4 else None
    max_context, tied = reader.integer("max_position_embeddings"), reader.flag("tie_word_embeddings")
    formats = read_formats(reader, partial(matrices_of, key, hidden, vocab, mixers, mlps, tied))
    if is_whole:
        note_unread(reader, key)
    reader.raise_problems()
    return ModelShape(
        name, key, layers, hidden, vocab, counted(mixers), counted(mlps), tied, max_context, source=source,
        config=config, layer_inputs=inputs, tower_parameters=tower_parameters(config, hidden), **formats,
    )  # fmt: skip


def _layer_inputs(reader: ConfigReader) -> LayerInputs | None:
    width = reader.integer("hidden_size_per_layer_input", 0, minimum=0)
    vocab = reader.integer("vocab_size_per_layer_input", reader.integer("vocab_size"))
    return LayerInputs(width, vocab) if width else None


def read_matrices(reader: ConfigReader, family: str) -> list[Matrix]:
    """Return the matrices of a model of `family`, by which the entries of its quantization are resolved."""
    about = FAMILIES[family]
    reader = about.reader(reader)
    layers = reader.integer("num_hidden_layers")
    return matrices_of(
        family, reader.integer("hidden_size"), reader.integer("vocab_size"), about.mixers(reader, family, layers),
        about.mlps(reader, family, layers), reader.flag("tie_word_embeddings"),
    )  # fmt: skip


def language_model(config: Mapping[str, Any], source: str) -> ConfigReader:
    """Return a reader of the language model's part, which a multimodal file keeps under one of `LANGUAGE_MODEL`."""
    key = next((key for key in LANGUAGE_MODEL if config.get(key) is not None), None)
    if key is None:
        return ConfigReader(as_published(config), source)
    whole = ConfigReader(config, source)
    part = whole.under(key)
    if part.data.get("text_config") is not None:  # the part of a model that also speaks
        part = part.under("text_config")
    whole.raise_problems()
    shared = ("model_type", "tie_word_embeddings", "torch_dtype", "dtype", *CONFIG_KEYS)
    part.data = as_published({key: config[key] for key in shared if key in config} | dict(part.data))
    return part


class _Formats(TypedDict):
    """The fields of `ModelShape` that say formats."""

    weight_dtype: str
    attention_dtype: str | None
    mlp_dtype: str | None
    embedding_dtype: str | None
    head_dtype: str | None
    kv_dtype: str


def read_formats(
    reader: ConfigReader, matrices: Callable[[], list[Matrix]], counted: list[Matrix] | None = None
) -> _Formats:
    """Return the formats of weights and KV, 16-bit by default; those of the `counted` matrices, default: all."""
    key = "dtype" if "dtype" in reader.data else "torch_dtype"
    value = reader.get(key) or "bfloat16"
    wide = _DTYPES.get(value) if isinstance(value, str) else None
    if wide is None:
        reader.problem(key, f"expected one of {', '.join(_DTYPES)}, found {value!r}")
        wide = "bf16"
    found = read_weight_formats(reader, matrices, wide, counted)
    if found.kv not in (None, *KV_FORMATS):
        reader.problem("quantization_config", f"its KV cache has the format {found.kv}; known: {', '.join(KV_FORMATS)}")
    main = found.experts or wide
    return {
        "weight_dtype": main,
        "attention_dtype": _other(found.attention or wide, main),
        "mlp_dtype": _other(found.mlps or main, main),
        "embedding_dtype": _other(found.embeddings or wide, wide),
        "head_dtype": _other(found.head or wide, wide),
        "kv_dtype": found.kv or ("bf16" if found.experts else wide),
    }


def _other(dtype: str, main: str) -> str | None:
    return None if dtype == main else dtype
