"""The layers of a model's own checkpoint that draft for it (multi-token prediction): their number and their shape.

Such a layer is one of the model's, with its attention and its experts. Its keys are those of the model; `_of_family`
says which kind of layer it is where a family has several (by the servers' own code, vLLM 0.33 and SGLang 0.5.23).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..parsing import ConfigReader
from .families import language_model, read_formats, read_matrices, read_model_shape
from .matrices import matrices_of
from .mixers import nemotron_letters
from .quantization import CONFIG_KEYS
from .shape import ModelShape

_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_UNCOUNTED = ("qwen3_next", "mimo_v2_flash")  # families whose checkpoints have one and whose files do not say so
_BEHIND_THE_LAST = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm_moe_dsa", "kimi_linear", "step3p7", "minimax_m3")
_SINGLE: Mapping[str, Any] = {
    "num_hidden_layers": 1, "first_k_dense_replace": 0, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "full_attention_interval": 1, "layer_types": ["full_attention"], "indexer_types": ["full"],
    "mlp_layer_types": ["sparse"],
}  # fmt: skip
"""Keys of one layer with full attention, and with experts where the family has some."""
_FORMATS = ("weight_dtype", "attention_dtype", "mlp_dtype", "embedding_dtype", "head_dtype")


def prediction_layers(model: ModelShape) -> int:
    """Return how many layers of its own checkpoint draft for a model. Raises ConfigError."""
    reader = language_model(model.config or {}, model.source)
    keys = ("num_mtp_modules",) if model.family == "minimax_m3" else _COUNTS  # M2 counts some that no checkpoint has
    counts = [reader.integer(key, 0, minimum=0) for key in keys if reader.get(key) is not None]
    reader.raise_problems()
    return max(counts, default=int(model.family in _UNCOUNTED))


def prediction_layer(model: ModelShape) -> ModelShape:
    """Return one of the layers that draft for a model, as a model of one layer. Raises ConfigError."""
    assert model.config is not None, model.name
    reader = language_model(model.config, model.source)
    changed = {key: value for key, value in _SINGLE.items() if key in reader.data or key == "num_hidden_layers"}
    data = {**reader.data, **changed, **_of_family(reader, model)}
    plain = {key: value for key, value in data.items() if key not in CONFIG_KEYS}
    layer = read_model_shape(plain, model.source, f"prediction layer of {model.name}", is_whole=False)
    return replace(layer, config=data, kv_dtype=model.kv_dtype, **_formats(reader, model, layer))


def _of_family(reader: ConfigReader, model: ModelShape) -> dict[str, Any]:
    """Return the keys of the layer in which its family has another kind than `_SINGLE` says."""
    match model.family:
        case "mimo_v2_flash":  # a window, and a dense MLP
            return {"hybrid_layer_pattern": [1], "moe_layer_freq": [0]}
        case "minimax_m3":
            sparse = reader.get("sparse_attention_config") or {}
            return {"moe_layer_freq": [1], "sparse_attention_config": {**sparse, "sparse_attention_freq": [1]}}
        case "kimi_linear":
            return {"linear_attn_config": {**(reader.get("linear_attn_config") or {}), "full_attn_layers": [1]}}
        case "deepseek_v4":
            ratios = reader.get("compress_ratios")
            return {
                "compress_ratios": ratios[model.layers : model.layers + 1] or [0] if isinstance(ratios, list) else None
            }
        case "nemotron_h":
            names = reader.get("mtp_layers_block_type")
            usual = nemotron_letters(names) if isinstance(names, list) and names else "*E"
            pattern = str(reader.get("mtp_hybrid_override_pattern", usual))
            return {"hybrid_override_pattern": pattern, "layers_block_type": None, "num_hidden_layers": len(pattern)}
        case "step3p7":  # dense: the numbers of the layers with experts end before it
            return {"moe_layer_freq": [0]}
    return {}


def _formats(reader: ConfigReader, model: ModelShape, layer: ModelShape) -> dict[str, Any]:
    """Return the formats of the layer's weights: by the entries of the checkpoint that name it, or, where a scenario
    asks for other weights, those of the model."""
    own = {key: getattr(model, key) for key in _FORMATS}
    stored = read_model_shape(model.config or {}, model.source, model.name)
    if own != {key: getattr(stored, key) for key in _FORMATS} or not any(reader.get(key) for key in CONFIG_KEYS):
        return own
    mixers = [mixer for mixer, count in layer.mixers for _ in range(count)]
    mlps = [part for part, count in layer.mlps for _ in range(count)]
    place = model.layers if model.family in _BEHIND_THE_LAST else -1
    named = [
        replace(matrix, layer=place)
        for matrix in matrices_of(model.family, model.hidden, model.vocab, mixers, mlps, model.tied_embeddings)
        if matrix.layer is not None
    ]
    found = read_formats(reader, lambda: read_matrices(reader, model.family), named)
    return {key: value for key, value in found.items() if key in _FORMATS}
