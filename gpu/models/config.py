"""The configuration of the decoder: a model's shape and what its computation needs beside it, read from a checkpoint's
`config.json`.

What the decoder cannot run (another family, another activation, an unknown form of quantized weights) is refused before
a weight is read. All problems of a file are reported together, with the file and the key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.model_shape import HF_QUANT_CONFIG, MoeConfig, language_model, modelopt_config, note_unread, read_matrices
from ...core.parsing import ConfigReader, read_json_object
from ...observe.input_files import read_text
from ..types.attention import Heads, KVShape, Latent
from ..types.recurrence import StateShape
from ..types.shards import WHOLE, Shard
from .families import (
    GELU_TANH,
    LAYER_TYPES,
    MODEL_TYPES,
    MULTIMODAL,
    RECURRENT,
    SILU,
    ExpertForm,
    ModelFamily,
    Routing,
    ScaleKey,
    family_of,
    read_architecture,
    refuse_keys_of_others,
    saved_type,
)
from .rope import Rope
from .stored.quantized import Quantization, read_quantization
from .stored.read_config import DTYPES, read_fields
from .stored.tensor_files import has_own_head

LLAMA, QWEN3_MOE = "LlamaForCausalLM", "Qwen3MoeForCausalLM"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes in elements, positions in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope: Rope = field(default_factory=Rope)
    max_position_embeddings: int = 2048
    full_head_dim: int = 0  # of the layers without a window, where they have heads of their own
    full_kv_heads: int = 0  # of these layers
    values_are_keys: bool = False  # of these layers: keys before their norm are the values, too
    latent: Latent | None = None  # attention has one key-value head of head_dim = rank + rope_dim
    state: StateShape | None = None  # of each of `recurrent_layers`
    recurrent_layers: tuple[int, ...] = ()
    output_gate: bool = False  # of what attention gives, made of its input
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm of q and k before rotation, over each head or all at once as the family has it
    tied_embeddings: bool = False
    moe: MoeConfig | None = None
    activation: str = SILU
    window: int = 0  # positions that a query of `windowed_layers` sees, its own included
    windowed_layers: tuple[int, ...] = ()
    local_rope: Rope | None = None  # of the windowed layers, where it is another one
    unrotated_layers: tuple[int, ...] = ()
    attention_scale: float | None = None  # None: head_dim^-½
    attention_softcap: float = 0.0  # see `Softmax`
    logit_softcap: float = 0.0  # of the LM head's logits, in the same way
    logit_divisor: float = 1.0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what attention and MLP add to the residual
    sinks: bool = False  # see `Softmax`
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    mask_token: int | None = None  # PARD: stands for a token to be drafted
    dtype: torch.dtype = torch.float32
    shard: Shard = WHOLE  # the part whose sizes these are, of a model on several devices
    quantization: Quantization | None = field(default=None, compare=False)  # of the files
    has_own_head: bool = field(default=False, compare=False)  # in the files, although `config.json` ties it
    # Whether products keep quantized matrices in the numbers of the files; if not, all weights have the model's dtype.
    keeps_quantized: bool = field(default=False, compare=False)

    @classmethod
    def from_directory(cls, directory: str | Path) -> ModelConfig:
        """Read `config.json`; end tokens are those of `generation_config.json` if there is one, and the LM head is the
        one in the files if they have another than the embeddings. Raises ConfigError."""
        config = cls.from_dict(read_config(directory), str(Path(directory) / "config.json"))
        if config.tied_embeddings and has_own_head(directory):
            config = replace(config, tied_embeddings=False, has_own_head=True)
        generation = Path(directory) / "generation_config.json"
        if generation.is_file():
            reader = ConfigReader(read_json(generation), str(generation))
            ends = reader.token_ids("eos_token_id")
            reader.raise_problems()
            if ends:
                config = replace(config, eos_token_ids=ends)
        return config

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """Read a parsed config.json. Raises ConfigError with all problems of `source`."""
        reader = ConfigReader(data, source)
        architecture = read_architecture(reader)
        if data.get("text_config") is not None and data.get("architectures") in [[name] for name in MULTIMODAL]:
            reader.raise_problems()
            reader = language_model(data, source)
        if architecture is not None:
            refuse_keys_of_others(reader, architecture)
        config = read_model_config(reader, architecture)
        reader.raise_problems()
        assert config is not None and architecture is not None
        family = MODEL_TYPES[architecture]
        read_matrices(ConfigReader(reader.data, source, read=reader.read), family)
        note_unread(reader, family)  # keys that neither the layers nor the sizes of their matrices follow from
        reader.raise_problems()
        quantization = quantization_of(reader, config)
        reader.raise_problems()
        return replace(config, quantization=quantization)

    @property
    def family(self) -> ModelFamily:
        """What the layers compute beside what this configuration says, and how their weights are published."""
        return family_of(self.architecture)

    @property
    def exchange(self) -> Callable[[Tensor], Tensor] | None:
        """What makes a layer's whole output of the part that this rank computes; None in one process."""
        return None if self.shard.is_whole else self.shard.total

    def heads_of(self, layer: int) -> Heads:
        """Return the heads of a layer's attention."""
        if self.full_head_dim and layer not in self.windowed_layers:
            return Heads(self.num_heads, self.full_kv_heads, self.full_head_dim, self.values_are_keys)
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim)

    def kv_shape_of(self, layer: int) -> KVShape:
        """Return what a layer keeps of a token."""
        heads = self.heads_of(layer)
        return KVShape(heads.kv, heads.dim, 0 if self.latent else heads.dim)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with a KV cache, in the order of the pool."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.recurrent_layers)

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        return tuple(map(self.kv_shape_of, self.attention_layers))

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """What each recurrent layer keeps of a request."""
        return () if self.state is None else (self.state,) * len(self.recurrent_layers)

    def rope_of(self, layer: int) -> Rope | None:
        """Return the rotation of a layer; None for one that rotates nothing."""
        if layer in self.unrotated_layers:
            return None
        return self.local_rope if self.local_rope is not None and layer in self.windowed_layers else self.rope

    def within(self, context_len: int) -> ModelConfig:
        """Return the configuration for texts of at most `context_len` tokens: if they fit into the context before
        longrope, its tables are those of that context."""
        original = self.rope.original_max_position
        if self.rope.scaling != "longrope" or not context_len <= original < self.max_position_embeddings:
            return self
        return replace(self, max_position_embeddings=original)

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe_layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.num_layers) if self.moe is not None and self.moe.is_sparse(i))

    def to_dict(self) -> dict[str, Any]:
        """Return the config.json that `from_dict` reads back and that `transformers` loads."""
        data: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": saved_type(MODEL_TYPES[self.architecture]),
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": self.activation if self.activation == GELU_TANH else SILU,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tied_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": _ids_to_json(self.eos_token_ids),
            **({} if self.mask_token is None else {"pard_token": self.mask_token}),
            "pad_token_id": None,  # some families' default is past a small vocabulary
            "torch_dtype": next(name for name, dtype in DTYPES.items() if dtype is self.dtype),
            **self._ropes_to_dict(),
        }
        if self.family.rotated_fraction is not None:  # 1.0, too, which is not every family's default
            data["partial_rotary_factor"] = self.rope.fraction
        if self.latent is not None:
            data |= self._latent_to_dict(self.latent)
        if self.state is not None:
            data |= self._state_to_dict(self.state)
        family = self.family
        if self.window:
            data["sliding_window"] = self.window
            data["layer_types"] = [LAYER_TYPES[i in self.windowed_layers] for i in range(self.num_layers)]
            data["use_sliding_window"] = True
        if self.activation == GELU_TANH:
            data["hidden_activation"] = self.activation
        if isinstance(family.attention_scale, ScaleKey):
            data[family.attention_scale.name] = family.attention_scale.written(
                self.attention_scale or self.head_dim**-0.5
            )
        if family.softcaps is not None:
            data["attn_logit_softcapping"] = self.attention_softcap or None
            data["final_logit_softcapping"] = self.logit_softcap or None
        if family.has_full_heads:
            data |= {
                "global_head_dim": self.full_head_dim or self.head_dim,
                "num_global_key_value_heads": self.full_kv_heads or self.num_kv_heads,
                "attention_k_eq_v": self.values_are_keys,
                "hidden_size_per_layer_input": 0,
            }
        if family.has_unrotated_layers:
            data["no_rope_layers"] = [int(i not in self.unrotated_layers) for i in range(self.num_layers)]
        data |= {key: getattr(self, name) for name, key in family.numbers.items()}
        biases = (family.mlp_bias, self.mlp_bias), (family.output_bias, self.output_bias)
        for key, has_part in (*biases, (family.qkv_bias, self.qkv_bias), (family.has_head_norms, self.qk_norm)):
            if isinstance(key, str):
                data[key] = has_part
        if family.experts is not None and self.moe is not None:
            data |= _experts_to_dict(self.moe, family.experts)
        return data

    def _latent_to_dict(self, latent: Latent) -> dict[str, Any]:
        return {
            "kv_lora_rank": latent.rank,
            "q_lora_rank": latent.query_rank or None,
            "qk_nope_head_dim": latent.nope_dim,
            "qk_rope_head_dim": latent.rope_dim,
            "v_head_dim": latent.value_dim,
            "num_key_value_heads": self.num_heads,
            "head_dim": latent.rope_dim,
            "rope_interleave": self.rope.neighbours,
            "partial_rotary_factor": 1.0,
        }

    def _state_to_dict(self, state: StateShape) -> dict[str, Any]:
        return {
            "linear_num_value_heads": state.heads,
            "linear_num_key_heads": state.key_heads,
            "linear_key_head_dim": state.key_dim,
            "linear_value_head_dim": state.value_dim,
            "linear_conv_kernel_dim": state.kernel,
            "layer_types": [
                RECURRENT if layer in self.recurrent_layers else LAYER_TYPES[0] for layer in range(self.num_layers)
            ],
        }

    def _ropes_to_dict(self) -> dict[str, Any]:
        if self.local_rope is None:
            return self.rope.to_dict()
        if self.family.local_rope_key is not None:
            return {**self.rope.to_dict(), self.family.local_rope_key: self.local_rope.theta}
        ropes = {"full_attention": self.rope, "sliding_attention": self.local_rope}
        parts = {kind: rope.to_dict() for kind, rope in ropes.items()}
        for part in parts.values():
            part |= {"rope_type": "default"} | part.pop("rope_scaling", {})
        return {"rope_parameters": parts}


