"""The package aiconfigurator-core: which models, GPUs and servers it knows, and handles that price the
passes of one model."""

from __future__ import annotations

import json
import logging
import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from importlib import metadata, util
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ....core.errors import ConfigError, ForedraftError
from ....core.model_shape import ARCHITECTURES, HF_QUANT_CONFIG, Attention, ModelShape, read_model_shape
from ....core.model_shape.quantization import CONFIG_KEYS
from ....observe.distribution.install_hint import install_command
from ..hardware import GPU, Parallelism, known_gpus, lookup_gpu

PACKAGE = "aiconfigurator_core"
SYSTEMS = {
    "A100": "a100_sxm",
    "H100": "h100_sxm",
    "H200": "h200_sxm",
    "B200": "b200_sxm",
    "B300": "b300_sxm",
    "GB200": "gb200",
    "GB300": "gb300",
    "L40S": "l40s",
}
SERVERS = ("sglang", "vllm", "trtllm")
_MEASURED_KV = ("bf16", "fp16", "fp8")
_BLACKWELL = ("b200_sxm", "b300_sxm", "gb200", "gb300")
"""GPUs on which TensorRT-LLM computes MXFP4 experts with activations of MXFP8; elsewhere they have 16 bits
(NVIDIA/TensorRT-LLM, deployment guide for GPT-OSS, "MoE Backend Support Matrix")."""

_AUTO = "hardware.kernels=auto takes the roofline"
_COMPOSED = frozenset((
    "llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "mimo", "gemma4", "qwen2_moe", "gpt_oss", "llama4", "minimax_m2",
    "minimax_m3", "mimo_v2_flash", "step3p7", "deepseek_v3", "deepseek_v32", "deepseek_v4", "glm_moe_dsa",
    "kimi_linear", "qwen3_5", "qwen3_5_moe", "nemotron_h", "nemotron-nas",
))  # fmt: skip
"""The families that the package composes from their own configuration."""
_WEIGHTS: Mapping[str, Mapping[str, str]] = {
    "bf16": {"gemm_quant_mode": "bfloat16", "moe_quant_mode": "bfloat16"},
    "fp16": {"gemm_quant_mode": "bfloat16", "moe_quant_mode": "bfloat16"},
    "fp8": {"gemm_quant_mode": "fp8", "moe_quant_mode": "fp8"},
    "nvfp4": {"gemm_quant_mode": "nvfp4", "moe_quant_mode": "nvfp4"},
    "int4-g128": {"gemm_quant_mode": "int4_wo", "moe_quant_mode": "int4_wo"},
}
_WEIGHTS_OF_NAME = {**_WEIGHTS, **dict.fromkeys(("int4", "int4-g128-s16"), _WEIGHTS["int4-g128"])}


class NotMeasured(ForedraftError):
    """A model, GPU or parallelism that the database of measured kernels cannot price, or the database
    is not installed."""


def package_version() -> str:
    """Return the version of the installed package. Raises NotMeasured."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        message = f"measured kernels need the package aiconfigurator-core: {install_command('measured')}"
        raise NotMeasured(message) from None


# -- models that the package knows by name -----------------------------------------------------------------------------


def _config_folder() -> Path | None:
    """Return the folder of the package's configurations, without importing it; None if it is not installed."""
    spec = util.find_spec(PACKAGE)
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) / "model_configs" if places else None


def packaged_models() -> list[str]:
    """Return the names on Hugging Face of the models whose configuration the package has; none without it."""
    folder, suffix = _config_folder(), "_config.json"
    if folder is None:
        return []
    names = (
        path.name.removesuffix(suffix) for path in folder.glob(f"*{suffix}") if not path.name.endswith(HF_QUANT_CONFIG)
    )
    return sorted(name.replace("--", "/", 1) for name in names)


def packaged_config(name: str) -> tuple[Path, Path] | None:
    """Return a model's files `config.json` and `hf_quant_config.json`, of which the second may not exist.

    `name` is that on Hugging Face, with or without the organisation, in any case. None if the package has none or is
    not installed.
    """
    folder, key = _config_folder(), name.strip().lower()
    for known in packaged_models():
        if folder is not None and key in (known.lower(), known.lower().rpartition("/")[2]):
            stem = known.replace("/", "--", 1)
            return folder / f"{stem}_config.json", folder / f"{stem}_{HF_QUANT_CONFIG}"
    return None


