"""How many drafts block verification keeps, from how many rejection keeps (`core/tree/chains.py` has both rules).

Rejection keeps a draft with the chance E[min(1, r)], where r = p(x) / q(x) and x was drawn from q. Block verification
looks at products of ratios, so this chance alone does not say what it keeps. Here a ratio has one of two values:

    r = ρ with probability u, else R            u ρ + (1 − u) R = 1, since p sums to one
    acceptance a = 1 − u (1 − ρ)

So the acceptance of a place and ρ say everything: ρ is how likely the target finds a draft that rejection may drop, as
a share of how likely the draft model finds it. With ρ = 0 nothing is won back. Ratios of different places are taken to
be independent. d drafts or more stay with the probability E[w(d)], whatever the length of the chain (Sun et al.,
"Block verification accelerates speculative decoding", arXiv 2403.10444):

    w(0) = 1, w(d) = min(1, w(d − 1) · r(d))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..contract.arrays import Float64Array
from .process import GaussianAcceptance, conditional_of

REJECTED_RATIO = 0.08
"""ρ with which chains of 8 drafts gain the 7 to 10 % in accept length that arXiv 2403.10444 reports."""
_LEAST = 1e-15  # of the probability that drafts stay
_MOST_WEIGHTS = 1 << 12
_DIGITS, _DIGITS_OF_GRID = 12, 4  # of a weight, 0 … 1


def block_survival(conditional: Sequence[float], rejected_ratio: float = REJECTED_RATIO) -> tuple[float, ...]:
    """Return the probability that block verification keeps 1, 2, … drafts or more.

    conditional: The chance of rejection to keep draft 1, 2, … if it keeps all before, each 0 … 1.
    rejected_ratio: ρ, 0 … 1. A place that rejection accepts less often than that has its acceptance as ρ.
    """
    weights: Float64Array = np.ones(1)
    masses: Float64Array = np.ones(1)
    survival = []
    for accepted in conditional:
        low = min(rejected_ratio, accepted)
        share = (1.0 - accepted) / (1.0 - low) if low < 1.0 else 0.0
        high = (1.0 - share * low) / (1.0 - share) if share < 1.0 else 1.0
        weights = np.concatenate([weights * low, np.minimum(weights * high, 1.0)])
        masses = np.concatenate([masses * share, masses * (1.0 - share)])
        kept = weights * masses > _LEAST  # a weight never grows on average, so the others add no more later
        weights, masses = weights[kept], masses[kept]
        # Places that differ double the weights, so many of them are those of a grid: its places have their means.
        places = weights.round(_DIGITS if len(weights) <= _MOST_WEIGHTS else _DIGITS_OF_GRID)
        _, which = np.unique(places, return_inverse=True)
        sums = np.bincount(which, weights=weights * masses).astype(np.float64)
        masses = np.bincount(which, weights=masses).astype(np.float64)
        weights = sums / masses
        survival.append(float(weights @ masses))
    return tuple(survival)


def by_block(process: GaussianAcceptance, rejected_ratio: float = REJECTED_RATIO) -> GaussianAcceptance:
    """Return the process of block verification on the drafts of which rejection keeps as many as `process` says."""
    depths = range(process.max_depth)
    last = len(process.conditional) - 1
    survival = block_survival([process.conditional[min(depth, last)] for depth in depths], rejected_ratio)
    return replace(process, conditional=conditional_of(np.array(survival)))
