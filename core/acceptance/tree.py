"""How deep the accepted path of a draft tree goes, from the acceptance of the first choice at each depth."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..errors import ConfigError, Problem

MAX_DEPTH = 64


def tree_survival(
    conditional_at: Callable[[int], float], topk: int, steps: int, num_draft_tokens: int, rank_ratio: float
) -> np.ndarray:
    """The probability that the accepted path reaches depth 1 … steps: float64 [steps]. See `for_tree`."""
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
    beam = np.ones(1)
    values, depths = [], []
    for depth in range(1, steps + 1):
        p = conditional_at(depth)
        ranks = p * (rank_ratio * (1.0 - p)) ** np.arange(topk)
        candidates = (beam[:, None] * ranks).reshape(-1)
        values.append(candidates)
        depths.append(np.full(candidates.size, depth))
        beam = candidates[np.argsort(-candidates, kind="stable")[:topk]]
    value, depth_of = np.concatenate(values), np.concatenate(depths)
    kept = np.argsort(-value, kind="stable")[: num_draft_tokens - 1]
    return np.bincount(depth_of[kept], weights=value[kept], minlength=steps + 1)[1:]
