"""Formats of quantized weights: the bytes of each, and how a checkpoint names its format.

A checkpoint names its format in `quantization_config` of its `config.json`, or in `hf_quant_config.json` beside that
file (NVIDIA ModelOpt). `modelopt_config` makes a `quantization_config` from the latter. The formats have these names:

    bf16, fp16      16 bits
    fp8, int8       8 bits; scales per channel or block are left out (less than 0.2 %)
    mxfp4           4 bits and an 8-bit scale for each 32 weights (OCP Microscaling Formats 1.0)
    nvfp4           4 bits and an 8-bit scale for each 16 weights; nvfp4-w16 are the same weights, multiplied in 16 bits
    mxfp8           8 bits and an 8-bit scale for each 32 weights
    intB-gN         B bits, with a 16-bit scale and a B-bit zero point for each group of N weights (AWQ, GPTQ); int4 is
                    int4-g128
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any

from ..parsing import ConfigReader

WEIGHT_BITS: Mapping[str, float] = {
    "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4 + 20 / 128, "nvfp4": 4 + 8 / 16, "mxfp4": 4 + 8 / 32,
    "nvfp4-w16": 4 + 8 / 16, "mxfp8": 8 + 8 / 32,
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
    "W4A16_NVFP4": "nvfp4-w16",
    "MXFP8": "mxfp8",
}
MIXED = "MIXED_PRECISION"
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
    """Return the `quantization_config` that a parsed `hf_quant_config.json` stands for; None if it says that nothing is
    quantized.

    Raises ConfigError.
    """
    whole = ConfigReader(document, source)
    part = whole.under("quantization")
    if "quantization" not in document:
        whole.problem("quantization", "is missing")
    whole.raise_problems()
    return None if part.get("quant_algo") is None else {"quant_method": "modelopt", **part.data}


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """The formats of a checkpoint's weights; None: not quantized.
    `kv`: that of the KV cache, if the checkpoint says one."""

    experts: str | None = None  # routed experts; in a dense model its MLPs
    attention: str | None = None  # every mixer
    mlps: str | None = None  # dense and shared MLPs of a model that has experts
    kv: str | None = None


def read_weight_format(reader: ConfigReader) -> WeightFormats:
    """Read the formats of the weights. A part has the format of most of its matrices. Problems are noted in
    `reader`."""
    key = next((key for key in CONFIG_KEYS if reader.get(key) is not None), None)
    if key is None:
        return WeightFormats()
    config = reader.under(key) if isinstance(reader.get(key), Mapping) else None
    if config is None:
        reader.problem(key, f"must be an object, got {reader.get(key)!r}")
        return WeightFormats()
    kv = "fp8" if read_kv_format(config) == "fp8" else None
    if config.get("quant_algo") == MIXED:
        return replace(_mixed(config), kv=kv)
    main = _format(config)
    kept = config.get("ignore") or config.get("modules_to_not_convert") or config.get("exclude_modules") or ()
    spared = _spared(kept)
    formats = WeightFormats(main, None if _MIXERS in spared else main, None if _MLPS in spared else main, kv)
    # DeepSeek-V4 says beside the format of its matrices that its experts have 4 bits.
    return replace(formats, experts="mxfp4") if reader.get("expert_dtype") == "fp4" else formats


def _mixed(config: ConfigReader) -> WeightFormats:
    """Return the formats of a checkpoint that names one for each of its matrices, or for all but the experts."""
    base = _METHODS.get(_name(config.get("quant_method")))
    counts: dict[str, Counter[str]] = {part: Counter() for part in (_EXPERTS, _MIXERS, _MLPS)}
    for name, about in config.under("quantized_layers").data.items():
        part, algorithm = _part_of(name), about.get("quant_algo") if isinstance(about, Mapping) else about
        if part is None:
            continue
        if _name(algorithm) not in _MODELOPT_ALGORITHMS:
            config.problem(
                f"quantized_layers.{name}", f"expected one of {', '.join(_MODELOPT_ALGORITHMS)}, found {algorithm!r}"
            )
            break
        counts[part][_MODELOPT_ALGORITHMS[_name(algorithm)]] += 1
    most = {part: max(found, key=found.__getitem__) if found else base for part, found in counts.items()}
    experts = most[_EXPERTS] if counts[_EXPERTS] else most[_MLPS]
    return WeightFormats(experts, most[_MIXERS], most[_MLPS])


def _name(value: Any) -> str:
    """Return a name as it is; an empty string for a value that is not text, because no table has an empty name."""
    return value if isinstance(value, str) else ""


def _format(config: ConfigReader) -> str | None:
    method = config.get("quant_method")
    if _name(method) in _METHODS:
        return _METHODS[method]
    if _name(method) in _GROUPED_METHODS:
        bits = config.integer("bits" if "bits" in config.data else "w_bit")
        group = "group_size" if "group_size" in config.data else "q_group_size"
        return _integers(config, "bits", bits, config.get(group))
    if method == "bitsandbytes":
        return "int4-g64" if config.flag("load_in_4bit") else "int8"
    if method == "modelopt" or (method is None and "quant_algo" in config.data):
        return _modelopt(config)
    if method == "compressed-tensors":
        return _compressed_tensors(config)
    config.problem("quant_method", f"expected one of {', '.join(_KNOWN)}, found {method!r}")
    return None


def _modelopt(config: ConfigReader) -> str | None:
    algorithm = config.get("quant_algo")
    if _name(algorithm) in _MODELOPT_ALGORITHMS:
        return _MODELOPT_ALGORITHMS[algorithm]
    if algorithm in ("W4A16_AWQ", "W4A8_AWQ"):
        return _integers(config, "group_size", 4, config.get("group_size", 128))
    known = ", ".join((*_MODELOPT_ALGORITHMS, "W4A16_AWQ", "W4A8_AWQ", MIXED))
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
    """Return the name of integers of `bits` bits in groups;
    -1, 0 or no group is one for a whole column, whose scale does not count."""
    if config.problems:
        return None  # the number of bits is one of them
    if type(group) is not int or group <= 0:
        group = 65_536
    name = "int8" if bits == 8 and group >= 65_536 else f"int{bits}-g{group}"
    if bits_per_weight(name) is None:
        config.problem(key, f"{bits} bits in groups of {group} are no known format; expected 2, 3, 4 or 8 bits")
        return None
    return name


def read_kv_format(config: ConfigReader) -> str | None:
    """Return the format of the KV cache that a quantization's configuration says: "fp8", another one as it is
    written, or None."""
    form = config.get("kv_cache_quant_algo") or config.get("kv_cache_scheme")
    if form is None:
        return None
    # As ModelOpt and as compressed-tensors write it.
    is_float = isinstance(form, Mapping) and form.get("num_bits") == 8 and form.get("type") == "float"
    return "fp8" if is_float or form in ("FP8", "fp8") else str(form)


_EXPERTS, _MIXERS, _MLPS = "experts", "mixers", "mlps"
_LAYER = re.compile(r"(?:^|.*\.)layers\.([0-9]+|\*)\.")
_PROBES: Mapping[str, tuple[str, ...]] = {
    _MIXERS: ("self_attn.q_proj", "self_attn.q_b_proj", "linear_attn.in_proj_qkv", "attn.wq_b"),
    _MLPS: (
        "mlp.up_proj", "mlp.shared_experts.up_proj", "mlp.shared_expert.up_proj", "ffn.shared_experts.w1",
        "mixer.shared_experts.up_proj", "block_sparse_moe.shared_experts.up_proj",
    ),
}  # fmt: skip
"""Names that matrices of a layer have in the checkpoints of some family, by part; a family has a few of them."""
_PROBED_LAYERS = (1, 2, 3, 4)


def _part_of(module: str) -> str | None:
    """Return the part of a layer that a matrix belongs to by its name; None for matrices outside the layers, such as
    the LM head."""
    if "layers." not in module:
        return None
    if "experts" in module and "shared_expert" not in module:
        return _EXPERTS
    if "mlp" in module or "shared_expert" in module or "ffn" in module:
        return _MLPS
    return _MIXERS if "attn" in module or "mixer" in module else None


def _spared(kept: Any) -> set[str]:
    """Return the parts that keep 16-bit weights in most layers, given names, wildcards or `re:` patterns of unquantized
    matrices.

    A pattern is compared with the part of a name after the layer's number, because the part before it differs between
    checkpoints of one model.
    """
    if not isinstance(kept, list | tuple):
        return set()
    layers: dict[str, set[int]] = {part: set() for part in _PROBES}
    for pattern in kept:
        if not isinstance(pattern, str):
            continue
        prefix = _LAYER.match(pattern) if not pattern.startswith("re:") else None
        own = pattern[prefix.end() :] if prefix else pattern
        for part, names in _PROBES.items():
            for layer in _PROBED_LAYERS:
                if prefix and prefix[1] not in ("*", str(layer)):
                    continue
                if any(_names(own, name if prefix else f"model.layers.{layer}.{name}") for name in names):
                    layers[part].add(layer)
    return {part for part, found in layers.items() if len(found) > len(_PROBED_LAYERS) // 2}


def _names(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error:
            return False
    return fnmatch(module, pattern) or fnmatch(module, f"{pattern}.*") or pattern == module.split(".")[-2]
