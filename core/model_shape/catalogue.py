"""The catalogue of built-in models: the published `config.json` of each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import nearest_name
from .families import ARCHITECTURES, read_model_shape
from .shape import ModelShape, UnknownModel


def _built_in(
    repository: str,
    family: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate: int,
    vocab: int,
    context: int,
    **others: Any,
) -> dict[str, Any]:
    return {
        "_name_or_path": repository,
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "torch_dtype": "bfloat16",
        **others,
    }


def _llama3(factor: float, **others: Any) -> dict[str, Any]:
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    return {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope_scaling": scaling, **others}


_QWEN = {"rms_norm_eps": 1e-6, "rope_theta": 1000000.0}
_EXPERTS = {
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}  # fmt: skip
_TIED = {"tie_word_embeddings": True}
_GLM = {
    "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "attention_bias": True, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "num_nextn_predict_layers": 1,
}  # fmt: skip

BUILT_IN: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": _built_in(
        "meta-llama/Llama-3.1-8B", "llama", 32, 4096, 32, 8, 128, 14336, 128256, 131072, **_llama3(8.0)
    ),
    "llama-3.1-70b": _built_in(
        "meta-llama/Llama-3.1-70B", "llama", 80, 8192, 64, 8, 128, 28672, 128256, 131072, **_llama3(8.0)
    ),
    "llama-3.2-1b": _built_in(
        "meta-llama/Llama-3.2-1B", "llama", 16, 2048, 32, 8, 64, 8192, 128256, 131072, **_llama3(32.0, **_TIED)
    ),
    "llama-3.2-3b": _built_in(
        "meta-llama/Llama-3.2-3B", "llama", 28, 3072, 24, 8, 128, 8192, 128256, 131072, **_llama3(32.0, **_TIED)
    ),
    "llama-2-7b": _built_in(
        "meta-llama/Llama-2-7b-hf", "llama", 32, 4096, 32, 32, 128, 11008, 32000, 4096, rms_norm_eps=1e-5
    ),
    "qwen3-8b": _built_in("Qwen/Qwen3-8B", "qwen3", 36, 4096, 32, 8, 128, 12288, 151936, 40960, **_QWEN),
    "qwen3-0.6b": _built_in("Qwen/Qwen3-0.6B", "qwen3", 28, 1024, 16, 8, 128, 3072, 151936, 40960, **_QWEN, **_TIED),
    "qwen3-32b": _built_in("Qwen/Qwen3-32B", "qwen3", 64, 5120, 64, 8, 128, 25600, 151936, 40960, **_QWEN),
    "qwen3-30b-a3b": _built_in(
        "Qwen/Qwen3-30B-A3B", "qwen3_moe", 48, 2048, 32, 4, 128, 6144, 151936, 40960, **_QWEN, **_EXPERTS
    ),
    "qwen2.5-7b": _built_in("Qwen/Qwen2.5-7B", "qwen2", 28, 3584, 28, 4, 128, 18944, 152064, 131072, **_QWEN),
    "llama-3.3-70b": _built_in(
        "meta-llama/Llama-3.3-70B-Instruct", "llama", 80, 8192, 64, 8, 128, 28672, 128256, 131072, **_llama3(8.0)
    ),
    "qwen3-4b": _built_in("Qwen/Qwen3-4B", "qwen3", 36, 2560, 32, 8, 128, 9728, 151936, 40960, **_QWEN, **_TIED),
    "qwen3-14b": _built_in("Qwen/Qwen3-14B", "qwen3", 40, 5120, 40, 8, 128, 17408, 151936, 40960, **_QWEN),
    "qwen2.5-1.5b": _built_in(
        "Qwen/Qwen2.5-1.5B", "qwen2", 28, 1536, 12, 2, 128, 8960, 151936, 131072, **_QWEN, **_TIED
    ),
    "qwen2.5-14b": _built_in("Qwen/Qwen2.5-14B", "qwen2", 48, 5120, 40, 8, 128, 13824, 152064, 131072, **_QWEN),
    "qwen2.5-32b": _built_in("Qwen/Qwen2.5-32B", "qwen2", 64, 5120, 40, 8, 128, 27648, 152064, 131072, **_QWEN),
    "qwen2.5-72b": _built_in("Qwen/Qwen2.5-72B", "qwen2", 80, 8192, 64, 8, 128, 29568, 152064, 131072, **_QWEN),
    "qwen3-next-80b-a3b": _built_in(
        "Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3_next", 48, 2048, 16, 2, 256, 5120, 151936, 262144,
        rms_norm_eps=1e-6, rope_theta=1e7, full_attention_interval=4, linear_conv_kernel_dim=4, linear_key_head_dim=128,
        linear_num_key_heads=16, linear_num_value_heads=32, linear_value_head_dim=128, num_experts=512,
        num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512, norm_topk_prob=True,
        decoder_sparse_step=1,
    ),
    "glm-4.5": _built_in(
        "zai-org/GLM-4.5", "glm4_moe", 92, 5120, 96, 8, 128, 12288, 151552, 131072, **_GLM, n_routed_experts=160,
        moe_intermediate_size=1536, first_k_dense_replace=3, use_qk_norm=True,
    ),
    "glm-4.5-air": _built_in(
        "zai-org/GLM-4.5-Air", "glm4_moe", 46, 4096, 96, 8, 128, 10944, 151552, 131072, **_GLM, n_routed_experts=128,
        moe_intermediate_size=1408, first_k_dense_replace=1, use_qk_norm=False,
    ),
    "mistral-7b": _built_in(
        "mistralai/Mistral-7B-v0.3", "mistral", 32, 4096, 32, 8, 128, 14336, 32768, 32768, rms_norm_eps=1e-5,
        rope_theta=1e6, sliding_window=None,
    ),
    "smollm2-135m": _built_in(
        "HuggingFaceTB/SmolLM2-135M", "llama", 30, 576, 9, 3, 64, 1536, 49152, 8192, rms_norm_eps=1e-5, rope_theta=1e5,
        **_TIED,
    ),
    "llama-160m": _built_in("JackFram/llama-160m", "llama", 12, 768, 12, 12, 64, 3072, 32000, 2048, rms_norm_eps=1e-6),
}  # fmt: skip
"""The published `config.json` of each built-in model."""


def known_models() -> tuple[str, ...]:
    """Return the names of the built-in models, in the catalogue's order."""
    return tuple(BUILT_IN)


