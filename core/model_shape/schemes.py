"""How each method of quantization writes down which matrices have which format.

What names matrices in a configuration is read whole: groups and their targets, lists of exceptions, rules by
expression. An exception in a key or form that is not known here is refused, because leaving it out would give another
model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..parsing import ConfigReader
from .beside import OF_PARTS
from .matrices import EMBEDDINGS, EXPERTS, HEAD, MIXERS, MLPS, Matrix
from .quantization import CONFIG_KEYS, grouped_format, mean_format, read_kv_format
from .scheme import EMBEDDING, LINEAR, FormatEntry, Scheme, Tier, TwoGroups

MIXED = "MIXED_PRECISION"
_PLAIN: Mapping[str, str] = {
    "fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "mxfp4", "modelopt_fp4": "nvfp4", "nvfp4": "nvfp4",
}  # fmt: skip
_MODELOPT: Mapping[str, str] = {
    "FP8": "fp8", "FP8_PB_WO": "fp8", "FP8_PER_CHANNEL_PER_TOKEN": "fp8", "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4-w16", "MXFP8": "mxfp8", "W4A8_MXFP4_FP8": "mxfp4", "INT8_SQ": "int8",
    "W8A8_SQ_PER_CHANNEL": "int8", "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN": "int8",
}  # fmt: skip
_MODELOPT_GROUPED = ("W4A16_AWQ", "W4A8_AWQ")
_GROUPED_METHODS = ("awq", "gptq", "auto-round")
_TORCHAO: Mapping[str, str] = {
    "float8weightonly": "fp8", "float8dynamicactivationfloat8weight": "fp8", "int8weightonly": "int8",
    "int8dynamicactivationint8weight": "int8",
}  # fmt: skip
_TORCHAO_GROUPED = ("int4weightonly", "int8dynamicactivationint4weight")
_KNOWN = (*_PLAIN, *_GROUPED_METHODS, "modelopt", "compressed-tensors", "bitsandbytes", "quark", "torchao")
_KEPT = ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers", "exclude", "llm_int8_skip_modules")
_UNDERSTOOD = (
    *_KEPT, "dynamic", "extra_config", "lm_head", "quantized_layers", "config_groups", "layer_quant_config",
    "layer_type_quant_config", "modules_in_block_to_quantize", "block_name_to_quantize", "to_quant_block_names",
    "module_name_preceding_first_block", "include_input_output_embeddings", "dynamic_scales",
)  # fmt: skip
_NAMES_MATRICES = re.compile(r"ignore|exclude|skip|not_convert|dynamic|extra|layer|module|target|head|embed|override")


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """The formats of the parts of a checkpoint's weights, None: not quantized; of several the mean, see
    `quantization.py`. `kv`: that of the KV cache, if the checkpoint says one."""

    experts: str | None = None  # routed experts; in a dense model its MLPs
    attention: str | None = None  # every mixer
    mlps: str | None = None  # dense and shared MLPs of a model that has experts
    embeddings: str | None = None
    head: str | None = None
    kv: str | None = None


def read_weight_formats(
    reader: ConfigReader,
    matrices: Callable[[], Sequence[Matrix]],
    wide: str,
    counted: Sequence[Matrix] | None = None,
) -> WeightFormats:
    """Read the formats of the parts of the weights, those of a model's `matrices`, or of the `counted` ones alone.
    `wide`: the format of what is not quantized. Problems are noted in `reader`."""
    scheme = read_scheme(reader, matrices)
    if scheme is None or reader.problems:
        return WeightFormats()
    counts: dict[str, dict[str, int]] = {}
    for matrix in matrices() if counted is None else counted:
        found = scheme.format_of(matrix) or wide
        of_part = counts.setdefault(matrix.part, {})
        of_part[found] = of_part.get(found, 0) + matrix.weights
    means = {part: mean_format(found) for part, found in counts.items()}
    mlps = means.get(MLPS)
    return WeightFormats(
        means.get(EXPERTS, mlps), means.get(MIXERS), mlps, means.get(EMBEDDINGS), means.get(HEAD), scheme.kv
    )


def read_scheme(reader: ConfigReader, matrices: Callable[[], Sequence[Matrix]]) -> Scheme | None:
    """Read which matrix has which format; None for a checkpoint that is not quantized.

    Problems are noted in `reader`, also an entry that names no matrix of the model, and two groups that name one.
    """
    key = next((key for key in CONFIG_KEYS if reader.get(key) is not None), None)
    if key is None:
        return None
    if not isinstance(reader.get(key), Mapping):
        reader.problem(key, f"must be an object, got {reader.get(key)!r}")
        return None
    config = reader.under(key)
    scheme = _read(config)
    if reader.problems or scheme is None:
        return None
    if reader.get("expert_dtype") == "fp4":  # DeepSeek-V4 says so beside the format of its matrices
        scheme = replace(scheme, parts={EXPERTS: "mxfp4"})
    kv = read_kv_format(config)
    scheme = replace(scheme, kv=kv)
    if any(tier.entries for tier in scheme.tiers):
        _check(config, scheme, matrices())
    return scheme


def _check(config: ConfigReader, scheme: Scheme, matrices: Sequence[Matrix]) -> None:
    """Note two groups that name one matrix, and entries that name none."""
    try:
        for matrix in matrices:
            scheme.format_of(matrix)
    except TwoGroups as error:
        config.problem(error.key, error.message)
    unused = list(scheme.unused(matrices))
    for entry in unused[:1]:
        others = f", like {len(unused) - 1} other entries" if len(unused) > 1 else ""
        config.problem(entry.key, f"{entry.pattern!r} names no matrix of the model{others}")


def _read(config: ConfigReader) -> Scheme | None:
    method, others = config.get("quant_method"), []
    for key, value in config.data.items():
        if value and key not in _UNDERSTOOD and _NAMES_MATRICES.search(key):
            others.append(key)
    if method is None and "quant_algo" in config.data:
        method = "modelopt"
    readers: dict[str, Callable[[ConfigReader], Scheme | None]] = {
        "modelopt": _modelopt, "compressed-tensors": _compressed_tensors, "bitsandbytes": _bitsandbytes,
        "quark": _quark, "torchao": _torchao, **dict.fromkeys(_PLAIN, _plain), **dict.fromkeys(_GROUPED_METHODS, _grouped),
    }  # fmt: skip
    if not isinstance(method, str) or method not in readers:
        config.problem("quant_method", f"expected one of {', '.join(_KNOWN)}, found {method!r}")
        return None
    for key in others:
        config.problem(key, f"is no exception that is understood for {method}: {config.get(key)!r:.60}")
    return readers[method](config)


def _kept(config: ConfigReader, *, is_loose: bool = False) -> Tier:
    """Return the matrices that are named as not quantized."""
    entries: list[FormatEntry] = []
    whole = OF_PARTS.split()
    for key in _KEPT:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
            config.problem(key, f"must be a list of names, got {value!r:.60}")
            continue
        for name in value:
            is_part = is_loose and name not in whole and not set("*?") & set(name) and not name.endswith(".weight")
            if _is_readable(config, key, name):
                entries.append(FormatEntry(key, name, None, "the exceptions", is_part))
    return Tier(tuple(entries))


def _is_readable(config: ConfigReader, key: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            config.problem(key, f"{pattern!r} is no expression: {error}")
            return False
    return True


def _plain(config: ConfigReader) -> Scheme:
    if config.get("quant_algo") == MIXED:
        return _mixed(config)
    return Scheme(config.get("quant_method"), (_kept(config),), _PLAIN[config.get("quant_method")])


# -- AWQ, GPTQ, AutoRound ----------------------------------------------------------------------------------------------


def _grouped(config: ConfigReader) -> Scheme:
    method = config.get("quant_method")
    bits = config.integer("bits" if "bits" in config.data else "w_bit")
    group = config.get("group_size" if "group_size" in config.data else "q_group_size")
    base = grouped_format(config, "bits", bits, group)
    tiers = [_kept(config, is_loose=method == "awq"), *_blocks(config)]
    if method == "gptq":
        tiers.append(_dynamic(config, bits, group))
    elif method == "auto-round":
        tiers.append(_extra(config, bits, group))
    for key in {"dynamic", "extra_config"} - {"dynamic" if method == "gptq" else "extra_config"}:
        if config.get(key) and not (method == "awq" and key == "dynamic" and isinstance(config.get(key), bool)):
            config.problem(key, f"is no exception that is understood for {method}")
    return Scheme(method, tuple(tiers), base, base if config.flag("lm_head") else None)


def _overridden(config: ConfigReader, key: str, about: Any, bits: int, group: Any) -> tuple[bool, str | None]:
    """Return whether an entry of a rule can be read, and the format that it gives; 16 bits and more are not
    quantized."""
    if not isinstance(about, Mapping):
        config.problem(key, f"must be an object, got {about!r:.60}")
        return False, None
    own = config.with_data({key: about}).under(key)
    wanted = own.integer("bits", bits)
    if wanted >= 16:
        return True, None
    found = grouped_format(own, "bits", wanted, about.get("group_size", group))
    return found is not None, found


def _dynamic(config: ConfigReader, bits: int, group: Any) -> Tier:
    """Return GPTQModel's rules by expression: "-:" keeps 16 bits, others change bits and groups; the first counts."""
    rules, entries = config.under("dynamic"), []
    for given, about in rules.data.items():
        pattern = f"re:{given.removeprefix('-:').removeprefix('+:')}"
        if not _is_readable(rules, given, pattern):
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
        is_read, found = _overridden(settings, name, about, bits, group)
        if not is_read:
            continue
        is_expression = bool(set("*+?^$()[]{}|\\") & set(name))
        pattern = f"re:.*?(?:{name})" if is_expression else name
        if _is_readable(settings, name, pattern):
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


