"""Greedy verification: accept while a child equals the target's choice (`core.tree.verify.verify_greedy`)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..tree import DeviceTree, DeviceVerified
from .build_tree import is_chain
from .constants import later, node_bits, node_numbers, numbers


def verify_greedy_torch(tree: DeviceTree, target_ids: Tensor) -> DeviceVerified:
    tokens, nodes = tree.tokens, tree.num_nodes
    targets = target_ids.view(-1, nodes)
    if is_chain(tree):
        wanted = targets[:, :-1]
        accept_index, accept_lens = chain_path((tokens[:, 1:] == wanted) & (wanted >= 0), nodes)
        last = accept_lens.long().unsqueeze(1) - 1
    else:
        parents = tree.parents.long()
        wanted = targets.gather(1, parents.clamp(min=0))
        hits = (tokens == wanted) & (wanted >= 0) & (parents >= 0)
        # Of siblings with the same token the first one counts.
        rivals = (parents.unsqueeze(2) == parents.unsqueeze(1)) & hits.unsqueeze(2) & later(nodes, tokens.device)
        accept_index, accept_lens = tree_path(tree, hits & ~rivals.any(1))
        last = last_nodes(accept_index, accept_lens, nodes)
    return DeviceVerified(accept_index, accept_lens, target_ids, (targets.gather(1, last) < 0).squeeze(1))


def chain_path(accepted: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """accept_index int32 [bs, nd] and accept_lens int32 [bs] of chains; `accepted` bool [bs, nd − 1]: node j + 1 may follow node j."""
    batch_size, device = accepted.shape[0], accepted.device
    order = numbers(nodes, device, torch.int32)
    if nodes == 1:
        accept_lens = torch.ones(batch_size, dtype=torch.int32, device=device)
    else:
        accept_lens = torch.where(accepted, nodes, order[1:]).amin(1)  # the first refused node
    flat = node_numbers(batch_size, nodes, nodes, device, torch.int32)
    return torch.where(order < accept_lens.unsqueeze(1), flat, -1), accept_lens


def tree_path(tree: DeviceTree, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """accept_index int32 [bs, width] and accept_lens int32 [bs]; `chosen` bool [bs, nd]: the node follows its parent, if that is reached.

    At most one child of a node is chosen, so the nodes whose ancestors are all chosen are one path, a node per depth.
    """
    batch_size, nodes = chosen.shape
    device = chosen.device
    own = node_bits(nodes, device)
    chosen_bits = (chosen * own).sum(1, keepdim=True)  # distinct powers of two: the sum is their union
    reached = (tree.ancestor_bits & ~(chosen_bits | 1)) == 0
    flat = node_numbers(batch_size, nodes, nodes, device, torch.int32)
    accept_index = torch.full((batch_size, tree.width), -1, dtype=torch.int32, device=device)
    accept_index.scatter_reduce_(1, tree.depths, torch.where(reached, flat, -1), "amax")
    return accept_index, (accept_index >= 0).sum(1, dtype=torch.int32)


def last_nodes(accept_index: Tensor, accept_lens: Tensor, nodes: int) -> Tensor:
    """The number inside its row of each row's last accepted node, int64 [bs, 1]."""
    last = accept_index.gather(1, (accept_lens - 1).long().unsqueeze(1))
    return last.long() - numbers(accept_index.shape[0], accept_index.device).unsqueeze(1) * nodes
