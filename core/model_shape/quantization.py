"""Formats of quantized weights: the bytes of each, and how a checkpoint says which one it has.

A checkpoint says it in `quantization_config` of its `config.json`, or beside it in `hf_quant_config.json` (NVIDIA ModelOpt), whose
`quantization` object becomes a `quantization_config` by `modelopt_config`. Formats are named:

    bf16, fp16      16 bits
    fp8, int8       8 bits; scales per channel or block are left out (less than 0.2 %)
    mxfp4           4 bits and an 8-bit scale for each 32 weights (OCP Microscaling Formats 1.0)
    nvfp4           4 bits and an 8-bit scale for each 16 weights
    intB-gN         B bits, with a 16-bit scale and a B-bit zero point for each group of N weights (AWQ, GPTQ); int4 is int4-g128
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

from ..config_reader import ConfigReader

WEIGHT_BITS: Mapping[str, float] = {
    "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4 + 20 / 128, "nvfp4": 4 + 8 / 16, "mxfp4": 4 + 8 / 32,
}  # fmt: skip
HF_QUANT_CONFIG = "hf_quant_config.json"
CONFIG_KEYS = ("quantization_config", "compression_config")  # the second is an older name

_GROUPED = re.compile(r"int([2348])-g([1-9][0-9]{0,5})")
_METHODS: Mapping[str, str] = {
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "mxfp4": "mxfp4",
    "modelopt_fp4": "nvfp4",
    "nvfp4": "nvfp4",
}
_MODELOPT_ALGORITHMS: Mapping[str, str] = {
    "FP8": "fp8",
    "FP8_PB_WO": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "NVFP4": "nvfp4",
}
_GROUPED_METHODS = ("awq", "gptq", "auto-round")
_KNOWN = (*_METHODS, *_GROUPED_METHODS, "modelopt", "compressed-tensors", "bitsandbytes")


def bits_per_weight(name: str) -> float | None:
    """Return the bits of a weight in the format `name`, scales included; None for an unknown format."""
    if name in WEIGHT_BITS:
        return WEIGHT_BITS[name]
    grouped = _GROUPED.fullmatch(name)
    if grouped is None:
        return None
    bits, group = int(grouped[1]), int(grouped[2])
    return bits + (16 + bits) / group


def modelopt_config(document: Mapping[str, Any], source: str) -> dict[str, Any] | None:
    """Return the `quantization_config` that a parsed `hf_quant_config.json` stands for; None if it says that nothing is quantized.

    Raises ConfigError.
    """
    whole = ConfigReader(document, source)
    part = whole.under("quantization")
    if "quantization" not in document:
        whole.problem("quantization", "is missing")
    whole.raise_problems()
    return None if part.get("quant_algo") is None else {"quant_method": "modelopt", **part.data}


def read_weight_format(reader: ConfigReader) -> tuple[str | None, bool, str | None]:
    """Read the format of the weights (None: not quantized), whether attention keeps 16-bit weights, and the format of the KV cache if
    the checkpoint says one. Problems are noted in `reader`.
    """
    key = next((key for key in CONFIG_KEYS if reader.get(key) is not None), None)
    if key is None:
        return None, False, None
    config = reader.under(key) if isinstance(reader.get(key), Mapping) else None
    if config is None:
        reader.problem(key, f"must be an object, got {reader.get(key)!r}")
        return None, False, None
    kept = config.get("ignore") or config.get("modules_to_not_convert") or config.get("exclude_modules") or ()
    kv = config.get("kv_cache_quant_algo") or config.get("kv_cache_scheme")
    return _format(config), _spares_attention(kept), "fp8" if kv in ("FP8", "fp8") or _is_fp8(kv) else None


def _format(config: ConfigReader) -> str | None:
    method = config.get("quant_method")
    if method in _METHODS:
        return _METHODS[method]
    if method in _GROUPED_METHODS:
        bits = config.integer("bits" if "bits" in config.data else "w_bit")
        group = "group_size" if "group_size" in config.data else "q_group_size"
        return _integers(config, "bits", bits, config.get(group))
    if method == "bitsandbytes":
        return "int4-g64" if config.flag("load_in_4bit") else "int8"
    if method == "modelopt":
        return _modelopt(config)
    if method == "compressed-tensors":
        return _compressed_tensors(config)
    config.problem("quant_method", f"expected one of {', '.join(_KNOWN)}, found {method!r}")
    return None


def _modelopt(config: ConfigReader) -> str | None:
    algorithm = config.get("quant_algo")
    if algorithm in _MODELOPT_ALGORITHMS:
        return _MODELOPT_ALGORITHMS[algorithm]
    if algorithm in ("W4A16_AWQ", "W4A8_AWQ"):
        return _integers(config, "group_size", 4, config.get("group_size", 128))
    known = ", ".join((*_MODELOPT_ALGORITHMS, "W4A16_AWQ", "W4A8_AWQ"))
    config.problem("quant_algo", f"expected one of {known}, found {algorithm!r}")
    return None


def _compressed_tensors(config: ConfigReader) -> str | None:
    groups = config.under("config_groups")
    name = next(iter(groups.data), None)
    if name is None:
        config.problem("config_groups", "is missing")
        return None
    weights = groups.under(name).under("weights")
    bits, kind, size = weights.integer("num_bits"), weights.get("type", "int"), weights.get("group_size")
    if kind == "float" and bits == 8:
        return "fp8"
    if kind == "float" and bits == 4:
        return "mxfp4" if size == 32 else "nvfp4"
    if kind == "int":
        return _integers(weights, "num_bits", bits, size)
    weights.problem("type", f"{bits} bits of type {kind!r} are no known format")
    return None


def _integers(config: ConfigReader, key: str, bits: int, group: Any) -> str | None:
    """Return the name of integers of `bits` bits in groups; -1, 0 or no group is one for a whole column, whose scale does not count."""
    if config.problems:
        return None  # the number of bits is one of them
    if type(group) is not int or group <= 0:
        group = 65_536
    name = "int8" if bits == 8 and group >= 65_536 else f"int{bits}-g{group}"
    if bits_per_weight(name) is None:
        config.problem(key, f"{bits} bits in groups of {group} are no known format; expected 2, 3, 4 or 8 bits")
        return None
    return name


def _is_fp8(scheme: Any) -> bool:
    """Whether a KV cache scheme of compressed-tensors says 8-bit floats."""
    return isinstance(scheme, Mapping) and scheme.get("num_bits") == 8 and scheme.get("type") == "float"


def _spares_attention(kept: Any) -> bool:
    """Whether the modules that are not quantized are the attention of the middle layers, given as names, wildcards or `re:` patterns."""
    if not isinstance(kept, list | tuple):
        return False
    return all(any(_names(pattern, f"model.layers.{layer}.self_attn.q_proj") for pattern in kept) for layer in (1, 2))


def _names(pattern: Any, module: str) -> bool:
    if not isinstance(pattern, str):
        return False
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error:
            return False
    return fnmatch(module, pattern) or fnmatch(module, f"{pattern}.*") or pattern == "self_attn"
