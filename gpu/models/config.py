"""The shape of a decoder-only transformer, read from the `config.json` of a Hugging Face checkpoint.

Everything wrong with a file is said at once, with the file and the key. What the decoder cannot run (sliding windows, quantized weights,
another activation) is refused here, before a weight is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ...core.errors import ConfigError, Problem, nearest
from .config_reader import ConfigReader
from .rope import Rope, read_rope

LLAMA, QWEN2, QWEN3, QWEN3_MOE = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
ARCHITECTURES = (LLAMA, QWEN2, QWEN3, QWEN3_MOE)
MODEL_TYPES = {LLAMA: "llama", QWEN2: "qwen2", QWEN3: "qwen3", QWEN3_MOE: "qwen3_moe"}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """A mixture of experts: each token is sent to `top_k` of `num_experts` MLPs."""

    num_experts: int
    top_k: int
    intermediate_size: int  # of one expert
    norm_topk_prob: bool = False  # the chosen experts' weights sum to 1
    decoder_sparse_step: int = 1  # every how many layers has experts, counted from the end of each group
    mlp_only_layers: tuple[int, ...] = ()

    def is_sparse(self, layer: int) -> bool:
        """Does `layer` have experts instead of one MLP?"""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


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
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k, before rotation
    tied_embeddings: bool = False
    moe: MoeConfig | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32

    @classmethod
    def from_directory(cls, directory: str | Path) -> ModelConfig:
        """Read `config.json`; end tokens are those of `generation_config.json` if there is one. Raises ConfigError."""
        path = Path(directory) / "config.json"
        config = cls.from_dict(read_json(path), str(path))
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
        """`data` is a parsed config.json. Raises ConfigError with all problems of `source`."""
        reader = ConfigReader(data, source)
        config = read_model_config(reader, _architecture(reader))
        reader.raise_problems()
        assert config is not None
        return config

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe_layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers that have experts."""
        return tuple(i for i in range(self.num_layers) if self.moe is not None and self.moe.is_sparse(i))

    def to_dict(self) -> dict[str, Any]:
        """The config.json that `from_dict` reads back and that `transformers` loads."""
        data: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": MODEL_TYPES[self.architecture],
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tied_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": _ids_to_json(self.eos_token_ids),
            "torch_dtype": next(name for name, dtype in DTYPES.items() if dtype is self.dtype),
            **self.rope.to_dict(),
        }
        if self.architecture != QWEN2:
            data["attention_bias"] = self.qkv_bias
        if self.architecture == LLAMA:
            data["mlp_bias"] = self.mlp_bias
        if self.moe is not None:
            data |= {
                "num_experts": self.moe.num_experts,
                "num_experts_per_tok": self.moe.top_k,
                "moe_intermediate_size": self.moe.intermediate_size,
                "norm_topk_prob": self.moe.norm_topk_prob,
                "decoder_sparse_step": self.moe.decoder_sparse_step,
                "mlp_only_layers": list(self.moe.mlp_only_layers),
            }
        return data


