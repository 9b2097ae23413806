"""Checkpoints of NVIDIA ModelOpt: one algorithm for all matrices, or one for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...parsing import ConfigReader
from ..quantization import grouped_format
from .entries import kept
from .scheme import FormatEntry, Scheme, Tier

MIXED = "MIXED_PRECISION"
METHODS: Mapping[str, str | None] = {
    "modelopt": None, "modelopt_fp4": "NVFP4", "modelopt_fp8": "FP8", "modelopt_mxfp8": "MXFP8", "modelopt_mixed": MIXED,
}  # fmt: skip
"""The names of the method, and the algorithm that each means where a file does not say one."""
_FORMATS: Mapping[str, str] = {
    **dict.fromkeys(("FP8", "FP8_PB_WO", "FP8_BLOCK_SCALES", "FP8_PER_CHANNEL_PER_TOKEN"), "fp8"),
    **dict.fromkeys(("NVFP4", "NVFP4_AWQ", "W4A8_NVFP4_FP8"), "nvfp4"), "W4A16_NVFP4": "nvfp4-w16", "MXFP8": "mxfp8",
    **dict.fromkeys(("MXFP4", "W4A8_MXFP4_FP8"), "mxfp4"),
    **dict.fromkeys(("INT8_SQ", "W8A16", "W8A8_SQ_PER_CHANNEL", "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN"), "int8"),
}  # fmt: skip
_GROUPED = ("W4A16_AWQ", "W4A8_AWQ")


def read_modelopt(config: ConfigReader) -> Scheme | None:
    """Read the algorithm of all matrices, or of each."""
    algorithm = config.get("quant_algo") or METHODS.get(config.get("quant_method") or "modelopt")
    if algorithm == MIXED:
        return read_mixed(config, None)
    return Scheme("modelopt", (kept(config),), _format(config, "quant_algo", algorithm, config))


def read_mixed(config: ConfigReader, base: str | None) -> Scheme:
    """Read a checkpoint that names a format for each of its matrices, or for all but those of its base."""
    layers, entries = config.under("quantized_layers"), []
    if not layers.data:
        config.problem("quantized_layers", "is missing, which names the format of each matrix")
    for name, about in layers.data.items():
        own = layers.under(name) if isinstance(about, Mapping) else layers.with_data({"quant_algo": about})
        found = _format(layers, name, own.get("quant_algo"), own)
        if found is None:
            break
        entries.append(FormatEntry(f"quantized_layers.{name}", name, found, found))
    return Scheme("modelopt", (kept(config), Tier(tuple(entries))), base)


def _format(config: ConfigReader, key: str, algorithm: Any, about: ConfigReader) -> str | None:
    """Return the format of an algorithm; None with a problem at `key`."""
    name = str(algorithm).upper()
    if name in _FORMATS:
        return _FORMATS[name]
    if name not in _GROUPED:
        config.problem(key, f"expected one of {', '.join((*_FORMATS, *_GROUPED, MIXED))}, found {algorithm!r}")
        return None
    scale = None if about.flag("has_zero_point") else 16
    return grouped_format(config, "group_size", 4, about.get("group_size", 128), scale_bits=scale)
