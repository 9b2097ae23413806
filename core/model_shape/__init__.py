"""The shape of a model: what decides its weights, its KV cache and the cost of a forward pass."""

from .catalogue import BUILT_IN, built_in_config, known_models, lookup_model
from .quantization import HF_QUANT_CONFIG, modelopt_config
from .shape import (
    ARCHITECTURES,
    DTYPE_BYTES,
    ModelShape,
    MoeConfig,
    UnknownModel,
    read_experts,
    read_model_shape,
    read_sizes,
)

__all__ = [
    "ARCHITECTURES",
    "BUILT_IN",
    "DTYPE_BYTES",
    "HF_QUANT_CONFIG",
    "ModelShape",
    "MoeConfig",
    "UnknownModel",
    "built_in_config",
    "known_models",
    "lookup_model",
    "modelopt_config",
    "read_experts",
    "read_model_shape",
    "read_sizes",
]
