"""Lossless tree sampling: what is emitted has the target's distribution, whatever was drafted (`core.tree.verify`).

Every node decides by itself which of its children follows it, because the coin of its depth is known; the accepted path
is then the chain of these decisions from the root. Only the last node's distribution is read as a whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..tree import DeviceTree, DeviceVerified
from .build_tree import is_chain
from .constants import later, numbers
from .verify_greedy import chain_path, last_nodes, tree_path


def verify_sampling_torch(tree: DeviceTree, probs: Tensor, accept_coins: Tensor, bonus_coins: Tensor) -> DeviceVerified:
    batch_size, nodes = tree.tokens.shape
    vocab, width, device = probs.shape[1], tree.width, probs.device
    totals = probs.sum(1, dtype=torch.float64)
    usable = totals.isfinite() & (totals > 0) & (probs.amin(1) >= 0)
    greatest, predict = probs.max(1)
    predict.masked_fill_(~greatest.isfinite(), -1)
    # An unusable node's masses count as 0: none of its children is possible.
    totals = totals.masked_fill(~usable, torch.inf).view(batch_size, nodes)
    mass_counts = (probs > 0).sum(1).view(batch_size, nodes)
    decide = _chain_decisions if is_chain(tree) else _tree_decisions
    accept_index, accept_lens, children = decide(tree, probs, totals, mass_counts, accept_coins)

    last = last_nodes(accept_index, accept_lens, nodes)
    last_flat = (last + numbers(batch_size, device).unsqueeze(1) * nodes).squeeze(1)
    residual = probs.index_select(0, last_flat).double() / totals.gather(1, last)
    # The children's tokens leave the distribution; other nodes point one past its end.
    taken = torch.where(children.gather(1, last.unsqueeze(2).expand(-1, -1, nodes)).squeeze(1), tree.tokens, vocab)
    residual = torch.nn.functional.pad(residual, (0, 1)).scatter_(1, taken, 0.0)[:, :vocab]
    bonus = sample_torch(residual, bonus_coins.gather(1, accept_lens.long().unsqueeze(1) - 1).squeeze(1))
    failed = ~usable.index_select(0, last_flat)
    bonus = bonus.masked_fill(failed, -1).unsqueeze(1)

    # On the path a node's token is the next node's; lanes past the end write the bonus once more where it is.
    path = torch.where(accept_index >= 0, accept_index.long(), last_flat.unsqueeze(1))
    path_tokens = tree.tokens.view(-1).take(path)
    follows = numbers(width, device) < accept_lens.unsqueeze(1) - 1
    emitted = torch.where(follows, path_tokens.roll(-1, 1), bonus)
    predict.scatter_(0, path.view(-1), emitted.view(-1))
    return DeviceVerified(accept_index, accept_lens, predict, failed)


def _chain_decisions(
    tree: DeviceTree, probs: Tensor, totals: Tensor, mass_counts: Tensor, coins: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """accept_index, accept_lens, and which nodes [bs, parent, child] take their token out of the residual."""
    batch_size, nodes = tree.tokens.shape
    vocab = probs.shape[1]
    drafts = tree.tokens[:, 1:]
    known = (drafts >= 0) & (drafts < vocab)
    drafted = probs.view(batch_size, nodes, vocab)[:, :-1].gather(2, torch.where(known, drafts, 0).unsqueeze(2))
    masses = drafted.squeeze(2).double() / totals[:, :-1]
    # With all mass on the child the coin can only miss by rounding.
    accepted = known & (masses > 0) & ((coins[:, : nodes - 1] < masses) | (mass_counts[:, :-1] == 1))
    accept_index, accept_lens = chain_path(accepted, nodes)
    children = torch.zeros(batch_size, nodes, nodes, dtype=torch.bool, device=probs.device)
    children.diagonal(1, 1, 2).copy_(known)
    return accept_index, accept_lens, children


def _tree_decisions(
    tree: DeviceTree, probs: Tensor, totals: Tensor, mass_counts: Tensor, coins: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """accept_index, accept_lens, and which nodes [bs, parent, child] take their token out of the residual."""
    nodes = tree.num_nodes
    vocab, device = probs.shape[1], probs.device
    tokens, parents, order = tree.tokens, tree.parents.long(), numbers(nodes, device)
    above = parents.clamp(min=0)
    known = (tokens >= 0) & (tokens < vocab) & (parents >= 0)
    cells = node_cells(above, torch.where(known, tokens, 0), nodes, vocab)
    # A repeated sibling counts once: the first one has the mass.
    alike = (parents.unsqueeze(2) == parents.unsqueeze(1)) & (tokens.unsqueeze(2) == tokens.unsqueeze(1))
    first = ~(alike & later(nodes, device)).any(1)
    masses = probs.reshape(-1).take(cells).double() / totals.gather(1, above)
    masses = masses.masked_fill(~(known & first), 0.0)

    children = (parents.unsqueeze(1) == order.unsqueeze(1)) & known.unsqueeze(1)  # [row, parent, child]
    possible = children & (masses > 0).unsqueeze(1)
    reach = torch.where(possible, masses.unsqueeze(1), 0.0).cumsum(2)
    hits = possible & (coins.gather(1, tree.depths).unsqueeze(2) < reach)
    none = nodes  # stands for no child, so that the least number wins
    child = torch.where(hits, order, none).amin(2)
    last_possible = torch.where(possible, order, -1).amax(2)
    # With all mass on the children the coin can only miss by rounding: the last possible child is meant.
    exhausted = (child == none) & (last_possible >= 0) & (possible.sum(2) == mass_counts)
    child = torch.where(exhausted, last_possible, child)
    accept_index, accept_lens = tree_path(tree, known & (child.gather(1, above) == order))
    return accept_index, accept_lens, children


def node_cells(above: Tensor, tokens: Tensor, nodes: int, vocab: int) -> Tensor:
    """Where the probability of each token after node `above` of its row stands in probs [bs · nd, V], int64 [bs, nd]."""
    rows = numbers(above.shape[0], above.device).unsqueeze(1) * nodes
    return (above + rows) * vocab + tokens


def sample_torch(probs: Tensor, coins: Tensor) -> Tensor:
    """The first id of probs [n, V] with mass whose cumulative mass exceeds coin · total, int64 [n]; −1 if there is no mass or a NaN."""
    cumulative = probs.cumsum(1, dtype=torch.float64)
    total = cumulative[:, -1]
    # coin · total can round up to total; then the last token with mass is meant, just below the end.
    threshold = torch.minimum(coins * total, torch.nextafter(total, torch.zeros_like(total)))
    # A parallel sum need not be monotone to the last bit, so a token must have mass of its own.
    beyond = (cumulative > threshold.unsqueeze(1)) & (probs > 0)
    found, token = beyond.max(1)
    return torch.where(found & total.isfinite(), token, -1)
