"""Plans the memory of a session before a weight is read: weights, KV pools, and the temporary memory of passes."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from ...core.adaptive.graphs import PACKED_PER_KEY
from ...core.algorithm.algorithm import Drafter, DraftKV, SpecAlgorithm
from ...core.errors import ForedraftError
from ...core.kv.request_table import ceil_to_page
from ..types.session_options import FP8

if TYPE_CHECKING:
    import torch

    from ...core.scheduler.spec import EngineSpec
    from ..batch.pools import Rings
    from ..models.config import ModelConfig
    from ..models.heads.config import HeadConfig
    from ..types.shards import Shard

DEFAULT_CACHE_SHARE = 0.25  # share of slots beyond what running requests need, for prefixes that return
MIB = 1 << 20
WORKSPACE_BYTES = 32 * MIB  # of cuBLAS on a Hopper, for each stream: torch's documentation of CUBLAS_WORKSPACE_CONFIG
STREAMS = 2  # the one that everything runs on, and the one that graphs are captured on
GRAPH_BYTES = 25 * MIB  # of one captured round of an 8B model, as in sim/cost/memory/rules.py
GRAPH_SHARE = 1 / 16
"""Of a device's memory, which the graphs of rare rounds do not exceed: KV is worth more than the last of them."""
SAMPLING_BYTES = 8  # of a logit in a round: itself in 32 bits, and its probability
FIRST_TOKEN_BYTES = 28
"""Of a logit while `sample_torch` draws first tokens, `SAMPLING_BYTES` among them; a test counts them."""
SHAPING_BYTES = 8
"""Of each token of the vocabulary, for each row: its count and its bias (`gpu.types.ops.LogitTables`)."""


"""How options and scenarios name `E4M3`."""


class NotEnoughMemory(ForedraftError):
    """The device cannot hold the weights and the KV of one request. The message says how much each of them needs."""


def checkpoint_bytes(
    draft_directory: Path | None,
    draft: ModelConfig | HeadConfig | None,
    target: ModelConfig,
    dtype: torch.dtype,
    shard: Shard,
    kept: Path | None = None,
) -> int:
    """Return the bytes of the target's and the draft's weights as one rank loads them: its part of the target, the
    whole draft. `kept`: the directory of a target whose quantized matrices stay as they are stored."""
    from ..models.checkpoint import required_bytes
    from ..models.stored.quantized import bytes_saved
    from ..models.stored.tensor_files import list_tensors

    num_bytes, form = 0, target.family.prediction
    if draft_directory is not None:
        tensors = list_tensors(draft_directory)
        # Of a model that drafts for itself the prediction layer is all that is loaded again.
        if form is not None and getattr(draft, "inside_target", False):
            tensors = {name: t for name, t in tensors.items() if form.name_within(name, target.num_layers) is not None}
        num_bytes = sum(math.prod(tensor.shape) * dtype.itemsize for tensor in tensors.values())
    unpacked = sum(required_bytes(target, dtype, shard).values())
    if kept is not None and target.quantization is not None:
        unpacked -= bytes_saved(list_tensors(kept), target.quantization, dtype)
    return unpacked + num_bytes


