"""The shape of a decoder-only transformer, and the reader of Hugging Face's `config.json`.

A configuration is read as data, a mapping or a text; files are opened by the caller. All problems of a configuration are reported at
once, with its source and the key of each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..config_reader import ConfigReader
from ..errors import ForetokenError, nearest_name
from .quantization import CONFIG_KEYS, WEIGHT_BITS, bits_per_weight, read_weight_format

DTYPE_BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp8": 1}
"""The formats of a KV cache; those of weights are more (`quantization.py`)."""
ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
"""The families whose configurations are understood, by `model_type`, and the architecture of each."""

_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}


class UnknownModel(ForetokenError):
    """A model name that is not built in; the message lists the known ones and the nearest."""


# -- the shape --------------------------------------------------------------------------------------------------------


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
        """Whether `layer` has experts instead of one MLP."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides a transformer's weights, its KV cache and the cost of a forward pass.

    Counts are dimensionless, sizes in elements, `attention_window` and `max_context` in tokens. A mixture of experts has
    `experts > 0`; then `intermediate` is the width of the `dense_layers` that have no experts. `windowed_layers` of the
    layers attend only to the last `attention_window` tokens. `weight_dtype` is a format of `quantization.py`; embeddings and LM head
    stay 16-bit beside quantized weights, and attention does with `wide_attention`. `recurrent_state_bytes` is the size of one text's
    state over all layers that have a state instead of KV (no tensor parallelism).
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied_embeddings: bool
    max_context: int
    weight_dtype: str = "bf16"
    kv_dtype: str = "bf16"
    wide_attention: bool = False
    experts: int = 0
    experts_per_token: int = 0
    moe_intermediate: int = 0
    shared_intermediate: int = 0
    dense_layers: int = 0
    attention_window: int | None = None
    windowed_layers: int = 0
    qkv_bias: bool = False
    qk_norm: bool = False
    recurrent_state_bytes: int = 0
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        assert min(self.layers, self.hidden, self.heads, self.kv_heads, self.head_dim, self.vocab) > 0, self.name
        assert self.heads % self.kv_heads == 0, f"{self.name}: heads must be a multiple of kv_heads"
        assert self.experts >= self.experts_per_token >= 0, self.name
        assert (self.experts > 0) == (self.moe_intermediate > 0), self.name
        assert 0 <= self.windowed_layers <= self.layers, self.name
        assert (self.windowed_layers > 0) == (self.attention_window is not None), self.name
        assert 0 <= self.dense_layers <= self.layers, self.name
        assert self.recurrent_state_bytes >= 0, self.name

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's attention: q, k, v, o, their biases, and the per-head norms of q and k."""
        projected = (self.heads + 2 * self.kv_heads) * self.head_dim
        weights = self.hidden * projected + self.heads * self.head_dim * self.hidden
        return weights + (projected if self.qkv_bias else 0) + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert: gate, up and down."""
        return 3 * self.hidden * self.moe_intermediate

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All weights, norms included; a tied LM head counts once."""
        return self._parameters(self.experts)

    @property
    def active_parameters(self) -> int:
        """The weights that one token uses: `experts_per_token` of the experts."""
        return self._parameters(self.experts_per_token)

    def _parameters(self, experts: int) -> int:
        sparse = (
            self.hidden * self.experts + experts * self.expert_parameters + 3 * self.hidden * self.shared_intermediate
        )
        dense = 3 * self.hidden * self.intermediate
        mlp = self.moe_layers * sparse + (self.layers - self.moe_layers) * dense
        norms = (2 * self.layers + 1) * self.hidden
        embeddings = self.embedding_parameters * (1 if self.tied_embeddings else 2)
        return self.layers * self.attention_parameters + mlp + norms + embeddings

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights. Beside quantized weights the embeddings and the LM head stay 16-bit, as checkpoints keep them."""
        wide = self.embedding_parameters * (1 if self.tied_embeddings else 2)
        if self.wide_attention:
            wide += self.layers * self.attention_parameters
        return math.ceil((self.parameters - wide) * self.bytes_per_weight) + wide * 2

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of one weight of the layers, scales included."""
        bits = bits_per_weight(self.weight_dtype)
        assert bits is not None, self.weight_dtype
        return bits / 8

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take over all layers (no tensor parallelism)."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[self.kv_dtype]

    def with_dtypes(self, weight_dtype: str | None = None, kv_dtype: str | None = None) -> ModelShape:
        """The same shape in other number formats, those of `quantization.py` for weights. Raises `UnknownModel` for another format."""
        if weight_dtype is not None and bits_per_weight(weight_dtype) is None:
            known = ", ".join((*WEIGHT_BITS, "int4-g128"))
            raise UnknownModel(f"{self.name}: data type {weight_dtype!r} is none of {known} (bits and group size)")
        if kv_dtype is not None and kv_dtype not in DTYPE_BYTES:
            raise UnknownModel(f"{self.name}: data type {kv_dtype!r} of KV is none of {', '.join(DTYPE_BYTES)}")
        wide = self.wide_attention and weight_dtype in (None, self.weight_dtype)
        return replace(
            self,
            weight_dtype=weight_dtype or self.weight_dtype,
            kv_dtype=kv_dtype or self.kv_dtype,
            wide_attention=wide,
        )

    def explain(self) -> list[tuple[str, float, str, str]]:
        """Rows (name, value, unit, source) for `--explain`."""
        rows: list[tuple[str, float, str, str]] = [
            (f"{self.name} parameters", self.parameters / 1e9, "billion", self.source),
            (f"{self.name} weights", self.weight_bytes / 1e9, "GB", f"computed, {self.weight_dtype}"),
            (f"{self.name} KV per token", self.kv_bytes_per_token, "B", f"computed, {self.kv_dtype}"),
            (f"{self.name} layers", self.layers, "", self.source),
        ]
        if self.experts:
            rows.append((f"{self.name} active parameters", self.active_parameters / 1e9, "billion", self.source))
        return rows


