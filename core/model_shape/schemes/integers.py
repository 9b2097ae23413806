"""Integers in groups: AWQ, GPTQ, AutoRound, bitsandbytes, and SGLang's W4AFP8."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...parsing import ConfigReader
from ..matrices import EXPERTS
from ..quantization import grouped_format
from .entries import is_readable, kept
from .scheme import FormatEntry, Scheme, Tier

METHODS = ("awq", "gptq", "auto-round")
_ROUNDED: Mapping[str, Mapping[int, str]] = {
    "mx_fp": {4: "mxfp4", 8: "mxfp8"}, "nv_fp": {4: "nvfp4"}, "fp": {8: "fp8"},
}  # fmt: skip
"""AutoRound's families of floats, by bits."""


def read_grouped(config: ConfigReader) -> Scheme:
    """Read one format for all matrices, and those of the matrices that rules or settings name."""
    method = config.get("quant_method")
    bits = config.integer("bits" if "bits" in config.data else "w_bit")
    group = config.get("group_size" if "group_size" in config.data else "q_group_size")
    base = _format(config, "bits", bits, group, config)
    tiers = [kept(config, is_loose=method == "awq"), *_blocks(config)]
    if method == "gptq":
        tiers.append(_dynamic(config, bits, group))
    elif method == "auto-round":
        tiers.append(_extra(config, bits, group))
    for key in {"dynamic", "extra_config"} - {"dynamic" if method == "gptq" else "extra_config"}:
        if config.get(key) and not (method == "awq" and key == "dynamic" and isinstance(config.get(key), bool)):
            config.problem(key, f"is no exception that is understood for {method}")
    return Scheme(method, tuple(tiers), base, base if config.flag("lm_head") else None)


def _overridden(
    config: ConfigReader, key: str, about: Any, bits: int, group: Any, data_type: Any = None
) -> tuple[bool, str | None]:
    """Return whether an entry of a rule can be read, and the format that it gives; 16 bits and more are not
    quantized."""
    if not isinstance(about, Mapping):
        config.problem(key, f"must be an object, got {about!r:.60}")
        return False, None
    own = config.with_data({key: about}).under(key)
    wanted = own.integer("bits", bits)
    if wanted >= 16:
        return True, None
    types = own if "data_type" in about else config.with_data({"data_type": data_type})
    found = _format(own, "bits", wanted, about.get("group_size", group), types)
    return found is not None, found


def _format(config: ConfigReader, key: str, bits: int, group: Any, types: ConfigReader) -> str | None:
    """Return the format of numbers of so many bits, which AutoRound may have rounded to floats."""
    kind = types.get("data_type") or "int"
    if config.problems or kind == "int":
        return grouped_format(config, key, bits, group)
    for family, formats in _ROUNDED.items():
        if str(kind).startswith(family) and bits in formats:
            return formats[bits]
    types.problem("data_type", f"expected int, or mx_fp, nv_fp or fp of 4 or 8 bits, found {kind!r} of {bits} bits")
    return None


def _dynamic(config: ConfigReader, bits: int, group: Any) -> Tier:
    """Return GPTQModel's rules by expression: "-:" keeps 16 bits, others change bits and groups; the first counts."""
    rules, entries = config.under("dynamic"), []
    for given, about in rules.data.items():
        pattern = f"re:{given.removeprefix('-:').removeprefix('+:')}"
        if not is_readable(rules, given, pattern):
            continue
        if given.startswith("-:"):
            entries.append(FormatEntry(f"dynamic.{given}", pattern, None))
            continue
        is_read, found = _overridden(rules, given, about, bits, group)
        if is_read:
            entries.append(FormatEntry(f"dynamic.{given}", pattern, found))
    return Tier(tuple(entries), is_ordered=True)


def _extra(config: ConfigReader, bits: int, group: Any) -> Tier:
    """Return AutoRound's settings of single layers: whole names, which come first, or expressions."""
    settings = config.under("extra_config")
    named: list[FormatEntry] = []
    others: list[FormatEntry] = []
    for name, about in settings.data.items():
        is_read, found = _overridden(settings, name, about, bits, group, config.get("data_type"))
        if not is_read:
            continue
        is_expression = bool(set("*+?^$()[]{}|\\") & set(name))
        pattern = f"re:.*?(?:{name})" if is_expression else name
        if is_readable(settings, name, pattern):
            (others if is_expression else named).append(FormatEntry(f"extra_config.{name}", pattern, found))
    return Tier((*named, *others), is_ordered=True)


def _blocks(config: ConfigReader) -> list[Tier]:
    """Return a tier that keeps all matrices of layers but those that a file names as quantized."""
    for key in ("block_name_to_quantize", "to_quant_block_names"):
        if (blocks := config.get(key)) is not None and "layers" not in str(blocks):
            config.problem(key, f"expected the layers of the language model, found {blocks!r:.60}")
    inside = config.get("modules_in_block_to_quantize")
    if not inside:
        return []
    names = [name for part in inside for name in (part if isinstance(part, list) else [part])]
    if not isinstance(inside, list) or not all(isinstance(name, str) for name in names):
        config.problem("modules_in_block_to_quantize", f"must be lists of names, got {inside!r:.60}")
        return []
    choice = "|".join(map(re.escape, names))
    rest = FormatEntry(
        "modules_in_block_to_quantize", rf"re:.*\blayers\.[0-9]+\.(?!(?:{choice})(?:\.|$))", None, is_vital=False
    )
    return [Tier((rest,))]


def read_bitsandbytes(config: ConfigReader) -> Scheme:
    """Read the only format of all layers. A group of 64 has a scale of 32 bits, or of 8 bits that have scales, too."""
    base = "int8"
    if config.flag("load_in_4bit") or config.flag("_load_in_4bit"):
        base = "int4-g64-s8" if config.flag("bnb_4bit_use_double_quant") else "int4-g64-s32"
    # The LM head is kept by default; a list of one's own names all that is kept.
    has_list = config.get("llm_int8_skip_modules") is not None
    return Scheme("bitsandbytes", (kept(config),), base, base if has_list else None)


def read_w4afp8(config: ConfigReader) -> Scheme:
    """Read SGLang's 4-bit experts, whose groups have scales of 32 bits, beside 8-bit floats."""
    experts = grouped_format(config, "group_size", 4, config.get("group_size", 128), scale_bits=32)
    parts = {} if experts is None else {EXPERTS: experts}
    return Scheme("w4afp8", (kept(config),), "fp8", parts=parts)