def kv_dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the numbers in which a model of `dtype` keeps keys and values; `name`: FP8, or "auto" for its
    own."""
    from ..types.attention import E4M3

    return E4M3 if name == FP8 else dtype


def bytes_per_token(
    target: ModelConfig,
    draft: ModelConfig | HeadConfig | None,
    algorithm: SpecAlgorithm,
    kv_dtype: torch.dtype,
    rings: Rings | None = None,
) -> int:
    """Return the bytes of a token in the page pools of target and draft, whose numbers are of `kv_dtype`; layers in
    `rings` have none there."""
    from ..batch.pools import bytes_per_slot

    ringed = () if rings is None else rings.layers
    total = bytes_per_slot([shape for i, shape in enumerate(target.kv_shapes) if i not in ringed], kv_dtype)
    if algorithm.draft_kv is DraftKV.NONE:
        return total
    shapes = _model_of(draft).kv_shapes
    return total + bytes_per_slot(shapes * (heads_of(draft, algorithm) or 1), kv_dtype)


def kept_bytes(
    target: ModelConfig,
    draft: ModelConfig | HeadConfig | None,
    spec: EngineSpec,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    rings: Rings | None = None,
) -> dict[str, int]:
    """Return the bytes of what running requests keep whatever their length, by its name: states of `dtype`, KV of
    `kv_dtype`."""
    from ..batch.pools import bytes_per_slot

    windows = [] if rings is None else [target.kv_shapes[layer] for layer in rings.layers]
    of_rings = 0 if rings is None else rings.num_slots * bytes_per_slot(windows, kv_dtype)
    return {"recurrent states": state_bytes(target, draft, spec, dtype), "windows": of_rings}


def state_bytes(
    target: ModelConfig, draft: ModelConfig | HeadConfig | None, spec: EngineSpec, dtype: torch.dtype
) -> int:
    """Return the bytes of the recurrent states of a target and of a draft that is a language model: one for each
    running request and one for padding, what a round keeps of each node, and copies of one layer's states."""
    config, shapes = spec.config, list(target.state_shapes)
    shapes += getattr(draft, "state_shapes", ())
    sizes = [shape.num_bytes(dtype) for shape in shapes]
    slots = (sum(sizes) + 3 * max(sizes, default=0)) * (config.max_running + 1)
    nodes = sum(shape.node_bytes(dtype) for shape in shapes) * config.max_running * spec.max_num_draft_tokens
    return slots + nodes


def has_states(*models: ModelConfig | HeadConfig | None) -> bool:
    """Return whether a model has recurrent layers. Then no request takes a prefix from another: the state behind a
    cached prefix is not kept."""
    return any(getattr(model, "state", None) is not None for model in models)


def heads_of(draft: ModelConfig | HeadConfig | None, algorithm: SpecAlgorithm) -> int | None:
    """Return the heads of a draft that has one per step, None for others."""
    from ..models.heads.config import HeadConfig

    return draft.num_heads if algorithm.drafter is Drafter.HEADS and isinstance(draft, HeadConfig) else None


def most_drafts_of(draft: ModelConfig | HeadConfig | None, algorithm: SpecAlgorithm) -> int | None:
    """Return the most tokens that a draft proposes in a round, None where nothing bounds them."""
    block = getattr(draft, "block", None)
    return heads_of(draft, algorithm) if block is None else block.most_drafts


def working_bytes(
    target: ModelConfig, draft: ModelConfig | HeadConfig | None, spec: EngineSpec, dtype: torch.dtype, device: str
) -> int:
    """Return bytes that the largest passes need on a GPU beside weights and KV: activations, logits and their
    distributions, what changes logits, parts of attention, graphs, workspaces.

    Prompts and captured rounds do not share their memory; captured rounds share theirs with each other.
    """
    from ..kernels.layers.flash import PARTS_BYTES

    config = spec.config
    prompt = config.chunk_size * _per_token(target, draft) * dtype.itemsize
    prompt += config.max_running * target.vocab_size * FIRST_TOKEN_BYTES
    tables = (config.max_running + 1) * target.vocab_size * SHAPING_BYTES
    return (
        prompt + captured_bytes(target, draft, spec, dtype, device) + tables + PARTS_BYTES + STREAMS * WORKSPACE_BYTES
    )


def captured_bytes(
    target: ModelConfig, draft: ModelConfig | HeadConfig | None, spec: EngineSpec, dtype: torch.dtype, device: str
) -> int:
    """Return the bytes that captured rounds may take: activations, logits and masks of the largest one, and graphs."""
    nodes = spec.config.max_running * spec.max_num_draft_tokens
    per_token = _per_token(target, draft) * dtype.itemsize
    rounds = nodes * (per_token + target.vocab_size * (SAMPLING_BYTES + dtype.itemsize))
    return rounds + nodes * target.vocab_size // 8 + graph_bytes(spec, device)


def graph_bytes(spec: EngineSpec, device: str) -> int:
    """Return the bytes that graphs may take: those of all variants of a round, or those of plain requests and as many
    of the rarer ones as fit into a share of the device's memory."""
    from ..executor.graphs import variants_of
    from .round_cost import may_park

    if not spec.graph_sizes:
        return 0
    parked = len(spec.graph_sizes) if spec.policy == "goodput" and may_park(spec) else 0
    per_key = 1 + PACKED_PER_KEY if spec.policy == "confidence" else 1
    plain = (len(spec.draft_shape.graph_keys()) * per_key + parked) * GRAPH_BYTES
    return max(plain, min(plain * len(variants_of()), int(GRAPH_SHARE * total_bytes(device))))


