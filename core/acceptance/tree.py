"""How deep the accepted path of a draft tree goes, from the acceptance of the first choice at each depth."""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist

import numpy as np

from ..contract.arrays import Float64Array
from ..contract.step import RoundShape
from ..errors import ConfigError, Problem

MAX_DEPTH = 64
_LEVELS = 9  # quantiles of the draft's confidence over which a tree is averaged


def tree_survival(
    conditional_at: Callable[[int], float],
    shape: RoundShape,
    rank_ratio: float,
    draft_confidence: float | None = None,
) -> np.ndarray:
    """Return the probability that the accepted path reaches depth 1 … steps: float64 [steps]. See `for_tree`."""
    steps, topk, num_draft_tokens = shape
    problems = []
    if topk < 1:
        problems.append(Problem("topk", f"{topk}: expected at least 1"))
    if not 1 <= steps <= MAX_DEPTH:
        problems.append(Problem("steps", f"{steps}: expected 1 ... {MAX_DEPTH}"))
    available = topk + (steps - 1) * topk**2
    if not 2 <= num_draft_tokens <= available + 1:
        problems.append(
            Problem("num_draft_tokens", f"{num_draft_tokens}: expected 2 ... {available + 1} for this tree")
        )
    if not 0.0 <= rank_ratio <= 1.0:
        problems.append(Problem("rank_ratio", f"{rank_ratio}: expected 0 ... 1"))
    if problems:
        raise ConfigError("<acceptance tree>", problems)
    accepted = [_of_ranks(conditional_at(depth), rank_ratio, topk) for depth in range(1, steps + 1)]
    if draft_confidence is None or topk == 1:
        return _survival_of(accepted, accepted, num_draft_tokens)
    levels = [NormalDist().inv_cdf((i + 0.5) / _LEVELS) for i in range(_LEVELS)]
    odds = draft_confidence / (1 - draft_confidence) * np.exp(levels)
    first = odds / (1 + odds)
    halves = 0.5 ** np.arange(1, topk)
    trees = [_survival_of([np.array([p, *((1 - p) * halves)])] * steps, accepted, num_draft_tokens) for p in first]
    mean: Float64Array = np.mean(trees, axis=0)
    return mean


def _of_ranks(p: float, rank_ratio: float, topk: int) -> np.ndarray:
    """Return the probability that the target's token is the draft's first, second, … choice: float64 [topk]."""
    return p * (rank_ratio * (1.0 - p)) ** np.arange(topk)


def _survival_of(drafted: list[np.ndarray], accepted: list[np.ndarray], num_draft_tokens: int) -> np.ndarray:
    """Return the survival by depth of a tree that is chosen by the draft's probabilities of each rank, float64 [topk]
    per depth.

    `accepted`: the target's probabilities, likewise. Beams of top-k, then the best nodes of all depths.
    """
    scores, truths = np.ones(1), np.ones(1)
    all_scores, all_truths, depths = [], [], []
    for depth, (drafts, targets) in enumerate(zip(drafted, accepted, strict=True), 1):
        scores, truths = (scores[:, None] * drafts).reshape(-1), (truths[:, None] * targets).reshape(-1)
        all_scores.append(scores)
        all_truths.append(truths)
        depths.append(np.full(scores.size, depth))
        beam = np.argsort(-scores, kind="stable")[: len(drafts)]
        scores, truths = scores[beam], truths[beam]
    kept = np.argsort(-np.concatenate(all_scores), kind="stable")[: num_draft_tokens - 1]
    weights = np.concatenate(all_truths)[kept]
    return np.bincount(np.concatenate(depths)[kept], weights=weights, minlength=len(drafted) + 1)[1:]
