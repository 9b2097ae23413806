"""From logits to tokens on the device: `core.tree.verify.target_distribution` and keyed sampling, without host synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.constants import numbers


def target_probs(logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, filtered: bool = True) -> Tensor:
    """Return the distribution that sampling parameters, one per row [n], make of logits [n, V]; float64 for float64 logits, else float32.

    temperature 0 is greedy: all mass on the lowest id of the greatest logit. top_k ≤ 0 keeps all. Among equal logits at the edge the lowest
    ids stay. top_k is applied before top_p. top_p keeps the shortest prefix, in descending order, whose mass reaches top_p. A row with NaN,
    with +inf, or without a finite logit becomes NaN. `filtered=False` is the host's word that every row has top_p ≥ 1 and top_k ≤ 0:
    nothing is sorted.
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    greatest, best = logits.max(1, keepdim=True)
    failed = ~greatest.isfinite()
    greedy = (temperature <= 0).unsqueeze(1)
    scale = torch.where(greedy, 1.0, temperature.unsqueeze(1)).to(logits.dtype)
    # A failed row turns into NaN by itself: inf − inf, or NaN − anything; its greatest entry decides for the whole row.
    probs = ((logits - greatest) / scale).exp_()
    if filtered:
        probs = _filter(logits, probs, top_p.unsqueeze(1), top_k.unsqueeze(1))
    probs = probs / probs.sum(1, keepdim=True)
    one_hot = (numbers(logits.shape[1], logits.device) == best).to(logits.dtype)
    return torch.where(greedy, one_hot, probs).masked_fill_(failed, torch.nan)


def _filter(logits: Tensor, probs: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Return `probs`, not normalised, with 0 for what top-k and top-p leave out."""
    vocab = logits.shape[1]
    order = torch.sort(logits, dim=1, descending=True, stable=True).indices
    ranks = numbers(vocab, logits.device)
    ranked = probs.gather(1, order).masked_fill_(ranks >= torch.where(top_k > 0, top_k, vocab), 0.0)
    mass_before = ranked.cumsum(1) - ranked
    keep = (mass_before < top_p * ranked.sum(1, keepdim=True)) | (top_p >= 1.0) | (ranks == 0)
    return torch.zeros_like(probs).scatter_(1, order, ranked.masked_fill_(~keep, 0.0))
