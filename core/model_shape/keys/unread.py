"""Keys of a configuration that say something of a model's sizes and that no reader has asked for.

A model with such a key is refused: with a layer that has no KV of its own, or a further embedding, its weights and KV
would be counted wrongly. `_HARMLESS` are words of keys that change neither; `_REPEATED` are keys of other names, or of
layers that a family does not have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...parsing import ConfigReader

_SIZES = re.compile(r"layer|size|shared|head|window|expert|hidden|latent|vocab")
_HARMLESS = re.compile(
    r"rope|rotary|norm|eps|init|drop|std|chunk|parallel|pretrain|aux|vis|image|audio|video|patch|token|cache|bias|"
    r"mtp|nextn|scal|freq|theta|position|rout|kernel|time_step|hash|overlap|label|beam|batch|loss|act|spec|spark|draft|target|"
    r"eagle|quant|dtype|fused|return|output|implementation|group|topk|ep_size|multiplier|precision|multipl|classif"
)
_LATENT = (
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_linear", "glm4_moe_lite", "mistral4", "minicpm3",
    "youtu", "longcat_flash",
)  # fmt: skip
_REPEATED: Mapping[str, tuple[str, ...]] = {
    "head_dim": _LATENT,
    "num_key_value_heads": (*_LATENT, "deepseek_v4"),
    "qk_head_dim": _LATENT,
    "qk_rope_head_dim": ("deepseek_v4",),
    "layer_types": ("glm_moe_dsa", "deepseek_v4", "deepseek_v32"),
    "num_experts": ("glm_moe_dsa",),
    "experts_per_token": ("gpt_oss",),
    "n_shared_experts": ("nemotron_h",),
    "attn_res_block_size": ("kimi_linear",),
    "sliding_window_size": ("mimo_v2_flash",),
    "block_size": ("minimax",),
    "mamba_d_head": ("falcon_h1",),
    "layer_switch": ("cohere2",),
    "num_shared_expert": ("hunyuan_v1_dense",),
}
_STANDARD = (
    "intermediate_size", "intermediate_size_mlp", "dense_intermediate_size", "moe_intermediate_size",
    "moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", "moe_latent_size", "max_window_layers",
    "num_experts_per_tok", "vocab_size_per_layer_input", "sliding_window_pattern", "use_sliding_window",
)  # fmt: skip
"""Sizes of MLPs or layers that a model of a family may not have, and what a list of layers says, too."""
_OTHER_NAMES = {
    **dict.fromkeys(("num_layers", "n_layers", "n_layer"), "num_hidden_layers"),
    **dict.fromkeys(("num_heads", "n_heads", "n_head"), "num_attention_heads"),
    **dict.fromkeys(("padded_vocab_size", "original_vocab_size"), "vocab_size"),
}
"""Names that older files have beside today's; only another value would say something."""


def note_unread(reader: ConfigReader, family: str) -> None:
    """Note the keys of sizes that a reader of `family` has not asked for."""
    for key in list(reader.unread()):
        value = reader.data[key]
        if (
            key.startswith("_")
            or not _SIZES.search(key)
            or _HARMLESS.search(key)
            or key in _STANDARD
            or family in _REPEATED.get(key, ())
        ):
            continue
        if value == reader.data.get(_OTHER_NAMES.get(key, ""), key):
            continue
        if not _says_nothing(value):
            message = f"is not read for the family {family}, so weights or KV may be others: {value!r:.60}"
            reader.problem(key, message)


def _says_nothing(value: Any) -> bool:
    """Return whether a value is that of a model without what its key is about."""
    if isinstance(value, list):
        return not value or set(map(str, value)) == {"full_attention"}
    return value in (None, False, 0, 1, {}) or isinstance(value, str)
