"""The use of a device's memory, and the number of KV slots that are left.

    total = reserved + context + weights (target, draft) + activations + captured graphs + recurrent states + windows +
    KV pool

All terms are bytes on one device of the tensor-parallel group. Each slot of the pool holds one token's KV of the target
and of the draft. The draft's is one layer for an EAGLE head, all layers for a STANDALONE model, nothing for look-up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ...core.errors import ForedraftError
from ...core.kv.request_table import recurrent_state_slots
from ...core.model_shape import ModelShape
from .draft import DraftShape
from .hardware import GPU, MIB, Parallelism

GRAPH_BYTES = 25 * MIB
CONTEXT_BYTES, GROUP_BYTES = 1150 * MIB, 1024 * MIB

_SOURCES = {
    "reserved": "memory that the engine is told to leave alone",
    "context": "what driver, libraries and communicators take before weights are loaded: SGLang logs 78.3 … 78.8 GiB left of 79.65 on one "
    "H100, 77.2 … 78.8 on each of several, 137.3 of 140.4 on each of eight H200 (sgl-project/sglang pull 11716)",
    "target_weights": "computed from the shape",
    "draft_weights": "computed from the shape",
    "activations": "computed: widest layer and logits of the largest batch of tokens",
    "hidden_states": "computed: what the target hands to the draft, for the largest batch of tokens",
    "graphs": "assumption: 25 MiB per captured (steps, batch size) pair, the middle of 24-26 MiB seen on 8B models",
    "recurrent_states": "computed: a state for each running request, and one for each node that a round may verify",
    "windows": "computed: what layers with a window keep of all running requests; the other layers make up the slots",
    "kv_pool": "the rest, in whole pages",
}


class InsufficientMemory(ForedraftError):
    """The model, its draft and its buffers leave no room for a KV pool; the message says how much each part needs."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A device's memory budget in bytes per device, and the number of KV slots (tokens) that it leaves.

    `slots` is a multiple of the page size and excludes the padding page.
    """

    total_bytes: int
    reserved_bytes: int
    context_bytes: int
    target_weights_bytes: int
    draft_weights_bytes: int
    activations_bytes: int
    hidden_states_bytes: int
    graphs_bytes: int
    recurrent_states_bytes: int
    windows_bytes: int
    kv_pool_bytes: int
    target_slot_bytes: int
    draft_slot_bytes: int
    slots: int

    @property
    def slot_bytes(self) -> int:
        return self.target_slot_bytes + self.draft_slot_bytes

    def terms(self) -> dict[str, int]:
        """Return the terms in bytes; they sum to at most `total_bytes`, short of it by less than a page of the pool."""
        return {
            "reserved": self.reserved_bytes,
            "context": self.context_bytes,
            "target_weights": self.target_weights_bytes,
            "draft_weights": self.draft_weights_bytes,
            "activations": self.activations_bytes,
            "hidden_states": self.hidden_states_bytes,
            "graphs": self.graphs_bytes,
            "recurrent_states": self.recurrent_states_bytes,
            "windows": self.windows_bytes,
            "kv_pool": self.kv_pool_bytes,
        }

    def explain(self) -> list[tuple[str, float, str, str]]:
        """Return rows (name, value, unit, source) for `--explain`."""
        rows: list[tuple[str, float, str, str]] = [
            (f"memory: {name}", value / MIB, "MiB", _SOURCES[name])
            for name, value in self.terms().items()
            if value or name not in ("recurrent_states", "windows")
        ]
        return [
            *rows,
            ("KV per slot, target", self.target_slot_bytes, "B", "computed from the shape"),
            ("KV per slot, draft", self.draft_slot_bytes, "B", "computed from the shape"),
            ("KV slots", self.slots, "tokens", "KV pool / KV per slot"),
        ]


def _activation_bytes(target: ModelShape, tp: int, max_tokens: int, logit_rows: int) -> int:
    """Return the largest need: residual, input and the two halves of the MLP in 16 bits, or the logits
    in 16 and 32 bits."""
    wide = max((part.activated for part, _ in target.mlps), default=target.hidden)
    layer = max_tokens * (4 * target.hidden + 3 * math.ceil(wide / tp)) * 2
    logits = logit_rows * target.vocab * (2 + 4)
    return layer + logits


def kv_pool_slots(
    target: ModelShape,
    gpu: GPU,
    parallel: int | Parallelism = 1,
    draft: DraftShape | None = None,
    *,
    graph_count: int = 0,
    graph_bytes: int = GRAPH_BYTES,
    max_prefill_tokens: int = 8192,
    max_batch_size: int = 256,
    max_num_draft_tokens: int = 1,
    reserved_fraction: float = 0.10,
    static_fraction: float | None = None,
    free_fraction: float | None = None,
    page_size: int = 1,
) -> MemoryPlan:
    """Plan the memory of one device. Raises `InsufficientMemory` when not one page fits.

    Args:
        graph_count: Captured (steps, size) pairs after pruning.
        max_prefill_tokens: The largest chunk.
        max_num_draft_tokens: The most nodes per row that a verify may have.
        reserved_fraction: The share of memory left alone; 0.10 is an engine's "memory utilisation 0.9".
        static_fraction: Instead of it, the share of the memory beside the driver's context that weights and pool may
            have.
        free_fraction: Instead of both, the share of what all but the pool leave that the pool may have.
    """
    parallel = Parallelism.of(parallel)
    tp = parallel.tensor
    # Each attention-data parallel group has its share of the requests.
    max_batch_size, max_prefill_tokens = -(-max_batch_size // parallel.data), -(-max_prefill_tokens // parallel.data)
    sizes = {
        "page_size": page_size,
        "max_prefill_tokens": max_prefill_tokens,
        "max_batch_size": max_batch_size,
        "max_num_draft_tokens": max_num_draft_tokens,
    }
    for name, value in sizes.items():
        if value < 1:
            raise InsufficientMemory(f"{name} must be at least 1, not {value}")
    if not 0.0 <= reserved_fraction < 1.0:
        raise InsufficientMemory(f"reserved_fraction must be in [0, 1), not {reserved_fraction}")
    verify_tokens = max_batch_size * max_num_draft_tokens
    max_tokens = max(max_prefill_tokens, verify_tokens)
    # A round of one node goes on in the committed state; a tree keeps a state per node until it is known which one is
    # accepted.
    state_slots = recurrent_state_slots(max_batch_size, max_num_draft_tokens if max_num_draft_tokens > 1 else None)
    fusion_inputs = draft.fusion_inputs if draft is not None else 0
    fixed = {
        "context_bytes": CONTEXT_BYTES + (GROUP_BYTES if parallel.devices > 1 else 0),
        "target_weights_bytes": target.weight_bytes_per_device(tp, parallel.devices, parallel.expert),
        "draft_weights_bytes": math.ceil(draft.weight_bytes / tp) if draft is not None else 0,
        "activations_bytes": _activation_bytes(target, tp, max_tokens, max(verify_tokens, max_batch_size)),
        # A STANDALONE draft has no fusion layer and takes no hidden states.
        "hidden_states_bytes": max_tokens * fusion_inputs * target.hidden * 2,
        "graphs_bytes": graph_count * graph_bytes,
        "recurrent_states_bytes": state_slots * math.ceil(target.recurrent_state_bytes / tp),
    }
    fixed["reserved_bytes"] = _unused(gpu, fixed, reserved_fraction, static_fraction, free_fraction)
    draft_slot = draft.token_bytes(tp) if draft is not None else 0
    kept = max_batch_size * ((target.attention_window or 0) + max_num_draft_tokens) + max_prefill_tokens
    free = gpu.memory_bytes - sum(fixed.values())
    target_slot, fixed["windows_bytes"] = _slot_and_windows(target, tp, draft_slot, free, kept)
    free -= fixed["windows_bytes"]
    if not target_slot + draft_slot:
        message = f"{target.name} caches nothing of its tokens; engine.kv_slots gives the size of the pool"
        raise InsufficientMemory(message)
    page_bytes = page_size * (target_slot + draft_slot)
    # One page is the padding sink, which takes memory and holds no request.
    pages = free // page_bytes
    if pages < 2:
        raise InsufficientMemory(_refusal(target, gpu, parallel.devices, fixed, 2 * page_bytes))
    return MemoryPlan(
        total_bytes=gpu.memory_bytes,
        kv_pool_bytes=pages * page_bytes,
        target_slot_bytes=target_slot,
        draft_slot_bytes=draft_slot,
        slots=(pages - 1) * page_size * parallel.data,
        **fixed,
    )


def _unused(gpu: GPU, fixed: Mapping[str, int], reserved: float, static: float | None, free: float | None) -> int:
    """Return the bytes that stay free beside the pool and `fixed`, by the given share."""
    if free is not None:
        return max(0, int((1 - free) * (gpu.memory_bytes - sum(fixed.values()))))
    if static is not None:
        rest = (1 - static) * (gpu.memory_bytes - fixed["context_bytes"])
        return max(
            0, int(rest) - sum(fixed[name] for name in ("activations_bytes", "hidden_states_bytes", "graphs_bytes"))
        )
    return int(gpu.memory_bytes * reserved)


def _slot_and_windows(target: ModelShape, tp: int, draft_slot: int, free: int, kept: int) -> tuple[int, int]:
    """Return the target's bytes of a slot, and those of the layers with a window beside the slots.

    For each request such layers keep `kept` tokens: the window, the tokens that a round writes, and the current prompt
    chunk. If there would be fewer slots than that, every slot has its part of these layers.
    """
    slot, in_windows = target.token_bytes(tp, windowed=False), target.token_bytes(tp, windowed=True)
    if in_windows and (free - kept * in_windows) // (slot + draft_slot or 1) > kept:
        return slot, kept * in_windows
    return slot + in_windows, 0


def _refusal(target: ModelShape, gpu: GPU, devices: int, fixed: dict[str, int], page_bytes: int) -> str:
    terms = {name.removesuffix("_bytes"): value for name, value in fixed.items() if value}
    needed = ", ".join(f"{name} {value / 1e9:.2f} GB" for name, value in terms.items())
    total = (sum(fixed.values()) + page_bytes) / 1e9
    return (
        f"{target.name} does not fit on {devices} × {gpu.name} ({gpu.memory_bytes / 1e9:.2f} GB each): "
        f"needed per device are at least {total:.2f} GB ({needed}, two KV pages {page_bytes / 1e9:.3f} GB); "
        "use more devices, a larger one, 8-bit weights, or smaller limits"
    )
