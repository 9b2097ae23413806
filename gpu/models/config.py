"""The configuration of the decoder: a model's shape and what its computation needs beside it, read from a checkpoint's `config.json`.

What the decoder cannot run (sliding windows, quantized weights, another activation) is refused before a weight is read; all problems of
a file are reported at once, with the file and the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ...core.config_reader import ConfigReader, read_json_object
from ...core.errors import ConfigError, Problem, nearest_name
from ...core.model_shape import ARCHITECTURES as ARCHITECTURE_OF_FAMILY
from ...core.model_shape import HF_QUANT_CONFIG, MoeConfig, modelopt_config, read_experts, read_sizes
from ...core.model_shape.quantization import CONFIG_KEYS
from ...observe.input_files import read_text
from .rope import Rope, read_rope

MODEL_TYPES = {ARCHITECTURE_OF_FAMILY[family]: family for family in ("llama", "qwen2", "qwen3", "qwen3_moe")}
ARCHITECTURES = tuple(MODEL_TYPES)
LLAMA, QWEN2, QWEN3, QWEN3_MOE = ARCHITECTURES
DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_UNQUANTIZED = "quantized weights are not supported; give the checkpoint with 16- or 32-bit weights"


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
        refuse_quantized(directory)
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
        """Read a parsed config.json. Raises ConfigError with all problems of `source`."""
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
        """Return the config.json that `from_dict` reads back and that `transformers` loads."""
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
    """Read the configuration of `architecture`; None if the reader has noted problems."""
    family = None if architecture is None else MODEL_TYPES[architecture]
    sizes = read_sizes(reader, family)
    if sizes["head_dim"] % 2:
        reader.problem("head_dim", f"must be even, its halves are rotated against each other; got {sizes['head_dim']}")
    activation = reader.get("hidden_act", "silu")
    if activation != "silu":
        reader.problem("hidden_act", f"only silu is implemented, got {activation!r}")
    for key in CONFIG_KEYS:
        config = reader.get(key)
        if config is not None:
            method = config.get("quant_method") if isinstance(config, Mapping) else config
            reader.problem(key, f"quant_method {method!r}: {_UNQUANTIZED}")
    _refuse_sliding_window(reader, sizes["layers"])
    config = {
        "vocab_size": sizes["vocab"],
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["intermediate"],
        "num_layers": sizes["layers"],
        "num_heads": sizes["heads"],
        "num_kv_heads": sizes["kv_heads"],
        "head_dim": sizes["head_dim"],
        "rms_norm_eps": reader.number("rms_norm_eps", 1e-6),
        "rope": read_rope(reader, sizes["max_context"]),
        "max_position_embeddings": sizes["max_context"],
        "qkv_bias": sizes["qkv_bias"],
        "output_bias": architecture != QWEN2 and reader.flag("attention_bias"),
        "mlp_bias": architecture == LLAMA and reader.flag("mlp_bias"),
        "qk_norm": sizes["qk_norm"],
        "tied_embeddings": sizes["tied_embeddings"],
        "moe": read_experts(reader, family),
        "bos_token_id": next(iter(reader.token_ids("bos_token_id")), None),
        "eos_token_ids": reader.token_ids("eos_token_id"),
        "dtype": _read_dtype(reader),
    }
    return None if reader.problems or architecture is None else ModelConfig(architecture, **config)


def refuse_quantized(directory: str | Path) -> None:
    """Raise ConfigError if `hf_quant_config.json` says that the weights of a checkpoint are quantized."""
    path = Path(directory) / HF_QUANT_CONFIG
    if not path.is_file():
        return
    config = modelopt_config(read_json(path), str(path))
    if config is not None:
        raise ConfigError(str(path), [Problem("quantization", f"quant_algo {config['quant_algo']!r}: {_UNQUANTIZED}")])


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises ConfigError."""
    return read_json_object(str(path), read_text, with_infinity=True)


def _architecture(reader: ConfigReader) -> str | None:
    names = reader.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        reader.problem("architectures", f"must name one architecture out of {', '.join(ARCHITECTURES)}; got {names!r}")
        return None
    if names[0] not in ARCHITECTURES:
        if names[0] in ARCHITECTURE_OF_FAMILY.values():
            hint = "; the decoder has no layers of this family, only `foretoken simulate` knows it"
        else:
            hint = nearest_name(names[0], ARCHITECTURES)
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


def _read_dtype(reader: ConfigReader) -> torch.dtype:
    key = "torch_dtype" if reader.get("torch_dtype") is not None else "dtype"
    name = reader.get(key) or "float32"
    if name not in DTYPES:
        reader.problem(key, f"{name!r} is none of {', '.join(DTYPES)}")
        return torch.float32
    return DTYPES[name]


def _ids_to_json(ids: tuple[int, ...]) -> int | list[int] | None:
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)
