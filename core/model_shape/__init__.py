"""The shape of a model: what decides its weights, its KV cache and the cost of a forward pass."""

from .catalogue import BUILT_IN, built_in_config, known_models, lookup_model
from .families import ARCHITECTURES, MoeConfig, read_experts, read_model_shape
from .layers import Attention, Cache, Experts, LatentAttention, Mlp, Product, Recurrence
from .mixers import read_sizes
from .quantization import HF_QUANT_CONFIG, modelopt_config
from .shape import DTYPE_BYTES, ModelShape, UnknownModel

__all__ = [
    "ARCHITECTURES",
    "BUILT_IN",
    "DTYPE_BYTES",
    "HF_QUANT_CONFIG",
    "Attention",
    "Cache",
    "Experts",
    "LatentAttention",
    "Mlp",
    "ModelShape",
    "MoeConfig",
    "Product",
    "Recurrence",
    "UnknownModel",
    "built_in_config",
    "known_models",
    "lookup_model",
    "modelopt_config",
    "read_experts",
    "read_model_shape",
    "read_sizes",
]