def _model_of(draft: ModelConfig | HeadConfig | None) -> ModelConfig:
    """Return the shape of a draft's layers."""
    from ..models.heads.config import HeadConfig

    assert draft is not None, "a draft with a network is given"
    return draft.model if isinstance(draft, HeadConfig) else draft


def _per_token(target: ModelConfig, draft: ModelConfig | HeadConfig | None) -> int:
    """Return the values that a pass holds for each token."""
    models = [target] if draft is None else [target, _model_of(draft)]
    # the last term: hidden states that a head is given
    return max(_activations(model) for model in models) + 3 * target.hidden_size


def _activations(model: ModelConfig) -> int:
    """Return the values per token that a layer makes: residual and norms, projections, rotated heads, the MLP's two
    halves and their product."""
    kinds = {model.heads_of(layer) for layer in range(model.num_layers)}
    heads = max((2 * kind.query + 3 * kind.kv) * kind.dim for kind in kinds)
    if (state := model.state) is not None:
        heads = max(heads, 3 * state.channels + 4 * state.heads * (state.key_dim + state.value_dim))
    mlp = 3 * model.intermediate_size
    if model.moe is not None:
        mlp = max(mlp, 3 * model.moe.intermediate_size * model.moe.top_k)
    return 4 * model.hidden_size + heads + mlp


def size_pool(
    kv_tokens: int | None,
    memory_fraction: float,
    slot_bytes: int,
    device: str,
    spec: EngineSpec,
    weight_bytes: int,
    working: int,
    of_requests: Mapping[str, int] = MappingProxyType({}),
) -> tuple[int, int]:
    """Return the pages of the KV pool, and their bytes in all pools, beside weights, `working` bytes of what passes
    need, and what running requests keep whatever their length: bytes by its name, `of_requests`.

    `kv_tokens` None: what running requests need, if `memory_fraction` of the free memory suffices. Raises
    NotEnoughMemory if the device cannot hold one request.
    """
    config, sizes = spec.config, spec.resolve_sizes()
    page_size = config.page_size
    one_request = ceil_to_page(sizes.row_width, page_size) + page_size
    if kv_tokens is not None:
        wanted = least = kv_tokens
    else:
        cache = DEFAULT_CACHE_SHARE if config.prefix_cache else 0.01
        wanted = int(config.max_running * one_request * (1 + cache))
        least = one_request
    free = free_bytes(device)
    budget = int(free * memory_fraction) - weight_bytes - working - sum(of_requests.values())
    if budget < (least + page_size) * slot_bytes:
        gib = 1 << 30
        passes = f"activations, logits and graphs {working / gib:.2f} GiB, " if working else ""
        passes += "".join(f"{name} {size / gib:.2f} GiB, " for name, size in of_requests.items() if size)
        raise NotEnoughMemory(
            f"not enough memory on {device}: the weights need {weight_bytes / gib:.2f} GiB, {passes}KV of {least} tokens "
            f"{least * slot_bytes / gib:.2f} GiB ({slot_bytes} bytes each); {memory_fraction:.0%} of the free "
            f"{free / gib:.2f} GiB are {free * memory_fraction / gib:.2f} GiB. A smaller context_len, kv_tokens or dtype helps"
            + (", or fewer requests at once (max_running)" if any(of_requests.values()) else "")
        )
    pages = min(wanted, budget // slot_bytes - page_size) // page_size
    return pages, (pages + 1) * page_size * slot_bytes


def total_bytes(device: str) -> int:
    """Return the memory of `device`."""
    import torch

    if device != "cpu":
        return torch.cuda.mem_get_info(torch.device(device))[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_bytes(device: str) -> int:
    """Return the memory that is free on `device` now."""
    import torch

    if device != "cpu":
        # What a closed session had is not free before its last cycles are collected and torch has given it back.
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(torch.device(device))[0]
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # another system than Linux
    return total_bytes(device) // 2
