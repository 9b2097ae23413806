"""Configurations as `transformers` saves them, in the keys of their publishers.

A model that `transformers` loads and saves again has keys of that library, which say the kind of each layer by a name
(release 5.23). `as_published` gives them the keys that the readers of its family know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Config = Mapping[str, Any]
_SPARSE = "minimax_m3_sparse"


def as_published(config: Config) -> dict[str, Any]:
    """Return a language model's configuration with the keys of its publisher."""
    model_type, kinds = config.get("model_type"), config.get("layer_types")
    form = _FORMS.get(model_type) if isinstance(model_type, str) else None
    if (
        form is None
        or form[0] in config
        or not (isinstance(kinds, list) and all(isinstance(one, str) for one in kinds))
    ):
        return dict(config)
    others = {key: value for key, value in config.items() if not key.startswith(form[2])}
    return {**others, **form[1](config, kinds)}


def _mimo_flash(config: Config, kinds: list[str]) -> dict[str, Any]:
    """Layers with a window have twice the key-value heads; the window counts the query's own token, too."""
    window, heads = config.get("sliding_window"), config.get("num_key_value_heads")
    return {
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in kinds],
        "sliding_window": window - 1 if type(window) is int else window,
        "swa_num_attention_heads": config.get("num_attention_heads"),
        "swa_num_key_value_heads": 2 * heads if type(heads) is int else heads,
        "swa_head_dim": config.get("head_dim"),
        "swa_v_head_dim": config.get("v_head_dim"),
    }


def _deepseek_v4(config: Config, kinds: list[str]) -> dict[str, Any]:
    rates = config.get("compress_rates")
    ratios = {"sliding_attention": 0, **(rates if isinstance(rates, Mapping) else {})}
    mlps = config.get("mlp_layer_types")
    is_known = isinstance(mlps, list) and set(map(str, mlps)) <= {"moe", "hash_moe"}
    return {
        "compress_ratios": [ratios.get(kind, kind) for kind in kinds],
        "mlp_layer_types": ["sparse"] * len(mlps) if is_known and isinstance(mlps, list) else mlps,
    }


def _kimi_linear(config: Config, kinds: list[str]) -> dict[str, Any]:
    """The numbers of layers with full attention begin at 1."""
    return {
        "linear_attn_config": {
            "num_heads": config.get("linear_num_heads"),
            "head_dim": config.get("linear_head_dim"),
            "short_conv_kernel_size": config.get("linear_conv_kernel_dim", 4),
            "full_attn_layers": [place for place, kind in enumerate(kinds, 1) if kind == "full_attention"],
        },
        "max_position_embeddings": config.get("max_position_embeddings", config.get("model_max_length")),
    }


def _minimax_m3(config: Config, kinds: list[str]) -> dict[str, Any]:
    sparse = {
        "use_sparse_attention": _SPARSE in kinds,
        "sparse_num_index_heads": config.get("index_n_heads"),
        "sparse_index_dim": config.get("index_head_dim"),
        "sparse_block_size": config.get("index_block_size"),
        "sparse_topk_blocks": config.get("index_topk_blocks"),
        "sparse_attention_freq": [int(kind == _SPARSE) for kind in kinds],
    }
    return {"sparse_attention_config": sparse, "n_shared_experts": config.get("n_shared_experts", 1)}


_FORMS: Mapping[str, tuple[str, Callable[[Config, list[str]], dict[str, Any]], tuple[str, ...]]] = {
    "mimo_v2_flash": ("hybrid_layer_pattern", _mimo_flash, ("layer_types",)),
    "deepseek_v4": ("compress_ratios", _deepseek_v4, ("layer_types",)),
    "kimi_linear": ("linear_attn_config", _kimi_linear, ("layer_types", "linear_", "model_max_length")),
    "minimax_m3_vl_text": ("sparse_attention_config", _minimax_m3, ("layer_types", "index_")),
}
"""By `model_type`: a key that such a file does not have, its form, and the beginnings of the keys that it replaces."""
