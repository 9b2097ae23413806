"""The gated delta rule for the new tokens of a round, as two kernels (`delta_rule` says what they compute).

One runs the nodes of a layer: a program per row and head reads the row's state once, and makes convolution, unit
vectors, decays, updates, outputs, their norm and gate. The other puts the accepted paths of all layers into the states.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...types.recurrence import Links, Nodes, RecurrentWeights, States, StateShape
from ..jit import cdiv, jit, next_power_of_2, tl
from .delta_rule import L2_EPS

MAX_NODES = 16  # of a row; for more, torch solves them at once
NUM_WARPS = 8  # which hold a state of 128 × 128


@jit
def convolved(
    projected,
    history,
    kernel,
    parents,
    tokens,
    slot,
    live,
    channel,
    inside,
    token_stride,
    channels,
    NODES: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """Return the convolution of each node's inputs and of those before it on its path, behind SiLU: [NODES, D] of
    channels [D], float32. `tokens`: the row's first token; `parents` points at its nodes'."""
    total = tl.zeros((NODES, channel.shape[0]), tl.float32)
    place = tl.arange(0, NODES) + (KERNEL - 1)  # among the inputs before the tokens, and behind these the tokens
    for back in tl.static_range(KERNEL):
        is_token = (place >= KERNEL - 1) & live
        number = place - (KERNEL - 1)
        source = projected + (tokens + number)[:, None] * token_stride + channel[None, :]
        x = tl.load(source, mask=is_token[:, None] & inside[None, :], other=0.0).to(tl.float32)
        source = history + (slot * (KERNEL - 1) + place)[:, None] * channels + channel[None, :]
        x += tl.load(source, mask=(~is_token & live)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        factor = tl.load(kernel + channel * KERNEL + (KERNEL - 1 - back), mask=inside, other=0.0).to(tl.float32)
        total += x * factor[None, :]
        parent = tl.load(parents + number, mask=is_token, other=-1).to(tl.int32)
        before = tl.where(parent < 0, -1, parent) + (KERNEL - 1)
        place = tl.where(is_token, before, tl.maximum(place - 1, 0))
    return total / (1.0 + tl.exp(-total))


@jit
def unit(x):
    """Return vectors [NODES, D] of length 1."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@jit
def row_of(x, is_row):
    """Return the row of x [NODES, D] that is named."""
    return tl.sum(tl.where(is_row[:, None], x, 0.0), 0)


