"""Reads which matrix of a checkpoint has which format, by the method that its configuration names.

What names matrices in a configuration is read whole: groups and their targets, lists of exceptions, rules by
expression. An exception in a key or form that is not known here is refused, because leaving it out would give another
model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...parsing import ConfigReader
from ..matrices import EMBEDDINGS, EXPERTS, HEAD, MIXERS, MLPS, Matrix
from ..quantization import CONFIG_KEYS, mean_format, read_kv_format
from . import integers, modelopt
from .entries import KEPT, kept
from .groups import read_compressed_tensors, read_quark
from .scheme import Scheme, TwoGroups
from .torchao import read_torchao

_PLAIN: Mapping[str, str] = {
    "fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "mxfp4", "mxfp8": "mxfp8", "nvfp4": "nvfp4", "w8a8_fp8": "fp8",
    "w8a8_int8": "int8", "blockwise_int8": "int8",
}  # fmt: skip
_UNDERSTOOD = (
    *KEPT, "dynamic", "extra_config", "lm_head", "quantized_layers", "config_groups", "layer_quant_config",
    "layer_type_quant_config", "modules_in_block_to_quantize", "block_name_to_quantize", "to_quant_block_names",
    "module_name_preceding_first_block", "include_input_output_embeddings", "untie_embedding_weights", "dynamic_scales",
    "routed_experts_quant_method",
)  # fmt: skip
_NAMES_MATRICES = re.compile(
    r"ignore|exclude|skip|not_convert|dynamic|extra|layer|module|target|head|embed|override|expert|moe"
)


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
    # Both say the format of the experts beside that of all matrices: DeepSeek-V4, and SGLang.
    if reader.get("expert_dtype") == "fp4" or config.get("routed_experts_quant_method") == "mxfp4":
        scheme = replace(scheme, parts={EXPERTS: "mxfp4"})
    kv = read_kv_format(config)
    scheme = replace(scheme, kv=kv)
    if any(tier.entries for tier in scheme.tiers):
        _check(config, scheme, matrices())
    return scheme


def _check(config: ConfigReader, scheme: Scheme, matrices: Sequence[Matrix]) -> None:
    """Note two groups that name one matrix, and entries that name none, or some of a layer's experts."""
    try:
        for matrix in matrices:
            scheme.format_of(matrix)
    except TwoGroups as error:
        config.problem(error.key, error.message)
    for entry in list(scheme.of_some_experts(matrices))[:1]:
        config.problem(entry.key, f"{entry.pattern!r} names some experts of a layer: these have one format each here")
        return
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
    if not isinstance(method, str) or method not in _READERS:
        config.problem("quant_method", f"expected one of {', '.join(_READERS)}, found {method!r}")
        return None
    for key in others:
        config.problem(key, f"is no exception that is understood for {method}: {config.get(key)!r:.60}")
    return _READERS[method](config)


def _plain(config: ConfigReader) -> Scheme:
    method = config.get("quant_method")
    if config.get("quant_algo") == modelopt.MIXED:
        return modelopt.read_mixed(config, _PLAIN[method])
    experts = config.get("routed_experts_quant_method")
    if experts not in (None, "mxfp4", method):
        config.problem("routed_experts_quant_method", f"expected mxfp4, found {experts!r}")
    return Scheme(method, (kept(config),), _PLAIN[method])


_READERS: Mapping[str, Callable[[ConfigReader], Scheme | None]] = {
    **dict.fromkeys(_PLAIN, _plain), **dict.fromkeys(integers.METHODS, integers.read_grouped),
    **dict.fromkeys(modelopt.METHODS, modelopt.read_modelopt), "compressed-tensors": read_compressed_tensors,
    "bitsandbytes": integers.read_bitsandbytes, "quark": read_quark, "torchao": read_torchao,
    "w4afp8": integers.read_w4afp8,
}  # fmt: skip
