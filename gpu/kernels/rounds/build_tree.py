"""Verify trees on the device: the best nd − 1 candidates, their links and their ancestors (`core.tree.build`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from ...types.ops import DeviceCandidates, DeviceTree
from ..constants import later, node_bits, numbers, sequence
from ..jit import jit, next_power_of_2, tl


@dataclass(frozen=True, slots=True)
class ChainLinks:
    """What all chains of one shape have in common; each tensor is [bs, nd]."""

    parents: Tensor
    depths: Tensor
    next_token: Tensor
    next_sibling: Tensor
    ancestor_bits: Tensor

    def tree(self, tokens: Tensor, positions: Tensor) -> DeviceTree:
        """Return the chains of these tokens and positions, [bs, nd]."""
        links = (self.depths, self.next_token, self.next_sibling, self.ancestor_bits)
        return DeviceTree(tokens, self.parents, positions, *links, tokens.shape[1])


@cache
def chain_links(batch_size: int, nodes: int, device: torch.device) -> ChainLinks:
    """Return the links of `batch_size` chains of `nodes` nodes, made once per shape and never written."""
    depths = torch.arange(nodes, dtype=torch.int64, device=device)
    parents = (depths - 1).to(torch.int32)
    next_token = torch.where(depths + 1 < nodes, depths + 1, -1).to(torch.int32)
    # Two's complement wraps node 63 to all ones, which is what its 64 ancestors are.
    bits = 2 * node_bits(nodes, device) - 1
    none = torch.full((nodes,), -1, dtype=torch.int32, device=device)
    return ChainLinks(*(x.expand(batch_size, nodes).contiguous() for x in (parents, depths, next_token, none, bits)))


def is_chain(tree: DeviceTree) -> bool:
    """Return whether `build_chain_torch` made the tree.
    Any other tree may be a chain as well, and is treated like a tree."""
    return tree.parents is chain_links(*tree.tokens.shape, tree.tokens.device).parents


def build_chain_torch(roots: Tensor, drafts: Tensor, seq_lens: Tensor, max_position: int) -> DeviceTree:
    batch_size, steps = drafts.shape
    tokens = torch.cat((roots.unsqueeze(1), drafts), 1)
    links = chain_links(batch_size, steps + 1, tokens.device)
    return links.tree(tokens, (links.depths + seq_lens.unsqueeze(1)).clamp_(max=max_position))


def shorten_rows(tree: DeviceTree, row_nodes: Tensor) -> DeviceTree:
    """Return trees of which each row keeps its first `row_nodes` nodes, int64 [bs]; the others become padding, which
    sees itself alone (`core.tree.build.shorten_trees`)."""
    nodes, device, most = tree.num_nodes, row_nodes.device, row_nodes.unsqueeze(1)
    kept = numbers(nodes, device) < most
    first, sibling = (torch.where(kept & (link < most), link, -1) for link in (tree.next_token, tree.next_sibling))
    return replace(
        tree,
        parents=torch.where(kept, tree.parents, -1),
        next_token=first,
        next_sibling=sibling,
        ancestor_bits=torch.where(kept, tree.ancestor_bits, node_bits(nodes, device)),
    )


def build_tree_torch(
    roots: Tensor, candidates: DeviceCandidates, seq_lens: Tensor, num_draft_tokens: int, max_position: int
) -> DeviceTree:
    tokens, depths, device = candidates.tokens, candidates.depths, candidates.tokens.device
    parents = candidates.parents.long()
    scores = monotone_scores(candidates.scores, parents, depths)
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
    """Return scores float [bs, n] with NaN as the worst and no child above its parent; `parents` int64 [bs, n]."""
    scores = torch.nan_to_num(scores, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    start = depths.count(1)
    for depth in range(2, depths[-1] + 1 if depths else 0):
        end = start + depths.count(depth)
        level = scores[:, start:end]
        torch.minimum(level, scores.gather(1, parents[:, start:end]), out=level)
        start = end
    return scores


def links_torch(parents: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Return first children and next siblings, int32 [bs, nd], from the parents int64 [bs, nd − 1] of
    nodes 1 … nd − 1."""
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
    """Return ancestor bits int64 [bs, nd] from the parents int64 [bs, nd − 1] of nodes 1 … nd − 1;
    each pass doubles the climb."""
    above = torch.nn.functional.pad(parents, (1, 0))  # the root is its own parent
    bits = node_bits(above.shape[1], above.device).expand_as(above)
    for _ in range((width - 1).bit_length()):
        bits = bits | bits.gather(1, above)
        above = above.gather(1, above)
    # Without a climb it is one row seen many times, and kernels read row after row.
    return bits.contiguous()


