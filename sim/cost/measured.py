"""Device times from measured kernels: NVIDIA's database in the package aiconfigurator-core (the extra `measured`, Apache-2.0).

The package has tables of single kernels (matrix products, attention, expert layers, all-reduces) as they were measured on a GPU under a
server's build, and composes the passes of a model from them. `measured_tables` asks for the passes of one shape on one GPU under one server
and tensor parallelism, once, and keeps the answers as plain arrays in the user's cache folder; a run looks times up in these arrays and
needs the package no more.

What the database lacks is refused with what it has. An operation that it interpolates or estimates itself is named in `provenance`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from ...core.errors import ForetokenError
from ...core.model_shape import Attention, ModelShape
from .forward import ForwardCost, Line
from .work import Routing

PACKAGE = "aiconfigurator_core"
SYSTEMS = {"A100": "a100_sxm", "H100": "h100_sxm", "H200": "h200_sxm", "B200": "b200_sxm", "L40S": "l40s", "L4": "l4"}
SERVERS = ("sglang", "vllm", "trtllm")

TABLE_VERSION = 2  # of what stands below: raise it when the grids or the groups of operations change
TOKENS = (*range(1, 65), *range(72, 513, 8), *range(576, 2049, 64), 3072, 4096, 6144, 8192, 12288, 16384)
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
QUERIES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)
CONTEXTS = (64, 256, 1024, 4096, 16384)
CHUNKS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PASTS = (0, 256, 1024, 4096, 16384, 65536)
KNEE = 1024
"""Context per row where the line of an attention pass may bend; must be one of CONTEXTS."""

_GROUPS = {
    "attention": "attention",
    "logits": "lm_head",
    "_ar": "comm",
    "ar_": "comm",
    "dispatch": "comm",
    "p2p": "comm",
}


class NotMeasured(ForetokenError):
    """A model, GPU or parallelism that the database of measured kernels cannot price, or the database is not installed."""


@dataclass(frozen=True, slots=True)
class KernelTables:
    """Times of the passes of one model, in float nanoseconds, on the grids above.

    layers:      [TOKENS]                       matrix products and small kernels of all layers, embedding included
    comm:        [TOKENS]                       all-reduces and what else moves between devices
    lm_head:     [TOKENS]                       logits of so many rows
    decode:      [ROWS, CONTEXTS]               attention of one new token per row
    verify:      [ROWS, QUERIES, CONTEXTS]      attention of several new tokens per row behind a prefix
    prefill:     [CHUNKS, PASTS]                attention of one prompt chunk behind so many tokens
    provenance:  operation -> how the database knows it: silicon, mixed, empirical
    """

    source: str
    layers: np.ndarray
    comm: np.ndarray
    lm_head: np.ndarray
    decode: np.ndarray
    verify: np.ndarray
    prefill: np.ndarray
    provenance: dict[str, str]


_ARRAYS = ("layers", "comm", "lm_head", "decode", "verify", "prefill")


def measured_tables(shape: ModelShape, gpu: str, server: str, tp: int) -> KernelTables:
    """Return the tables of a shape, from the cache folder or, the first time, from the database.

    Raises NotMeasured if the package is not installed, or cannot price this shape, GPU, server or parallelism.
    """
    system = SYSTEMS.get(gpu)
    if system is None:
        raise NotMeasured(f"{gpu}: no measured kernels; there are some of {', '.join(SYSTEMS)}")
    if server not in SERVERS:
        raise NotMeasured(f"{server!r}: no measured kernels of this server; there are some of {', '.join(SERVERS)}")
    if len(shape.mixers) > 1 or len(shape.mlps) > 1 or shape.attention_dtype or shape.mlp_dtype or shape.reach:
        raise NotMeasured(
            f"{shape.name}: no measured kernels of layers that differ from one another, or of a window of attention"
        )
    version = _package_version()
    config, formats = _config(shape), _formats(shape, server)
    identity = json.dumps([TABLE_VERSION, version, config, formats, system, server, tp])
    path = _cache_folder() / f"{hashlib.sha256(identity.encode()).hexdigest()[:24]}.npz"
    tables = _load(path, identity)
    if tables is None:
        handle = _compile(shape.name, config, system, server, tp, formats)
        tables = _query(handle, f"{PACKAGE} {version}: {shape.name} on {system}, {server}, tensor parallel {tp}")
        _store(path, identity, tables)
    return tables


class MeasuredForward(ForwardCost):
    """Costs of passes of a target from tables of measured kernels; it answers what `ForwardCost` answers."""

    def __init__(self, roofline: ForwardCost, tables: KernelTables) -> None:
        super().__init__(roofline.shape, roofline.gpu, roofline.efficiency, roofline.parallel, roofline.qkv_inputs)
        self.tables = tables
        self._roofline = roofline

    @property
    def knee(self) -> int:
        return KNEE

    def explain(self) -> list[tuple[str, float | str, str, str]]:
        rows: list[tuple[str, float | str, str, str]] = [("kernels of the target", "measured", "", self.tables.source)]
        return rows + [
            (f"kernel {name}", known, "", self.tables.source) for name, known in self.tables.provenance.items()
        ]

    def layers_ns(self, tokens: int, routing: Routing | None = None) -> float:
        """See `ForwardCost.layers_ns`. The tables have independent tokens; what fewer experts save is the roofline's share."""
        key = tokens if routing is None or not self.shape.moe_layers else (tokens, routing)
        if key not in self._layers_cache:
            total = _at(self.tables.layers, TOKENS, tokens)
            if self.qkv_inputs > 1:  # the database has no such layers
                plain = ForwardCost(self.shape, self.gpu, self.efficiency, self.parallel)
                for mixer, count in self.shape.mixers:
                    total += count * (self._mixer_ns(tokens, mixer) - plain._mixer_ns(tokens, mixer))
            if key != tokens:
                total *= self._roofline.layers_ns(tokens, routing) / self._roofline.layers_ns(tokens)
            self._layers_cache[key] = total
        return self._layers_cache[key]

    def lm_head_ns(self, rows: int, vocab: int | None = None) -> float:
        return _at(self.tables.lm_head, TOKENS, rows)

    def comm_ns(self, tokens: int) -> float:
        return _at(self.tables.comm, TOKENS, tokens)

    def decode_attention(self, rows: int, queries_per_row: int, own_tokens: int, reads: int = 1) -> Line:
        """See `ForwardCost.decode_attention`; two segments per number of rows, which meet at KNEE tokens of context per row."""
        over_rows = (
            self.tables.decode if queries_per_row == 1 else _between(self.tables.verify, 1, QUERIES, queries_per_row)
        )
        times = _between(over_rows, 0, ROWS, rows)
        contexts = np.array(CONTEXTS, dtype=float)
        near, far = contexts <= KNEE, contexts >= KNEE
        at_knee = float(times[near][-1])
        # Least squares through the knee: the two segments meet there.
        slopes = []
        for part in (near, far):
            offset, rise = contexts[part] - KNEE, times[part] - at_knee
            slopes.append(max(0.0, float(offset @ rise / (offset @ offset))))
        base = max(0.0, at_knee - slopes[0] * KNEE)
        return Line(base, slopes[1] / rows, (slopes[0] - slopes[1]) / rows)

    def prefill_attention_ns(self, chunks: Sequence[tuple[int, int]]) -> float:
        total = 0.0
        for new, past in chunks:
            over_chunks = _between(self.tables.prefill, 1, PASTS, past)
            total += _at(over_chunks, CHUNKS, new)
        return total


