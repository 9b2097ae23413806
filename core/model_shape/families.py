"""The reader of Hugging Face's `config.json`: which keys a family of models uses for which part of its layers.

A configuration is read as data, a mapping or a text; files are opened by the caller. All problems of a configuration
are reported at once, with its source and the key of each. Where a published configuration leaves a key out, the default
is that of the family's class in `transformers` (4.57) or of the checkpoint's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypedDict

from ..errors import nearest_name
from ..parsing import REQUIRED, ConfigReader
from .kv_formats import KV_FORMATS
from .layers import Experts, LayerInputs, Mlp, Part
from .matrices import Matrix, matrices_of
from .mixers import (
    Mixers,
    compressed,
    delta_rule,
    falcon,
    gemma4,
    gpt_oss,
    grouped,
    kimi_linear,
    kinds_of,
    latent,
    lightning,
    mimo_flash,
    minimax_m3,
    nas_attention,
    nas_blocks,
    nemotron,
    nemotron_pattern,
    read_shared,
    replace_missing,
)
from .quantization import CONFIG_KEYS
from .saved import as_published
from .schemes.read import read_weight_formats
from .shape import ModelShape, counted
from .unread import note_unread

_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """A mixture of experts as Qwen3 configures it: each token is sent to `top_k` of `num_experts` MLPs."""

    num_experts: int
    top_k: int
    intermediate_size: int  # of one expert
    norm_topk_prob: bool = False  # the chosen experts' weights sum to 1
    decoder_sparse_step: int = 1  # every how many layers has experts, counted from the end of each group
    mlp_only_layers: tuple[int, ...] = ()
    shared_size: int = 0  # width of the experts that every token goes to, beside the chosen ones
    scale: float = 1.0  # of the chosen experts' weights
    num_groups: int = 1  # into which the experts are divided
    top_groups: int = 1  # from which a token's are chosen

    def is_sparse(self, layer: int) -> bool:
        """Return whether `layer` has experts instead of one MLP."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


def read_experts(reader: ConfigReader, family: str | None) -> MoeConfig | None:
    """Read a mixture of experts as Qwen, Mixtral, gpt-oss, DeepSeek and GLM configure it; None for other families."""
    if family in ("deepseek_v2", "deepseek_v3", "glm4_moe"):
        return _read_grouped_experts(reader, family)
    if family not in ("qwen3_moe", "qwen2_moe", "qwen3_next", "qwen3_5_moe", "mixtral", "gpt_oss"):
        return None
    has_one_width = family in ("mixtral", "gpt_oss")  # whose layers all have experts, with weights that sum to 1
    key = "num_local_experts" if has_one_width or reader.get("num_local_experts") is not None else "num_experts"
    moe = MoeConfig(
        num_experts=reader.integer(key),
        top_k=reader.integer("num_experts_per_tok"),
        intermediate_size=reader.integer("intermediate_size" if has_one_width else "moe_intermediate_size"),
        norm_topk_prob=has_one_width or reader.flag("norm_topk_prob", family in ("qwen3_next", "qwen3_5_moe")),
        decoder_sparse_step=reader.integer("decoder_sparse_step", 1),
        mlp_only_layers=reader.integers("mlp_only_layers"),
        shared_size=0 if has_one_width else reader.integer("shared_expert_intermediate_size", 0, minimum=0),
    )
    _check_top_k(reader, moe.top_k, moe.num_experts)
    return moe


def _read_grouped_experts(reader: ConfigReader, family: str) -> MoeConfig | None:
    """Read the experts of DeepSeek and GLM, which are chosen from groups, behind some dense layers; None if the file
    has no experts, which is noted for a GLM."""
    number = reader.integer
    if reader.get("n_routed_experts") is None:
        if family == "glm4_moe":  # another family's dense model would load, and rotate a part of each head alone
            reader.problem("n_routed_experts", "is missing")
        return None
    count, width = number("n_routed_experts"), number("moe_intermediate_size")
    has_groups = family != "deepseek_v2" or reader.get("topk_method") == "group_limited_greedy"
    groups, top_groups = (number("n_group", 1), number("topk_group", 1)) if has_groups else (1, 1)
    if count % groups or top_groups > groups:
        reader.problem("n_group", f"{count} experts in {groups} groups, of which {top_groups} are chosen")
    if (every := number("moe_layer_freq", 1)) != 1:
        reader.problem("moe_layer_freq", f"expected experts in every layer behind the dense ones (1), found {every}")
    moe = MoeConfig(
        num_experts=count,
        top_k=number("num_experts_per_tok"),
        intermediate_size=width,
        norm_topk_prob=reader.flag("norm_topk_prob"),
        mlp_only_layers=tuple(range(number("first_k_dense_replace", 0, minimum=0))),
        shared_size=width * number("n_shared_experts", 0, minimum=0),
        scale=reader.number("routed_scaling_factor", 1.0),
        num_groups=groups,
        top_groups=top_groups,
    )
    _check_top_k(reader, moe.top_k, count)
    return moe


