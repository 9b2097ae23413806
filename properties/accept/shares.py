"""Is what is emitted distributed as the target's? Many equal rows, whose coins cover the unit square evenly, and a count.

Chance plays no part. The coins that lead to one token form a box, or a few boxes, and a grid of midpoints measures a box's share with an
error whose bound is known beforehand.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from . import inputs
from .contract import AcceptConfig, Batch
from .model import Answer, Shares


def equal_rows(config: AcceptConfig, shape: tuple[int, int, int], seed: int, num_rows: int) -> Batch:
    """Make rows without KV of their own (all windows are the sink), with the same root and candidates."""
    found = inputs.candidates(shape, 1, config.vocab_size, seed)
    candidates = (inputs.frozen(np.repeat(array, num_rows, axis=0)) for array in found)
    roots, seq_lens = (np.full(num_rows, value, np.int64) for value in (seed % config.vocab_size, 1))
    return Batch(roots, seq_lens, config.context_len - 1, np.zeros((num_rows, shape[2]), np.int64), *candidates)


def drafted_rows(config: AcceptConfig, seed: int) -> tuple[Batch, np.ndarray, np.ndarray, np.ndarray]:
    """Make one-step chains, as many as the grid has coins for each token that the draft may draw. Returns the batch, the target's
    and the draft's probabilities float64 [2, V] of a row's nodes, and the rows' weights."""
    vocab = config.vocab_size
    no_tree = np.zeros((1, 1), np.int64), np.full((1, 1), -1, np.int64)
    target, leaf = (inputs.probabilities(*no_tree, vocab, seed + more, 0)[0] for more in (0, 1))
    draft = np.zeros(vocab)
    for place, mass in ((seed, 0.5), (seed * 3 + 1, 0.25), (seed * 5 + 2, 0.25)):
        draft[place % vocab] += mass
    drawn = np.flatnonzero(draft)
    rows = len(drawn) * inputs.GRID
    batch = equal_rows(config, (1, 1, 2), seed, rows)._replace(tokens=np.repeat(drawn, inputs.GRID)[:, None])
    weights = np.repeat(draft[drawn], inputs.GRID) / inputs.GRID
    return batch, np.stack([target, leaf]), np.stack([draft, draft]), weights


def shares_of(answer: Answer, weights: np.ndarray, tokens: list[int], parents: list[int], probs: np.ndarray) -> Shares:
    """Add up what the rows emit, each with its weight. `tokens` and `parents` of one row, `probs` float64 [nd, V] of its nodes."""
    first, second = Counter(), Counter()
    impossible = None
    for (row, path, emitted), weight in zip(answer.walks, weights.tolist(), strict=True):
        first[emitted[0]] += weight
        if len(emitted) > 2:
            second[emitted[0], emitted[1]] += weight
        for node, token in zip(path, emitted, strict=True):
            if not (0 <= token < probs.shape[1] and probs[node, token] > 0):
                impossible = impossible or (row, token)
    should = {token: float(mass) for token, mass in enumerate(probs[0])}
    should_second: dict[tuple[int, int], float] = {}
    for node, parent in enumerate(parents):
        if parent > 0 and parents[parent] == 0:
            pair = (tokens[parent], tokens[node])
            should_second[pair] = float(probs[0, pair[0]] * probs[parent, pair[1]])
    return Shares(
        {token: (first[token], should.get(token, 0.0)) for token in sorted({*first, *should})},
        {pair: (second[pair], should_second.get(pair, 0.0)) for pair in sorted({*second, *should_second})},
        impossible,
    )