def read_model_config(reader: ConfigReader, architecture: str | None) -> ModelConfig | None:
    """The shape for `architecture`; None if the reader has noted problems."""
    hidden_size = reader.integer("hidden_size")
    num_heads = reader.integer("num_attention_heads")
    num_kv_heads = reader.integer("num_key_value_heads", num_heads)
    default_head_dim = 128 if architecture == QWEN3 else hidden_size // max(num_heads, 1)
    head_dim = reader.integer("head_dim", default_head_dim)
    if num_kv_heads and num_heads % num_kv_heads:
        reader.problem("num_key_value_heads", f"{num_heads} heads cannot share {num_kv_heads} key-value heads evenly")
    if head_dim % 2:
        reader.problem("head_dim", f"must be even, its halves are rotated against each other; got {head_dim}")
    activation = reader.get("hidden_act", "silu")
    if activation != "silu":
        reader.problem("hidden_act", f"only silu is implemented, got {activation!r}")
    if reader.get("quantization_config") is not None:
        reader.problem("quantization_config", "quantized checkpoints are not supported; use the unquantized weights")
    max_position_embeddings = reader.integer("max_position_embeddings", 2048)
    attention_bias = reader.flag("attention_bias")
    num_layers = reader.integer("num_hidden_layers")
    _refuse_sliding_window(reader, num_layers)
    shape = {
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": reader.integer("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": reader.number("rms_norm_eps", 1e-6),
        "rope": read_rope(reader, max_position_embeddings),
        "max_position_embeddings": max_position_embeddings,
        "qkv_bias": architecture == QWEN2 or attention_bias,
        "output_bias": architecture != QWEN2 and attention_bias,
        "mlp_bias": architecture == LLAMA and reader.flag("mlp_bias"),
        "qk_norm": architecture in (QWEN3, QWEN3_MOE),
        "tied_embeddings": reader.flag("tie_word_embeddings"),
        "moe": _read_moe(reader) if architecture == QWEN3_MOE else None,
        "bos_token_id": next(iter(reader.token_ids("bos_token_id")), None),
        "eos_token_ids": reader.token_ids("eos_token_id"),
        "dtype": _read_dtype(reader),
    }
    return None if reader.problems or architecture is None else ModelConfig(architecture, **shape)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ConfigError if the file is missing, is not JSON or holds something else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), [Problem("", f"cannot be read: {error.strerror or error}")]) from error
    except ValueError as error:
        raise ConfigError(str(path), [Problem("", f"is not JSON: {error}")]) from error
    if not isinstance(data, dict):
        raise ConfigError(str(path), [Problem("", f"must hold a JSON object, not {type(data).__name__}")])
    return data


def _architecture(reader: ConfigReader) -> str | None:
    names = reader.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        reader.problem("architectures", f"must name one architecture out of {', '.join(ARCHITECTURES)}; got {names!r}")
        return None
    if names[0] not in ARCHITECTURES:
        hint = nearest(names[0], ARCHITECTURES)
        reader.problem("architectures", f"{names[0]} is none of {', '.join(ARCHITECTURES)}{hint}")
        return None
    return names[0]


def _refuse_sliding_window(reader: ConfigReader, num_layers: int) -> None:
    """Windows are inactive where the switch is off or where they would begin past the last layer."""
    layer_types = reader.get("layer_types") or []
    if any(kind != "full_attention" for kind in layer_types):
        kind = next(kind for kind in layer_types if kind != "full_attention")
        reader.problem("layer_types", f"only full_attention is implemented, got {kind!r}")
        return
    has_window = reader.get("sliding_window") is not None and reader.flag("use_sliding_window")
    if has_window and not layer_types and reader.integer("max_window_layers", 0, minimum=0) < num_layers:
        reader.problem("use_sliding_window", "sliding-window attention is not implemented")


def _read_moe(reader: ConfigReader) -> MoeConfig:
    key = "num_experts" if reader.get("num_experts") is not None else "num_local_experts"
    moe = MoeConfig(
        num_experts=reader.integer(key),
        top_k=reader.integer("num_experts_per_tok"),
        intermediate_size=reader.integer("moe_intermediate_size"),
        norm_topk_prob=reader.flag("norm_topk_prob"),
        decoder_sparse_step=reader.integer("decoder_sparse_step", 1),
        mlp_only_layers=reader.integers("mlp_only_layers"),
    )
    if moe.top_k > moe.num_experts:
        reader.problem("num_experts_per_tok", f"{moe.top_k} experts per token, but there are {moe.num_experts}")
    return moe


def _read_dtype(reader: ConfigReader) -> torch.dtype:
    key = "torch_dtype" if reader.get("torch_dtype") is not None else "dtype"
    name = reader.get(key) or "float32"
    if name not in DTYPES:
        reader.problem(key, f"{name!r} is none of {', '.join(DTYPES)}")
        return torch.float32
    return DTYPES[name]


def _ids_to_json(ids: tuple[int, ...]) -> int | list[int] | None:
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)