# -- what is asked -----------------------------------------------------------------------------------------------------


def check_known(gpu: str, server: str, parallel: Parallelism) -> str:
    """Return the package's name of a GPU. Raises NotMeasured with the nearest GPU of the database."""
    if gpu not in SYSTEMS:
        near = (
            min(SYSTEMS, key=lambda other: _distance(lookup_gpu(gpu), lookup_gpu(other)))
            if gpu in known_gpus()
            else "H100"
        )
        known = ", ".join(SYSTEMS)
        raise NotMeasured(f"{gpu}: no measured kernels; there are some of {known}; the nearest is {near}; {_AUTO}")
    if server not in SERVERS:
        raise NotMeasured(f"{server!r}: no measured kernels of this server; there are some of {', '.join(SERVERS)}")
    per_node = lookup_gpu(gpu).per_node
    if parallel.devices > min(parallel.gpus_per_node, per_node) and parallel.gpus_per_node != per_node:
        nodes = f"nodes of {parallel.gpus_per_node} devices; there are some of nodes of {per_node}"
        raise NotMeasured(f"{gpu}: no measured collectives over {nodes}; {_AUTO}")
    return SYSTEMS[gpu]


def _distance(one: GPU, other: GPU) -> float:
    """Return the distance of two GPUs in bandwidth and compute, as logarithms of ratios."""
    bandwidth = one.memory_bandwidth_bytes_per_s / other.memory_bandwidth_bytes_per_s
    return abs(math.log(bandwidth)) + abs(math.log(one.flops("bf16") / other.flops("bf16")))


