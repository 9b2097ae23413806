"""Formats by group or by layer: compressed-tensors and AMD's Quark."""

from __future__ import annotations

from collections.abc import Mapping

from ...parsing import ConfigReader
from ..quantization import grouped_format
from .entries import is_readable, kept
from .scheme import EMBEDDING, LINEAR, FormatEntry, Scheme, Tier


def read_compressed_tensors(config: ConfigReader) -> Scheme | None:
    """Read the groups: names come before expressions, these before classes."""
    groups = config.under("config_groups")
    if not groups.data and config.get("kv_cache_scheme") is None:  # with it the checkpoint may round its KV alone
        config.problem("config_groups", "is missing")
        return None
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense"):
        config.problem("sparsity_config", f"sparse weights ({sparsity['format']!r:.40}) are not implemented")
    ranks: tuple[list[FormatEntry], list[FormatEntry], list[FormatEntry]] = ([], [], [])  # names, expressions, classes
    for name in groups.data:
        group = groups.under(name)
        found = _compressed_format(group.under("weights"))
        targets = group.get("targets", [LINEAR])
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            group.problem("targets", f"must be a list of names, got {targets!r:.60}")
            continue
        for target in targets:
            if found is not None and is_readable(group, "targets", target):
                rank = 1 if target.startswith("re:") else 2 if target in (LINEAR, EMBEDDING) else 0
                ranks[rank].append(FormatEntry(f"config_groups.{name}.targets", target, found, name))
    return Scheme("compressed-tensors", (kept(config), *(Tier(tuple(entries)) for entries in ranks)))


def _compressed_format(weights: ConfigReader) -> str | None:
    bits, kind, size = weights.integer("num_bits"), weights.get("type", "int"), weights.get("group_size")
    if kind == "float" and bits == 8:
        return "mxfp8" if size == 32 else "fp8"
    if kind == "float" and bits == 4:
        return "mxfp4" if size == 32 else "nvfp4"
    if kind == "int":
        is_symmetric = weights.flag("symmetric", True)  # then no zero points are stored
        return grouped_format(weights, "num_bits", bits, size, scale_bits=16 if is_symmetric else None)
    weights.problem("num_bits", f"{bits} bits of type {kind!r} are no known format")
    return None


def read_quark(config: ConfigReader) -> Scheme:
    """Read one format for all linear layers but those excluded, and others by name."""
    entries = []
    layers = config.under("layer_quant_config")
    for name in layers.data:
        entries.append(FormatEntry(f"layer_quant_config.{name}", name, _quark_format(layers.under(name)), name))
    if config.get("layer_type_quant_config"):
        config.problem("layer_type_quant_config", "formats by class of a layer are not read")
    base = _quark_format(config.under("global_quant_config"))
    return Scheme("quark", (kept(config), Tier(tuple(entries), is_ordered=True)), base, base)


def _quark_format(about: ConfigReader) -> str | None:
    weight = about.get("weight")
    if weight is None:
        return None
    if isinstance(weight, list) and len(weight) == 1:
        weight = weight[0]
    if not isinstance(weight, Mapping):
        about.problem("weight", f"formats in several steps are not read, found {weight!r:.60}")
        return None
    dtype, size = weight.get("dtype"), weight.get("group_size")
    is_micro = size == 32 and weight.get("scale_format") == "e8m0"
    if dtype == "fp8_e4m3":
        return "mxfp8" if is_micro else "fp8"
    if dtype == "fp4" and is_micro:
        return "mxfp4"
    if dtype in ("int4", "uint4", "int8", "uint8"):
        return grouped_format(about, "weight", int(str(dtype)[-1]), size)
    about.problem(
        "weight", f"expected fp8_e4m3, fp4 in groups of 32, int4 or int8, found {dtype!r} in groups of {size}"
    )
    return None
