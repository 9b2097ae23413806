"""The configuration of the decoder: a model's shape and what its computation needs beside it, read from a checkpoint's
`config.json`.

What the decoder cannot run (another family, another activation, an unknown form of quantized weights) is refused before
a weight is read. All problems of a file are reported together, with the file and the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ...core.model_shape import ARCHITECTURES as ARCHITECTURE_OF_FAMILY
from ...core.model_shape import (
    FAMILIES,
    HF_QUANT_CONFIG,
    MoeConfig,
    language_model,
    modelopt_config,
    read_experts,
    read_sizes,
    read_windows,
    replace_missing,
)
from ...core.parsing import ConfigReader, read_json_object
from ...observe.input_files import read_text
from .quantized import Quantization, read_quantization
from .rope import Rope, read_ropes

DECODED = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "phi3", "gemma2", "gemma3", "gpt_oss", "mimo",
)  # fmt: skip
MODEL_TYPES = {ARCHITECTURE_OF_FAMILY[family]: family for family in DECODED}
ARCHITECTURES = tuple(MODEL_TYPES)
LLAMA, QWEN2, QWEN3, QWEN3_MOE, MISTRAL, MIXTRAL, PHI3, GEMMA2, GEMMA3, GPT_OSS, MIMO = ARCHITECTURES
# Models that see, too, of which the decoder runs the language model.
MULTIMODAL = {"Gemma3ForConditionalGeneration": GEMMA3, "Mistral3ForConditionalGeneration": MISTRAL}
SILU, GELU_TANH, CLAMPED_SWIGLU = "silu", "gelu_pytorch_tanh", "clamped swiglu"
DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


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
    activation: str = SILU
    window: int = 0  # positions that a query of `windowed_layers` sees, its own included
    windowed_layers: tuple[int, ...] = ()
    local_rope: Rope | None = None  # of the windowed layers, where it is another one
    attention_scale: float | None = None  # None: head_dim^-½
    attention_softcap: float = 0.0  # see `Softmax`
    logit_softcap: float = 0.0  # of the LM head's logits, in the same way
    sinks: bool = False  # see `Softmax`
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    # of the files; the model's own weights are not quantized
    quantization: Quantization | None = field(default=None, compare=False)

    @classmethod
    def from_directory(cls, directory: str | Path) -> ModelConfig:
        """Read `config.json`; end tokens are those of `generation_config.json` if there is one. Raises ConfigError."""
        path = Path(directory) / "config.json"
        data, beside = read_json(path), Path(directory) / HF_QUANT_CONFIG
        if beside.is_file() and (found := modelopt_config(read_json(beside), str(beside))) is not None:
            data = {"quantization_config": found} | data
        config = cls.from_dict(data, str(path))
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
        architecture = _architecture(reader)
        if architecture in MULTIMODAL.values() and data.get("text_config") is not None:
            reader = language_model(data, source)
        if architecture == LLAMA and reader.get("sliding_window") is not None:
            reader.problem(
                "sliding_window", "a Llama has none; is this another model, such as Mistral, under its name?"
            )
        config, quantization = read_model_config(reader, architecture), read_quantization(reader)
        reader.raise_problems()
        assert config is not None
        return replace(config, quantization=quantization)

    @property
    def is_gemma(self) -> bool:
        """Norms of weight 1 + w, further ones behind attention and MLP, and scaled embeddings."""
        return self.architecture in (GEMMA2, GEMMA3)

    @property
    def norm_offset(self) -> float:
        """What the weights of norms have beyond the published ones."""
        return 1.0 if self.is_gemma else 0.0

    @property
    def is_gpt_oss(self) -> bool:
        """A router and experts with biases, and gate and up in turns."""
        return self.architecture == GPT_OSS

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
            "model_type": MODEL_TYPES[self.architecture],
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
            "pad_token_id": None,  # some families' default is past a small vocabulary
            "torch_dtype": next(name for name, dtype in DTYPES.items() if dtype is self.dtype),
            **self.rope.to_dict(),
        }
        if self.window:
            kinds = ("full_attention", "sliding_attention")
            data["sliding_window"] = self.window
            data["layer_types"] = [kinds[i in self.windowed_layers] for i in range(self.num_layers)]
            data["use_sliding_window"] = True
        if self.is_gemma:
            data |= {
                "hidden_activation": self.activation,
                "query_pre_attn_scalar": round((self.attention_scale or self.head_dim**-0.5) ** -2),
                "attn_logit_softcapping": self.attention_softcap or None,
                "final_logit_softcapping": self.logit_softcap or None,
            }
        if self.local_rope is not None:
            data["rope_local_base_freq"] = self.local_rope.theta
        if self.architecture != QWEN2:
            data["attention_bias"] = self.qkv_bias
        if self.architecture == LLAMA:
            data["mlp_bias"] = self.mlp_bias
        if self.architecture in (MIXTRAL, GPT_OSS):
            data |= {"num_local_experts": self.moe.num_experts, "num_experts_per_tok": self.moe.top_k}
        elif self.moe is not None:
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
    if family is not None:
        reader = replace_missing(reader, **FAMILIES[family].defaults)
    sizes = read_sizes(reader, family)
    if sizes["head_dim"] % 2:
        reader.problem("head_dim", f"must be even, its halves are rotated against each other; got {sizes['head_dim']}")
    window, windowed = read_windows(reader, family or "", sizes["layers"])
    if reader.get("use_bidirectional_attention"):
        reader.problem("use_bidirectional_attention", "only attention to earlier tokens is implemented")
    if architecture == GPT_OSS and (limit := reader.number("swiglu_limit", 7.0)) != 7.0:
        reader.problem("swiglu_limit", f"only 7 is implemented, got {limit:g}")
    rope, local_rope = read_ropes(reader, sizes["max_context"])
    # Beyond the context a window hides nothing; but its layers may have a rotation of their own.
    if window and window >= sizes["max_context"] and local_rope is None:
        window, windowed = None, frozenset()
    is_gemma = architecture in (GEMMA2, GEMMA3)
    is_capped = architecture == GEMMA2
    config = {
        "vocab_size": sizes["vocab"],
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["intermediate"],
        "num_layers": sizes["layers"],
        "num_heads": sizes["heads"],
        "num_kv_heads": sizes["kv_heads"],
        "head_dim": sizes["head_dim"],
        "rms_norm_eps": reader.number("rms_norm_eps", 1e-6),
        "rope": rope,
        "max_position_embeddings": sizes["max_context"],
        "qkv_bias": sizes["qkv_bias"],
        "output_bias": architecture not in (QWEN2, MIMO) and reader.flag("attention_bias"),
        "mlp_bias": architecture == LLAMA and reader.flag("mlp_bias"),
        "qk_norm": sizes["qk_norm"] or architecture == GEMMA3,
        "tied_embeddings": sizes["tied_embeddings"],
        "moe": read_experts(reader, family),
        "bos_token_id": next(iter(reader.token_ids("bos_token_id")), None),
        "eos_token_ids": reader.token_ids("eos_token_id"),
        "dtype": _read_dtype(reader),
        "activation": _read_activation(reader, architecture),
        "window": window or 0,
        "windowed_layers": tuple(sorted(windowed)),
        "local_rope": local_rope if windowed else None,
        "attention_scale": reader.number("query_pre_attn_scalar") ** -0.5 if is_gemma else None,
        "attention_softcap": _read_softcap(reader, "attn_logit_softcapping", 50.0 if is_capped else 0.0) * is_gemma,
        "logit_softcap": _read_softcap(reader, "final_logit_softcapping", 30.0 if is_capped else 0.0) * is_gemma,
        "sinks": architecture == GPT_OSS,
    }
    return None if reader.problems or architecture is None else ModelConfig(architecture, **config)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises ConfigError."""
    return read_json_object(str(path), read_text, with_infinity=True)