_FP8_BLOCKS: Mapping[str, Any] = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
_FP8: Mapping[str, Any] = {"quantization_config": {"quant_method": "fp8"}}
_AWQ: Mapping[str, Any] = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
_MODELOPT = {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}
_LONG: Mapping[str, Any] = {"max_position_embeddings": 262144}
_LLAMA_3 = {"max_position_embeddings": 8192, "rope_scaling": None}
_GLM_LONG = {"max_position_embeddings": 202752}

_ALIKE: Mapping[str, Iterable[tuple[str, Mapping[str, Any]]]] = {
    "llama-3.1-8b": [
        ("meta-llama/Llama-3.1-8B-Instruct", {}), ("meta-llama/Meta-Llama-3.1-8B", {}),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", {}), ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", {}),
        ("meta-llama/Meta-Llama-3-8B", _LLAMA_3), ("meta-llama/Meta-Llama-3-8B-Instruct", _LLAMA_3),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8", _FP8), ("neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8", _FP8),
        ("nvidia/Llama-3.1-8B-Instruct-FP8", {"quantization_config": {**_MODELOPT, "quant_algo": "FP8"}}),
    ],
    "llama-3.1-70b": [
        ("meta-llama/Llama-3.1-70B-Instruct", {}), ("meta-llama/Meta-Llama-3.1-70B", {}),
        ("meta-llama/Meta-Llama-3.1-70B-Instruct", {}), ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", {}),
        ("meta-llama/Meta-Llama-3-70B", _LLAMA_3), ("meta-llama/Meta-Llama-3-70B-Instruct", _LLAMA_3),
    ],
    "llama-3.3-70b": [
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", _FP8),
        ("nvidia/Llama-3.3-70B-Instruct-FP8", {"quantization_config": {**_MODELOPT, "quant_algo": "FP8"}}),
        ("nvidia/Llama-3.3-70B-Instruct-FP4", {"quantization_config": {**_MODELOPT, "quant_algo": "NVFP4"}}),
        ("nvidia/Llama-3.3-70B-Instruct-NVFP4", {"quantization_config": {**_MODELOPT, "quant_algo": "NVFP4"}}),
    ],
    "llama-3.2-1b": [("meta-llama/Llama-3.2-1B-Instruct", {})],
    "llama-3.2-3b": [("meta-llama/Llama-3.2-3B-Instruct", {})],
    "llama-2-7b": [("meta-llama/Llama-2-7b-chat-hf", {})],
    "qwen3-8b": [("Qwen/Qwen3-8B-FP8", _FP8_BLOCKS), ("Qwen/Qwen3-8B-AWQ", _AWQ)],
    "qwen3-32b": [("Qwen/Qwen3-32B-FP8", _FP8_BLOCKS), ("Qwen/Qwen3-32B-AWQ", _AWQ)],
    "qwen3-0.6b": [("Qwen/Qwen3-0.6B-FP8", _FP8_BLOCKS)],
    "qwen3-4b": [
        ("Qwen/Qwen3-4B-FP8", _FP8_BLOCKS), ("Qwen/Qwen3-4B-AWQ", _AWQ),
        ("Qwen/Qwen3-4B-Instruct-2507", _LONG), ("Qwen/Qwen3-4B-Thinking-2507", _LONG),
    ],
    "qwen3-14b": [("Qwen/Qwen3-14B-FP8", _FP8_BLOCKS), ("Qwen/Qwen3-14B-AWQ", _AWQ)],
    "qwen3-30b-a3b": [
        ("Qwen/Qwen3-30B-A3B-FP8", _FP8_BLOCKS), ("Qwen/Qwen3-30B-A3B-Instruct-2507", _LONG),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", _LONG), ("Qwen/Qwen3-Coder-30B-A3B-Instruct", _LONG),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", {**_LONG, **_FP8_BLOCKS}),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507-FP8", {**_LONG, **_FP8_BLOCKS}),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8", {**_LONG, **_FP8_BLOCKS}),
    ],
    "smollm2-135m": [("HuggingFaceTB/SmolLM2-135M-Instruct", {})],
    "qwen2.5-1.5b": [("Qwen/Qwen2.5-1.5B-Instruct", {"max_position_embeddings": 32768})],
    **{
        f"qwen2.5-{size}b": [(f"Qwen/Qwen2.5-{size}B-Instruct", {"max_position_embeddings": 32768})]
        for size in (7, 14, 72)
    },
    "qwen2.5-32b": [
        ("Qwen/Qwen2.5-32B-Instruct", {"max_position_embeddings": 32768}),
        ("Qwen/QwQ-32B", {"max_position_embeddings": 40960}), ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", {}),
    ],
    "qwen3-next-80b-a3b": [
        ("Qwen/Qwen3-Next-80B-A3B-Thinking", {}), ("Qwen/Qwen3-Next-80B-A3B-Instruct-FP8", _FP8_BLOCKS),
        ("Qwen/Qwen3-Next-80B-A3B-Thinking-FP8", _FP8_BLOCKS),
    ],
    "glm-4.5": [
        ("zai-org/GLM-4.5-FP8", _FP8), ("zai-org/GLM-4.6", _GLM_LONG), ("zai-org/GLM-4.6-FP8", {**_GLM_LONG, **_FP8}),
        ("zai-org/GLM-4.7", _GLM_LONG), ("zai-org/GLM-4.7-FP8", {**_GLM_LONG, **_FP8}),
    ],
    "glm-4.5-air": [("zai-org/GLM-4.5-Air-FP8", _FP8)],
    "mistral-7b": [
        ("mistralai/Mistral-7B-Instruct-v0.3", {}), ("mistralai/Mistral-7B-Instruct-v0.2", {"vocab_size": 32000}),
    ],
}  # fmt: skip
"""Repositories on Hugging Face of the shape of a built-in model, whose own is its `_name_or_path`: by the model's name,
with the keys that differ."""

