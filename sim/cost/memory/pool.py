"""The budget of a device's memory: what all but the KV pool take, and the pool."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ....core.kv.groups import KVGroup
from ....core.kv.request_table import recurrent_state_slots
from ....core.model_shape import ModelShape
from ....core.model_shape.layers import Experts
from ..draft import DraftShape
from ..hardware import GPU, Parallelism
from .plan import NO_BLOCKS, InsufficientMemory, MemoryPlan, MemoryShares, PoolBlocks, Slot
from .rules import MemoryRules, StateLayout

USUAL_SHARES, USUAL_LAYOUT, USUAL_RULES = MemoryShares(), StateLayout(), MemoryRules()
_BLOCK = 16
STATES_SHARE = 0.5
"""The share of what weights leave that states may have at most where a default limit would set aside more (assumption:
the servers that set states aside for all requests then do not start)."""


def kv_pool_slots(
    target: ModelShape,
    gpu: GPU,
    parallel: int | Parallelism = 1,
    draft: DraftShape | None = None,
    *,
    graph_count: int = 0,
    max_prefill_tokens: int = 8192,
    max_batch_size: int = 256,
    max_num_draft_tokens: int = 1,
    shares: MemoryShares = USUAL_SHARES,
    page_size: int = 1,
    layout: StateLayout = USUAL_LAYOUT,
    rules: MemoryRules = USUAL_RULES,
) -> MemoryPlan:
    """Plan the memory of one device. Raises `InsufficientMemory` when not one page fits.

    Args:
        graph_count: Captured (steps, size) pairs after pruning.
        max_prefill_tokens: The largest chunk.
        max_num_draft_tokens: The most nodes per row that a verify may have.
        shares: How much of the memory the pool gets.
        layout: The place of windows and recurrent states.
        rules: What the server takes beside weights and KV.
    """
    parallel = Parallelism.of(parallel)
    tp = parallel.tensor
    # Each attention-data parallel group has its share of the requests.
    max_batch_size, max_prefill_tokens = -(-max_batch_size // parallel.data), -(-max_prefill_tokens // parallel.data)
    _check_sizes(
        page_size=page_size,
        max_prefill_tokens=max_prefill_tokens,
        max_batch_size=max_batch_size,
        max_num_draft_tokens=max_num_draft_tokens,
    )
    fixed = _fixed_bytes(target, draft, parallel, max_prefill_tokens, max_batch_size, max_num_draft_tokens, rules)
    graphs = graph_count if rules.counts_graphs else 0
    fixed["graphs_bytes"] = graphs * rules.graph_bytes + (rules.graphs_base if graphs else 0)
    seen_bytes = gpu.memory_bytes - rules.unseen(gpu.memory_bytes)
    given = shares.kv_bytes or 0
    if shares.free is None and given > seen_bytes - sum(fixed.values()):
        raise InsufficientMemory(_refusal(target, gpu, parallel.devices, fixed, {"KV pool as given": given}))
    state = math.ceil(target.recurrent_state_bytes / tp)
    free = seen_bytes - sum(fixed.values()) - shares.unused(seen_bytes, fixed)
    nodes = max_num_draft_tokens
    fixed["recurrent_states_bytes"], most, num_states = _states(layout, state, free, max_batch_size, nodes)
    fixed["reserved_bytes"] = gpu.memory_bytes - seen_bytes + shares.unused(seen_bytes, fixed)
    slot = Slot.of(target, tp, 0 if draft is None else draft.token_bytes(tp), layout)
    page_bytes = page_size * slot.num_bytes
    # One page is the padding sink, which takes memory and holds no request.
    pages = (gpu.memory_bytes - sum(fixed.values())) // page_bytes
    groups = _groups(target, layout, slot, state, page_size, nodes)
    states = sum(group.pages_of(group.states) for group in groups if group.has_states)
    if most == 0 or pages < 2 + states:
        needed = (2 + states) * page_bytes + (0 if most else state)
        raise InsufficientMemory(_refusal(target, gpu, parallel.devices, fixed, {"two KV pages": needed}))
    return MemoryPlan(
        total_bytes=gpu.memory_bytes,
        kv_pool_bytes=pages * page_bytes,
        target_slot_bytes=slot.target,
        draft_slot_bytes=slot.draft,
        window_slot_bytes=slot.window,
        slots=(pages - 1) * page_size * parallel.data,
        groups=tuple(_own_pools(groups, layout, (pages - 1) * page_size, page_size, num_states, parallel.data)),
        most_running=None if most is None else most * parallel.data,
        blocks=_blocks(target, tp, rules) if layout.rule == "pool" else NO_BLOCKS,
        margin_bytes=round(rules.margin * seen_bytes),
        may_not_start=False,
        **fixed,
    )


def _blocks(target: ModelShape, tp: int, rules: MemoryRules) -> PoolBlocks:
    """Return the blocks of the pool.

    A group has layers of one kind, as many as there are of the rarest kind, or of the most frequent if there are few
    more. All blocks have the size of the largest entry; a block has so many tokens, 16 or a multiple, that a state of a
    layer fits where their entries do (vLLM, v1/core/kv_cache_utils.py, platforms/interface.py).
    """
    kinds: dict[object, int] = {}
    largest = 0
    for mixer, count in target.mixers:
        caches = mixer.caches(tp)
        kind = next((cache.reach if cache.keeps_reach else 0 for cache in caches), None)
        kinds[kind] = kinds.get(kind, 0) + count
        largest = max(largest, math.ceil(sum(map(target.cache_bytes, caches))))
    least, most = min(kinds.values()), max(kinds.values())
    size = most if most < 1.25 * least else least
    groups, recurrent = sum(math.ceil(count / size) for count in kinds.values()), kinds.get(None)
    block = None
    if recurrent and largest:
        block = size * _BLOCK * largest * math.ceil(target.recurrent_state_bytes / recurrent / tp / (_BLOCK * largest))
    return PoolBlocks(groups * size * largest if rules.counts_by_group and groups > 1 else None, block)


def _groups(
    target: ModelShape, layout: StateLayout, slot: Slot, state: int, page_size: int, nodes: int
) -> list[KVGroup]:
    """Return the groups of layers with a window or with states. `state`: bytes of one; `nodes`: of a round."""
    groups = []
    if target.attention_window and (slot.beside or slot.window):
        groups.append(KVGroup(window=target.attention_window, pages=slot.beside or 1.0))
    if state and layout.rule == "pool":
        pages = state / (slot.of_full_layers * page_size)
        groups.append(KVGroup(pages=pages, states=layout.states_per_request + nodes - 1))
    elif state and layout.rule == "shares":
        groups.append(KVGroup(states=layout.states_of_row))
    return groups


def _own_pools(
    groups: Sequence[KVGroup], layout: StateLayout, slots: int, page_size: int, num_states: int, data: int
) -> Iterator[KVGroup]:
    """Yield the groups with the sizes of their pools on all attention-data parallel groups, where they have some."""
    for group in groups:
        own = num_states if group.has_states else max(1, int(layout.window_ratio * slots) // page_size)
        yield replace(group, capacity=own * data) if layout.rule == "shares" else group


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise InsufficientMemory(f"{name} must be at least 1, not {value}")


def _fixed_bytes(
    target: ModelShape,
    draft: DraftShape | None,
    parallel: Parallelism,
    prefill_tokens: int,
    rows: int,
    nodes: int,
    rules: MemoryRules,
) -> dict[str, int]:
    """Return what neither the pool nor the states take of a device, without graphs and what is reserved."""
    tp, max_tokens = parallel.tensor, max(prefill_tokens, rows * nodes)
    fusion_inputs = draft.fusion_inputs if draft is not None else 0
    weights = target.weight_bytes_per_device(tp, parallel.devices, parallel.expert)
    return {
        "context_bytes": rules.context_bytes + (rules.group_bytes if parallel.devices > 1 else 0),
        "target_weights_bytes": weights + _padding_bytes(target, parallel.devices, rules),
        "draft_weights_bytes": draft.weight_bytes_per_device(parallel) if draft is not None else 0,
        "activations_bytes": _activation_bytes(target, tp, max_tokens, rows, nodes, rules),
        # A STANDALONE draft has no fusion layer and takes no hidden states.
        "hidden_states_bytes": max_tokens * fusion_inputs * target.hidden * 2,
    }


def _padding_bytes(target: ModelShape, devices: int, rules: MemoryRules) -> int:
    """Return the bytes by which experts in MXFP4 grow on a device when they are padded."""
    if target.weight_dtype != "mxfp4":
        return 0
    added = 0.0
    for part, count in target.mlps:
        if isinstance(part, Experts):
            hidden, width = (
                1 + -size % multiple / size
                for size, multiple in zip((target.hidden, part.width), rules.expert_multiples, strict=True)
            )
            added += (hidden * width - 1) * count * part.count * part.expert_parameters(target.hidden)
    return math.ceil(added * target.format_bytes() / devices)


def _activation_bytes(target: ModelShape, tp: int, max_tokens: int, rows: int, nodes: int, rules: MemoryRules) -> int:
    """Return the largest need of a pass.

    That is a layer with the logits in 16 and 32 bits: residual, input and the two halves of the MLP in 16 bits. Where
    the server samples for all requests at its start, it is the greatest of the layer, these logits, and the copies
    of logits that the sampler makes.
    """
    wide = max((part.activated for part, _ in target.mlps), default=target.hidden)
    layer = max_tokens * (4 * target.hidden + 3 * math.ceil(wide / tp)) * 2
    logits = rows * nodes * target.vocab * (2 + 4)
    if not rules.sampler_bytes:
        return layer + logits
    workspace = max((_workspace(part, target.hidden, tp) for part, _ in target.mlps), default=0) * max_tokens
    sampling = rows * target.vocab * rules.sampler_bytes
    hidden = max_tokens * target.hidden * rules.hidden_bytes
    kept = workspace if rules.keeps_workspace else 0
    return math.ceil(max(layer + workspace, max(sampling, logits) + hidden + rules.sampled_bytes + kept))


def _workspace(part: object, hidden: int, tp: int) -> int:
    """Return the bytes that experts take for a token beside the layer: inputs and outputs of the `top_k` chosen ones,
    in 16 bits."""
    if not isinstance(part, Experts):
        return 0
    return 2 * part.top_k * ((part.latent or hidden) + math.ceil(part.width / tp))


def _states(layout: StateLayout, state: int, free: int, rows: int, nodes: int) -> tuple[int, int | None, int]:
    """Return the bytes of states that are set aside of `free` bytes, for how many requests (None: no limit), and how
    many states there are without those for drafts.

    `state`: bytes of one. A round of one node goes on in the committed state. A tree keeps a state per node until it is
    known which one is accepted.
    """
    drafted = nodes if nodes > 1 else 0
    if not state or layout.rule == "pool":
        return 0, None, 0
    if layout.rule == "reserved":
        each = state * recurrent_state_slots(1, drafted)
        most = max(1, min(rows, int(STATES_SHARE * free) // each)) if layout.is_default_limit else rows
        return most * each, most, most
    # One slot more of each kind is for padding.
    per_request, budget = layout.states_per_request, int(free * layout.state_ratio / (1 + layout.state_ratio))
    count = int((budget - state * (1 + drafted)) // (state * (1 + drafted / per_request)))
    if layout.state_slots is not None:
        count = layout.state_slots
    elif not layout.prefix_cache and not layout.is_default_limit:
        count = min(count, rows)
    most = max(0, min(rows, count // per_request))
    held = count + 1 + (most + 1) * drafted
    return state * max(held, 0), most, max(count, 0)


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
