"""The use of a device's memory, and the number of KV slots that are left.

    total = reserved + context + weights (target, draft) + activations + captured graphs + recurrent states + KV pool

All terms are bytes on one device of the tensor-parallel group. Each slot of the pool holds one token's KV of the target
and of the draft. The draft's is one layer for an EAGLE head, all layers for a STANDALONE model, nothing for look-up.

Layers with a window keep only the last tokens of a request, and recurrent layers a state. `StateLayout` says where a
server places them. What a request takes of the pool for them, it takes while it runs (`BesideSlots` in
`core/kv/beside.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ...core.errors import ForedraftError
from ...core.kv.request_table import recurrent_state_slots
from ...core.model_shape import ModelShape
from ...core.scheduler.config import EngineConfig
from .draft import DraftShape
from .hardware import GPU, MIB, Parallelism

GRAPH_BYTES = 25 * MIB
STATE_RATIO = 0.9
"""Memory of states for each byte of KV (SGLang 0.5.23, --mamba-full-memory-ratio)."""
WINDOW_RATIO = 0.8
"""Tokens of the pool of layers with a window for each token of the other pool (SGLang 0.5.23,
--swa-full-tokens-ratio)."""
RESERVED = 0.10
"""The share of a device's memory that servers leave alone by default, those with a static share apart."""
STATES_SHARE = 0.5
"""The share of what weights leave that states may have at most where a default limit would set aside more (assumption:
the servers that set states aside for all requests then do not start)."""
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
    "recurrent_states": "computed: states that the server sets aside, by its rule (docs/servers.md)",
    "kv_pool": "the rest, in whole pages",
}