# -- bitsandbytes, torchao ---------------------------------------------------------------------------------------------


def _bitsandbytes(config: ConfigReader) -> Scheme:
    base = "int4-g64" if config.flag("load_in_4bit") or config.flag("_load_in_4bit") else "int8"
    # The LM head is kept by default; a list of one's own names all that is kept.
    return Scheme(
        "bitsandbytes", (_kept(config),), base, base if config.get("llm_int8_skip_modules") is not None else None
    )


def _torchao(config: ConfigReader) -> Scheme | None:
    """Read one type for all matrices, as `transformers` writes it."""
    given = config.get("quant_type")
    about = given.get("default") if isinstance(given, Mapping) and set(given) == {"default"} else given
    name, settings = about, config.get("quant_type_kwargs") or {}
    if isinstance(about, Mapping):
        name, settings = about.get("_type"), about.get("_data") or {}
    key = str(name).removesuffix("Config").replace("_", "").lower()
    if config.flag("include_input_output_embeddings"):
        config.problem("include_input_output_embeddings", "quantized embeddings of torchao are not read")
    if key in _TORCHAO:
        base: str | None = _TORCHAO[key]
    elif key in _TORCHAO_GROUPED and isinstance(settings, Mapping):
        base = grouped_format(config, "quant_type", 4, settings.get("group_size", 128))
    else:
        config.problem("quant_type", f"expected one of {', '.join((*_TORCHAO, *_TORCHAO_GROUPED))}, found {name!r:.60}")
        return None
    return Scheme("torchao", (_kept(config),), base)


