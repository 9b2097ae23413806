"""The shape of a model: what decides its weights, its KV cache and the cost of a forward pass."""

from .block_heads import (
    BlockParts,
    block_kind,
    brings_block_drafter,
    most_block_drafts,
    read_block_config,
    read_block_head,
    read_own_block,
)
from .catalogue import BUILT_IN, built_in_config, known_models, known_repositories, lookup_model, published_alike
from .families import ARCHITECTURES, FAMILIES, family_of_type, language_model, read_matrices, read_model_shape
from .heads import AUX_LAYERS_KEY, SPECULATORS_KEY, HeadShape, flat_head, read_head
from .keys.unread import note_unread
from .kv_formats import KV_FORMATS
from .layers import Attention, Cache, Experts, LatentAttention, Mlp, Product, Recurrence
from .mixers import read_full_heads, read_sizes, read_unrotated, read_windows, replace_missing
from .mlps import MoeConfig, read_experts
from .prediction import prediction_layer, prediction_layers
from .quantization import HF_QUANT_CONFIG, modelopt_config
from .shape import STATE_BYTES, ModelShape, UnknownModel

__all__ = [
    "ARCHITECTURES",
    "AUX_LAYERS_KEY",
    "BUILT_IN",
    "BlockParts",
    "FAMILIES",
    "HF_QUANT_CONFIG",
    "Attention",
    "Cache",
    "Experts",
    "HeadShape",
    "KV_FORMATS",
    "LatentAttention",
    "Mlp",
    "ModelShape",
    "MoeConfig",
    "Product",
    "Recurrence",
    "SPECULATORS_KEY",
    "STATE_BYTES",
    "UnknownModel",
    "block_kind",
    "brings_block_drafter",
    "built_in_config",
    "family_of_type",
    "flat_head",
    "known_models",
    "known_repositories",
    "language_model",
    "lookup_model",
    "modelopt_config",
    "most_block_drafts",
    "note_unread",
    "prediction_layer",
    "prediction_layers",
    "published_alike",
    "read_block_config",
    "read_block_head",
    "read_experts",
    "read_full_heads",
    "read_head",
    "read_matrices",
    "read_model_shape",
    "read_own_block",
    "read_sizes",
    "read_unrotated",
    "read_windows",
    "replace_missing",
]