_V3, _R1, _V32 = "deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3.2"
_QWEN3_235B = "Qwen/Qwen3-235B-A22B"
_PUBLISHED_ALIKE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **{f"{_V3}{name}": (_V3, {}) for name in ("-Base", "-0324", ".1", ".1-Base", ".1-Terminus")},
    **{f"{_R1}{name}": (_R1, {}) for name in ("-Zero", "-0528")},
    **{f"{_V32}{name}": (_V32, {}) for name in ("-Exp", "-Speciale")},
    **{f"{_QWEN3_235B}-{name}-2507": (_QWEN3_235B, _LONG) for name in ("Instruct", "Thinking")},
    **{f"{_QWEN3_235B}-{name}-2507-FP8": (f"{_QWEN3_235B}-FP8", _LONG) for name in ("Instruct", "Thinking")},
    "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8": ("Qwen/Qwen3-Coder-480B-A35B-Instruct", _FP8_BLOCKS),
    **{f"moonshotai/Kimi-K2-{name}": ("moonshotai/Kimi-K2-Instruct", {}) for name in ("Base",)},
    "moonshotai/Kimi-K2-Instruct-0905": ("moonshotai/Kimi-K2-Instruct", _LONG),
    **{f"MiniMaxAI/MiniMax-{name}": ("MiniMaxAI/MiniMax-M2.5", {}) for name in ("M2", "M2.1")},
    **{
        f"meta-llama/{name}": ("meta-llama/Meta-Llama-3.1-405B", {})
        for name in ("Llama-3.1-405B", "Llama-3.1-405B-Instruct", "Meta-Llama-3.1-405B-Instruct")
    },
    "mistralai/Mixtral-8x7B-Instruct-v0.1": ("mistralai/Mixtral-8x7B-v0.1", {}),
    "mistralai/Mixtral-8x22B-Instruct-v0.1": ("mistralai/Mixtral-8x22B-v0.1", {}),
    "google/gemma-4-31B": ("google/gemma-4-31B-it", {}),
    **{f"XiaomiMiMo/MiMo-7B-{name}": ("XiaomiMiMo/MiMo-7B-Base", {}) for name in ("SFT", "RL")},
}
"""Repositories of the shape of another one that is not built in, with the keys that differ."""


