"""From the target's logits to tokens (greedy, or by the coins of each request), and their per-token outputs as
results carry them."""

from __future__ import annotations

import numpy as np

from ....core.contract.request import SamplingParams
from ....core.tree.build import VerifyTree
from ....core.tree.outputs import NodeOutputs
from ....core.tree.verify import (
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


def as_columns(outputs: NodeOutputs, shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """Return user outputs [bs, width, …] from compacted node outputs of stride nd;
    where the width exceeds nd the rest is zeros."""
    bs, width = shape
    columns = {}
    for name in outputs:
        array = outputs[name]
        if array is None:
            continue
        nodes = array.shape[0] // bs
        by_row = array.reshape(bs, nodes, *array.shape[1:])
        padded = np.zeros((bs, width, *array.shape[1:]), dtype=array.dtype)
        padded[:, : min(width, nodes)] = by_row[:, :width]
        columns[name] = padded
    return columns


def by_name(outputs: list[dict[str, np.ndarray] | None]) -> dict[str, np.ndarray] | None:
    """Return per-chunk outputs [1, …] joined to [n, …] per name; zeros for chunks that have none of it."""
    found = {name: array for entry in outputs if entry is not None for name, array in entry.items()}
    if not found:
        return None
    return {
        name: np.concatenate([(entry or {}).get(name, np.zeros_like(array)) for entry in outputs])
        for name, array in found.items()
    }
