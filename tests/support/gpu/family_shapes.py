"""A small shape of every family that the decoder runs, and of kinds of rotation that its families share."""

from __future__ import annotations

from dataclasses import replace
from math import log

from foredraft.core.model_shape import MoeConfig
from foredraft.gpu.models.config import ModelConfig
from foredraft.gpu.models.families import CLAMPED_SWIGLU, GELU_TANH, architecture_of
from foredraft.gpu.models.rope import Rope
from foredraft.gpu.types.attention import Latent
from foredraft.gpu.types.recurrence import StateShape
from small_checkpoint import SHAPE

WINDOWS = {"window": 6, "windowed_layers": (0, 2)}
ALL_WINDOWS = {"window": 6, "windowed_layers": (0, 1, 2, 3)}
GEMMA = {"activation": GELU_TANH, "attention_scale": 16**-0.5}
EXPERTS = MoeConfig(4, 2, 24, norm_topk_prob=True)
ROUTED = MoeConfig(
    8, 2, 24, norm_topk_prob=True, mlp_only_layers=(0,), shared_size=24, scale=1.5, num_groups=4, top_groups=2
)
SHARED = MoeConfig(6, 2, 24, norm_topk_prob=True, shared_size=20)
HYBRID = {
    "state": StateShape(heads=4, key_heads=2, key_dim=6, value_dim=5, kernel=4), "recurrent_layers": (0, 1, 3),
    "output_gate": True, "qk_norm": True, "rope": Rope(1e4, fraction=0.25),
}  # fmt: skip
LATENT = {"head_dim": 16, "num_kv_heads": 1, "rope": Rope(1e4, fraction=0.25, neighbours=True)}
FIELDS: dict[str, dict] = {
    "llama": {},
    "llama, dynamic rope": {"rope": Rope(1e4, "dynamic", 2.0, SHAPE.max_position_embeddings)},
    "qwen2": {"qkv_bias": True, "window": 6, "windowed_layers": (1, 2, 3)},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True, "moe": EXPERTS},
    "mistral": ALL_WINDOWS,
    "mixtral": {"moe": replace(EXPERTS, intermediate_size=64)},
    "phi3": ALL_WINDOWS,
    "phi3, longrope": {
        "rope": Rope(
            1e4, "longrope", 16.0, 16, attention_factor=1.2, fraction=0.75, short_factors=(1.0, 1.1, 1.3),
            long_factors=(1.5, 4.0, 9.0),
        ),
    },
    "gemma2": {**GEMMA, **WINDOWS, "attention_softcap": 3.0, "logit_softcap": 9.0, "tied_embeddings": True},
    "gemma3": {**GEMMA, **WINDOWS, "local_rope": Rope(100.0), "qk_norm": True, "tied_embeddings": True},
    "gemma4": {
        **WINDOWS, "activation": GELU_TANH, "attention_scale": 1.0, "qk_norm": True, "tied_embeddings": True,
        "full_head_dim": 24, "full_kv_heads": 1, "values_are_keys": True, "logit_softcap": 9.0,
        "rope": Rope(1e4, "proportional", fraction=0.25), "local_rope": Rope(100.0),
    },
    "gpt_oss": {
        **WINDOWS, "sinks": True, "moe": replace(EXPERTS, intermediate_size=64), "qkv_bias": True, "output_bias": True,
        "activation": CLAMPED_SWIGLU, "rope": Rope(1e4, "yarn", 4.0, 32, attention_factor=1.1, truncate=False),
    },
    "mimo": {"qkv_bias": True},
    "smollm3": {"unrotated_layers": (1, 3), "tied_embeddings": True},
    "olmo2": {"qk_norm": True},
    "olmo3": {
        **WINDOWS, "qk_norm": True, "rope": Rope(1e4, "yarn", 4.0, 16, attention_factor=1.1), "local_rope": Rope(1e4),
    },
    "granite": {
        "attention_scale": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "logit_divisor": 2.0,
        "tied_embeddings": True,
    },
    "glm4": {"rope": Rope(1e4, fraction=0.5, neighbours=True), "qkv_bias": True},
    "ministral3": {"rope": Rope(1e3, "yarn", 4.0, 16, query_beta=0.3)},
    "seed_oss": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "deepseek_v2": {
        **LATENT, "latent": Latent(rank=12, rope_dim=4, nope_dim=6, value_dim=8),
        "moe": replace(ROUTED, norm_topk_prob=False, num_groups=2), "attention_scale": 10**-0.5,
    },
    "deepseek_v3": {
        **LATENT, "latent": Latent(rank=12, rope_dim=4, nope_dim=6, value_dim=5, query_rank=16), "moe": ROUTED,
        "rope": Rope(1e4, "yarn", 4.0, 64, mscale_all_dim=1.0, fraction=0.25, neighbours=True),
        "attention_scale": 10**-0.5 * (0.1 * log(4) + 1) ** 2,
    },
    "glm4_moe": {"rope": Rope(1e4, fraction=0.5), "qkv_bias": True, "qk_norm": True, "moe": ROUTED},
    "glm4_moe, no norms of heads": {"rope": Rope(1e4, fraction=0.5), "moe": ROUTED},
    "qwen3_next": {**HYBRID, "moe": SHARED},
    "qwen3_5": {**HYBRID, "recurrent_layers": (1, 2)},
    "qwen3_5_moe": {**HYBRID, "moe": SHARED},
}  # fmt: skip


def family_of(label: str) -> str:
    """The family of a shape: its label up to the first comma."""
    return label.partition(",")[0]


SHAPES: dict[str, ModelConfig] = {
    label: replace(SHAPE, architecture=architecture_of(family_of(label)), **fields) for label, fields in FIELDS.items()
}