def _at(table: np.ndarray, grid: tuple[int, ...], value: float) -> float:
    return float(_between(table, 0, grid, value))


def _between(table: np.ndarray, axis: int, grid: tuple[int, ...], value: float) -> np.ndarray:
    """Return the table at `value` along `axis`, linear between the grid's points; the last segment goes on, the first value stays."""
    j = min(max(int(np.searchsorted(grid, value)), 1), len(grid) - 1)
    low, high = grid[j - 1], grid[j]
    weight = max(0.0, (value - low) / (high - low))
    return (1 - weight) * np.take(table, j - 1, axis) + weight * np.take(table, j, axis)


# -- the database ---------------------------------------------------------------------------------------------------------


def _package_version() -> str:
    from importlib import metadata

    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        message = "measured kernels need the package aiconfigurator-core: pip install 'foretoken[measured]'"
        raise NotMeasured(message) from None


def _config(shape: ModelShape) -> dict[str, Any]:
    """Return the shape as a `config.json` of a family that the database composes."""
    attention, mlp, experts = shape.mixers[0][0], shape.mlps[0][0], shape.experts
    if not isinstance(attention, Attention):
        raise NotMeasured(f"{shape.name}: no measured kernels of such attention")
    config = {
        "architectures": ["Qwen3MoeForCausalLM" if shape.experts else "LlamaForCausalLM"],
        "model_type": "qwen3_moe" if shape.experts else "llama",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "intermediate_size": experts.width if experts else mlp.width,
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


def _formats(shape: ModelShape, server: str) -> dict[str, str]:
    """Return the database's names of the formats of weights and KV; nothing for 16 bits.

    SGLang scales activations as they come. vLLM and TensorRT-LLM scale them by constants of the checkpoint, inside the kernels before.
    """
    gemm = "fp8" if server == "sglang" else "fp8_static"
    weights = {"bf16": {}, "fp16": {}, "fp8": {"gemm_quant_mode": gemm, "moe_quant_mode": "fp8"}}
    kv = {"bf16": {}, "fp16": {}, "fp8": {"kvcache_quant_mode": "fp8"}}
    if shape.weight_dtype not in weights or shape.kv_dtype not in kv:
        raise NotMeasured(f"{shape.name}: no measured kernels of {shape.weight_dtype} weights with {shape.kv_dtype} KV")
    return weights[shape.weight_dtype] | kv[shape.kv_dtype]


def _query(handle: Any, source: str) -> KernelTables:
    """Ask the database for every point of the grids."""
    engine = handle._engine
    provenance: dict[str, str] = {}

    def grouped(operations: Iterable[tuple[str, float, float, str]]) -> dict[str, float]:
        """Sum the times of operations by group, in ns."""
        sums = dict.fromkeys(("layers", "comm", "lm_head", "attention"), 0.0)
        for name, milliseconds, _, known in operations:
            short = name.removeprefix("generation_").removeprefix("context_")
            group = next((group for mark, group in _GROUPS.items() if mark in short), "layers")
            sums[group] += milliseconds * 1e6
            provenance[short] = known if provenance.get(short, known) == known else "mixed"
        return sums

    def prefill(rows: int, new: int, past: int) -> dict[str, float]:
        return grouped(engine.run_static_per_op(rows, 1, new + past, 1, past, 1.0, 1.0, "static_ctx", 32)[0])

    few = [grouped(handle.decode_step_per_op(tokens, 1024, 2)) for tokens in TOKENS if tokens <= ROWS[-1]]
    many = [prefill(1, tokens, 0) for tokens in TOKENS if tokens > ROWS[-1]]
    # A prompt needs the logits of its last token alone; those of many rows are in proportion to the largest decode batch.
    lm_head = [sums["lm_head"] for sums in few]
    lm_head += [lm_head[-1] * tokens / ROWS[-1] for tokens in TOKENS if tokens > ROWS[-1]]
    by_tokens = few + many
    decode = [[grouped(handle.decode_step_per_op(rows, c, 2))["attention"] for c in CONTEXTS] for rows in ROWS]
    verify = [[[prefill(rows, q, c)["attention"] for c in CONTEXTS] for q in QUERIES] for rows in ROWS]
    # A verify pass reads at least what a decode pass reads: the database extrapolates it for few queries.
    verify = np.maximum(np.array(verify), np.array(decode)[:, None, :])
    return KernelTables(
        source=source,
        layers=np.array([sums["layers"] for sums in by_tokens]),
        comm=np.array([sums["comm"] for sums in by_tokens]),
        lm_head=np.array(lm_head),
        decode=np.array(decode),
        verify=verify,
        prefill=np.array([[prefill(1, new, past)["attention"] for past in PASTS] for new in CHUNKS]),
        provenance=provenance,
    )


def _compile(name: str, config: dict[str, Any], system: str, server: str, tp: int, formats: dict[str, str]) -> Any:
    """Return the database's handle of a model, which it wants as a folder with a `config.json`."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # the package logs while it is imported and used
    try:
        from aiconfigurator_core.sdk.engine import EngineHandle

        options: dict[str, Any] = {"tp_size": tp, **formats}
        if "num_experts" in config:
            options["moe_tp_size"] = tp
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
            return EngineHandle.compile(folder, system, server, **options)
    except Exception as error:  # any error of the package means that it cannot price this
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        message = f"{name} on {system} under {server}, tensor parallel {tp}: no measured kernels ({first[:200]})"
        raise NotMeasured(message) from error
    finally:
        logging.disable(before)


# -- the cache ------------------------------------------------------------------------------------------------------------


def _cache_folder() -> Path:
    base = os.environ.get("FORETOKEN_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "foretoken"
    )
    return Path(base) / "kernels"


def _load(path: Path, identity: str) -> KernelTables | None:
    """Return the tables of a cache file; None if there is none, or it is damaged or of another identity."""
    try:
        with np.load(path, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            if about["identity"] != identity:
                return None
            return KernelTables(
                source=about["source"], provenance=about["provenance"], **{name: file[name] for name in _ARRAYS}
            )
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None


def _store(path: Path, identity: str, tables: KernelTables) -> None:
    """Write a cache file as a whole; a folder that cannot be written costs two seconds the next time, and no more."""
    about = json.dumps({"identity": identity, "source": tables.source, "provenance": tables.provenance})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.stem}.{os.getpid()}.npz")
        np.savez(partial, about=np.array(about), **{name: getattr(tables, name) for name in _ARRAYS})
        partial.replace(path)
    except OSError:
        return