# -- ModelOpt ----------------------------------------------------------------------------------------------------------


def _modelopt(config: ConfigReader) -> Scheme | None:
    algorithm = config.get("quant_algo")
    if algorithm == MIXED:
        return _mixed(config)
    base = _of_modelopt(config, algorithm, config.get("group_size", 128))
    if base is None and not config.problems:
        known = ", ".join((*_MODELOPT, *_MODELOPT_GROUPED, MIXED))
        config.problem("quant_algo", f"expected one of {known}, found {algorithm!r}")
    return Scheme("modelopt", (_kept(config),), base)


def _of_modelopt(config: ConfigReader, algorithm: Any, group: Any) -> str | None:
    if not isinstance(algorithm, str):
        return None
    if algorithm in _MODELOPT_GROUPED:
        return grouped_format(config, "group_size", 4, group)
    return _MODELOPT.get(algorithm)


def _mixed(config: ConfigReader) -> Scheme:
    """Read a checkpoint that names a format for each of its matrices, or for all but those of its base."""
    layers, entries = config.under("quantized_layers"), []
    for name, about in layers.data.items():
        algorithm = about.get("quant_algo") if isinstance(about, Mapping) else about
        size = about.get("group_size", 128) if isinstance(about, Mapping) else 128
        found = _of_modelopt(layers, algorithm, size)
        if found is None:
            known = ", ".join((*_MODELOPT, *_MODELOPT_GROUPED))
            layers.problem(name, f"expected one of {known}, found {algorithm!r}")
            break
        entries.append(FormatEntry(f"quantized_layers.{name}", name, found, found))
    method = config.get("quant_method")
    base = _PLAIN.get(method) if isinstance(method, str) else None
    return Scheme("modelopt", (_kept(config), Tier(tuple(entries))), base)


# -- compressed-tensors, Quark -----------------------------------------------------------------------------------------


def _compressed_tensors(config: ConfigReader) -> Scheme | None:
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
            if found is not None and _is_readable(group, "targets", target):
                rank = 1 if target.startswith("re:") else 2 if target in (LINEAR, EMBEDDING) else 0
                ranks[rank].append(FormatEntry(f"config_groups.{name}.targets", target, found, name))
    return Scheme("compressed-tensors", (_kept(config), *(Tier(tuple(entries)) for entries in ranks)))


def _compressed_format(weights: ConfigReader) -> str | None:
    bits, kind, size = weights.integer("num_bits"), weights.get("type", "int"), weights.get("group_size")
    if kind == "float" and bits == 8:
        return "mxfp8" if size == 32 else "fp8"
    if kind == "float" and bits == 4:
        return "mxfp4" if size == 32 else "nvfp4"
    if kind == "int":
        return grouped_format(weights, "num_bits", bits, size)
    weights.problem("num_bits", f"{bits} bits of type {kind!r} are no known format")
    return None


def _quark(config: ConfigReader) -> Scheme:
    """Read one format for all linear layers but those excluded, and others by name."""
    entries = []
    layers = config.under("layer_quant_config")
    for name in layers.data:
        entries.append(FormatEntry(f"layer_quant_config.{name}", name, _quark_format(layers.under(name)), name))
    if config.get("layer_type_quant_config"):
        config.problem("layer_type_quant_config", "formats by class of a layer are not read")
    base = _quark_format(config.under("global_quant_config"))
    return Scheme("quark", (_kept(config), Tier(tuple(entries), is_ordered=True)), base, base)


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