def _check_top_k(reader: ConfigReader, top_k: int, count: int) -> None:
    if top_k > count:
        reader.problem("num_experts_per_tok", f"{top_k} experts per token, but there are {count}")


# -- MLPs: one for each layer, None for a layer without ----------------------------------------------------------------

Parts = Iterable[Part | None]


def _dense(reader: ConfigReader, family: str, layers: int) -> Parts:
    width = reader.integer("intermediate_size")
    return [Mlp(width)] * layers


def _qwen_experts(reader: ConfigReader, family: str, layers: int) -> Parts:
    moe = read_experts(reader, family)
    assert moe is not None
    shared = moe.shared_size
    experts = Experts(moe.num_experts, moe.top_k, moe.intermediate_size, shared, shared_gate=bool(shared))
    has_dense = any(not moe.is_sparse(layer) for layer in range(layers))
    dense = Mlp(reader.integer("intermediate_size")) if has_dense else None
    return [experts if moe.is_sparse(layer) else dense for layer in range(layers)]


def _first_of(reader: ConfigReader, *keys: str) -> str:
    """Return the first of several names of a key that the file has."""
    return next((key for key in keys if reader.get(key) is not None), keys[0])


def _experts(reader: ConfigReader, width: int, *, shared_width: int = 0, **others: Any) -> Experts:
    count = reader.integer(_first_of(reader, "n_routed_experts", "num_local_experts", "num_experts"))
    top_k = reader.integer(_first_of(reader, "num_experts_per_tok", "num_experts_per_token", "top_k_experts"))
    _check_top_k(reader, top_k, count)
    return Experts(count, top_k, width, shared_width, **others)


def _deepseek_experts(reader: ConfigReader, family: str, layers: int) -> Parts:
    """Read experts with shared ones behind a few dense layers: DeepSeek, Kimi, GLM, MiniMax M3, Step, MiMo."""
    number = reader.integer
    if (
        reader.get("n_routed_experts") is None
        and reader.get(_first_of(reader, "num_experts", "num_local_experts")) is None
    ):
        return _dense(reader, family, layers)  # the small models of a family
    width = number(_first_of(reader, "moe_intermediate_size", "intermediate_size"))
    shared = number(_first_of(reader, "n_shared_experts", "num_shared_experts"), 0, minimum=0)
    shared_width = shared * number(_first_of(reader, "share_expert_dim", "shared_intermediate_size"), width, minimum=0)
    experts = _experts(reader, width, shared_width=shared_width, latent=number("routed_expert_hidden_size", None))
    frequency = reader.get("moe_layer_freq", 1)
    if reader.get("mlp_layer_types") is not None:
        sparse = [kind == "sparse" for kind in kinds_of(reader, layers, "mlp_layer_types")]
    elif isinstance(frequency, list):
        sparse = [kind == 1 for kind in kinds_of(reader, layers, "moe_layer_freq")]
    else:
        first, every = number("first_k_dense_replace", 0, minimum=0), number("moe_layer_freq", 1)
        sparse = [layer >= first and layer % every == 0 for layer in range(layers)]
    if all(sparse):
        return [experts] * layers
    dense = Mlp(number(_first_of(reader, "dense_intermediate_size", "intermediate_size")))
    return [experts if is_sparse else dense for is_sparse in sparse]


def _small_experts(reader: ConfigReader, family: str, layers: int) -> Parts:
    """Read experts of every layer, whose width is `intermediate_size`: gpt-oss, MiniMax-01 and M2."""
    shared = reader.integer("shared_intermediate_size", 0, minimum=0)
    width = reader.integer("intermediate_size")
    return [_experts(reader, width, shared_width=shared, biases=family == "gpt_oss")] * layers


def _llama4_experts(reader: ConfigReader, family: str, layers: int) -> Parts:
    width, every = reader.integer("intermediate_size"), reader.integer("interleave_moe_layer_step", 1)
    experts = _experts(reader, width, shared_width=width)
    listed = reader.integers("moe_layers")
    sparse = set(listed) if listed else set(range(every - 1, layers, every))
    dense = Mlp(reader.integer("intermediate_size_mlp")) if len(sparse) < layers else None
    return [experts if layer in sparse else dense for layer in range(layers)]


