"""The reader of what a multimodal model sees or hears with: how many weights its towers have beside the language model.

Their matrices are counted by the usual sizes of a transformer, with the projection into the language model: within some
per cent of what `transformers` builds, for towers that are some per cent of a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_RATIO = 100  # of an MLP's width; what is no such number counts as none
_GATED = ("silu", "swish")
_GATED_TYPES = ("pixtral",)
_WIDE = {"glm4v_vision": "out_hidden_size", "glm4v_moe_vision": "out_hidden_size"}  # the key of an MLP's width


def tower_parameters(config: Mapping[str, Any], hidden: int) -> int:
    """Return the weights of the towers of a parsed `config.json`; `hidden`: the width of its language model."""
    inner = config.get("thinker_config")
    whole = inner if isinstance(inner, Mapping) else config
    towers = (whole.get(key) for key in ("vision_config", "audio_config"))
    return sum(_tower(tower, hidden) for tower in towers if isinstance(tower, Mapping))


def _tower(tower: Mapping[str, Any], hidden: int) -> int:
    layers = _first(tower, "num_hidden_layers", "depth", "encoder_layers")
    width = _first(tower, "embed_dim", "hidden_size", "d_model")
    ratio = tower.get("mlp_ratio")
    wide = int(width * ratio) if isinstance(ratio, int | float) and 0 < ratio < MOST_RATIO else 4 * width
    kind = str(tower.get("model_type"))
    inner = _first(tower, _WIDE.get(kind, "intermediate_size"), "encoder_ffn_dim") or wide
    gated = tower.get("hidden_act") in _GATED or kind in _GATED_TYPES
    own = layers * (4 * width**2 + (3 if gated else 2) * width * inner)
    merged = width * (_first(tower, "spatial_merge_size") or 1) ** 2
    if merged > width:  # several patches become one token; Qwen3-VL has further ways into the first layers
        ways = tower.get("deepstack_visual_indexes")
        return own + (1 + (len(ways) if isinstance(ways, list) else 0)) * merged * (merged + hidden)
    return own + hidden * (width + hidden)


def _first(tower: Mapping[str, Any], *keys: str) -> int:
    return next((tower[key] for key in keys if type(tower.get(key)) is int and tower[key] > 0), 0)
