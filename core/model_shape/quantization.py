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
    intB-gN-sM      B bits, with M bits for each group of N weights: a scale of 16 where no zero points are stored
    FORMAT~B        most of the weights in FORMAT, some wider or narrower: B bits on average

`schemes/` reads which matrix of a checkpoint has which.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from ..parsing import ConfigReader

WEIGHT_BITS: Mapping[str, float] = {
    "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4 + 20 / 128, "nvfp4": 4 + 8 / 16, "mxfp4": 4 + 8 / 32,
    "nvfp4-w16": 4 + 8 / 16, "mxfp8": 8 + 8 / 32,
}  # fmt: skip
HF_QUANT_CONFIG = "hf_quant_config.json"
CONFIG_KEYS = ("quantization_config", "compression_config")  # the second is an older name

_GROUPED = re.compile(r"int([2348])-g([1-9][0-9]{0,5})(?:-s(8|16|32))?")
_MEAN = re.compile(r"(?:[1-9]|1[0-6])(?:\.[0-9]{1,6})?")


def bits_per_weight(name: str) -> float | None:
    """Return the bits of a weight in the format `name`, scales included; None for an unknown format."""
    main, _, mean = name.partition("~")
    if mean:
        return float(mean) if _MEAN.fullmatch(mean) and bits_per_weight(main) is not None else None
    if name in WEIGHT_BITS:
        return WEIGHT_BITS[name]
    grouped = _GROUPED.fullmatch(name)
    if grouped is None:
        return None
    bits, group = int(grouped[1]), int(grouped[2])
    return bits + (int(grouped[3]) if grouped[3] else 16 + bits) / group


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


def main_format(name: str) -> str:
    """Return the format that most weights have in a format of several."""
    return name.partition("~")[0]


def mean_format(weights: Mapping[str, int]) -> str:
    """Return the name of a format in which so many weights have each format."""
    most = max(weights, key=weights.__getitem__)
    if len(weights) == 1:
        return most
    total = sum(count * (bits_per_weight(name) or 0.0) for name, count in weights.items())
    return f"{most}~{total / sum(weights.values()):.6f}".rstrip("0").rstrip(".")


def grouped_format(
    config: ConfigReader, key: str, bits: int, group: Any, *, scale_bits: int | None = None
) -> str | None:
    """Return the name of integers of `bits` bits in groups, with `scale_bits` for each (default: a scale and a zero
    point); -1, 0 or no group is one for a whole column, whose scale does not count."""
    if config.problems:
        return None  # the number of bits is one of them
    if type(group) is not int or group <= 0:
        group = 65_536
    scale = "" if scale_bits is None else f"-s{scale_bits}"
    name = "int8" if bits == 8 and group >= 65_536 else f"int{bits}-g{group}{scale}"
    if bits_per_weight(name) is None:
        config.problem(key, f"{bits} bits in groups of {group} are no known format; expected 2, 3, 4 or 8 bits")
        return None
    return name


def read_kv_format(config: ConfigReader) -> str | None:
    """Return the format of the KV cache that a quantization's configuration says: "fp8", another one as it is
    written, or None."""
    form = config.get("kv_cache_quant_algo") or config.get("kv_cache_scheme")
    if form is None:
        return _quark_kv(config)
    # As ModelOpt and as compressed-tensors write it.
    is_float = isinstance(form, Mapping) and form.get("num_bits") == 8 and form.get("type") == "float"
    return "fp8" if is_float or form in ("FP8", "fp8") else str(form)


def _quark_kv(config: ConfigReader) -> str | None:
    """Return the format of what the projections named in `kv_cache_group` give, as Quark writes it."""
    export, layers = config.get("export"), config.get("layer_quant_config")
    names = export.get("kv_cache_group") if isinstance(export, Mapping) else None
    own = config.get("kv_cache_quant_config")
    if isinstance(own, Mapping) and own:
        layers, names = own, list(own)
    if not isinstance(names, list) or not isinstance(layers, Mapping):
        return None
    for name, about in layers.items():
        given = about.get("output_tensors") if isinstance(about, Mapping) else None
        if isinstance(given, Mapping) and any(isinstance(one, str) and fnmatchcase(name, one) for one in names):
            return "fp8" if given.get("dtype") == "fp8_e4m3" else str(given.get("dtype"))
    return None