_LATENT = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "norm_topk_prob": True, **_FP8_BLOCKS,
}  # fmt: skip
_OSS = {
    "num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": True, "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
    },
}  # fmt: skip
_QWEN3_5 = {
    "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4, "attn_output_gate": True, "mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32",
    "tie_word_embeddings": False,
}  # fmt: skip
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    config["_name_or_path"]: config
    for config in (
        _built_in(_V3, "deepseek_v3", 61, 7168, 128, 128, 64, 18432, 129280, 163840, **_LATENT, n_routed_experts=256,
                  first_k_dense_replace=3, n_group=8, topk_group=4, num_nextn_predict_layers=1),
        _built_in("moonshotai/Kimi-K2-Instruct", "deepseek_v3", 61, 7168, 64, 64, 64, 18432, 163840, 131072, **_LATENT,
                  n_routed_experts=384, first_k_dense_replace=1, n_group=1, topk_group=1, num_nextn_predict_layers=0),
        _built_in("openai/gpt-oss-120b", "gpt_oss", 36, 2880, 64, 8, 64, 2880, 201088, 131072, **_OSS, num_local_experts=128,
                  layer_types=["sliding_attention", "full_attention"] * 18),
        _built_in("openai/gpt-oss-20b", "gpt_oss", 24, 2880, 64, 8, 64, 2880, 201088, 131072, **_OSS, num_local_experts=32,
                  layer_types=["sliding_attention", "full_attention"] * 12),
        _built_in("google/gemma-4-31B-it", "gemma4", 60, 5376, 32, 16, 256, 21504, 262144, 262144, **_TIED,
                  global_head_dim=512, num_global_key_value_heads=4, attention_k_eq_v=True, sliding_window=1024,
                  layer_types=[*["sliding_attention"] * 5, "full_attention"] * 10, hidden_size_per_layer_input=0,
                  num_kv_shared_layers=0, enable_moe_block=False),
        _built_in("Qwen/Qwen3.5-27B", "qwen3_5", 64, 5120, 24, 4, 256, 17408, 248320, 262144, **_QWEN3_5,
                  linear_num_value_heads=48),
        _built_in("Qwen/Qwen3.5-35B-A3B", "qwen3_5_moe", 40, 2048, 16, 2, 256, 512, 248320, 262144, **_QWEN3_5,
                  linear_num_value_heads=32, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512,
                  shared_expert_intermediate_size=512),
    )
}  # fmt: skip
"""Configurations of models that the extra `measured` brings too: they count where it is not installed."""