def _gemma4_experts(reader: ConfigReader, family: str, layers: int) -> Parts:
    """Read a dense MLP in every layer, and the experts beside it in layers that have some."""
    width = reader.integer("intermediate_size")
    if not reader.flag("enable_moe_block"):
        own = layers - read_shared(reader, layers)
        wide = Mlp(2 * width) if reader.flag("use_double_wide_mlp") else Mlp(width)
        return [Mlp(width) if layer < own else wide for layer in range(layers)]
    return [_experts(reader, reader.integer("moe_intermediate_size"), shared_width=width)] * layers


def _nemotron_mlps(reader: ConfigReader, family: str, layers: int) -> Parts:
    """Read MLPs without a gate (squared ReLU), dense or with experts that may work on a smaller latent vector."""
    pattern = nemotron_pattern(reader)
    dense = experts = None
    if "-" in pattern:
        dense = Mlp(reader.integer("intermediate_size"), gated=False)
    if "E" in pattern:
        shared = reader.integer("moe_shared_expert_intermediate_size", 0, minimum=0)
        latent = reader.integer("moe_latent_size", None)
        width = reader.integer("moe_intermediate_size")
        experts = _experts(reader, width, shared_width=shared, gated=False, latent=latent)
    return [{"-": dense, "E": experts}.get(kind) for kind in pattern]


def _nas_mlps(reader: ConfigReader, family: str, layers: int) -> Parts:
    """Read widths as multiples of the hidden size, two thirds of them rounded up to 256 (the checkpoint's
    `modeling_decilm.py`)."""
    hidden = reader.integer("hidden_size")
    mlps: list[Part | None] = []
    for block in nas_blocks(reader, layers):
        part = block.under("ffn")
        skipped = part.flag("no_op") or part.flag("replace_with_linear")
        width = 0 if skipped else int(2 * part.number("ffn_mult") * hidden / 3)
        mlps.append(None if skipped else Mlp(-(-width // 256) * 256))
    return mlps


# -- families ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Family:
    """How a family's configuration is read. `defaults`: keys that published files leave out."""

    architecture: str
    mixers: Callable[[ConfigReader, str, int], Mixers] = grouped
    mlps: Callable[[ConfigReader, str, int], Parts] = _dense
    defaults: Mapping[str, Any] = field(default_factory=dict)


_TIED: Mapping[str, Any] = {"tie_word_embeddings": True}
_GEMMA = {**_TIED, "head_dim": 256, "query_pre_attn_scalar": 256}
_GEMMA3 = {
    **_GEMMA, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4,
    "max_position_embeddings": 131_072, "use_qk_norm": True,
}  # fmt: skip
_GLM_MOE = {"rms_norm_eps": 1e-5, "norm_topk_prob": True, "first_k_dense_replace": 1, "n_shared_experts": 1}
_QWEN_HYBRID: Mapping[str, Any] = {"head_dim": 256}
_QWEN_NEXT = {**_QWEN_HYBRID, "linear_num_value_heads": 32, "linear_num_key_heads": 16}

FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM"),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", mlps=_qwen_experts),
    "mixtral": Family("MixtralForCausalLM", mlps=_qwen_experts, defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6}),
    "phi3": Family("Phi3ForCausalLM", defaults={"rms_norm_eps": 1e-5}),
    "mimo": Family("MiMoForCausalLM"),
    "gemma2": Family("Gemma2ForCausalLM", defaults=_GEMMA),
    "gemma3": Family("Gemma3ForCausalLM", defaults=_GEMMA3),
    "gemma4": Family("Gemma4ForConditionalGeneration", gemma4, _gemma4_experts, _TIED),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", mlps=_qwen_experts),
    "gpt_oss": Family("GptOssForCausalLM", gpt_oss, _small_experts, {"rms_norm_eps": 1e-5, "attention_bias": True}),
    "llama4": Family("Llama4ForConditionalGeneration", mlps=_llama4_experts, defaults={"attention_chunk_size": 8192}),
    "glm4_moe": Family("Glm4MoeForCausalLM", mlps=_deepseek_experts, defaults=_GLM_MOE),
    "minimax": Family("MiniMaxForCausalLM", lightning, _small_experts),
    "minimax_m2": Family("MiniMaxM2ForCausalLM", mlps=_small_experts),
    "minimax_m3": Family("MiniMaxM3ForCausalLM", minimax_m3, _deepseek_experts),
    "mimo_v2_flash": Family("MiMoV2FlashForCausalLM", mimo_flash, _deepseek_experts),
    "step3p7": Family("Step3p7FlashForCausalLM", mlps=_deepseek_experts),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", latent, _deepseek_experts),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", latent, _deepseek_experts),
    "deepseek_v32": Family("DeepseekV32ForCausalLM", latent, _deepseek_experts),
    "deepseek_v4": Family("DeepseekV4ForCausalLM", compressed, _deepseek_experts),
    "glm_moe_dsa": Family("GlmMoeDsaForCausalLM", latent, _deepseek_experts),
    "kimi_linear": Family("KimiLinearForCausalLM", kimi_linear, _deepseek_experts),
    "qwen3_next": Family("Qwen3NextForCausalLM", delta_rule, _qwen_experts, _QWEN_NEXT),
    "qwen3_5": Family("Qwen3_5ForConditionalGeneration", delta_rule, defaults=_QWEN_HYBRID),
    "qwen3_5_moe": Family("Qwen3_5MoeForConditionalGeneration", delta_rule, _qwen_experts, _QWEN_HYBRID),
    "nemotron_h": Family("NemotronHForCausalLM", nemotron, _nemotron_mlps),
    "nemotron-nas": Family("DeciLMForCausalLM", nas_attention, _nas_mlps),
    "falcon_h1": Family("FalconH1ForCausalLM", falcon),
    "smollm3": Family("SmolLM3ForCausalLM", defaults={**_TIED, "rope_theta": 2e6}),
    "olmo2": Family("Olmo2ForCausalLM", defaults={"rms_norm_eps": 1e-5}),
    "olmo3": Family("Olmo3ForCausalLM", defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5}),
    "granite": Family("GraniteForCausalLM"),
    "glm4": Family("Glm4ForCausalLM", defaults={"rms_norm_eps": 1.5625e-7, "attention_bias": True, "head_dim": 128}),
    "ministral3": Family("Ministral3ForCausalLM", defaults={"rms_norm_eps": 1e-5, "head_dim": 128}),
    "seed_oss": Family("SeedOssForCausalLM", defaults={"attention_bias": True, "head_dim": 128}),
}
"""The families whose configurations are understood, by `model_type`."""
ARCHITECTURES: Mapping[str, str] = {name: family.architecture for name, family in FAMILIES.items()}
MAX_LAYERS = 10_000

