"""How the reference turns target logits into tokens: greedy, or by the coins of each request; a batch mixes both."""

from __future__ import annotations

import numpy as np

from ...core.contract.request import SamplingParams
from ...core.tree.build import VerifyTree
from ...core.tree.verify import (
    Verified,
    argmax_tokens,
    draw_coins,
    sample_tokens,
    target_distribution,
    verify_greedy,
    verify_sampling,
)

SEED = 0


def sample(params: list[SamplingParams], keys: list[int], positions: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Return the token int32 [n] after each prefix whose last token is at `positions`; −1 where the target failed."""
    if all(p.is_greedy for p in params):
        return argmax_tokens(logits)
    probs = _distribution(params, logits)
    coins = draw_coins(SEED, np.array(keys, dtype=np.uint64), positions, 1).bonus[:, 0]
    failed = ~np.isfinite(probs).all(axis=1)
    return np.where(failed, -1, sample_tokens(np.nan_to_num(probs), coins)).astype(np.int32)


def verify(
    params: list[SamplingParams], keys: list[int], lengths: np.ndarray, tree: VerifyTree, logits: np.ndarray
) -> Verified:
    """Accept a path of every tree; `logits` [bs · nd, V], `lengths` int64 [bs] the positions of the roots."""
    if all(p.is_greedy for p in params):
        return verify_greedy(tree, argmax_tokens(logits))
    probs = _distribution([p for p in params for _ in range(tree.num_draft_tokens)], logits)
    return verify_sampling(tree, probs, draw_coins(SEED, np.array(keys, dtype=np.uint64), lengths, tree.width))


def _distribution(params: list[SamplingParams], logits: np.ndarray) -> np.ndarray:
    return target_distribution(
        logits,
        np.array([p.temperature for p in params]),
        np.array([p.top_p for p in params]),
        np.array([p.top_k for p in params]),
    )