class InsufficientMemory(ForedraftError):
    """The model, its draft and its buffers leave no room for a KV pool; the message says how much each part needs."""


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """How much of a device's memory the KV pool gets; None: not given.

    `reserved`: the share of the memory that is left alone; 0.10 is an engine's "memory utilisation 0.9". `static`:
    instead of it, the share of the memory beside the driver's context that weights and pool may have. `free`: instead
    of both, the share of what all but the pool leave that the pool may have. `kv_bytes`: instead of the first two, the
    memory of the pool; beside the third the most that it may have.
    """

    reserved: float | None = None  # None: RESERVED
    static: float | None = None
    free: float | None = None
    kv_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.reserved is not None and not 0.0 <= self.reserved < 1.0:
            raise InsufficientMemory(f"the reserved share must be in [0, 1), not {self.reserved}")

    @property
    def are_given(self) -> bool:
        return any(each is not None for each in (self.reserved, self.static, self.free, self.kv_bytes))

    def unused(self, gpu: GPU, fixed: Mapping[str, int]) -> int:
        """Return the bytes that stay free beside the pool and `fixed`."""
        if self.free is not None or self.kv_bytes is not None:
            left = gpu.memory_bytes - sum(fixed.values())
            by_share = 0 if self.free is None else max(0, int((1 - self.free) * left))
            return by_share if self.kv_bytes is None else max(by_share, left - self.kv_bytes)
        if self.static is not None:
            rest = (1 - self.static) * (gpu.memory_bytes - fixed["context_bytes"])
            beside = sum(fixed[name] for name in ("activations_bytes", "hidden_states_bytes", "graphs_bytes"))
            return max(0, int(rest) - beside)
        return int(gpu.memory_bytes * (RESERVED if self.reserved is None else self.reserved))


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The place of what layers with a window and recurrent layers keep of a request.

    "pool": windows and states come from the KV pool when the request runs (vLLM: all groups of layers share one pool of
    blocks). "shares": two pools beside the KV pool, in fixed proportions; that of the states limits how many requests
    run (SGLang). "reserved": windows come from the pool, states are set aside for all requests that may run.
    """

    rule: Literal["pool", "shares", "reserved"] = "reserved"
    prefix_cache: bool = True
    overlap: bool = True
    is_default_limit: bool = False  # max_running is the server's default, so "reserved" lowers it where memory is short

    @property
    def states_per_request(self) -> int:
        """The states of a request, without those for drafts.

        vLLM 0.33 keeps two where it caches prefixes (mamba_cache_mode align), SGLang 0.5.23 five (extra_buffer), or
        three without overlap (no_buffer).
        """
        if not self.prefix_cache or self.rule == "reserved":
            return 1
        return 2 if self.rule == "pool" else 5 if self.overlap else 3


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A device's memory budget in bytes per device, and the number of KV slots (tokens) that it leaves.

    `slots` is a multiple of the page size and excludes the padding page. A running request takes further slots:
    `request_slots`, and `window_slots` for each of its last `window` tokens. `most_running`: the requests for which
    there are states; None: no limit.
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
    kv_pool_bytes: int
    target_slot_bytes: int
    draft_slot_bytes: int
    window_slot_bytes: int  # in the pool of layers with a window, where they have one of their own
    slots: int
    request_slots: int = 0
    window: int = 0
    window_slots: float = 0.0
    most_running: int | None = None

    @property
    def slot_bytes(self) -> int:
        return self.target_slot_bytes + self.draft_slot_bytes + self.window_slot_bytes

    @property
    def of_requests(self) -> dict[str, float]:
        """The settings of an engine that say what a running request takes beside the slots of its tokens."""
        return {"request_slots": self.request_slots, "window": self.window, "window_slots": self.window_slots}

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
            "kv_pool": self.kv_pool_bytes,
        }

    def explain(self, config: EngineConfig) -> list[tuple[str, float, str, str]]:
        """Return rows (name, value, unit, source) for `--explain`. `config`: of the engine that has this pool."""
        rows: list[tuple[str, float, str, str]] = [
            (f"memory: {name}", value / MIB, "MiB", _SOURCES[name])
            for name, value in self.terms().items()
            if value or name != "recurrent_states"
        ]
        rows += [
            ("KV per slot, target", self.target_slot_bytes, "B", "computed from the shape"),
            ("KV per slot, draft", self.draft_slot_bytes, "B", "computed from the shape"),
        ]
        if self.window_slot_bytes:
            source = f"the server's rule: {WINDOW_RATIO:g} tokens in layers with a window for each slot"
            rows.append(("KV per slot, windows", self.window_slot_bytes, "B", source))
        if self.request_slots:
            rows.append(("slots of a running request for its states", self.request_slots, "", "states / KV per slot"))
        if self.window_slots:
            source = f"of each of its last {self.window:,} tokens, for layers with a window"
            rows.append(("slots of a running request beside its own", self.window_slots, "", source))
        if self.most_running is not None:
            rows.append(("requests for which there are states", self.most_running, "", _SOURCES["recurrent_states"]))
        return rows + self._explain_capacity(config)

    def _explain_capacity(self, config: EngineConfig) -> list[tuple[str, float, str, str]]:
        """Return the size of the KV pool in tokens, as servers print it when they start."""
        context, pool = config.context_len, config.num_pages * config.page_size
        most = pool / (context + config.beside.of(context, config.chunk_size))
        rows: list[tuple[str, float, str, str]] = [("KV slots", pool, "tokens", "KV pool / KV per slot")]
        if config.beside and not self.window_slot_bytes:
            source = "KV pool / what a request of the whole context takes"
            rows = [("KV slots without windows and states", *rows[0][1:])]
            rows.append(("KV slots", int(most * context), "tokens", source))
        return [*rows, (f"requests of {context:,} tokens that the KV pool holds", most, "", "as above")]


class Slot(NamedTuple):
    """The bytes of a slot of the pool on one device. `beside`: the slots that a token takes more while it is in a
    window."""

    target: int
    draft: int
    window: int
    beside: float

    @property
    def of_full_layers(self) -> int:
        return self.target + self.draft

    @property
    def num_bytes(self) -> int:
        return self.target + self.draft + self.window

    @classmethod
    def of(cls, target: ModelShape, tp: int, draft: int, layout: StateLayout) -> Slot:
        """Return the slot of a target with a draft of so many bytes. Raises `InsufficientMemory` if nothing is cached.

        If every layer has a window, a slot counts them all. With "shares" a request that is longer than its window
        counts a little more than its pool needs.
        """
        full, windows = target.token_bytes(tp, windowed=False), target.token_bytes(tp, windowed=True)
        if not full + draft:
            full, windows = windows, 0
        if not full + draft:
            message = f"{target.name} caches nothing of its tokens; engine.kv_slots gives the size of the pool"
            raise InsufficientMemory(message)
        if layout.rule == "shares" and windows:
            return cls(full, draft, math.ceil(WINDOW_RATIO * windows), 1 / WINDOW_RATIO - 1)
        return cls(full, draft, 0, windows / (full + draft))


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
    shares: MemoryShares = MemoryShares(),
    page_size: int = 1,
    layout: StateLayout = StateLayout(),
) -> MemoryPlan:
    """Plan the memory of one device. Raises `InsufficientMemory` when not one page fits.

    Args:
        graph_count: Captured (steps, size) pairs after pruning.
        max_prefill_tokens: The largest chunk.
        max_num_draft_tokens: The most nodes per row that a verify may have.
        shares: How much of the memory the pool gets.
        layout: The place of windows and recurrent states.
    """
    parallel = Parallelism.of(parallel)
    tp = parallel.tensor
    # Each attention-data parallel group has its share of the requests.
    max_batch_size, max_prefill_tokens = -(-max_batch_size // parallel.data), -(-max_prefill_tokens // parallel.data)
    _refuse_sizes(
        page_size=page_size,
        max_prefill_tokens=max_prefill_tokens,
        max_batch_size=max_batch_size,
        max_num_draft_tokens=max_num_draft_tokens,
    )
    fixed = _fixed_bytes(target, draft, parallel, max_prefill_tokens, max_batch_size, max_num_draft_tokens)
    fixed["graphs_bytes"] = graph_count * graph_bytes
    if shares.free is None and (shares.kv_bytes or 0) > gpu.memory_bytes - sum(fixed.values()):
        raise InsufficientMemory(
            _refusal(target, gpu, parallel.devices, fixed, {"KV pool as given": shares.kv_bytes or 0})
        )
    state = math.ceil(target.recurrent_state_bytes / tp)
    free = gpu.memory_bytes - sum(fixed.values()) - shares.unused(gpu, fixed)
    fixed["recurrent_states_bytes"], most = _states(layout, state, free, max_batch_size, max_num_draft_tokens)
    fixed["reserved_bytes"] = shares.unused(gpu, fixed)
    free = gpu.memory_bytes - sum(fixed.values())
    slot = Slot.of(target, tp, 0 if draft is None else draft.token_bytes(tp), layout)
    page_bytes = page_size * slot.num_bytes
    # One page is the padding sink, which takes memory and holds no request.
    pages = free // page_bytes
    states = state * (layout.states_per_request + max_num_draft_tokens - 1) if layout.rule == "pool" else 0
    request_slots = -(-states // slot.of_full_layers)
    if most == 0 or pages * page_size < 2 * page_size + request_slots:
        needed = 2 * page_bytes + states + (0 if most else state)
        raise InsufficientMemory(_refusal(target, gpu, parallel.devices, fixed, {"two KV pages": needed}))
    return MemoryPlan(
        total_bytes=gpu.memory_bytes,
        kv_pool_bytes=pages * page_bytes,
        target_slot_bytes=slot.target,
        draft_slot_bytes=slot.draft,
        window_slot_bytes=slot.window,
        slots=(pages - 1) * page_size * parallel.data,
        request_slots=request_slots,
        window=(target.attention_window or 0) + max_num_draft_tokens - 1 if slot.beside else 0,
        window_slots=slot.beside,
        most_running=None if most is None else most * parallel.data,
        **fixed,
    )


def _refuse_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise InsufficientMemory(f"{name} must be at least 1, not {value}")


def _fixed_bytes(
    target: ModelShape, draft: DraftShape | None, parallel: Parallelism, prefill_tokens: int, rows: int, nodes: int
) -> dict[str, int]:
    """Return what neither the pool nor the states take of a device, without graphs and what is reserved."""
    tp, max_tokens = parallel.tensor, max(prefill_tokens, rows * nodes)
    fusion_inputs = draft.fusion_inputs if draft is not None else 0
    return {
        "context_bytes": CONTEXT_BYTES + (GROUP_BYTES if parallel.devices > 1 else 0),
        "target_weights_bytes": target.weight_bytes_per_device(tp, parallel.devices, parallel.expert),
        "draft_weights_bytes": math.ceil(draft.weight_bytes / tp) if draft is not None else 0,
        "activations_bytes": _activation_bytes(target, tp, max_tokens, rows * nodes),
        # A STANDALONE draft has no fusion layer and takes no hidden states.
        "hidden_states_bytes": max_tokens * fusion_inputs * target.hidden * 2,
    }


def _states(layout: StateLayout, state: int, free: int, rows: int, nodes: int) -> tuple[int, int | None]:
    """Return the bytes of states that are set aside of `free` bytes, and for how many requests; None: no limit.

    `state`: bytes of one. A round of one node goes on in the committed state. A tree keeps a state per node until it is
    known which one is accepted.
    """
    drafted = nodes if nodes > 1 else 0
    if not state or layout.rule == "pool":
        return 0, None
    if layout.rule == "reserved":
        each = state * recurrent_state_slots(1, drafted)
        most = max(1, min(rows, int(STATES_SHARE * free) // each)) if layout.is_default_limit else rows
        return most * each, most
    # One slot more of each kind is for padding.
    per_request, budget = layout.states_per_request, int(free * STATE_RATIO / (1 + STATE_RATIO))
    count = int((budget - state * (1 + drafted)) // (state * (1 + drafted / per_request)))
    if not layout.prefix_cache and not layout.is_default_limit:
        count = min(count, rows)
    most = max(0, min(rows, count // per_request))
    held = count + 1 + (most + 1) * drafted
    return state * max(held, 0), most


def _refusal(target: ModelShape, gpu: GPU, devices: int, fixed: dict[str, int], pool: dict[str, int]) -> str:
    terms = {name.removesuffix("_bytes"): value for name, value in fixed.items() if value}
    needed = ", ".join(f"{name} {value / 1e9:.2f} GB" for name, value in terms.items())
    ((what, pool_bytes),) = pool.items()
    total = (sum(fixed.values()) + pool_bytes) / 1e9
    return (
        f"{target.name} does not fit on {devices} × {gpu.name} ({gpu.memory_bytes / 1e9:.2f} GB each): "
        f"needed per device are at least {total:.2f} GB ({needed}, {what} {pool_bytes / 1e9:.3f} GB); "
        "use more devices, a larger one, 8-bit weights, or smaller limits"
    )
