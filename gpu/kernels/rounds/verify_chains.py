"""Verification of chains whose drafts were drawn, by rejection or as blocks (`core.tree.chains`).

A draft is drawn from a few candidates, so its distribution has mass on these alone. What the target has beyond it,
Σ max(w · p − q, 0), is then w − Σ min(w · p, q) over the candidates, and no distribution but that of the last node is
read as a whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....core.tree.chains import LEAST_REST, AcceptRule
from ...types.ops import DeviceTree, DeviceVerified, DrawnDrafts
from ..constants import numbers
from .verify_greedy import chain_path
from .verify_sampling import sample_torch


def verify_chains_torch(
    tree: DeviceTree, probs: Tensor, accept_coins: Tensor, bonus_coins: Tensor, rule: AcceptRule
) -> DeviceVerified:
    assert tree.drawn is not None and rule.draws_drafts, "chains are verified by what their drafts were drawn from"
    batch_size, nodes = tree.tokens.shape
    steps, vocab, device = nodes - 1, probs.shape[1], probs.device
    totals = probs.sum(1, dtype=torch.float64)
    usable = (totals > 0) & (totals < torch.inf) & (probs.amin(1) >= 0)
    greatest, predict = probs.max(1)
    predict.masked_fill_(~(greatest.abs() < torch.inf), -1)
    # An unusable node's masses count as 0: no draft follows it.
    totals = totals.masked_fill(~usable, torch.inf).view(batch_size, nodes)
    ids, q, q_draft = _sound(tree.drawn, tree.tokens[:, 1:])

    target, drafts = probs.view(batch_size, nodes, vocab)[:, :-1], tree.tokens[:, 1:]
    known = (drafts >= 0) & (drafts < vocab) & (tree.parents[:, 1:] >= 0) & usable.view(batch_size, nodes)[:, :-1]
    there = known.cummin(1).values
    p = target.gather(2, ids).double() / totals[:, :-1, None]
    at = torch.where(known, drafts, 0).unsqueeze(2)
    p_draft = target.gather(2, at).squeeze(2).double() / totals[:, :-1]
    ratios = (p_draft / q_draft).masked_fill(~there, 0.0)
    weights = _weights(ratios, rule)
    passes = ratios
    if rule is AcceptRule.BLOCK:
        rest = (weights[:, :-1] - torch.minimum(weights[:, :-1, None] * p, q).sum(2))[:, 1:]
        rest = torch.where(rest < LEAST_REST, 0.0, rest)
        own, goes_on = weights[:, 1:-1], there[:, 1:]
        whole = rest + (1 - own)  # in this order rest / whole is 1 where the weight is
        # With weight 1 and p = q a later draft always passes, so this one's chance is of no account.
        inner = torch.where(goes_on, torch.where(whole > 0, rest / whole, 1.0), own)
        passes = torch.cat((inner, weights[:, -1:]), 1).masked_fill(~there, 0.0)
    passed = accept_coins[:, :steps] < passes
    if rule is AcceptRule.BLOCK:  # all up to the last that passes
        passed = passed.flip(1).cummax(1).values.flip(1) if steps else passed
    accept_index, accept_lens = chain_path(passed, nodes)

    last = accept_lens.long().unsqueeze(1) - 1
    last_flat = (last + numbers(batch_size, device).unsqueeze(1) * nodes).squeeze(1)
    whole_target = probs.index_select(0, last_flat).double() / totals.gather(1, last)
    residual = whole_target * weights.gather(1, last)
    if steps:
        behind = last.clamp(max=steps - 1)  # the draft that does not stay
        is_there = (last < steps) & there.gather(1, behind)
        places = behind.unsqueeze(2).expand(-1, -1, ids.shape[2])
        masses = q.gather(1, places).squeeze(1) * is_there
        residual = residual.scatter_add(1, ids.gather(1, places).squeeze(1), -masses).clamp_(min=0)
        # A draft that does not stay has nothing left, but for rounding; nor has any token where p = q.
        draft, keeps = at.squeeze(2).gather(1, behind), (~is_there).double()
        without = [x.scatter(1, draft, x.gather(1, draft) * keeps) for x in (residual, whole_target)]
        residual = _with_mass(_with_mass(*without), whole_target)
    bonus = sample_torch(residual, bonus_coins.gather(1, last).squeeze(1))
    failed = ~usable.index_select(0, last_flat)
    bonus = bonus.masked_fill_(failed, -1).unsqueeze(1)

    # On the path a node's token is the next node's; lanes past the end write the bonus once more where it is.
    path = torch.where(accept_index >= 0, accept_index, last_flat.unsqueeze(1))
    follows = numbers(nodes, device) < accept_lens.unsqueeze(1) - 1
    emitted = torch.where(follows, tree.tokens.take(path).roll(-1, 1), bonus)
    predict.scatter_(0, path.view(-1), emitted.view(-1))
    return DeviceVerified(accept_index, accept_lens, predict, failed)


def _sound(drawn: DrawnDrafts, drafts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the candidates int64 [bs, S, K], their probabilities and those of the drafts, float64. A draft that cannot
    have been drawn from what is given counts as one without doubt."""
    sums = drawn.probs.sum(2, dtype=torch.float64)
    q = drawn.probs.double() / sums.unsqueeze(2)
    q_draft = torch.where(drawn.ids == drafts.unsqueeze(2), q, 0.0).sum(2)
    is_sound = (q_draft > 0) & (sums < torch.inf) & (drawn.probs.amin(2) >= 0)
    is_first = numbers(drawn.ids.shape[2], drafts.device) == 0
    replaced = ~is_sound.unsqueeze(2)
    ids = torch.where(replaced & is_first, drafts.clamp(min=0).unsqueeze(2), drawn.ids)
    return ids, torch.where(replaced, is_first.double(), q), torch.where(is_sound, q_draft, 1.0)


def _with_mass(masses: Tensor, others: Tensor) -> Tensor:
    """Return `masses` [bs, V], those of `others` where a row has none."""
    return torch.where(masses.sum(1, keepdim=True) > 0, masses, others)


def _weights(ratios: Tensor, rule: AcceptRule) -> Tensor:
    """Return the weight of each node, float64 [bs, S + 1]."""
    ones = ratios.new_ones(ratios.shape[0])
    columns = [ones]
    for step in range(ratios.shape[1]):
        columns.append((columns[-1] * ratios[:, step]).clamp(max=1.0) if rule is AcceptRule.BLOCK else ones)
    return torch.stack(columns, 1)
