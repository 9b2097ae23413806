"""Checkpoints of torchao, as `transformers` writes them: one type for all matrices, or one by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...parsing import ConfigReader
from ..quantization import grouped_format
from .entries import is_readable, kept
from .scheme import EMBEDDING, FormatEntry, Scheme, Tier

_BY_NAME = ("fqn", "modulefqn")
_PLAIN: Mapping[str, str] = {
    **dict.fromkeys(("float8weightonly", "float8dynamicactivationfloat8weight"), "fp8"),
    **dict.fromkeys(("nvfp4dynamicactivationnvfp4weight", "nvfp4weightonly"), "nvfp4"),
}  # fmt: skip
_INT8 = ("int8weightonly", "int8dynamicactivationint8weight")
_INT4 = ("int4weightonly", "int8dynamicactivationint4weight")
_INTX: Mapping[str, str] = {
    "intxweightonly": "granularity", "int8dynamicactivationintxweight": "weight_granularity",
}  # fmt: skip
_MX = "mxdynamicactivationmxweight"
_MX_FORMATS: Mapping[str, str] = {"float8_e4m3fn": "mxfp8", "float4_e2m1fn_x2": "mxfp4"}


def read_torchao(config: ConfigReader) -> Scheme | None:
    """Read the type of all matrices, or the types of those that are named and of all others."""
    given = config.get("quant_type")
    about = given.get("default") if isinstance(given, Mapping) and set(given) == {"default"} else given
    if not isinstance(about, Mapping):
        about = {"_type": about, "_data": config.get("quant_type_kwargs") or {}}
    tiers = [kept(config)]
    with_ends = config.flag("include_input_output_embeddings")
    if _key(about) in _BY_NAME and isinstance(about.get("_data"), Mapping):
        data = about["_data"]
        named = data.get("fqn_to_config") or data.get("module_fqn_to_config")
        if not isinstance(named, Mapping) or not named:
            config.problem("quant_type", "fqn_to_config is missing, which names the type of each matrix")
            return None
        base = _format(config, named.get("_default"))
        tiers.append(_by_name(config, named))
    else:
        base = _format(config, about)
        if with_ends:
            entry = FormatEntry("include_input_output_embeddings", EMBEDDING, base)
            tiers.append(Tier((entry,)))
    return Scheme("torchao", tuple(tiers), base, base if with_ends else None)


def _by_name(config: ConfigReader, named: Mapping[str, Any]) -> Tier:
    """Return the types by name, then those by an expression for the whole name, of which the first counts."""
    names, expressions = [], []
    for name, about in named.items():
        key, found = f"quant_type.{name}", _format(config, about)
        if name.startswith("re:"):
            pattern = rf"re:(?:{name[3:]})(?:\.weight)?\Z"
            if is_readable(config, "quant_type", pattern):
                expressions.append(FormatEntry(key, pattern, found))
        elif name != "_default":
            names.append(FormatEntry(key, name.removesuffix(".weight"), found))
    return Tier((*names, *expressions), is_ordered=True)


def _key(about: Mapping[str, Any]) -> str:
    return str(about.get("_type")).removesuffix("Config").removesuffix("To").replace("_", "").lower()


def _format(config: ConfigReader, about: Any) -> str | None:
    """Return the format of a type, of which None keeps 16 bits; a type that is not known is a problem."""
    if about is None:
        return None
    key = _key(about) if isinstance(about, Mapping) else str(about)
    settings = (about.get("_data") or {}) if isinstance(about, Mapping) else {}
    if isinstance(settings, Mapping):
        if key in _PLAIN:
            return _PLAIN[key]
        if key in _INT8 and not _group(settings.get("granularity")):
            return grouped_format(config, "quant_type", 8, settings.get("group_size"), scale_bits=16)
        if key in _INT4:  # a scale and a zero point of 16 bits each
            size = settings.get("group_size", 128 if key == _INT4[0] else 32)
            return grouped_format(config, "quant_type", 4, size, scale_bits=32)
        if key in _INTX and settings.get("intx_packing_format", "unpacked_to_int8") in ("unpacked_to_int8", None):
            return grouped_format(config, "quant_type", 8, _group(settings.get(_INTX[key])))  # a byte for each weight
        if key == _MX and (found := _MX_FORMATS.get(_data(settings.get("weight_dtype", "float8_e4m3fn")))):
            return found
    if isinstance(about, Mapping) and (set(about) <= {"_type", "_data", "_version"}):
        about = about.get("_type")
    known = ", ".join((*_PLAIN, *_INT8, *_INT4, *_INTX, _MX))
    config.problem("quant_type", f"expected one of {known}, found {about!r:.120}")
    return None


def _group(granularity: Any) -> Any:
    """Return the size of the groups; None for a scale of each row."""
    data = granularity.get("_data") if isinstance(granularity, Mapping) else None
    return data.get("group_size") if isinstance(data, Mapping) else None


def _data(value: Any) -> str:
    """Return the name of a dtype, as torchao writes it."""
    return str(value.get("_data") if isinstance(value, Mapping) else value).removeprefix("torch.")