@jit
def _chain_kernel(roots, drafts, seq_lens, tokens, positions, nodes, max_position, NODES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    inside = node < nodes
    draft = tl.load(drafts + row * (nodes - 1) + node - 1, mask=inside & (node > 0), other=0)
    tl.store(tokens + row * nodes + node, tl.where(node == 0, tl.load(roots + row), draft), mask=inside)
    tl.store(positions + row * nodes + node, tl.minimum(tl.load(seq_lens + row) + node, max_position), mask=inside)


@jit
def _select_kernel(scores, parents, node_of, kept, n, nodes, DEPTH: tl.constexpr, N: tl.constexpr):
    """Choose the best nodes − 1 of a row's n candidates, in the order of their ids. `kept` has the id of each node (−1
    for the root), `node_of` the node of each candidate (−1 if it has none)."""
    row = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, N)
    inside = candidate < n
    score = tl.load(scores + row * n + candidate, mask=inside, other=0.0)
    score = tl.where(score == score, score, float("-inf"))
    # No child counts as better than any of its ancestors.
    ancestor = tl.load(parents + row * n + candidate, mask=inside, other=-1)
    for _ in range(DEPTH - 1):
        above = tl.load(scores + row * n + ancestor, mask=ancestor >= 0, other=float("inf"))
        score = tl.minimum(score, tl.where(above == above, above, float("-inf")))
        ancestor = tl.load(parents + row * n + ancestor, mask=ancestor >= 0, other=-1)
    # A float's bits in the order of the numbers, 0 … 2³² − 1; −0 and 0 are the same number.
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True).to(tl.int64)
    rank = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF) + 0x80000000
    rank = tl.where(inside, rank, -1)
    # The greatest edge with enough candidates at or above it, bit by bit.
    wanted = nodes - 1
    edge = tl.full([], 0, tl.int64)
    for i in range(32):
        higher = edge + (tl.full([], 1, tl.int64) << (31 - i))
        edge = tl.where(tl.sum((rank >= higher).to(tl.int32), 0) >= wanted, higher, edge)
    above_edge = (rank > edge).to(tl.int32)
    at_edge = (rank == edge).to(tl.int32)
    # Of equals at the edge the lowest ids stay.
    seat = tl.cumsum(at_edge, 0)
    taken = (above_edge > 0) | ((at_edge > 0) & (seat <= wanted - tl.sum(above_edge, 0)))
    node = tl.cumsum(taken.to(tl.int32), 0)
    tl.store(node_of + row * n + candidate, tl.where(taken, node, -1), mask=inside)
    tl.store(kept + row * nodes + node, candidate, mask=inside & taken)
    tl.store(kept + row * nodes, -1)