# -- reading ----------------------------------------------------------------------------------------------------------


def read_sizes(reader: ConfigReader, family: str | None) -> dict[str, Any]:
    """Read the fields of a `ModelShape` that every user of a configuration needs; problems are noted in `reader`."""
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    has_problems = bool(reader.problems)
    kv_heads = reader.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        reader.problem("num_key_value_heads", f"{heads} heads cannot share {kv_heads} key-value heads evenly")
    if family == "qwen3":
        head_dim = reader.integer("head_dim", 128)
    else:
        head_dim = reader.integer("head_dim", hidden // heads)
        if reader.get("head_dim") is None and hidden % heads and not has_problems:
            reader.problem("hidden_size", f"{hidden} is no multiple of the {heads} heads, and head_dim is not given")
    return {
        "layers": reader.integer("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate": reader.integer("intermediate_size"),
        "vocab": reader.integer("vocab_size"),
        "max_context": reader.integer("max_position_embeddings", 2048),
        "tied_embeddings": reader.flag("tie_word_embeddings"),
        "qkv_bias": reader.flag("attention_bias") or family == "qwen2",
        "qk_norm": family in ("qwen3", "qwen3_moe"),
    }


def read_experts(reader: ConfigReader, family: str | None) -> MoeConfig | None:
    """Read a mixture of experts; None for a family that has none."""
    if family not in ("qwen3_moe", "mixtral"):
        return None
    is_mixtral = family == "mixtral"
    key = "num_local_experts" if is_mixtral or reader.get("num_local_experts") is not None else "num_experts"
    moe = MoeConfig(
        num_experts=reader.integer(key),
        top_k=reader.integer("num_experts_per_tok"),
        intermediate_size=reader.integer("intermediate_size" if is_mixtral else "moe_intermediate_size"),
        norm_topk_prob=reader.flag("norm_topk_prob"),
        decoder_sparse_step=reader.integer("decoder_sparse_step", 1),
        mlp_only_layers=reader.integers("mlp_only_layers"),
    )
    if moe.top_k > moe.num_experts:
        reader.problem("num_experts_per_tok", f"{moe.top_k} experts per token, but there are {moe.num_experts}")
    return moe


def read_model_shape(config: Mapping[str, Any], source: str, name: str) -> ModelShape:
    """Read the shape of a parsed `config.json`; `name` is what reports call the model. Raises ConfigError."""
    reader = _language_model(config, source)
    family = reader.get("model_type")
    if family not in ARCHITECTURES:
        hint = nearest_name(family, ARCHITECTURES) if isinstance(family, str) else ""
        reader.problem("model_type", f"expected one of {', '.join(ARCHITECTURES)}{hint}, found {family!r}")
        reader.raise_problems()
    sizes, moe = read_sizes(reader, family), read_experts(reader, family)
    if reader.get("max_position_embeddings") is None:
        reader.problem("max_position_embeddings", "is missing")  # a decoder has a default, a capacity answer should not
    layers = sizes["layers"]
    if moe is not None:
        dense = sum(not moe.is_sparse(layer) for layer in range(layers))
        sizes |= {"experts": moe.num_experts, "experts_per_token": moe.top_k, "dense_layers": dense}
        sizes["moe_intermediate"] = moe.intermediate_size
    window, windowed_layers = _window(reader, family, layers)
    weight_dtype, wide_attention, kv_dtype = _dtypes(reader)
    reader.raise_problems()
    return ModelShape(
        name=name,
        family=family,
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype,
        wide_attention=wide_attention,
        attention_window=window,
        windowed_layers=windowed_layers,
        source=source,
        **sizes,
    )


def _language_model(config: Mapping[str, Any], source: str) -> ConfigReader:
    """Return a reader of the language model's part: a multimodal file keeps it under `text_config`."""
    model_type = config.get("model_type")
    if (isinstance(model_type, str) and model_type in ARCHITECTURES) or config.get("text_config") is None:
        return ConfigReader(config, source)
    whole = ConfigReader(config, source)
    part = whole.under("text_config")
    whole.raise_problems()
    shared = ("tie_word_embeddings", "torch_dtype", "dtype", *CONFIG_KEYS)
    part.data = {key: config[key] for key in shared if key in config} | dict(part.data)
    return part


def _dtypes(reader: ConfigReader) -> tuple[str, bool, str]:
    """Return the format of the weights, whether attention keeps 16-bit ones, and the format of KV: 16-bit unless the file says more."""
    key = "dtype" if "dtype" in reader.data else "torch_dtype"
    value = reader.get(key, "bfloat16")
    if value not in _DTYPES:
        reader.problem(key, f"expected one of {', '.join(_DTYPES)}, found {value!r}")
    wide = _DTYPES.get(value, "bf16")
    quantized, wide_attention, kv = read_weight_format(reader)
    return quantized or wide, wide_attention, kv or ("bf16" if quantized else wide)


def _window(reader: ConfigReader, family: str, layers: int) -> tuple[int | None, int]:
    """Return the attention window in tokens, and the number of layers that have it."""
    uses_window = reader.flag("use_sliding_window", family in ("mistral", "mixtral"))
    if reader.get("sliding_window") is None or not uses_window:
        return None, 0
    window, kinds = reader.integer("sliding_window"), reader.get("layer_types")
    if isinstance(kinds, list):
        windowed = kinds[:layers].count("sliding_attention")
    elif family.startswith("qwen"):  # the layers below `max_window_layers` see everything
        windowed = max(layers - reader.integer("max_window_layers", layers, minimum=0), 0)
    else:
        windowed = layers
    return (window, windowed) if windowed else (None, 0)