@jit
def delta_nodes_kernel(
    projected,
    matrices,
    history,
    kernel,
    log_rate,
    step_bias,
    norm,
    rows,
    parents,
    ancestors,
    out,
    mixed,
    log_decays,
    path_decays,
    keys,
    updates,
    token_stride,
    parents_stride,
    ancestors_stride,
    num_nodes,
    eps,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NODES: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """Run the nodes of one row (axis 0) through one head (axis 1)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    KEYS: tl.constexpr = HEADS // GROUP * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * VALUE_DIM
    slot, tokens = tl.load(rows + row), row * num_nodes
    node, key, value = tl.arange(0, NODES), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    live, is_key, is_value = node < num_nodes, key < KEY_DIM, value < VALUE_DIM
    parents += row * parents_stride
    first_key = head // GROUP * KEY_DIM
    of_values = 2 * KEYS + head * VALUE_DIM + value
    q = unit(convolved(
        projected, history, kernel, parents, tokens, slot, live, first_key + key, is_key, token_stride, CHANNELS,
        NODES, KERNEL,
    ))  # fmt: skip
    k = unit(convolved(
        projected, history, kernel, parents, tokens, slot, live, KEYS + first_key + key, is_key, token_stride,
        CHANNELS, NODES, KERNEL,
    ))  # fmt: skip
    v = convolved(
        projected, history, kernel, parents, tokens, slot, live, of_values, is_value, token_stride, CHANNELS, NODES,
        KERNEL,
    )  # fmt: skip
    q *= KEY_DIM**-0.5
    behind = projected + (tokens + node) * token_stride + CHANNELS + HEADS * VALUE_DIM + head
    beta = tl.sigmoid(tl.load(behind, mask=live, other=0.0).to(tl.float32))
    step = tl.load(behind + HEADS, mask=live, other=0.0).to(tl.float32) + tl.load(step_bias + head)
    # The logarithm of 1 + e^step, which an overflow leaves right.
    softplus = tl.maximum(step, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(step)))
    log_decay = tl.where(live, -tl.exp(tl.load(log_rate + head)) * softplus, 0.0)
    ancestors += row * ancestors_stride
    seen = tl.load(ancestors + node[:, None] * num_nodes + node[None, :], mask=live[:, None] & live[None, :], other=0)
    path = tl.sum(tl.where(seen != 0, log_decay[None, :], 0.0), 1)

    inside = is_key[:, None] & is_value[None, :]
    source = matrices + ((slot * HEADS + head) * KEY_DIM + key)[:, None] * VALUE_DIM + value[None, :]
    state = tl.load(source, mask=inside, other=0.0)
    u, o = tl.zeros((NODES, BLOCK_V), tl.float32), tl.zeros((NODES, BLOCK_V), tl.float32)
    for i in range(num_nodes):
        is_i = node == i
        k_i, q_i = row_of(k, is_i), row_of(q, is_i)
        path_i, beta_i = tl.sum(tl.where(is_i, path, 0.0), 0), tl.sum(tl.where(is_i, beta, 0.0), 0)
        is_seen = tl.load(ancestors + i * num_nodes + node, mask=live, other=0) != 0
        shares = tl.where(is_seen, tl.exp(tl.where(is_seen, path_i - path, 0.0)), 0.0)
        before = tl.where(is_i, 0.0, shares * tl.sum(k * k_i[None, :], 1))
        from_state = tl.exp(path_i) * tl.sum(state * k_i[:, None], 0)
        u_i = beta_i * (row_of(v, is_i) - from_state - tl.sum(before[:, None] * u, 0))
        u = tl.where(is_i[:, None], u_i[None, :], u)
        of_nodes = tl.sum((shares * tl.sum(k * q_i[None, :], 1))[:, None] * u, 0)
        o_i = tl.exp(path_i) * tl.sum(state * q_i[:, None], 0) + of_nodes
        o = tl.where(is_i[:, None], o_i[None, :], o)

    target = (tokens + node) * HEADS + head
    is_kept = live[:, None] & is_value[None, :]
    scale = tl.rsqrt(tl.sum(o * o, 1) / VALUE_DIM + eps)
    source = projected + (tokens + node)[:, None] * token_stride + CHANNELS + (head * VALUE_DIM + value)[None, :]
    gate = tl.load(source, mask=is_kept, other=0.0).to(tl.float32)
    normed = o * scale[:, None] * tl.load(norm + value, mask=is_value, other=0.0).to(tl.float32)[None, :]
    gated = (normed * gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty)
    tl.store(out + target[:, None] * VALUE_DIM + value[None, :], gated, mask=is_kept)
    tl.store(updates + target[:, None] * VALUE_DIM + value[None, :], u, mask=is_kept)
    tl.store(keys + target[:, None] * KEY_DIM + key[None, :], k, mask=live[:, None] & is_key[None, :])
    tl.store(log_decays + target, log_decay, mask=live)
    tl.store(path_decays + target, path, mask=live)
    # Each head keeps the inputs of its own values, and the first of a group those of the group's query and key.
    copy_inputs(projected, mixed, tokens, node, live, of_values, is_value, token_stride, CHANNELS)
    is_own = is_key & (head % GROUP == 0)
    copy_inputs(projected, mixed, tokens, node, live, first_key + key, is_own, token_stride, CHANNELS)
    copy_inputs(projected, mixed, tokens, node, live, KEYS + first_key + key, is_own, token_stride, CHANNELS)


@jit
def copy_inputs(projected, mixed, tokens, node, live, channel, inside, token_stride, channels):
    """Copy channels [D] of a row's tokens to `mixed`."""
    mask = live[:, None] & inside[None, :]
    x = tl.load(projected + (tokens + node)[:, None] * token_stride + channel[None, :], mask=mask)
    tl.store(mixed + (tokens + node)[:, None] * channels + channel[None, :], x, mask=mask)


@jit
def delta_keep_kernel(
    matrices,
    history,
    mixed,
    log_decays,
    path_decays,
    keys,
    updates,
    rows,
    path,
    lens,
    num_slots,
    num_nodes,
    width,
    channels,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """Put the first `lens` nodes of a row's `path` (axis 0) into one head's state (axis 1) in one layer (axis 2), and
    the head's share of the channels into the inputs."""
    row, head, layer = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot, length = tl.load(rows + row), tl.load(lens + row).to(tl.int32)
    if slot > 0:
        tokens, path = (layer * tl.num_programs(0) + row) * num_nodes, path + row * width
        key, value = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
        is_key, is_value = key < KEY_DIM, value < VALUE_DIM
        inside = is_key[:, None] & is_value[None, :]
        place = (((layer * num_slots + slot) * HEADS + head) * KEY_DIM + key)[:, None] * VALUE_DIM + value[None, :]
        total = 0.0
        for step in range(length):
            node = tl.load(path + step)
            total += tl.load(log_decays + (tokens + node) * HEADS + head)
        state = tl.load(matrices + place, mask=inside, other=0.0) * tl.exp(total)
        for step in range(length):
            token = (tokens + tl.load(path + step)) * HEADS + head
            # Simulated acceptance may keep tokens that are no path, whose shares would have no bound.
            share = tl.exp(tl.minimum(total - tl.load(path_decays + token), 0.0))
            k = tl.load(keys + token * KEY_DIM + key, mask=is_key, other=0.0) * share
            u = tl.load(updates + token * VALUE_DIM + value, mask=is_value, other=0.0)
            state += k[:, None] * u[None, :]
        tl.store(matrices + place, state, mask=inside)

        back, channel = tl.arange(0, BLOCK_H), head * BLOCK_C + tl.arange(0, BLOCK_C)
        kept = (back < KERNEL - 1)[:, None] & (channel < channels)[None, :]
        order = back + length  # among the inputs before, and behind these the path
        is_node = (order >= KERNEL - 1) & (back < KERNEL - 1)
        node = tl.load(path + order - (KERNEL - 1), mask=is_node, other=0)
        own = history + (layer * num_slots + slot) * (KERNEL - 1) * channels + channel[None, :]
        x = tl.load(own + order[:, None] * channels, mask=kept & ~is_node[:, None], other=0.0)
        new = mixed + (tokens + node)[:, None] * channels + channel[None, :]
        x += tl.load(new, mask=kept & is_node[:, None], other=0.0)
        tl.debug_barrier()  # what one thread writes may be another one's source
        tl.store(own + back[:, None] * channels, x, mask=kept)


def padded_nodes(width: int) -> int:
    """Return the nodes that the kernel is compiled for if there are so many: a single one takes more registers than
    four."""
    return max(4, next_power_of_2(width))


def delta_nodes_triton(
    states: States,
    rows: Tensor,
    projected: Tensor,
    weights: RecurrentWeights,
    shape: StateShape,
    links: Links,
    nodes: Nodes,
    layer: int,
) -> Tensor:
    """Compute `recur_torch` of the new tokens of `rows` int64 [B] in one launch: projected [B · w, …] → [B · w, H ·
    Dv]. What is kept of them goes to the `layer` of `nodes`. The last axes must be contiguous."""
    batch_size, width = links.parents.shape
    assert width <= MAX_NODES, f"{width} nodes in registers"
    out = projected.new_empty(len(projected), shape.heads * shape.value_dim)
    assert shape.kernel >= 2 and L2_EPS == 1e-6
    if batch_size and width:
        delta_nodes_kernel[(batch_size, shape.heads)](
            projected,
            states.matrices,
            states.inputs,
            weights.kernel,
            weights.log_rate,
            weights.step_bias,
            weights.norm,
            rows,
            links.parents,
            links.ancestors.view(torch.uint8),
            out,
            *(part[layer] for part in (nodes.mixed, nodes.log_decay, nodes.path_decay, nodes.keys, nodes.updates)),
            projected.stride(0),
            links.parents.stride(0),
            links.ancestors.stride(0),
            width,
            weights.eps,
            GROUP=shape.heads // shape.key_heads,
            NODES=padded_nodes(width),
            **_constants(shape),
            num_warps=NUM_WARPS,
        )
    return out


def delta_keep_triton_(states: States, rows: Tensor, nodes: Nodes, path: Tensor, lens: Tensor) -> None:
    """Put the first `lens` int64 [B] nodes of `path` int64 [B, P] into the states of `rows` in all layers, one
    launch."""
    num_layers, num_slots, heads, key_dim, value_dim = states.matrices.shape
    _, batch_size, width, channels = nodes.mixed.shape
    path, history = path.contiguous(), states.inputs.shape[2]
    if batch_size and width:
        delta_keep_kernel[(batch_size, heads, num_layers)](
            states.matrices,
            states.inputs,
            nodes.mixed,
            nodes.log_decay,
            nodes.path_decay,
            nodes.keys,
            nodes.updates,
            rows,
            path,
            lens,
            num_slots,
            width,
            path.shape[1],
            channels,
            BLOCK_C=next_power_of_2(cdiv(channels, heads)),
            BLOCK_H=next_power_of_2(history),
            **_constants(StateShape(heads, heads, key_dim, value_dim, history + 1)),
            num_warps=NUM_WARPS,
        )


def _constants(shape: StateShape) -> dict[str, int]:
    return {
        "HEADS": shape.heads,
        "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim,
        "BLOCK_K": next_power_of_2(shape.key_dim),
        "BLOCK_V": next_power_of_2(shape.value_dim),
        "KERNEL": shape.kernel,
    }