@jit
def _link_kernel(
    roots,
    candidate_tokens,
    candidate_parents,
    candidate_depths,
    seq_lens,
    node_of,
    kept,
    tokens,
    parents,
    positions,
    depths,
    next_token,
    next_sibling,
    ancestor_bits,
    n,
    nodes,
    max_position,
    DEPTH: tl.constexpr,
    NODES: tl.constexpr,
):
    """Compute all properties of a row's nodes from the kept candidates."""
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    inside = node < nodes
    out = row * nodes + node
    candidate = tl.load(kept + out, mask=inside, other=-1)
    drafted = candidate >= 0
    token = tl.load(candidate_tokens + row * n + candidate, mask=drafted, other=0)
    tl.store(tokens + out, tl.where(node == 0, tl.load(roots + row), token), mask=inside)
    depth = tl.load(candidate_depths + candidate, mask=drafted, other=0)
    tl.store(depths + out, depth, mask=inside)
    tl.store(positions + out, tl.minimum(tl.load(seq_lens + row) + depth, max_position), mask=inside)

    above = tl.load(candidate_parents + row * n + candidate, mask=drafted, other=-1)
    # The root and lanes past the end have no parent; a first candidate's parent is node 0.
    parent = tl.load(node_of + row * n + above, mask=above >= 0, other=0)
    parent = tl.where(drafted, parent, -1)
    tl.store(parents + out, parent, mask=inside)
    child_of = parent[None, :] == node[:, None]
    first = tl.min(tl.where(child_of, node[None, :], NODES), 1)
    tl.store(next_token + out, tl.where(first < NODES, first, -1), mask=inside)
    sibling = (parent[None, :] == parent[:, None]) & drafted[:, None] & (node[None, :] > node[:, None])
    following = tl.min(tl.where(sibling, node[None, :], NODES), 1)
    tl.store(next_sibling + out, tl.where(following < NODES, following, -1), mask=inside)

    one = tl.full([NODES], 1, tl.int64)
    bits = (one << node.to(tl.int64)) | 1
    for _ in range(DEPTH - 1):
        ancestor = tl.load(node_of + row * n + above, mask=above >= 0, other=0)
        bits = bits | (one << ancestor.to(tl.int64))
        above = tl.load(candidate_parents + row * n + above, mask=above >= 0, other=-1)
    tl.store(ancestor_bits + out, bits, mask=inside)


def build_chain_triton(roots: Tensor, drafts: Tensor, seq_lens: Tensor, max_position: int) -> DeviceTree:
    batch_size, nodes = drafts.shape[0], drafts.shape[1] + 1
    tokens = torch.empty(batch_size, nodes, dtype=torch.int64, device=drafts.device)
    positions = torch.empty_like(tokens)
    if batch_size:
        _chain_kernel[(batch_size,)](
            roots,
            drafts.contiguous(),
            seq_lens,
            tokens,
            positions,
            nodes,
            max_position,
            NODES=next_power_of_2(nodes),
            num_warps=1,
        )
    return chain_links(batch_size, nodes, tokens.device).tree(tokens, positions)


def build_tree_triton(
    roots: Tensor, candidates: DeviceCandidates, seq_lens: Tensor, num_draft_tokens: int, max_position: int
) -> DeviceTree:
    depths, nodes = candidates.depths, num_draft_tokens
    batch_size, n = candidates.tokens.shape
    if not batch_size or not n:
        return build_tree_torch(roots, candidates, seq_lens, nodes, max_position)
    tokens, scores, parents = (
        values.contiguous() for values in (candidates.tokens, candidates.scores, candidates.parents)
    )
    device, depth = tokens.device, depths[-1]
    node_of = torch.empty(batch_size, n, dtype=torch.int32, device=device)
    kept = torch.empty(batch_size, nodes, dtype=torch.int32, device=device)
    long = [torch.empty(batch_size, nodes, dtype=torch.int64, device=device) for _ in range(4)]
    short = [torch.empty(batch_size, nodes, dtype=torch.int32, device=device) for _ in range(3)]
    node_tokens, positions, node_depths, bits = long
    node_parents, next_token, next_sibling = short
    size = next_power_of_2(n)
    warps = min(max(size // 128, 1), 8)
    _select_kernel[(batch_size,)](scores, parents, node_of, kept, n, nodes, DEPTH=depth, N=size, num_warps=warps)
    _link_kernel[(batch_size,)](
        roots,
        tokens,
        parents,
        sequence(depths, device),
        seq_lens,
        node_of,
        kept,
        node_tokens,
        node_parents,
        positions,
        node_depths,
        next_token,
        next_sibling,
        bits,
        n,
        nodes,
        max_position,
        DEPTH=depth,
        NODES=next_power_of_2(nodes),
        num_warps=4 if nodes > 16 else 1,
    )
    return DeviceTree(node_tokens, node_parents, positions, node_depths, next_token, next_sibling, bits, depth + 1)
