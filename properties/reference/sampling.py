"""How the reference turns target logits into tokens: greedy, tree sampling, or sample first and match afterwards.

Matching draws the target's token at every node by that position's coin and then verifies greedily against it. It has the same
distribution as tree sampling, and the token at a position depends on the prefix and the request's seed alone, so that sampled output
is as independent of mode, algorithm and batch as greedy output is.
"""

from __future__ import annotations

from enum import Enum

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


class SamplingRule(Enum):
    TREE = "tree"
    MATCH = "match"


class TargetSampler:
    """Samples and verifies for batches that mix greedy and sampling requests."""

    def __init__(self, rule: SamplingRule, seed: int = 0) -> None:
        self.rule = rule
        self.seed = seed

    def sample(
        self, params: list[SamplingParams], keys: list[int], positions: np.ndarray, logits: np.ndarray
    ) -> np.ndarray:
        """The token int32 [n] after each prefix whose last token is at `positions`; −1 where the target failed."""
        if all(p.is_greedy for p in params):
            return argmax_tokens(logits)
        probs = _distribution(params, logits)
        coins = draw_coins(self.seed, np.array(keys, dtype=np.uint64), positions, 1).bonus[:, 0]
        return self._draw(probs, coins)

    def verify(
        self,
        params: list[SamplingParams],
        keys: list[int],
        lengths: np.ndarray,
        tree: VerifyTree,
        depths: np.ndarray,
        logits: np.ndarray,
    ) -> Verified:
        """Accept a path of every tree; `depths` int [bs, nd] of the nodes, `logits` [bs · nd, V]."""
        if all(p.is_greedy for p in params):
            return verify_greedy(tree, argmax_tokens(logits))
        nodes = depths.shape[1]
        probs = _distribution([p for p in params for _ in range(nodes)], logits)
        coins = draw_coins(self.seed, np.array(keys, dtype=np.uint64), lengths, tree.width)
        if self.rule is SamplingRule.TREE:
            return verify_sampling(tree, probs, coins)
        by_node = np.take_along_axis(coins.bonus, np.minimum(depths, tree.width - 1), axis=1)
        return verify_greedy(tree, self._draw(probs, by_node.ravel()))

    @staticmethod
    def _draw(probs: np.ndarray, coins: np.ndarray) -> np.ndarray:
        failed = ~np.isfinite(probs).all(axis=1)
        return np.where(failed, -1, sample_tokens(np.nan_to_num(probs), coins)).astype(np.int32)


def _distribution(params: list[SamplingParams], logits: np.ndarray) -> np.ndarray:
    return target_distribution(
        logits,
        np.array([p.temperature for p in params]),
        np.array([p.top_p for p in params]),
        np.array([p.top_k for p in params]),
    )