def question(
    shape: ModelShape, system: str, server: str, parallel: Parallelism
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the `config.json` and the options to ask the package with. Raises NotMeasured.

    If the package composes the model's family itself, it is asked with the model's own file, and with other number
    formats only where a scenario changes them. Models of equal layers with grouped attention (drafts' heads, families
    of the same form) are asked as Llama or Qwen3 MoE.
    """
    if shape.kv_dtype not in _MEASURED_KV:
        raise NotMeasured(f"KV in {shape.kv_dtype}: no measured attention; {_AUTO}")
    options: dict[str, Any] = {
        "tp_size": parallel.tensor,
        "attention_dp_size": parallel.data,
        "moe_ep_size": parallel.expert,
        "moe_tp_size": parallel.devices // parallel.expert,
        "kvcache_quant_mode": "fp8" if shape.kv_dtype == "fp8" else "bfloat16",
    }
    if shape.weight_dtype == "mxfp4" and server == "trtllm" and system in _BLACKWELL:
        options["moe_quant_mode"] = "w4a8_mxfp4_mxfp8"
    if shape.config is None or shape.family not in _COMPOSED:
        return _alike(shape), options | _weights(shape, server)
    config = dict(shape.config)
    config["architectures"] = config.get("architectures") or [ARCHITECTURES[shape.family]]
    try:
        own = shape_of_text(json.dumps(config), shape.source, shape.name, is_whole=False)
    except ConfigError:  # entries of the quantization name layers of the whole model, of which this is one
        config["quantization_config"] = {
            key: value for key, value in config["quantization_config"].items() if not isinstance(value, list)
        }
        own = shape_of_text(json.dumps(config), shape.source, shape.name, is_whole=False)
    if (own.weight_dtype, own.attention_dtype, own.mlp_dtype) == (
        shape.weight_dtype,
        shape.attention_dtype,
        shape.mlp_dtype,
    ):
        return config, options
    return _without_quantization(config), options | _weights(shape, server)


@lru_cache(maxsize=32)
def shape_of_text(config: str, source: str, name: str, *, is_whole: bool = True) -> ModelShape:
    """Read the shape of a `config.json`, as `read_model_shape` does, once for all runs of this process: to resolve the
    names of a quantization takes as long as a short simulation."""
    return read_model_shape(json.loads(config), source, name, is_whole=is_whole)


def _weights(shape: ModelShape, server: str) -> dict[str, str]:
    """Return the database's names of the formats of weights that a scenario asks for. Raises NotMeasured.

    SGLang scales 8-bit activations as they come; vLLM and TensorRT-LLM scale them by constants of the checkpoint, in
    the kernels before.
    """
    if shape.attention_dtype or shape.mlp_dtype or shape.weight_dtype not in _WEIGHTS_OF_NAME:
        known = ", ".join(_WEIGHTS)
        raise NotMeasured(
            f"{shape.name}: no measured kernels of {shape.weight_dtype} weights; there are some of {known}; {_AUTO}"
        )
    modes = dict(_WEIGHTS_OF_NAME[shape.weight_dtype])
    if modes["gemm_quant_mode"] == "fp8" and server != "sglang":
        modes["gemm_quant_mode"] = "fp8_static"
    return modes


def _without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_quantization(value) if key == "text_config" else value
        for key, value in config.items()
        if key not in CONFIG_KEYS
    }


def _alike(shape: ModelShape) -> dict[str, Any]:
    """Return a shape as a `config.json` of Llama or Qwen3 MoE. Raises NotMeasured for layers that these do not have."""
    (attention, _), mlps, experts = shape.mixers[0], shape.mlps, shape.experts
    plain = None
    if isinstance(attention, Attention):
        kept = replace(attention, qkv_bias=False, output_bias=False, qk_norm=False)
        if kept == Attention(attention.heads, attention.kv_heads, attention.head_dim, attention.head_dim):
            plain = kept
    if len(shape.mixers) > 1 or len(mlps) != 1 or plain is None or (experts and experts.shared_width):
        raise NotMeasured(
            f"{shape.name}: no measured kernels of the family {shape.family}; there are some of {', '.join(sorted(_COMPOSED))}; {_AUTO}"
        )
    part = mlps[0][0]
    config = {
        "architectures": ["Qwen3MoeForCausalLM" if experts else "LlamaForCausalLM"],
        "model_type": "qwen3_moe" if experts else "llama",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": plain.heads,
        "num_key_value_heads": plain.kv_heads,
        "head_dim": plain.head_dim,
        "intermediate_size": part.width,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_context,
        "torch_dtype": "bfloat16",
    }
    if experts:
        config |= {
            "num_experts": experts.count,
            "num_experts_per_tok": experts.top_k,
            "moe_intermediate_size": experts.width,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config


@contextmanager
def _silent() -> Iterator[None]:
    """Keep the package's log lines, written at import and in use, out of our log."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def compiled(
    config: Mapping[str, Any],
    options: Mapping[str, Any],
    system: str,
    server: str,
    graph: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Return the database's handle of a model, which it wants as a folder with a `config.json`; it can price a decode
    pass and a prompt. `graph`: see `_handle`.

    Raises NotMeasured with the database's reason.
    """
    with _silent():
        try:
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
                beside = config.get("quantization_config") or {}
                if beside.get("quant_method") == "modelopt" and "quant_algo" in beside:
                    text = json.dumps({"quantization": beside})
                    (Path(folder) / HF_QUANT_CONFIG).write_text(text, encoding="utf-8")
                # Prompts of 8-bit checkpoints may be computed with 16-bit attention, which servers do unless asked
                # otherwise. Where the database has no such kernel for the model, whatever error says so, it takes the
                # one that it has.
                try:
                    handle = _handle(folder, system, server, {**options, "fmha_quant_mode": "bfloat16"}, graph)
                    _price_once(handle)
                except Exception:
                    handle = _handle(folder, system, server, options, graph)
                    _price_once(handle)
                return handle
        except Exception as error:  # any error of the package means that it cannot price this
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            first = first.replace("perf database error: ", "").partition(" at /")[0]
            raise NotMeasured(first[:240]) from error


WIDE_SYSTEMS, LEAST_WIDE = ("gb200", "gb300"), 8
"""Racks that NVLink spans, and the fewest expert ranks of a wide deployment: more than a tray of four."""
_COPIED_SLOTS = 288
"""Places for the 256 experts of DeepSeek-V3 in wide deployments: 32 popular ones have a copy."""


class WideExperts:
    """The database's handle of a model whose decode passes take the routed experts from another handle."""

    def __init__(self, own: Any, experts: Any) -> None:
        self._own, self._experts, self._engine = own, experts, own._engine

    def decode_step_per_op(self, rows: int, context: int, output: int) -> list[tuple[Any, ...]]:
        """Return the operations of a decode pass with their times, as the database's handle does."""
        passes = [handle.decode_step_per_op(rows, context, output) for handle in (self._own, self._experts)]
        return [
            one for found, are in zip(passes, (False, True), strict=True) for one in found if ("moe" in one[0]) == are
        ]


def wide_experts(config: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Return the handle that prices decode passes of experts spread over a rack, each rank with its own requests.

    Servers copy popular experts there and exchange tokens by all-to-all over NVLink, where the usual graph has uneven
    experts without copies. The database timed both on GB200 under TensorRT-LLM in NVFP4, which stands for GB300, for
    other servers and for FP8. Raises NotMeasured.
    """
    asked = {name: value for name, value in options.items() if name != "moe_quant_mode"}
    graph = {
        "moe_comm_backend": dict.fromkeys(("context", "generation"), "nvlink_two_sided"),
        "num_gpus_per_node": 4,  # of a tray, as the table of exchanges counts nodes
        "enable_eplb": True,
        "wideep_num_slots": _COPIED_SLOTS,
    }
    return compiled(config, asked | {"moe_quant_mode": "nvfp4"}, WIDE_SYSTEMS[0], "trtllm", graph)


def _handle(folder: str, system: str, server: str, options: Mapping[str, Any], graph: Mapping[str, Any]) -> Any:
    """Return the database's handle of the model in a folder. `graph`: fields of its configuration that choose another
    graph of operations, which its own function to compile does not take."""
    from aiconfigurator_core.sdk import engine

    original = engine.build_model_config

    def build(**given: Any) -> Any:
        found = original(**given)
        for name, value in {**graph, "system": system}.items():
            setattr(found, name, value)
        return found

    if not graph:
        return engine.EngineHandle.compile(folder, system, server, **options)
    engine.build_model_config = build
    try:
        return engine.EngineHandle.compile(folder, system, server, **options)
    finally:
        engine.build_model_config = original


def _price_once(handle: Any) -> None:
    handle.decode_step_per_op(1, 1024, 2)
    handle.predict_prefill_latency(1, 1024 + 16, 1024)


def refusal(shape: ModelShape, gpu: str, server: str, parallel: Parallelism, reason: str) -> NotMeasured:
    """Return the error for a model that the database cannot price, with the nearest that it can."""
    place = f"{shape.name} on {gpu} under {server}, {parallel}"
    near = next((words for words in _nearest(shape, gpu, server, parallel)), None)
    hint = f"; the nearest that it has: {near}" if near else ""
    return NotMeasured(f"{place}: no measured kernels ({reason}){hint}; {_AUTO}")


def _nearest(shape: ModelShape, gpu: str, server: str, parallel: Parallelism) -> Iterator[str]:
    """Yield the changes of one setting with which the database can price the model, the least first."""
    tries: list[tuple[str, ModelShape, str, str, Parallelism]] = []
    if shape.experts is not None and parallel.devices > 1:
        for ranks in (parallel.devices, 1):
            if ranks != parallel.expert:
                spread = replace(parallel, expert=ranks)
                tries.append((f"hardware.expert_parallel={ranks}", shape, gpu, server, spread))
    tries += [(f"hardware.kernels_of={other}", shape, gpu, other, parallel) for other in SERVERS if other != server]
    for dtype in ("fp8", "bf16"):
        if dtype != shape.weight_dtype:
            tries.append((f"model.weight_dtype={dtype}", shape.with_dtypes(dtype), gpu, server, parallel))
    here = lookup_gpu(gpu)
    others = sorted((name for name in SYSTEMS if name != gpu), key=lambda name: _distance(here, lookup_gpu(name)))
    tries += [(f"hardware.gpu={other}", shape, other, server, parallel) for other in others]
    for words, other, on, under, spread in tries:
        try:
            compiled(*question(other, SYSTEMS[on], under, spread), SYSTEMS[on], under)
        except NotMeasured:
            continue
        yield words