_ALIASES: Mapping[str, str] = {
    "gemma3_text": "gemma3", "gemma4_text": "gemma4", "llama4_text": "llama4", "kimi_k2": "deepseek_v3",
    "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe", "minimax_text_01": "minimax",
    "minimax_m3_vl": "minimax_m3", "minimax_m3_vl_text": "minimax_m3", "deepseek_ref": "deepseek_v4",
}  # fmt: skip
"""Other names of `model_type` for a family: language models inside multimodal ones, and models that are
configured alike."""


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
        reader.problem("model_type", f"expected one of {', '.join(ARCHITECTURES)}{hint}, found {model_type!r}")
        reader.raise_problems()
    assert key is not None
    family = FAMILIES[key]
    reader = replace_missing(reader, **family.defaults)
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
        config=config, layer_inputs=inputs, **formats,
    )  # fmt: skip


def _layer_inputs(reader: ConfigReader) -> LayerInputs | None:
    width = reader.integer("hidden_size_per_layer_input", 0, minimum=0)
    vocab = reader.integer("vocab_size_per_layer_input", reader.integer("vocab_size"))
    return LayerInputs(width, vocab) if width else None


def read_matrices(reader: ConfigReader, family: str) -> list[Matrix]:
    """Return the matrices of a model of `family`, by which the entries of its quantization are resolved."""
    about = FAMILIES[family]
    reader = replace_missing(reader, **about.defaults)
    layers = reader.integer("num_hidden_layers")
    return matrices_of(
        family, reader.integer("hidden_size"), reader.integer("vocab_size"), about.mixers(reader, family, layers),
        about.mlps(reader, family, layers), reader.flag("tie_word_embeddings"),
    )  # fmt: skip


def language_model(config: Mapping[str, Any], source: str) -> ConfigReader:
    """Return a reader of the language model's part: a multimodal file keeps it under `text_config`."""
    if config.get("text_config") is None:
        return ConfigReader(as_published(config), source)
    whole = ConfigReader(config, source)
    part = whole.under("text_config")
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