def read_model_config(reader: ConfigReader, architecture: str | None) -> ModelConfig | None:
    """Read the configuration of `architecture`; None if the reader has noted problems."""
    fields = read_fields(reader, architecture)
    return None if reader.problems or architecture is None else ModelConfig(architecture, **fields)


def quantization_of(reader: ConfigReader, config: ModelConfig) -> Quantization | None:
    """Read how the matrices of layers of this shape are stored; None if they are not quantized. What cannot be read is
    noted in `reader`."""
    return read_quantization(reader, lambda: read_matrices(reader, MODEL_TYPES[config.architecture]))


def read_config(directory: str | Path) -> dict[str, Any]:
    """Read `config.json` of a model or a head, with the quantization of the file that ModelOpt writes beside it. Raises
    ConfigError."""
    data, beside = read_json(Path(directory) / "config.json"), Path(directory) / HF_QUANT_CONFIG
    if beside.is_file() and (found := modelopt_config(read_json(beside), str(beside))) is not None:
        data = {"quantization_config": found} | data
    return data


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises ConfigError."""
    return read_json_object(str(path), read_text, of_checkpoint=True)


def _experts_to_dict(moe: MoeConfig, form: ExpertForm) -> dict[str, Any]:
    data: dict[str, Any] = {form.key: moe.num_experts, "num_experts_per_tok": moe.top_k}
    if form.has_own_width:
        data |= {"moe_intermediate_size": moe.intermediate_size, "norm_topk_prob": moe.norm_topk_prob}
    if form.has_shared_gate:
        data["shared_expert_intermediate_size"] = moe.shared_size
    if form.routing is not Routing.SOFTMAX:
        data |= {
            "first_k_dense_replace": len(moe.mlp_only_layers),
            "n_shared_experts": moe.shared_size // moe.intermediate_size,
            "routed_scaling_factor": moe.scale,
            "n_group": moe.num_groups,
            "topk_group": moe.top_groups,
            "topk_method": "group_limited_greedy" if moe.num_groups > 1 else "greedy",
        }
    elif form.has_own_width:
        data |= {"decoder_sparse_step": moe.decoder_sparse_step, "mlp_only_layers": list(moe.mlp_only_layers)}
    return data


def _ids_to_json(ids: tuple[int, ...]) -> int | list[int] | None:
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)
