"""The gated delta rule (Yang et al., arXiv 2412.06464) behind a short convolution, over trees of new tokens, in torch.

A request has in each recurrent layer a state S [H, Dk, Dv] and the last K − 1 inputs of the convolution. A token i
whose parent is p makes of them

    S_i = γ_i S_p + k_i u_iᵀ,   u_i = β_i (v_i − γ_i S_pᵀ k_i),   o_i = S_iᵀ q_i

No S_i of a node is made. With G_i = the sum of ln γ from the root to i, all u are the solution of one triangular
system, whose entries are 0 but for ancestors (the chunkwise form of the paper, with a tree in place of a chain):

    u_i + β_i Σ_j exp(G_i − G_j) (k_i · k_j) u_j = β_i (v_i − exp(G_i) S₀ᵀ k_i)      j: ancestors of i

And the state behind the accepted path, whose last node is a, is S_a = exp(G_a) S₀ + Σ_j exp(G_a − G_j) k_j u_jᵀ. So a
round reads each state twice and writes it once, and of a node it keeps what `Nodes` has, not a state.

B sequences of w ≤ 64 new tokens each, heads H, key heads Hk (H / Hk heads share each), channels C of the convolution.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...types.recurrence import Inputs, Links, Nodes, PassStates, RecurrentWeights, States, StateShape
from .rms_norm import rms_norm_torch

WINDOW = 64  # most new tokens that are solved at once
L2_EPS = 1e-6  # under the root of the length of queries and keys


def recur_torch(
    states: PassStates, layer: int, projected: Tensor, weights: RecurrentWeights, shape: StateShape
) -> Tensor:
    """Do what `Ops.recur` says with a pass's own operations of torch."""
    mixed, gate, beta, step = projected.split_with_sizes(shape.projected, 1)
    rate = weights.log_rate
    log_decay = -rate.exp() * F.softplus(step.to(rate.dtype) + weights.step_bias)
    inputs = Inputs(mixed, log_decay, beta.sigmoid().to(rate.dtype))
    out = states.run(layer, inputs, weights.kernel, shape).to(projected.dtype)
    normed = rms_norm_torch(out, weights.norm, weights.eps)
    return (normed.flatten(1) * F.silu(gate.to(rate.dtype))).to(projected.dtype)


def chain(batch_size: int, width: int, device: torch.device) -> Links:
    """Return the links of sequences without branches."""
    order = torch.arange(width, device=device)
    ancestors = order[:, None] >= order
    return Links((order - 1).expand(batch_size, -1), ancestors.expand(batch_size, -1, -1))


def tree_links(parents: Tensor, ancestor_bits: Tensor) -> Links:
    """Return the links of trees: parents [B, w] and bits int64 [B, w] as in `DeviceTree`."""
    order = torch.arange(parents.shape[1], device=parents.device)
    return Links(parents.long(), (ancestor_bits.unsqueeze(-1) >> order) & 1 != 0)


def run_tokens(shape: StateShape, states: States, inputs: Inputs, kernel: Tensor, links: Links) -> tuple[Tensor, Nodes]:
    """Run new tokens [B, w]: returns outputs [B, w, H, Dv], 32 bits wide at least, and what to keep of them.

    `kernel` [C, K]: of the convolution. The states stay as they are.
    """
    wide = states.matrices.dtype
    convolved = F.silu(_convolved(states.inputs, inputs.mixed, kernel, links.parents)).to(wide)
    sizes = (shape.key_heads * shape.key_dim, shape.key_heads * shape.key_dim, shape.heads * shape.value_dim)
    q, k, v = convolved.split_with_sizes(sizes, -1)
    q, k = (_unit(x.unflatten(-1, (shape.key_heads, shape.key_dim))) for x in (q, k))
    q = q * shape.key_dim**-0.5
    q, k = (x.repeat_interleave(shape.heads // shape.key_heads, 2) for x in (q, k))
    v = v.unflatten(-1, (shape.heads, shape.value_dim))

    path_decay = links.ancestors.to(wide) @ inputs.log_decay  # [B, w, H]
    between = path_decay.unsqueeze(2) - path_decay.unsqueeze(1)  # [B, i, j, H]
    shares = between.masked_fill(~links.ancestors.unsqueeze(-1), -torch.inf).exp().permute(0, 3, 1, 2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, w, …]
    from_state = path_decay.exp().transpose(1, 2).unsqueeze(-1)
    beta = inputs.beta.transpose(1, 2).unsqueeze(-1)
    system = (k @ k.transpose(2, 3)) * shares * beta  # its diagonal is read as 1
    wanted = beta * (v - from_state * (k @ states.matrices))
    updates = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = from_state * (q @ states.matrices) + ((q @ k.transpose(2, 3)) * shares) @ updates
    k, updates, out = (x.transpose(1, 2) for x in (k, updates, out))
    return out, Nodes(inputs.mixed, inputs.log_decay, path_decay, k, updates)


def advanced(states: States, nodes: Nodes, path: Tensor, lens: Tensor) -> States:
    """Return the states after the first `lens` int64 [B] tokens of `path` int64 [B, P], numbers of tokens from the
    first to the last of a path. Entries past the length may be anything."""
    width, history = nodes.mixed.shape[1], states.inputs.shape[1]
    steps = torch.arange(path.shape[1], device=path.device)
    is_kept = steps < lens.unsqueeze(1)
    path = path.where(is_kept, width)
    kept = torch.zeros(len(path), width + 1, dtype=torch.bool, device=path.device).scatter(1, path, True)[:, :width]
    kept = kept.unsqueeze(-1)
    total = (nodes.log_decay * kept).sum(1, keepdim=True)  # [B, 1, H]
    # Simulated acceptance may keep tokens that are no path, whose shares would have no bound.
    shares = (total - nodes.path_decay).clamp(max=0.0).exp() * kept
    changes = torch.einsum("bwhk,bwhv->bhkv", nodes.keys * shares.unsqueeze(-1), nodes.updates)
    matrices = states.matrices * total.exp().transpose(1, 2).unsqueeze(-1) + changes
    order = torch.cat((torch.arange(history, device=path.device).expand(len(path), -1), path + history), 1)
    last = order.gather(1, lens.unsqueeze(1) + torch.arange(history, device=path.device))
    seen = torch.cat((states.inputs, nodes.mixed), 1)
    return States(matrices, seen.gather(1, last.unsqueeze(-1).expand(-1, -1, seen.shape[2])))


def _convolved(before: Tensor, mixed: Tensor, kernel: Tensor, parents: Tensor) -> Tensor:
    """Return the convolution of each token's input and of those before it on its path, [B, w, C]."""
    history, device = before.shape[1], mixed.device
    seen = torch.cat((before, mixed), 1)
    first = torch.arange(-1, history - 1, device=device).clamp(min=0).expand(len(seen), -1)
    previous = torch.cat((first, torch.where(parents < 0, -1, parents) + history), 1)
    places = torch.arange(history, seen.shape[1], device=device).expand(len(seen), -1)
    total = mixed * kernel[:, -1]
    for back in range(1, kernel.shape[1]):
        places = previous.gather(1, places)
        total = total + seen.gather(1, places.unsqueeze(-1).expand(-1, -1, seen.shape[2])) * kernel[:, -1 - back]
    return total


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()
