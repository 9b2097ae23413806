"""Read a model's shape from a Hugging Face `config.json`. All problems of a file are reported at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError, Problem, nearest
from .model import ModelShape

SUPPORTED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral")
MAX_CONFIG_BYTES = 4 << 20

_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}


class ModelConfigError(ConfigError):
    """A `config.json` that cannot be read or does not describe a supported model."""


def from_hf_config(path: str | Path, name: str | None = None) -> ModelShape:
    """The shape in `path`, a `config.json` or the folder that holds one.

    `name` is what reports call the model (default: the folder's name). Raises `ModelConfigError` with the file and, for
    each problem, the key and what was expected.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    config, prefix = _text_part(_load(file), str(file))
    return _Reader(str(file), config, prefix).shape(name or file.resolve().parent.name)


def _load(file: Path) -> Mapping[str, Any]:
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise ModelConfigError(str(file), [Problem("", f"larger than {MAX_CONFIG_BYTES} bytes: not a config.json")])
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelConfigError(str(file), [Problem("", f"cannot be read: {error.strerror or error}")]) from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ModelConfigError(str(file), [Problem("", f"is not JSON: {error}")]) from error
    if not isinstance(config, dict):
        raise ModelConfigError(str(file), [Problem("", f"expected a JSON object, found {type(config).__name__}")])
    return config


def _text_part(config: Mapping[str, Any], source: str) -> tuple[Mapping[str, Any], str]:
    """The language model's part: a multimodal file keeps it under `text_config`."""
    nested = config.get("text_config")
    if config.get("model_type") in SUPPORTED_FAMILIES or nested is None:
        return config, ""
    if not isinstance(nested, dict):
        raise ModelConfigError(source, [Problem("text_config", f"expected an object, found {type(nested).__name__}")])
    merged = dict(nested)
    for key in ("tie_word_embeddings", "torch_dtype", "dtype", "quantization_config"):
        if key not in merged and key in config:
            merged[key] = config[key]
    return merged, "text_config."


class _Reader:
    """Takes typed values out of one config and collects the problems."""

    def __init__(self, source: str, config: Mapping[str, Any], prefix: str) -> None:
        self.source = source
        self.config = config
        self.prefix = prefix
        self.problems: list[Problem] = []

    def problem(self, key: str, message: str) -> None:
        self.problems.append(Problem(self.prefix + key, message))

    def count(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.config.get(key)
        if value is None:
            if default is None:
                self.problem(key, f"missing, expected an integer ≥ {minimum}{nearest(key, self.config)}")
                return minimum
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            self.problem(key, f"expected an integer ≥ {minimum}, found {value!r}")
            return minimum
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            self.problem(key, f"expected true or false, found {value!r}")
            return default
        return value

    def weight_dtype(self) -> str:
        quantization = self.config.get("quantization_config")
        if quantization is not None:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            if method != "fp8":
                self.problem("quantization_config.quant_method", f"expected 'fp8' or no quantization, found {method!r}")
            return "fp8"
        key = "dtype" if "dtype" in self.config else "torch_dtype"
        value = self.config.get(key, "bfloat16")
        if value not in _DTYPES:
            self.problem(key, f"expected one of {', '.join(_DTYPES)}, found {value!r}")
            return "bf16"
        return _DTYPES[value]

    def window(self, family: str, layers: int) -> tuple[int | None, int]:
        """(window in tokens, number of layers that have it)."""
        uses_window = self.flag("use_sliding_window", family in ("mistral", "mixtral"))
        if self.config.get("sliding_window") is None or not uses_window:
            return None, 0
        window = self.count("sliding_window")
        types = self.config.get("layer_types")
        if isinstance(types, list):
            windowed = sum(1 for kind in types[:layers] if kind == "sliding_attention")
        elif family.startswith("qwen"):
            # Layers from `max_window_layers` on have the window, those below it see everything.
            windowed = max(layers - self.count("max_window_layers", layers, minimum=0), 0)
        else:
            windowed = layers
        return (window, windowed) if windowed else (None, 0)

    def experts(self, family: str, layers: int, intermediate: int) -> dict[str, int]:
        if family == "mixtral":
            found = {
                "experts": self.count("num_local_experts"),
                "experts_per_token": self.count("num_experts_per_tok"),
                "moe_intermediate": intermediate,
            }
        elif family == "qwen3_moe":
            stride = self.count("decoder_sparse_step", 1)
            listed = self.config.get("mlp_only_layers") or []
            if not isinstance(listed, list):
                self.problem("mlp_only_layers", f"expected a list of layer numbers, found {listed!r}")
                listed = []
            dense = sum(1 for layer in range(layers) if layer in listed or (layer + 1) % stride)
            found = {
                "experts": self.count("num_experts"),
                "experts_per_token": self.count("num_experts_per_tok"),
                "moe_intermediate": self.count("moe_intermediate_size"),
                "dense_layers": dense,
            }
        else:
            return {}
        if found["experts_per_token"] > found["experts"]:
            self.problem("num_experts_per_tok", f"expected at most the number of experts ({found['experts']})")
        return found

    def shape(self, name: str) -> ModelShape:
        family = self.config.get("model_type")
        if family not in SUPPORTED_FAMILIES:
            hint = nearest(family, SUPPORTED_FAMILIES) if isinstance(family, str) else ""
            expected = f"expected one of {', '.join(SUPPORTED_FAMILIES)}{hint}"
            raise ModelConfigError(self.source, [Problem(f"{self.prefix}model_type", f"{expected}, found {family!r}")])
        layers = self.count("num_hidden_layers")
        hidden = self.count("hidden_size")
        heads = self.count("num_attention_heads")
        kv_heads = self.count("num_key_value_heads", heads)
        intermediate = self.count("intermediate_size")
        if heads % kv_heads:
            self.problem(
                "num_key_value_heads", f"expected a divisor of num_attention_heads ({heads}), found {kv_heads}"
            )
        if self.config.get("head_dim") is None and hidden % heads:
            self.problem(
                "hidden_size", f"expected a multiple of num_attention_heads ({heads}) as head_dim is not given"
            )
        head_dim = self.count("head_dim", max(hidden // heads, 1))
        window, windowed_layers = self.window(family, layers)
        experts = self.experts(family, layers, intermediate)
        fields: dict[str, Any] = {
            "vocab": self.count("vocab_size"),
            "max_context": self.count("max_position_embeddings"),
            "tied_embeddings": self.flag("tie_word_embeddings", False),
            "weight_dtype": self.weight_dtype(),
            "qkv_bias": True if family == "qwen2" else self.flag("attention_bias", False),
        }
        if self.problems:
            raise ModelConfigError(self.source, self.problems)
        # A KV cache is 16-bit unless the engine is told otherwise, whatever the weights are.
        kv_dtype = "bf16" if fields["weight_dtype"] == "fp8" else fields["weight_dtype"]
        return ModelShape(
            name=name, family=family, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            intermediate=intermediate, kv_dtype=kv_dtype, attention_window=window, windowed_layers=windowed_layers,
            qk_norm=family.startswith("qwen3"), source=self.source, **experts, **fields,
        )  # fmt: skip
