"""Verify trees on the device: the best nd − 1 candidates, their links and their ancestors (`core.tree.build`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..tree import DeviceTree
from .constants import later, node_bits, numbers, sequence


@dataclass(frozen=True, slots=True)
class ChainLinks:
    """What all chains of one shape have in common; each tensor is [bs, nd]."""

    parents: Tensor
    depths: Tensor
    next_token: Tensor
    next_sibling: Tensor
    ancestor_bits: Tensor


@cache
def chain_links(batch_size: int, nodes: int, device: torch.device) -> ChainLinks:
    """The links of `batch_size` chains of `nodes` nodes, made once per shape; nobody writes into them."""
    depths = torch.arange(nodes, dtype=torch.int64, device=device)
    parents = (depths - 1).to(torch.int32)
    next_token = torch.where(depths + 1 < nodes, depths + 1, -1).to(torch.int32)
    # Two's complement wraps node 63 to all ones, which is what its 64 ancestors are.
    bits = 2 * node_bits(nodes, device) - 1
    none = torch.full((nodes,), -1, dtype=torch.int32, device=device)
    return ChainLinks(*(x.expand(batch_size, nodes).contiguous() for x in (parents, depths, next_token, none, bits)))


def is_chain(tree: DeviceTree) -> bool:
    """Whether `build_chain_torch` made the tree. Any other tree may be a chain as well, and is treated like a tree."""
    return tree.parents is chain_links(*tree.tokens.shape, tree.tokens.device).parents


def build_chain_torch(roots: Tensor, drafts: Tensor, seq_lens: Tensor, max_position: int) -> DeviceTree:
    batch_size, steps = drafts.shape
    tokens = torch.cat((roots.unsqueeze(1), drafts), 1)
    links = chain_links(batch_size, steps + 1, tokens.device)
    positions = (links.depths + seq_lens.unsqueeze(1)).clamp_(max=max_position)
    return DeviceTree(
        tokens,
        links.parents,
        positions,
        links.depths,
        links.next_token,
        links.next_sibling,
        links.ancestor_bits,
        steps + 1,
    )


def build_tree_torch(
    roots: Tensor,
    tokens: Tensor,
    scores: Tensor,
    parents: Tensor,
    depths: Sequence[int],
    seq_lens: Tensor,
    num_draft_tokens: int,
    max_position: int,
) -> DeviceTree:
    device = tokens.device
    depths = tuple(depths)
    parents = parents.long()
    scores = monotone_scores(scores, parents, depths)
    best = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, : num_draft_tokens - 1]
    kept = best.sort(dim=1).values
    # With the root as candidate −1 in front, a candidate's place among the kept ones is its node number.
    ids = torch.nn.functional.pad(kept, (1, 0), value=-1)
    node_parents = torch.searchsorted(ids, parents.gather(1, kept))
    node_depths = torch.nn.functional.pad(sequence(depths, device)[kept], (1, 0))
    positions = (node_depths + seq_lens.unsqueeze(1)).clamp_(max=max_position)
    node_tokens = torch.cat((roots.unsqueeze(1), tokens.gather(1, kept)), 1)
    width = depths[-1] + 1 if depths else 1
    next_token, next_sibling = links_torch(node_parents, num_draft_tokens)
    bits = ancestor_bits_torch(node_parents, width)
    node_parents = torch.nn.functional.pad(node_parents.int(), (1, 0), value=-1)
    return DeviceTree(node_tokens, node_parents, positions, node_depths, next_token, next_sibling, bits, width)


def monotone_scores(scores: Tensor, parents: Tensor, depths: tuple[int, ...]) -> Tensor:
    """Scores float [bs, n] with NaN as the worst and no child above its parent; `parents` int64 [bs, n]."""
    scores = torch.nan_to_num(scores, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    start = depths.count(1)
    for depth in range(2, depths[-1] + 1 if depths else 0):
        end = start + depths.count(depth)
        level = scores[:, start:end]
        torch.minimum(level, scores.gather(1, parents[:, start:end]), out=level)
        start = end
    return scores


def links_torch(parents: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """First children and next siblings, int32 [bs, nd], from the parents int64 [bs, nd − 1] of nodes 1 … nd − 1."""
    batch_size, device = parents.shape[0], parents.device
    children = numbers(nodes, device, torch.int32)[1:]
    # `nodes` stands for none until the end, so that the least number wins.
    next_token = torch.full((batch_size, nodes), nodes, dtype=torch.int32, device=device)
    next_token.scatter_reduce_(1, parents, children.expand(batch_size, nodes - 1), "amin")
    siblings = (parents.unsqueeze(2) == parents.unsqueeze(1)) & later(nodes - 1, device)
    next_sibling = torch.full((batch_size, nodes), nodes, dtype=torch.int32, device=device)
    if nodes > 1:
        torch.amin(torch.where(siblings, children, nodes), dim=2, out=next_sibling[:, 1:])
    return next_token.masked_fill_(next_token == nodes, -1), next_sibling.masked_fill_(next_sibling == nodes, -1)


def ancestor_bits_torch(parents: Tensor, width: int) -> Tensor:
    """int64 [bs, nd] from the parents int64 [bs, nd − 1] of nodes 1 … nd − 1; each pass doubles the climb."""
    above = torch.nn.functional.pad(parents, (1, 0))  # the root is its own parent
    bits = node_bits(above.shape[1], above.device).expand_as(above)
    for _ in range((width - 1).bit_length()):
        bits = bits | bits.gather(1, above)
        above = above.gather(1, above)
    return bits
