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
}
"""The published `config.json` of each built-in model."""


def known_models() -> tuple[str, ...]:
    """Return the names of the built-in models, in the catalogue's order."""
    return tuple(BUILT_IN)


_FP8_BLOCKS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
_REPOSITORIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "meta-llama/Llama-3.1-8B-Instruct": ("llama-3.1-8b", {}),
    "meta-llama/Meta-Llama-3.1-8B": ("llama-3.1-8b", {}),
    "meta-llama/Meta-Llama-3.1-8B-Instruct": ("llama-3.1-8b", {}),
    "meta-llama/Llama-3.1-70B-Instruct": ("llama-3.1-70b", {}),
    "meta-llama/Meta-Llama-3.1-70B": ("llama-3.1-70b", {}),
    "meta-llama/Meta-Llama-3.1-70B-Instruct": ("llama-3.1-70b", {}),
    "meta-llama/Llama-3.2-1B-Instruct": ("llama-3.2-1b", {}),
    "meta-llama/Llama-3.2-3B-Instruct": ("llama-3.2-3b", {}),
    "meta-llama/Llama-2-7b-chat-hf": ("llama-2-7b", {}),
    "Qwen/Qwen3-8B-FP8": ("qwen3-8b", _FP8_BLOCKS),
    "Qwen/Qwen3-0.6B-FP8": ("qwen3-0.6b", _FP8_BLOCKS),
    "Qwen/Qwen3-30B-A3B-FP8": ("qwen3-30b-a3b", _FP8_BLOCKS),
    "Qwen/Qwen2.5-7B-Instruct": ("qwen2.5-7b", {"max_position_embeddings": 32768}),
}
"""Repositories on Hugging Face of the shape of a built-in model, whose own is its `_name_or_path`:
the name, and the keys that differ."""


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
    for repository, (known, others) in (*own, *_REPOSITORIES.items()):
        if key in (repository.lower(), repository.lower().rpartition("/")[2]):
            return known, {**BUILT_IN[known], "_name_or_path": repository, **others}
    return None


def lookup_model(name: str) -> ModelShape:
    """Return the built-in shape that `name` means, see `built_in_config`.
    Raises `UnknownModel` with the nearest known name."""
    found = built_in_config(name)
    if found is None:
        hint = nearest_name(name.strip().lower().rpartition("/")[2], known_models())
        raise UnknownModel(
            f"unknown model {name!r}{hint}; built in: {', '.join(known_models())}; "
            "any other: give the path of its config.json"
        )
    key, config = found
    return read_model_shape(config, f"config.json of {config['_name_or_path']}", key)