def _architecture(reader: ConfigReader) -> str | None:
    names = reader.get("architectures")
    if medusa := medusa_message(reader.data):
        reader.problem("architectures", medusa)
        return None
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        reader.problem("architectures", f"must name one architecture out of {', '.join(ARCHITECTURES)}; got {names!r}")
        return None
    name = MULTIMODAL.get(names[0], names[0])
    if name in ARCHITECTURES:
        kind = reader.get("model_type")
        if kind in ARCHITECTURE_OF_FAMILY and ARCHITECTURE_OF_FAMILY[kind] != name and name == names[0]:
            reader.problem(
                "architectures", f"{name} contradicts the model_type {kind!r}: their layers compute other things"
            )
        return name
    if name in ARCHITECTURE_OF_FAMILY.values():
        known = ", ".join(ARCHITECTURES)
        reader.problem(
            "architectures", f"{name}: only `foredraft simulate` knows this family; the decoder has layers of {known}"
        )
    else:
        # No name that is near is suggested: under another family's name a checkpoint may load and compute something
        # else.
        reader.problem(
            "architectures", f"{name} is none of {', '.join(ARCHITECTURES)}, and no other one computes the same"
        )
    return None


def medusa_message(data: Mapping[str, Any]) -> str | None:
    """Return the message about a configuration of Medusa heads; None for any other configuration."""
    names = data.get("architectures")
    name = names[0] if isinstance(names, list) and names else data.get("model_type")
    if not (isinstance(name, str) and "medusa" in name.lower()) and "medusa_num_heads" not in data:
        return None
    return (
        "these are Medusa heads, each of which guesses a token from the target's last state without looking at the guesses before; "
        "they are not implemented; EAGLE and EAGLE-3 heads are"
    )


def _read_activation(reader: ConfigReader, architecture: str | None) -> str:
    """Return the activation of the MLPs; Gemma names its own, gpt-oss none for what it computes."""
    key = "hidden_activation" if reader.get("hidden_activation") is not None else "hidden_act"
    wanted = GELU_TANH if architecture in (GEMMA2, GEMMA3) else SILU
    found = reader.get(key, wanted)
    if found != wanted and not (wanted == GELU_TANH and key == "hidden_act"):
        reader.problem(key, f"only {wanted} is implemented for this family, got {found!r}")
    return CLAMPED_SWIGLU if architecture == GPT_OSS else wanted


def _read_softcap(reader: ConfigReader, key: str, default: float) -> float:
    """Return 0 for null, which says that there is none."""
    return 0.0 if reader.get(key, default) in (None, 0.0) else reader.number(key, default)


def _read_dtype(reader: ConfigReader) -> torch.dtype:
    key = "torch_dtype" if reader.get("torch_dtype") is not None else "dtype"
    name = reader.get(key) or "float32"
    if name not in DTYPES:
        reader.problem(key, f"{name!r} is none of {', '.join(DTYPES)}")
        return torch.float32
    return DTYPES[name]


def _ids_to_json(ids: tuple[int, ...]) -> int | list[int] | None:
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)