def published_alike(name: str) -> tuple[str, Mapping[str, Any]]:
    """Return the repository whose configuration `name` has, and the keys that differ; `name` itself and none if it is
    not known to have another's."""
    key = name.strip().lower()
    for repository, (other, keys) in _PUBLISHED_ALIKE.items():
        if key in (repository.lower(), repository.lower().rpartition("/")[2]):
            return other, keys
    return name, {}


def known_repositories(others: Iterable[str] = ()) -> list[str]:
    """Return further names on Hugging Face of the built-in models, and of the models `others`."""
    published = {*others, *PUBLISHED}
    of_others = (repository for repository, (other, _) in _PUBLISHED_ALIKE.items() if other in published)
    return [*PUBLISHED, *(repository for alike in _ALIKE.values() for repository, _ in alike), *of_others]


def built_in_config(name: str) -> tuple[str, Mapping[str, Any]] | None:
    """Return the built-in model that `name` means and its configuration; None if there is none.

    A name is that of the catalogue, or a repository on Hugging Face with or without its organisation, without regard to
    case.
    """
    key = re.sub(r"[_\s]", "-", name.strip().lower())
    if key in BUILT_IN:
        return key, BUILT_IN[key]
    own: Iterable[tuple[str, tuple[str, Mapping[str, Any]]]] = (
        (config["_name_or_path"], (known, {})) for known, config in BUILT_IN.items()
    )
    alike = ((repository, (known, keys)) for known, all_ in _ALIKE.items() for repository, keys in all_)
    for repository, (known, others) in (*own, *alike):
        if key in (repository.lower(), repository.lower().rpartition("/")[2]):
            return known, {**BUILT_IN[known], "_name_or_path": repository, **others}
    return None


def _published_config(name: str) -> tuple[str, Mapping[str, Any]] | None:
    """Return what `built_in_config` does of `PUBLISHED`."""
    other, differs = published_alike(name)
    key = other.strip().lower()
    for repository, config in PUBLISHED.items():
        if key in (repository.lower(), repository.lower().rpartition("/")[2]):
            own = name.strip() if differs or other != name else repository
            return own.rpartition("/")[2].lower(), {**config, "_name_or_path": own, **differs}
    return None


def lookup_model(name: str) -> ModelShape:
    """Return the built-in shape that `name` means, see `built_in_config`.
    Raises `UnknownModel` with the nearest known name."""
    found = built_in_config(name) or _published_config(name)
    if found is None:
        hint = nearest_name(name.strip().lower().rpartition("/")[2], known_models())
        raise UnknownModel(
            f"unknown model {name!r}{hint}; built in: {', '.join(known_models())}; "
            "any other: give the path of its config.json"
        )
    key, config = found
    return read_model_shape(config, f"config.json of {config['_name_or_path']}", key)
