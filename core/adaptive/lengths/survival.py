"""From confidences to the drafts of a batch that are worth verifying.

The confidence of a draft is the probability that the draft model itself gives its first choice. Its log-odds x, within
±40, are mapped to the probability that the target accepts the draft at position k, if it accepts those before:

    p = 1 / (1 + exp(−(slope[k] · x + bias[k])))        survival[k] = p[1] · … · p[k]

The drafts of a batch are ordered by survival. Survival falls along a row, so the first B of all rows are the first few
of each row. A row whose confidences are not all in 0 … 1 counts as certain: it verifies as many as it may.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...contract.arrays import BoolArray, Float64Array, Int32Array

MOST_LOG_ODDS = 40.0


def log_odds(confidence: np.ndarray) -> Float64Array:
    """Return log(c / (1 − c)) within ±40, float64 of the same shape; 40 where there is no number."""
    c = np.asarray(confidence, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        odds = np.log(c) - np.log1p(-c)
    clipped: Float64Array = np.clip(np.nan_to_num(odds, nan=MOST_LOG_ODDS), -MOST_LOG_ODDS, MOST_LOG_ODDS)
    return clipped


def are_valid(confidence: np.ndarray) -> BoolArray:
    """Return for each row, bool [bs], whether all its confidences [bs, steps] are in 0 … 1."""
    return np.asarray(((confidence >= 0) & (confidence <= 1)).all(axis=1))


def sigmoid(x: np.ndarray) -> Float64Array:
    """Return 1 / (1 + exp(−x)), float64 of the same shape."""
    with np.errstate(over="ignore"):  # temperatures far below 1: the result is 0
        return np.asarray(1.0 / (1.0 + np.exp(-x)), dtype=np.float64)


def acceptance_of(confidence: np.ndarray, slopes: float | Sequence[float], biases: Sequence[float]) -> Float64Array:
    """Return the probability that each draft is accepted if those before it are, float64 [bs, steps]. It is 1 for rows
    without valid confidences. `slopes`: one for all positions, or one for each."""
    steps = confidence.shape[1]
    slope = slopes if isinstance(slopes, float | int) else np.asarray(slopes[:steps], dtype=np.float64)
    x = slope * log_odds(confidence) + np.asarray(biases[:steps], dtype=np.float64)
    p = sigmoid(x)
    p[~are_valid(confidence)] = 1.0
    return p


def choose_nodes(survival: np.ndarray, most_nodes: np.ndarray, drafts: int) -> Int32Array:
    """Return the nodes that each row verifies, root included, int32 [bs].

    `survival` [bs, steps] does not rise along a row; `most_nodes` int [bs] are the most nodes of each row. The
    `drafts` drafts of greatest survival are verified; among equals those of the earlier position, then those of the
    earlier row come first.
    """
    bs, steps = survival.shape
    allowed = np.arange(1, steps + 1) < np.asarray(most_nodes)[:, None]
    by_position = np.where(allowed, survival, -1.0).T.ravel()
    order = np.argsort(-by_position, kind="stable")[: max(0, min(drafts, int(np.count_nonzero(allowed))))]
    return (1 + np.bincount(order % bs, minlength=bs)).astype(np.int32) if bs else np.zeros(0, np.int32)
